"""Real Tollgate servers and faulty ones, for the tests. All on loopback and free ports."""

from __future__ import annotations

import contextlib
import os
import pathlib
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request

RULES = """
domain: test
descriptors:
  - {key: user, name: per-user, limit: 3/hour, algorithm: fixed_window}
  - {key: fast, name: fast, limit: 2/second}
  - {key: api_key, name: per-key, limit: 1000000/hour}
  - {key: slot, name: slots, concurrency: 1}
  - {key: remote_address, name: per-address, limit: 5/hour}
"""


def free_ports(count: int) -> list[int]:
    """Returns different ports that nobody listens on at the moment."""
    with contextlib.ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


class Tollgate:
    """A real server with its own rules."""

    def __init__(self, rules: str | dict[str, str] = RULES, *arguments: str) -> None:
        self._directory = tempfile.TemporaryDirectory()
        path = pathlib.Path(self._directory.name)
        (path / "rules").mkdir()
        for name, text in (rules if isinstance(rules, dict) else {"rules.yaml": rules}).items():
            (path / "rules" / name).write_text(text)
        binary = os.environ.get("TOLLGATE_BINARY")
        if not binary:
            raise RuntimeError("set TOLLGATE_BINARY to a tollgate binary, or run `make clients-python-test`")
        command = [binary, "serve", "--rules", str(path / "rules"), *arguments]
        # Another process may have taken the port since.
        if not any(self._starts(command, path) for _ in range(5)):
            self._directory.cleanup()
            raise RuntimeError(f"the server does not start: {' '.join(command)}")

    def _starts(self, command: list[str], path: pathlib.Path) -> bool:
        ports = dict(zip(("http", "admin", "resp", "grpc"), free_ports(4)))
        self.port, self.admin_port, self.resp_port, _ = ports.values()
        self.url, self.admin_url = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.admin_port}"
        self._process = subprocess.Popen(
            command + [text for name, port in ports.items() for text in (f"--{name}", f"127.0.0.1:{port}")],
            cwd=path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/readyz", timeout=5) as ready:
                if ready.status == 200 and self._process.poll() is None:
                    return True
            time.sleep(0.02)
        self._process.kill()
        self._process.wait()
        return False

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()

    def __enter__(self) -> Tollgate:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class FaultyServer:
    """A server that does one thing: refused, cut, cut_body, hang, slow_body, or a response of ``(status, body)``, which
    may be a function that returns it."""

    def __init__(self, does: object) -> None:
        self.asked: list[bytes] = []
        #: Set when a request has arrived.
        self.received = threading.Event()
        #: Set when a response was sent.
        self.responded = threading.Event()
        self._does = does
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = "http://127.0.0.1:%d" % self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        if does == "refused":
            self._listener.close()
        else:
            threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                request = b""
                while b"\r\n\r\n" not in request:
                    data = connection.recv(65_536)
                    if not data:
                        return
                    request += data
                head, _, body = request.partition(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                while len(body) < length:
                    body += connection.recv(65_536)
                self.asked.append(body)
                self.received.set()
                if self._does == "cut":
                    return connection.close()
                if self._does == "hang":
                    continue
                if self._does in ("cut_body", "slow_body"):
                    connection.sendall(b'HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{"allowed":')
                    if self._does == "cut_body":
                        return connection.close()
                    continue
                status, text = self._does() if callable(self._does) else self._does
                answer = text.encode()
                connection.sendall(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%s" % (status, len(answer), answer))
                self.responded.set()

    def stop(self) -> None:
        self._listener.close()
        for connection in self._open:
            connection.close()
