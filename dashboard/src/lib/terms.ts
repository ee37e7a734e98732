// What is agreed with one caller, in words.
import { count, date } from './format';
import type { Override, Quota } from './types';

export function limitInWords(own: Override): string {
  return `${count(own.requests_per_unit)} / ${own.unit}${own.burst ? `, burst ${count(own.burst)}` : ''}`;
}

/** What acts until an agreement for later does; nothing, if it acts already. */
export function untilThen(quota: Quota, now: number): string | null {
  if (quota.effective_at === null || new Date(quota.effective_at).getTime() <= now) return null;
  const begins = `Until ${date(quota.effective_at)}`;
  const going = quota.until_effective;
  if (!going) return `${begins} the rules act alone.`;
  const limits = going.overrides.map((own) => `${own.descriptor} ${limitInWords(own)}`);
  const tier = going.tier === null ? 'no tier of its own' : `tier ${going.tier}`;
  const ends = going.expires_at === null ? '' : `, but not after ${date(going.expires_at)}`;
  return `${begins} what acts now goes on${ends}: ${[tier, ...limits].join('; ')}.`;
}
