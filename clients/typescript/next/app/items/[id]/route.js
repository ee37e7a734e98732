import { guarded } from "../../guarded.js";

export const GET = guarded(async (request, { params }) => Response.json({ id: (await params).id, page: request.nextUrl.searchParams.get("page") }));
