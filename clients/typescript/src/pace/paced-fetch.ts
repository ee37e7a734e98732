/**
 * A `fetch` that is limited well: it slows down before it is refused, waits as long as the response says, and retries within
 * a budget. Each host has its own state, at most 1,024 of them. Only idempotent methods are retried: only the caller
 * knows what may be sent twice.
 */

import { sleep } from "../ratelimit.js";
import { AdaptiveThrottle } from "./adaptive-throttle.js";
import { Pacer } from "./pacer.js";
import { backoff, RetryBudget } from "./retry.js";
import { readSignals } from "./signals.js";

export interface PacedFetchOptions {
  /** The `fetch` to use. */
  readonly fetch?: typeof fetch;
  /** Retries of one request. Default 3. */
  readonly maxRetries?: number;
  /** Longest single wait, in milliseconds; a longer one is not waited for. Default 30,000. */
  readonly maxWaitMs?: number;
  /** Methods that may be sent twice. Default: the idempotent ones of HTTP. */
  readonly retryMethods?: readonly string[];
  /** What shares a limit. Default: the origin of the URL. */
  readonly key?: (url: URL) => string;
  /** Slow down before the limit is reached. Default true. */
  readonly pace?: boolean;
  /** Reject locally when refused often. Default true. */
  readonly adaptive?: boolean;
  /** For tests: time, waiting and chance. Time may begin anywhere, unless responses have dates. */
  readonly clock?: { now(): number; sleep(ms: number, signal?: AbortSignal): Promise<void> };
  readonly random?: () => number;
}

/** The host asked not to be called for longer than `maxWaitMs`, or requests to it are mostly refused. Nothing was sent. */
export class ThrottledError extends Error {
  override readonly name = "ThrottledError";
  constructor(message: string, readonly retryAfterMs: number) {
    super(message);
  }
}

const IDEMPOTENT = ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"];
const MAX_HOSTS = 1_024;
/** The time of day may be set back; then every host would be blocked for that long. */
const CLOCK = { now: (): number => Math.floor(performance.now()), sleep };

class Host {
  readonly pacer = new Pacer();
  readonly throttle = new AdaptiveThrottle();
  readonly budget = new RetryBudget();
}

/** Wraps `fetch`. The result has its signature. */
export function pacedFetch(options: PacedFetchOptions = {}): typeof fetch {
  const send: typeof fetch = options.fetch ?? ((input, init) => fetch(input, init));
  const { maxRetries = 3, maxWaitMs = 30_000, retryMethods = IDEMPOTENT, key = (url: URL) => url.origin, pace = true, adaptive = true, clock = CLOCK, random = Math.random } = options;
  const timeOfDay = options.clock === undefined ? Date.now : () => clock.now();
  const hosts = new Map<string, Host>();

  const hostOf = (name: string): Host => {
    const known = hosts.get(name);
    // Moved to the end: the one used longest ago makes room.
    if (known !== undefined) hosts.delete(name);
    else if (hosts.size >= MAX_HOSTS) hosts.delete(hosts.keys().next().value as string);
    const host = known ?? new Host();
    hosts.set(name, host);
    return host;
  };

  /** Waits for the request's slot. */
  const waitForSlot = async (host: Host, signal: AbortSignal): Promise<void> => {
    let delay = host.pacer.send(clock.now());
    try {
      while (delay > 0) {
        if (delay > maxWaitMs) throw new ThrottledError(`the host allows no request for ${delay} ms; try again then, or raise \`maxWaitMs\``, delay);
        await clock.sleep(delay, signal);
        // Another response may have blocked the host meanwhile.
        delay = host.pacer.blockedUntil - clock.now();
      }
    } catch (error) {
      host.pacer.failed();
      throw error;
    }
  };

  return async (input, init) => {
    const request = new Request(input, init);
    const host = hostOf(key(new URL(request.url)));
    const mayRetry = retryMethods.includes(request.method);
    for (let attempt = 0; ; attempt += 1) {
      if (attempt === 0) host.budget.deposit();
      const isLast = !mayRetry || attempt >= maxRetries;
      let waitMs: number | null = null;
      let give: () => Response;
      if (adaptive && host.throttle.rejects(clock.now(), random())) {
        host.throttle.request(clock.now());
        give = () => { throw new ThrottledError("requests to the host are mostly refused; try again later", backoff(attempt, random(), null)); };
      } else {
        if (pace) await waitForSlot(host, request.signal);
        try {
          const response = await send(isLast ? request : request.clone());
          const signals = readSignals(response.status, response.headers, timeOfDay());
          if (pace) host.pacer.response(clock.now(), signals, random());
          host.throttle.request(clock.now());
          if (!signals.refused) host.throttle.accept(clock.now());
          if (!signals.refused && response.status !== 502 && response.status !== 504) return response;
          waitMs = signals.waitMs;
          give = () => response;
        } catch (error) {
          if (pace) host.pacer.failed();
          if (request.signal.aborted) throw error;
          host.throttle.request(clock.now());
          give = () => { throw error; };
        }
      }
      const delay = backoff(attempt, random(), waitMs);
      if (isLast || delay > maxWaitMs || !host.budget.withdraw()) return give();
      discard(give);
      await clock.sleep(delay, request.signal);
    }
  };
}

/** Ends the body of a response that is not returned, so that its connection is free. */
function discard(give: () => Response): void {
  try {
    give().body?.cancel().catch(() => undefined);
  } catch {
    // There was no response.
  }
}
