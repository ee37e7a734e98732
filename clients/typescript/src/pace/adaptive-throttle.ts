/**
 * Adaptive throttling, from Google's SRE book ("Handling overload"): a client whose requests are mostly refused drops
 * some of them itself, with a probability that grows with the share of refusals over the last two minutes. So a server
 * spends its time on answers instead of refusals.
 */

const K = 2;
const BUCKETS = 120;
const BUCKET_MS = 1_000;
/** With fewer requests in the window nothing is rejected locally. */
export const MIN_REQUESTS = 10;

export class AdaptiveThrottle {
  // A ring of seconds; `#newest` is the second that was written last.
  readonly #requests = new Float64Array(BUCKETS);
  readonly #accepts = new Float64Array(BUCKETS);
  #newest = 0;
  #requestSum = 0;
  #acceptSum = 0;

  /** A request's outcome is known: a response, a failure, or a local rejection. Those under way do not count yet. */
  request(now: number): void {
    this.#advance(now);
    const at = this.#newest % BUCKETS;
    this.#requests[at] = (this.#requests[at] ?? 0) + 1;
    this.#requestSum += 1;
  }

  /** A response arrived that is no refusal. */
  accept(now: number): void {
    this.#advance(now);
    const at = this.#newest % BUCKETS;
    this.#accepts[at] = (this.#accepts[at] ?? 0) + 1;
    this.#acceptSum += 1;
  }

  /** The probability with which to reject a request locally. */
  probability(now: number): number {
    this.#advance(now);
    return Math.max(0, (this.#requestSum - K * this.#acceptSum) / (this.#requestSum + 1));
  }

  /** Whether to reject a request locally; `random` in [0, 1). A few refusals are no overload: they are waited for. */
  rejects(now: number, random: number): boolean {
    const probability = this.probability(now);
    return this.#requestSum >= MIN_REQUESTS && random < probability;
  }

  #advance(now: number): void {
    const second = Math.floor(now / BUCKET_MS);
    const steps = Math.min(BUCKETS, second - this.#newest);
    for (let step = 1; step <= steps; step += 1) {
      const at = (second - steps + step) % BUCKETS;
      this.#requestSum -= this.#requests[at] ?? 0;
      this.#acceptSum -= this.#accepts[at] ?? 0;
      this.#requests[at] = 0;
      this.#accepts[at] = 0;
    }
    if (steps > 0) this.#newest = second;
  }
}
