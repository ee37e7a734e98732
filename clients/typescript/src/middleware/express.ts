/** Middleware for Express (4 and 5) and everything else with its signature. */

import { Guard, rawLines, type GuardOptions } from "./guard.js";

/** What is used of Express's request; Node's `IncomingMessage` has it too. */
export interface ExpressRequest {
  readonly method?: string | undefined;
  readonly url?: string | undefined;
  /** The path before routers cut their own part off. */
  readonly originalUrl?: string;
  readonly rawHeaders: readonly string[];
  readonly socket: { readonly remoteAddress?: string | undefined };
}

export interface ExpressResponse {
  statusCode: number;
  readonly locals?: Record<string, unknown>;
  setHeader(name: string, value: string): unknown;
  end(body?: string): unknown;
  on(event: "close", listener: () => void): unknown;
}

/** Limits the callers of an app: `app.use(tollgate({ ratelimit }))`. The result is in `res.locals.tollgate`. */
export function tollgate<R extends ExpressRequest = ExpressRequest>(options: GuardOptions<R>) {
  const guard = new Guard<R>(options);
  return (request: R, response: ExpressResponse, next: (error?: unknown) => void): void => {
    const head = { method: request.method ?? "GET", target: request.originalUrl ?? request.url ?? "/", peer: request.socket.remoteAddress, lines: rawLines(request.rawHeaders) };
    guard.decide(head, request).then((verdict) => {
      for (const [name, value] of verdict.fields) response.setHeader(name, value);
      if (response.locals !== undefined) response.locals["tollgate"] = verdict.result;
      if (verdict.proceed) {
        if (verdict.release !== null) response.on("close", verdict.release);
        next();
      } else {
        response.statusCode = verdict.status;
        response.end(verdict.body);
      }
    }).catch(next);
  };
}
