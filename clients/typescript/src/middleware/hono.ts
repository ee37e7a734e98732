/** Middleware for Hono, on Node, Deno, Bun and workers. */

import { Guard, type GuardOptions } from "./guard.js";
import { fetchHead } from "./head.js";
import { Permit, type NodeResponse } from "./permit.js";

/** What is used of Hono's context. */
export interface HonoContext {
  readonly req: { readonly raw: Request };
  readonly env: unknown;
  res: Response;
  header(name: string, value: string): void;
  set(key: string, value: unknown): void;
}

/** Where the runtimes keep the connection. */
interface Environment {
  /** `@hono/node-server`. */
  readonly incoming?: { readonly rawHeaders?: readonly string[]; readonly socket?: { readonly remoteAddress?: string } };
  readonly outgoing?: NodeResponse;
  /** Deno. */
  readonly remoteAddr?: { readonly hostname?: string };
  /** Bun: the server, or an environment that has it. */
  readonly requestIP?: BunServer["requestIP"];
  readonly server?: BunServer;
}

interface BunServer {
  requestIP(request: Request): { readonly address?: string } | null;
}

/**
 * Limits the callers of an app: `app.use(tollgate({ ratelimit }))`. The result is `c.get("tollgate")`. On Node, Deno and Bun
 * the peer's address is known; workers write `peer: (c) => c.req.header("cf-connecting-ip")`.
 */
export function tollgate<C extends HonoContext = HonoContext>(options: GuardOptions<C>) {
  const guard = new Guard<C>(options);
  return async (context: C, next: () => Promise<void>): Promise<Response | void> => {
    const env = (context.env ?? {}) as Environment;
    const { raw } = context.req;
    // Where there is a connection, it tells when the response has ended or the client has left; else the body does.
    const { outgoing } = env;
    const permit = outgoing === undefined ? new Permit() : Permit.of(outgoing);
    if (outgoing === undefined) permit.endWith(raw.signal);
    const verdict = await guard.decide(fetchHead(raw, peerOf(env, raw), env.incoming?.rawHeaders), context, permit);
    context.set("tollgate", verdict.result);
    if (!verdict.proceed) return new Response(verdict.body, { status: verdict.status, headers: Object.fromEntries(verdict.fields) });
    for (const [name, value] of verdict.fields) context.header(name, value);
    if (outgoing !== undefined || !permit.held) return next();
    try {
      await next();
    } catch (error) {
      permit.end();
      throw error;
    }
    // Nobody reads the body then.
    if (raw.method === "HEAD") return permit.end();
    const { res } = context;
    context.res = undefined as unknown as Response;
    context.res = new Response(permit.endAfter(res.body), res);
  };
}

function peerOf(env: Environment, request: Request): string | undefined {
  const server = typeof env.requestIP === "function" ? (env as BunServer) : env.server;
  return env.incoming?.socket?.remoteAddress ?? env.remoteAddr?.hostname ?? server?.requestIP?.(request)?.address;
}
