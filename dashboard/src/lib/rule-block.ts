// The lines of a rule file that make up one rule: its list item, with what is indented below it.
const indent = (line: string) => /^\s*/.exec(line)?.[0].length ?? 0;
const isBlank = (line: string) => /^\s*(#.*)?$/.test(line);

/** The block that the line (from 1) is in: the list item around it. */
export function blockAt(text: string, line: number): string {
  const lines = text.split('\n');
  let start = Math.min(Math.max(line - 1, 0), lines.length - 1);
  // A line inside the item: its dash stands above, further left.
  for (let at = start, most = Infinity; at >= 0; at--) {
    const one = lines[at] ?? '';
    if (isBlank(one) || indent(one) >= most) continue;
    if (/^\s*-(\s|$)/.test(one)) {
      start = at;
      break;
    }
    most = indent(one);
  }
  const left = indent(lines[start] ?? '');
  let end = start + 1;
  while (end < lines.length && (isBlank(lines[end] ?? '') || indent(lines[end] ?? '') > left)) end++;
  while (end > start + 1 && isBlank(lines[end - 1] ?? '')) end--;
  return lines.slice(start, end).map((one) => one.slice(Math.min(left, indent(one)))).join('\n');
}

/** The block of the rule in another version of the text: by its name, else by the first line that it has now. */
export function blockOf(text: string, name: string, first: string): string | null {
  const lines = text.split('\n');
  const quoted = name.replace(/[.*+?^${}()|[\]\\]/g, '\\$&');
  const named = lines.findIndex((line) => new RegExp(`(^|[\\s{,-])name:\\s*["']?${quoted}["']?\\s*([,}#]|$)`).test(line));
  const at = named >= 0 ? named : lines.findIndex((line) => first !== '' && line.trim() === first.trim());
  return at < 0 ? null : blockAt(text, at + 1);
}
