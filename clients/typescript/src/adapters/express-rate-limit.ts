/** A store for `express-rate-limit`: its limit, counted by Tollgate for all processes. */

import type { Reservation } from "../ratelimit.js";
import { BoundedMap, Counter, type AdapterOptions, type Count } from "./counter.js";

/** What the library passes to `init`. */
interface LibraryOptions {
  readonly windowMs: number;
  readonly limit?: number | ((...request: never[]) => unknown);
  readonly skipFailedRequests?: boolean;
  readonly skipSuccessfulRequests?: boolean;
}

interface ClientInfo {
  totalHits: number;
  resetTime: Date;
}

/** `rateLimit({ windowMs: 60_000, limit: 100, store: new TollgateStore({ ratelimit }) })`. */
export class TollgateStore {
  /** Keys are shared by all processes, which the library wants to know. */
  readonly localKeys = false;
  readonly prefix: string;
  readonly #counter: Counter;
  readonly #held = new BoundedMap<Reservation[]>();
  #windowMs = 60_000;
  #limit = 1;
  #mayDecrement = false;

  constructor(options: AdapterOptions & { readonly prefix?: string }) {
    this.#counter = new Counter(options, "express_rate_limit");
    this.prefix = options.prefix ?? "";
  }

  init(options: LibraryOptions): void {
    this.#counter.checkWindow(options.windowMs);
    this.#windowMs = options.windowMs;
    if (typeof options.limit === "number") this.#limit = options.limit;
    else if (!this.#counter.usesRules) throw new TypeError("a `limit` that is a function is unknown to the store; use `use: \"rules\"` with tiers, or a number");
    this.#mayDecrement = options.skipFailedRequests === true || options.skipSuccessfulRequests === true;
  }

  async increment(key: string): Promise<ClientInfo> {
    const name = this.prefix + key;
    if (!this.#mayDecrement) return info(await this.#counter.charge(name, this.#limit, this.#windowMs, 1));
    const { count, reservation } = await this.#counter.reserve(name, this.#limit, this.#windowMs, 1);
    if (reservation !== null) {
      const held = this.#held.get(name) ?? [];
      if (held.length >= 1_000) held.shift();
      held.push(reservation);
      this.#held.set(name, held);
    }
    return info(count);
  }

  async decrement(key: string): Promise<void> {
    const reservation = this.#held.get(this.prefix + key)?.pop();
    await reservation?.cancel();
  }

  async get(key: string): Promise<ClientInfo | undefined> {
    const count = await this.#counter.peek(this.prefix + key, this.#limit, this.#windowMs);
    return count.hits === 0 ? undefined : info(count);
  }

  async resetKey(key: string): Promise<void> {
    await this.#counter.reset(this.prefix + key);
    this.#held.delete(this.prefix + key);
  }
}

/** The library demands at least one hit. */
function info({ hits, resetMs }: Count): ClientInfo {
  return { totalHits: Math.max(1, hits), resetTime: new Date(Date.now() + resetMs) };
}
