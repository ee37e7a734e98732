"""An app behind the Python client's middleware, for the matrix. The field `x-matrix-server` chooses the server to ask.

The source of the client is on the path; the port is printed.
"""

import sys
import threading
import wsgiref.simple_server
from socketserver import ThreadingMixIn

from tollgate import Client
from tollgate.wsgi import TollgateMiddleware

guarded = {}


def hello(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [b"hello"]


def app(environ, start_response):
    url = environ.pop("HTTP_X_MATRIX_SERVER")
    if url not in guarded:
        client = Client(url, domain="d", timeout_ms=60_000, fail="closed", deny_cache=0)
        guarded[url] = TollgateMiddleware(hello, client, max_delay_ms=0)
    return guarded[url](environ, start_response)


class Server(ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    daemon_threads = True


class Handler(wsgiref.simple_server.WSGIRequestHandler):
    def log_message(self, *args):
        pass


server = wsgiref.simple_server.make_server("127.0.0.1", 0, app, Server, Handler)
print(server.server_port, flush=True)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdin.read()
