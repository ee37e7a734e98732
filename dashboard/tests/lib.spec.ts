// What needs no browser: comparing texts, colouring YAML, numbers for people.
import { expect, test } from '@playwright/test';
import { clock, count, micros, share, span } from '../src/lib/format';
import { inline, summarize } from '../src/lib/audit-text';
import { compare, compareWords } from '../src/lib/diff';
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

test('an audit entry says what changed and why', () => {
  const entry = { seq: 1, at: '', actor: 'olga', origin: '', action: 'quota.put', target: 'ab', hash: '' };
  const of = (before: object | string, after: object | string) => summarize({ ...entry, before: typeof before === 'string' ? before : JSON.stringify(before), after: typeof after === 'string' ? after : JSON.stringify(after) });
  const changed = of({ tier: 'free', key_prefix: 'abc', revision: 1 }, { tier: 'pro', key_prefix: 'abc', revision: 2, reason: 'ticket 1' });
  expect([changed.changes.map(inline), changed.reason, changed.target]).toEqual([['tier free → pro'], 'ticket 1', 'abc…']);
  const removed = of({ tier: 'pro', reason: 'ticket 1' }, { reason: 'ticket 2' });
  expect([removed.changes.map(inline), removed.reason]).toEqual([['tier pro removed'], 'ticket 2']);
  expect(of('not JSON', '').changes).toEqual([]);
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
