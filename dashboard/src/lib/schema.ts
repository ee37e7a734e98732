// Editor help from the JSON Schema of rule files: each key with its description and values.
import type { Schema } from './complete';

export interface Help {
  name: string;
  text: string;
  values: string[];
}

export function helpOf(schema: Schema): Help[] {
  const defs = schema.$defs ?? {};
  const found = new Map<string, Help>();
  const follow = (part: Schema): Schema => {
    const name = part.$ref?.replace('#/$defs/', '');
    return name && defs[name] ? { ...defs[name], ...part } : part;
  };
  const collect = (part: Schema) => {
    for (const [name, own] of Object.entries(part.properties ?? {})) {
      const whole = follow(own);
      const options = [whole, ...(whole.anyOf ?? []).map(follow)];
      const listed = options.flatMap((option) => option.enum ?? []);
      const values = (listed.length > 0 ? listed : options.flatMap((option) => option.examples ?? [])).filter((value) => value !== null).map(String);
      const text = (whole.description ?? '') + (whole.default === undefined ? '' : ` Default: ${String(whole.default)}.`);
      const known = found.get(name);
      if (!known || (!known.text && text)) found.set(name, { name, text: text.trim(), values: [...new Set(values)] });
    }
  };
  collect(schema);
  for (const name of ['descriptor', ...Object.keys(defs)]) {
    const part = defs[name];
    if (part) for (const option of [part, ...(part.anyOf ?? [])]) collect(option);
  }
  return [...found.values()];
}
