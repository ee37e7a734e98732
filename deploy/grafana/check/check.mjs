// Checks every dashboard beside this directory against the `Dashboard` type of @grafana/schema, with the compiler.
import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const here = import.meta.dirname;
// The types of Grafana use enums where its files use strings.
const plain = `import type { Dashboard } from "@grafana/schema";
type Plain<T> = T extends string ? \`\${T}\` : T extends (infer U)[] ? Plain<U>[] : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
`;
const work = mkdtempSync(join(here, "checked-"));
try {
  const files = readdirSync(join(here, "..")).filter((name) => name.endsWith(".json"));
  for (const name of files) {
    const text = readFileSync(join(here, "..", name), "utf8");
    const file = join(work, name.replace(/\.json$/, ".ts"));
    writeFileSync(file, `${plain}export const dashboard: Plain<Dashboard> = ${text};\n`);
    const flags = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022"];
    execFileSync(process.execPath, [join(here, "node_modules/typescript/bin/tsc"), ...flags, file], { stdio: "inherit" });
    console.log(`${name} is a dashboard`);
  }
} finally {
  rmSync(work, { recursive: true });
}
