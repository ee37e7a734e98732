// Time ranges: presets, or a part that was zoomed into. The address has them, so that a link or a reload shows the same.
export interface Range {
  /** A preset's name; empty for a fixed range. */
  name: string;
  /** Start and end in seconds since the epoch; the end of a preset is now. */
  from: number;
  to: number;
}

export interface Preset {
  name: string;
  label: string;
  seconds: number;
}

export const PRESETS: readonly Preset[] = [
  { name: '5m', label: '5 min', seconds: 300 },
  { name: '15m', label: '15 min', seconds: 900 },
  { name: '1h', label: '1 h', seconds: 3_600 },
  { name: '6h', label: '6 h', seconds: 21_600 },
  { name: '24h', label: '24 h', seconds: 86_400 },
  { name: '7d', label: '7 d', seconds: 7 * 86_400 },
  { name: '30d', label: '30 d', seconds: 30 * 86_400 },
];

/** The shortest and the longest range that zooming leads to, in seconds. */
const SHORTEST = 10;
const LONGEST = 366 * 86_400;

const iso = (seconds: number) => new Date(Math.round(seconds) * 1_000).toISOString().replace('.000', '');

/** The range that the address names; the preset `normal` without one. */
export function rangeOf(words: URLSearchParams, now: number, presets: readonly Preset[], normal: string): Range {
  const [from, to] = [Date.parse(words.get('from') ?? '') / 1_000, Date.parse(words.get('to') ?? '') / 1_000];
  if (from < to) return { name: '', from, to };
  const preset = presets.find((one) => one.name === words.get('range')) ?? presets.find((one) => one.name === normal) ?? presets[0];
  const seconds = preset?.seconds ?? 3_600;
  return { name: preset?.name ?? '', from: now - seconds, to: now };
}

/** The parameters of a fixed range. */
export function fixed(from: number, to: number): { from: string; to: string } {
  return { from: iso(from), to: iso(to) };
}

/** A range around the same middle, by a factor of its length; it does not reach beyond now. */
export function zoomed(range: Range, factor: number, now: number): { from: number; to: number } {
  const length = Math.min(Math.max((range.to - range.from) * factor, SHORTEST), LONGEST);
  const to = Math.min((range.from + range.to) / 2 + length / 2, now);
  return { from: to - length, to };
}
