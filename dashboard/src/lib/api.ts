// Asking the admin API. What goes wrong comes as a `Problem`, with the server's own words.
import { session } from './session.svelte';

export class Problem extends Error {
  constructor(
    readonly status: number,
    readonly title: string,
    readonly detail: string,
    readonly place: string | null = null,
    /** The whole body, for answers that carry more than words. */
    readonly body: unknown = null,
  ) {
    super(detail || title);
  }

  /** The server does not have this path at all: it is of another version. */
  get isMissing(): boolean {
    return this.status === 501 || (this.status === 404 && this.detail.startsWith('there is nothing at'));
  }
}

async function problemOf(answer: Response): Promise<Problem> {
  const text = await answer.text().catch(() => '');
  try {
    const body = JSON.parse(text);
    return new Problem(answer.status, body.title ?? answer.statusText, body.detail ?? '', body.place ?? null, body);
  } catch {
    return new Problem(answer.status, answer.statusText || `status ${answer.status}`, text.slice(0, 500));
  }
}

export async function send(method: string, path: string, body?: BodyInit | null, headers?: HeadersInit): Promise<Response> {
  let answer: Response;
  try {
    answer = await fetch(path, { method, body: body ?? null, headers: headers ?? {}, credentials: 'same-origin' });
  } catch {
    throw new Problem(0, 'No answer', 'the server does not answer; is it running?');
  }
  if (answer.ok) return answer;
  const problem = await problemOf(answer);
  // A session that has ended meanwhile: back to the log-in page.
  if (problem.status === 401 && !path.endsWith('/session')) session.needsLogin();
  throw problem;
}

export async function get<T>(path: string): Promise<T> {
  return (await send('GET', path)).json() as Promise<T>;
}

export async function change<T>(method: 'POST' | 'PUT' | 'DELETE', path: string, body?: unknown, headers: Record<string, string> = {}): Promise<T> {
  const sent = body === undefined ? null : JSON.stringify(body);
  if (sent !== null) headers = { 'content-type': 'application/json', ...headers };
  const answer = await send(method, path, sent, headers);
  const text = await answer.text();
  return (text ? JSON.parse(text) : null) as T;
}

/** A path with what people wrote in it. */
export function path(parts: TemplateStringsArray, ...values: (string | number)[]): string {
  return parts.reduce((whole, part, i) => whole + part + (i < values.length ? encodeURIComponent(String(values[i])) : ''), '');
}

/** A query of what is not empty. */
export function query(words: Record<string, string | number | null | undefined>): string {
  const set = Object.entries(words).filter(([, value]) => value !== '' && value !== null && value !== undefined);
  if (set.length === 0) return '';
  return '?' + set.map(([name, value]) => `${encodeURIComponent(name)}=${encodeURIComponent(String(value))}`).join('&');
}

export function asProblem(error: unknown): Problem {
  return error instanceof Problem ? error : new Problem(0, 'It went wrong', error instanceof Error ? error.message : String(error));
}
