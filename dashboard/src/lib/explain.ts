// Explanations of requests: the response of the admin API, and a request in the address.
import { isShown } from './format';

export interface ExplainedOutcome {
  verdict: string;
  sentence: string;
  origin: string;
  rule: string | null;
  retry_after_ms?: number;
  delay_ms: number;
}

export interface ExplainedCharge {
  limit: string;
  counter: string;
  source: string;
  count: number;
  burst?: number;
  cost: number;
  used: number | null;
  remaining: number | null;
  reset_ms: number;
  answer: 'fits' | 'denies' | 'not_asked';
  retry_after_ms?: number;
  enforced: boolean;
  role: string;
  measure?: string;
  measure_effect?: string;
  granted: boolean;
}

export interface ExplainedRule {
  rule: string;
  file: string;
  line: number;
  finding: string;
  clauses: { asked: string; answer: string; holds: boolean }[];
  charged: ExplainedCharge[];
  replaced_by: string | null;
  settings: Record<string, string>;
}

export interface Explanation {
  explained_by: 'active' | 'draft';
  revision: string;
  domain: string;
  tier: string | null;
  tier_source: string | null;
  /** The attributes that were explained, masked. */
  attributes: Record<string, string>;
  outcome: ExplainedOutcome;
  rules: ExplainedRule[];
  /** Rules that do not match and are not listed. */
  omitted: number;
  grants: { id: string; units: number; remaining: number | null }[];
  active_outcome?: ExplainedOutcome;
  changes?: { rule: string; before: string; after: string }[];
}

export interface Attribute {
  name: string;
  value: string;
}

/** Names of attributes whose values may be secrets. */
const SECRET = /key|token|secret|auth|pass|pwd|cookie|session|credential|bearer|signature|jwt|otp|pin/i;

/** Whether a value must not be in an address, which is stored and shared. */
export function isPrivate({ name, value }: Attribute): boolean {
  return value !== '' && SECRET.test(name) && !isShown(value);
}

/** Header fields written as in a message: one `Name: value` per line. */
export function fieldsOf(text: string): [string, string][] {
  const lines = text.split('\n').filter((line) => line.trim() !== '');
  return lines.map((line) => {
    const at = line.indexOf(':');
    return at < 0 ? [line.trim(), ''] : [line.slice(0, at).trim(), line.slice(at + 1).trim()];
  });
}

/** The attributes in the parameters of an address: `attr.NAME=VALUE`. */
export function attributesOf(words: URLSearchParams): Attribute[] {
  return [...words].filter(([name]) => name.startsWith('attr.')).map(([name, value]) => ({ name: name.slice(5), value }));
}

/** The parameters of an address for a request; values that may be secrets are left out. */
export function wordsOf(rows: Attribute[], more: Record<string, string>): Record<string, string> {
  const shown = rows.filter((row) => row.name.trim() !== '' && row.value !== '' && !isPrivate(row));
  return { ...Object.fromEntries(shown.map((row) => [`attr.${row.name.trim()}`, row.value])), ...more };
}
