/**
 * When the next request to a host may be sent. What remains of its limit is spread over the time to the reset, so that
 * the limit is not reached, instead of being reached and waited for. While more than half remains nothing is delayed: a
 * short burst is what limits are for. Requests under way are subtracted, because a response does not count them.
 */

import type { Signals } from "./signals.js";

/** The delay before the next request, by what remains; for a host that was last called `sinceLastMs` ago. */
export function paceDelay(limit: number | null, remaining: number, resetMs: number, sinceLastMs: number): number {
  if (remaining === 0) return resetMs;
  if (isPlenty(limit, remaining)) return 0;
  return Math.max(0, Math.floor(resetMs / remaining) - sinceLastMs);
}

function isPlenty(limit: number | null, remaining: number): boolean {
  return limit !== null && 2 * remaining > limit;
}

export class Pacer {
  #blockedUntil = 0;
  #remaining: number | null = null;
  #limit: number | null = null;
  #resetAt = 0;
  #last: number | null = null;
  #inFlight = 0;

  get blockedUntil(): number {
    return this.#blockedUntil;
  }

  /** Gives the next request its slot; returns the delay until then. */
  send(now: number): number {
    if (this.#resetAt <= now) this.#remaining = null;
    let slot = Math.max(now, this.#blockedUntil);
    if (this.#remaining !== null && slot < this.#resetAt) {
      if (this.#remaining === 0) {
        slot = this.#resetAt;
      } else {
        if (this.#last !== null && !isPlenty(this.#limit, this.#remaining)) {
          // Slots already given lie in the future: the rest of the time starts after them.
          const base = Math.min(this.#resetAt, Math.max(now, this.#last));
          slot = Math.min(this.#resetAt, Math.max(slot, this.#last + Math.floor((this.#resetAt - base) / this.#remaining)));
        }
        this.#remaining -= 1;
      }
    }
    this.#last = slot;
    this.#inFlight += 1;
    return slot - now;
  }

  /** A response arrived; `random` in [0, 1) spreads the end of a block, so that not all clients return at once. */
  response(now: number, signals: Signals, random: number): void {
    this.failed();
    const { waitMs, remaining, resetMs } = signals;
    if (waitMs !== null && waitMs > 0) {
      this.#blockedUntil = Math.max(this.#blockedUntil, now + waitMs + Math.floor(random * Math.floor(waitMs / 10)));
    }
    if (remaining !== null && resetMs !== null) {
      this.#remaining = Math.max(0, remaining - this.#inFlight);
      this.#limit = signals.limit;
      this.#resetAt = now + resetMs;
    }
  }

  /** A request ended without a response, or was not sent. */
  failed(): void {
    this.#inFlight = Math.max(0, this.#inFlight - 1);
  }
}
