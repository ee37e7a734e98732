/**
 * Asks a second server if the first one takes long, and uses the answer that comes first. The slower answer's charge is
 * given back: that is why hedged requests are reservations. Canceling the slower request instead was rejected: whether
 * the server had charged it already would be unknown.
 */

/** Timers, so that tests run in virtual time. */
export interface Timers {
  set(callback: () => void, ms: number): unknown;
  clear(timer: unknown): void;
}

export interface HedgeSettings<A> {
  /** Servers in the order in which to ask them. */
  readonly order: readonly number[];
  readonly hedgeAfterMs: number;
  readonly deadlineMs: number;
  /** Never rejects: faults are answers. */
  readonly send: (server: number) => Promise<A>;
  readonly isFault: (answer: A) => boolean;
  /** Gives back the charge of an answer that came too late. */
  readonly discard: (server: number, answer: A) => Promise<void>;
  readonly timers: Timers;
}

export interface HedgeOutcome<A> {
  /** The answer that counts; `null` if there was none before the deadline. */
  readonly winner: { readonly server: number; readonly answer: A } | null;
  /** The last fault, if every server faulted. */
  readonly lastFault: A | null;
  /** Resolves when late charges are given back. */
  readonly pending: Promise<void>;
}

export function hedge<A>(settings: HedgeSettings<A>): Promise<HedgeOutcome<A>> {
  const { order, timers } = settings;
  return new Promise((resolve) => {
    const late: Promise<void>[] = [];
    let next = 0, underWay = 0, over = false;
    let lastFault: A | null = null;
    let hedgeTimer: unknown;

    const finish = (winner: HedgeOutcome<A>["winner"]): void => {
      over = true;
      timers.clear(hedgeTimer);
      timers.clear(deadlineTimer);
      resolve({ winner, lastFault, pending: Promise.all(late).then(() => undefined) });
    };
    const ask = (): void => {
      const server = order[next];
      if (server === undefined) return;
      next += 1;
      underWay += 1;
      const done = settings.send(server).then(async (answer) => {
        underWay -= 1;
        if (over) {
          if (!settings.isFault(answer)) await settings.discard(server, answer);
        } else if (!settings.isFault(answer)) {
          finish({ server, answer });
        } else {
          lastFault = answer;
          if (next < order.length) ask();
          else if (underWay === 0) finish(null);
        }
      });
      late.push(done);
    };
    const deadlineTimer = timers.set(() => { if (!over) finish(null); }, settings.deadlineMs);
    hedgeTimer = timers.set(() => { if (!over && underWay === 1) ask(); }, settings.hedgeAfterMs);
    ask();
  });
}
