// What a rule allows a caller now, so that a limit of its own begins above it.
import { get, path, query } from './api';
import type { Decision, Override, Usage } from './types';

/** A limit of a caller's own as the form has it. */
export type Own = Omit<Override, 'burst'> & { burst: number | null };

export interface Present {
  rule: string;
  limit: number;
  window: string;
  burst?: number | null;
}

/** How windows are told, as people write them. */
const WORDS: Record<string, string> = { '1s': 'second', '1m': 'minute', '1h': 'hour', '1d': 'day', '7d': 'week' };

/** By the latest denial, which knows the whole request; else by the counters: without a rule, of the one about the key alone. */
export async function presentLimit(key: string, id: string, rule: string): Promise<Present | null> {
  const caller = id || key;
  if (!caller) return null;
  if (rule) {
    const denied = query({ key: caller, rule, verdict: 'deny', limit: 1 });
    const found = await get<{ decisions: Decision[] }>('/admin/v1/decisions' + denied).catch(() => null);
    const told = found?.decisions[0];
    if (told?.limit) return { ...told.limit, rule };
  }
  const usage = await get<Usage>(id ? path`/admin/v1/usage/by-id/${id}` : path`/admin/v1/usage/${key}`).catch(() => null);
  return usage?.limits.find((one) => !one.role && (rule ? one.rule === rule : one.descriptor === 'api_key')) ?? null;
}

/** Twice what acts now; where that is not known, a hundred a minute. Permits held at once are not limited by time. */
export function twice(present: Present | null, descriptor: string): Own {
  if (!present || present.window === 'concurrent') return { descriptor, requests_per_unit: 100, unit: 'minute', burst: null };
  return {
    descriptor,
    requests_per_unit: Math.max(1, present.limit * 2),
    unit: WORDS[present.window] ?? present.window,
    burst: present.burst ? present.burst * 2 : null,
  };
}
