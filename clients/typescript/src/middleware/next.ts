/** For Next.js route handlers, and every other function from a `Request` to a `Response` (workers, Deno, Bun). */

import { fetchHead, Guard, releaseAfter, type GuardOptions } from "./guard.js";

export interface HandlerOptions extends GuardOptions<Request> {
  /**
   * The peer's address, which a `Request` does not have. Name the header that your platform sets and callers cannot,
   * such as `(request) => request.headers.get("x-real-ip")`. Without it there is no `remote_address`.
   */
  readonly peer?: (request: Request) => string | null | undefined;
}

/** Limits the callers of a handler: `export const GET = withRatelimit(handler, { ratelimit })`. */
export function withRatelimit<R extends Request, Rest extends unknown[]>(
  handler: (request: R, ...rest: Rest) => Response | Promise<Response>,
  options: HandlerOptions,
): (request: R, ...rest: Rest) => Promise<Response> {
  const guard = new Guard<Request>(options);
  return async (request, ...rest) => {
    const verdict = await guard.decide(fetchHead(request, options.peer?.(request) ?? undefined), request);
    if (!verdict.proceed) return new Response(verdict.body, { status: verdict.status, headers: Object.fromEntries(verdict.fields) });
    const { release } = verdict;
    let response: Response;
    try {
      response = await handler(request, ...rest);
    } catch (error) {
      release?.();
      throw error;
    }
    // The headers of some responses (redirects, those of `fetch`) cannot be changed.
    const body = release === null ? response.body : releaseAfter(response.body, release);
    const answer = new Response(body, response);
    for (const [name, value] of verdict.fields) answer.headers.set(name, value);
    return answer;
  };
}
