// Line and word diffs by Myers' greedy algorithm, which is fast where little has changed.
export interface Line {
  kind: 'same' | 'gone' | 'new';
  text: string;
  /** Its line number in the old text if it is gone, else in the new one. */
  number: number;
}

/** Gives up on a minimal diff beyond this many changes: it would take long, and be unreadable. */
const MOST = 2_000;

export function compare(before: string, after: string): Line[] {
  return compareLists(before.split('\n'), after.split('\n'));
}

/** A part of a text, and whether the other text has it too. */
export interface Piece {
  text: string;
  changed: boolean;
}

/** Two lines with only the words marked that differ. */
export function compareWords(before: string, after: string): { before: Piece[]; after: Piece[] } {
  const split = (text: string) => text.match(/[\p{L}\p{N}_.]+|\s+|[^\p{L}\p{N}_.\s]/gu) ?? [];
  const lines = compareLists(split(before), split(after));
  const side = (kind: 'gone' | 'new') => {
    const pieces: Piece[] = [];
    for (const line of lines) {
      if (line.kind !== 'same' && line.kind !== kind) continue;
      const changed = line.kind === kind;
      const last = pieces.at(-1);
      if (last && last.changed === changed) last.text += line.text;
      else pieces.push({ text: line.text, changed });
    }
    return pieces;
  };
  return { before: side('gone'), after: side('new') };
}

function compareLists(a: string[], b: string[]): Line[] {
  let head = 0;
  while (head < a.length && head < b.length && a[head] === b[head]) head++;
  let tail = 0;
  while (tail < a.length - head && tail < b.length - head && a[a.length - 1 - tail] === b[b.length - 1 - tail]) tail++;
  const same = (from: number, to: number): Line[] => b.slice(from, to).map((text, i) => ({ kind: 'same', text, number: from + i + 1 }));
  const middle = walk(a.slice(head, a.length - tail), b.slice(head, b.length - tail)).map((line) => ({ ...line, number: line.number + head }));
  return [...same(0, head), ...middle, ...same(b.length - tail, b.length)];
}

function walk(a: string[], b: string[]): Line[] {
  const gone = (i: number): Line => ({ kind: 'gone', text: a[i] ?? '', number: i + 1 });
  const came = (i: number): Line => ({ kind: 'new', text: b[i] ?? '', number: i + 1 });
  const all = () => [...a.map((_, i) => gone(i)), ...b.map((_, i) => came(i))];
  const most = Math.min(a.length + b.length, MOST);
  if (a.length === 0 || b.length === 0 || Math.abs(a.length - b.length) > most) return all();
  // The furthest x of each diagonal; the trace has the part of it that each step reads, for walking back.
  const ends = new Int32Array(2 * most + 3);
  const at = (k: number) => k + most + 1;
  const trace: Int32Array[] = [];
  for (let d = 0; d <= most; d++) {
    trace.push(ends.slice(at(-d - 1), at(d + 1) + 1));
    for (let k = -d; k <= d; k += 2) {
      const [below, above] = [ends[at(k - 1)] ?? 0, ends[at(k + 1)] ?? 0];
      let x = k === -d || (k !== d && below < above) ? above : below + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x++;
      ends[at(k)] = x;
      if (x >= a.length && x - k >= b.length) return back(trace, a, b, gone, came);
    }
  }
  return all();
}

function back(trace: Int32Array[], a: string[], b: string[], gone: (i: number) => Line, came: (i: number) => Line): Line[] {
  const lines: Line[] = [];
  let x = a.length;
  let y = b.length;
  for (let d = trace.length - 1; d >= 0; d--) {
    const end = (k: number) => trace[d]?.[k + d + 1] ?? 0;
    const k = x - y;
    const down = k === -d || (k !== d && end(k - 1) < end(k + 1));
    const from = down ? k + 1 : k - 1;
    const startX = d === 0 ? 0 : end(from);
    const startY = d === 0 ? 0 : startX - from;
    while (x > startX && y > startY && a[x - 1] === b[y - 1]) {
      x--;
      y--;
      lines.push({ kind: 'same', text: b[y] ?? '', number: y + 1 });
    }
    if (d === 0) break;
    if (down) lines.push(came(--y));
    else lines.push(gone(--x));
  }
  return lines.reverse();
}
