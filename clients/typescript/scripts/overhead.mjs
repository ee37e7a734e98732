// What `limit()` costs beside a bare `fetch` of the same check to the same server. Both take turns request by request, so
// that whatever else the machine does slows both; the medians are compared. Starts a server of its own (TOLLGATE_TEST_BINARY):
//   node scripts/overhead.mjs [requests]
import { Ratelimit } from "../dist/esm/index.js";
import { Tollgate } from "../test/servers.mjs";

const requests = Number(process.argv[2] ?? 5_000);
const server = await Tollgate.start("{domain: overhead, descriptors: [{key: api_key, limit: 1000000/second}]}");
const { url } = server;
const WARM_UP = 500;
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
for (let request = 0; request < requests + WARM_UP; request += 1) {
  for (const way of request % 2 === 0 ? ["fetch", "limit"] : ["limit", "fetch"]) {
    const started = performance.now();
    await ways[way]();
    if (request >= WARM_UP) times[way].push(performance.now() - started);
  }
}
const median = (list) => list.sort((a, b) => a - b)[list.length >> 1] * 1000;
const [bare, own] = [median(times.fetch), median(times.limit)];
console.log(`median of ${requests}: bare fetch ${bare.toFixed(0)} µs, limit() ${own.toFixed(0)} µs (${((own / bare - 1) * 100).toFixed(1)}%)`);
await server.close();
