// Route handlers inside a real Next.js, built and started as in production (`make clients-next-test`). Not a part of
// `make test`: Next.js is large.
import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { once } from "node:events";
import { cpSync, mkdtempSync, rmSync } from "node:fs";
import { request } from "node:http";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, describe, it } from "node:test";
import { fileURLToPath } from "node:url";
import { eventually, Tollgate, unusedPort } from "../test/servers.mjs";

const RULES = `
domain: shop
descriptors:
  - {key: api_key, name: per-key, limit: {count: 3, period: 1h, algorithm: sliding_window}}
  - {key: endpoint, value: GET /stream, name: streams, concurrency: {limit: 1, ttl: 3600s}}
  - {key: endpoint, value: GET /fail, name: failing, concurrency: {limit: 1, ttl: 3600s}}
`;

let folder, server, next, url;
before(async () => {
  folder = mkdtempSync(join(tmpdir(), "tollgate-next-"));
  server = await Tollgate.start(RULES);
  const run = (command, args, cwd) => execFileSync(command, args, { cwd, encoding: "utf8", env: { ...process.env, NEXT_TELEMETRY_DISABLED: "1" }, stdio: ["ignore", "pipe", "inherit"] });
  const client = fileURLToPath(new URL("..", import.meta.url));
  const [{ filename }] = JSON.parse(run("npm", ["pack", "--json", "--ignore-scripts", "--pack-destination", folder], client));
  const project = join(folder, "project");
  cpSync(fileURLToPath(new URL(".", import.meta.url)), project, { recursive: true, filter: (path) => !path.includes("node_modules") });
  run("npm", ["install", "--no-audit", "--no-fund", "--loglevel=error", "--omit=peer", join(folder, filename)], project);
  run("npx", ["next", "build"], project);
  const port = await unusedPort();
  const program = join(project, "node_modules/next/dist/bin/next");
  const env = { ...process.env, NEXT_TELEMETRY_DISABLED: "1", TOLLGATE_URL: server.url };
  next = spawn(process.execPath, [program, "start", "-H", "127.0.0.1", "-p", String(port)], { cwd: project, env, stdio: "ignore" });
  url = `http://127.0.0.1:${port}`;
  await eventually(() => fetch(`${url}/nothing`).then((response) => response.text()).then(() => true, () => false), "Next.js listens", 60);
});
after(async () => {
  if (next !== undefined && next.exitCode === null) {
    next.kill("SIGKILL");
    await once(next, "exit");
  }
  await server?.close();
  rmSync(folder, { recursive: true, force: true });
});

const get = (path, key) => fetch(url + path, { headers: { "x-api-key": key } });

describe("route handlers in Next.js", () => {
  it("limits callers by the key in their request", async () => {
    for (const remaining of [2, 1, 0]) {
      const response = await get("/orders", "limited");
      assert.equal(response.status, 200);
      assert.deepEqual(await response.json(), { ok: true });
      assert.match(response.headers.get("ratelimit"), new RegExp(`"per-key";r=${remaining}`));
    }
    const denied = await get("/orders", "limited");
    assert.equal(denied.status, 429);
    assert.ok(Number(denied.headers.get("retry-after")) > 0);
    assert.equal(denied.headers.get("content-type"), "application/problem+json");
    assert.deepEqual((await denied.json())["violated-policies"], ["per-key"]);
    assert.equal((await get("/orders", "other")).status, 200);
  });

  it("hands the request on: its body, its path's parameters, its query", async () => {
    const posted = await fetch(`${url}/orders`, { method: "POST", headers: { "x-api-key": "posting" }, body: "three apples" });
    assert.deepEqual([posted.status, await posted.text()], [201, "three apples"]);
    assert.deepEqual(await (await get("/items/42?page=2", "reading")).json(), { id: "42", page: "2" });
  });

  it("gives a permit back when its caller leaves, and when its handler fails", async () => {
    const stream = (status) => new Promise((resolve, reject) => {
      const sent = request(`${url}/stream`, { headers: { "x-api-key": `stream-${Math.random()}` } }, (response) => {
        response.once("error", () => undefined);
        if (response.statusCode !== status) response.destroy();
        resolve({ status: response.statusCode, leave: () => response.destroy() });
      });
      sent.once("error", reject);
      sent.end();
    });
    const first = await stream(200);
    assert.equal(first.status, 200);
    assert.equal((await stream(429)).status, 429, "its place is taken");
    first.leave();
    const second = await eventually(async () => {
      const another = await stream(200);
      return another.status === 200 && another;
    }, "the place is free again");
    second.leave();
    for (let turn = 0; turn < 3; turn += 1) {
      await eventually(async () => (await get("/fail", `fail-${turn}-${Math.random()}`)).status === 500, "the handler fails, and nothing else does");
    }
  });
});
