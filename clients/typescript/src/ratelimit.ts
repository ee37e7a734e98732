/**
 * The client: asks a Tollgate server whether a request may pass. `limit` never throws for what a server or the network
 * does; the fail policy decides then, and the result says so. It rejects only if the caller's own signal is aborted, and
 * throws on arguments that no server would accept.
 */

import { parseAnswer, parseEnd, type Answer, type EndResult } from "./answer.js";
import { DenyCache } from "./deny-cache.js";
import { attemptTime, effectiveDeadline, ServerOrder } from "./failover.js";
import { hedge, type HedgeVerdict } from "./hedge.js";
import { LatencyP95 } from "./latency-p95.js";
import { RetryBudget } from "./pace/retry.js";
import { policyResult, SETTLED, type Fault, type LimitResult } from "./result.js";
import { post, readBody, type Reply, type Server } from "./transport.js";

/** What is checked: the caller's identifier, attributes, descriptors as Envoy sends them, or the head of a request. */
export type LimitInput = string | Attributes | { readonly descriptors: readonly Descriptor[] } | HeadInput;
export type Attributes = Readonly<Record<string, string>>;

/** The head of a request that this program has received; the server identifies its caller, as the gateway would. */
export interface HeadInput {
  readonly request: RequestHead;
  /** Added to what the server finds in the head, and going before it. */
  readonly attributes?: Attributes;
}

/** Each character of a string is one byte of the head (ISO 8859-1), as Node and `Headers` hand them out. */
export interface RequestHead {
  readonly method: string;
  /** As received: the path with its query, or a URL. */
  readonly target: string;
  /** The address that connected to this program, without a port. */
  readonly peer: string;
  /** In the order of the message, repeated names included. */
  readonly headers: readonly (readonly [name: string, value: string])[];
}

/** The period of an inline limit: a unit, or a length of 1 ms to ten years. */
export type InlineUnit = "second" | "minute" | "hour" | "day" | "week" | "month" | "year" | `${number}${"ms" | "s" | "m" | "h" | "d"}`;

export interface Descriptor {
  readonly entries: readonly (readonly [key: string, value: string])[];
  readonly hits?: number;
  readonly limit?: { readonly requests_per_unit: number; readonly unit: InlineUnit };
}

export interface RatelimitOptions {
  /** Base URL of the server's HTTP API, or of several, in the order in which to ask them. */
  readonly url: string | readonly string[];
  /** The rule file's domain. */
  readonly domain: string;
  /** The attribute that an identifier is the value of. Default `api_key`. */
  readonly attribute?: string;
  /** Time for an answer, all servers together, in milliseconds. Default 50. */
  readonly timeout?: number;
  /** What to do if there is no answer: allow (`open`, the default) or deny (`closed`). */
  readonly failPolicy?: "open" | "closed";
  /**
   * Ask a second server if the first has not answered after this time in milliseconds, for at most a tenth of the calls. 3 is a good value on one
   * network; `"p95"` is the 95th percentile of the latency that this client measures (3 until it has measured 100). Default off.
   */
  readonly hedgeAfterMs?: number | "p95";
  /** Denials that this process repeats by itself. Default 10,000 entries; `false` asks every time. */
  readonly denyCache?: { readonly maxEntries: number } | false;
  /** Bearer token for the servers, or for the proxy before them. */
  readonly token?: string;
  /** More headers for each request. */
  readonly headers?: Readonly<Record<string, string>>;
  /** The admin API, for `resetUsedTokens`. */
  readonly admin?: { readonly url: string; readonly token?: string };
  /** Another `fetch`: with its own certificates, agent or instrumentation. */
  readonly fetch?: typeof fetch;
  /** Called for each server that could not be used. */
  readonly onFault?: (fault: { readonly server: string; readonly fault: Fault }) => void;
}

export interface LimitOptions {
  /** Units to charge; default 1. 0 is a peek. */
  readonly cost?: number;
  /** The caller's own deadline in milliseconds from now; the client's is never longer. */
  readonly deadlineMs?: number;
  /** Aborts the check: it then rejects with the signal's reason. */
  readonly signal?: AbortSignal;
}

export interface ReserveOptions extends LimitOptions {
  /** Time in milliseconds after which the reservation stands as it is; default 60,000. */
  readonly ttlMs?: number;
  /** The same key returns the same reservation. */
  readonly idempotencyKey?: string;
}

/** An estimated charge, to be settled or canceled at the server that made it. */
export interface Reservation {
  readonly id: string;
  /** Index of the server in `url`. */
  readonly server: number;
  /** Replaces the estimate by the actual cost. */
  settle(cost: number): Promise<EndResult>;
  /** Refunds everything. */
  cancel(): Promise<EndResult>;
}

export interface ReserveResult extends LimitResult {
  /** `null` if denied, or if the fail policy allowed it. */
  readonly reservation: Reservation | null;
}

/** A result with the response fields that a denied or allowed request is to carry. */
export interface CheckOutcome {
  readonly result: LimitResult;
  /** Tollgate's own fields (`ratelimit`, `retry-after`, …), lower case. */
  readonly fields: ReadonlyMap<string, string>;
  readonly reservation: Reservation | null;
  /** Whether a concurrency limit applied, so that a permit is held. */
  readonly concurrent: boolean;
}

interface Received {
  readonly answer: Answer;
  readonly headers: Headers | null;
}

interface CachedDenial {
  readonly result: LimitResult;
  readonly fields: ReadonlyMap<string, string>;
}

const NO_FIELDS: ReadonlyMap<string, string> = new Map();
/** How long a hedged reservation may wait for its cancellation; then it stands, as a check's charge does. */
const HEDGE_TTL_MS = 10_000;
/** How long a request goes on after the deadline if its charge would have to be given back. */
const LATE_MS = 1_000;
/** Time for a request to the admin API, which is not in the path of a request. */
const ADMIN_MS = 10_000;
/** The longest time that a timer can have; longer ones end at once. */
const MAX_TIMER_MS = 2_147_483_647;
/** The length up to which a denied request is a key of the deny cache: callers choose that of a request head. */
const MAX_CACHE_KEY = 4_096;
const FIELD = /^(?:ratelimit|x-ratelimit-|retry-after$|www-authenticate$)/;
const TIMERS = {
  now: (): number => performance.now(),
  set: (callback: () => void, ms: number): unknown => setTimeout(callback, ms),
  clear: (timer: unknown): void => clearTimeout(timer as ReturnType<typeof setTimeout>),
};

export class Ratelimit {
  readonly #options: RatelimitOptions;
  readonly #servers: readonly Server[];
  readonly #order: ServerOrder;
  readonly #hedges = new RetryBudget();
  readonly #latency: LatencyP95 | null;
  readonly #cache: DenyCache<CachedDenial> | null;
  readonly #attribute: string;
  readonly #prefix: string;
  readonly #timeout: number;

  constructor(options: RatelimitOptions) {
    const urls = typeof options.url === "string" ? [options.url] : options.url;
    if (urls.length === 0) throw new TypeError("no server; write `url: \"http://127.0.0.1:8080\"`");
    if (typeof options.domain !== "string" || options.domain === "") throw new TypeError("no domain; write the `domain` of a rule file");
    this.#options = options;
    const headers: Record<string, string> = { ...options.headers, "content-type": "application/json" };
    if (options.token !== undefined) headers["authorization"] = `Bearer ${options.token}`;
    // Looked up at each call: tests and instrumentation replace the global one.
    const request: typeof fetch = options.fetch ?? ((input, init) => fetch(input, init));
    this.#servers = urls.map((url) => ({ url: baseUrl(url), headers, fetch: request, suspect: false }));
    this.#order = new ServerOrder(urls.length);
    this.#cache = options.denyCache === false ? null : new DenyCache(options.denyCache?.maxEntries);
    this.#attribute = options.attribute ?? "api_key";
    this.#prefix = `{"domain":${JSON.stringify(options.domain)},`;
    this.#timeout = options.timeout ?? 50;
    const hedgeAfter: unknown = options.hedgeAfterMs;
    if (hedgeAfter !== undefined && hedgeAfter !== "p95" && !(typeof hedgeAfter === "number" && hedgeAfter >= 0)) {
      throw new TypeError(`invalid \`hedgeAfterMs\` ${JSON.stringify(hedgeAfter)}; write milliseconds, such as 3, or "p95"`);
    }
    this.#latency = hedgeAfter === "p95" ? new LatencyP95() : null;
    if (!(this.#timeout > 0)) throw new TypeError("`timeout` is not positive; write milliseconds, such as 50");
  }

  /** Charges `cost` units if every matching limit allows it. */
  async limit(input: LimitInput, options: LimitOptions = {}): Promise<LimitResult> {
    return (await this.#decide("check", input, options, false)).result;
  }

  /** As `limit`, without charging anything. */
  peek(input: LimitInput, options: Omit<LimitOptions, "cost"> = {}): Promise<LimitResult> {
    return this.limit(input, { ...options, cost: 0 });
  }

  /** What remains, without charging anything. */
  async getRemaining(input: LimitInput): Promise<{ remaining: number | null; limit: number | null; reset: number | null }> {
    const { remaining, limit, reset } = await this.peek(input);
    return { remaining, limit, reset };
  }

  /** Checks several requests at the same time, at most `concurrency` of them; results are in the order of `requests`. */
  async limitBatch(requests: readonly { readonly input: LimitInput; readonly cost?: number }[], options: Omit<LimitOptions, "cost"> & { readonly concurrency?: number } = {}): Promise<LimitResult[]> {
    const results = new Array<LimitResult>(requests.length);
    let next = 0;
    const work = async (): Promise<void> => {
      for (let at = next++; at < requests.length; at = next++) {
        const request = requests[at] as { readonly input: LimitInput; readonly cost?: number };
        results[at] = await this.limit(request.input, request.cost === undefined ? options : { ...options, cost: request.cost });
      }
    };
    const workers = Math.max(1, Math.min(options.concurrency ?? 16, requests.length));
    await Promise.all(Array.from({ length: workers }, work));
    return results;
  }

  /** Waits until the request is allowed, at most `timeoutMs`; returns the last result. A denial that lasts longer is returned at once. */
  async blockUntilReady(input: LimitInput, timeoutMs: number, options: LimitOptions = {}): Promise<LimitResult> {
    const deadline = performance.now() + timeoutMs;
    for (;;) {
      const result = await this.limit(input, options);
      if (result.allowed || result.retryAfterMs === null) return result;
      const wait = Math.max(1, result.retryAfterMs);
      if (performance.now() + wait > deadline) return result;
      await sleep(wait, options.signal);
    }
  }

  /** Charges an estimate, to be settled or canceled. */
  async reserve(input: LimitInput, options: ReserveOptions = {}): Promise<ReserveResult> {
    const { result, reservation } = await this.#decide("reserve", input, options, false);
    return { ...result, reservation };
  }

  /** Replaces a reservation's estimate by the actual cost. */
  settle(reservation: Pick<Reservation, "id" | "server">, cost: number): Promise<EndResult> {
    checkCost(cost);
    return this.#end("/v1/settle", reservation.server, `{"reservation":${JSON.stringify(reservation.id)},"cost":${cost}}`);
  }

  /** Refunds a reservation. */
  cancel(reservation: Pick<Reservation, "id" | "server">): Promise<EndResult> {
    return this.#end("/v1/cancel", reservation.server, `{"reservation":${JSON.stringify(reservation.id)}}`);
  }

  /** For middleware: the result with the response fields. `reserve` holds a concurrency permit until it is settled. */
  check(input: LimitInput, options: ReserveOptions & { readonly reserve?: boolean } = {}): Promise<CheckOutcome> {
    return this.#decide(options.reserve === true ? "reserve" : "check", input, options, true);
  }

  /** Sets an API key's usage to zero, through the admin API. */
  async resetUsedTokens(apiKey: string, reason = "reset by the client"): Promise<void> {
    const admin = this.#options.admin;
    if (admin === undefined) throw new TypeError("no admin API; write `admin: { url, token }`");
    const headers: Record<string, string> = { "content-type": "application/json" };
    if (admin.token !== undefined) headers["authorization"] = `Bearer ${admin.token}`;
    const request = this.#options.fetch ?? fetch;
    const url = `${baseUrl(admin.url)}/admin/v1/usage/${encodeURIComponent(apiKey)}/reset?domain=${encodeURIComponent(this.#options.domain)}`;
    // A redirect is another program: following it would send the token there.
    const init: RequestInit = { method: "POST", headers, body: JSON.stringify({ reason }), redirect: "manual", signal: AbortSignal.timeout(ADMIN_MS) };
    const response = await request(url, init);
    const body = (await readBody(response)) ?? "";
    if (!response.ok) throw new Error(`the usage was not reset: ${response.status} ${body.slice(0, 200)}`);
    this.#cache?.clear();
  }

  /** Forgets cached denials, for example after a limit was raised. */
  clearDenyCache(): void {
    this.#cache?.clear();
  }

  async #decide(kind: "check" | "reserve", input: LimitInput, options: ReserveOptions, wantFields: boolean): Promise<CheckOutcome> {
    const cost = options.cost ?? 1;
    checkCost(cost);
    const subject = this.#subject(input, cost);
    const sentAt = performance.now();
    const cacheKey = kind + subject;
    // The same idempotency key may have been granted before.
    const hit = options.idempotencyKey === undefined ? this.#cache?.lookup(cacheKey, cost, sentAt) : null;
    if (hit != null) return fromCache(hit.denial, Math.ceil(hit.retryAfterMs), Math.ceil(hit.resetMs));

    const deadlineMs = effectiveDeadline(this.#timeout, options.deadlineMs ?? null);
    const isHedged = this.#options.hedgeAfterMs !== undefined && this.#servers.length > 1 && cost > 0;
    const reserve = kind === "reserve" || isHedged;
    let body = `${this.#prefix}${subject}`;
    if (cost !== 1) body += `,"cost":${cost}`;
    if (kind === "reserve" && options.ttlMs !== undefined) body += `,"deadline_ms":${Math.ceil(options.ttlMs)}`;
    else if (isHedged && kind === "check") body += `,"deadline_ms":${HEDGE_TTL_MS}`;
    if (options.idempotencyKey !== undefined) body += `,"idempotency_key":${JSON.stringify(options.idempotencyKey)}`;
    body += "}";
    const path = reserve ? "/v1/reserve" : "/v1/check";
    const asked = isHedged ? await this.#askHedged(path, body, deadlineMs, options) : await this.#askInTurn(path, body, deadlineMs, options, sentAt);

    if (asked.received === null) {
      const result = policyResult(this.#options.failPolicy ?? "open", asked.fault);
      return { result: withPending(result, asked.pending), fields: NO_FIELDS, reservation: null, concurrent: false };
    }
    const { answer, headers } = asked.received;
    const result = withPending(answer.result, asked.pending);
    const fields = wantFields || answer.cacheable ? fieldsOf(headers) : NO_FIELDS;
    if (answer.cacheable && cost > 0 && cacheKey.length <= MAX_CACHE_KEY) {
      this.#cache?.denied(cacheKey, cost, sentAt, answer.result.retryAfterMs ?? 0, answer.result.resetMs ?? 0, { result: answer.result, fields });
    }
    const reservation = kind === "reserve" && answer.reservation !== null ? this.#reservation(answer.reservation, asked.server) : null;
    return { result, fields, reservation, concurrent: answer.concurrent };
  }

  /** Asks the servers one after the other, until one answers. */
  async #askInTurn(path: string, body: string, deadlineMs: number, options: LimitOptions, startedAt: number): Promise<Asked> {
    const order = this.#order.order(startedAt);
    let fault: Fault = "timeout", pending = SETTLED;
    for (let at = 0; at < order.length; at += 1) {
      const server = order[at] as number;
      const elapsed = at === 0 ? 0 : performance.now() - startedAt;
      const timeout = attemptTime(deadlineMs, elapsed, order.length - at);
      if (timeout === null) break;
      let received: Received | null;
      if (path === "/v1/reserve") {
        const attempt = this.#sendReservation(server, path, body, timeout, options.signal);
        received = await attempt.first;
        if (attempt.isLate()) pending = attempt.whole;
      } else {
        received = await this.#send(server, path, body, timeout, options.signal);
      }
      if (received.answer.kind === "decision") return { received: received as Decided, fault, server, pending };
      fault = received.answer.fault;
    }
    return { received: null, fault, server: -1, pending };
  }

  /** A reservation that is answered after its time is canceled, so that its charge does not stand for nothing. */
  #sendReservation(server: number, path: string, body: string, timeout: number, signal?: AbortSignal): { first: Promise<Received>; whole: Promise<void>; isLate: () => boolean } {
    let isLate = false;
    let timer: unknown;
    const sent = this.#send(server, path, body, timeout + LATE_MS, signal);
    const late = new Promise<Received>((resolve) => {
      timer = TIMERS.set(() => {
        isLate = true;
        this.#report(server, "timeout");
        resolve({ answer: { kind: "fault", fault: "timeout" }, headers: null });
      }, timeout);
    });
    const whole = sent.then(async (received) => {
      TIMERS.clear(timer);
      if (isLate) await this.#discard(server, received);
    }, () => TIMERS.clear(timer));
    return { first: Promise.race([sent, late]), whole, isLate: () => isLate };
  }

  async #askHedged(path: string, body: string, deadlineMs: number, options: LimitOptions): Promise<Asked> {
    options.signal?.throwIfAborted();
    const { hedgeAfterMs } = this.#options;
    const outcome = await hedge<Received>({
      order: this.#order.order(performance.now()),
      hedgeAfterMs: typeof hedgeAfterMs === "number" ? hedgeAfterMs : this.#latency?.estimateMs ?? 0,
      deadlineMs,
      // Not aborted with the caller: whether it was charged must become known.
      send: (server) => this.#send(server, path, body, deadlineMs + LATE_MS),
      verdict: ({ answer }) => verdictOf(answer),
      budget: this.#hedges,
      measured: (latencyMs, ended) => this.#latency?.record(Math.round(latencyMs * 1_000), ended),
      timeOut: (server) => this.#report(server, "timeout"),
      discard: (server, received, winner) => this.#discard(server, received, winner),
      timers: TIMERS,
    });
    options.signal?.throwIfAborted();
    const { winner, confirmed, lastFault, pending } = outcome;
    const fault = lastFault?.answer.kind === "fault" ? lastFault.answer.fault : "timeout";
    if (winner === null) return { received: null, fault, server: -1, pending };
    const received = winner.answer as Decided;
    // What the other request has charged is given back, and with it the reason of the denial.
    const answer = confirmed ? received.answer : { ...received.answer, cacheable: false };
    return { received: { ...received, answer }, fault, server: winner.server, pending };
  }

  async #discard(server: number, received: Received, winner: Received | null = null): Promise<void> {
    // With one idempotency key, servers that share a store return one reservation.
    const used = winner?.answer.kind === "decision" ? winner.answer.reservation : null;
    if (received.answer.kind === "decision" && received.answer.reservation !== null && received.answer.reservation !== used) {
      await this.cancel({ id: received.answer.reservation, server });
    }
  }

  async #send(server: number, path: string, body: string, timeout: number, signal?: AbortSignal): Promise<Received> {
    const reply: Reply = await post(this.#servers[server] as Server, path, body, timeout, signal);
    const answer: Answer = "fault" in reply ? { kind: "fault", fault: reply.fault } : parseAnswer(reply.status, reply.body, Date.now());
    if (answer.kind === "fault") this.#report(server, answer.fault);
    else this.#order.answered(server);
    return { answer, headers: "fault" in reply ? null : reply.headers };
  }

  #report(server: number, fault: Fault): void {
    this.#order.faulted(server, performance.now());
    this.#options.onFault?.({ server: this.#servers[server]?.url ?? "", fault });
  }

  async #end(path: string, server: number, body: string): Promise<EndResult> {
    const target = this.#servers[server];
    if (target === undefined) throw new TypeError(`no server ${server}; use the reservation that \`reserve\` returned`);
    // Repeating it changes nothing, so a fault is tried once more. Not in the path of a request: it has more time.
    let end: EndResult = { ended: null, cost: null, reason: "timeout" };
    for (let attempt = 0; attempt < 2; attempt += 1) {
      const reply = await post(target, path, body, Math.max(LATE_MS, this.#timeout));
      end = "fault" in reply ? { ended: null, cost: null, reason: reply.fault } : parseEnd(reply.status, reply.body);
      if (end.ended !== null || end.reason === "unknown" || end.reason === "conflict" || end.reason === "rejected") break;
    }
    return end;
  }

  #reservation(id: string, server: number): Reservation {
    return { id, server, settle: (cost) => this.settle({ id, server }, cost), cancel: () => this.cancel({ id, server }) };
  }

  /** For middleware: an identifier or attributes, as attributes that a request head goes with. */
  attributesOf(input: LimitInput): Attributes {
    if (typeof input === "string") return { [this.#attribute]: input };
    if (isHead(input) || isDescriptors(input)) throw new TypeError("descriptors cannot be checked beside a request head; write `head: false`");
    return input;
  }

  #subject(input: LimitInput, cost: number): string {
    if (typeof input === "string") return `"attributes":${JSON.stringify(this.attributesOf(input))}`;
    if (isHead(input)) {
      const { request, attributes } = input;
      return (attributes === undefined ? "" : `"attributes":${JSON.stringify(attributes)},`) + `"request":${JSON.stringify(request)}`;
    }
    if (isDescriptors(input)) {
      // A cost of 0 counts as 1 for descriptors, as Envoy's does; their own hits do not.
      const descriptors = cost > 0 ? input.descriptors : input.descriptors.map((one) => ({ ...one, hits: 0 }));
      return `"descriptors":${JSON.stringify(descriptors)}`;
    }
    return `"attributes":${JSON.stringify(input)}`;
  }
}

type Structured = Exclude<LimitInput, string>;

/** Attributes are strings, so an attribute of the same name is distinguishable. */
function isHead(input: Structured): input is HeadInput {
  return typeof input["request" as keyof Structured] === "object";
}

function isDescriptors(input: Structured): input is { readonly descriptors: readonly Descriptor[] } {
  return Array.isArray(input["descriptors" as keyof Structured]);
}

function verdictOf(answer: Answer): HedgeVerdict {
  if (answer.kind === "fault") return "fault";
  if (answer.result.allowed) return "allowed";
  return answer.result.reason === "denied" ? "denied" : "failed";
}

interface Decided extends Received {
  readonly answer: Extract<Answer, { kind: "decision" }>;
}

interface Asked {
  readonly received: Decided | null;
  readonly fault: Fault;
  readonly server: number;
  readonly pending: Promise<unknown>;
}

function fromCache(denial: CachedDenial, retryAfterMs: number, resetMs: number): CheckOutcome {
  const result: LimitResult = { ...denial.result, source: "cache", retryAfterMs, resetMs, reset: Date.now() + resetMs };
  const fields = new Map(denial.fields);
  if (fields.has("retry-after")) fields.set("retry-after", String(Math.ceil(retryAfterMs / 1000)));
  const shown = fields.get("ratelimit");
  if (shown !== undefined) fields.set("ratelimit", shown.replace(/;t=\d+$/, `;t=${Math.ceil(retryAfterMs / 1000)}`));
  return { result, fields, reservation: null, concurrent: false };
}

function fieldsOf(headers: Headers | null): ReadonlyMap<string, string> {
  const fields = new Map<string, string>();
  headers?.forEach((value, name) => { if (FIELD.test(name)) fields.set(name, value); });
  return fields;
}

function withPending(result: LimitResult, pending: Promise<unknown>): LimitResult {
  return pending === SETTLED ? result : { ...result, pending };
}

function checkCost(cost: number): void {
  if (!Number.isSafeInteger(cost) || cost < 0) throw new TypeError(`invalid cost ${cost}; write a whole number of at least 0`);
}

function baseUrl(url: string): string {
  const { protocol } = new URL(url);
  if (protocol !== "http:" && protocol !== "https:") throw new TypeError(`invalid URL ${url}; write http:// or https://`);
  return url.replace(/\/+$/, "");
}

/** Waits; rejects with the signal's reason if it is aborted. */
export async function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  for (let left = ms; ; left -= MAX_TIMER_MS) {
    await sleepOnce(Math.min(left, MAX_TIMER_MS), signal);
    if (left <= MAX_TIMER_MS) return;
  }
}

function sleepOnce(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted === true) return reject(signal.reason);
    const abort = (): void => { clearTimeout(timer); reject(signal?.reason); };
    const timer = setTimeout(() => { signal?.removeEventListener("abort", abort); resolve(); }, ms);
    signal?.addEventListener("abort", abort, { once: true });
  });
}
