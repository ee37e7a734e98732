/** Plugin for Fastify (4 and 5). */

import type { LimitResult } from "../result.js";
import { Guard, type GuardOptions } from "./guard.js";
import { nodeHead, type NodeRequest } from "./head.js";
import { Permit, type NodeResponse } from "./permit.js";

export interface FastifyRequestLike {
  readonly raw: NodeRequest;
  tollgate?: LimitResult | null;
}

export interface FastifyReplyLike {
  readonly raw: NodeResponse;
  header(name: string, value: string): unknown;
  code(status: number): unknown;
  send(body: string): unknown;
}

export interface FastifyLike {
  decorateRequest(name: string, value: null): unknown;
  addHook(name: "onRequest", hook: (request: never, reply: never) => Promise<unknown>): unknown;
}

/** Limits the callers of a server: `fastify.register(tollgate, { ratelimit })`. The result is in `request.tollgate`. */
export async function tollgate(fastify: FastifyLike, options: GuardOptions<FastifyRequestLike>): Promise<void> {
  const guard = new Guard<FastifyRequestLike>(options);
  fastify.decorateRequest("tollgate", null);
  fastify.addHook("onRequest", async (request: FastifyRequestLike, reply: FastifyReplyLike) => {
    const permit = Permit.of(reply.raw);
    const verdict = await guard.decide(nodeHead(request.raw, request.raw.url), request, permit);
    for (const [name, value] of verdict.fields) reply.header(name, value);
    request.tollgate = verdict.result;
    if (verdict.proceed) return undefined;
    reply.code(verdict.status);
    return reply.send(verdict.body);
  });
}

// Fastify's own way to say that a plugin's hooks are for the whole server, not for its own context.
(tollgate as unknown as Record<symbol, boolean>)[Symbol.for("skip-override")] = true;
