"""Both middlewares with real frameworks, over real connections, against a real server."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import pathlib
import socket
import sys
import threading
import time
import unittest
import wsgiref.simple_server
from socketserver import ThreadingMixIn

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import django
import django.conf
import django.http
import django.urls
import fastapi
import flask
import starlette.applications
import starlette.responses
import starlette.routing
import uvicorn
from servers import FaultyServer, Tollgate

import tollgate.asgi
import tollgate.wsgi
from tollgate import AsyncClient, Client

RULES = """
domain: web
descriptors:
  - {key: api_key, name: per-key, limit: 3/hour, algorithm: fixed_window}
  - {key: endpoint, value: GET /slot/stream, name: stream, concurrency: 1}
  - {key: endpoint, value: GET /slot/raise, name: raise, concurrency: 1}
  - {key: endpoint, value: GET /slot/late, name: late, concurrency: 1}
  - {key: endpoint, value: GET /slot/socket, name: socket, concurrency: 1}
  - {key: endpoint, value: POST /login, name: login, limit: 1/hour}
  - {key: plan, value: small, name: small, limit: 1/hour}
  - {key: endpoint, value: GET /slow, name: slow, limit: {count: 10, period: 1s, burst: 5}, action: delay}
  - {key: endpoint, value: GET /queue, name: queue, limit: {count: 1, period: 1h, burst: 5}, action: delay}
"""


class Paths:
    """What the apps of all frameworks do."""

    def __init__(self):
        self.go_on = threading.Event()
        self.served = []

    def chunks(self):
        yield b"first"
        while not self.go_on.wait(0.01):
            yield b"."
        yield b"last"

    def late(self):
        yield b"first"
        raise RuntimeError("while streaming")


def starlette_app(paths):
    async def ok(request):
        paths.served.append(request.scope.get("tollgate"))
        return starlette.responses.PlainTextResponse("ok", headers={"X-RateLimit-Policy": "own"})

    async def stream(request):
        async def chunks():
            yield b"first"
            while not paths.go_on.is_set():
                await asyncio.sleep(0.01)
                yield b"."
            yield b"last"

        return starlette.responses.StreamingResponse(chunks())

    async def fails(request):
        raise RuntimeError("before the response")

    async def late(request):
        async def chunks():
            yield b"first"
            raise RuntimeError("while streaming")

        return starlette.responses.StreamingResponse(chunks())

    async def websocket(session):
        await session.accept()
        with contextlib.suppress(Exception):
            await session.receive_text()

    route = starlette.routing.Route
    routes = [
        route("/slot/stream", stream),
        route("/slot/raise", fails),
        route("/slot/late", late),
        starlette.routing.WebSocketRoute("/slot/socket", websocket),
        route("/{rest:path}", ok, methods=["GET", "POST", "HEAD"]),
    ]
    return starlette.applications.Starlette(routes=routes)


def flask_app(paths):
    app = flask.Flask("test")

    @app.route("/slot/stream")
    def stream():
        return flask.Response(paths.chunks())

    @app.route("/slot/raise")
    def fails():
        raise RuntimeError("before the response")

    @app.route("/slot/late")
    def late():
        return flask.Response(paths.late())

    @app.route("/", defaults={"rest": ""}, methods=["GET", "POST"])
    @app.route("/<path:rest>", methods=["GET", "POST"])
    def ok(rest):
        paths.served.append(flask.request.environ.get("tollgate.result"))
        return flask.Response("ok", headers={"X-RateLimit-Policy": "own"})

    app.config["PROPAGATE_EXCEPTIONS"] = True
    return app


class AsgiServer:
    def __init__(self, app):
        config = uvicorn.Config(app, log_level="critical", proxy_headers=False, lifespan="off", ws="websockets-sansio")
        self._server = uvicorn.Server(config)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=lambda: self._server.run([self._socket]), daemon=True)
        self._thread.start()

    def stop(self):
        self._server.should_exit = True
        self._server.force_exit = True
        self._thread.join()


class _WsgiHandler(wsgiref.simple_server.WSGIRequestHandler):
    def log_message(self, *_):
        pass

    def get_stderr(self):
        return open("/dev/null", "w")


class _ThreadingServer(ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass


class WsgiServer:
    def __init__(self, app):
        self._server = wsgiref.simple_server.make_server("127.0.0.1", 0, app, _ThreadingServer, _WsgiHandler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self):
        self._server.shutdown()
        self._server.server_close()


class Answer:
    def __init__(self, response):
        self.status, self.headers, self.body = response.status, response.headers, response.read()

    def json(self):
        return json.loads(self.body)


class MiddlewareTest:
    """Runs with each interface."""

    @classmethod
    def setUpClass(cls):
        cls.tollgate = Tollgate(RULES)

    @classmethod
    def tearDownClass(cls):
        cls.tollgate.stop()

    def start(self, url=None, app=None, **settings):
        self.paths = Paths()
        self.addCleanup(self.paths.go_on.set)
        fail = settings.pop("fail", "open")
        self.client = self.client_class(url or self.tollgate.url, "web", timeout_ms=5_000, fail=fail)
        self.ended = []
        end = self.client._end

        def counting(path, server, document):
            self.ended.append((path, document["cost"]))
            return end(path, server, document)

        self.client._end = counting
        server = self.serve((app or self.app)(self.paths), **settings)
        self.addCleanup(server.stop)
        return server.port

    def get(self, port, path, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            return Answer(connection.getresponse())
        finally:
            connection.close()

    def until(self, what):
        end = time.monotonic() + 20
        while not what():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)

    def test_limits_callers_as_the_gateway_identifies_them(self):
        port, key = self.start(), f"key-{self.id()}"
        answers = [self.get(port, "/ok", x_api_key=key) for _ in range(4)]
        self.assertEqual([answer.status for answer in answers], [200, 200, 200, 429])
        self.assertEqual([answer.headers["X-RateLimit-Remaining"] for answer in answers], ["2", "1", "0", "0"])
        self.assertEqual(answers[0].headers["X-RateLimit-Policy"], "own", "the app's own field stays")
        self.assertIn('"per-key"', answers[0].headers["RateLimit-Policy"])
        self.assertEqual(self.paths.served[0].rule, "per-key")
        denied = answers[3]
        self.assertEqual(denied.headers["Content-Type"], "application/problem+json")
        self.assertEqual(denied.headers["X-RateLimit-Denied-By"], "per-key")
        problem = denied.json()
        self.assertEqual(str(problem["retry_after"]), denied.headers["Retry-After"])
        self.assertEqual(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded")
        self.assertEqual((problem["status"], problem["violated-policies"]), (429, ["per-key"]))
        self.assertEqual(problem["decision_id"], denied.headers["X-RateLimit-Decision-Id"])
        self.assertEqual(len(self.paths.served), 3, "a denied request does not reach the app")
        bearer = self.get(port, "/ok", Authorization=f"Bearer {key}")
        self.assertEqual(bearer.status, 429, "the same key in another field")
        self.assertEqual(self.get(port, "/ok").status, 200)
        head = self.get(port, "/ok", method="HEAD", x_api_key=key)
        self.assertEqual((head.status, head.body), (429, b""))

    def test_endpoints_have_one_spelling(self):
        port = self.start()
        statuses = [self.get(port, path, method="POST").status for path in ("/login", "/%6cogin", "/login/?next=1")]
        self.assertEqual(statuses, [200, 429, 429])

    def test_a_request_that_cannot_be_read_is_refused_with_the_servers_problem(self):
        port = self.start()
        for fail in ("open", "closed"):
            with self.subTest(fail):
                port = self.start(fail=fail)
                ambiguous = self.get(port, "/ok", x_api_key="a", Authorization="Bearer b")
                self.assertEqual((ambiguous.status, ambiguous.json()["title"]), (400, "Ambiguous request"))
                unreadable = self.get(port, "/ok", Authorization="Bearer a b")
                self.assertEqual((unreadable.status, unreadable.json()["title"]), (401, "Unreadable credential"))
                self.assertEqual(unreadable.headers["Content-Type"], "application/problem+json")
                self.assertEqual(unreadable.headers["WWW-Authenticate"], "Bearer")
                self.assertEqual(self.paths.served, [])

    def test_raw_bytes_of_fields_reach_the_server_as_they_are(self):
        port = self.start()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /ok HTTP/1.1\r\nHost: x\r\nX-Api-Key: caf\xc3\xa9\r\nConnection: close\r\n\r\n")
            self.assertIn(b" 401 ", connection.makefile("rb").readline())

    def test_a_permit_is_returned_when_the_response_ends(self):
        port = self.start()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"GET /slot/stream HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            stream = connection.makefile("rb")
            self.assertIn(b" 200 ", stream.readline())
            denied = self.get(port, "/slot/stream")
            self.assertEqual((denied.status, denied.headers["X-RateLimit-Denied-By"]), (429, "stream"))
            self.assertEqual(self.ended, [])
            self.paths.go_on.set()
            self.assertIn(b"last", stream.read())
        self.until(lambda: self.get(port, "/slot/stream").status == 200)
        self.until(lambda: len(self.ended) == 2)
        self.assertEqual(self.ended, [("/v1/settle", 1)] * 2)

    def test_a_permit_is_returned_once_if_the_caller_leaves(self):
        port = self.start()
        for _ in range(2):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(b"GET /slot/stream HTTP/1.1\r\nHost: x\r\n\r\n")
            self.assertIn(b" 200 ", connection.recv(100))
            count = len(self.ended)
            connection.close()
            self.until(lambda: len(self.ended) > count)
            self.assertFalse(self.paths.go_on.is_set())
            self.until(lambda: self.peek("GET", "/slot/stream").remaining == 1)
        self.assertEqual(len(self.ended), 2)

    def peek(self, method, path):
        head = {"method": method, "target": path, "peer": "127.0.0.1", "headers": []}
        with Client(self.tollgate.url, "web", timeout_ms=5_000) as client:
            return client.peek({"request": head})

    def test_a_permit_is_returned_once_if_the_app_fails(self):
        port = self.start()
        for path in ("/slot/raise", "/slot/late"):
            for turn in range(3):
                count = len(self.ended)
                with contextlib.suppress(http.client.HTTPException, OSError):
                    self.assertNotEqual(self.get(port, path).status, 429)
                self.until(lambda: len(self.ended) > count)
                self.until(lambda: self.peek("GET", path).remaining == 1)
                self.assertEqual(len(self.ended), count + 1)

    def test_endpoints_without_a_concurrency_limit_take_one_call_after_the_first(self):
        port = self.start()
        asked = []
        order = self.client._core.order

        def counting(*arguments, **named):
            asked.append(order(*arguments, **named))
            return asked[-1]

        self.client._core.order = counting
        for path in ("/items/1", "/items/2?page=1", "/items/3"):
            self.get(port, path, x_api_key=self.id())
        self.assertEqual([each.path for each in asked], ["/v1/reserve", "/v1/check", "/v1/check"])
        self.until(lambda: self.ended == [("/v1/settle", 1)])

    def test_fails_as_chosen(self):
        dead = FaultyServer("refused")
        self.assertEqual(self.get(self.start(dead.url, fail="open"), "/ok").status, 200)
        answer = self.get(self.start(dead.url, fail="closed"), "/ok")
        self.assertEqual((answer.status, answer.headers["Retry-After"]), (503, "1"))
        self.assertEqual(answer.json()["type"].rpartition("#")[2], "temporary-reduced-capacity")
        self.assertEqual(self.get(self.start([dead.url, self.tollgate.url], fail="closed"), "/ok").status, 200)

    def test_settings(self):
        port = self.start(attributes=lambda _: {"plan": "small"}, skip=lambda request: "/health" in str(request), cost=1)
        user = {"x_api_key": self.id()}
        self.assertEqual([self.get(port, "/ok", **user).status for _ in range(2)], [200, 429])
        self.assertEqual((self.get(port, "/health", **user).status, self.paths.served[-1]), (200, None))
        with self.assertRaisesRegex(ValueError, "permits"):
            self.start(permits="maybe")
        port = self.start(cost=lambda _: 3)
        self.assertEqual(self.get(port, "/ok", x_api_key="three").headers["X-RateLimit-Remaining"], "0")

    def test_delays_are_waited_for(self):
        port = self.start()
        started = time.monotonic()
        statuses = [self.get(port, "/slow").status for _ in range(4)]
        self.assertEqual(statuses, [200] * 4)
        self.assertGreater(time.monotonic() - started, 0.2)
        late = [self.get(port, "/queue") for _ in range(2)][1]
        self.assertEqual(late.status, 503)
        self.assertGreater(int(late.headers["Retry-After"]), 30)


class AsgiTest(MiddlewareTest, unittest.TestCase):
    client_class = AsyncClient
    app = staticmethod(starlette_app)

    def serve(self, app, **settings):
        return AsgiServer(tollgate.asgi.TollgateMiddleware(app, self.client, **settings))

    def test_fastapi(self):
        def app(paths):
            app = fastapi.FastAPI()
            app.get("/users/{name}")(lambda name: {"name": name})
            app.add_middleware(tollgate.asgi.TollgateMiddleware, client=self.client)
            return app

        self.paths = Paths()
        self.client = AsyncClient(self.tollgate.url, "web", timeout_ms=5_000)
        server = AsgiServer(app(self.paths))
        self.addCleanup(server.stop)
        answers = [self.get(server.port, "/users/ann", x_api_key="fastapi") for _ in range(4)]
        self.assertEqual([answer.status for answer in answers], [200, 200, 200, 429])
        self.assertEqual(answers[0].json(), {"name": "ann"})
        self.assertEqual(answers[0].headers["X-RateLimit-Remaining"], "2")

    def test_websockets_hold_their_permit_until_they_are_closed(self):
        port = self.start()
        handshake = (
            b"GET /slot/socket HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )

        def connect():
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(handshake)
            return connection, connection.recv(4096)

        first, answer = connect()
        self.assertIn(b" 101 ", answer)
        self.assertIn(b"ratelimit-policy", answer.lower())
        second, answer = connect()
        self.assertIn(b" 429 ", answer)
        second.close()
        first.close()
        self.until(lambda: self.peek("GET", "/slot/socket").remaining == 1)
        self.assertEqual(len(self.ended), 1)

    def test_work_after_the_response_holds_no_permit(self):
        go_on = threading.Event()
        self.addCleanup(go_on.set)

        def app(paths):
            async def background():
                while not go_on.is_set():
                    await asyncio.sleep(0.01)

            async def ok(request):
                task = starlette.background.BackgroundTask(background)
                return starlette.responses.PlainTextResponse("ok", background=task)

            return starlette.applications.Starlette(routes=[starlette.routing.Route("/slot/stream", ok)])

        port = self.start(app=app)
        self.assertEqual(self.get(port, "/slot/stream").status, 200)
        self.until(lambda: self.peek("GET", "/slot/stream").remaining == 1)

    def test_a_caller_that_leaves_during_the_check_holds_nothing(self):
        async def main():
            client = AsyncClient(self.tollgate.url, "web", timeout_ms=5_000)
            scope = {"type": "http", "method": "GET", "path": "/slot/stream", "headers": [], "client": ("127.0.0.1", 1)}

            async def app(scope, receive, send):
                await asyncio.sleep(60)

            async def send(message):
                pass  # refused: the permit of the turn before is still being given back

            middleware = tollgate.asgi.TollgateMiddleware(app, client)
            for turns in range(12):
                task = asyncio.ensure_future(middleware(dict(scope), None, send))
                for _ in range(turns):
                    await asyncio.sleep(0.0005)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            await client.close()

        asyncio.run(main())
        self.assertEqual(self.peek("GET", "/slot/stream").remaining, 1)


class WsgiTest(MiddlewareTest, unittest.TestCase):
    client_class = Client
    app = staticmethod(flask_app)

    def serve(self, app, **settings):
        app.wsgi_app = tollgate.wsgi.TollgateMiddleware(app.wsgi_app, self.client, **settings)
        return WsgiServer(app)

    def test_django(self):
        def ok(request):
            return django.http.HttpResponse(request.environ["tollgate.result"].rule)

        if not django.conf.settings.configured:
            django.conf.settings.configure(ALLOWED_HOSTS=["*"], ROOT_URLCONF=__name__, SECRET_KEY="x")
            django.setup()
        from django.core.wsgi import get_wsgi_application

        globals()["urlpatterns"] = [django.urls.path("orders", ok)]
        client = Client(self.tollgate.url, "web", timeout_ms=5_000)
        server = WsgiServer(tollgate.wsgi.TollgateMiddleware(get_wsgi_application(), client))
        self.addCleanup(server.stop)
        answers = [self.get(server.port, "/orders", x_api_key="django") for _ in range(4)]
        self.assertEqual([answer.status for answer in answers], [200, 200, 200, 429])
        self.assertEqual(answers[0].body, b"per-key")

    def test_heads_that_are_too_large_to_be_checked_are_refused(self):
        client = Client(self.tollgate.url, "web", timeout_ms=5_000)
        self.addCleanup(client.close)
        middleware = tollgate.wsgi.TollgateMiddleware(self.fail, client)
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/ok", "REMOTE_ADDR": "127.0.0.1"}
        for count, size, status in ((9, 8_000, "431 "), (300, 1, "400 ")):
            answers = []
            large = {f"HTTP_X_{each}": "x" * size for each in range(count)}
            body = b"".join(middleware({**environ, **large}, lambda status, headers: answers.append(status)))
            self.assertEqual((answers[0][:4], str(json.loads(body)["status"]) + " "), (status, status))

    def test_unread_and_unix_socket_requests(self):
        client = Client(self.tollgate.url, "web", timeout_ms=5_000)
        closed = []

        class Body:
            def __iter__(self):
                return iter([b"x"])

            def close(self):
                closed.append(True)

        middleware = tollgate.wsgi.TollgateMiddleware(lambda environ, start: Body(), client)
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/slot/stream", "REMOTE_ADDR": ""}
        response = middleware(dict(environ), lambda *_: None)
        self.assertEqual(self.peek("GET", "/slot/stream").remaining, 0)
        response.close()
        response.close()
        client.close()
        self.assertEqual((closed, self.peek("GET", "/slot/stream").remaining), ([True, True], 1))


if __name__ == "__main__":
    unittest.main()
