"""Both clients through a proxy that misbehaves, before a real server: what is decided, and what is charged."""

from __future__ import annotations

import contextlib
import pathlib
import socket
import sys
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from servers import Tollgate
from test_client import Loop

from tollgate import Client

#: What a fault is to the client.
FAULTS = {
    "slow": "timeout",
    "cut": "unreachable",
    "cut_answer": "unreachable",
    "wrong_json": "invalid_response",
    "unavailable": "unavailable",
}


class FaultyProxy:
    """Passes requests on to a server, and does to the answers what ``fault`` says."""

    def __init__(self, port: int) -> None:
        self.fault: str | None = None
        #: Lets answers that are held back pass.
        self.go_on = threading.Event()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d" % self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, socket.create_connection(("127.0.0.1", self._port)) as server:
            while data := connection.recv(65_536):
                if self.fault == "cut":
                    return
                server.sendall(data)
                answer = server.recv(65_536)
                if self.fault == "slow":
                    self.go_on.wait(20)
                elif self.fault == "cut_answer":
                    connection.sendall(answer[: len(answer) // 2])
                    return
                elif self.fault == "wrong_json":
                    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{\"allowed\":tru}"
                elif self.fault == "unavailable":
                    answer = b"HTTP/1.1 503 x\r\ncontent-length: 4\r\n\r\nbusy"
                connection.sendall(answer)

    def stop(self) -> None:
        self.go_on.set()
        self._listener.close()


class ProxyTest(unittest.TestCase):
    kind = Client

    @classmethod
    def setUpClass(cls):
        cls.server = Tollgate()

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def setUp(self):
        self.proxy = FaultyProxy(self.server.port)
        self.addCleanup(self.proxy.stop)

    def client(self, *urls, **settings):
        client = self.kind(list(urls), "test", **{"timeout_ms": 400, **settings})
        self.addCleanup(client.close)
        return client

    def test_the_fail_policy_decides_and_tells_the_fault(self):
        for policy in ("open", "closed"):
            for fault, reason in FAULTS.items():
                with self.subTest(fault, policy=policy):
                    self.proxy.fault = fault
                    result = self.client(self.proxy.url, fail=policy).limit("k")
                    self.assertEqual((result.source, result.reason), ("policy", reason))
                    self.assertEqual(result.allowed, policy == "open")

    def test_the_next_server_answers(self):
        for fault in FAULTS:
            with self.subTest(fault):
                self.proxy.fault = fault
                faults = []
                client = self.client(
                    self.proxy.url, self.server.url, timeout_ms=4_000, on_fault=lambda *told: faults.append(told)
                )
                self.assertEqual([client.limit("k").source for _ in range(2)], ["server"] * 2)
                self.assertEqual(faults, [(self.proxy.url, FAULTS[fault])], "the second call goes to the other server first")

    def test_a_proxy_that_recovers_is_used_again(self):
        client = self.client(self.proxy.url, timeout_ms=4_000)
        for fault in ("cut", "unavailable", None):
            self.proxy.fault = fault
            result = client.limit("k")
        self.assertEqual(result.source, "server")

    def test_a_reservation_that_is_answered_too_late_is_given_back(self):
        self.proxy.fault = "slow"
        user = {"user": self.id()}
        client = self.client(self.proxy.url)
        self.assertEqual(client.reserve(user, cost=3).result.reason, "timeout")
        self.proxy.fault = None
        self.proxy.go_on.set()
        client.close()
        self.assertEqual(self.client(self.server.url, timeout_ms=5_000).peek(user).remaining, 3)


class AsyncProxyTest(ProxyTest):
    kind = Loop


if __name__ == "__main__":
    unittest.main()
