"""Calling an API that is limited: `httpx` and `requests` against a real server with real fields."""

from __future__ import annotations

import asyncio
import http.server
import pathlib
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import httpx
import requests
from simulate import run
from tollgate.httpx import AsyncPoliteTransport, PoliteTransport, Throttled
from tollgate.requests import PoliteAdapter, Politeness


class LimitedApi:
    """An API of 10 requests a second in fixed windows. ``script`` answers first, in order."""

    def __init__(self, script=()):
        self.statuses: list[int] = []
        self.methods: list[str] = []
        script = list(script)
        outer = self
        lock = threading.Lock()
        window = [0, 0]

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.rfile.read(int(self.headers.get("content-length", 0)))
                with lock:
                    now = time.time()
                    if window[0] != int(now):
                        window[:] = [int(now), 0]
                    window[1] += 1
                    fields = {"RateLimit-Policy": '"api";q=10;w=1', "RateLimit": f'"api";r={max(0, 10 - window[1])};t=1'}
                    status = 200 if window[1] <= 10 else 429
                    if script:
                        status, fields = script.pop(0)
                    outer.statuses.append(status)
                    outer.methods.append(self.command)
                if status == 0:
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in fields.items():
                    self.send_header(name, value)
                self.send_header("content-length", "0")
                self.end_headers()

            do_POST = do_GET

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = "http://127.0.0.1:%d/" % self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


def with_httpx(settings=None):
    client = httpx.Client(transport=PoliteTransport(settings=settings), timeout=30)
    return client, lambda method, url: client.request(method, url).status_code


def with_async_httpx(settings=None):
    loop = asyncio.new_event_loop()
    client = httpx.AsyncClient(transport=AsyncPoliteTransport(settings=settings), timeout=30)

    class Closer:
        def close(self):
            loop.run_until_complete(client.aclose())
            loop.close()

    return Closer(), lambda method, url: loop.run_until_complete(client.request(method, url)).status_code


def with_requests(settings=None):
    session = requests.Session()
    session.trust_env = False
    session.mount("http://", PoliteAdapter(settings))
    return session, lambda method, url: session.request(method, url, timeout=30).status_code


class PoliteTest(unittest.TestCase):
    def each(self, settings=None):
        for make in (with_httpx, with_async_httpx, with_requests):
            client, call = make(settings)
            self.addCleanup(client.close)
            yield call

    def test_a_refused_request_is_repeated_after_the_time_that_was_asked_for(self):
        for call in self.each():
            with LimitedApi([(429, {"Retry-After": "1"}), (200, {})]) as api:
                started = time.monotonic()
                self.assertEqual(call("GET", api.url), 200)
                self.assertGreaterEqual(time.monotonic() - started, 1)
                self.assertEqual(api.statuses, [429, 200])

    def test_only_idempotent_methods_are_repeated(self):
        for call in self.each():
            with LimitedApi([(503, {})]) as api:
                self.assertEqual(call("POST", api.url), 503)
                self.assertEqual(api.methods, ["POST"])
        for call in self.each(Politeness(retry_non_idempotent=True)):
            with LimitedApi([(503, {}), (200, {})]) as api:
                self.assertEqual(call("POST", api.url), 200)

    def test_a_cut_connection_is_repeated(self):
        for call in self.each():
            with LimitedApi([(0, {}), (200, {})]) as api:
                self.assertEqual(call("GET", api.url), 200)

    def test_a_wait_that_is_too_long_is_an_error_and_sends_nothing(self):
        for call in self.each(Politeness(max_wait_ms=100)):
            with LimitedApi([(429, {"Retry-After": "50"})]) as api:
                self.assertEqual(call("GET", api.url), 429)
                with self.assertRaises(Throttled):
                    call("GET", api.url)
                self.assertEqual(len(api.statuses), 1)

    def test_paces_before_the_limit(self):
        for call in self.each():
            with LimitedApi() as api:
                self.assertEqual({call("GET", api.url) for _ in range(25)}, {200})
                self.assertLessEqual(api.statuses.count(429), 2)

    def test_throttles_itself_while_most_requests_are_refused(self):
        for call in self.each(Politeness(max_retries=0, pace=False)):
            with LimitedApi([(429, {})] * 500) as api:
                rejected = 0
                for _ in range(300):
                    try:
                        call("GET", api.url)
                    except Throttled:
                        rejected += 1
                self.assertGreater(rejected, 150)
                self.assertEqual(len(api.statuses), 300 - rejected)


class SimulationTest(unittest.TestCase):
    def test_far_fewer_refusals_than_backoff_at_the_same_goodput(self):
        for seed in range(20):
            plain, polite = run("backoff", seed), run("polite", seed)
            with self.subTest(seed=seed, plain=plain, polite=polite):
                self.assertLessEqual(polite.refused, plain.refused * 0.1)
                self.assertGreaterEqual(polite.served, plain.served * 0.97)


if __name__ == "__main__":
    unittest.main()
