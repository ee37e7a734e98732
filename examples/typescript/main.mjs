// A service that limits its callers, and a client of it that is never refused. Needs a running server with the rules
// beside this file, and the client (`npm install @tollgate/client express`):
//   tollgate serve --rules examples/typescript/rules.yaml &
//   node examples/typescript/main.mjs
import express from "express";
import { pacedFetch, Ratelimit } from "@tollgate/client";
import { tollgate } from "@tollgate/client/express";

const ratelimit = new Ratelimit({ url: process.env.TOLLGATE_URL ?? "http://127.0.0.1:8080", domain: "shop", timeout: 1_000 });

// The service: two requests a second for each API key, and a budget of tokens for each.
const app = express();
app.use(tollgate({ ratelimit }));
app.get("/answer", async (request, response) => {
  const { allowed, reservation } = await ratelimit.reserve({ model_user: request.get("x-api-key") }, { cost: 500 });
  if (!allowed) return response.status(429).send("no tokens left");
  const answer = "42";
  await reservation?.settle(answer.length); // the estimate was 500
  response.send(answer);
});
const server = app.listen(0, "127.0.0.1", async () => {
  const url = `http://127.0.0.1:${server.address().port}/answer`;
  const call = async (how, key) => {
    const response = await how(url, { headers: { "x-api-key": key } });
    await response.text();
    return response.status;
  };

  // A plain client runs into the limit.
  const plain = await Promise.all(Array.from({ length: 6 }, () => call(fetch, "plain")));
  console.log("plain fetch:", plain.includes(429) ? "refused" : "not refused");

  // A paced one reads the response's RateLimit fields, and slows down before it.
  const paced = pacedFetch();
  const statuses = [];
  for (let request = 0; request < 6; request += 1) statuses.push(await call(paced, "paced"));
  console.log("paced fetch:", statuses.includes(429) ? "refused" : "not refused");

  const { remaining } = await ratelimit.getRemaining({ model_user: "paced" });
  console.log("tokens used:", 10_000 - remaining);
  server.close();
  server.closeAllConnections();
});
