// History from the database, in steps that suit the range; read again twice a minute while the range ends now.
import { asProblem, get, query, type Problem } from './api';
import type { Range } from './range';
import type { History, HistoryFields } from './types';

const REFRESH_MS = 30_000;

/** What the history is of; all requests without one. */
export interface HistoryOf {
  domain?: string;
  rule?: string;
  caller?: string;
}

export class HistoryStore {
  data = $state.raw<History | null>(null);
  problem = $state.raw<Problem | null>(null);
  busy = $state(false);
  private turn = 0;

  async load(range: Range, of: HistoryOf = {}): Promise<void> {
    const turn = ++this.turn;
    this.busy = true;
    const at = (seconds: number) => new Date(seconds * 1_000).toISOString();
    try {
      // The end of a preset is the server's now.
      const words = range.name ? { from: at(range.from) } : { from: at(range.from), to: at(range.to) };
      const data = await get<History>('/admin/v1/history' + query({ ...words, ...of }));
      if (turn !== this.turn) return;
      [this.data, this.problem] = [data, null];
    } catch (error) {
      if (turn === this.turn) this.problem = asProblem(error);
    }
    if (turn === this.turn) this.busy = false;
  }

  /** Reads now and while the page is shown; the returned function ends that. */
  follow(range: () => Range, of: HistoryOf = {}): () => void {
    void this.load(range(), of);
    const timer = setInterval(() => {
      if (!document.hidden && range().name) void this.load(range(), of);
    }, REFRESH_MS);
    return () => clearInterval(timer);
  }

  /** A column as a rate per second; a step that has not ended has none. */
  rate(field: HistoryFields): (number | null)[] {
    const data = this.data;
    if (!data) return [];
    const end = Date.parse(data.to) / 1_000;
    return data.series[field].map((value, at) => (value === null || (data.series.t[at] ?? 0) + data.step_s > end ? null : value / data.step_s));
  }

  /** The sum of a column; null if nothing is known. */
  sum(field: HistoryFields): number | null {
    const known = this.data?.series[field].filter((value) => value !== null) ?? [];
    return known.length === 0 ? null : known.reduce((sum, value) => sum + value, 0);
  }

  /** The mean rate of a column, over the steps that are known. */
  mean(field: HistoryFields): number | null {
    const known = this.data?.series[field].filter((value) => value !== null).length ?? 0;
    const sum = this.sum(field);
    return sum === null || !this.data ? null : sum / (known * this.data.step_s);
  }

  /** The highest value of a column of latencies. */
  highest(field: 'p50_us' | 'p99_us' | 'p999_us'): number | null {
    const known = this.data?.series[field].filter((value) => value !== null) ?? [];
    return known.length === 0 ? null : Math.max(...known);
  }
}
