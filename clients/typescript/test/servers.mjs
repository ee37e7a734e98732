// Servers for the tests: the real Tollgate, and a faulty one.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";

const BINARY = process.env.TOLLGATE_TEST_BINARY ?? fileURLToPath(new URL("../../../target/debug/tollgate", import.meta.url));

/** A port on which nothing listens. */
export async function unusedPort() {
  const server = createServer().listen(0, "127.0.0.1");
  await once(server, "listening");
  const { port } = server.address();
  server.close();
  await once(server, "close");
  return port;
}

/** A running Tollgate with its own rules, on free ports. */
export class Tollgate {
  static async start(rules, { flags = [], admin = false, command = "serve", config } = {}) {
    const folder = mkdtempSync(join(tmpdir(), "tollgate-ts-"));
    writeFileSync(join(folder, "rules.yaml"), rules);
    // JSON is YAML.
    if (config !== undefined) writeFileSync(join(folder, "config.yaml"), JSON.stringify(config));
    // Ports are taken by others between finding and using them; then the server exits and the next ones are tried.
    for (let attempt = 0; ; attempt += 1) {
      const [port, adminPort] = [await unusedPort(), await unusedPort()];
      const args = [command, ...(config === undefined ? [] : ["--config", join(folder, "config.yaml")]), "--rules", join(folder, "rules.yaml"), "--http", `127.0.0.1:${port}`, "--grpc", "off", "--resp", "off"];
      args.push(...(admin ? ["--admin", `127.0.0.1:${adminPort}`, "--db", `sqlite:${join(folder, "tollgate.db")}`] : ["--admin", "off"]), ...flags);
      const env = Object.fromEntries(Object.entries(process.env).filter(([name]) => !name.startsWith("TOLLGATE_")));
      const child = spawn(BINARY, args, { env, cwd: folder, stdio: ["ignore", "pipe", "pipe"] });
      let log = "";
      child.stdout.on("data", (data) => { log += data; });
      child.stderr.on("data", (data) => { log += data; });
      child.on("error", (error) => { log += error; });
      const server = new Tollgate(child, folder, `http://127.0.0.1:${port}`, `http://127.0.0.1:${adminPort}`);
      if (await server.#isReady()) return server;
      if (attempt === 4) throw new Error(`Tollgate does not start:\n${log}`);
    }
  }

  constructor(child, folder, url, adminUrl) {
    Object.assign(this, { child, folder, url, adminUrl });
  }

  async #isReady() {
    for (;;) {
      if (this.child.exitCode !== null || this.child.pid === undefined) return false;
      try {
        const response = await fetch(`${this.url}/readyz`);
        await response.text();
        if (response.ok) return true;
      } catch {
        await new Promise((resolve) => setTimeout(resolve, 20));
      }
    }
  }

  async close() {
    if (this.child.exitCode === null && this.child.signalCode === null) {
      this.child.kill("SIGKILL");
      await once(this.child, "exit");
    }
    rmSync(this.folder, { recursive: true, force: true });
  }
}

/**
 * A server on a raw socket. For each request, `answer` says what happens: `{status, body, headers}`, or `cut`,
 * `cut_body`, `hang`, `slow_body`, `{after: ms, …}`, `{forward: url}` (a proxy).
 */
export class FakeServer {
  static async start(answer) {
    const fake = new FakeServer();
    fake.requests = [];
    fake.sockets = new Set();
    fake.server = createServer((socket) => {
      fake.sockets.add(socket);
      socket.on("close", () => fake.sockets.delete(socket));
      socket.on("error", () => undefined);
      let bytes = Buffer.alloc(0);
      socket.on("data", async (data) => {
        bytes = Buffer.concat([bytes, data]);
        for (;;) {
          const end = bytes.indexOf("\r\n\r\n");
          if (end < 0) return;
          const head = bytes.subarray(0, end).toString("latin1");
          const length = Number(/content-length: (\d+)/i.exec(head)?.[1] ?? 0);
          if (bytes.length < end + 4 + length) return;
          const body = bytes.subarray(end + 4, end + 4 + length).toString();
          bytes = bytes.subarray(end + 4 + length);
          const [method, path] = head.split(" ");
          fake.requests.push({ method, path, head, body });
          await fake.#respond(socket, await answer({ method, path, head, body, at: fake.requests.length - 1 }));
        }
      });
    }).listen(0, "127.0.0.1");
    await once(fake.server, "listening");
    fake.url = `http://127.0.0.1:${fake.server.address().port}`;
    return fake;
  }

  async #respond(socket, what) {
    if (what === "hang") return;
    if (what === "cut") return void socket.destroy();
    if (what === "cut_body") return void socket.end("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"allo");
    if (what === "slow_body") return void socket.write("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"allo");
    if (what.after !== undefined) await new Promise((resolve) => setTimeout(resolve, what.after));
    const { status = 200, body = "", headers = {} } = what;
    const bytes = Buffer.from(typeof body === "string" ? body : JSON.stringify(body));
    const lines = Object.entries({ "content-type": "application/json", "content-length": bytes.length, ...headers }).map(([name, value]) => `${name}: ${value}\r\n`);
    const withBody = status !== 204 && status !== 304;
    if (socket.writable) socket.write(Buffer.concat([Buffer.from(`HTTP/1.1 ${status} X\r\n${lines.filter((line) => withBody || !line.startsWith("content-length")).join("")}\r\n`), withBody ? bytes : Buffer.alloc(0)]));
  }

  async close() {
    for (const socket of this.sockets) socket.destroy();
    this.server.close();
    await once(this.server, "close");
  }
}

/** A proxy before a server that can be told to misbehave: `pass`, `slow` (ms), `cut`, `hang`, `garbage`, `unavailable`. */
export class FaultProxy {
  static async start(target) {
    const proxy = new FaultProxy();
    proxy.mode = "pass";
    proxy.slowMs = 0;
    proxy.fake = await FakeServer.start(async ({ method, path, head, body }) => {
      if (proxy.mode === "cut" || proxy.mode === "hang") return proxy.mode;
      if (proxy.mode === "garbage") return { status: 200, body: "{\"allowed\":\"perhaps\"}" };
      if (proxy.mode === "unavailable") return { status: 503, body: "<html>503</html>", headers: { "content-type": "text/html" } };
      const type = /content-type: ([^\r\n]*)/i.exec(head)?.[1] ?? "application/json";
      const response = await fetch(target + path, { method, headers: { "content-type": type }, ...(body === "" ? {} : { body }) });
      const headers = Object.fromEntries([...response.headers].filter(([name]) => !["connection", "content-length"].includes(name)));
      return { after: proxy.mode === "slow" ? proxy.slowMs : undefined, status: response.status, body: await response.text(), headers };
    });
    proxy.url = proxy.fake.url;
    return proxy;
  }
  get requests() { return this.fake.requests; }
  close() { return this.fake.close(); }
}

/** Waits until `condition` holds. */
export async function eventually(condition, what, seconds = 20) {
  const end = Date.now() + seconds * 1000;
  for (;;) {
    const value = await condition();
    if (value) return value;
    if (Date.now() > end) throw new Error(`not within ${seconds} s: ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

