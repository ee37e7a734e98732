// What `limit()` costs beside a bare `fetch` of the same check to the same server. Both take turns in short batches. Of
// the time that passes the fastest tenth of the batches counts, since other programs only ever add to it; of the time on
// the processor, the median. Needs a running server:
//   node scripts/overhead.mjs http://127.0.0.1:8080 [batches]
import { Ratelimit } from "../dist/esm/index.js";

const url = process.argv[2] ?? "http://127.0.0.1:8080";
const batches = Number(process.argv[3] ?? 200);
const SIZE = 20;
const client = new Ratelimit({ url, domain: "overhead", timeout: 60_000 });
const body = '{"domain":"overhead","attributes":{"api_key":"a"}}';

const ways = {
  fetch: async () => {
    const response = await fetch(`${url}/v1/check`, { method: "POST", headers: { "content-type": "application/json" }, body });
    const { allowed } = await response.json();
    if (allowed !== true) throw new Error("denied; use a domain without limits");
  },
  limit: async () => {
    const { allowed, source } = await client.limit("a");
    if (!allowed || source !== "server") throw new Error("no answer");
  },
};

const times = { fetch: [], limit: [] };
const cpu = { fetch: [], limit: [] };
for (let batch = 0; batch < batches + 20; batch += 1) {
  const order = batch % 2 === 0 ? ["fetch", "limit"] : ["limit", "fetch"];
  for (const way of order) {
    const before = process.cpuUsage();
    const started = performance.now();
    for (let request = 0; request < SIZE; request += 1) await ways[way]();
    if (batch < 20) continue;
    times[way].push((performance.now() - started) / SIZE);
    const { user, system } = process.cpuUsage(before);
    cpu[way].push((user + system) / 1000 / SIZE);
  }
}
const at = (list, part) => list.sort((a, b) => a - b)[Math.floor(list.length * part)];
for (const [what, list, part] of [["elapsed", times, 0.1], ["processor", cpu, 0.5]]) {
  const [bare, own] = [at(list.fetch, part), at(list.limit, part)];
  console.log(`${what}: bare fetch ${(bare * 1000).toFixed(0)} µs, limit() ${(own * 1000).toFixed(0)} µs (${((own / bare - 1) * 100).toFixed(1)}%)`);
}
