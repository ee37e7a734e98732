/**
 * Asks a second server if the first one takes long, and uses the answer that comes first. The slower answer's charge is
 * given back: that is why hedged requests are reservations. Canceling the slower request instead was rejected: whether
 * the server had charged it already would be unknown.
 *
 * A denial waits for the request beside it: on one store, the charge of that one may be the reason. Hedges have the budget
 * of retries: when all servers are slow, a second request for each call would make them slower.
 */

import { attemptTime } from "./failover.js";
import type { RetryBudget } from "./pace/retry.js";

/** Timers, so that tests run in virtual time. */
export interface Timers {
  /** Milliseconds since any fixed point. */
  now(): number;
  set(callback: () => void, ms: number): unknown;
  clear(timer: unknown): void;
}

/** What an answer means for the other requests; `failed` is not allowed for another reason than a limit: shed, rejected, or a rule's fail policy. */
export type HedgeVerdict = "allowed" | "denied" | "failed" | "fault";

export interface HedgeSettings<A> {
  /** Servers in the order in which to ask them. */
  readonly order: readonly number[];
  readonly hedgeAfterMs: number;
  readonly deadlineMs: number;
  /** Never rejects: faults are answers. */
  readonly send: (server: number) => Promise<A>;
  readonly verdict: (answer: A) => HedgeVerdict;
  /** Of all calls. Without it the next server is asked when failover would: after the first one's share of the deadline. */
  readonly budget: RetryBudget;
  /** Called when the first request ends, in milliseconds: also if a hedge was faster, or without those the estimate would sink with every hedge. */
  readonly measured: (latencyMs: number, ended: "answered" | "faulted") => void;
  /** Records that a server has used its share of the deadline. Its answer still counts. */
  readonly timeOut: (server: number) => void;
  /** Gives back the charge of an answer that came too late. */
  readonly discard: (server: number, answer: A, winner: A | null) => Promise<void>;
  readonly timers: Timers;
}

interface Winner<A> {
  readonly server: number;
  readonly answer: A;
}

export interface HedgeOutcome<A> {
  /** The answer that counts; `null` if there was none before the deadline. */
  readonly winner: Winner<A> | null;
  /** Whether every request beside the winner has answered. If not, its charge may be the reason of a denial. */
  readonly confirmed: boolean;
  /** The last fault, if every server faulted. */
  readonly lastFault: A | null;
  /** Resolves when late charges are given back. */
  readonly pending: Promise<void>;
}

export function hedge<A>(settings: HedgeSettings<A>): Promise<HedgeOutcome<A>> {
  const { order, timers, budget, deadlineMs } = settings;
  const share = attemptTime(deadlineMs, 0, order.length) ?? 0;
  return new Promise((resolve) => {
    const late: Promise<void>[] = [];
    let next = 0, underWay = 0, over = false;
    let lastFault: A | null = null;
    let denial: Winner<A> | null = null, decided: A | null = null;
    let nextTimer: unknown;

    const finish = (winner: Winner<A> | null, confirmed = true): void => {
      over = true;
      decided = winner?.answer ?? null;
      timers.clear(nextTimer);
      timers.clear(deadlineTimer);
      resolve({ winner, confirmed, lastFault, pending: Promise.all(late).then(() => undefined) });
    };
    const receive = (server: number, answer: A, verdict: HedgeVerdict): void => {
      if (verdict === "fault") {
        lastFault = answer;
        if (denial !== null) finish(denial, false);
        else if (next < order.length) ask();
        else if (underWay === 0) finish(null);
      } else if (denial !== null) {
        finish(verdict === "allowed" ? { server, answer } : denial);
      } else if (verdict === "denied" && underWay > 0) {
        denial = { server, answer };
      } else {
        finish({ server, answer });
      }
    };
    const ask = (): void => {
      const server = order[next], isFirst = next === 0, sentAt = timers.now();
      if (server === undefined) return;
      next += 1;
      underWay += 1;
      const done = settings.send(server).then(async (answer) => {
        underWay -= 1;
        const verdict = settings.verdict(answer);
        if (isFirst) settings.measured(timers.now() - sentAt, verdict === "fault" ? "faulted" : "answered");
        if (!over) receive(server, answer, verdict);
        else if (verdict !== "fault") await settings.discard(server, answer, decided);
      });
      late.push(done);
    };
    const askNext = (afterMs: number): void => {
      if (over || next >= order.length) return;
      if (afterMs < share && !budget.withdraw()) {
        nextTimer = timers.set(() => askNext(share), share - afterMs);
        return;
      }
      // Only one request is under way: the last.
      if (afterMs >= share) settings.timeOut(order[next - 1] as number);
      ask();
    };
    const deadlineTimer = timers.set(() => { if (!over) finish(denial, denial === null); }, deadlineMs);
    const hedgeAfterMs = Math.min(settings.hedgeAfterMs, share);
    nextTimer = timers.set(() => askNext(hedgeAfterMs), hedgeAfterMs);
    budget.deposit();
    ask();
  });
}
