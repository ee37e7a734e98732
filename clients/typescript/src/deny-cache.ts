/**
 * Denials that this process may repeat without asking. Most requests of a flood are over their limit, and until its end
 * only a raised limit can change a denial. Allowed results are never cached: that would let through more than the limit.
 */

export const DEFAULT_MAX_ENTRIES = 10_000;
/** A longer denial is asked again after this time, so that raised limits are noticed. */
export const MAX_AGE_MS = 300_000;

interface Entry<T> {
  readonly cost: number;
  readonly validUntil: number;
  readonly deniedUntil: number;
  readonly resetAt: number;
  readonly denial: T;
}

/** A cached denial and what is left of it. */
export interface CacheHit<T> {
  readonly denial: T;
  readonly retryAfterMs: number;
  readonly resetMs: number;
}

export class DenyCache<T> {
  readonly #entries = new Map<string, Entry<T>>();

  constructor(readonly maxEntries: number = DEFAULT_MAX_ENTRIES) {}

  get size(): number {
    return this.#entries.size;
  }

  /** Stores a denial of a request that was sent at `sentAt`, so that it never ends later here than at the server. */
  denied(key: string, cost: number, sentAt: number, retryAfterMs: number, resetMs: number, denial: T): void {
    if (this.maxEntries < 1) return;
    this.#entries.delete(key);
    if (this.#entries.size >= this.maxEntries) {
      const oldest = this.#entries.keys().next();
      if (oldest.done !== true) this.#entries.delete(oldest.value);
    }
    const validUntil = sentAt + Math.min(retryAfterMs, MAX_AGE_MS);
    this.#entries.set(key, { cost, validUntil, deniedUntil: sentAt + retryAfterMs, resetAt: sentAt + resetMs, denial });
  }

  lookup(key: string, cost: number, now: number): CacheHit<T> | null {
    const entry = this.#entries.get(key);
    if (entry === undefined) return null;
    if (now >= entry.validUntil) {
      this.#entries.delete(key);
      return null;
    }
    // A smaller cost might fit, and a peek reports what remains.
    if (cost < entry.cost || cost === 0) return null;
    return { denial: entry.denial, retryAfterMs: entry.deniedUntil - now, resetMs: Math.max(0, entry.resetAt - now) };
  }

  clear(key?: string): void {
    if (key === undefined) this.#entries.clear();
    else this.#entries.delete(key);
  }
}
