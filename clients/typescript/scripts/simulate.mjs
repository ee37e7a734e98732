// A fleet of clients with more work than an API allows, in virtual time: plain exponential backoff beside the paced fetch.
// Prints refusals (429) and goodput (successes) of both. `simulate` is used by the tests.
import { pacedFetch } from "../dist/esm/index.js";
import { backoff } from "../dist/esm/pace/retry.js";

/** Virtual time: the next timer runs when all promises have settled. */
class VirtualTime {
  #now = 0;
  #timers = [];
  #order = 0;
  now = () => this.#now;
  sleep = (ms) => new Promise((resolve) => this.#push(this.#now + Math.max(0, ms), resolve));
  #push(at, run) {
    // A binary heap: there are many timers.
    const heap = this.#timers, item = { at, order: this.#order++, run };
    let index = heap.push(item) - 1;
    while (index > 0) {
      const parent = (index - 1) >> 1;
      if (before(heap[parent], heap[index])) break;
      [heap[parent], heap[index]] = [heap[index], heap[parent]];
      index = parent;
    }
  }
  #pop() {
    const heap = this.#timers, first = heap[0], last = heap.pop();
    if (heap.length > 0) {
      heap[0] = last;
      for (let index = 0; ;) {
        let least = index;
        for (const child of [2 * index + 1, 2 * index + 2]) if (child < heap.length && before(heap[child], heap[least])) least = child;
        if (least === index) break;
        [heap[least], heap[index]] = [heap[index], heap[least]];
        index = least;
      }
    }
    return first;
  }
  async run(untilMs) {
    for (;;) {
      await new Promise((resolve) => setImmediate(resolve));
      const next = this.#timers[0];
      if (next === undefined || next.at > untilMs) return;
      // Everything due at one instant runs before the promises do.
      this.#now = next.at;
      while (this.#timers.length > 0 && this.#timers[0].at === this.#now) this.#pop().run();
    }
  }
}
const before = (a, b) => a.at < b.at || (a.at === b.at && a.order < b.order);

/** Seeded, so that a run can be repeated. */
function generator(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

/** APIs by their limiter. Each answers as a real one does: `RateLimit` fields, `Retry-After` on a refusal. */
const APIS = {
  /** 100 requests in each window of 10 s. */
  "fixed window": (time) => {
    let window = -1, used = 0;
    return () => {
      const current = Math.floor(time.now() / 10_000);
      if (current !== window) [window, used] = [current, 0];
      const reset = Math.ceil(((current + 1) * 10_000 - time.now()) / 1000);
      const allowed = used < 100;
      if (allowed) used += 1;
      return { allowed, limit: 100, remaining: 100 - used, reset, retryAfter: reset };
    };
  },
  /** 10 a second with bursts of 100, by GCRA, as Tollgate's default: the reset is that of the whole burst, or of the next unit. */
  "token bucket": (time) => {
    let tat = 0;
    return () => {
      const now = time.now(), period = 100, burst = 100 * period;
      const next = Math.max(tat, now) + period;
      const allowed = next - now <= burst;
      if (allowed) tat = next;
      const left = Math.max(0, Math.floor((burst - (Math.max(tat, now) - now)) / period));
      const wait = Math.ceil(Math.max(0, next - burst - now) / 1000);
      return { allowed, limit: 100, remaining: left, reset: left === 0 ? Math.max(1, wait) : Math.ceil((tat - now) / 1000), retryAfter: Math.max(1, wait) };
    };
  },
};

/** Runs `clients` programs, each with `workers` requests under way at a time, for `minutes`. */
export async function simulate({ api, strategy, clients = 10, workers = 4, minutes = 10, seed = 1 }) {
  const time = new VirtualTime();
  const random = generator(seed);
  const limiter = APIS[api](time);
  const count = { ok: 0, refused: 0 };
  const send = async () => {
    await time.sleep(5 + Math.floor(random() * 20));
    const { allowed, limit, remaining, reset, retryAfter } = limiter();
    const headers = { "ratelimit-policy": `"api";q=${limit};w=10`, ratelimit: `"api";r=${remaining};t=${reset}` };
    if (allowed) count.ok += 1;
    else { count.refused += 1; headers["retry-after"] = String(retryAfter); }
    await time.sleep(5 + Math.floor(random() * 20));
    return new Response(null, { status: allowed ? 200 : 429, headers });
  };
  // Both strategies go on until a request succeeds, so that both have the same work.
  const plain = () => async () => {
    for (let attempt = 0; ; attempt += 1) {
      const response = await send();
      if (response.status !== 429) return response;
      await time.sleep(backoff(attempt, random(), null));
    }
  };
  const paced = () => {
    const fetchPaced = pacedFetch({ fetch: send, clock: time, random, maxRetries: 8 });
    return async () => {
      for (;;) {
        try {
          const response = await fetchPaced("http://api.example/");
          if (response.status !== 429) return response;
        } catch (error) {
          if (error.name !== "ThrottledError") throw error;
          await time.sleep(error.retryAfterMs);
        }
      }
    };
  };
  const end = minutes * 60_000;
  for (let client = 0; client < clients; client += 1) {
    const get = strategy === "paced" ? paced() : plain();
    for (let worker = 0; worker < workers; worker += 1) {
      (async () => {
        await time.sleep(Math.floor(random() * 1_000));
        while (time.now() < end) await get();
      })();
    }
  }
  await time.run(end);
  return count;
}

if (process.argv[1] === new URL(import.meta.url).pathname) {
  for (const api of Object.keys(APIS)) {
    const plain = await simulate({ api, strategy: "plain" });
    const paced = await simulate({ api, strategy: "paced" });
    const share = (1 - paced.refused / plain.refused) * 100;
    console.log(`${api}: exponential backoff ${plain.ok} ok, ${plain.refused} refused; paced ${paced.ok} ok, ${paced.refused} refused: ${share.toFixed(1)}% fewer refusals, goodput ${(100 * paced.ok / plain.ok).toFixed(1)}%`);
  }
}
