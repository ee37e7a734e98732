// The adapters inside the libraries that they are for, with counters at a real server.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createRequire } from "node:module";
import { after, before, describe, it } from "node:test";
import "reflect-metadata";
import express from "express";
import { rateLimit } from "express-rate-limit";
import flexible from "rate-limiter-flexible";
import { TollgateStore } from "../dist/esm/adapters/express-rate-limit.js";
import { TollgateThrottlerStorage } from "../dist/esm/adapters/nestjs-throttler.js";
import { RateLimiterTollgate } from "../dist/esm/adapters/rate-limiter-flexible.js";
import { Ratelimit } from "../dist/esm/index.js";
import { Tollgate, unusedPort } from "./servers.mjs";

const require = createRequire(import.meta.url);
const RULES = `
domain: shop
descriptors:
  - {key: api_key, name: per-key, limit: {count: 3, period: 1h, algorithm: fixed_window}}
`;
let keys = 0;
const freshKey = () => `key-${++keys}`;
let server, ratelimit, dead;
before(async () => {
  server = await Tollgate.start(RULES, { admin: true });
  ratelimit = new Ratelimit({ url: server.url, domain: "shop", admin: { url: server.adminUrl }, timeout: 10_000 });
  dead = new Ratelimit({ url: `http://127.0.0.1:${await unusedPort()}`, domain: "shop", timeout: 10_000 });
});
after(() => server.close());

describe("express-rate-limit", () => {
  async function app(t, options, status = () => 200) {
    const application = express();
    application.use(rateLimit({ windowMs: 3_600_000, limit: 3, standardHeaders: "draft-8", legacyHeaders: false, keyGenerator: (request) => request.headers["x-key"], validate: { unsharedStore: false }, ...options }));
    application.use((request, response) => { response.status(status(request)).send("ok"); });
    application.use((error, request, response, next) => { response.status(500).send(error.message); void next; });
    const listener = application.listen(0, "127.0.0.1");
    await once(listener, "listening");
    t.after(() => { listener.closeAllConnections(); listener.close(); });
    return async (key, headers = {}) => {
      const response = await fetch(`http://127.0.0.1:${listener.address().port}/`, { headers: { "x-key": key, ...headers } });
      await response.text();
      return response;
    };
  }

  it("enforces the library's limit, shared by all processes", async (t) => {
    const one = await app(t, { store: new TollgateStore({ ratelimit }) }), two = await app(t, { store: new TollgateStore({ ratelimit }) });
    const key = freshKey();
    const first = await one(key);
    assert.equal(first.status, 200);
    assert.match(first.headers.get("ratelimit"), /r=2/);
    assert.deepEqual([(await two(key)).status, (await one(key)).status], [200, 200]);
    const denied = await two(key);
    assert.equal(denied.status, 429);
    assert.match(denied.headers.get("ratelimit"), /r=0/);
    assert.ok(Number(denied.headers.get("retry-after")) > 60);
    assert.equal((await one(freshKey())).status, 200);
  });

  it("gives back what the library decrements", async (t) => {
    const get = await app(t, { store: new TollgateStore({ ratelimit, use: "rules" }), skipFailedRequests: true }, (request) => Number(request.headers["x-status"] ?? 200));
    const key = freshKey();
    for (let request = 0; request < 5; request += 1) assert.equal((await get(key, { "x-status": "404" })).status, 404);
    for (let request = 0; request < 3; request += 1) assert.equal((await get(key)).status, 200);
    assert.equal((await get(key)).status, 429);
  });

  it("uses the rules' limit where it is told to, and resets a key", async () => {
    const store = new TollgateStore({ ratelimit, use: "rules" });
    store.init({ windowMs: 12_345, limit: () => 5 });
    const key = freshKey();
    assert.equal(await store.get(key), undefined);
    for (let hits = 1; hits <= 4; hits += 1) assert.equal((await store.increment(key)).totalHits, hits);
    assert.ok((await store.get(key)).resetTime > new Date());
    await store.resetKey(key);
    assert.equal((await store.increment(key)).totalHits, 1);
  });

  it("counts windows of any length", async (t) => {
    const get = await app(t, { store: new TollgateStore({ ratelimit }), windowMs: 15 * 60_000 });
    const key = freshKey();
    for (let request = 0; request < 3; request += 1) assert.equal((await get(key)).status, 200);
    const denied = await get(key);
    assert.equal(denied.status, 429);
    assert.ok(Number(denied.headers.get("retry-after")) <= 900);
  });

  it("leaves an unavailable server to the library's own setting", async (t) => {
    const strict = await app(t, { store: new TollgateStore({ ratelimit: dead }) });
    assert.equal((await strict(freshKey())).status, 500);
    const lenient = await app(t, { store: new TollgateStore({ ratelimit: dead }), passOnStoreError: true, validate: false });
    assert.equal((await lenient(freshKey())).status, 200);
  });

  it("says what it cannot do", async () => {
    for (const windowMs of [0, 1.5, 1e15]) assert.throws(() => new TollgateStore({ ratelimit }).init({ windowMs, limit: 5 }), /has no inline limit/);
    assert.throws(() => new TollgateStore({ ratelimit }).init({ windowMs: 60_000, limit: () => 5 }), /is a function/);
    await assert.rejects(new TollgateStore({ ratelimit }).resetKey("x"), /cannot be reset/);
  });
});

describe("@nestjs/throttler", () => {
  it("throttles a Nest application, shared by all processes", async (t) => {
    const { Controller, Get, Module } = require("@nestjs/common");
    const { APP_GUARD, NestFactory } = require("@nestjs/core");
    const { ThrottlerGuard, ThrottlerModule } = require("@nestjs/throttler");
    class Things { list() { return "ok"; } }
    Controller("things")(Things);
    Get()(Things.prototype, "list", Object.getOwnPropertyDescriptor(Things.prototype, "list"));
    const start = async () => {
      class App {}
      Module({
        imports: [ThrottlerModule.forRoot({ throttlers: [{ name: "default", ttl: 3_600_000, limit: 2 }], storage: new TollgateThrottlerStorage({ ratelimit }) })],
        controllers: [Things],
        providers: [{ provide: APP_GUARD, useClass: ThrottlerGuard }],
      })(App);
      const app = await NestFactory.create(App, { logger: false });
      await app.listen(0, "127.0.0.1");
      t.after(() => app.close());
      const url = `http://127.0.0.1:${app.getHttpServer().address().port}/things`;
      return async () => { const response = await fetch(url, { headers: { connection: "close" } }); await response.text(); return response; };
    };
    const [one, two] = [await start(), await start()];
    const first = await one();
    assert.deepEqual([first.status, first.headers.get("x-ratelimit-limit"), first.headers.get("x-ratelimit-remaining")], [200, "2", "1"]);
    assert.match(first.headers.get("x-ratelimit-reset"), /^\d+$/);
    assert.equal((await two()).headers.get("x-ratelimit-remaining"), "0");
    const denied = await one();
    assert.equal(denied.status, 429);
    assert.ok(Number(denied.headers.get("retry-after")) > 60);
  });

  it("returns the library's record: hits, times in seconds, a block of its own", async () => {
    const storage = new TollgateThrottlerStorage({ ratelimit });
    const key = freshKey();
    for (let hits = 1; hits <= 2; hits += 1) {
      const { totalHits, isBlocked, timeToBlockExpire } = await storage.increment(key, 3_600_000, 2, 0, "default");
      assert.deepEqual([totalHits, isBlocked, timeToBlockExpire], [hits, false, 0]);
    }
    const blocked = await storage.increment(key, 3_600_000, 2, 90_000_000, "default");
    assert.deepEqual([blocked.totalHits, blocked.isBlocked, blocked.timeToBlockExpire], [3, true, 90_000]);
    assert.ok((await storage.increment(key, 3_600_000, 2, 90_000_000, "default")).timeToBlockExpire > 89_000);
    assert.equal((await storage.increment(key, 3_600_000, 2, 0, "other")).isBlocked, false, "throttlers are apart");
    assert.equal((await storage.increment(freshKey(), 5_400_000, 2, 0, "default")).totalHits, 1, "any window");
    await assert.rejects(storage.increment(freshKey(), 0.5, 2, 0, "default"), /has no inline limit/);
    await assert.rejects(new TollgateThrottlerStorage({ ratelimit: dead }).increment(key, 60_000, 2, 0, "default"), /unreachable/);
  });
});

describe("rate-limiter-flexible", () => {
  const limiter = (options) => new RateLimiterTollgate({ ratelimit, points: 3, duration: 3600, ...options });

  it("implements the library's contract for limiters of others", () => {
    const made = limiter({ keyPrefix: "mine", blockDuration: 5 });
    assert.ok(made instanceof flexible.RateLimiterCompatibleAbstract);
    for (const name of Object.getOwnPropertyNames(flexible.RateLimiterCompatibleAbstract.prototype)) {
      if (name === "constructor") continue;
      assert.ok(Object.hasOwn(RateLimiterTollgate.prototype, name), `${name} is implemented`);
    }
    assert.deepEqual([made.keyPrefix, made.blockDuration, made.execEvenly], ["mine", 5, false]);
  });

  it("consumes points, shared by all processes, and rejects with what is left to wait", async () => {
    const key = freshKey();
    assert.equal(await limiter().get(key), null);
    const first = await limiter().consume(key);
    assert.deepEqual([first.remainingPoints, first.consumedPoints, first.isFirstInDuration], [2, 1, true]);
    const second = await limiter().consume(key, 2);
    assert.deepEqual([second.remainingPoints, second.isFirstInDuration], [0, false]);
    const rejected = await limiter().consume(key).then(() => null, (reason) => reason);
    assert.ok(rejected instanceof flexible.RateLimiterRes);
    assert.deepEqual([rejected.remainingPoints, rejected.consumedPoints], [0, 4]);
    assert.ok(rejected.msBeforeNext > 60_000);
    assert.equal((await limiter().get(key)).remainingPoints, 0);
  });

  it("takes penalties as far as there are points, and gives rewards", async () => {
    const key = freshKey();
    const one = limiter({ rewards: true, use: "rules" });
    await one.consume(key, 2);
    assert.equal((await one.reward(key, 2)).remainingPoints, 3);
    assert.equal((await one.penalty(key, 2)).remainingPoints, 1);
    assert.equal((await one.penalty(key, 5)).remainingPoints, 0);
    await assert.rejects(limiter().reward(key), /rewards: true/);
    assert.equal(await one.delete(key), true);
    assert.equal((await one.consume(key)).remainingPoints, 2);
  });

  it("blocks keys", async () => {
    const key = freshKey(), one = limiter({ blockDuration: 7_200 });
    await one.block(key, 100);
    assert.ok((await one.consume(key).catch((reason) => reason)).msBeforeNext > 90_000);
    const other = freshKey();
    assert.ok((await one.consume(other, 4).catch((reason) => reason)).msBeforeNext >= 7_200_000);
    assert.ok((await one.get(other)).msBeforeNext > 7_000_000);
  });

  it("works inside the library's own wrappers", async () => {
    const key = freshKey();
    const union = new flexible.RateLimiterUnion(limiter({ keyPrefix: "a" }), limiter({ keyPrefix: "b", points: 1 }));
    const both = await union.consume(key);
    assert.deepEqual([both.a.remainingPoints, both.b.remainingPoints], [2, 0]);
    const rejected = await union.consume(key).catch((reason) => reason);
    assert.equal(rejected.b.remainingPoints, 0);
    const listed = new flexible.RLWrapperBlackAndWhite({ limiter: limiter(), whiteList: ["friend"], blackList: ["foe"] });
    for (let time = 0; time < 5; time += 1) await listed.consume("friend");
    await assert.rejects(listed.consume("foe"), (reason) => reason instanceof flexible.RateLimiterRes);
  });

  it("rejects with an error, not a result, if the server is unavailable", async () => {
    const error = await limiter({ ratelimit: dead }).consume(freshKey()).catch((reason) => reason);
    assert.ok(error instanceof Error && /unreachable/.test(error.message));
    assert.throws(() => limiter({ duration: 0.0001 }), /has no inline limit/);
  });
});
