/**
 * The 95th percentile of recent latencies, after which a call is hedged: a histogram whose counts are halved from time to
 * time, with integers only, so that it is the same in every language. A sorted window of samples was rejected: it costs more
 * memory, and time for each call.
 */

/** The estimate until enough is measured. */
export const DEFAULT_HEDGE_AFTER_US = 3_000;

/** Latencies are counted in this unit, rounded up. */
const UNIT_US = 125;
/** 1 ms or less, then eight buckets for each doubling, to 16.384 s and more. */
const BUCKETS = 1 + 8 * 14;
const MAX_UNITS = 8 * 2 ** 14;
/** Requests between two estimates, and before the first. */
const ESTIMATE_EVERY = 100;
/** When an estimate finds this many, it halves all counts. */
const HALVE_AT = 1_000;

function bucketOf(latencyUs: number): number {
  const above = Math.min(Math.ceil(latencyUs / UNIT_US), MAX_UNITS) - 1;
  // Also what is not a number.
  if (!(above >= 8)) return 0;
  const doublings = 28 - Math.clz32(above);
  return 8 * doublings + (above >>> doublings) - 7;
}

/** The longest latency of a bucket. */
function upperEdge(bucket: number): number {
  return bucket === 0 ? 1_000 : UNIT_US * ((((bucket - 1) % 8) + 9) << Math.floor((bucket - 1) / 8));
}

export class LatencyP95 {
  readonly #counts = new Uint32Array(BUCKETS);
  #recorded = 0;
  #estimate = bucketOf(DEFAULT_HEDGE_AFTER_US);

  get estimateUs(): number {
    return upperEdge(this.#estimate);
  }

  /** For timers, which have whole milliseconds. */
  get estimateMs(): number {
    return Math.ceil(this.estimateUs / 1_000);
  }

  /** Records how long a first request took. A fault that came sooner than the estimate says nothing about answers. */
  record(latencyUs: number, ended: "answered" | "faulted"): void {
    const bucket = bucketOf(latencyUs);
    if (ended === "faulted" && bucket < this.#estimate) return;
    this.#counts[bucket] = (this.#counts[bucket] as number) + 1;
    this.#recorded = (this.#recorded + 1) % ESTIMATE_EVERY;
    if (this.#recorded === 0) this.#update();
  }

  #update(): void {
    const counts = this.#counts;
    const total = counts.reduce((sum, count) => sum + count, 0);
    let below = 0;
    this.#estimate = counts.findIndex((count) => (below += count) * 100 >= total * 95);
    if (total >= HALVE_AT) for (let at = 0; at < BUCKETS; at += 1) counts[at] = (counts[at] as number) >>> 1;
  }
}
