// What happens now: history from /stats, then a step a second by server-sent events. Browsers have only six connections for a
// server, and each stream is one: a tab that nobody sees lets go of its own and fills the gap when it is seen again, and of
// windows side by side only a few have one; the others ask every few seconds until there is a seat for them.
import { asProblem, get, type Problem } from './api';
import { setClock } from './clock.svelte';
import type { Series, Stats, Tick } from './types';

const FIELDS = ['t', 'allow', 'deny', 'shadow_deny', 'fail_open', 'delayed', 'p50_us', 'p99_us', 'p999_us'] as const;
const KINDS = ['rules', 'emergency', 'quota'] as const;
const RELOAD = 5_000;
/** Windows of one browser that have a stream. */
const SEATS = 3;

function none(): Series {
  return { t: [], allow: [], deny: [], shadow_deny: [], fail_open: [], delayed: [], p50_us: [], p99_us: [], p999_us: [] };
}

class Live {
  /** How much of the past is shown. */
  seconds = $state(300);
  series = $state.raw<Series>(none());
  stats = $state.raw<Stats | null>(null);
  problem = $state.raw<Problem | null>(null);
  status = $state<'off' | 'connecting' | 'live' | 'polling' | 'broken'>('off');
  /** When the server last told something, by its clock. */
  updatedAt = $state<string | null>(null);
  /** Each counts up when the server says that something of its kind has changed. */
  changed = $state({ rules: 0, emergency: 0, quota: 0 });

  private source: EventSource | null = null;
  /** Gives the seat to another window. */
  private leave: (() => void) | null = null;
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
      // While nobody tells what has changed, one has to look.
      if (this.status !== 'live') this.lookAgain();
      void this.history();
      void this.listen();
    }, RELOAD);
    void this.listen();
  }

  /** Listens, if there is a seat for this window. */
  private async listen(): Promise<void> {
    if (this.source || !this.reload) return;
    if (!this.leave) {
      const seat = await takeSeat();
      // Somebody may have turned away meanwhile, or another call been quicker.
      if (!this.reload || this.leave || this.source) return seat?.();
      if (!seat) {
        this.status = 'polling';
        return;
      }
      this.leave = seat;
    }
    const source = new EventSource('/admin/v1/events');
    this.source = source;
    // Also when it comes back by itself: what changed while nobody listened is not told again.
    source.onopen = () => {
      this.status = 'live';
      this.lookAgain();
    };
    source.onerror = () => {
      this.status = source.readyState === EventSource.CLOSED ? 'broken' : 'connecting';
    };
    source.addEventListener('tick', (event) => this.push(JSON.parse((event as MessageEvent<string>).data) as Tick));
    for (const kind of KINDS) {
      source.addEventListener(kind, () => (this.changed[kind] += 1));
    }
  }

  private lookAgain(): void {
    for (const kind of KINDS) this.changed[kind] += 1;
  }

  private close(): void {
    this.source?.close();
    this.source = null;
    this.leave?.();
    this.leave = null;
    if (this.reload) clearInterval(this.reload);
    this.reload = null;
    this.status = 'off';
  }

  private async history(): Promise<void> {
    const [seconds, asked] = [this.seconds, Date.now()];
    try {
      const stats = await get<Stats>(`/admin/v1/stats?seconds=${seconds}`);
      // Somebody has chosen another stretch meanwhile, and its answer is on its way.
      if (seconds !== this.seconds) return;
      setClock(stats.now, asked, Date.now());
      this.updatedAt = stats.now;
      this.stats = stats;
      this.series = stats.series;
      this.problem = null;
    } catch (error) {
      this.problem = asProblem(error);
    }
    // A stream that the server has refused does not come back by itself.
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

  /** The mean over the last steps, for figures that would flicker else. */
  recent(field: 'allow' | 'deny' | 'shadow_deny' | 'fail_open' | 'delayed', steps = 5): number | null {
    const values = this.series[field].slice(-steps);
    return values.length === 0 ? null : values.reduce((sum, value) => sum + value, 0) / values.length;
  }

  latest(field: 'p50_us' | 'p99_us' | 'p999_us'): number | null {
    for (let i = this.series[field].length - 1; i >= 0 && i >= this.series[field].length - 10; i--) {
      const value = this.series[field][i];
      if (value !== null && value !== undefined && value > 0) return value;
    }
    return null;
  }
}

/** One of the seats, until it is left; none, if all are taken. Where the browser does not know, everybody has one. */
function takeSeat(): Promise<(() => void) | null> {
  const { locks } = navigator as { locks?: LockManager };
  if (!locks) return Promise.resolve(() => undefined);
  return new Promise((taken) => {
    const ask = (seat: number): void => {
      if (seat === SEATS) return taken(null);
      void locks.request(`tollgate events ${seat}`, { ifAvailable: true }, (lock) => {
        if (lock) return new Promise<void>((left) => taken(left));
        ask(seat + 1);
      });
    };
    ask(0);
  });
}

export const live = new Live();
