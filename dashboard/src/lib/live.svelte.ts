// Live stats: history from /stats, then one step per second by server-sent events. Browsers open only six connections to a server,
// and each stream takes one: hidden tabs close theirs and fill the gap when shown again, and of several windows only a few
// have a stream; the others poll until a slot is free.
import { asProblem, get, type Problem } from './api';
import { setClock } from './clock.svelte';
import type { Series, Stats, Tick } from './types';

const FIELDS = ['t', 'allow', 'deny', 'shadow_deny', 'fail_open', 'delayed', 'unmatched', 'p50_us', 'p99_us', 'p999_us'] as const;
const KINDS = ['rules', 'emergency', 'quota'] as const;
const POLL_MS = 5_000;
/** Windows of one browser that may have a stream. */
const MAX_STREAMS = 3;
/** Window of the current rates, in seconds: of the tiles, of chart legends, and of rates by rule. */
export const CURRENT_WINDOW = 10;

function none(): Series {
  return { t: [], allow: [], deny: [], shadow_deny: [], fail_open: [], delayed: [], unmatched: [], p50_us: [], p99_us: [], p999_us: [] };
}

class Live {
  /** The time range, in seconds. */
  seconds = $state(300);
  series = $state.raw<Series>(none());
  stats = $state.raw<Stats | null>(null);
  problem = $state.raw<Problem | null>(null);
  status = $state<'off' | 'connecting' | 'live' | 'polling' | 'broken'>('off');
  /** The server's time of the last response. */
  updatedAt = $state<string | null>(null);
  /** Each counts up when the server reports a change of its kind. */
  changed = $state({ rules: 0, emergency: 0, quota: 0 });

  private source: EventSource | null = null;
  /** Frees the stream slot for another window. */
  private release: (() => void) | null = null;
  private reload: ReturnType<typeof setInterval> | null = null;
  private wanted = false;

  constructor() {
    document.addEventListener('visibilitychange', () => {
      if (!this.wanted) return;
      if (document.hidden) this.close();
      else this.open();
    });
  }

  start(): void {
    this.wanted = true;
    if (!document.hidden) this.open();
  }

  stop(): void {
    this.wanted = false;
    this.close();
  }

  async show(seconds: number): Promise<void> {
    this.seconds = seconds;
    await this.history();
  }

  private open(): void {
    if (this.reload) return;
    this.status = 'connecting';
    void this.history();
    this.reload = setInterval(() => {
      // Without a stream, changes are not announced.
      if (this.status !== 'live') this.refresh();
      void this.history();
      void this.listen();
    }, POLL_MS);
    void this.listen();
  }

  /** Opens a stream, if a slot is free for this window. */
  private async listen(): Promise<void> {
    if (this.source || !this.reload) return;
    if (!this.release) {
      const slot = await acquireSlot();
      // The page may be hidden by now, or another call was faster.
      if (!this.reload || this.release || this.source) return slot?.();
      if (!slot) {
        this.status = 'polling';
        return;
      }
      this.release = slot;
    }
    const source = new EventSource('/admin/v1/events');
    this.source = source;
    // Also after a reconnect: changes during the gap are not announced again.
    source.onopen = () => {
      this.status = 'live';
      this.refresh();
    };
    source.onerror = () => {
      this.status = source.readyState === EventSource.CLOSED ? 'broken' : 'connecting';
    };
    source.addEventListener('tick', (event) => this.push(JSON.parse((event as MessageEvent<string>).data) as Tick));
    for (const kind of KINDS) {
      source.addEventListener(kind, () => (this.changed[kind] += 1));
    }
  }

  private refresh(): void {
    for (const kind of KINDS) this.changed[kind] += 1;
  }

  private close(): void {
    this.source?.close();
    this.source = null;
    this.release?.();
    this.release = null;
    if (this.reload) clearInterval(this.reload);
    this.reload = null;
    this.status = 'off';
  }

  private async history(): Promise<void> {
    const [seconds, sentAt] = [this.seconds, Date.now()];
    try {
      const stats = await get<Stats>(`/admin/v1/stats?seconds=${seconds}`);
      // Another range was chosen meanwhile; its response is on the way.
      if (seconds !== this.seconds) return;
      setClock(stats.now, sentAt, Date.now());
      this.updatedAt = stats.now;
      this.stats = stats;
      this.series = stats.series;
      this.problem = null;
    } catch (error) {
      this.problem = asProblem(error);
    }
    // A stream that the server rejected does not reconnect by itself.
    if (this.source?.readyState === EventSource.CLOSED && !this.problem) {
      this.source = null;
      void this.listen();
    }
  }

  private push(tick: Tick): void {
    const old = this.series;
    const last = old.t.at(-1);
    if (last !== undefined && tick.t <= last) return;
    const next = none();
    const from = Math.max(0, old.t.length + 1 - this.seconds);
    for (const field of FIELDS) {
      (next[field] as (number | null)[]) = [...old[field].slice(from), tick[field] ?? null];
    }
    this.series = next;
    this.status = 'live';
  }

  /** The current rate: the mean of the last seconds. */
  recent(field: 'allow' | 'deny' | 'shadow_deny' | 'fail_open' | 'delayed' | 'unmatched', steps = CURRENT_WINDOW): number | null {
    const values = this.series[field].slice(-steps);
    return values.length === 0 ? null : values.reduce((sum, value) => sum + value, 0) / values.length;
  }

  /** The latest value of the last seconds: without traffic a second has no latency. */
  latest(field: 'p50_us' | 'p99_us' | 'p999_us'): number | null {
    return this.series[field].slice(-CURRENT_WINDOW).findLast((value) => value !== null && value !== undefined && value > 0) ?? null;
  }
}

/** Acquires a stream slot shared by all windows; null if all are taken. Browsers without locks have no bound. */
function acquireSlot(): Promise<(() => void) | null> {
  const { locks } = navigator as { locks?: LockManager };
  if (!locks) return Promise.resolve(() => undefined);
  return new Promise((taken) => {
    const attempt = (slot: number): void => {
      if (slot === MAX_STREAMS) return taken(null);
      void locks.request(`tollgate events ${slot}`, { ifAvailable: true }, (lock) => {
        if (lock) return new Promise<void>((left) => taken(left));
        attempt(slot + 1);
      });
    };
    attempt(0);
  });
}

export const live = new Live();
