// The limit that a rule applies to a caller now, as the starting point of an override.
import { get, keyOf, path, query } from './api';
import type { CurrentLimit, Decision, Override, Usage } from './types';

/** An override as the form edits it. */
export type Own = Omit<Override, 'burst'> & { burst: number | null };

/** Windows in responses, as rule files spell them. */
const WORDS: Record<string, string> = { '1s': 'second', '1m': 'minute', '1h': 'hour', '1d': 'day', '7d': 'week' };

/** From the latest denial, which has the complete request; else from usage, where no rule means the rule on the caller's attribute alone. */
export async function currentLimit({ key, attribute, id }: { key: string; attribute: string; id: string }, rule: string): Promise<CurrentLimit | null> {
  const caller = id || key;
  if (!caller) return null;
  if (rule) {
    const denied = query({ key: caller, rule, verdict: 'deny', limit: 1 });
    const found = await get<{ decisions: Decision[] }>('/admin/v1/decisions' + denied).catch(() => null);
    const denial = found?.decisions[0];
    if (denial?.limit) return { ...denial.limit, rule };
  }
  const usage = await get<Usage>(id ? path`/admin/v1/usage/by-id/${id}` : path`/admin/v1/usage/${key}` + query(keyOf(attribute))).catch(() => null);
  const own = usage?.limits.find((one) => !one.role && (rule ? one.rule === rule : one.descriptor === attribute));
  return own ? { ...own, limit: own.configured_count ?? own.count } : null;
}

/** Twice the current limit; 100 per minute where that is unknown or is a concurrency limit. */
export function twice(present: CurrentLimit | null, descriptor: string): Own {
  if (!present || present.window === 'concurrent') return { descriptor, requests_per_unit: 100, unit: 'minute', burst: null };
  return {
    descriptor,
    requests_per_unit: Math.max(1, present.limit * 2),
    unit: WORDS[present.window] ?? present.window,
    burst: present.burst ? present.burst * 2 : null,
  };
}
