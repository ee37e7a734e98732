// Formats numbers and times for display.
const whole = new Intl.NumberFormat('en', { maximumFractionDigits: 0 });
const one = new Intl.NumberFormat('en', { maximumFractionDigits: 1 });
const short = new Intl.NumberFormat('en', { notation: 'compact', maximumSignificantDigits: 3 });

export function count(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (Math.abs(value) >= 1_000_000) return short.format(value);
  return Math.abs(value) < 100 && !Number.isInteger(value) ? one.format(value) : whole.format(value);
}

/** A configured number, to the last unit. */
export function exact(value: number | null | undefined): string {
  return value === null || value === undefined || Number.isNaN(value) ? '–' : whole.format(value);
}

export function share(part: number | null | undefined): string {
  if (part === null || part === undefined || Number.isNaN(part)) return '–';
  const percent = part * 100;
  if (percent > 0 && percent < 0.1) return '< 0.1%';
  return `${percent < 10 ? one.format(percent) : whole.format(percent)}%`;
}

export function micros(value: number | null | undefined): string {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (value < 1) return `${whole.format(value * 1000)} ns`;
  if (value < 1_000) return `${value < 10 ? one.format(value) : whole.format(value)} µs`;
  if (value < 1_000_000) return `${one.format(value / 1_000)} ms`;
  return `${one.format(value / 1_000_000)} s`;
}

export function millis(value: number | null | undefined): string {
  if (value === null || value === undefined) return '–';
  if (value < 1_000) return `${whole.format(value)} ms`;
  return span(value / 1_000);
}

/** Seconds as `2 h 5 min`, the two largest parts. */
export function span(seconds: number): string {
  const left = Math.max(0, seconds);
  if (left < 60) return left < 10 && !Number.isInteger(left) ? `${one.format(left)} s` : `${whole.format(left)} s`;
  const parts: [number, string][] = [[Math.floor(left / 86_400), 'd'], [Math.floor(left / 3_600) % 24, 'h'], [Math.floor(left / 60) % 60, 'min'], [Math.floor(left) % 60, 's']];
  const first = parts.findIndex(([number]) => number > 0);
  return parts.slice(first, first + 2).filter(([number]) => number > 0).map(([number, unit]) => `${number} ${unit}`).join(' ');
}

/** A countdown: `1:04:09`. */
export function clock(seconds: number): string {
  const left = Math.max(0, Math.ceil(seconds));
  const two = (n: number) => String(n).padStart(2, '0');
  const [h, m, s] = [Math.floor(left / 3_600), Math.floor(left / 60) % 60, left % 60];
  return h > 0 ? `${h}:${two(m)}:${two(s)}` : `${m}:${two(s)}`;
}

const time = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', second: '2-digit' });
const dated = new Intl.DateTimeFormat('en-GB', { day: '2-digit', month: 'short', year: 'numeric', hour: '2-digit', minute: '2-digit' });
const withSeconds = new Intl.DateTimeFormat('en-GB', { day: '2-digit', month: 'short', hour: '2-digit', minute: '2-digit', second: '2-digit' });
const withMillis = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', second: '2-digit', fractionalSecondDigits: 3 });
const datedWithMillis = new Intl.DateTimeFormat('en-GB', { day: '2-digit', month: 'short', hour: '2-digit', minute: '2-digit', second: '2-digit', fractionalSecondDigits: 3 });
const datedWithSeconds = new Intl.DateTimeFormat('en-GB', { day: '2-digit', month: 'short', year: 'numeric', hour: '2-digit', minute: '2-digit', second: '2-digit' });

function parsed(text: string | null | undefined): Date | null {
  const at = text ? new Date(text) : null;
  return at && !Number.isNaN(at.getTime()) ? at : null;
}

const isToday = (at: Date) => at.toDateString() === new Date().toDateString();

/** A time of day to the second, with the date unless it is today. */
export function moment(text: string | null | undefined): string {
  const at = parsed(text);
  return at ? (isToday(at) ? time : withSeconds).format(at) : '–';
}

/** The same to the millisecond, for decisions: many happen within a second. */
export function preciseMoment(text: string | null | undefined): string {
  const at = parsed(text);
  return at ? (isToday(at) ? withMillis : datedWithMillis).format(at) : '–';
}

/** Date and time to the second, for records of changes. */
export function timestamp(text: string | null | undefined): string {
  const at = parsed(text);
  return at ? datedWithSeconds.format(at) : '–';
}

export function date(text: string | null | undefined): string {
  const at = parsed(text);
  return at ? dated.format(at) : '–';
}

export function ago(text: string | null | undefined, now: number): string {
  const at = text ? new Date(text).getTime() : Number.NaN;
  if (Number.isNaN(at)) return '–';
  const seconds = Math.round((now - at) / 1_000);
  return seconds < 2 ? 'now' : `${span(seconds)} ago`;
}

/** The value of a datetime-local field as RFC 3339; null if it is empty. */
export function fromField(text: string): string | null {
  return parsed(text)?.toISOString() ?? null;
}

/** The reverse, to the second, so that saving again does not move the time. */
export function toField(text: string | null | undefined): string {
  const at = parsed(text);
  if (!at) return '';
  return new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 19);
}

/** Whether a text is a key's id or its masked form, and not possibly the key itself. */
export function isShown(text: string): boolean {
  return /^[0-9a-f]{16}$/.test(text) || text.includes('…');
}

/** An attribute's value, or all of them. */
export function values(value: string | string[] | undefined): string {
  return [value ?? []].flat().join(', ');
}

/** Untrusted text for display: invisible and direction-changing characters become their code points. */
export function plain(text: string): string {
  return text.replace(/[\p{Cc}\p{Cf}\u2028\u2029]/gu, (mark) => `⟨U+${mark.codePointAt(0)?.toString(16).toUpperCase().padStart(4, '0')}⟩`);
}

/** The same, shortened for lists. */
export function brief(text: string, most = 80): string {
  const letters = [...plain(text)];
  return letters.length > most ? `${letters.slice(0, most - 1).join('')}…` : letters.join('');
}
