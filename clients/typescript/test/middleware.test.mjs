// The middleware in real frameworks, before a real server: one scenario for all of them.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, request as httpRequest } from "node:http";
import { after, before, describe, it } from "node:test";
import { serve } from "@hono/node-server";
import express from "express";
import Fastify from "fastify";
import { Hono } from "hono";
import { Ratelimit } from "../dist/esm/index.js";
import { tollgate as expressTollgate } from "../dist/esm/middleware/express.js";
import { tollgate as fastifyTollgate } from "../dist/esm/middleware/fastify.js";
import { tollgate as honoTollgate } from "../dist/esm/middleware/hono.js";
import { withRatelimit } from "../dist/esm/middleware/next.js";
import { eventually, Tollgate, unusedPort } from "./servers.mjs";

const RULES = `
domain: shop
descriptors:
  - {key: api_key, name: per-key, limit: {count: 3, period: 1h, algorithm: sliding_window}}
  - {key: remote_address, name: per-address, limit: {count: 1000000, period: 1h}}
  - {key: endpoint, value: GET /slow, name: slots, concurrency: {limit: 1, ttl: 3600s}}
  - {key: endpoint, value: GET /fail, name: failing, concurrency: {limit: 1, ttl: 3600s}}
  - {key: endpoint, value: GET /delayed, name: queue, action: delay, algorithm: leaky_bucket, limit: {count: 10, period: 1s, burst: 5}}
`;
const IDENTITY = { routes: ["GET /slow", "GET /delayed", "GET /fail"], trusted: [] };
let keys = 0;
const freshKey = () => `key-${++keys}`;

/** Requests end when a test says so. */
const gates = new Map();
const gate = (id) => new Promise((resolve) => gates.set(id, resolve));

const FRAMEWORKS = {
  async express(options) {
    const app = express();
    app.use(expressTollgate(options));
    app.get("/slow", async (request, response) => { await gate(request.query.id); response.send("slow"); });
    app.get("/fail", () => { throw new Error("broken"); });
    app.get("/*any", (request, response) => { response.send(`remaining ${response.locals.tollgate?.remaining}`); });
    app.use((error, request, response, next) => { response.status(500).end(); void next; });
    const server = app.listen(0, "127.0.0.1");
    await once(server, "listening");
    return { port: server.address().port, close: () => { server.closeAllConnections(); server.close(); } };
  },
  async fastify(options) {
    const app = Fastify({ forceCloseConnections: true });
    await app.register(fastifyTollgate, options);
    app.get("/slow", async (request) => { await gate(request.query.id); return "slow"; });
    app.get("/fail", async () => { throw new Error("broken"); });
    app.get("/*", async (request) => `remaining ${request.tollgate?.remaining}`);
    await app.listen({ port: 0, host: "127.0.0.1" });
    return { port: app.server.address().port, close: () => app.close() };
  },
  async hono(options) {
    const app = new Hono();
    app.use(honoTollgate(options));
    app.get("/slow", async (c) => { await gate(c.req.query("id")); return c.text("slow"); });
    app.get("/fail", () => { throw new Error("broken"); });
    app.get("/*", (c) => c.text(`remaining ${c.get("tollgate")?.remaining}`));
    app.onError((error, c) => c.text("broken", 500));
    const server = serve({ fetch: app.fetch, port: 0, hostname: "127.0.0.1" });
    await once(server, "listening");
    return { port: server.address().port, close: () => { server.closeAllConnections(); server.close(); } };
  },
  async next(options) {
    const handlers = {
      "/slow": async (request) => { await gate(new URL(request.url).searchParams.get("id")); return new Response("slow"); },
      "/fail": async () => { throw new Error("broken"); },
      "/": async () => Response.json({ ok: true }),
    };
    const wrapped = new Map(Object.entries(handlers).map(([path, handler]) => [path, withRatelimit(handler, { ...options, peer: (request) => request.headers.get("x-peer") })]));
    // Next.js hands its handlers web requests; so does this.
    const server = createServer(async (incoming, outgoing) => {
      const headers = new Headers();
      for (let at = 0; at < incoming.rawHeaders.length; at += 2) headers.append(incoming.rawHeaders[at], incoming.rawHeaders[at + 1]);
      headers.set("x-peer", incoming.socket.remoteAddress);
      const request = new Request(`http://${incoming.headers.host}${incoming.url}`, { method: incoming.method, headers });
      try {
        const handler = wrapped.get(new URL(request.url).pathname) ?? wrapped.get("/");
        const response = await handler(request, { params: Promise.resolve({}) });
        outgoing.writeHead(response.status, Object.fromEntries(response.headers));
        const body = response.body?.getReader();
        outgoing.on("close", () => body?.cancel().catch(() => undefined));
        for (let part = await body?.read(); part !== undefined && !part.done; part = await body.read()) outgoing.write(part.value);
        outgoing.end();
      } catch {
        outgoing.writeHead(500).end();
      }
    }).listen(0, "127.0.0.1");
    await once(server, "listening");
    return { port: server.address().port, close: () => { server.closeAllConnections(); server.close(); } };
  },
};

/** A request with repeated header lines, which `fetch` cannot send. */
function get(port, path, headers = []) {
  return new Promise((resolve, reject) => {
    const request = httpRequest({ port, path, host: "127.0.0.1", agent: false });
    for (const name of new Set(headers.map(([key]) => key))) request.setHeader(name, headers.filter(([key]) => key === name).map(([, value]) => value));
    request.on("error", reject);
    request.on("response", async (response) => {
      let body = "";
      for await (const part of response) body += part;
      resolve({ status: response.statusCode, headers: response.headers, body });
    });
    request.end();
  });
}

for (const [name, start] of Object.entries(FRAMEWORKS)) {
  describe(name, () => {
    let server, ratelimit, app;
    before(async () => {
      server = await Tollgate.start(RULES);
      ratelimit = new Ratelimit({ url: server.url, domain: "shop", timeout: 10_000 });
      app = await start({ ratelimit, identity: IDENTITY });
    });
    after(async () => { await app.close(); await server.close(); });

    it("lets requests through with the rate limit fields, then responds 429", async () => {
      const key = freshKey();
      for (let remaining = 2; remaining >= 0; remaining -= 1) {
        const { status, headers } = await get(app.port, "/items", [["x-api-key", key]]);
        assert.equal(status, 200);
        assert.match(headers.ratelimit, new RegExp(`^"per-key";r=${remaining};t=\\d+$`));
        assert.match(headers["ratelimit-policy"], /"per-key";q=3;w=3600/);
        assert.equal(headers["retry-after"], undefined);
      }
      // The second denial is the deny cache's: it carries the same fields.
      for (const source of ["server", "cache"]) {
        const { status, headers, body } = await get(app.port, "/items", [["x-api-key", key]]);
        assert.equal(status, 429, source);
        assert.match(headers["content-type"], /^application\/problem\+json/);
        assert.match(headers.ratelimit, /^"per-key";r=0;t=\d+$/);
        assert.ok(Number(headers["retry-after"]) > 60);
        assert.equal(headers["x-ratelimit-denied-by"], "per-key");
        const problem = JSON.parse(body);
        assert.equal(problem.type, "https://iana.org/assignments/http-problem-types#quota-exceeded");
        assert.deepEqual([problem.status, problem["violated-policies"], problem.retry_after], [429, ["per-key"], Number(headers["retry-after"])]);
        assert.equal(problem.decision_id, headers["x-ratelimit-decision-id"]);
      }
    });

    it("counts the peer's address, and rejects two API keys", async () => {
      const { status, headers } = await get(app.port, "/items", [["x-forwarded-for", "198.51.100.7"]]);
      assert.equal(status, 200);
      assert.match(headers.ratelimit, /^"per-address"/);
      assert.equal((await ratelimit.peek({ remote_address: "198.51.100.7" })).remaining, 1_000_000, "an untrusted peer's header changes nothing");
      for (const twice of [[["x-api-key", "a"], ["x-api-key", "b"]], [["x-api-key", "a"], ["authorization", "Bearer b"]]]) {
        const rejected = await get(app.port, "/items", twice);
        assert.deepEqual([rejected.status, JSON.parse(rejected.body).title], [400, "Bad request"]);
      }
    });

    it("returns the permit when the response ends, fails, or the client leaves", async () => {
      const peek = async () => (await ratelimit.peek({ endpoint: "GET /slow" })).remaining;
      for (const id of ["one", "two"]) {
        const first = get(app.port, `/slow?id=${name}-${id}`);
        await eventually(() => gates.has(`${name}-${id}`), "the request is in the handler");
        assert.equal((await get(app.port, "/slow?id=none")).status, 429, "the permit is held");
        gates.get(`${name}-${id}`)();
        assert.equal((await first).status, 200);
        await eventually(async () => (await peek()) === 1, "the permit is back");
      }
      const leaving = httpRequest({ port: app.port, path: `/slow?id=${name}-leaving`, host: "127.0.0.1", agent: false });
      leaving.on("error", () => undefined);
      leaving.end();
      await eventually(() => gates.has(`${name}-leaving`), "the request is in the handler");
      leaving.destroy();
      gates.get(`${name}-leaving`)();
      await eventually(async () => (await peek()) === 1, "the permit is back");
      for (let time = 0; time < 2; time += 1) {
        assert.equal((await get(app.port, "/fail")).status, 500);
        await eventually(async () => (await ratelimit.peek({ endpoint: "GET /fail" })).remaining === 1, "the permit is back");
      }
    });

    it("delays what a rule asks to delay", async () => {
      const started = performance.now();
      for (let request = 0; request < 3; request += 1) assert.equal((await get(app.port, "/delayed")).status, 200);
      assert.ok(performance.now() - started >= 150, "the second and third wait their turn");
    });

    it("responds 503 if it fails closed, and lets through if it fails open", async (t) => {
      const dead = `http://127.0.0.1:${await unusedPort()}`;
      for (const [failPolicy, status] of [["closed", 503], ["open", 200]]) {
        const guarded = await start({ ratelimit: new Ratelimit({ url: dead, domain: "shop", failPolicy, timeout: 10_000 }), identity: IDENTITY });
        t.after(() => guarded.close());
        const response = await get(guarded.port, "/items");
        assert.equal(response.status, status);
        if (status === 503) {
          assert.equal(response.headers["retry-after"], "1");
          assert.match(JSON.parse(response.body).type, /#temporary-reduced-capacity$/);
        }
      }
    });

    it("checks what the service says instead", async (t) => {
      const key = freshKey();
      const guarded = await start({ ratelimit, identity: IDENTITY, cost: 2, input: (attributes) => (attributes.path === "/free" ? null : { api_key: key }) });
      t.after(() => guarded.close());
      assert.equal((await get(guarded.port, "/items")).headers.ratelimit?.slice(0, 13), '"per-key";r=1');
      assert.equal((await get(guarded.port, "/items")).status, 429);
      assert.equal((await get(guarded.port, "/free")).status, 200);
    });
  });
}
