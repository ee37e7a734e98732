// The identity cases of the conformance suite, sent to the real gateway and to `/check`: the client and the server agree
// on every attribute. Counters show what the server took a request for: those of the expected values go down by one.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { connect } from "node:net";
import { after, describe, it } from "node:test";
import { FakeServer, Tollgate, unusedPort } from "./servers.mjs";

const { cases } = JSON.parse(readFileSync(new URL("../../conformance/identity.json", import.meta.url)));
const KEYS = ["remote_address", "endpoint", "method", "path", "host", "api_key", "agent", "tier"];
const RULES = `domain: shop\ndescriptors:\n${KEYS.map((key) => `  - {key: ${key}, name: ${key}, limit: {count: 1000000, period: 30d, algorithm: fixed_window}}\n`).join("")}`;
const whole = (value) => (typeof value === "string" ? value : value.repeat.repeat(value.times));

/** Sends bytes as they are, and returns the status. */
async function send(port, text) {
  const socket = connect(port, "127.0.0.1");
  socket.write(text);
  let received = "";
  for await (const data of socket) received += data;
  return Number(/^HTTP\/1\.1 (\d+)/.exec(received)?.[1]);
}

const lines = (headers) => headers.map(([name, value]) => `${name}: ${whole(value)}\r\n`).join("");

async function remaining(url, attributes) {
  const counts = {};
  for (const [key, value] of Object.entries(attributes)) {
    const response = await fetch(`${url}/v1/check`, { method: "POST", body: JSON.stringify({ domain: "shop", attributes: { [key]: value }, cost: 0 }) });
    counts[key] = (await response.json()).limits[0].remaining;
  }
  return counts;
}

const bySettings = Map.groupBy?.(cases, ({ settings }) => JSON.stringify(settings)) ?? cases.reduce((map, one) => {
  const key = JSON.stringify(one.settings);
  return map.set(key, [...(map.get(key) ?? []), one]);
}, new Map());

for (const [settings, group] of bySettings) {
  describe(`the server agrees: ${settings}`, () => {
    let started;
    const servers = () => (started ??= (async () => {
      const upstream = await FakeServer.start(() => ({ status: 200, body: "ok", headers: { connection: "close" } }));
      const gatewayPort = await unusedPort();
      const config = {
        identity: JSON.parse(settings),
        gateway: {
          listeners: [{ address: `127.0.0.1:${gatewayPort}`, proxy_protocol: true }],
          upstreams: { up: { addresses: [upstream.url.slice("http://".length)] } },
          routes: [{ path: "/{*rest}", upstream: "up", domain: "shop" }],
        },
      };
      const tollgate = await Tollgate.start(RULES, { command: "gateway", config });
      return { upstream, tollgate, gatewayPort };
    })());
    after(async () => { const { upstream, tollgate } = await servers(); await tollgate.close(); await upstream.close(); });

    for (const { name, peer, method, target, headers, attributes, rejected } of group) {
      it(name, async () => {
        const { tollgate, gatewayPort } = await servers();
        const host = headers.some(([key]) => key.toLowerCase() === "host") ? "" : "Host: unnamed\r\n";
        const family = peer.includes(":") ? `TCP6 ${peer} ::1` : `TCP4 ${peer} 127.0.0.1`;
        const viaGateway = () => send(gatewayPort, `PROXY ${family} 4000 80\r\n${method} ${whole(target)} HTTP/1.1\r\n${host}${lines(headers)}Connection: close\r\n\r\n`);
        if (rejected) return assert.equal(await viaGateway(), 400);
        // The gateway's endpoints are those of its own routes; `identity.routes` are for `/check`.
        const { endpoint, ...others } = attributes;
        if (JSON.parse(settings).routes === undefined) {
          const before = await remaining(tollgate.url, others);
          assert.equal(await viaGateway(), 200);
          const afterwards = await remaining(tollgate.url, others);
          for (const key of Object.keys(others)) assert.equal(afterwards[key], before[key] - 1, `${key} ${others[key]}`);
        }

        const forwarded = { endpoint, method: attributes.method, path: attributes.path };
        const first = await remaining(tollgate.url, forwarded);
        const port = Number(new URL(tollgate.url).port);
        // As a trusted proxy asks; its own address is not what is tested here.
        const head = `X-Forwarded-Method: ${method}\r\nX-Forwarded-Uri: ${whole(target)}\r\nHost: a\r\nConnection: close\r\n\r\n`;
        assert.equal(await send(port, `GET /check HTTP/1.1\r\n${head}`), 200);
        const second = await remaining(tollgate.url, forwarded);
        for (const key of Object.keys(forwarded)) assert.equal(second[key], first[key] - 1, `${key} ${forwarded[key]}`);
      });
    }
  });
}

