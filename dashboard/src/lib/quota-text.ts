// What is agreed with one caller, in words.
import { date, exact } from './format';
import type { Present } from './current-limit';
import type { Override, Quota } from './types';

export function limitInWords(own: Override): string {
  return `${exact(own.requests_per_unit)} / ${own.unit}${own.burst ? `, burst ${exact(own.burst)}` : ''}`;
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

/** What is agreed, in a sentence. */
export function inWords(quota: Quota): string {
  const parts = [quota.tier === null ? [] : [`tier ${quota.tier}`], quota.overrides.map((own) => `${own.descriptor} ${limitInWords(own)}`)].flat();
  const begins = quota.effective_at === null ? '' : ` from ${date(quota.effective_at)}`;
  const ends = quota.expires_at === null ? '' : ` until ${date(quota.expires_at)}`;
  return `${parts.join('; ')}${begins}${ends}${quota.reason ? ` (${quota.reason})` : ''}.`;
}

/** What a rule allows a caller now. */
export function presentInWords(present: Present): string {
  const burst = present.burst ? `, burst ${exact(present.burst)}` : '';
  if (present.window === 'concurrent') return `${present.rule} allows it ${exact(present.limit)} at once now.`;
  return `${present.rule} allows it ${exact(present.limit)} / ${present.window}${burst} now; the limit above began at twice that.`;
}
