/**
 * What a check answers: the server's decision, a denial from the cache, or the fail policy. One type for all three, so
 * that a caller reads `allowed` and, if it cares, `source` and `reason`. Throwing on failures was rejected: an
 * unavailable limiter is a case that a policy decides, not an exception in the path of a request.
 */

/** Why a server's answer could not be used. */
export type Fault = "timeout" | "unreachable" | "unavailable" | "invalid_response" | "unauthorized";

/** Why a request is allowed or denied. A {@link Fault} if the fail policy decided. */
export type Reason = "allowed" | "denied" | "unmatched" | "fail_open" | "fail_closed" | "shed" | "rejected" | Fault;

/** Why the head of a request was refused: the status and the body (`application/problem+json`) to answer its caller with. */
export interface Problem {
  readonly status: number;
  readonly body: string;
}

/** What the denying rule has callers answered with (`response` of the rule), as far as it sets it. */
export interface RuleResponse {
  readonly status: number | null;
  readonly body: string | null;
  readonly contentType: string | null;
}

/** A decision. Durations are in milliseconds. */
export interface LimitResult {
  /** Whether the request may pass. */
  readonly allowed: boolean;
  /** The same as `allowed`, by the name that users of `@upstash/ratelimit` know. */
  readonly success: boolean;
  /** The limit that is reported: the one that denied, or the one with least remaining; `null` if none applies. */
  readonly limit: number | null;
  /** Units that remain of it. */
  readonly remaining: number | null;
  /** When it is fully restored, with nothing left when its next unit is there, in milliseconds since 1970. */
  readonly reset: number | null;
  /** Time until then. */
  readonly resetMs: number | null;
  /** Time after which the same request would pass: 0 if allowed, `null` if it never would or the time is unknown. */
  readonly retryAfterMs: number | null;
  /** How long to delay an allowed request (`action: delay`). */
  readonly delayMs: number;
  readonly reason: Reason;
  /** Who decided. */
  readonly source: "server" | "cache" | "policy";
  /** What the server's decision rests on: `store`, `unmatched`, `grant`, `emergency`, `local`, … */
  readonly origin: string | null;
  /** Whether the server was overloaded itself and decided without its store. Denials say when to ask again, and are not cached. */
  readonly shed: boolean;
  /** The rule that denied, or whose limit is reported. */
  readonly rule: string | null;
  /** For `tollgate why`. */
  readonly decisionId: string | null;
  /** The rule that asks for a degraded response. */
  readonly degradedBy: string | null;
  /** Set if the server refuses the request head that was checked; `reason` is then `rejected`. */
  readonly problem: Problem | null;
  /** What the denying rule has callers answered with; `null` if it sets nothing. The middleware answers so. */
  readonly response: RuleResponse | null;
  /** What is still under way after the answer (a slower server's charge being given back). Workers pass it to `waitUntil`. */
  readonly pending: Promise<unknown>;
}

/** Nothing is under way. */
export const SETTLED: Promise<unknown> = Promise.resolve();

/** The result of the fail policy after `fault`. */
export function policyResult(policy: "open" | "closed", fault: Fault): LimitResult {
  const allowed = policy === "open";
  return {
    allowed, success: allowed, limit: null, remaining: null, reset: null, resetMs: null, retryAfterMs: allowed ? 0 : null, delayMs: 0,
    reason: fault, source: "policy", origin: null, shed: false, rule: null, decisionId: null, degradedBy: null, problem: null, response: null, pending: SETTLED,
  };
}
