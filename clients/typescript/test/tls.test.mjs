// A server behind TLS: its certificate must be that of a known CA, or nothing is sent.
import assert from "node:assert/strict";
import { execFile, execFileSync } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createServer } from "node:https";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { it } from "node:test";
import { promisify } from "node:util";
import { Tollgate } from "./servers.mjs";

const PROGRAM = `
  const { Ratelimit } = await import(process.env.CLIENT);
  const client = new Ratelimit({ url: process.env.SERVER, domain: "shop", token: "secret", failPolicy: "closed", timeout: 20_000 });
  const { allowed, source, reason } = await client.limit("a");
  console.log(JSON.stringify([allowed, source, reason]));
`;

it("asks over TLS if the CA is known, and fails closed if it is not", async (t) => {
  const folder = mkdtempSync(join(tmpdir(), "tollgate-tls-"));
  const [key, certificate] = [join(folder, "server.key"), join(folder, "server.pem")];
  execFileSync("openssl", ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate], { stdio: "ignore" });
  const tollgate = await Tollgate.start("domain: shop\ndescriptors:\n  - {key: api_key, name: per-key, limit: 5/hour}\n");
  const tokens = [];
  const proxy = createServer({ key: readFileSync(key), cert: readFileSync(certificate) }, async (request, response) => {
    tokens.push(request.headers.authorization);
    let body = "";
    for await (const part of request) body += part;
    const answer = await fetch(tollgate.url + request.url, { method: "POST", body });
    response.writeHead(answer.status, { "content-type": "application/json" }).end(await answer.text());
  }).listen(0, "127.0.0.1");
  await once(proxy, "listening");
  t.after(async () => { proxy.closeAllConnections(); proxy.close(); await tollgate.close(); rmSync(folder, { recursive: true, force: true }); });

  const run = async (env) => {
    const common = { ...process.env, CLIENT: new URL("../dist/esm/index.js", import.meta.url).href, SERVER: `https://127.0.0.1:${proxy.address().port}` };
    const { stdout } = await promisify(execFile)(process.execPath, ["--input-type=module", "-e", PROGRAM], { env: { ...common, ...env } });
    return JSON.parse(stdout);
  };
  assert.deepEqual(await run({ NODE_EXTRA_CA_CERTS: "" }), [false, "policy", "unreachable"]);
  assert.deepEqual(tokens, [], "the token was not sent");
  assert.deepEqual(await run({ NODE_EXTRA_CA_CERTS: certificate }), [true, "server", "allowed"]);
  assert.deepEqual(tokens, ["Bearer secret"]);
});
