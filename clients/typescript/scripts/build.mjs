// Compiles the sources twice, as ES modules and as CommonJS. A bundler was rejected: the files are small, users' bundlers
// remove what they do not use, and stack traces show real names.
import { execFileSync } from "node:child_process";
import { copyFileSync, mkdirSync, rmSync, writeFileSync } from "node:fs";
import { fileURLToPath } from "node:url";

const root = fileURLToPath(new URL("..", import.meta.url));
const tsc = fileURLToPath(new URL("../node_modules/typescript/bin/tsc", import.meta.url));
const compile = (...flags) => execFileSync(process.execPath, [tsc, "-p", root, ...flags], { stdio: "inherit" });

rmSync(`${root}/dist`, { recursive: true, force: true });
compile();
compile("--module", "CommonJS", "--moduleResolution", "bundler", "--outDir", `${root}/dist/cjs`);
mkdirSync(`${root}/dist/cjs`, { recursive: true });
writeFileSync(`${root}/dist/cjs/package.json`, '{"type":"commonjs"}\n');
copyFileSync(`${root}/../../LICENSE`, `${root}/LICENSE`);
