"""A service to put behind a proxy or the gateway while trying them: answers every request with 200.

    python3 examples/upstream.py 9000 9001
"""

import http.server
import sys
import threading


class Service(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def respond(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = f"{self.command} {self.path}\n".encode()
        self.send_response(200)
        self.send_header("content-type", "text/plain")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = respond

    def log_message(self, *_):
        pass


ports = [int(port) for port in sys.argv[1:]] or [9000]
for port in ports:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Service)
    threading.Thread(target=server.serve_forever).start()
    print(f"http://127.0.0.1:{port}", flush=True)
