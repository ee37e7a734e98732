// The example of the documentation runs and prints what the page says.
import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { cpSync, mkdirSync, mkdtempSync, readFileSync, rmSync, symlinkSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { it } from "node:test";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { Tollgate } from "./servers.mjs";

const root = fileURLToPath(new URL("..", import.meta.url));
const example = fileURLToPath(new URL("../../../examples/typescript", import.meta.url));

it("examples/typescript", async (t) => {
  const server = await Tollgate.start(readFileSync(join(example, "rules.yaml"), "utf8"));
  const folder = mkdtempSync(join(tmpdir(), "tollgate-example-"));
  t.after(async () => { await server.close(); rmSync(folder, { recursive: true, force: true }); });
  cpSync(example, folder, { recursive: true });
  mkdirSync(join(folder, "node_modules/@tollgate"), { recursive: true });
  symlinkSync(root, join(folder, "node_modules/@tollgate/client"));
  symlinkSync(join(root, "node_modules/express"), join(folder, "node_modules/express"));
  const { stdout } = await promisify(execFile)(process.execPath, ["--preserve-symlinks-main", "main.mjs"], { cwd: folder, env: { ...process.env, TOLLGATE_URL: server.url } });
  assert.equal(stdout, "plain fetch: refused\npaced fetch: not refused\ntokens used: 12\n");
});
