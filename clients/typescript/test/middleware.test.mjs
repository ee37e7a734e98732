// The middleware in real frameworks, before a real server: one scenario for all of them.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, request as httpRequest } from "node:http";
import { connect as http2Connect } from "node:http2";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
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
import { endpointOf, Endpoints } from "../dist/esm/middleware/endpoints.js";
import { eventually, FaultProxy, Tollgate, unusedPort } from "./servers.mjs";

const RULES = `
domain: shop
descriptors:
  - {key: api_key, name: per-key, limit: {count: 3, period: 1h, algorithm: sliding_window}}
  - {key: remote_address, name: per-address, limit: {count: 1000000, period: 1h, algorithm: sliding_window}}
  - {key: endpoint, value: GET /slow, name: slots, concurrency: {limit: 1, ttl: 3600s}}
  - {key: endpoint, value: GET /fail, name: failing, concurrency: {limit: 1, ttl: 3600s}}
  - {key: endpoint, value: GET /stream, name: streams, concurrency: {limit: 1, ttl: 3600s}}
  - {key: endpoint, value: GET /stuck, name: stuck, concurrency: {limit: 1, ttl: 3600s}}
  - {key: endpoint, value: POST /login, name: logins, limit: {count: 2, period: 1h, algorithm: sliding_window}}
  - {key: agent, name: per-agent, limit: {count: 1000, period: 1h, algorithm: sliding_window}}
  - {key: tenant, name: per-tenant, limit: {count: 10, period: 1h, algorithm: sliding_window}}
  - {key: endpoint, value: GET /delayed, name: queue, action: delay, algorithm: leaky_bucket, limit: {count: 10, period: 1s, burst: 5}}
`;
/** Settings of the server: it identifies the callers. */
const CONFIG = { identity: { trusted: ["10.0.0.0/8"], headers: { agent: "user-agent" } } };
let keys = 0;
const freshKey = () => `key-${++keys}`;

/** Requests end when a test says so. */
const gates = new Map();
const gate = (id) => new Promise((resolve) => gates.set(id, resolve));
/** A body that ends when its gate is opened. */
const streamed = (id) => new ReadableStream({ async start(controller) {
  controller.enqueue(new TextEncoder().encode("first"));
  await gate(id);
  try { controller.enqueue(new TextEncoder().encode("last")); controller.close(); } catch { /* The client has left. */ }
} });
const forever = (id) => { gates.set(id, () => undefined); return new Promise(() => undefined); };

const FRAMEWORKS = {
  async express(options) {
    const app = express();
    app.use(expressTollgate(options));
    app.get("/slow", async (request, response) => { await gate(request.query.id); response.send("slow"); });
    app.get("/stuck", (request) => forever(request.query.id));
    app.get("/stream", async (request, response) => { response.write("first"); await gate(request.query.id); response.end("last"); });
    app.get("/fail", () => { throw new Error("broken"); });
    app.all("/*any", (request, response) => { response.send(`remaining ${response.locals.tollgate?.remaining}`); });
    app.use((error, request, response, next) => { response.status(500).end(); void next; });
    const server = app.listen(0, "127.0.0.1");
    await once(server, "listening");
    return { port: server.address().port, close: () => { server.closeAllConnections(); server.close(); } };
  },
  async fastify(options) {
    const app = Fastify({ forceCloseConnections: true });
    await app.register(fastifyTollgate, options);
    app.get("/slow", async (request) => { await gate(request.query.id); return "slow"; });
    app.get("/stuck", (request) => forever(request.query.id));
    app.get("/stream", (request, reply) => reply.send(streamed(request.query.id)));
    app.get("/fail", async () => { throw new Error("broken"); });
    app.all("/*", async (request) => `remaining ${request.tollgate?.remaining}`);
    await app.listen({ port: 0, host: "127.0.0.1" });
    return { port: app.server.address().port, close: () => app.close() };
  },
  async hono(options) {
    const app = new Hono();
    app.use(honoTollgate(options));
    app.get("/slow", async (c) => { await gate(c.req.query("id")); return c.text("slow"); });
    app.get("/stuck", (c) => forever(c.req.query("id")));
    app.get("/stream", (c) => c.body(streamed(c.req.query("id"))));
    app.get("/fail", () => { throw new Error("broken"); });
    app.all("/*", (c) => c.text(`remaining ${c.get("tollgate")?.remaining}`));
    app.onError((error, c) => c.text("broken", 500));
    const server = serve({ fetch: app.fetch, port: 0, hostname: "127.0.0.1" });
    await once(server, "listening");
    return { port: server.address().port, close: () => { server.closeAllConnections(); server.close(); } };
  },
  async next(options) {
    const handlers = {
      "/slow": async (request) => { await gate(new URL(request.url).searchParams.get("id")); return new Response("slow"); },
      "/stuck": (request) => forever(new URL(request.url).searchParams.get("id")),
      "/stream": (request) => new Response(streamed(new URL(request.url).searchParams.get("id"))),
      "/fail": async () => { throw new Error("broken"); },
      "/": async () => Response.json({ ok: true }),
    };
    const wrapped = new Map(Object.entries(handlers).map(([path, handler]) => [path, withRatelimit(handler, { peer: (request) => request.headers.get("x-peer"), ...options })]));
    // Next.js hands its handlers web requests; so does this.
    const server = createServer(async (incoming, outgoing) => {
      const headers = new Headers();
      for (let at = 0; at < incoming.rawHeaders.length; at += 2) headers.append(incoming.rawHeaders[at], incoming.rawHeaders[at + 1]);
      headers.set("x-peer", incoming.socket.remoteAddress);
      const left = new AbortController();
      outgoing.on("close", () => left.abort());
      const request = new Request(`http://${incoming.headers.host}${incoming.url}`, { method: incoming.method, headers, signal: left.signal });
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
function get(port, path, headers = [], method = "GET") {
  return new Promise((resolve, reject) => {
    const request = httpRequest({ ...(typeof port === "string" ? { socketPath: port } : { port }), path, method, host: "127.0.0.1", agent: false });
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

/** A request whose client leaves when the test says so. */
function leaving(port, path) {
  const request = httpRequest({ port, path, host: "127.0.0.1", agent: false });
  request.on("error", () => undefined);
  request.end();
  return request;
}

const refusedHeads = [
  ["an escaped slash", "/login%2F", [], 400, "Ambiguous request"],
  ["two slashes", "//login", [], 400, "Ambiguous request"],
  ["two API keys", "/items", [["x-api-key", "a1"], ["x-api-key", "b1"]], 400, "Ambiguous request"],
  ["a key and another bearer", "/items", [["x-api-key", "a1"], ["authorization", "Bearer b1"]], 400, "Ambiguous request"],
  ["an alias of the key's header", "/items", [["x_api_key", "a1"]], 400, "Ambiguous request"],
  ["another method in a header", "/items", [["x-http-method-override", "DELETE"]], 400, "Ambiguous request"],
  ["an unreadable credential", "/items", [["authorization", "Basic ???"]], 401, "Unreadable credential"],
  ["a key with other than visible ASCII", "/items", [["x-api-key", "caf\u00e9"]], 401, "Unreadable credential"],
];

for (const [name, start] of Object.entries(FRAMEWORKS)) {
  describe(name, () => {
    let server, proxy, ratelimit, app;
    before(async () => {
      server = await Tollgate.start(RULES, { config: CONFIG });
      proxy = await FaultProxy.start(server.url);
      ratelimit = new Ratelimit({ url: proxy.url, domain: "shop", timeout: 10_000 });
      app = await start({ ratelimit });
    });
    after(async () => { await app.close(); await proxy.close(); await server.close(); });
    const remaining = async (attributes) => (await ratelimit.peek(attributes)).remaining;
    const sent = (path) => proxy.requests.filter((request) => request.path === path).length;

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

    for (const [what, path, headers, status, title] of refusedHeads) {
      it(`refuses as the server does: ${what}`, async () => {
        const before = await remaining({ remote_address: "127.0.0.1" });
        const response = await get(app.port, path, headers);
        // `Headers` joins two keys to one that cannot be read.
        const joined = name === "next" && headers[0]?.[0] === headers[1]?.[0] && headers.length > 1;
        const expected = joined ? [401, "Unreadable credential"] : [status, title];
        const problem = JSON.parse(response.body);
        assert.deepEqual([response.status, problem.title], expected);
        assert.equal(problem.status, response.status);
        assert.match(response.headers["content-type"], /^application\/problem\+json/);
        assert.equal(response.headers["www-authenticate"], response.status === 401 ? "Bearer" : undefined);
        assert.equal(await remaining({ remote_address: "127.0.0.1" }), before, "nothing was charged");
      });
    }

    it("refuses a head that is too large to be checked", async () => {
      const long = await get(app.port, "/items", [["x-long", "y".repeat(9_000)]]);
      assert.equal(long.status, 200, "a long cookie is none");
      const many = await get(app.port, "/items", Array.from({ length: 300 }, (_, at) => [`x-${at}`, "1"]));
      assert.equal(many.status, 400);
    });

    it("counts all spellings of an endpoint as one", async () => {
      for (const [path, status] of [["/login", 200], ["/%6Cogin/?next=1", 200], ["/login;a=b", 429], ["/login", 429]]) {
        assert.equal((await get(app.port, path, [], "POST")).status, status, path);
      }
    });

    it("sends header fields as bytes", async () => {
      // Latin-1 on the wire is what the characters of this string are: the UTF-8 of `caf\u00e9`.
      const agent = Buffer.from(`caf\u00e9-${name}`, "utf8").toString("latin1");
      assert.equal((await get(app.port, "/items", [["user-agent", agent]])).status, 200);
      assert.equal(await remaining({ agent: `caf\u00e9-${name}` }), 999);
    });

    it("counts the peer's address, and a forwarded one only from a trusted proxy", async (t) => {
      const { status, headers } = await get(app.port, "/items", [["x-forwarded-for", "198.51.100.7"]]);
      assert.equal(status, 200);
      assert.match(headers.ratelimit, /^"per-a/);
      assert.equal(await remaining({ remote_address: "198.51.100.7" }), 1_000_000, "an untrusted peer's header changes nothing");
      const behind = await start({ ratelimit, peer: () => "10.1.2.3" });
      t.after(() => behind.close());
      for (const forwarded of [[["x-forwarded-for", "203.0.113.9, 198.51.100.7"]], [["x-forwarded-for", "203.0.113.9"], ["x-forwarded-for", "198.51.100.7, 10.9.9.9"]]]) {
        const before = await remaining({ remote_address: "198.51.100.7" });
        assert.equal((await get(behind.port, "/items", forwarded)).status, 200);
        assert.equal(await remaining({ remote_address: "198.51.100.7" }), before - 1, "the rightmost that is not a proxy");
      }
      assert.equal(await remaining({ remote_address: "203.0.113.9" }), 1_000_000, "callers write what they like further left");
    });

    it("returns the permit when the response ends", async () => {
      for (const id of ["one", "two"]) {
        const settled = sent("/v1/settle");
        const first = get(app.port, `/slow?id=${name}-${id}`);
        await eventually(() => gates.has(`${name}-${id}`), "the request is in the handler");
        assert.equal((await get(app.port, "/slow?id=none")).status, 429, "the permit is held");
        gates.get(`${name}-${id}`)();
        assert.equal((await first).status, 200);
        await eventually(async () => (await remaining({ endpoint: "GET /slow" })) === 1, "the permit is back");
        assert.equal(sent("/v1/settle"), settled + 1, "once");
      }
    });

    it("holds the permit while the response streams", async () => {
      const id = `${name}-stream`;
      const streaming = httpRequest({ port: app.port, path: `/stream?id=${id}`, host: "127.0.0.1", agent: false }).end();
      const [response] = await once(streaming, "response");
      const [first] = await once(response, "data");
      assert.equal(String(first), "first");
      await eventually(() => gates.has(id), "the body waits");
      assert.equal((await get(app.port, "/stream?id=none")).status, 429, "the permit is held");
      const settled = sent("/v1/settle");
      gates.get(id)();
      let rest = "";
      for await (const part of response) rest += part;
      assert.equal(rest, "last");
      await eventually(async () => (await remaining({ endpoint: "GET /stream" })) === 1, "the permit is back");
      assert.equal(sent("/v1/settle"), settled + 1, "once");
    });

    it("returns the permit when the client leaves: before the handler ends, in a stream, in a handler that never ends", async () => {
      for (const path of ["/slow", "/stream", "/stuck"]) {
        const id = `${name}-leaves${path}`;
        const settled = sent("/v1/settle");
        const request = leaving(app.port, `${path}?id=${id}`);
        const response = path === "/stream" ? once(request, "response") : null;
        await eventually(() => gates.has(id), "the request is in the handler");
        if (response !== null) await once((await response)[0].on("error", () => undefined), "data");
        request.destroy();
        await eventually(async () => (await remaining({ endpoint: `GET ${path}` })) === 1, `${path}: the permit is back`);
        gates.get(id)();
        await new Promise((resolve) => setImmediate(resolve));
        assert.equal(sent("/v1/settle"), settled + 1, "once");
      }
    });

    it("returns the permit of a client that leaves during the check, and runs no handler for it", async () => {
      const id = `${name}-early`;
      proxy.mode = "slow";
      proxy.slowMs = 300;
      try {
        const [reserved, settled] = [sent("/v1/reserve"), sent("/v1/settle")];
        const request = leaving(app.port, `/slow?id=${id}`);
        await eventually(() => sent("/v1/reserve") === reserved + 1, "the check is under way");
        request.destroy();
        await eventually(() => sent("/v1/settle") === settled + 1, "the permit is returned");
      } finally {
        proxy.mode = "pass";
      }
      await eventually(async () => (await remaining({ endpoint: "GET /slow" })) === 1, "the permit is back");
      assert.equal(gates.has(id), false, "the handler did not run");
    });

    it("returns the permit when the handler fails", async () => {
      for (let time = 0; time < 2; time += 1) {
        const settled = sent("/v1/settle");
        assert.equal((await get(app.port, "/fail")).status, 500);
        await eventually(async () => (await remaining({ endpoint: "GET /fail" })) === 1, "the permit is back");
        assert.equal(sent("/v1/settle"), settled + 1, "once");
      }
    });

    it("takes one request to the server where there is no concurrency limit", async () => {
      const path = `/plain-${name}`;
      await get(app.port, path);
      const before = ["/v1/check", "/v1/reserve", "/v1/settle"].map(sent);
      await eventually(async () => { await get(app.port, path); return sent("/v1/check") > before[0]; }, "learned");
      const after = ["/v1/check", "/v1/reserve", "/v1/settle"].map(sent);
      for (let time = 0; time < 3; time += 1) assert.equal((await get(app.port, path)).status, 200);
      assert.deepEqual(["/v1/check", "/v1/reserve", "/v1/settle"].map(sent), [after[0] + 3, after[1], after[2]]);
    });

    it("delays what a rule asks to delay", async () => {
      const started = performance.now();
      for (let request = 0; request < 3; request += 1) assert.equal((await get(app.port, "/delayed")).status, 200);
      assert.ok(performance.now() - started >= 150, "the second and third wait their turn");
    });

    it("responds 503 if it fails closed, and lets through if it fails open", async (t) => {
      const dead = `http://127.0.0.1:${await unusedPort()}`;
      for (const [failPolicy, status] of [["closed", 503], ["open", 200]]) {
        const guarded = await start({ ratelimit: new Ratelimit({ url: dead, domain: "shop", failPolicy, timeout: 10_000 }) });
        t.after(() => guarded.close());
        const response = await get(guarded.port, "/items");
        assert.equal(response.status, status);
        if (status === 503) {
          assert.equal(response.headers["retry-after"], "1");
          assert.match(JSON.parse(response.body).type, /#temporary-reduced-capacity$/);
        }
      }
    });

    it("checks what the service itself knows, beside the head", async (t) => {
      const tenant = freshKey();
      const guarded = await start({ ratelimit, cost: 2, identify: () => ({ tenant }) });
      t.after(() => guarded.close());
      const before = await remaining({ remote_address: "127.0.0.1" });
      assert.equal((await get(guarded.port, "/items")).headers.ratelimit?.slice(0, 16), '"per-tenant";r=8');
      assert.equal(await remaining({ tenant }), 8);
      assert.equal(await remaining({ remote_address: "127.0.0.1" }), before - 2);
      assert.equal((await get(guarded.port, "/login%2F")).status, 400, "the head is still the server's to judge");
    });

    it("checks what the service says instead, and lets through what it says", async (t) => {
      const key = freshKey();
      const url = (request) => request.raw?.url ?? request.req?.url ?? request.url;
      const guarded = await start({ ratelimit, head: false, cost: 2, identify: async (request) => (url(request).endsWith("/free") ? null : key) });
      t.after(() => guarded.close());
      assert.equal((await get(guarded.port, "/items")).headers.ratelimit?.slice(0, 13), '"per-key";r=1');
      assert.equal((await get(guarded.port, "/items")).status, 429);
      assert.equal((await get(guarded.port, "/free")).status, 200);
    });

    it("repeats a denial only for the same head", async (t) => {
      const key = freshKey();
      const guarded = await start({ ratelimit: new Ratelimit({ url: proxy.url, domain: "shop", timeout: 10_000 }) });
      t.after(() => guarded.close());
      const asked = () => sent("/v1/check") + sent("/v1/reserve");
      const deny = async (headers) => { const before = asked(); return [(await get(guarded.port, "/items", headers)).status, asked() - before]; };
      for (let time = 0; time < 3; time += 1) assert.equal((await get(guarded.port, "/items", [["x-api-key", key]])).status, 200);
      assert.deepEqual(await deny([["x-api-key", key]]), [429, 1]);
      assert.deepEqual(await deny([["x-api-key", key]]), [429, 0], "known");
      assert.equal((await get(guarded.port, "/items?secret=1", [["x-api-key", key]])).status, 429);
      assert.ok(proxy.requests.every(({ body }) => !body.includes("secret")), "a query stays here");
      assert.deepEqual(await deny([["authorization", `Bearer ${key}`]]), [429, 1], "another head, the same caller");
      assert.deepEqual(await deny([["x-api-key", freshKey()]]), [200, 1], "another caller");
      const long = [["x-api-key", key], ["x-long", "y".repeat(5_000)]];
      assert.deepEqual([await deny(long), await deny(long)], [[429, 1], [429, 1]], "a head too long to be stored");
    });
  });
}

describe("Node's other servers", () => {
  let server, ratelimit;
  before(async () => {
    server = await Tollgate.start(RULES, { config: CONFIG });
    ratelimit = new Ratelimit({ url: server.url, domain: "shop", timeout: 10_000 });
  });
  after(() => server.close());

  it("a Unix socket has no peer: that is said, and can be named", async (t) => {
    const folder = mkdtempSync(join(tmpdir(), "tollgate-unix-"));
    t.after(() => rmSync(folder, { recursive: true, force: true }));
    for (const [peer, status] of [[undefined, 500], [() => "10.0.0.1", 200]]) {
      const path = join(folder, `${status}.sock`);
      let message = "";
      const app = express();
      app.use(expressTollgate({ ratelimit, ...(peer === undefined ? {} : { peer }) }));
      app.get("/", (request, response) => { response.send("ok"); });
      app.use((error, request, response, next) => { message = error.message; response.status(500).end(); void next; });
      const listening = app.listen(path);
      await once(listening, "listening");
      t.after(() => { listening.closeAllConnections(); listening.close(); });
      assert.equal((await get(path, "/", [["x-forwarded-for", "198.51.100.77"]])).status, status);
      if (status === 500) assert.match(message, /^the peer's address is unknown; write `peer: /);
    }
    assert.equal((await ratelimit.peek({ remote_address: "198.51.100.77" })).remaining, 999_999);
  });

  it("HTTP/2: pseudo-header fields are no fields, the authority is the host", async (t) => {
    const app = Fastify({ http2: true });
    await app.register(fastifyTollgate, { ratelimit });
    app.get("/slow", async () => "slow");
    await app.listen({ port: 0, host: "127.0.0.1" });
    const client = http2Connect(`http://127.0.0.1:${app.server.address().port}`);
    t.after(() => { client.destroy(); return app.close(); });
    const send = async (headers) => {
      const stream = client.request(headers);
      const [response] = await once(stream, "response");
      stream.resume();
      await once(stream, "close");
      return response[":status"];
    };
    for (let time = 0; time < 2; time += 1) {
      assert.equal(await send({ ":path": "/slow", "x-api-key": "h2-key" }), 200);
      await eventually(async () => (await ratelimit.peek({ endpoint: "GET /slow" })).remaining === 1, "the permit is back");
    }
    assert.equal((await ratelimit.peek({ api_key: "h2-key" })).remaining, 1);
    assert.equal(await send({ ":path": "/slow%2F" }), 400);
  });

  it("Hono without Node's connection ends the permit with the body, the signal or an error", async () => {
    const app = new Hono();
    const waited = [];
    app.use(honoTollgate({ ratelimit, peer: () => "192.0.2.1", permits: true, waitUntil: (done) => { waited.push(done); } }));
    app.get("/slow", (c) => c.text("slow"));
    app.get("/stuck", (c) => forever(c.req.query("id")));
    app.get("/stream", (c) => c.body(streamed(c.req.query("id"))));
    app.get("/fail", () => { throw new Error("broken"); });
    app.onError((error, c) => c.text("broken", 500));
    const back = (path) => eventually(async () => (await ratelimit.peek({ endpoint: `GET ${path}` })).remaining === 1, `${path}: the permit is back`);
    await (await app.request("/slow")).text();
    await back("/slow");
    await app.request("/slow", { method: "HEAD" });
    await back("/slow");
    const failed = await app.request("/fail");
    assert.deepEqual([failed.status, await failed.text()], [500, "broken"]);
    await back("/fail");
    const stream = await app.request("/stream?id=worker-stream");
    assert.equal((await app.request("/stream?id=none")).status, 429);
    await stream.body.cancel();
    await back("/stream");
    const left = new AbortController();
    void app.request("/stuck?id=worker-stuck", { signal: left.signal });
    await eventually(() => gates.has("worker-stuck"), "the request is in the handler");
    left.abort();
    await back("/stuck");
    assert.equal(waited.length, 5, "each return once");
    assert.deepEqual((await Promise.all(waited)).map(({ ended }) => ended), Array(5).fill("settled"));
  });
});

describe("endpoints", () => {
  it("stand for the shape of a path", () => {
    assert.equal(endpointOf("GET", "/users/42/orders?page=1"), "GET /users/*/orders");
    assert.equal(endpointOf("GET", "/"), "GET /");
    assert.equal(endpointOf("GET", "/a/b/c/d/e/f/g/h/i/j"), "GET /a/b/c/d/e/f/g/h");
    assert.equal(endpointOf("GET", `/${"a".repeat(33)}/x`), "GET /*/x");
  });

  it("are learned, stay bounded, and might hold a permit unless known", () => {
    const endpoints = new Endpoints();
    assert.equal(endpoints.mayHold("GET /a"), true);
    endpoints.learn("GET /a", false);
    assert.equal(endpoints.mayHold("GET /a"), false);
    endpoints.learn("GET /a", true);
    endpoints.learn("GET /a", false);
    assert.equal(endpoints.mayHold("GET /a"), true, "some callers have a limit");
    endpoints.learn("GET /b", false);
    for (let at = 0; at < 2_000; at += 1) endpoints.learn(`GET /${at}`, false);
    assert.equal(endpoints.mayHold("GET /b"), true, "forgotten");
    assert.equal(endpoints.mayHold("GET /1999"), false);
  });
});
