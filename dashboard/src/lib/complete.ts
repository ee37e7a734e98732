// Completion for rule files from their JSON Schema: the keys that may stand where the cursor is, or the values of the key
// before it. The place in the schema comes from the keys above the line that are indented less.
export interface Schema {
  properties?: Record<string, Schema>;
  additionalProperties?: boolean | Schema;
  items?: Schema;
  $defs?: Record<string, Schema>;
  $ref?: string;
  description?: string;
  enum?: unknown[];
  examples?: unknown[];
  default?: unknown;
  anyOf?: Schema[];
  type?: string | string[];
}

export interface Completion {
  label: string;
  /** What replaces the letters before the cursor. */
  insert: string;
  text: string;
}

export interface Completions {
  /** How many letters before the cursor the completion replaces. */
  replaced: number;
  list: Completion[];
}

const indent = (line: string) => /^\s*/.exec(line)?.[0].length ?? 0;
/** The column of a line's key: behind the dash of a list item. */
const keyColumn = (line: string) => /^\s*(?:-\s+)*/.exec(line)?.[0].length ?? 0;
const keyOn = (line: string) => /^\s*(?:-\s+)*([A-Za-z_][\w-]*):/.exec(line)?.[1] ?? null;

/** Every schema that a part may mean: itself, what it refers to, its alternatives and its items. */
function meanings(part: Schema, defs: Record<string, Schema>, depth = 0): Schema[] {
  if (depth > 8) return [];
  const named = part.$ref ? defs[part.$ref.replace('#/$defs/', '')] : undefined;
  return [part, ...[named, part.items, ...(part.anyOf ?? [])].flatMap((next) => (next ? meanings(next, defs, depth + 1) : []))];
}

/** The column that the key around a list item stands left of; it may be as far left as the dash. */
const aboveDash = (line: string) => Math.max(indent(line), 1);

/** The keys around a place, from the outermost. */
function pathAt(lines: string[], at: number, column: number): string[] {
  const found: string[] = [];
  for (let line = at - 1, left = column; line >= 0 && left > 0; line--) {
    const text = lines[line] ?? '';
    if (/^\s*(#.*)?$/.test(text)) continue;
    const key = keyOn(text);
    const own = keyColumn(text);
    if (own >= left) continue;
    if (!key) continue;
    found.unshift(key);
    left = /^\s*-/.test(text) ? aboveDash(text) : own;
  }
  return found;
}

/** The schemas of the mapping at a path. */
function mappingAt(schema: Schema, path: string[]): Schema[] {
  const defs = schema.$defs ?? {};
  let here = meanings(schema, defs);
  for (const key of path) {
    here = here.flatMap((part) => {
      const next = part.properties?.[key] ?? (typeof part.additionalProperties === 'object' ? part.additionalProperties : undefined);
      return next ? meanings(next, defs) : [];
    });
  }
  return here;
}

function textOf(part: Schema, defs: Record<string, Schema>): string {
  return meanings(part, defs).find((one) => one.description)?.description ?? '';
}

/** What may follow at an offset of the text; null if nothing is to be completed there. */
export function completionsAt(schema: Schema, text: string, offset: number): Completions | null {
  const before = text.slice(0, offset);
  const lines = text.split('\n');
  const at = before.split('\n').length - 1;
  const typed = before.slice(before.lastIndexOf('\n') + 1);
  const rest = text.slice(offset).split('\n')[0] ?? '';
  // Within a word, or a comment, nothing is completed.
  if (/^[\w-]/.test(rest) || /(^|\s)#/.test(typed)) return null;
  const defs = schema.$defs ?? {};
  const inBraces = /[{,]\s*([A-Za-z_][\w-]*)?$/.exec(typed);
  const isFlow = inBraces !== null && typed.lastIndexOf('{') > typed.lastIndexOf('}');
  const key = isFlow ? inBraces : /^\s*(?:-\s+)*([A-Za-z_][\w-]*)?$/.exec(typed);
  if (key) {
    const word = key[1] ?? '';
    const column = typed.length - word.length;
    // The keys of this mapping that stand above belong to the same level.
    const around = isFlow ? [...pathAt(lines, at, keyColumn(typed)), ...(keyOn(typed) && /^\s*(?:-\s+)*[\w-]+:\s*\{/.test(typed) ? [keyOn(typed) as string] : [])] : pathAt(lines, at, /^\s*-/.test(typed) ? aboveDash(typed) : column);
    const found = new Map<string, Completion>();
    for (const part of mappingAt(schema, around)) {
      for (const [name, own] of Object.entries(part.properties ?? {})) {
        const isMapping = meanings(own, defs).some((one) => one.properties) && !meanings(own, defs).some((one) => one.enum || one.type === 'string');
        if (name.startsWith(word) && name !== word && !found.has(name)) found.set(name, { label: name, insert: `${name}:${isMapping ? '' : ' '}`, text: textOf(own, defs) });
      }
    }
    return found.size > 0 ? { replaced: word.length, list: [...found.values()] } : null;
  }
  const value = /(?:^\s*(?:-\s+)*|[{,]\s*)([A-Za-z_][\w-]*):\s+([\w/.-]*)$/.exec(typed);
  if (!value) return null;
  const [, name = '', word = ''] = value;
  const path = pathAt(lines, at, keyColumn(typed));
  const options = mappingAt(schema, path).flatMap((part) => (part.properties?.[name] ? meanings(part.properties[name] as Schema, defs) : []));
  const all = options.flatMap((one) => one.enum ?? (one.type === 'boolean' || (Array.isArray(one.type) && one.type.includes('boolean')) ? ['true', 'false'] : []));
  const examples = all.length > 0 ? all : options.flatMap((one) => one.examples ?? []);
  const words = [...new Set(examples.filter((one) => one !== null).map(String))].filter((one) => one.startsWith(word) && one !== word);
  return words.length > 0 ? { replaced: word.length, list: words.map((one) => ({ label: one, insert: one, text: '' })) } : null;
}
