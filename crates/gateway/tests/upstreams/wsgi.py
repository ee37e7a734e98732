"""A WSGI server that answers with the path that an application routes by, in hexadecimal."""

import sys
from wsgiref.simple_server import WSGIRequestHandler, make_server


class Quiet(WSGIRequestHandler):
    def log_message(self, *_):
        pass


def app(environ, start):
    path = environ["PATH_INFO"].encode("latin-1")
    merged = b"/".join(part for part in path.split(b"/") if part)
    start("200 OK", [("content-type", "text/plain")])
    return [f"path_info {path.hex()}\nmerged {merged.hex()}\n".encode()]


make_server("127.0.0.1", int(sys.argv[1]), app, handler_class=Quiet).serve_forever()
