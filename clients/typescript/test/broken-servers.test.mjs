// Servers that are broken or hostile: what they send is bounded in size and time, and never becomes an allowance or an error.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer } from "node:net";
import { describe, it } from "node:test";
import { brotliCompressSync, gzipSync } from "node:zlib";
import { pacedFetch, Ratelimit } from "../dist/esm/index.js";
import { Endpoints, endpointOf } from "../dist/esm/middleware/endpoints.js";
import { Guard } from "../dist/esm/middleware/guard.js";
import { Permit } from "../dist/esm/middleware/permit.js";
import { eventually, FakeServer } from "./servers.mjs";

const ALLOWED = JSON.stringify({ allowed: true, limits: [], decision_id: "d", origin: "unmatched" });
const whole = (body, ...headers) => `HTTP/1.1 200 OK\r\n${[`content-length: ${Buffer.byteLength(body)}`, ...headers].join("\r\n")}\r\n\r\n${body}`;

/** A server that writes bytes of its own at the first of what it receives; `speak` gets the socket. */
async function rawServer(t, speak) {
  const sockets = new Set();
  const server = createServer((socket) => {
    sockets.add(socket);
    socket.on("error", () => undefined).on("close", () => sockets.delete(socket));
    socket.once("data", () => speak(socket));
  }).listen(0, "127.0.0.1");
  await once(server, "listening");
  t.after(() => { for (const socket of sockets) socket.destroy(); server.close(); });
  return { url: `http://127.0.0.1:${server.address().port}`, sockets };
}

/** Writes until the other side has gone. */
function pour(socket, bytes) {
  const more = () => { while (!socket.destroyed && socket.write(bytes)); };
  socket.on("drain", more);
  more();
}

const ask = (url, more = {}) => new Ratelimit({ url, domain: "d", failPolicy: "closed", timeout: 10_000, ...more }).limit("x");

describe("broken servers", () => {
  for (const [name, encoding, compress] of [["gzip", "gzip", gzipSync], ["brotli", "br", brotliCompressSync]]) {
    it(`a body that unpacks to more than the bound: ${name}`, async (t) => {
      const packed = compress(Buffer.from(ALLOWED.padEnd(4 << 20, " ")));
      assert.ok(packed.length < 65_536);
      const server = await rawServer(t, (socket) => socket.write(Buffer.concat([Buffer.from(`HTTP/1.1 200 OK\r\ncontent-encoding: ${encoding}\r\ncontent-length: ${packed.length}\r\n\r\n`), packed])));
      assert.equal((await ask(server.url)).reason, "invalid_response");
    });
  }

  for (const [name, head, bytes, reasons] of [
    ["a body without end", "HTTP/1.1 200 OK\r\n\r\n", " ".repeat(16_384), ["invalid_response"]],
    ["a length of many digits", `HTTP/1.1 200 OK\r\ncontent-length: ${"9".repeat(5_000)}\r\n\r\n`, " ".repeat(16_384), ["invalid_response", "unreachable"]],
    ["chunks without end", "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", `4000\r\n${" ".repeat(16_384)}\r\n`, ["invalid_response"]],
    ["fields without end", "HTTP/1.1 200 OK\r\n", "x-field: 1\r\n".repeat(1_000), ["unreachable"]],
    ["a field without end", "HTTP/1.1 200 OK\r\nx-field: ", "x".repeat(16_384), ["unreachable"]],
  ]) {
    it(name, async (t) => {
      const server = await rawServer(t, (socket) => { socket.write(head); pour(socket, bytes); });
      const result = await ask(server.url);
      assert.deepEqual([result.allowed, reasons.includes(result.reason)], [false, true], result.reason);
    });
  }

  it("a body that drips", async (t) => {
    const server = await rawServer(t, (socket) => {
      socket.write("HTTP/1.1 200 OK\r\ncontent-length: 60000\r\n\r\n");
      const timer = setInterval(() => (socket.destroyed ? clearInterval(timer) : socket.write(" ")), 5);
    });
    assert.equal((await ask(server.url, { timeout: 100 })).reason, "timeout");
  });

  it("early hints before the answer, and a connection that ends inside of it", async (t) => {
    const hints = await rawServer(t, (socket) => socket.write("HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n".repeat(3) + whole(ALLOWED)));
    assert.deepEqual([(await ask(hints.url)).allowed, (await ask(hints.url)).reason], [true, "unmatched"]);
    const cut = await rawServer(t, (socket) => socket.end(whole(ALLOWED).slice(0, -5)));
    assert.equal((await ask(cut.url)).reason, "unreachable");
  });

  it("the admin token is not sent after a redirect", async (t) => {
    const other = await FakeServer.start(() => ({ status: 200, body: {} }));
    const server = await FakeServer.start(() => ({ status: 307, headers: { location: other.url } }));
    t.after(() => Promise.all([server.close(), other.close()]));
    const client = new Ratelimit({ url: server.url, domain: "d", admin: { url: server.url, token: "secret" } });
    await assert.rejects(client.resetUsedTokens("x"), /was not reset/);
    assert.deepEqual([server.requests.length, other.requests.length], [1, 0]);
  });

  it("a denial of ten years is waited for only by those who have the time", async (t) => {
    const years = 315_360_000_000;
    const limits = [{ rule: "r", limit: 1, remaining: 0, reset_ms: years, over: true }];
    const server = await FakeServer.start(() => ({ status: 429, body: { allowed: false, denied_by: "r", retry_after_ms: years, limits, decision_id: "d", origin: "store" } }));
    t.after(() => server.close());
    const client = new Ratelimit({ url: server.url, domain: "d", timeout: 10_000 });
    assert.equal((await client.blockUntilReady("x", 1_000)).retryAfterMs, years);
    // Timers longer than 24.8 days would end at once, and this would ask without pause.
    const timers = t.mock.method(globalThis, "setTimeout");
    const controller = new AbortController();
    const waiting = client.blockUntilReady("y", Infinity, { signal: controller.signal });
    await eventually(() => timers.mock.calls.some((call) => call.arguments[1] === 2_147_483_647), "it waits");
    assert.equal(server.requests.length, 2);
    controller.abort(new Error("enough"));
    await assert.rejects(waiting, /enough/);
  });

  it("a Retry-After that is no number is not passed on", async (t) => {
    const body = { allowed: false, denied_by: "r", retry_after_ms: 1_500, limits: [], decision_id: "d", origin: "store" };
    const server = await FakeServer.start(() => ({ status: 429, body, headers: { "retry-after": "soon" } }));
    t.after(() => server.close());
    const guard = new Guard({ ratelimit: new Ratelimit({ url: server.url, domain: "d", timeout: 10_000 }), head: false, identify: () => "x" });
    const head = { method: "GET", target: "/", peer: "127.0.0.1", headers: () => [] };
    const verdict = await guard.decide(head, {}, new Permit());
    assert.deepEqual([verdict.status, verdict.fields.get("retry-after"), JSON.parse(verdict.body).retry_after], [429, "2", 2]);
  });

  it("an overloaded server's denial is answered with 503 and its time, and asked for again", async (t) => {
    const body = { allowed: false, denied_by: "login", retry_after_ms: 1_000, limits: [], decision_id: "d", origin: "fail_closed", shed: "security" };
    const server = await FakeServer.start(() => ({ status: 503, body, headers: { "retry-after": "1" } }));
    t.after(() => server.close());
    const faults = [];
    const ratelimit = new Ratelimit({ url: server.url, domain: "d", timeout: 10_000, onFault: (fault) => faults.push(fault) });
    for (let request = 1; request <= 2; request += 1) {
      const result = await ratelimit.limit("x");
      assert.deepEqual([result.shed, result.reason, result.source, result.retryAfterMs, server.requests.length], [true, "shed", "server", 1_000, request]);
    }
    const guard = new Guard({ ratelimit, head: false, identify: () => "x" });
    const verdict = await guard.decide({ method: "GET", target: "/", peer: "127.0.0.1", headers: () => [] }, {}, new Permit());
    assert.deepEqual([verdict.status, verdict.fields.get("retry-after"), faults], [503, "1", []]);
  });

  it("a clock that is set back blocks no host", async (t) => {
    const server = await FakeServer.start(({ at }) => (at === 0 ? { status: 429, headers: { "retry-after": "1" } } : { status: 200, body: "{}" }));
    t.after(() => server.close());
    const paced = pacedFetch({ maxRetries: 0 });
    assert.equal((await paced(server.url)).status, 429);
    t.mock.method(Date, "now", () => 0);
    assert.equal((await paced(server.url)).status, 200);
  });

  it("callers do not choose how much the middleware remembers", () => {
    const endpoints = new Endpoints();
    for (let at = 0; at < 5_000; at += 1) endpoints.learn(endpointOf("GET", `/a${at}/${"x".repeat(at)}`), false);
    assert.equal(endpointOf("X".repeat(9_000), `/${"y".repeat(9_000)}`), "* /*");
  });
});
