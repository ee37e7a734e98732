/**
 * What every middleware does, apart from its framework: send the head of the request, check, and say what to respond.
 * Fields and bodies are those of the gateway, so that clients need not know which of the two stands before a service.
 */

import { sleep, type CheckOutcome, type LimitInput, type Ratelimit } from "../ratelimit.js";
import type { LimitResult } from "../result.js";
import { endpointOf, Endpoints } from "./endpoints.js";
import type { ReceivedHead } from "./head.js";
import type { Permit } from "./permit.js";

export interface GuardOptions<R = unknown> {
  readonly ratelimit: Ratelimit;
  /**
   * What the service itself knows of a caller: attributes, which go before those that the server finds in the request
   * head. `null` lets the request pass unchecked.
   */
  readonly identify?: (request: R) => LimitInput | null | Promise<LimitInput | null>;
  /** Whether the server sees the request head; default true. `false` checks what `identify` returns, and nothing else. */
  readonly head?: boolean;
  /** The address that connected, if the framework does not have it (Unix sockets) or has another one. */
  readonly peer?: (request: R) => string | null | undefined;
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
  /** Given each permit's return. Workers end with their response unless they wait: `(done, c) => c.executionCtx.waitUntil(done)`. */
  readonly waitUntil?: (done: Promise<unknown>, request: R) => void;
}

/** What to do with a request. */
export type Verdict =
  | { readonly proceed: true; readonly result: LimitResult | null; readonly fields: ReadonlyMap<string, string> }
  | { readonly proceed: false; readonly result: LimitResult | null; readonly status: number; readonly fields: ReadonlyMap<string, string>; readonly body: string };

const TYPES = "https://iana.org/assignments/http-problem-types#";
const UNCHECKED: Verdict = { proceed: true, result: null, fields: new Map() };
/** nginx's status for a client that has left; it is not read. */
const CLIENT_LEFT = 499;

export class Guard<R = unknown> {
  readonly #options: GuardOptions<R>;
  readonly #endpoints = new Endpoints();

  constructor(options: GuardOptions<R>) {
    if (options.head === false && options.identify === undefined) throw new TypeError("`head: false` without `identify`; write what is to be checked");
    this.#options = options;
  }

  /** Decides on a request. `permit` ends when the request does; what the check holds is then given back. */
  async decide(head: ReceivedHead, request: R, permit: Permit): Promise<Verdict> {
    const { ratelimit, cost: costOf, permits = "auto", permitTtlMs = 60_000, maxDelayMs = 30_000 } = this.#options;
    if (permit.ended) return left(null);
    const input = await this.#input(head, request);
    if (input === null) return UNCHECKED;
    const cost = typeof costOf === "function" ? costOf(request) : (costOf ?? 1);
    const endpoint = endpointOf(head.method, head.target);
    const reserve = cost > 0 && (permits === "auto" ? this.#endpoints.mayHold(endpoint) : permits);
    const outcome = await ratelimit.check(input, reserve ? { cost, reserve, ttlMs: permitTtlMs } : { cost });
    const { result } = outcome;
    // A denial says nothing of the other limits.
    if (result.source === "server" && (result.allowed || outcome.concurrent)) this.#endpoints.learn(endpoint, outcome.concurrent);
    if (!result.allowed) return denial(result, outcome.fields);
    this.#hold(outcome, cost, request, permit);
    if (result.delayMs > maxDelayMs) {
      permit.end();
      return unavailable(result, outcome.fields, Math.ceil(result.delayMs / 1000));
    }
    if (result.delayMs > 0) await sleep(result.delayMs);
    return permit.ended ? left(result) : { proceed: true, result, fields: outcome.fields };
  }

  async #input(head: ReceivedHead, request: R): Promise<LimitInput | null> {
    const { identify, head: sendHead = true, ratelimit } = this.#options;
    const own = identify === undefined ? undefined : await identify(request);
    if (own === null) return null;
    if (!sendHead) return own as LimitInput;
    const peer = this.#options.peer === undefined ? head.peer : this.#options.peer(request);
    const { method, target } = head;
    // An IPv6 address may have a zone, which is this machine's own word for an interface.
    const received = { method, target, peer: address(peer), headers: head.headers() };
    if (own === undefined) return { request: received };
    return { request: received, attributes: ratelimit.attributesOf(own) };
  }

  /** Every reservation is ended, also one that holds no permit: the server stores it until then. */
  #hold({ reservation }: CheckOutcome, cost: number, request: R, permit: Permit): void {
    if (reservation === null) return;
    permit.hold(() => {
      // It does not reject for what a server does; what is not returned now is returned by its `ttl`.
      const done = reservation.settle(cost);
      this.#options.waitUntil?.(done, request);
    });
  }
}

function address(peer: string | null | undefined): string {
  if (peer == null || peer === "") {
    throw new TypeError("the peer's address is unknown; write `peer: (request) => …` with the address that your platform has, or \"127.0.0.1\" for a Unix socket behind a proxy of this machine");
  }
  return peer.split("%", 1)[0] as string;
}

function denial(result: LimitResult, fields: ReadonlyMap<string, string>): Verdict {
  const said = fields.get("retry-after") ?? "";
  // Null: a request that can never pass has no time.
  const seconds = /^\d{1,15}$/.test(said) ? Number(said) : result.retryAfterMs === null ? null : Math.max(1, Math.ceil(result.retryAfterMs / 1000));
  if (result.problem !== null) {
    const all = new Map(fields).set("content-type", "application/problem+json");
    return { proceed: false, result, status: result.problem.status, fields: all, body: result.problem.body };
  }
  if (result.reason === "rejected") {
    return refuse(400, result, fields, { type: "about:blank", title: "Bad request", status: 400, detail: "The request could not be checked." });
  }
  if (result.reason !== "denied") return unavailable(result, fields, seconds ?? 1);
  const own = result.response, status = own?.status ?? 429;
  if (own !== null && own.body !== null) {
    const all = new Map(fields).set("content-type", own.contentType ?? "application/json");
    if (seconds !== null) all.set("retry-after", String(seconds));
    return { proceed: false, result, status, fields: all, body: own.body };
  }
  const body: Record<string, unknown> = {
    type: `${TYPES}quota-exceeded`, title: "Over the limit", status, detail: `Rate limit exceeded.${seconds === null ? "" : ` Retry after ${plural(seconds)}.`}`,
  };
  if (seconds !== null) body["retry_after"] = seconds;
  if (result.rule !== null) body["violated-policies"] = [result.rule];
  if (result.decisionId !== null) body["decision_id"] = result.decisionId;
  return refuse(status, result, fields, body, seconds ?? undefined);
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

/** The client has left during the check: its request is not worth the handler's work. */
function left(result: LimitResult | null): Verdict {
  return { proceed: false, result, status: CLIENT_LEFT, fields: new Map(), body: "" };
}

function plural(seconds: number): string {
  return seconds === 1 ? "1 second" : `${seconds} seconds`;
}
