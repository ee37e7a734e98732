/**
 * What every middleware does, apart from its framework: identify the caller, check, and say what to respond. Fields and
 * bodies are those of the gateway, so that clients need not know which of the two stands before a service.
 */

import { AmbiguousIdentityError, Identity, type IdentitySettings, type RequestHead } from "../identity/identity.js";
import { sleep, type LimitInput, type Ratelimit } from "../ratelimit.js";
import type { LimitResult } from "../result.js";

export interface GuardOptions<R = unknown> {
  readonly ratelimit: Ratelimit;
  /** How callers are identified: the settings of `identity` in the gateway. */
  readonly identity?: IdentitySettings;
  /** Changes what is checked: more attributes, another identifier, or `null` to let the request pass unchecked. */
  readonly input?: (attributes: Record<string, string>, request: R) => LimitInput | null | Promise<LimitInput | null>;
  /** Units of a request; default 1. */
  readonly cost?: number | ((request: R) => number);
  /**
   * Concurrency permits: `true` returns each when its response ends, `false` leaves them to their `ttl`. By default
   * (`auto`) the answers tell which endpoints have such limits, and only those take the second request that a return is.
   */
  readonly permits?: boolean | "auto";
  /** Longest time that a response may take before its permit expires, in milliseconds. Default 60,000. */
  readonly permitTtlMs?: number;
  /** Longest delay (`action: delay`) that is waited for, in milliseconds; longer ones get 503. Default 30,000. */
  readonly maxDelayMs?: number;
}

/** What to do with a request. */
export type Verdict =
  | { readonly proceed: true; readonly result: LimitResult | null; readonly fields: ReadonlyMap<string, string>; readonly release: (() => void) | null }
  | { readonly proceed: false; readonly result: LimitResult | null; readonly status: number; readonly fields: ReadonlyMap<string, string>; readonly body: string };

const TYPES = "https://iana.org/assignments/http-problem-types#";
const MAX_ENDPOINTS = 1_024;
const UNCHECKED: Verdict = { proceed: true, result: null, fields: new Map(), release: null };

export class Guard<R = unknown> {
  readonly #options: GuardOptions<R>;
  readonly #identity: Identity;
  /** Whether an endpoint's answers had a concurrency limit. Unknown ones might. */
  readonly #concurrent = new Map<string, boolean>();

  constructor(options: GuardOptions<R>) {
    this.#options = options;
    this.#identity = new Identity(options.identity);
  }

  async decide(head: RequestHead, request: R): Promise<Verdict> {
    const { ratelimit, input, cost: costOf, permits = "auto", permitTtlMs = 60_000, maxDelayMs = 30_000 } = this.#options;
    let attributes: Record<string, string>;
    try {
      attributes = this.#identity.attributes(head);
    } catch (error) {
      if (!(error instanceof AmbiguousIdentityError)) throw error;
      return refuse(400, null, new Map(), { type: "about:blank", title: "Bad request", status: 400, detail: error.message });
    }
    const checked = input === undefined ? attributes : await input(attributes, request);
    if (checked === null) return UNCHECKED;
    const cost = typeof costOf === "function" ? costOf(request) : (costOf ?? 1);
    const endpoint = attributes["endpoint"] ?? "";
    const mayHold = permits === "auto" ? (this.#concurrent.get(endpoint) ?? true) : permits;
    const reserve = mayHold && cost > 0;
    const outcome = await ratelimit.check(checked, reserve ? { cost, reserve, ttlMs: permitTtlMs } : { cost });
    const { result, reservation } = outcome;
    if (result.source === "server") this.#learn(endpoint, outcome.concurrent);
    if (!result.allowed) return denial(result, outcome.fields);
    const release = reservation !== null && outcome.concurrent ? once(() => { reservation.settle(cost).catch(() => undefined); }) : null;
    if (result.delayMs > maxDelayMs) {
      release?.();
      return unavailable(result, outcome.fields, Math.ceil(result.delayMs / 1000));
    }
    if (result.delayMs > 0) await sleep(result.delayMs);
    return { proceed: true, result, fields: outcome.fields, release };
  }

  #learn(endpoint: string, concurrent: boolean): void {
    const known = this.#concurrent.get(endpoint);
    if (known === true || known === concurrent) return;
    if (known !== undefined || this.#concurrent.size < MAX_ENDPOINTS) this.#concurrent.set(endpoint, concurrent);
  }
}

function denial(result: LimitResult, fields: ReadonlyMap<string, string>): Verdict {
  const seconds = Number(fields.get("retry-after") ?? (result.retryAfterMs === null ? 1 : Math.ceil(result.retryAfterMs / 1000)));
  if (result.reason === "rejected") {
    return refuse(400, result, fields, { type: "about:blank", title: "Bad request", status: 400, detail: "The request could not be checked." });
  }
  if (result.reason !== "denied") return unavailable(result, fields, seconds);
  const body: Record<string, unknown> = {
    type: `${TYPES}quota-exceeded`, title: "Over the limit", status: 429, detail: `Rate limit exceeded. Retry after ${plural(seconds)}.`, retry_after: seconds,
  };
  if (result.rule !== null) body["violated-policies"] = [result.rule];
  if (result.decisionId !== null) body["decision_id"] = result.decisionId;
  return refuse(429, result, fields, body, seconds);
}

function unavailable(result: LimitResult, fields: ReadonlyMap<string, string>, seconds: number): Verdict {
  const body: Record<string, unknown> = {
    type: `${TYPES}temporary-reduced-capacity`, title: "Temporarily unavailable", status: 503,
    detail: `The request could not be checked. Retry after ${plural(seconds)}.`, retry_after: seconds,
  };
  if (result.decisionId !== null) body["decision_id"] = result.decisionId;
  return refuse(503, result, fields, body, seconds);
}

function refuse(status: number, result: LimitResult | null, fields: ReadonlyMap<string, string>, body: Record<string, unknown>, retryAfter?: number): Verdict {
  const all = new Map(fields);
  if (retryAfter !== undefined) all.set("retry-after", String(retryAfter));
  all.set("content-type", "application/problem+json");
  return { proceed: false, result, status, fields: all, body: JSON.stringify(body) };
}

function plural(seconds: number): string {
  return seconds === 1 ? "1 second" : `${seconds} seconds`;
}

function once(action: () => void): () => void {
  let isDone = false;
  return () => {
    if (isDone) return;
    isDone = true;
    action();
  };
}

/** The lines of Node's raw headers. */
export function rawLines(raw: readonly string[]): (name: string) => string[] {
  return (name) => {
    const lines: string[] = [];
    for (let at = 0; at + 1 < raw.length; at += 2) if (raw[at]?.toLowerCase() === name) lines.push(raw[at + 1] as string);
    return lines;
  };
}

/** The head of a `Request`. */
export function fetchHead(request: Request, peer: string | undefined): RequestHead {
  const lines = (name: string): string[] => {
    const value = request.headers.get(name);
    return value === null ? [] : [value];
  };
  // Some platforms keep the host in the URL only.
  const host = new URL(request.url).host;
  return { method: request.method, target: request.url, peer, joined: true, lines: (name) => (name === "host" && !request.headers.has("host") ? [host] : lines(name)) };
}

/** Calls `release` when a body has been read to its end, or is given up. */
export function releaseAfter(body: ReadableStream<Uint8Array> | null, release: () => void): ReadableStream<Uint8Array> | null {
  if (body === null) {
    release();
    return null;
  }
  const reader = body.getReader();
  return new ReadableStream<Uint8Array>({
    async pull(controller) {
      try {
        const { done, value } = await reader.read();
        if (!done) return controller.enqueue(value);
        release();
        controller.close();
      } catch (error) {
        release();
        controller.error(error);
      }
    },
    cancel(reason) {
      release();
      return reader.cancel(reason);
    },
  });
}
