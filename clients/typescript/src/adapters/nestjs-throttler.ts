/** A storage for `@nestjs/throttler`: its limits, counted by Tollgate for all processes. */

import { BoundedMap, Counter, type AdapterOptions } from "./counter.js";

/** `ThrottlerStorageRecord`: times are in seconds. */
export interface StorageRecord {
  totalHits: number;
  timeToExpire: number;
  isBlocked: boolean;
  timeToBlockExpire: number;
}

/** `ThrottlerModule.forRoot({ throttlers: [{ ttl: minutes(1), limit: 100 }], storage: new TollgateThrottlerStorage({ ratelimit }) })`. */
export class TollgateThrottlerStorage {
  readonly #counter: Counter;
  /** A `blockDuration` that is longer than the limit's own denial is kept by this process. */
  readonly #blockedUntil = new BoundedMap<number>();

  constructor(options: AdapterOptions) {
    this.#counter = new Counter(options, "nestjs_throttler");
  }

  async increment(key: string, ttl: number, limit: number, blockDuration: number, throttlerName: string): Promise<StorageRecord> {
    const now = Date.now();
    const name = this.#counter.usesRules ? key : `${throttlerName}:${key}`;
    const blockedUntil = this.#blockedUntil.get(name);
    if (blockedUntil !== undefined && blockedUntil > now) return blocked(limit + 1, Math.ceil((blockedUntil - now) / 1000));
    const count = await this.#counter.charge(name, limit, ttl, 1);
    if (count.allowed) return { totalHits: Math.max(1, count.hits), timeToExpire: Math.ceil(count.resetMs / 1000), isBlocked: false, timeToBlockExpire: 0 };
    if (blockDuration > count.resetMs) {
      this.#blockedUntil.set(name, now + blockDuration);
      return blocked(count.hits, Math.ceil(blockDuration / 1000));
    }
    return blocked(count.hits, Math.ceil(count.resetMs / 1000));
  }
}

function blocked(totalHits: number, seconds: number): StorageRecord {
  return { totalHits, timeToExpire: seconds, isBlocked: true, timeToBlockExpire: seconds };
}
