/**
 * What the adapters share: another library's "count this key, with this limit and this window" as a check.
 *
 * The library's own limit and window go with each request (an inline limit of a descriptor), so its configuration stays
 * where it is, and all processes share one counter. With `use: "rules"` the limit is taken from the rule file instead.
 *
 * A library that counts by itself knows no fail policy: where Tollgate cannot decide, the adapters throw, and the
 * library's own setting for a broken store applies.
 */

import type { InlineUnit, LimitInput, Ratelimit, ReserveResult } from "../ratelimit.js";
import type { LimitResult } from "../result.js";

export interface AdapterOptions {
  readonly ratelimit: Ratelimit;
  /** Where the limit is from: the other library's settings (`inline`, the default), or Tollgate's rules. */
  readonly use?: "inline" | "rules";
  /** With rules: the attribute that the key is the value of. Default `api_key`. Inline: the name of the descriptor's entry. */
  readonly attribute?: string;
}

/** The longest period of an inline limit. */
const MAX_WINDOW_MS = 10 * 365 * 86_400_000;

/** The state of one key, in the words of libraries that count hits. */
export interface Count {
  readonly allowed: boolean;
  /** Units used; above the limit if denied. */
  readonly hits: number;
  readonly limit: number;
  readonly remaining: number;
  /** Until the next hit passes (denied), or the limit is fully restored. */
  readonly resetMs: number;
}

export class Counter {
  readonly #options: AdapterOptions;
  readonly #entry: string;

  constructor(options: AdapterOptions, name: string) {
    this.#options = options;
    this.#entry = options.attribute ?? (options.use === "rules" ? "api_key" : name);
  }

  get usesRules(): boolean {
    return this.#options.use === "rules";
  }

  /** Throws if the window has no inline limit. */
  checkWindow(windowMs: number): void {
    if (!this.usesRules && !(Number.isInteger(windowMs) && windowMs >= 1 && windowMs <= MAX_WINDOW_MS)) {
      throw new TypeError(`a window of ${windowMs} ms has no inline limit; use whole milliseconds, at most ten years`);
    }
  }

  async charge(key: string, limit: number, windowMs: number, cost: number): Promise<Count> {
    return count(await this.#options.ratelimit.limit(this.#input(key, limit, windowMs), { cost }), limit);
  }

  /** As `charge`, with a reservation that can be given back. */
  async reserve(key: string, limit: number, windowMs: number, cost: number): Promise<{ count: Count; reservation: ReserveResult["reservation"] }> {
    const result = await this.#options.ratelimit.reserve(this.#input(key, limit, windowMs), { cost, ttlMs: Math.min(windowMs, 86_400_000) });
    return { count: count(result, limit), reservation: result.reservation };
  }

  async peek(key: string, limit: number, windowMs: number): Promise<Count> {
    return count(await this.#options.ratelimit.peek(this.#input(key, limit, windowMs)), limit);
  }

  /** Sets a key's usage to zero. Only counters of rules on `api_key` can be: inline limits belong to no caller. */
  async reset(key: string): Promise<void> {
    if (!this.usesRules || this.#entry !== "api_key") {
      throw new Error("an inline limit cannot be reset; take the limit from a rule on api_key (`use: \"rules\"`)");
    }
    await this.#options.ratelimit.resetUsedTokens(key);
  }

  #input(key: string, limit: number, windowMs: number): LimitInput {
    if (this.usesRules) return { [this.#entry]: key };
    this.checkWindow(windowMs);
    const unit: InlineUnit = `${windowMs}ms`;
    return { descriptors: [{ entries: [[this.#entry, key]], limit: { requests_per_unit: limit, unit } }] };
  }
}

function count(result: LimitResult, ownLimit: number): Count {
  // What was shed was not counted.
  if (result.source === "policy" || result.reason === "fail_open" || result.reason === "fail_closed" || result.reason === "shed") throw new Error(`Tollgate could not decide: ${result.reason}`);
  if (result.reason === "rejected") throw new Error("Tollgate rejected the check; is the key longer than 8,192 bytes?");
  if (result.limit === null || result.remaining === null) {
    throw new Error("no limit matched; is the domain that of a rule file, and with `use: \"rules\"`, is there a rule on the attribute?");
  }
  const limit = result.limit;
  const hits = result.allowed ? limit - result.remaining : Math.max(limit, ownLimit) + 1;
  const resetMs = result.allowed ? (result.resetMs ?? 0) : (result.retryAfterMs ?? result.resetMs ?? 0);
  return { allowed: result.allowed, hits: Math.max(0, hits), limit, remaining: result.remaining, resetMs };
}

/** A map of bounded size: the key stored longest ago makes room. */
export class BoundedMap<V> {
  readonly #entries = new Map<string, V>();
  constructor(readonly max = 10_000) {}

  get(key: string): V | undefined {
    return this.#entries.get(key);
  }

  set(key: string, value: V): void {
    this.#entries.delete(key);
    if (this.#entries.size >= this.max) this.#entries.delete(this.#entries.keys().next().value as string);
    this.#entries.set(key, value);
  }

  delete(key: string): boolean {
    return this.#entries.delete(key);
  }
}
