/**
 * Client of Tollgate.
 *
 * | module | contents |
 * |---|---|
 * | `ratelimit` | {@link Ratelimit}: limit, peek, reserve, settle, cancel |
 * | `pace/` | {@link pacedFetch}: a `fetch` that respects the limits of other APIs |
 * | `middleware/` | for Express, Fastify, Hono and Next.js; imported as `@tollgate/client/express` and so on |
 * | `adapters/` | for other libraries' stores; imported as `@tollgate/client/express-rate-limit` and so on |
 */

export { Ratelimit } from "./ratelimit.js";
export type { Attributes, CheckOutcome, Descriptor, HeadInput, InlineUnit, LimitInput, LimitOptions, RatelimitOptions, RequestHead, Reservation, ReserveOptions, ReserveResult } from "./ratelimit.js";
export type { Fault, LimitResult, Problem, Reason, RuleResponse } from "./result.js";
export type { EndResult } from "./answer.js";
export { pacedFetch, ThrottledError } from "./pace/paced-fetch.js";
export type { PacedFetchOptions } from "./pace/paced-fetch.js";
export { readSignals } from "./pace/signals.js";
export type { Signals } from "./pace/signals.js";
