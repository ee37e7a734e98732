/**
 * A limiter for `rate-limiter-flexible`, by its contract for limiters of others (`RateLimiterCompatibleAbstract`): it can
 * be used alone, in `RateLimiterUnion`, `RLWrapperBlackAndWhite` and as an insurance.
 */

import { RateLimiterCompatibleAbstract, RateLimiterRes } from "rate-limiter-flexible";
import type { Reservation } from "../ratelimit.js";
import { BoundedMap, Counter, type AdapterOptions, type Count } from "./counter.js";

export interface RateLimiterTollgateOptions extends AdapterOptions {
  readonly points: number;
  /** Seconds. */
  readonly duration: number;
  readonly keyPrefix?: string;
  /** Seconds for which this process blocks a key that exceeded its points. */
  readonly blockDuration?: number;
  readonly execEvenly?: boolean;
  /** Make `reward` possible: each `consume` is then a reservation. */
  readonly rewards?: boolean;
}

interface Held {
  readonly reservation: Reservation;
  readonly cost: number;
}

// Its types say properties where the class has accessors, which must be overridden as such.
const Base = RateLimiterCompatibleAbstract as unknown as new () => object;

/** `new RateLimiterTollgate({ ratelimit, points: 100, duration: 60 })`. */
export class RateLimiterTollgate extends Base implements RateLimiterCompatibleAbstract {
  readonly points: number;
  readonly duration: number;
  readonly #keyPrefix: string;
  readonly #counter: Counter;
  readonly #rewards: boolean;
  readonly #blockedUntil = new BoundedMap<number>();
  readonly #held = new BoundedMap<Held[]>();
  #blockDuration: number;
  #execEvenly: boolean;

  constructor(options: RateLimiterTollgateOptions) {
    super();
    this.#counter = new Counter(options, "rate_limiter_flexible");
    this.#counter.checkWindow(options.duration * 1000);
    this.points = options.points;
    this.duration = options.duration;
    this.#keyPrefix = options.keyPrefix ?? (options.use === "rules" ? "" : "rlflx");
    this.#blockDuration = options.blockDuration ?? 0;
    this.#execEvenly = options.execEvenly ?? false;
    this.#rewards = options.rewards ?? false;
  }

  get keyPrefix(): string {
    return this.#keyPrefix;
  }

  get blockDuration(): number {
    return this.#blockDuration;
  }

  set blockDuration(seconds: number) {
    this.#blockDuration = seconds;
  }

  get execEvenly(): boolean {
    return this.#execEvenly;
  }

  set execEvenly(value: boolean) {
    this.#execEvenly = value;
  }

  getKey(key: string | number): string {
    return this.#keyPrefix === "" ? String(key) : `${this.#keyPrefix}:${key}`;
  }

  /** Resolves with what remains; rejects with a `RateLimiterRes` if there are too few points, with an `Error` if Tollgate cannot decide. */
  async consume(key: string | number, points = 1): Promise<RateLimiterRes> {
    const name = this.getKey(key);
    const blockedMs = this.#blockedMs(name);
    if (blockedMs > 0) throw new RateLimiterRes(0, blockedMs, this.points + 1, false);
    const count = this.#rewards ? await this.#consumeReserved(name, points) : await this.#counter.charge(name, this.points, this.duration * 1000, points);
    if (!count.allowed) {
      const blockMs = this.#blockDuration * 1000;
      if (blockMs > 0) this.#blockedUntil.set(name, Date.now() + blockMs);
      throw new RateLimiterRes(0, Math.max(count.resetMs, blockMs), count.hits, false);
    }
    const isFirst = count.hits === points;
    if (this.#execEvenly && count.resetMs > 0 && !isFirst) {
      const delay = Math.ceil(count.resetMs / (count.remaining + 2));
      await new Promise((resolve) => setTimeout(resolve, delay));
    }
    return new RateLimiterRes(count.remaining, count.resetMs, count.hits, isFirst);
  }

  /** Takes points as far as the limit has them; never rejects for too few. */
  async penalty(key: string | number, points = 1): Promise<RateLimiterRes> {
    const name = this.getKey(key), window = this.duration * 1000;
    let count = await this.#counter.charge(name, this.points, window, points);
    if (!count.allowed && count.remaining > 0) count = await this.#counter.charge(name, this.points, window, count.remaining);
    return new RateLimiterRes(count.allowed ? count.remaining : 0, count.resetMs, count.hits, false);
  }

  /** Gives back points that this process consumed. */
  async reward(key: string | number, points = 1): Promise<RateLimiterRes> {
    if (!this.#rewards) throw new Error("points cannot be given back; construct the limiter with `rewards: true`");
    const name = this.getKey(key), held = this.#held.get(name) ?? [];
    for (let left = points; left > 0;) {
      const last = held.pop();
      if (last === undefined) break;
      if (last.cost <= left) await last.reservation.cancel();
      else await last.reservation.settle(last.cost - left);
      left -= last.cost;
    }
    return resOf(await this.#counter.peek(name, this.points, this.duration * 1000));
  }

  async get(key: string | number): Promise<RateLimiterRes | null> {
    const name = this.getKey(key);
    const blockedMs = this.#blockedMs(name);
    if (blockedMs > 0) return new RateLimiterRes(0, blockedMs, this.points + 1, false);
    const count = await this.#counter.peek(name, this.points, this.duration * 1000);
    return count.hits === 0 ? null : resOf(count);
  }

  /** Counters cannot be set to a number. */
  set(): Promise<RateLimiterRes> {
    return Promise.reject(new Error("usage cannot be set to a number; use `penalty`, `delete`, or a grant of the admin API"));
  }

  /** Blocks a key in this process; for all of them there is the admin API's emergency measure. */
  block(key: string | number, seconds: number): Promise<RateLimiterRes> {
    this.#blockedUntil.set(this.getKey(key), Date.now() + seconds * 1000);
    return Promise.resolve(new RateLimiterRes(0, seconds * 1000, this.points + 1, false));
  }

  /** Resets the usage, and lifts a block of this process. */
  async delete(key: string | number): Promise<boolean> {
    const name = this.getKey(key);
    this.#blockedUntil.delete(name);
    this.#held.delete(name);
    await this.#counter.reset(name);
    return true;
  }

  async #consumeReserved(name: string, cost: number): Promise<Count> {
    const { count, reservation } = await this.#counter.reserve(name, this.points, this.duration * 1000, cost);
    if (reservation !== null) {
      const held = this.#held.get(name) ?? [];
      if (held.length >= 1_000) held.shift();
      held.push({ reservation, cost });
      this.#held.set(name, held);
    }
    return count;
  }

  #blockedMs(name: string): number {
    return Math.max(0, (this.#blockedUntil.get(name) ?? 0) - Date.now());
  }
}

function resOf({ remaining, resetMs, hits }: Count): RateLimiterRes {
  return new RateLimiterRes(remaining, resetMs, hits, false);
}
