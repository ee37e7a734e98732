/**
 * Which server to ask, and for how long. Servers keep their configured order, so that one cluster's counters are used
 * as long as they answer; a server that faults moves back for a while. A random order was rejected: with counters in
 * memory each server has its own, and a caller would get several limits.
 */

export const COOLDOWN_MS = 1_000;
export const MAX_COOLDOWN_MS = 30_000;

/** The deadline of a call: its own, never past the caller's. */
export function effectiveDeadline(ownMs: number, callerMs: number | null): number {
  return Math.max(0, callerMs === null ? ownMs : Math.min(ownMs, callerMs));
}

/** Time for the next attempt; `null` if the deadline has passed. The rest is shared by the servers that are left. */
export function attemptTime(deadlineMs: number, elapsedMs: number, serversLeft: number): number | null {
  const left = deadlineMs - elapsedMs;
  return left <= 0 ? null : Math.max(1, Math.floor(left / serversLeft));
}

interface Health {
  faults: number;
  downUntil: number;
}

/** The order of servers, by their recent faults. */
export class ServerOrder {
  readonly #health: Health[];
  readonly #configured: readonly number[];
  #anyDown = false;

  constructor(servers: number) {
    this.#health = Array.from({ length: servers }, () => ({ faults: 0, downUntil: 0 }));
    this.#configured = this.#health.map((_, index) => index);
  }

  answered(server: number): void {
    if (!this.#anyDown) return;
    const health = this.#health[server];
    if (health === undefined) return;
    health.faults = 0;
    health.downUntil = 0;
    this.#anyDown = this.#health.some((one) => one.faults > 0);
  }

  faulted(server: number, nowMs: number): void {
    const health = this.#health[server];
    if (health === undefined) return;
    health.faults += 1;
    health.downUntil = nowMs + Math.min(MAX_COOLDOWN_MS, COOLDOWN_MS * 2 ** Math.min(health.faults - 1, 10));
    this.#anyDown = true;
  }

  order(nowMs: number): readonly number[] {
    if (!this.#anyDown) return this.#configured;
    const downUntil = (server: number): number => this.#health[server]?.downUntil ?? 0;
    const up = this.#configured.filter((server) => downUntil(server) <= nowMs);
    const down = this.#configured.filter((server) => downUntil(server) > nowMs);
    down.sort((a, b) => downUntil(a) - downUntil(b) || a - b);
    return [...up, ...down];
  }
}
