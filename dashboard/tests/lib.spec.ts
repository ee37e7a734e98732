// What needs no browser: comparing texts, colouring YAML, numbers for people.
import { expect, test } from '@playwright/test';
import { clock, count, micros, share, span } from '../src/lib/format';
import { inline, summarize } from '../src/lib/audit-text';
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { completionsAt, type Schema } from '../src/lib/complete';
import { compare, compareWords } from '../src/lib/diff';
import { lowers } from '../src/lib/lowers';
import { PRESETS, rangeOf, zoomed } from '../src/lib/range';
import { blockAt, blockOf } from '../src/lib/rule-block';
import { keyOf, pieces } from '../src/lib/yaml';

/** The same numbers every time. */
function dice(seed: number): (below: number) => number {
  let state = seed;
  return (below) => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}

test('what went and what stayed is the old text, what came and what stayed the new', () => {
  for (let seed = 1; seed <= 500; seed++) {
    const roll = dice(seed);
    const text = () => Array.from({ length: roll(12) }, () => 'abc'[roll(3)]).join('\n');
    const [before, after] = [text(), text()];
    const lines = compare(before, after);
    const of = (kind: 'gone' | 'new') => lines.filter((line) => line.kind === kind || line.kind === 'same').map((line) => line.text).join('\n');
    const numbered = lines.every((line) => (line.kind === 'gone' ? before : after).split('\n')[line.number - 1] === line.text);
    expect([of('gone'), of('new'), numbered], `seed ${seed}`).toEqual([before, after, true]);
  }
  expect(compare('a\nb\nc', 'a\nx\nc').map((line) => line.kind)).toEqual(['same', 'gone', 'new', 'same']);
});

test('of two lines only the words are marked that differ', () => {
  const { before, after } = compareWords('gcra 10/1s burst 20; name per-key', 'gcra 8/1s burst 20; name per-key');
  const marked = (pieces: typeof before) => pieces.filter((piece) => piece.changed).map((piece) => piece.text);
  expect([marked(before), marked(after)]).toEqual([['10'], ['8']]);
  for (let seed = 1; seed <= 200; seed++) {
    const roll = dice(seed);
    const text = () => Array.from({ length: roll(12) }, () => 'ab1 ,/'[roll(6)]).join('');
    const [old, now] = [text(), text()];
    const sides = compareWords(old, now);
    const whole = (pieces: typeof before) => pieces.map((piece) => piece.text).join('');
    expect([whole(sides.before), whole(sides.after)], `seed ${seed}`).toEqual([old, now]);
  }
});

test('a quota that lowers a limit in force is known by its limits', () => {
  const limits = (...all: [count: number, window: string, burst?: number, cost?: string][]) => ({ unlimited: false, limits: all.map(([count, window, burst, cost]) => ({ limit: burst ?? count, count, window, algorithm: 'gcra', source: 'rule', ...(cost ? { cost } : {}) })) });
  const change = (before: ReturnType<typeof limits>, after: ReturnType<typeof limits>) => lowers({ rules: [{ domain: 'd', rule: 'r', descriptor: 'r', reference: 'r', before, after }], confirm: [], warnings: [] });
  const unlimited = { ...limits(), unlimited: true };
  expect(change(limits([6_000, '1m']), limits([240, '1m'])), 'a plan is cut').toBe(true);
  expect(change(limits([100, '1s']), limits([100, '1m']))).toBe(true);
  expect(change(limits([100, '1m', 600]), limits([100, '1m', 50])), 'a burst').toBe(true);
  expect(change(limits([10, '1s'], [1_000, '1d']), limits([10, '1s'], [100, '1d'])), 'one of several').toBe(true);
  expect(change(limits([10, '1s'], [5_000, '1d', 5_000, 'tokens']), limits([10, '1s'], [500, '1d', 500, 'tokens']))).toBe(true);
  expect(change(unlimited, limits([100, '1s']))).toBe(true);
  expect(change(limits(), limits([100, '1s'])), 'a limit where there was none').toBe(true);
  expect(change(limits([120, '1m']), limits([240, '1m']))).toBe(false);
  expect(change(limits([5, '1h']), limits([5, '1h'], [50, '1m'])), 'a wider one beside it').toBe(false);
  expect(change(limits([5, '1h']), unlimited)).toBe(false);
  expect(change(limits([5, '1h']), limits())).toBe(false);
});

test('an audit entry says what changed and why', () => {
  const entry = { seq: 1, at: '', actor: 'olga', origin: '', action: 'quota.put', target: 'ab', hash: '' };
  const of = (before: object | string, after: object | string) => summarize({ ...entry, before: typeof before === 'string' ? before : JSON.stringify(before), after: typeof after === 'string' ? after : JSON.stringify(after) });
  const changed = of({ tier: 'free', key_prefix: 'abc', revision: 1 }, { tier: 'pro', key_prefix: 'abc', revision: 2, reason: 'ticket 1' });
  expect([changed.changes.map(inline), changed.reason, changed.target]).toEqual([['tier free → pro'], 'ticket 1', 'abc…']);
  const removed = of({ tier: 'pro', reason: 'ticket 1' }, { reason: 'ticket 2' });
  expect([removed.changes.map(inline), removed.reason]).toEqual([['tier pro removed'], 'ticket 2']);
  expect(of('not JSON', '').changes).toEqual([]);
  const signal = { name: 'queue_depth', value: 140, bound: 100 };
  const adapted = summarize({ ...entry, action: 'overload.adapt', before: JSON.stringify({ percent: 80 }), after: JSON.stringify({ percent: 51.2, signal, steps: [{ at: '', percent: 64, signal }, { at: '', percent: 51.2, signal }] }) });
  expect([adapted.changes.map(inline), adapted.reason]).toEqual([['limits 80% → 51.2%', 'steps 64%, 51.2%'], 'queue_depth 140 above 100']);
});

test('highlighting changes no letter of a line', () => {
  const lines = ['', '  # a comment', '  - key: api_key  # each', '    limit: [5/minute, 20/hour]', '- {key: endpoint, value: "a # b", limit: 5/minute}', "name: 'it''s'", 'url: http://x/#y'];
  for (const line of lines) expect(pieces(line).map((piece) => piece.text).join('')).toBe(line);
  const kinds = (line: string, kind: string) => pieces(line).filter((piece) => piece.kind === kind).map((piece) => piece.text);
  expect(kinds('- {key: endpoint, value: "a # b", limit: 5/minute}', 'key')).toEqual(['key', 'value', 'limit']);
  expect(kinds('  - key: api_key  # each', 'comment')).toEqual(['# each']);
  expect(kinds('url: http://x/#y', 'comment')).toEqual([]);
  expect([keyOf('    - key: x'), keyOf('  limit: 5/minute'), keyOf('# limit: 5')]).toEqual(['key', 'limit', null]);
});

test('numbers are written for people', () => {
  expect([count(0), count(12.34), count(1234), count(2_500_000), count(null)]).toEqual(['0', '12.3', '1,234', '2.5M', '–']);
  expect([share(0), share(0.0004), share(0.034), share(0.5)]).toEqual(['0%', '< 0.1%', '3.4%', '50%']);
  expect([micros(3.21), micros(250), micros(1_500)]).toEqual(['3.2 µs', '250 µs', '1.5 ms']);
  expect([span(59), span(61), span(3_600), span(90_000)]).toEqual(['59 s', '1 min 1 s', '1 h', '1 d 1 h']);
  expect([clock(5), clock(65), clock(3_661)]).toEqual(['0:05', '1:05', '1:01:01']);
});

test('completions are those of the place in the schema', () => {
  const schema = JSON.parse(readFileSync(join(import.meta.dirname, '../../crates/rules/src/schema.json'), 'utf8')) as Schema;
  const at = (text: string) => completionsAt(schema, text.replace('|', ''), text.indexOf('|'));
  const labels = (text: string) => at(text)?.list.map((one) => one.label) ?? [];
  const rule = 'domain: d\ndescriptors:\n  - key: a\n';
  expect(labels('dom|')).toEqual(['domain']);
  expect(labels('|')).toContain('descriptors');
  expect(labels('|'), 'a key of rules').not.toContain('limit');
  expect(labels('domain: d\ndescriptors:\n  - k|')).toEqual(['key']);
  expect(labels('domain: d\ndescriptors:\n- key: a\n  li|'), 'a list without an indent').toEqual(['limit']);
  expect(labels(`${rule}    descriptors:\n      - key: b\n        # a comment\n        ra|`)).toEqual(['rate_limit']);
  expect(labels(`${rule}    rate_limit:\n      u|`)).toEqual(['unit', 'unlimited']);
  expect(labels(`${rule}    rate_limit: {un|`)).toEqual(['unit', 'unlimited']);
  expect(labels('domain: d\ndescriptors:\n  - {key: a, li|')).toEqual(['limit']);
  expect(labels(`${rule}    algorithm: sl|`)).toEqual(['sliding_window', 'sliding_log']);
  expect(labels(`${rule}    shadow: |`)).toEqual(['true', 'false']);
  expect(labels(`${rule}jit|`), 'the file again').toEqual(['jitter']);
  for (const none of ['# dom|', 'do|main: d', `${rule}    tiers:\n      pr|`, 'domain: d|']) expect(labels(none), none).toEqual([]);
  const found = at(`${rule}    li|`);
  expect([found?.replaced, found?.list[0]?.insert]).toEqual([2, 'limit: ']);
});

test('a rule is cut out of its file, and found again in another version', () => {
  const text = 'domain: d\ndescriptors:\n  # All.\n  - key: a\n    name: one\n    limit: 5/hour\n\n    # Below.\n    descriptors:\n      - key: b\n        name: two\n        limit: 1/hour\n\n  - {key: c, name: three, limit: 2/s}\n';
  expect(blockAt(text, 4)).toBe('- key: a\n  name: one\n  limit: 5/hour\n\n  # Below.\n  descriptors:\n    - key: b\n      name: two\n      limit: 1/hour');
  expect(blockAt(text, 5), 'by a line within').toBe(blockAt(text, 4));
  expect(blockAt(text, 10)).toBe('- key: b\n  name: two\n  limit: 1/hour');
  expect(blockOf(text, 'two', '')).toBe(blockAt(text, 10));
  expect(blockOf(text, 'three', '')).toBe('- {key: c, name: three, limit: 2/s}');
  expect(blockOf(text, 'wo', '')).toBeNull();
  expect(blockOf('descriptors:\n  - key: a\n    limit: 9/s\n', 'a', '- key: a')).toBe('- key: a\n  limit: 9/s');
});

test('a range is of the address, and zoom keeps its middle', () => {
  const now = 1_800_000_000;
  const range = (words: string) => rangeOf(new URLSearchParams(words), now, PRESETS, '24h');
  expect(range('')).toEqual({ name: '24h', from: now - 86_400, to: now });
  expect(range('range=7d').from).toBe(now - 7 * 86_400);
  expect(range('range=eternity').name).toBe('24h');
  expect(range('from=2027-01-01T00:00:00Z&to=2027-01-02T00:00:00Z')).toEqual({ name: '', from: 1_798_761_600, to: 1_798_848_000 });
  for (const wrong of ['from=x&to=y', 'from=2027-01-02T00:00:00Z&to=2027-01-01T00:00:00Z', 'from=2027-01-02T00:00:00Z']) expect(range(wrong).name, wrong).toBe('24h');
  expect(zoomed({ name: '', from: 1_000, to: 2_000 }, 0.5, now)).toEqual({ from: 1_250, to: 1_750 });
  expect(zoomed({ name: '', from: 1_000, to: 2_000 }, 2, 2_100), 'not beyond now').toEqual({ from: 100, to: 2_100 });
});
