/** For Next.js route handlers, and every other function from a `Request` to a `Response` (workers, Deno, Bun). */

import { Guard, type GuardOptions } from "./guard.js";
import { fetchHead } from "./head.js";
import { Permit } from "./permit.js";

/**
 * A `Request` does not have the peer's address, so `peer` is required unless `head` is false. Name the header that your
 * platform sets and callers cannot, such as `(request) => request.headers.get("x-real-ip")`.
 */
export type HandlerOptions = GuardOptions<Request> & (Required<Pick<GuardOptions<Request>, "peer">> | { readonly head: false });

/** Limits the callers of a handler: `export const GET = withRatelimit(handler, { ratelimit, peer })`. */
export function withRatelimit<R extends Request, Rest extends unknown[]>(
  handler: (request: R, ...rest: Rest) => Response | Promise<Response>,
  options: HandlerOptions,
): (request: R, ...rest: Rest) => Promise<Response> {
  const guard = new Guard<Request>(options);
  return async (request, ...rest) => {
    const permit = new Permit();
    permit.endWith(request.signal);
    const verdict = await guard.decide(fetchHead(request, null), request, permit);
    if (!verdict.proceed) return new Response(verdict.body, { status: verdict.status, headers: Object.fromEntries(verdict.fields) });
    let response: Response;
    try {
      response = await handler(request, ...rest);
    } catch (error) {
      permit.end();
      throw error;
    }
    // Nobody reads the body then.
    if (request.method === "HEAD") permit.end();
    // The headers of some responses (redirects, those of `fetch`) cannot be changed.
    const answer = new Response(permit.held ? permit.endAfter(response.body) : response.body, response);
    for (const [name, value] of verdict.fields) answer.headers.set(name, value);
    return answer;
  };
}
