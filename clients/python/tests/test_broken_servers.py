"""Both clients against servers that are broken or hostile: what they send is bounded in size and time, and becomes a
fault, never an allowance or an exception."""

from __future__ import annotations

import contextlib
import json
import pathlib
import socket
import sys
import threading
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from servers import FaultyServer
from test_client import Loop

from tollgate import Client, _core, _guard
from tollgate import client as sync_client

ALLOWED = b'{"allowed":true,"limits":[],"decision_id":"d","origin":"unmatched"}'
HEAD = b"HTTP/1.1 200 OK\r\n"


def whole(body: bytes) -> bytes:
    return HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body)


class RawServer:
    """Writes bytes of its own to all who send something: ``first``, then ``again`` until the other side has gone."""

    def __init__(self, first: bytes, again: bytes = b"", pause: float = 0, ends: bool = False) -> None:
        self._first, self._again, self._pause, self._ends = first, again, pause, ends
        self._stopped = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d" % self._listener.getsockname()[1]
        self.asked = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while connection.recv(65_536):
                self.asked += 1
                connection.sendall(self._first)
                while self._again and not self._stopped.wait(self._pause):
                    connection.sendall(self._again)
                if self._ends:
                    return

    def stop(self) -> None:
        self._stopped.set()
        self._listener.close()


class BrokenServersTest(unittest.TestCase):
    kind = Client

    def ask(self, server, **settings):
        self.addCleanup(server.stop)
        client = self.kind(server.url, "test", **{"fail": "closed", "timeout_ms": 10_000, **settings})
        self.addCleanup(client.close)
        return client.limit("x")

    def test_what_is_too_large_or_malformed_is_a_fault(self):
        digits, chunked, spaces = b"9" * 5_000, HEAD + b"transfer-encoding: chunked\r\n\r\n", b" " * 16_384
        servers = {
            "a body without end": RawServer(HEAD + b"\r\n", spaces),
            "a length of many digits": RawServer(HEAD + b"content-length: %s\r\n\r\n" % digits),
            "a negative length": RawServer(HEAD + b"content-length: -1\r\n\r\n"),
            "a length beyond the bound": RawServer(HEAD + b"content-length: 99999999999\r\n\r\n", spaces),
            "chunks without end": RawServer(chunked, b"4000\r\n%s\r\n" % spaces),
            "a chunk of many digits": RawServer(chunked + b"%s\r\n" % digits),
            "a chunk of a negative size": RawServer(chunked + b"-2\r\n\r\n"),
            "a size with an underscore": RawServer(chunked + b"1_0\r\n"),
            "a trailer without end": RawServer(chunked + b"0\r\nx: ", b"x" * 16_384),
            "fields without end": RawServer(HEAD, b"x-field: 1\r\n" * 1_000),
            "a field without end": RawServer(HEAD + b"x-field: ", b"x" * 16_384),
            "a line break inside of a field": RawServer(HEAD + b"ratelimit: a\nx: b\r\ncontent-length: 0\r\n\r\n"),
            "not HTTP": RawServer(b"SSH-2.0-x\r\n\r\n"),
            "an integer of many digits": RawServer(whole(ALLOWED[:-1] + b',"delay_ms":%s}' % digits)),
            "lists without end": RawServer(whole(b'{"allowed":' + b"[" * 60_000)),
            "a connection that ends inside of the body": RawServer(whole(ALLOWED)[:-5], ends=True),
        }
        for name, server in servers.items():
            with self.subTest(name):
                result = self.ask(server)
                reason = "unreachable" if name.startswith("a connection") else "invalid_response"
                self.assertEqual((result.allowed, result.source, result.reason), (False, "policy", reason))

    def test_interim_responses_come_before_the_answer(self):
        hints = b"HTTP/1.1 103 Early Hints\r\ncontent-length: 7\r\ntransfer-encoding: chunked\r\n\r\n" * 3
        result = self.ask(RawServer(hints + whole(ALLOWED)))
        self.assertEqual((result.allowed, result.reason), (True, "unmatched"))

    def test_interim_responses_and_drips_do_not_prolong_the_deadline(self):
        interim = RawServer(b"", b"HTTP/1.1 102 Processing\r\n\r\n")
        for server in (interim, RawServer(HEAD + b"content-length: 60000\r\n\r\n", b" ", 0.005)):
            self.assertEqual(self.ask(server, timeout_ms=100).reason, "timeout")

    def test_redirects_are_not_followed(self):
        other = RawServer(whole(ALLOWED))
        self.addCleanup(other.stop)
        redirect = b"HTTP/1.1 307 x\r\nlocation: %s/v1/check\r\ncontent-length: 0\r\n\r\n" % other.url.encode()
        self.assertEqual(self.ask(RawServer(redirect), token="secret").reason, "invalid_response")
        self.assertEqual(other.asked, 0)

    def test_a_denial_of_ten_years_is_asked_for_again(self):
        years = 315_360_000_000
        body = {"allowed": False, "retry_after_ms": years, "limits": [], "decision_id": "d", "origin": "emergency"}
        server = FaultyServer((429, json.dumps(body)))
        self.addCleanup(server.stop)
        client = self.kind(server.url, "test", timeout_ms=10_000)
        self.addCleanup(client.close)
        self.assertEqual(client.wait("x", timeout_ms=1_000).retry_after_ms, years)
        pauses = []

        def sleep(seconds):
            pauses.append(seconds)
            raise KeyboardInterrupt

        with mock.patch("time.sleep", sleep), mock.patch("asyncio.sleep", sleep), self.assertRaises(KeyboardInterrupt):
            client.wait("x", timeout_ms=10 * years)
        self.assertEqual(pauses, [3_600])

    def test_an_overloaded_server_is_asked_again_after_its_time(self):
        body = {"allowed": False, "denied_by": "login", "retry_after_ms": 1_000, "limits": [], "decision_id": "d"}
        body.update(origin="fail_closed", shed="security")
        server, faults = FaultyServer((503, json.dumps(body))), []
        self.addCleanup(server.stop)
        client = self.kind(server.url, "test", timeout_ms=10_000, on_fault=lambda *fault: faults.append(fault))
        self.addCleanup(client.close)
        for asked in (1, 2):
            result = client.limit("x")
            self.assertEqual((result.shed, result.reason, result.source), (True, "shed", "server"))
            self.assertEqual((result.retry_after_ms, len(server.asked)), (1_000, asked))
        self.assertEqual(faults, [])
        head = _guard.Head("GET", "/", "127.0.0.1", [])
        refusal = _guard._denial(head, _core.Checked(result, (("retry-after", "soon"),)))
        self.assertEqual((refusal.status, dict(refusal.fields)["retry-after"]), (503, "1"))


class AsyncBrokenServersTest(BrokenServersTest):
    kind = Loop


class BoundsTest(unittest.TestCase):
    def test_callers_do_not_choose_how_much_is_remembered(self):
        core = _core.Core("http://127.0.0.1:1", "test")
        self.assertTrue(core.order("x" * 4_000, 1, None).may_fill_cache)
        self.assertFalse(core.order("x" * 5_000, 1, None).may_fill_cache)
        head = _guard.Head("X" * 9_000, "/" + "y" * 9_000, "127.0.0.1", [])
        self.assertEqual(_guard.endpoint(head), "* /*")

    def test_every_address_of_a_host_has_the_same_deadline(self):
        listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(listener.close)
        address = listener.getsockname()
        ways = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", each) for each in (("127.0.0.1", 1), address)]
        left = mock.Mock(side_effect=[1.0, 1.0])
        server = _core.Server.parse("http://host.invalid:80", token=None, headers={}, context=None)
        with mock.patch("socket.getaddrinfo", return_value=ways), mock.patch.object(sync_client, "_left", left):
            connection = sync_client._connect(server, 5.0)
        self.addCleanup(connection.close)
        self.assertEqual((connection.getpeername(), left.call_args_list), (address, [mock.call(5.0)] * 2))

    def test_host_names_are_checked_at_once(self):
        with self.assertRaises(ValueError):
            Client("http://a..b:80", "test")


if __name__ == "__main__":
    unittest.main()
