/** Middleware for Express (4 and 5) and everything else with its signature. */

import { Guard, type GuardOptions } from "./guard.js";
import { nodeHead, type NodeRequest } from "./head.js";
import { Permit, type NodeResponse } from "./permit.js";

/** What is used of Express's request; Node's `IncomingMessage` has it too. */
export interface ExpressRequest extends NodeRequest {
  /** The path before routers cut their own part off. */
  readonly originalUrl?: string;
}

export interface ExpressResponse extends NodeResponse {
  statusCode: number;
  readonly locals?: Record<string, unknown>;
  setHeader(name: string, value: string): unknown;
  end(body?: string): unknown;
}

/** Limits the callers of an app: `app.use(tollgate({ ratelimit }))`. The result is in `res.locals.tollgate`. */
export function tollgate<R extends ExpressRequest = ExpressRequest>(options: GuardOptions<R>) {
  const guard = new Guard<R>(options);
  return (request: R, response: ExpressResponse, next: (error?: unknown) => void): void => {
    const permit = Permit.of(response);
    guard.decide(nodeHead(request, request.originalUrl ?? request.url), request, permit).then((verdict) => {
      for (const [name, value] of verdict.fields) response.setHeader(name, value);
      if (response.locals !== undefined) response.locals["tollgate"] = verdict.result;
      if (verdict.proceed) return next();
      response.statusCode = verdict.status;
      response.end(verdict.body);
    }).catch(next);
  };
}
