// Audit entries as text: what changed, and why.
import { date, exact } from './format';
import { limitInWords } from './quota-text';
import type { AuditEntry, Override } from './types';

export interface Change {
  field: string;
  before: string;
  after: string;
}

export interface AuditSummary {
  /** What changed, field by field. */
  changes: Change[];
  /** In place of fields, where there is nothing to compare. */
  text: string;
  reason: string;
  /** The rule revisions to compare, if rules were published. */
  revisions: { before: number | null; after: number } | null;
  /** A readable target, where the entry has one. */
  target: string;
}

type Fields = Record<string, unknown>;

/** Bookkeeping that is no change by itself; the reason has a column. */
const HIDDEN = new Set(['id', 'revision', 'author', 'updated_at', 'created_at', 'reason', 'key_prefix', 'because']);
const TIMES = new Set(['effective_at', 'expires_at', 'until']);

function parse(text: unknown): Fields {
  try {
    const value: unknown = typeof text === 'string' && text !== '' ? JSON.parse(text) : text;
    return value !== null && typeof value === 'object' && !Array.isArray(value) ? (value as Fields) : {};
  } catch {
    return {};
  }
}

function isOverride(value: unknown): value is Override {
  return value !== null && typeof value === 'object' && 'descriptor' in value && 'requests_per_unit' in value;
}

function show(field: string, value: unknown): string {
  if (value === null || value === undefined || value === '' || (Array.isArray(value) && value.length === 0)) return 'none';
  if (typeof value === 'number') return exact(value) === '–' ? String(value) : Number.isInteger(value) ? exact(value) : String(value);
  if (typeof value === 'string') return TIMES.has(field) ? date(value) : value;
  if (Array.isArray(value)) return value.map((one) => (isOverride(one) ? `${one.descriptor} ${limitInWords(one)}` : show(field, one))).join(', ');
  const { kind, key, value: of } = value as { kind?: unknown; key?: unknown; value?: unknown };
  if (typeof kind === 'string') return kind === 'all' ? 'all traffic' : `${typeof key === 'string' ? key : kind.replaceAll('_', ' ')} ${String(of ?? '')}`.trim();
  return JSON.stringify(value);
}

export function summarize(entry: AuditEntry): AuditSummary {
  const [before, after] = [parse(entry.before), parse(entry.after)];
  const reasonOf = (fields: Fields) => [fields.reason, fields.because].find((one): one is string => typeof one === 'string' && one !== '') ?? '';
  const isRemoval = Object.keys(after).every((name) => name === 'reason');
  // A measure that is extended keeps the reason it was applied for; one that is ended has its own.
  const reason = reasonOf(after);
  const prefix = after.key_prefix ?? before.key_prefix;
  const target = typeof prefix === 'string' && prefix !== '' ? `${prefix}…` : '';
  const summary: AuditSummary = { changes: [], text: '', reason, revisions: null, target };
  if (entry.action.startsWith('rules.') && typeof after.rev === 'number') {
    const was = typeof before.rev === 'number' ? before.rev : null;
    summary.revisions = { before: was, after: after.rev };
    const to = `revision ${after.rev}`;
    if (entry.action === 'rules.rollback') summary.text = `rolled back${was === null ? '' : ` from revision ${was}`} to the rules of revision ${String(after.text_of)}, as ${to}`;
    else if (entry.action === 'rules.approve') summary.text = `${to} by ${String(after.author)} approved`;
    else if (after.status === 'pending_approval') summary.text = `${to} published, pending approval`;
    else summary.text = was === null ? `${to} published` : `revision ${was} → ${to}`;
    return summary;
  }
  if (entry.action === 'overload.adapt') {
    const percent = (fields: Fields) => `${String(fields.percent)}%`;
    summary.changes.push({ field: 'limits', before: percent(before), after: percent(after) });
    if (Array.isArray(after.steps)) summary.changes.push({ field: 'steps', before: 'none', after: after.steps.map((one: Fields) => percent(one)).join(', ') });
    const { name, value, bound } = (after.signal ?? {}) as Fields;
    if (typeof name === 'string') summary.reason = `${name} ${String(value)} above ${String(bound)}`;
    return summary;
  }
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])].filter((name) => !HIDDEN.has(name));
  for (const name of names) {
    const [old, now] = [show(name, before[name]), isRemoval ? 'none' : show(name, after[name])];
    if (old !== now) summary.changes.push({ field: name.replaceAll('_', ' '), before: old, after: now });
  }
  if (summary.changes.length === 0) summary.text = isRemoval && entry.before === '' && entry.after === '' ? '' : 'no field changed';
  return summary;
}

/** One change in one line: `tier free → pro`. */
export function inline(change: Change): string {
  if (change.before === 'none') return `${change.field} ${change.after}`;
  if (change.after === 'none') return `${change.field} ${change.before} removed`;
  return `${change.field} ${change.before} → ${change.after}`;
}
