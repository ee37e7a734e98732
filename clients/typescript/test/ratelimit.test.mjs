// The client against the real server, directly and through a proxy that misbehaves.
import assert from "node:assert/strict";
import { after, before, describe, it } from "node:test";
import { Ratelimit } from "../dist/esm/index.js";
import { eventually, FakeServer, FaultProxy, Tollgate, unusedPort } from "./servers.mjs";

const RULES = `
domain: shop
descriptors:
  - {key: api_key, name: per-key, limit: {count: 5, period: 1h, algorithm: sliding_window}}
  - {key: quick, name: quick, limit: {count: 1, period: 300ms, algorithm: sliding_log}}
  - {key: slots, name: slots, concurrency: {limit: 1, ttl: 60s}}
  - {key: tokens, name: tokens, limit: {count: 1000, period: 1h, algorithm: sliding_window}}
`;
const PATIENT = { timeout: 10_000 };
/** A promise that is resolved from outside. */
function gate() {
  let resolve;
  const promise = new Promise((done) => { resolve = done; });
  return { promise, resolve };
}

const ALLOWED = { allowed: true, decision_id: "d", origin: "store", limits: [] };
const DENIED = {
  allowed: false, decision_id: "d", origin: "store", denied_by: "r", retry_after_ms: 60_000,
  limits: [{ rule: "r", limit: 1, remaining: 0, reset_ms: 60_000, over: true }],
};
let keys = 0;
const freshKey = () => `key-${++keys}`;

describe("one server", () => {
  let server, client;
  before(async () => {
    server = await Tollgate.start(RULES, { admin: true });
    client = new Ratelimit({ url: server.url, domain: "shop", admin: { url: server.adminUrl }, ...PATIENT });
  });
  after(() => server.close());

  it("allows up to the limit, then denies with the rule, the time and the decision", async () => {
    const key = freshKey();
    for (let remaining = 4; remaining >= 0; remaining -= 1) {
      const result = await client.limit(key);
      assert.equal(result.success, true);
      assert.deepEqual([result.limit, result.remaining, result.reason, result.source], [5, remaining, "allowed", "server"]);
      assert.ok(result.reset > Date.now());
    }
    const denied = await client.limit(key);
    assert.deepEqual([denied.allowed, denied.success, denied.rule, denied.remaining, denied.reason, denied.source], [false, false, "per-key", 0, "denied", "server"]);
    assert.ok(denied.retryAfterMs > 60_000 && denied.retryAfterMs <= 7_200_000);
    assert.match(denied.decisionId, /^[0-9a-f]{32}$/);
  });

  it("answers a known denial itself, but not a smaller cost or another key", async () => {
    const key = freshKey();
    assert.equal((await client.limit(key, { cost: 3 })).allowed, true);
    assert.equal((await client.limit(key, { cost: 3 })).source, "server");
    const cached = await client.limit(key, { cost: 3 });
    assert.deepEqual([cached.allowed, cached.source, cached.reason, cached.rule], [false, "cache", "denied", "per-key"]);
    assert.equal((await client.limit(key, { cost: 4 })).source, "cache");
    assert.deepEqual([(await client.limit(key, { cost: 2 })).allowed, (await client.limit(freshKey())).allowed], [true, true]);
  });

  it("asks again when a denial has ended, exactly", async () => {
    const input = { quick: freshKey() };
    assert.equal((await client.limit(input)).allowed, true);
    const denied = await client.limit(input);
    assert.equal(denied.allowed, false);
    const ready = await client.blockUntilReady(input, 20_000);
    assert.deepEqual([ready.allowed, ready.source], [true, "server"]);
  });

  it("returns at once if it cannot become ready in time", async () => {
    const key = freshKey();
    await client.limit(key, { cost: 5 });
    const result = await client.blockUntilReady(key, 1_000);
    assert.equal(result.allowed, false);
    assert.equal((await client.blockUntilReady(freshKey(), 1_000, { cost: 6 })).retryAfterMs, null, "it would never pass");
  });

  it("peeks without charging", async () => {
    const key = freshKey();
    await client.limit(key, { cost: 2 });
    assert.equal((await client.peek(key)).remaining, 3);
    const { remaining, limit, reset } = await client.getRemaining(key);
    assert.deepEqual([remaining, limit], [3, 5]);
    assert.ok(reset > Date.now());
  });

  it("resets the used tokens", async () => {
    const key = freshKey();
    await client.limit(key, { cost: 5 });
    assert.equal((await client.limit(key)).allowed, false);
    await client.resetUsedTokens(key);
    assert.equal((await client.limit(key)).remaining, 4);
  });

  it("says what the admin API rejects", async () => {
    const wrong = new Ratelimit({ url: server.url, domain: "shop", admin: { url: server.adminUrl, token: "tg_wrong" } });
    await assert.rejects(wrong.resetUsedTokens("x"), /the usage was not reset: 401/);
    await assert.rejects(new Ratelimit({ url: server.url, domain: "shop" }).resetUsedTokens("x"), /no admin API/);
  });

  it("reserves, settles and cancels", async () => {
    const input = { tokens: freshKey() };
    const first = await client.reserve(input, { cost: 900 });
    assert.equal((await client.peek(input)).remaining, 100);
    assert.deepEqual(await first.reservation.settle(300), { ended: "settled", cost: 300, reason: null });
    assert.equal((await client.peek(input)).remaining, 700);
    const second = await client.reserve(input, { cost: 700 });
    assert.deepEqual(await second.reservation.cancel(), { ended: "canceled", cost: null, reason: null });
    assert.equal((await client.peek(input)).remaining, 700);
    assert.equal((await second.reservation.settle(5)).reason, "conflict");
    assert.equal((await client.cancel({ id: "0".repeat(32), server: 0 })).reason, "unknown");
    const denied = await client.reserve(input, { cost: 701 });
    assert.deepEqual([denied.allowed, denied.reservation], [false, null]);
  });

  it("reserves once for one idempotency key", async () => {
    const input = { tokens: freshKey() };
    const key = freshKey();
    const one = await client.reserve(input, { cost: 10, idempotencyKey: key });
    const two = await client.reserve(input, { cost: 10, idempotencyKey: key });
    assert.equal(one.reservation.id, two.reservation.id);
    assert.equal((await client.peek(input)).remaining, 990);
  });

  it("releases a concurrency permit when it is settled", async () => {
    const input = { slots: freshKey() };
    const held = await client.reserve(input);
    assert.equal((await client.reserve(input)).allowed, false);
    assert.equal((await client.reserve(input)).source, "server", "a permit may be released at any time");
    await held.reservation.settle(1);
    assert.equal((await client.reserve(input)).allowed, true);
  });

  it("checks a batch in order, with bounded concurrency", async () => {
    const key = freshKey();
    const results = await client.limitBatch([...Array(8).fill({ input: key }), { input: freshKey(), cost: 5 }], { concurrency: 3 });
    assert.equal(results.length, 9);
    assert.equal(results.slice(0, 8).filter(({ allowed }) => allowed).length, 5);
    assert.deepEqual([results[8].allowed, results[8].remaining], [true, 0]);
  });

  it("accepts attributes and descriptors with their own limit", async () => {
    const descriptors = [{ entries: [["plan", freshKey()]], limit: { requests_per_unit: 2, unit: "hour" } }];
    assert.equal((await client.peek({ descriptors })).remaining, 2);
    assert.deepEqual([(await client.limit({ descriptors })).remaining, (await client.limit({ descriptors })).remaining], [1, 0]);
    assert.equal((await client.limit({ descriptors })).allowed, false);
    assert.equal((await client.limit({ nothing: "matches" })).reason, "unmatched");
  });

  it("denies what the server rejects, under either policy", async () => {
    const open = new Ratelimit({ url: server.url, domain: "shop", failPolicy: "open", ...PATIENT });
    const tooMany = Object.fromEntries(Array.from({ length: 300 }, (_, number) => [`key${number}`, "x"]));
    const result = await open.limit(tooMany);
    assert.deepEqual([result.allowed, result.reason, result.source], [false, "rejected", "server"]);
  });

  it("rejects with the caller's reason if it is aborted, and keeps the caller's deadline", async (t) => {
    await assert.rejects(client.limit(freshKey(), { signal: AbortSignal.abort(new Error("gone")) }), /gone/);
    const controller = new AbortController();
    const hanging = await FakeServer.start(() => { controller.abort(new Error("left")); return "hang"; });
    t.after(() => hanging.close());
    const slow = new Ratelimit({ url: hanging.url, domain: "shop", ...PATIENT });
    await assert.rejects(slow.limit("x", { signal: controller.signal }), /left/);
    const started = performance.now();
    assert.equal((await slow.limit("x", { deadlineMs: 30 })).reason, "timeout");
    assert.ok(performance.now() - started < 5_000);
  });

  it("refuses arguments that no server would accept", async () => {
    await assert.rejects(client.limit("x", { cost: -1 }), TypeError);
    await assert.rejects(client.limit("x", { cost: 1.5 }), TypeError);
    assert.throws(() => new Ratelimit({ url: [], domain: "d" }), TypeError);
    assert.throws(() => new Ratelimit({ url: "ftp://x", domain: "d" }), TypeError);
    assert.throws(() => new Ratelimit({ url: "http://x", domain: "" }), TypeError);
  });
});

describe("a server behind a proxy that misbehaves", () => {
  let server, proxy;
  before(async () => {
    server = await Tollgate.start(RULES);
    proxy = await FaultProxy.start(server.url);
  });
  after(async () => { await proxy.close(); await server.close(); });

  for (const [mode, reason] of [["cut", "unreachable"], ["hang", "timeout"], ["garbage", "invalid_response"], ["unavailable", "unavailable"]]) {
    for (const failPolicy of ["open", "closed"]) {
      it(`${mode}, fail ${failPolicy}`, async () => {
        const faults = [];
        const client = new Ratelimit({ url: proxy.url, domain: "shop", failPolicy, timeout: mode === "hang" ? 50 : 10_000, onFault: (fault) => faults.push(fault) });
        proxy.mode = mode;
        const result = await client.limit(freshKey());
        assert.deepEqual([result.allowed, result.source, result.reason], [failPolicy === "open", "policy", reason]);
        assert.deepEqual(faults, [{ server: proxy.url, fault: reason }]);
        proxy.mode = "pass";
        const patient = new Ratelimit({ url: proxy.url, domain: "shop", failPolicy, ...PATIENT });
        assert.equal((await patient.limit(freshKey())).source, "server", "the next request is decided again");
      });
    }
  }

  it("gives up a slow server at the deadline of 50 ms by default", async () => {
    proxy.mode = "slow";
    proxy.slowMs = 3_000;
    const started = performance.now();
    const result = await new Ratelimit({ url: proxy.url, domain: "shop" }).limit(freshKey());
    assert.deepEqual([result.allowed, result.reason], [true, "timeout"]);
    assert.ok(performance.now() - started < 2_500);
    proxy.mode = "pass";
  });

  it("cancels a reservation that is answered too late", async () => {
    const input = { tokens: freshKey() };
    proxy.mode = "slow";
    proxy.slowMs = 200;
    const result = await new Ratelimit({ url: proxy.url, domain: "shop", timeout: 50 }).reserve(input, { cost: 100 });
    assert.deepEqual([result.reason, result.reservation], ["timeout", null]);
    await result.pending;
    const direct = new Ratelimit({ url: server.url, domain: "shop", ...PATIENT });
    await eventually(async () => (await direct.peek(input)).remaining === 1000, "the charge is given back");
    proxy.mode = "pass";
  });
});

describe("two servers", () => {
  let one, two, proxy;
  before(async () => {
    [one, two] = await Promise.all([Tollgate.start(RULES), Tollgate.start(RULES)]);
    proxy = await FaultProxy.start(one.url);
  });
  after(async () => { await proxy.close(); await one.close(); await two.close(); });

  it("goes on to the second if the first is dead, and remembers it", async () => {
    const dead = `http://127.0.0.1:${await unusedPort()}`;
    let faults = 0;
    const client = new Ratelimit({ url: [dead, two.url], domain: "shop", failPolicy: "closed", onFault: () => { faults += 1; }, ...PATIENT });
    const key = freshKey();
    for (let remaining = 4; remaining >= 2; remaining -= 1) assert.equal((await client.limit(key)).remaining, remaining);
    assert.equal(faults, 1, "the dead server is asked again only after a while");
  });

  for (const mode of ["cut", "garbage", "unavailable", "hang"]) {
    it(`goes on to the second if the first does this: ${mode}`, async () => {
      proxy.mode = mode;
      const client = new Ratelimit({ url: [proxy.url, two.url], domain: "shop", failPolicy: "closed", timeout: mode === "hang" ? 6_000 : 10_000 });
      const result = await client.limit(freshKey());
      assert.deepEqual([result.allowed, result.source], [true, "server"]);
      proxy.mode = "pass";
    });
  }

  it("hedges: the faster answer counts, the slower one's charge is given back", async () => {
    proxy.mode = "slow";
    proxy.slowMs = 3_000;
    const client = new Ratelimit({ url: [proxy.url, two.url], domain: "shop", hedgeAfterMs: 3, ...PATIENT });
    const key = freshKey();
    const started = performance.now();
    const result = await client.limit(key, { cost: 2 });
    assert.deepEqual([result.allowed, result.remaining, result.source], [true, 3, "server"]);
    assert.ok(performance.now() - started < 2_900, "it did not wait for the slow one");
    proxy.mode = "pass";
    await result.pending;
    const first = new Ratelimit({ url: one.url, domain: "shop", ...PATIENT }), second = new Ratelimit({ url: two.url, domain: "shop", ...PATIENT });
    assert.equal((await first.peek(key)).remaining, 5, "given back");
    assert.equal((await second.peek(key)).remaining, 3, "stands");
  });

  it("does not deny a request because of its own hedge", async (t) => {
    // Two nodes on one store: the first charges and is slow to say so, the second finds nothing left.
    const charged = gate(), denied = gate();
    const forward = async ({ path, body }) => {
      const response = await fetch(two.url + path, { method: "POST", headers: { "content-type": "application/json" }, body });
      return { status: response.status, body: await response.text() };
    };
    const slow = await FakeServer.start(async (request) => {
      const response = await forward(request);
      charged.resolve();
      await denied.promise;
      return response;
    });
    const quick = await FakeServer.start(async (request) => {
      await charged.promise;
      const response = await forward(request);
      setImmediate(denied.resolve);
      return response;
    });
    t.after(() => Promise.all([slow.close(), quick.close()]));
    const client = new Ratelimit({ url: [slow.url, quick.url], domain: "shop", hedgeAfterMs: 1, ...PATIENT });
    const key = freshKey();
    const result = await client.limit(key, { cost: 5 });
    await result.pending;
    assert.deepEqual([result.allowed, result.source, result.remaining], [true, "server", 0]);
    assert.deepEqual([slow.requests.length, quick.requests.length], [1, 1], "nothing is given back");
  });

  it("does not cache a denial beside a request that did not answer", async (t) => {
    const slow = await FakeServer.start(({ at }) => (at === 0 ? "hang" : { status: 200, body: ALLOWED }));
    const quick = await FakeServer.start(() => ({ status: 429, body: DENIED }));
    t.after(() => Promise.all([slow.close(), quick.close()]));
    const client = new Ratelimit({ url: [slow.url, quick.url], domain: "shop", hedgeAfterMs: 1, timeout: 2_000 });
    const first = await client.limit("a");
    assert.deepEqual([first.source, first.reason], ["server", "denied"]);
    assert.equal((await client.limit("a")).allowed, true);
  });

  it("asks a second server for ten calls at once, not for all", async (t) => {
    const release = gate();
    const slow = await FakeServer.start(async () => { await release.promise; return { status: 200, body: ALLOWED }; });
    const quick = await FakeServer.start(() => ({ status: 200, body: ALLOWED }));
    t.after(() => Promise.all([slow.close(), quick.close()]));
    const client = new Ratelimit({ url: [slow.url, quick.url], domain: "shop", hedgeAfterMs: 1, timeout: 60_000 });
    let answered = 0;
    const results = Array.from({ length: 15 }, async (_, call) => {
      const result = await client.limit(`k${call}`);
      if (++answered === 10) release.resolve();
      return result;
    });
    assert.ok((await Promise.all(results)).every(({ allowed, source }) => allowed && source === "server"));
    assert.deepEqual([slow.requests.length, quick.requests.length], [15, 10]);
  });

  it("does not cancel a reservation that both servers return", async (t) => {
    const release = gate(), answer = { status: 200, body: { ...ALLOWED, reservation: "r" } };
    const slow = await FakeServer.start(async () => { await release.promise; return answer; });
    const quick = await FakeServer.start(() => answer);
    t.after(() => Promise.all([slow.close(), quick.close()]));
    const client = new Ratelimit({ url: [slow.url, quick.url], domain: "shop", hedgeAfterMs: 1, timeout: 60_000 });
    const result = await client.reserve("a", { idempotencyKey: "i" });
    release.resolve();
    await result.pending;
    assert.deepEqual([result.reservation.id, slow.requests.length, quick.requests.length], ["r", 1, 1]);
  });

  it("moves a server back that has used its share of the deadline", async (t) => {
    const faults = [];
    const slow = await FakeServer.start(() => "hang"), quick = await FakeServer.start(() => ({ status: 200, body: ALLOWED }));
    t.after(() => Promise.all([slow.close(), quick.close()]));
    const client = new Ratelimit({ url: [slow.url, quick.url], domain: "shop", hedgeAfterMs: 2_000, timeout: 2_000, onFault: ({ server, fault }) => faults.push([server, fault]) });
    assert.equal((await client.limit("a")).source, "server");
    assert.deepEqual(faults, [[slow.url, "timeout"]]);
  });

  it("hedges after the p95 that it has measured", async (t) => {
    let afterMs = 1_000;
    const slow = await FakeServer.start(async () => {
      await new Promise((resolve) => setTimeout(resolve, afterMs));
      return { status: 200, body: ALLOWED };
    });
    const quick = await FakeServer.start(() => ({ status: 200, body: ALLOWED }));
    t.after(() => Promise.all([slow.close(), quick.close()]));
    const client = new Ratelimit({ url: [slow.url, quick.url], domain: "shop", hedgeAfterMs: "p95", timeout: 120_000 });
    // All are slow, so ten are hedged after the default. Those ten count although their hedges were faster.
    const results = await Promise.all(Array.from({ length: 100 }, (_, call) => client.limit(`k${call}`)));
    await Promise.all(results.map(({ pending }) => pending));
    assert.deepEqual([slow.requests.length, quick.requests.length], [100, 10]);
    // The p95 is a second or more, so that an answer which is later than the default needs no hedge.
    afterMs = 20;
    for (let call = 0; call < 20; call += 1) assert.equal((await client.limit(`q${call}`)).source, "server");
    assert.deepEqual([slow.requests.length, quick.requests.length], [120, 10]);
  });

  it("rejects a time to hedge after that is none", () => {
    for (const hedgeAfterMs of [-1, NaN, "p99", "3", null, true]) {
      assert.throws(() => new Ratelimit({ url: "http://127.0.0.1:1", domain: "shop", hedgeAfterMs }), /invalid `hedgeAfterMs`.*write milliseconds, such as 3, or "p95"/);
    }
  });

  it("does not hedge unless it is asked to", async () => {
    proxy.mode = "slow";
    proxy.slowMs = 100;
    const before = proxy.requests.length;
    const key = freshKey();
    await new Ratelimit({ url: [proxy.url, two.url], domain: "shop", ...PATIENT }).limit(key);
    assert.equal(proxy.requests.length, before + 1);
    assert.equal((await new Ratelimit({ url: two.url, domain: "shop", ...PATIENT }).peek(key)).remaining, 5);
    proxy.mode = "pass";
  });
});

describe("the server's store is unavailable", () => {
  it("reports the rule's own fail policy", async (t) => {
    const rules = "domain: shop\ndescriptors:\n  - {key: api_key, name: login, class: security, limit: 5/minute}\n";
    const server = await Tollgate.start(rules, { flags: ["--store", `redis://127.0.0.1:${await unusedPort()}`] });
    t.after(() => server.close());
    const result = await new Ratelimit({ url: server.url, domain: "shop", failPolicy: "open", ...PATIENT }).limit("x");
    assert.deepEqual([result.allowed, result.source, result.reason, result.rule], [false, "server", "fail_closed", "login"]);
  });
});

describe("requests", () => {
  it("carry the token and the headers, on kept connections", async (t) => {
    const decision = { allowed: true, limits: [], decision_id: "d" };
    let connections = 0;
    const server = await FakeServer.start(() => ({ status: 200, body: decision }));
    t.after(() => server.close());
    server.server.on("connection", () => { connections += 1; });
    const client = new Ratelimit({ url: `${server.url}/`, domain: "shop", token: "secret", headers: { "x-team": "a" }, ...PATIENT });
    for (let request = 0; request < 5; request += 1) await client.limit("a");
    assert.match(server.requests[0].head, /^POST \/v1\/check HTTP/);
    assert.match(server.requests[0].head, /authorization: Bearer secret/i);
    assert.match(server.requests[0].head, /x-team: a/i);
    assert.equal(server.requests[0].body, '{"domain":"shop","attributes":{"api_key":"a"}}');
    assert.ok(connections <= 2, `${connections} connections`);
  });

  it("leave no connections to a server that hangs", async (t) => {
    const server = await FakeServer.start(() => "hang");
    t.after(() => server.close());
    const client = new Ratelimit({ url: server.url, domain: "d", timeout: 200 });
    for (let request = 0; request < 6; request += 1) assert.equal((await client.limit("x")).reason, "timeout");
    // Only the one that found it out may wait for the connection's own timeout.
    await eventually(() => server.sockets.size <= 1, "the others are closed");
    assert.equal(server.requests.length, 6);
  });

  it("do not follow redirects: the token stays with its server", async (t) => {
    const other = await FakeServer.start(() => ({ status: 200, body: { allowed: true, limits: [], decision_id: "d" } }));
    const server = await FakeServer.start(() => ({ status: 307, headers: { location: `${other.url}/v1/check` } }));
    t.after(() => Promise.all([server.close(), other.close()]));
    const result = await new Ratelimit({ url: server.url, domain: "shop", token: "secret", failPolicy: "closed", ...PATIENT }).limit("a");
    assert.deepEqual([result.allowed, result.reason, other.requests.length], [false, "invalid_response", 0]);
  });
});
