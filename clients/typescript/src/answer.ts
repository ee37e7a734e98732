/**
 * Turns a server's response into a decision or a fault. Every field is checked: a proxy's error page, a truncated body
 * or another program at the address must become a fault that failover handles, never an allowance. By
 * `clients/conformance/answers.json`.
 */

import { SETTLED, type Fault, type LimitResult, type Problem, type Reason, type RuleResponse } from "./result.js";

/** Longest body that is read. */
export const MAX_BODY_BYTES = 65_536;

/** What one server answered. */
export type Answer =
  | { readonly kind: "decision"; readonly result: LimitResult; readonly reservation: string | null; readonly cacheable: boolean; readonly concurrent: boolean }
  | { readonly kind: "fault"; readonly fault: Fault };

/** How a reservation ended. */
export interface EndResult {
  readonly ended: "settled" | "canceled" | null;
  readonly cost: number | null;
  /** Why it did not end: `unknown` (or past its deadline), `conflict` (ended otherwise), `rejected`, or a fault. */
  readonly reason: "unknown" | "conflict" | "rejected" | Fault | null;
}

type Json = Record<string, unknown>;

const fault = (kind: Fault): Answer => ({ kind: "fault", fault: kind });

const rejected = (problem: Problem | null): Answer => ({
  kind: "decision",
  result: {
    allowed: false, success: false, limit: null, remaining: null, reset: null, resetMs: null, retryAfterMs: null, delayMs: 0,
    reason: "rejected", source: "server", origin: null, shed: false, rule: null, decisionId: null, degradedBy: null, problem, response: null, pending: SETTLED,
  },
  reservation: null,
  cacheable: false,
  concurrent: false,
});

/** The problem document of a request head that the server refuses; `null` for every other reason to refuse a check. */
function headProblem(status: number, body: string): Problem | null {
  const field = body.length <= MAX_BODY_BYTES ? parseObject(body)?.["field"] : null;
  const isHead = field === "request" || (status === 400 && typeof field === "string" && field.startsWith("request."));
  return isHead ? { status, body } : null;
}

/** The check is larger than the server reads, which only a request head makes it. */
const TOO_LARGE: Problem = {
  status: 431,
  body: JSON.stringify({ type: "about:blank", title: "Request header fields too large", status: 431, detail: "The header fields are too large to be checked." }),
};

/** Parses a response of `/v1/check` or `/v1/reserve`. `nowMs` is the time of day, for `reset`. */
export function parseAnswer(status: number, body: string, nowMs: number): Answer {
  switch (status) {
    // The check itself is invalid. No fail policy applies: a caller could otherwise spell its way past a limit.
    case 400: return rejected(headProblem(status, body));
    case 413: return rejected(TOO_LARGE);
    case 409: case 422: return rejected(null);
    // Either the credential of the request that is checked cannot be read, or this client's own token is wrong.
    case 401: {
      const problem = headProblem(status, body);
      return problem === null ? fault("unauthorized") : rejected(problem);
    }
    case 403: return fault("unauthorized");
    case 200: case 429: case 503: return parseDecision(status, body, nowMs);
    default: return fault(status >= 500 && status <= 599 ? "unavailable" : "invalid_response");
  }
}

function parseDecision(status: number, body: string, nowMs: number): Answer {
  const json = parseObject(body);
  if (json === null || !("allowed" in json)) return fault(status === 200 ? "invalid_response" : "unavailable");
  const invalid = fault("invalid_response");
  const { allowed, decision_id: decisionId, limits } = json;
  if (typeof allowed !== "boolean" || allowed !== (status === 200)) return invalid;
  if (typeof decisionId !== "string" || !Array.isArray(limits)) return invalid;
  const retryAfter = json["retry_after_ms"] == null ? null : count(json["retry_after_ms"]);
  const delayMs = json["delay_ms"] == null ? 0 : count(json["delay_ms"]);
  const origin = text(json["origin"]), deniedBy = text(json["denied_by"]), reservation = text(json["reservation"]), shedClass = text(json["shed"]);
  if (retryAfter === undefined || delayMs === undefined) return invalid;
  if (origin === undefined || deniedBy === undefined || reservation === undefined || shedClass === undefined) return invalid;

  let reported: Limit | null = null;
  let concurrent = false, overConcurrent = false;
  for (const item of limits as unknown[]) {
    const limit = parseLimit(item);
    if (limit === null) return invalid;
    concurrent ||= limit.concurrent;
    if (limit.hidden) continue;
    overConcurrent ||= limit.over && limit.concurrent;
    if (allowed ? isNearer(limit, reported) : isLonger(limit, reported, deniedBy)) reported = limit;
  }
  const shed = origin === "shed" || shedClass !== null;
  const result: LimitResult = {
    allowed,
    success: allowed,
    limit: reported === null ? null : reported.limit,
    remaining: reported === null ? null : reported.remaining,
    reset: reported === null ? null : nowMs + reported.resetMs,
    resetMs: reported === null ? null : reported.resetMs,
    retryAfterMs: allowed ? 0 : retryAfter,
    delayMs,
    reason: reasonOf(allowed, origin, shed),
    source: "server",
    origin,
    shed,
    rule: allowed ? (reported === null ? null : reported.rule) : deniedBy,
    decisionId,
    degradedBy: text(json["degraded_by"]) ?? null,
    problem: null,
    response: ruleResponse(json["response"]),
    pending: SETTLED,
  };
  const cacheable = status === 429 && origin === "store" && !shed && retryAfter !== null && retryAfter > 0 && !overConcurrent;
  return { kind: "decision", result, reservation, cacheable, concurrent };
}

function ruleResponse(response: unknown): RuleResponse | null {
  if (typeof response !== "object" || response === null || Array.isArray(response)) return null;
  const json = response as Json, status = count(json["status"]);
  const isStatus = status !== undefined && status >= 400 && status < 600;
  return { status: isStatus ? status : null, body: text(json["body"]) ?? null, contentType: text(json["content_type"]) ?? null };
}

function reasonOf(allowed: boolean, origin: string | null, shed: boolean): Reason {
  switch (origin) {
    case "shed": return "shed";
    // The rule's fail policy decided: because of the overload, or because the store is unavailable.
    case "fail_open": case "fail_closed": return shed ? "shed" : origin;
    case "unmatched": return origin;
    default: return allowed ? "allowed" : "denied";
  }
}

interface Limit {
  readonly rule: string;
  readonly limit: number;
  readonly remaining: number;
  readonly resetMs: number;
  readonly over: boolean;
  /** Its role lets it deny nothing. */
  readonly hidden: boolean;
  readonly concurrent: boolean;
}

function parseLimit(item: unknown): Limit | null {
  if (typeof item !== "object" || item === null || Array.isArray(item)) return null;
  const json = item as Json;
  const limit = count(json["limit"]), remaining = count(json["remaining"]), resetMs = count(json["reset_ms"]);
  if (typeof json["rule"] !== "string" || limit === undefined || remaining === undefined || resetMs === undefined) return null;
  const role = json["role"], hidden = typeof role === "string" && role !== "quota";
  return { rule: json["rule"], limit, remaining, resetMs, over: json["over"] === true, hidden, concurrent: json["window"] === "concurrent" };
}

function isNearer(limit: Limit, than: Limit | null): boolean {
  return than === null || limit.remaining < than.remaining || (limit.remaining === than.remaining && limit.resetMs > than.resetMs);
}

/** Limits of the denying rule go before other exhausted ones; then the longest reset. */
function isLonger(limit: Limit, than: Limit | null, deniedBy: string | null): boolean {
  if (!limit.over) return false;
  if (than === null) return true;
  const own = limit.rule === deniedBy, others = than.rule === deniedBy;
  return own === others ? limit.resetMs > than.resetMs : own;
}

/** Parses a response of `/v1/settle` or `/v1/cancel`. */
export function parseEnd(status: number, body: string): EndResult {
  const not = (reason: EndResult["reason"]): EndResult => ({ ended: null, cost: null, reason });
  const json = parseObject(body);
  switch (status) {
    case 200: {
      const cost = json === null ? undefined : count(json["cost"]);
      if (json?.["settled"] === true && cost !== undefined) return { ended: "settled", cost, reason: null };
      if (json?.["cancelled"] === true) return { ended: "canceled", cost: null, reason: null };
      return not("invalid_response");
    }
    case 404: return not(json !== null && "title" in json ? "unknown" : "invalid_response");
    case 409: return not("conflict");
    case 400: case 413: case 422: return not("rejected");
    case 401: case 403: return not("unauthorized");
    default: return not(status >= 500 && status <= 599 ? "unavailable" : "invalid_response");
  }
}

function parseObject(body: string): Json | null {
  try {
    const value: unknown = JSON.parse(body);
    return typeof value === "object" && value !== null && !Array.isArray(value) ? (value as Json) : null;
  } catch {
    return null;
  }
}

/** An integer of at least 0; larger ones than JavaScript counts exactly become the largest that it does. */
function count(value: unknown): number | undefined {
  if (typeof value !== "number" || !Number.isInteger(value) || value < 0) return undefined;
  // Adding 0 makes -0 the number that it is.
  return Math.min(value, Number.MAX_SAFE_INTEGER) + 0;
}

/** A string or null; `undefined` if it is something else. */
function text(value: unknown): string | null | undefined {
  return value == null ? null : typeof value === "string" ? value : undefined;
}
