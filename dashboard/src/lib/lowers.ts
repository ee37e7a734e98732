// Whether a change of a quota lowers what is in force for the caller.
import type { LimitsInForce, QuotaPreview } from './types';

const SECONDS: Record<string, number> = { s: 1, m: 60, h: 3_600, d: 86_400, w: 604_800, month: 2_592_000, year: 31_536_000 };

/** The length of a window, as `30s` or `1 month`. */
function seconds(window: string): number {
  const [, count, unit = ''] = /^(\d*)\s*([a-z]+)$/.exec(window) ?? [];
  return (Number(count) || 1) * (SECONDS[unit] ?? SECONDS[unit[0] ?? ''] ?? 1);
}

/** The least that the limits of one kind allow: for good, and at once. */
function least(of: LimitsInForce, kind: string): { rate: number; burst: number } | null {
  const limits = of.unlimited ? [] : of.limits.filter((one) => one.enforced !== false && kindOf(one) === kind);
  if (limits.length === 0) return null;
  return { rate: Math.min(...limits.map((one) => one.count / seconds(one.window))), burst: Math.min(...limits.map((one) => one.limit)) };
}
const kindOf = (one: LimitsInForce['limits'][number]) => (one.window === 'concurrent' ? 'concurrent' : (one.cost ?? ''));

/** Whether any limit in force would allow less. */
export function lowers(preview: QuotaPreview): boolean {
  return preview.rules.some(({ before, after }) =>
    [...new Set(after.limits.map(kindOf))].some((kind) => {
      const [then, now] = [least(after, kind), least(before, kind)];
      return then !== null && (now === null || then.rate < now.rate * 0.999_999 || then.burst < now.burst);
    }),
  );
}
