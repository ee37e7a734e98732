// The paced fetch against real servers with real headers, and against scripted ones in virtual time.
import assert from "node:assert/strict";
import { once } from "node:events";
import { describe, it } from "node:test";
import express from "express";
import { rateLimit } from "express-rate-limit";
import { pacedFetch, Ratelimit, ThrottledError } from "../dist/esm/index.js";
import { tollgate } from "../dist/esm/middleware/express.js";
import { simulate } from "../scripts/simulate.mjs";
import { FakeServer, Tollgate } from "./servers.mjs";

async function listen(t, ...handlers) {
  const app = express();
  const statuses = [];
  app.use((request, response, next) => { response.on("finish", () => statuses.push(response.statusCode)); next(); });
  for (const handler of handlers) app.use(handler);
  app.use((request, response) => { response.send("ok"); });
  const server = app.listen(0, "127.0.0.1");
  await once(server, "listening");
  t.after(() => { server.closeAllConnections(); server.close(); });
  return { url: `http://127.0.0.1:${server.address().port}/`, statuses };
}

/** Time that passes only by waiting. */
function virtualClock() {
  const clock = { ms: 1_700_000_000_000, waits: [], now: () => clock.ms, sleep: async (ms) => { clock.waits.push(ms); clock.ms += ms; } };
  return clock;
}

/** A `fetch` that answers from a list, the last one repeatedly. */
function scripted(...answers) {
  const send = async (request) => {
    const answer = answers[Math.min(send.requests.push(request) - 1, answers.length - 1)];
    if (answer instanceof Error) throw answer;
    return new Response(answer.body ?? null, { status: answer.status ?? 200, headers: answer.headers ?? {} });
  };
  send.requests = [];
  return send;
}

describe("real servers", () => {
  it("is not refused by a service behind Tollgate, where a plain client is", async (t) => {
    const server = await Tollgate.start("domain: shop\ndescriptors:\n  - {key: api_key, name: per-key, limit: {count: 4, period: 1s, algorithm: sliding_log}}\n");
    t.after(() => server.close());
    const ratelimit = new Ratelimit({ url: server.url, domain: "shop", timeout: 10_000, denyCache: false });
    const { url, statuses } = await listen(t, tollgate({ ratelimit }));
    for (let request = 0; request < 6; request += 1) await (await fetch(url, { headers: { "x-api-key": "plain" } })).text();
    assert.ok(statuses.filter((status) => status === 429).length >= 1);
    statuses.length = 0;
    const paced = pacedFetch();
    for (let request = 0; request < 8; request += 1) {
      const response = await paced(url, { headers: { "x-api-key": "paced" } });
      assert.equal(response.status, 200);
      await response.text();
    }
    assert.deepEqual(statuses, Array(8).fill(200));
  });

  for (const standardHeaders of ["draft-6", "draft-7", "draft-8", false]) {
    it(`reads the headers of express-rate-limit: ${standardHeaders || "X-RateLimit"}`, async (t) => {
      const { url, statuses } = await listen(t, rateLimit({ windowMs: 1_000, limit: 4, standardHeaders, legacyHeaders: standardHeaders === false, validate: false }));
      const paced = pacedFetch();
      for (let request = 0; request < 6; request += 1) {
        const response = await paced(url);
        assert.equal(response.status, 200);
        await response.text();
      }
      assert.deepEqual(statuses, Array(6).fill(200), "nothing was refused");
    });
  }
});

describe("waiting", () => {
  it("honors Retry-After, then goes on", async () => {
    const clock = virtualClock();
    const send = scripted({ status: 429, headers: { "retry-after": "7" } }, { status: 200, body: "ok" });
    const response = await pacedFetch({ fetch: send, clock, random: () => 0 })("http://a.example/");
    assert.equal(await response.text(), "ok");
    assert.equal(clock.ms - 1_700_000_000_000, 7_000);
    assert.equal(send.requests.length, 2);
  });

  it("blocks the host for other requests too, and no other host", async () => {
    const clock = virtualClock();
    const send = scripted({ status: 200, headers: { ratelimit: '"a";r=0;t=9' } }, {});
    const paced = pacedFetch({ fetch: send, clock, random: () => 0 });
    await paced("http://a.example/");
    await paced("http://b.example/");
    assert.deepEqual(clock.waits, []);
    await paced("http://a.example/other");
    assert.deepEqual(clock.waits, [9_000]);
  });

  it("does not wait longer than it may: the refusal is returned, the next request fails at once", async () => {
    const clock = virtualClock();
    const send = scripted({ status: 429, headers: { "retry-after": "600" } });
    const paced = pacedFetch({ fetch: send, clock, random: () => 0, maxWaitMs: 5_000, adaptive: false });
    assert.equal((await paced("http://a.example/")).status, 429);
    await assert.rejects(paced("http://a.example/"), (error) => error instanceof ThrottledError && error.retryAfterMs === 600_000);
    assert.equal(send.requests.length, 1);
  });

  it("spreads what remains over the time to the reset", async () => {
    const clock = virtualClock();
    const send = scripted({ headers: { "ratelimit-policy": '"a";q=10;w=10', ratelimit: '"a";r=5;t=10' } }, {});
    const paced = pacedFetch({ fetch: send, clock, random: () => 0 });
    await paced("http://a.example/");
    for (let request = 0; request < 4; request += 1) await paced("http://a.example/");
    assert.deepEqual(clock.waits, [2_000, 2_000, 2_000, 2_000]);
  });

  it("ends a wait if the caller gives up", async () => {
    const send = scripted({ status: 200, headers: { ratelimit: '"a";r=0;t=9' } });
    const paced = pacedFetch({ fetch: send });
    await paced("http://a.example/");
    await assert.rejects(paced("http://a.example/", { signal: AbortSignal.timeout(20) }), { name: "TimeoutError" });
    assert.equal(send.requests.length, 1);
  });
});

describe("retries", () => {
  const run = (send, init, options = {}) => pacedFetch({ fetch: send, clock: virtualClock(), random: () => 0.5, adaptive: false, ...options })("http://a.example/", init);

  it("sends the body again", async () => {
    const bodies = [];
    let left = 2;
    const send = async (request) => { bodies.push(await request.text()); return new Response(null, { status: left-- > 0 ? 503 : 200 }); };
    assert.equal((await run(send, { method: "PUT", body: "text" })).status, 200);
    assert.deepEqual(bodies, ["text", "text", "text"]);
  });

  it("retries idempotent methods only, unless told otherwise", async () => {
    for (const [method, options, times] of [["POST", {}, 1], ["PATCH", {}, 1], ["GET", {}, 4], ["DELETE", {}, 4], ["POST", { retryMethods: ["POST"] }, 4]]) {
      const send = scripted({ status: 429 });
      assert.equal((await run(send, { method }, options)).status, 429);
      assert.equal(send.requests.length, times, method);
    }
  });

  it("retries failed connections, and 502 and 504, but no other status", async () => {
    const failing = scripted(new TypeError("fetch failed"), { status: 200 });
    assert.equal((await run(failing)).status, 200);
    for (const [status, times] of [[502, 4], [504, 4], [500, 1], [404, 1], [403, 1]]) {
      const send = scripted({ status });
      assert.equal((await run(send)).status, status);
      assert.equal(send.requests.length, times, String(status));
    }
    await assert.rejects(run(scripted(new TypeError("fetch failed"))), /fetch failed/);
  });

  it("stops when the budget is used up", async () => {
    const send = scripted({ status: 503 });
    const paced = pacedFetch({ fetch: send, clock: virtualClock(), random: () => 0.5, adaptive: false, pace: false });
    for (let request = 0; request < 50; request += 1) await paced("http://a.example/");
    // Ten at the start, and one for each ten requests.
    assert.equal(send.requests.length, 50 + 10 + 4);
  });
});

describe("adaptive throttling", () => {
  it("sends less and less to a host that refuses everything, and recovers", async () => {
    const clock = virtualClock();
    let seed = 0, refuses = true, sent = 0;
    const random = () => ((seed = (seed * 1_103_515_245 + 12_345) % 2 ** 31) / 2 ** 31);
    const send = async () => { sent += 1; return new Response(null, { status: refuses ? 429 : 200 }); };
    const paced = pacedFetch({ fetch: send, clock, random, maxRetries: 0 });
    for (let request = 0; request < 1_000; request += 1) {
      clock.ms += 10;
      await paced("http://a.example/").catch((error) => assert.ok(error instanceof ThrottledError));
    }
    assert.ok(sent < 30, `${sent} of 1000 were sent`);
    refuses = false;
    clock.ms += 120_000;
    sent = 0;
    for (let request = 0; request < 100; request += 1) await paced("http://a.example/");
    assert.equal(sent, 100);
  });
});

describe("a fleet in virtual time", () => {
  for (const api of ["fixed window", "token bucket"]) {
    it(`is refused at least 90% less often than with exponential backoff, at the same goodput: ${api}`, async () => {
      const plain = await simulate({ api, strategy: "plain", minutes: 3 });
      const paced = await simulate({ api, strategy: "paced", minutes: 3 });
      assert.ok(paced.refused <= plain.refused * 0.1, `${paced.refused} instead of ${plain.refused}`);
      assert.ok(paced.ok >= plain.ok * 0.97, `${paced.ok} instead of ${plain.ok}`);
    });
  }
});

describe("connections", () => {
  it("are free again after a refusal that is retried", async (t) => {
    const server = await FakeServer.start(({ at }) => (at < 2 ? { status: 503, body: "x".repeat(100_000), headers: { "retry-after": "0" } } : { status: 200, body: "ok" }));
    t.after(() => server.close());
    assert.equal(await (await pacedFetch()(server.url)).text(), "ok");
  });
});
