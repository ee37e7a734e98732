// The package as users get it: packed, installed into an empty project, and used in three lines.
import assert from "node:assert/strict";
import { execFileSync, spawnSync } from "node:child_process";
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, it } from "node:test";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";
import { Tollgate } from "./servers.mjs";

const root = fileURLToPath(new URL("..", import.meta.url));
let folder, server;
before(async () => {
  folder = mkdtempSync(join(tmpdir(), "tollgate-package-"));
  server = await Tollgate.start("domain: shop\ndescriptors:\n  - {key: api_key, name: per-key, limit: 5/hour}\n");
  const npm = (args, cwd) => execFileSync("npm", args, { cwd, encoding: "utf8", stdio: ["ignore", "pipe", "ignore"] });
  const [{ filename }] = JSON.parse(npm(["pack", "--json", "--ignore-scripts", "--pack-destination", folder], root));
  const project = join(folder, "project");
  mkdirSync(project);
  writeFileSync(join(project, "package.json"), '{"name":"empty","version":"1.0.0","private":true}');
  npm(["install", "--no-audit", "--no-fund", "--offline", "--omit=peer", join(folder, filename)], project);
});
after(async () => { await server?.close(); rmSync(folder, { recursive: true, force: true }); });

const project = () => join(folder, "project");
const LINES = `const ratelimit = new Ratelimit({ url: "URL", domain: "shop", timeout: 10_000 });
const { success, remaining } = await ratelimit.limit("NAME");
console.log(JSON.stringify({ success, remaining }));
`;
const program = (name) => LINES.replace("URL", server.url).replace("NAME", name);
const run = (command, ...args) => execFileSync(command, args, { cwd: project(), encoding: "utf8" }).trim();
const WORKED = '{"success":true,"remaining":4}';

describe("the package", () => {
  it("has no dependencies and only what it needs", () => {
    const installed = JSON.parse(readFileSync(join(project(), "node_modules/@tollgate/client/package.json")));
    assert.equal(installed.dependencies, undefined);
    assert.equal(spawnSync("ls", [join(project(), "node_modules")], { encoding: "utf8" }).stdout.trim(), "@tollgate");
    const { stdout } = spawnSync("ls", [join(project(), "node_modules/@tollgate/client")], { encoding: "utf8" });
    assert.deepEqual(stdout.trim().split("\n"), ["LICENSE", "README.md", "dist", "package.json"]);
  });

  it("works as an ES module in three lines", () => {
    writeFileSync(join(project(), "main.mjs"), `import { Ratelimit } from "@tollgate/client";\n${program("esm")}`);
    assert.equal(run(process.execPath, "main.mjs"), WORKED);
  });

  it("works as CommonJS in three lines", () => {
    writeFileSync(join(project(), "main.cjs"), `const { Ratelimit } = require("@tollgate/client");\n(async () => {\n${program("cjs")}})();`);
    assert.equal(run(process.execPath, "main.cjs"), WORKED);
  });

  it("exports every entry point both ways", () => {
    const entries = ["express", "fastify", "hono", "next", "express-rate-limit", "nestjs-throttler"].map((name) => `@tollgate/client/${name}`);
    writeFileSync(join(project(), "entries.mjs"), entries.map((name) => `await import("${name}");`).join("\n"));
    writeFileSync(join(project(), "entries.cjs"), entries.map((name) => `require("${name}");`).join("\n"));
    run(process.execPath, "entries.mjs");
    run(process.execPath, "entries.cjs");
  });

  for (const [module, extension] of [["ESM", "mts"], ["CommonJS", "cts"]]) {
    it(`has types that hold: ${module}`, () => {
      writeFileSync(join(project(), `types.${extension}`), `
        import { Ratelimit, pacedFetch, type LimitResult } from "@tollgate/client";
        import { tollgate } from "@tollgate/client/express";
        import { withRatelimit } from "@tollgate/client/next";
        import { TollgateStore } from "@tollgate/client/express-rate-limit";
        export async function main(): Promise<number | null> {
          const ratelimit = new Ratelimit({ url: ["https://a.example", "https://b.example"], domain: "shop", failPolicy: "closed" });
          const result: LimitResult = await ratelimit.limit({ user: "ann" }, { cost: 2 });
          const { reservation } = await ratelimit.reserve("ann", { cost: 100 });
          await reservation?.settle(40);
          tollgate({ ratelimit, cost: (request) => request.rawHeaders.length, identify: (request) => ({ tenant: request.url ?? "" }) });
          withRatelimit(() => new Response("ok"), { ratelimit, peer: (request) => request.headers.get("x-real-ip") });
          // @ts-expect-error: a Request has no peer
          withRatelimit(() => new Response("ok"), { ratelimit });
          const head = { method: "GET", target: "/", peer: "192.0.2.1", headers: [["x-api-key", "a"]] as const };
          const { problem } = await ratelimit.limit({ request: head, attributes: { tenant: "acme" } });
          void problem?.status;
          new TollgateStore({ ratelimit });
          const paced: typeof fetch = pacedFetch({ maxRetries: 2 });
          await paced("https://api.example");
          // @ts-expect-error: an unknown policy
          new Ratelimit({ url: "https://a.example", domain: "shop", failPolicy: "maybe" });
          return result.remaining;
        }`);
      const tsc = join(root, "node_modules/typescript/bin/tsc");
      run(process.execPath, tsc, "--noEmit", "--strict", "--module", "nodenext", "--lib", "es2022,dom", "--skipLibCheck", "false", `types.${extension}`);
    });
  }

  it("is tree-shakeable: reading headers brings no client along", async () => {
    writeFileSync(join(project(), "shake.mjs"), 'import { readSignals } from "@tollgate/client"; console.log(readSignals(429, new Headers({ "retry-after": "3" }), 0).waitMs);');
    const bundle = await build({ entryPoints: [join(project(), "shake.mjs")], bundle: true, write: false, format: "esm", minify: true });
    const { text } = bundle.outputFiles[0];
    assert.ok(!text.includes("/v1/check") && !text.includes("ThrottledError"), "unused parts are gone");
    assert.ok(text.length < 6_000, `${text.length} bytes`);
  });

  it("uses nothing of Node in the main entry, so that workers can run it", async () => {
    writeFileSync(join(project(), "worker.mjs"), 'export * from "@tollgate/client"; export * from "@tollgate/client/hono"; export { withRatelimit } from "@tollgate/client/next";');
    const bundle = await build({ entryPoints: [join(project(), "worker.mjs")], bundle: true, write: false, format: "esm", platform: "neutral", mainFields: [] });
    assert.doesNotMatch(bundle.outputFiles[0].text, /\b(?:process|Buffer|require)\b\s*[.(]/);
  });

  for (const [runtime, args] of [["bun", ["run"]], ["deno", ["run", "--allow-net", "--allow-env", "--allow-read"]]]) {
    it(`works in ${runtime}`, (t) => {
      if (spawnSync(runtime, ["--version"]).error !== undefined) return t.skip(`${runtime} is not installed`);
      writeFileSync(join(project(), `${runtime}.mjs`), `import { Ratelimit } from "@tollgate/client";\n${program(runtime)}`);
      assert.equal(run(runtime, ...args, `${runtime}.mjs`), WORKED);
    });
  }
});
