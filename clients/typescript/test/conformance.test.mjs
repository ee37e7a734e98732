// The cases that the clients of every language run; see clients/conformance/README.md.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { describe, it } from "node:test";
import { parseAnswer, parseEnd } from "../dist/esm/answer.js";
import { DenyCache } from "../dist/esm/deny-cache.js";
import { attemptTime, effectiveDeadline, ServerOrder } from "../dist/esm/failover.js";
import { hedge } from "../dist/esm/hedge.js";
import { Ratelimit } from "../dist/esm/index.js";
import { AdaptiveThrottle } from "../dist/esm/pace/adaptive-throttle.js";
import { paceDelay, Pacer } from "../dist/esm/pace/pacer.js";
import { DEFAULT_HEDGE_AFTER_US, LatencyP95 } from "../dist/esm/latency-p95.js";
import { backoff, RetryBudget } from "../dist/esm/pace/retry.js";
import { readSignals } from "../dist/esm/pace/signals.js";
import { FakeServer, unusedPort } from "./servers.mjs";

const load = (name) => JSON.parse(readFileSync(new URL(`../../conformance/${name}.json`, import.meta.url)));

/** Header lines, joined as `Headers` joins them; that class rejects some characters, which a test has to send. */
function lookup(lines) {
  return { get: (name) => {
    const values = lines.filter(([key]) => key.toLowerCase() === name).map(([, value]) => value);
    return values.length === 0 ? null : values.join(", ");
  } };
}

describe("headers", () => {
  for (const { name, status, headers, now_ms, expect } of load("headers").cases) {
    it(name, () => {
      const { refused, waitMs, limit, remaining, resetMs } = readSignals(status, lookup(headers), now_ms);
      assert.deepEqual({ refused, wait_ms: waitMs, limit, remaining, reset_ms: resetMs }, expect);
    });
  }
});

const padded = ({ body, pad_with_spaces_to_bytes: bytes }) => (bytes === undefined ? body : body.padEnd(bytes, " "));

describe("answers", () => {
  const data = load("answers");
  for (const one of data.check) {
    it(one.name, async () => {
      // Over a connection, because the bound on a body is the transport's.
      const server = await FakeServer.start(() => ({ status: one.status, body: padded(one) }));
      try {
        const client = new Ratelimit({ url: server.url, domain: "d", timeout: 5_000, failPolicy: "closed", denyCache: false });
        const { result, reservation } = await client.check("x", { reserve: true });
        if (one.fault !== undefined) {
          assert.deepEqual([result.source, result.reason], ["policy", one.fault]);
          return;
        }
        const answer = parseAnswer(one.status, padded(one), 1_000_000);
        assert.equal(answer.kind, "decision");
        assert.deepEqual({
          allowed: result.allowed, source: result.source, reason: result.reason, origin: result.origin, rule: result.rule, limit: result.limit,
          remaining: result.remaining, reset_ms: result.resetMs, retry_after_ms: result.retryAfterMs, delay_ms: result.delayMs,
          decision_id: result.decisionId, reservation: reservation?.id ?? null, cacheable: answer.cacheable, shed: result.shed,
        }, one.result);
        assert.equal(answer.result.reset, one.result.reset_ms === null ? null : 1_000_000 + one.result.reset_ms);
        assert.equal(result.success, result.allowed);
        const { status, body, content_type: contentType } = one.response ?? {};
        assert.deepEqual(result.response, one.response === undefined ? null : { status, body, contentType });
      } finally {
        await server.close();
      }
    });
  }
  for (const one of data.settle_and_cancel) {
    it(`an end: ${one.name}`, () => {
      const expected = one.fault === undefined ? one.result : { ended: null, cost: null, reason: one.fault };
      assert.deepEqual(parseEnd(one.status, one.body), expected);
    });
  }
});

describe("faults", () => {
  for (const { name, policy, servers, expect } of load("faults").cases) {
    it(name, async () => {
      const asked = [];
      const started = await Promise.all(servers.map(async (what, index) => {
        if (what === "refused") return { url: `http://127.0.0.1:${await unusedPort()}`, close: () => undefined };
        return FakeServer.start(() => { asked.push(index); return what; });
      }));
      try {
        const fails = servers.map((what, index) => [what, index]).filter(([what]) => what === "refused").map(([, index]) => index);
        const client = new Ratelimit({
          url: started.map((server) => server.url), domain: "d", failPolicy: policy,
          // A hang is cut by the deadline; everything else is to be answered, also beside a busy core.
          timeout: !servers.some((what) => what === "hang" || what === "slow_body") ? 10_000 : expect.source === "server" ? 6_000 : 1_500,
          onFault: ({ server }) => { const index = started.findIndex(({ url }) => url === server); if (fails.includes(index)) asked.push(index); },
        });
        const result = await client.limit("x");
        const { allowed, source, reason, retryAfterMs } = result;
        assert.deepEqual({ allowed, source, reason, retry_after_ms: retryAfterMs, asked }, expect);
      } finally {
        await Promise.all(started.map((server) => server.close()));
      }
    });
  }
});

describe("failover", () => {
  const data = load("failover");
  for (const { own_ms, caller_ms, expect } of data.deadlines) {
    it(`deadline ${own_ms}, caller's ${caller_ms}`, () => assert.equal(effectiveDeadline(own_ms, caller_ms), expect.deadline_ms));
  }
  for (const { deadline_ms, elapsed_ms, servers_left, expect } of data.attempts) {
    it(`${elapsed_ms} of ${deadline_ms} ms, ${servers_left} servers left`, () => assert.equal(attemptTime(deadline_ms, elapsed_ms, servers_left), expect.attempt_ms));
  }
  for (const { name, servers, steps } of data.sequences) {
    it(name, () => {
      const order = new ServerOrder(servers);
      for (const step of steps) {
        if (step.event === "fault") order.faulted(step.server, step.at_ms);
        else if (step.event === "ok") order.answered(step.server);
        else assert.deepEqual([...order.order(step.at_ms)], step.expect, JSON.stringify(step));
      }
    });
  }
});

/** Virtual time: runs timers in their order, and lets promises settle between them. */
class VirtualTime {
  now = 0;
  #timers = new Map();
  #ids = 0;
  set = (callback, ms) => { this.#timers.set(++this.#ids, { at: this.now + ms, callback }); return this.#ids; };
  clear = (id) => { this.#timers.delete(id); };
  after = (ms) => new Promise((resolve) => this.set(resolve, ms));
  async run() {
    for (;;) {
      await new Promise((resolve) => setImmediate(resolve));
      let first = null;
      for (const [id, timer] of this.#timers) if (first === null || timer.at < first[1].at) first = [id, timer];
      if (first === null) return;
      this.#timers.delete(first[0]);
      this.now = first[1].at;
      first[1].callback();
    }
  }
}

describe("hedging", () => {
  for (const { name, hedge_after_ms, deadline_ms, budget: balance, servers, expect } of load("hedging").cases) {
    it(name, async () => {
      const time = new VirtualTime(), budget = new RetryBudget();
      while (budget.withdraw());
      while (budget.balance < balance) budget.deposit();
      const sent = [], canceled = [], timed_out = [], measured = [];
      let at = null;
      const outcome = hedge({
        order: servers.map((_, index) => index), hedgeAfterMs: hedge_after_ms, deadlineMs: deadline_ms,
        timers: { now: () => time.now, set: time.set, clear: time.clear },
        send: async (server) => { sent.push([server, time.now]); await time.after(servers[server].after_ms); return servers[server]; },
        verdict: ({ answer }) => (["allowed", "denied", "fault"].includes(answer) ? answer : "failed"), budget,
        measured: (ms, ended) => measured.push([ms, ended]), timeOut: (server) => timed_out.push(server),
        discard: async (server, { reservation }) => { if (reservation !== undefined) canceled.push([server, reservation]); },
      });
      outcome.then(() => { at = time.now; });
      await time.run();
      const { winner, confirmed, pending } = await outcome;
      await pending;
      const cacheable = confirmed && winner?.answer.answer === "denied";
      assert.deepEqual({ sent, winner: winner?.server ?? null, at_ms: at, canceled, cacheable, budget: budget.balance, timed_out }, expect);
      // The first request is measured whatever became of its call.
      assert.deepEqual(measured, [[servers[0].after_ms, servers[0].answer === "fault" ? "faulted" : "answered"]]);
    });
  }
});

describe("hedge after", () => {
  const data = load("hedge-after");
  it("has the default of the other clients", () => assert.equal(data.default_hedge_after_us, DEFAULT_HEDGE_AFTER_US));
  for (const { name, steps } of data.cases) {
    it(name, () => {
      const latency = new LatencyP95();
      for (const { latencies_us, times, fault, expect } of steps) {
        for (let time = 0; time < times; time += 1) for (const us of latencies_us) latency.record(us, fault === true ? "faulted" : "answered");
        assert.equal(latency.estimateUs, expect.hedge_after_us);
        assert.equal(latency.estimateMs, Math.ceil(expect.hedge_after_us / 1_000));
      }
    });
  }
});

describe("deny cache", () => {
  for (const { name, max_entries, steps } of load("deny-cache").sequences) {
    it(name, () => {
      const cache = new DenyCache(max_entries);
      for (const step of steps) {
        if (step.event === "denied") cache.denied(step.key, step.cost, step.at_ms, step.retry_after_ms, step.reset_ms, null);
        else if (step.event === "clear") cache.clear(step.key);
        else {
          const hit = cache.lookup(step.key, step.cost, step.at_ms);
          assert.deepEqual(hit && { retry_after_ms: hit.retryAfterMs, reset_ms: hit.resetMs }, step.expect, JSON.stringify(step));
          assert.equal(cache.size, step.entries, JSON.stringify(step));
        }
      }
    });
  }
});

describe("pacing", () => {
  const data = load("pacing");
  for (const one of data.cases) {
    it(JSON.stringify(one), () => assert.equal(paceDelay(one.limit, one.remaining, one.reset_ms, one.since_last_ms), one.expect.delay_ms));
  }
  for (const { name, steps } of data.sequences) {
    it(name, () => {
      const pacer = new Pacer();
      for (const step of steps) {
        if (step.event === "send") assert.equal(pacer.send(step.at_ms), step.expect.delay_ms, JSON.stringify(step));
        else if (step.event === "failed") pacer.failed();
        else {
          const { wait_ms, limit, remaining, reset_ms } = step.signals;
          pacer.response(step.at_ms, { refused: false, waitMs: wait_ms, limit, remaining, resetMs: reset_ms }, step.random ?? 0);
          assert.equal(pacer.blockedUntil, step.expect.blocked_until_ms, JSON.stringify(step));
        }
      }
    });
  }
});

describe("backoff", () => {
  for (const { attempt, random, wait_ms, expect } of load("backoff").cases) {
    it(`attempt ${attempt}, random ${random}, wait ${wait_ms}`, () => assert.equal(backoff(attempt, random, wait_ms), expect.delay_ms));
  }
});

describe("retry budget", () => {
  for (const { name, steps } of load("retry-budget").sequences) {
    it(name, () => {
      const budget = new RetryBudget();
      for (const step of steps) {
        if (step.event === "request") budget.deposit();
        else assert.equal(budget.withdraw(), step.granted, JSON.stringify(step));
        assert.equal(budget.balance, step.balance, JSON.stringify(step));
      }
    });
  }
});

describe("adaptive throttling", () => {
  for (const { name, steps } of load("adaptive-throttling").sequences) {
    it(name, () => {
      const throttle = new AdaptiveThrottle();
      for (const step of steps) {
        if (step.event === "probability") {
          const probability = throttle.probability(step.at_ms);
          assert.equal(probability, step.expect, JSON.stringify(step));
          if (step.random !== undefined) assert.equal(step.random < probability, step.rejected);
        } else {
          for (let time = 0; time < step.times; time += 1) throttle[step.event](step.at_ms);
        }
      }
    });
  }
});

describe("request heads", () => {
  const data = load("heads");
  for (const { name, head, attributes, cost, expect } of data.bodies) {
    it(name, async () => {
      const server = await FakeServer.start(() => ({ status: 400 }));
      try {
        const client = new Ratelimit({ url: server.url, domain: "shop", timeout: 5_000 });
        await client.limit({ request: head, ...(attributes === null ? {} : { attributes }) }, cost === null ? {} : { cost });
        assert.deepEqual(JSON.parse(server.requests[0].body), expect);
      } finally {
        await server.close();
      }
    });
  }
  for (const { name, status, body, result, fault } of data.answers) {
    it(name, () => {
      const answer = parseAnswer(status, body, 0);
      if (fault !== undefined) return assert.deepEqual(answer, { kind: "fault", fault });
      const { allowed, reason, source, problem } = answer.result;
      assert.deepEqual({ allowed, reason, source, problem_status: problem?.status ?? null }, result);
      if (problem !== null && problem.status === status) assert.equal(problem.body, body);
      assert.equal(answer.cacheable, false);
    });
  }
});
