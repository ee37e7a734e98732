// Quotas as text.
import { date, exact } from './format';
import type { CurrentLimit, Override, Quota } from './types';

export function limitInWords(own: Override): string {
  if (own.limit) return own.limit;
  return `${exact(own.requests_per_unit)} / ${own.unit}${own.burst ? `, burst ${exact(own.burst)}` : ''}`;
}

/** What applies until a scheduled quota takes effect; null if it is in effect already. */
export function untilThen(quota: Quota, now: number): string | null {
  if (quota.effective_at === null || new Date(quota.effective_at).getTime() <= now) return null;
  const going = quota.until_effective;
  if (!going) return `The rules apply until ${date(quota.effective_at)}.`;
  const limits = going.overrides.map((own) => `${own.descriptor} ${limitInWords(own)}`);
  const tier = going.tier === null ? 'no tier' : `tier ${going.tier}`;
  const ends = going.expires_at === null ? '' : `, but not after ${date(going.expires_at)}`;
  return `Until ${date(quota.effective_at)} the current quota applies${ends}: ${[tier, ...limits].join('; ')}.`;
}

/** A quota in one sentence. */
export function inWords(quota: Quota): string {
  const parts = [quota.tier === null ? [] : [`tier ${quota.tier}`], quota.overrides.map((own) => `${own.descriptor} ${limitInWords(own)}`)].flat();
  const begins = quota.effective_at === null ? '' : ` from ${date(quota.effective_at)}`;
  const ends = quota.expires_at === null ? '' : ` until ${date(quota.expires_at)}`;
  return `${parts.join('; ')}${begins}${ends}${quota.reason ? ` (${quota.reason})` : ''}.`;
}

/** The current limit of a rule, in one sentence. */
export function presentInWords(present: CurrentLimit): string {
  const burst = present.burst ? `, burst ${exact(present.burst)}` : '';
  if (present.window === 'concurrent') return `${present.rule} currently allows ${exact(present.limit)} concurrent requests.`;
  return `${present.rule} currently allows ${exact(present.limit)} / ${present.window}${burst}. The override starts at twice that.`;
}
