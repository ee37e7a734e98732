// The limit that a rule applies to a caller now, as the starting point of an override.
import { get, keyOf, path, query } from './api';
import type { CurrentLimit, Decision, Override, Usage } from './types';

/** An override as the form edits it. */
export type Own = Omit<Override, 'burst' | 'requests_per_unit'> & { requests_per_unit: number | null; burst: number | null };

/** A limit in force, and the limits by tier if the caller's tier, and so the limit, is not known. */
export interface Present {
  limit: CurrentLimit | null;
  tiers: NonNullable<Usage['tiers']>;
}

/** Windows in responses, as rule files spell them. */
const WORDS: Record<string, string> = { '1s': 'second', '1m': 'minute', '1h': 'hour', '1d': 'day', '7d': 'week' };

/** From the latest denial, which has the complete request; else from usage, where no rule means the rule on the caller's attribute alone. */
export async function currentLimit({ key, attribute, id }: { key: string; attribute: string; id: string }, rule: string): Promise<Present> {
  const caller = id || key;
  if (!caller) return { limit: null, tiers: [] };
  if (rule) {
    const denied = query({ key: caller, rule, verdict: 'deny', limit: 1 });
    const found = await get<{ decisions: Decision[] }>('/admin/v1/decisions' + denied).catch(() => null);
    const denial = found?.decisions[0];
    if (denial?.limit) return { limit: { ...denial.limit, rule }, tiers: [] };
  }
  // A rule for networks has their prefix lengths in its path: `remote_address/24`.
  const usage = await get<Usage>(id ? path`/admin/v1/usage/by-id/${id}` : path`/admin/v1/usage/${key}` + query(keyOf(attribute))).catch(() => null);
  const isMeant = (one: { rule: string; descriptor?: string }) => (rule ? one.rule === rule : one.descriptor?.replace(/(\/\d+)+$/, '') === attribute);
  const tiers = usage?.tier === null ? (usage.tiers ?? []).filter(isMeant) : [];
  const own = usage?.limits.find((one) => !one.role && isMeant(one));
  return { limit: own && tiers.length === 0 ? { ...own, limit: own.configured_count ?? own.count } : null, tiers };
}

/** Twice the current limit; no number where that is unknown or is a concurrency limit. */
export function twice(present: CurrentLimit | null, descriptor: string): Own {
  if (!present || present.window === 'concurrent') return { descriptor, requests_per_unit: null, unit: 'minute', burst: null };
  return {
    descriptor,
    requests_per_unit: Math.max(1, present.limit * 2),
    unit: WORDS[present.window] ?? present.window,
    burst: present.burst ? present.burst * 2 : null,
  };
}
