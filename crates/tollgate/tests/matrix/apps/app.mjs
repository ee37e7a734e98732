// An app behind the TypeScript client's middleware, for the matrix. The field `x-matrix-server` chooses the server to ask.
// The first argument is the folder of the built client; the port is printed.
import http from "node:http";
import { pathToFileURL } from "node:url";

const client = (path) => import(pathToFileURL(`${process.argv[2]}/dist/esm/${path}`));
const { Ratelimit } = await client("index.js");
const { tollgate } = await client("middleware/express.js");

const guarded = new Map();
const server = http.createServer((request, response) => {
  const url = request.headers["x-matrix-server"];
  delete request.headers["x-matrix-server"];
  for (let at = 0; at < request.rawHeaders.length; at += 2) {
    if (request.rawHeaders[at].toLowerCase() === "x-matrix-server") request.rawHeaders.splice(at, 2);
  }
  if (!guarded.has(url)) {
    const ratelimit = new Ratelimit({ url, domain: "d", timeout: 60_000, failPolicy: "closed", denyCache: false });
    guarded.set(url, tollgate({ ratelimit }));
  }
  guarded.get(url)(request, response, (error) => {
    response.statusCode = error ? 500 : 200;
    response.end(error ? String(error) : "hello");
  });
});
process.stdin.resume().on("end", () => process.exit());
server.listen(0, "127.0.0.1", () => console.log(server.address().port));
