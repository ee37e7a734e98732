import { guarded } from "../guarded.js";

export const GET = guarded(() => Response.json({ ok: true }));
export const POST = guarded(async (request) => new Response(await request.text(), { status: 201 }));
