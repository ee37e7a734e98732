// A Node server that answers with the paths that applications route by, in hexadecimal.
const http = require('http');

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

http
  .createServer((request, response) => {
    const raw = request.url.split('?')[0];
    const url = new URL(request.url, 'http://localhost').pathname;
    const routes = {
      raw,
      url,
      segments: raw.split('/').map(decoded).join('\0'),
      unslashed: raw.replace(/\/$/, ''),
    };
    const lines = Object.entries(routes).map(([style, path]) => `${style} ${Buffer.from(path).toString('hex')}\n`);
    response.end(lines.join(''));
  })
  .listen(Number(process.argv[2]), '127.0.0.1');
