// Minimal YAML highlighting, one line at a time.
export interface Piece {
  kind: 'key' | 'text' | 'comment' | 'mark';
  text: string;
}

export function pieces(line: string): Piece[] {
  const found: Piece[] = [];
  const put = (kind: Piece['kind'], text: string) => {
    if (text) found.push({ kind, text });
  };
  const code = /^(?:[^#"']|"[^"]*"|'[^']*'|(?<=\S)#)*/.exec(line)?.[0] ?? line;
  const rest = line.slice(code.length);
  const start = /^\s*(?:-\s+)?/.exec(code)?.[0] ?? '';
  put('mark', start);
  let body = code.slice(start.length);
  // `key:` at the start, and those in { … }.
  const pattern = /(^|[{,]\s*)([A-Za-z_][\w-]*)(:)(?=\s|$)/;
  for (let match = pattern.exec(body); match; match = pattern.exec(body)) {
    put('text', body.slice(0, match.index));
    put('mark', match[1] ?? '');
    put('key', match[2] ?? '');
    put('mark', ':');
    body = body.slice(match.index + match[0].length);
    if (!/[{,]/.test(body)) break;
  }
  put('text', body);
  put(rest.startsWith('#') ? 'comment' : 'text', rest);
  return found;
}

/** The key on a line. */
export function keyOf(line: string): string | null {
  return /^\s*(?:-\s+)?\{?\s*([A-Za-z_][\w-]*):/.exec(line)?.[1] ?? null;
}
