// Client of the admin API. Errors are thrown as a `Problem` with the server's title and detail.
import { session } from './session.svelte';

export class Problem extends Error {
  constructor(
    readonly status: number,
    readonly title: string,
    readonly detail: string,
    readonly field: string | null = null,
    /** The response body, for problems with extra fields. */
    readonly body: unknown = null,
  ) {
    super(detail || title);
  }

  /** Whether the server does not have this path: it is of another version. */
  get isMissing(): boolean {
    return this.status === 501 || (this.status === 404 && (this.body as { type?: string } | null)?.type === 'urn:tollgate:problem:no-such-path');
  }
}

async function problemOf(answer: Response): Promise<Problem> {
  const text = await answer.text().catch(() => '');
  try {
    const body = JSON.parse(text);
    return new Problem(answer.status, body.title ?? answer.statusText, body.detail ?? '', body.field ?? null, body);
  } catch {
    return new Problem(answer.status, answer.statusText || `status ${answer.status}`, text.slice(0, 500));
  }
}

export async function send(method: string, path: string, body?: BodyInit | null, headers?: HeadersInit): Promise<Response> {
  let answer: Response;
  try {
    answer = await fetch(path, { method, body: body ?? null, headers: headers ?? {}, credentials: 'same-origin' });
  } catch {
    throw new Problem(0, 'Server unreachable', 'is it running?');
  }
  if (answer.ok) return answer;
  const problem = await problemOf(answer);
  // The session has expired.
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

/** A path with its values percent-encoded. */
export function path(parts: TemplateStringsArray, ...values: (string | number)[]): string {
  return parts.reduce((whole, part, i) => whole + part + (i < values.length ? encodeURIComponent(String(values[i])) : ''), '');
}

/** A query string of the values that are not empty. */
export function query(words: Record<string, string | number | null | undefined>): string {
  const set = Object.entries(words).filter(([, value]) => value !== '' && value !== null && value !== undefined);
  if (set.length === 0) return '';
  return '?' + set.map(([name, value]) => `${encodeURIComponent(name)}=${encodeURIComponent(String(value))}`).join('&');
}

/** The query parameter that says which attribute a value in the path is of; none for an API key. */
export function keyOf(attribute: string): { key: string | null } {
  return { key: attribute === 'api_key' ? null : attribute };
}

/** Whether a change was rejected only because it was not confirmed. */
export function needsConfirmation(problem: Problem | null): boolean {
  return problem?.status === 409 && problem.title === 'Confirmation required';
}

export function asProblem(error: unknown): Problem {
  return error instanceof Problem ? error : new Problem(0, 'Unexpected error', error instanceof Error ? error.message : String(error));
}
