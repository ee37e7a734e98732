/** Middleware for Hono, on Node, Deno, Bun and workers. */

import { fetchHead, Guard, releaseAfter, type GuardOptions } from "./guard.js";

/** What is used of Hono's context. */
export interface HonoContext {
  readonly req: { readonly raw: Request };
  readonly env: unknown;
  res: Response;
  header(name: string, value: string): void;
  set(key: string, value: unknown): void;
}

export interface HonoOptions<C extends HonoContext> extends GuardOptions<C> {
  /** The peer's address. By default that of `@hono/node-server` and of Deno; workers write `(c) => c.req.header("cf-connecting-ip")`. */
  readonly peer?: (context: C) => string | undefined;
}

/** Limits the callers of an app: `app.use(tollgate({ ratelimit }))`. The result is `c.get("tollgate")`. */
export function tollgate<C extends HonoContext = HonoContext>(options: HonoOptions<C>) {
  const guard = new Guard<C>(options);
  const peerOf = options.peer ?? defaultPeer;
  return async (context: C, next: () => Promise<void>): Promise<Response | void> => {
    const verdict = await guard.decide(fetchHead(context.req.raw, peerOf(context)), context);
    context.set("tollgate", verdict.result);
    if (!verdict.proceed) return new Response(verdict.body, { status: verdict.status, headers: Object.fromEntries(verdict.fields) });
    for (const [name, value] of verdict.fields) context.header(name, value);
    const { release } = verdict;
    if (release === null) return next();
    try {
      await next();
    } catch (error) {
      release();
      throw error;
    }
    const { res } = context;
    context.res = undefined as unknown as Response;
    context.res = new Response(releaseAfter(res.body, release), res);
  };
}

function defaultPeer(context: HonoContext): string | undefined {
  const env = context.env as { incoming?: { socket?: { remoteAddress?: string } }; remoteAddr?: { hostname?: string } } | undefined;
  return env?.incoming?.socket?.remoteAddress ?? env?.remoteAddr?.hostname;
}
