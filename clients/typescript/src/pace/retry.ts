/**
 * Whether and when to try again: exponential backoff with full jitter, and a budget. Why a budget and not only a number
 * of retries? Three retries of everything quadruple the load on a server that is failing already; a budget bounds all
 * retries to a tenth of the requests.
 */

export const BASE_MS = 100;
export const CAP_MS = 10_000;

/** The delay before retry `attempt` (from 0); `random` in [0, 1). */
export function backoff(attempt: number, random: number, waitMs: number | null): number {
  const bound = Math.min(CAP_MS, BASE_MS * 2 ** Math.min(attempt, 30));
  return (waitMs ?? 0) + Math.floor(random * bound);
}

/** In thousandths of a retry. */
export class RetryBudget {
  static readonly MAX = 10_000;
  static readonly DEPOSIT = 100;
  static readonly PRICE = 1_000;
  #balance = RetryBudget.MAX;

  get balance(): number {
    return this.#balance;
  }

  /** A first attempt was made. */
  deposit(): void {
    this.#balance = Math.min(RetryBudget.MAX, this.#balance + RetryBudget.DEPOSIT);
  }

  /** Pays for a retry, if there is enough. */
  withdraw(): boolean {
    if (this.#balance < RetryBudget.PRICE) return false;
    this.#balance -= RetryBudget.PRICE;
    return true;
  }
}
