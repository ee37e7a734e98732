/**
 * Reads what a response says about its limits: `Retry-After`, `RateLimit` and `RateLimit-Policy` (IETF draft 11, and the
 * forms of drafts 3 to 7), and the `X-RateLimit-*` of many APIs. Malformed fields are ignored. By
 * `clients/conformance/headers.json`.
 */

import { parseHttpDate } from "./http-date.js";

/** No host is avoided for longer than this, whatever it says. */
export const MAX_WAIT_MS = 3_600_000;

/** What a response says about its limits. Durations are in milliseconds. */
export interface Signals {
  /** The server refused the request for its rate or load. */
  readonly refused: boolean;
  /** How long not to call the host. */
  readonly waitMs: number | null;
  readonly limit: number | null;
  readonly remaining: number | null;
  readonly resetMs: number | null;
}

/** Whatever looks up a header by its lower-case name, several lines joined by `, `. */
export interface HeaderSource {
  get(name: string): string | null;
}

interface Budget {
  readonly limit: number | null;
  readonly remaining: number;
  readonly resetMs: number | null;
}

const DIGITS = /^\d{1,15}$/;
const SECONDS = /^(\d+)(?:\.(\d+))?$/;
const TOO_LARGE = 999_999_999_999_999;
const GROUPS = ["ratelimit", "x-ratelimit", "x-rate-limit"];

export function readSignals(status: number, headers: HeaderSource, nowMs: number): Signals {
  let waitMs: number | null = null;
  const wait = (ms: number | null): void => { if (ms !== null && (waitMs === null || ms > waitMs)) waitMs = ms; };
  if (status === 403 || status === 429 || status === 503) wait(retryAfter(headers, nowMs));
  const budgets = structuredBudgets(headers) ?? legacyBudget(headers, nowMs);
  let pacing: Budget | null = null;
  for (const budget of budgets) {
    if (budget.remaining === 0) wait(budget.resetMs);
    if (pacing === null || budget.remaining < pacing.remaining || (budget.remaining === pacing.remaining && (budget.resetMs ?? -1) > (pacing.resetMs ?? -1))) pacing = budget;
  }
  const refused = status === 429 || status === 503 || (status === 403 && waitMs !== null);
  return { refused, waitMs: bound(waitMs), limit: pacing?.limit ?? null, remaining: pacing?.remaining ?? null, resetMs: bound(pacing?.resetMs ?? null) };
}

function bound(ms: number | null): number | null {
  return ms === null ? null : Math.min(ms, MAX_WAIT_MS);
}

function field(headers: HeaderSource, name: string): string | null {
  const value = headers.get(name);
  return value === null ? null : trim(value);
}

function trim(text: string): string {
  return text.replace(/^[ \t]+|[ \t]+$/g, "");
}

function retryAfter(headers: HeaderSource, nowMs: number): number | null {
  const text = field(headers, "retry-after");
  if (text === null) return null;
  const ms = seconds(text);
  if (ms !== null) return ms;
  const date = parseHttpDate(text, nowMs);
  return date === null ? null : Math.max(0, date - nowMs);
}

/** Seconds with or without a fraction, as milliseconds, rounded up; computed on digits, so that it is exact. */
function seconds(text: string): number | null {
  const match = SECONDS.exec(text);
  if (match === null) return null;
  const whole = match[1] as string, fraction = match[2] ?? "";
  const base = (whole.length > 15 ? TOO_LARGE : Number(whole)) * 1000;
  const more = /[1-9]/.test(fraction.slice(3)) ? 1 : 0;
  return base + Number(fraction.slice(0, 3).padEnd(3, "0")) + more;
}

/** Members of `RateLimit`; `null` if there is none that is valid. */
function structuredBudgets(headers: HeaderSource): Budget[] | null {
  const text = headers.get("ratelimit");
  if (text === null) return null;
  const members = parseList(text);
  if (members === null) return null;
  const policies = parseList(headers.get("ratelimit-policy") ?? "") ?? [];
  const budgets: Budget[] = [];
  const draft7 = new Map<string, string>();
  for (const member of members) {
    if (member.name === null) {
      const [key, value] = member.raw;
      if (key === "limit" || key === "remaining" || key === "reset") draft7.set(key, value);
      continue;
    }
    const remaining = integer(member.parameters.get("r")), reset = integer(member.parameters.get("t"));
    if (remaining == null || reset === undefined) continue;
    const policy = policies.find((one) => one.name === member.name && integer(one.parameters.get("q")) != null);
    budgets.push({ limit: integer(policy?.parameters.get("q")) ?? null, remaining, resetMs: reset === null ? null : reset * 1000 });
  }
  if (draft7.size > 0) {
    const limit = integer(draft7.get("limit")), remaining = integer(draft7.get("remaining")), reset = integer(draft7.get("reset"));
    if (remaining != null && limit !== undefined && reset !== undefined) budgets.push({ limit, remaining, resetMs: reset === null ? null : reset * 1000 });
  }
  return budgets.length > 0 ? budgets : null;
}

/** `null` if absent, `undefined` if malformed. */
function integer(text: string | undefined): number | null | undefined {
  if (text === undefined) return null;
  return DIGITS.test(text) ? Number(text) : undefined;
}

interface Member {
  /** Unescaped; `null` for `key=value`. */
  readonly name: string | null;
  readonly raw: readonly [key: string, value: string];
  readonly parameters: ReadonlyMap<string, string>;
}

/** A list of names with parameters; `null` if a quoted string is not closed. */
function parseList(text: string): Member[] | null {
  const elements = split(text, ",");
  if (elements === null) return null;
  const members: Member[] = [];
  for (const element of elements) {
    const [first = "", ...rest] = (split(element, ";") ?? []).map(trim);
    const parameters = new Map<string, string>();
    for (const part of rest) {
      const at = part.indexOf("=");
      if (at > 0) parameters.set(trim(part.slice(0, at)), trim(part.slice(at + 1)));
    }
    if (first.startsWith('"')) {
      if (first.length < 2 || !first.endsWith('"')) continue;
      members.push({ name: first.slice(1, -1).replace(/\\(.)/g, "$1"), raw: ["", ""], parameters });
    } else if (first.includes("=")) {
      const at = first.indexOf("=");
      members.push({ name: null, raw: [trim(first.slice(0, at)), trim(first.slice(at + 1))], parameters });
    } else if (first !== "") {
      members.push({ name: first, raw: ["", ""], parameters });
    }
  }
  return members;
}

/** Splits outside of quoted strings; `null` if one is not closed. */
function split(text: string, separator: string): string[] | null {
  const parts: string[] = [];
  let start = 0, quoted = false;
  for (let at = 0; at < text.length; at += 1) {
    const char = text[at];
    if (quoted && char === "\\") at += 1;
    else if (char === '"') quoted = !quoted;
    else if (!quoted && char === separator) {
      parts.push(text.slice(start, at));
      start = at + 1;
    }
  }
  if (quoted) return null;
  parts.push(text.slice(start));
  return parts;
}

function legacyBudget(headers: HeaderSource, nowMs: number): Budget[] {
  for (const group of GROUPS) {
    const remaining = integer(field(headers, `${group}-remaining`) ?? undefined);
    if (remaining == null) continue;
    const limit = integer(field(headers, `${group}-limit`)?.split(/[,;]/)[0]) ?? null;
    const after = field(headers, `${group}-reset-after`);
    const resetMs = (after === null ? null : seconds(after)) ?? resetTime(field(headers, `${group}-reset`), nowMs);
    return [{ limit, remaining, resetMs }];
  }
  return [];
}

/** APIs disagree: milliseconds since 1970, seconds since 1970, seconds from now, or a date. Their sizes tell them apart. */
function resetTime(text: string | null, nowMs: number): number | null {
  if (text === null) return null;
  const ms = seconds(text);
  if (ms === null) {
    const date = parseHttpDate(text, nowMs);
    return date === null ? null : Math.max(0, date - nowMs);
  }
  if (ms >= 1e15) return Math.max(0, Math.ceil(ms / 1000) - nowMs);
  if (ms >= 1e12) return Math.max(0, ms - nowMs);
  return ms;
}
