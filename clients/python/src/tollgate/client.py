"""The synchronous client."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional, Union

from . import _answers
from ._answers import Fault
from ._core import LATE_MS, MAX_PAUSE_MS, Attempt, Call, Checked, Core, Order, Reply, Subject, now_ms
from ._http1 import Response, ResponseParser, Server
from .result import Ended, Result

__all__ = ["Client", "Reservation"]

_IDLE = 32


class Reservation:
    """An estimated charge. As a context manager it is canceled unless it was settled inside."""

    def __init__(self, client: Client, checked: Checked, order: Order) -> None:
        self.result = checked.result
        self.id = checked.result.reservation
        self._client = client
        self._order = order
        self._server = checked.server
        self._is_ended = self.id is None

    @property
    def allowed(self) -> bool:
        """Whether the work may begin."""
        return self.result.allowed

    def __bool__(self) -> bool:
        return self.result.allowed

    def settle(self, cost: int) -> Ended:
        """Replaces the estimate by the actual cost."""
        return self._end("/v1/settle", {"cost": cost})

    def cancel(self) -> Ended:
        """Refunds everything."""
        return self._end("/v1/cancel", {})

    def _end(self, path: str, more: dict[str, Any]) -> Ended:
        if self.id is None:
            return Ended(None, reason="unknown")
        self._is_ended = True
        ended = self._client._end(path, self._server, {"reservation": self.id, **more})
        self._client._core.forget(self._order)
        return ended

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._is_ended:
            self.cancel()


class Client:
    """Asks Tollgate servers whether requests may pass. Safe to share between threads.

    `limit` never raises for what a server or the network does: the fail policy decides then, and the result says so.

    :param url: base URL of a server's HTTP API, or of several in the order in which to ask them
    :param domain: domain of the rules
    :param attribute: attribute that an identifier is the value of
    :param timeout_ms: time for an answer, all servers together
    :param fail: ``open`` allows and ``closed`` denies if there is no answer
    :param hedge_after_ms: asks a second server if the first has not answered by then, for at most a tenth of the calls;
        ``"p95"`` is the 95th percentile of the latency that this client measures, and ``None`` is off
    :param deny_cache: denials that this process repeats by itself; 0 asks every time
    :param token: bearer token for the servers, or for a proxy before them
    :param ssl_context: certificates for ``https://``
    :param on_fault: called with URL and reason for each server that could not be used
    """

    def __init__(self, url: Union[str, Iterable[str]], domain: str, **settings: Any) -> None:
        self._core = Core(url if isinstance(url, str) else list(url), domain, **settings)
        self._idle: list[queue.SimpleQueue[socket.socket]] = [queue.SimpleQueue() for _ in self._core.servers]
        self._pool: Optional[ThreadPoolExecutor] = None
        self._lock = threading.Lock()
        _clients.add(self)

    def limit(self, subject: Subject, *, cost: int = 1, deadline_ms: Optional[int] = None) -> Result:
        """Charges ``cost`` units if every matching limit allows it."""
        return self._check(self._core.order(subject, cost, deadline_ms)).result

    def peek(self, subject: Subject, *, deadline_ms: Optional[int] = None) -> Result:
        """As `limit`, without charging anything."""
        return self.limit(subject, cost=0, deadline_ms=deadline_ms)

    def limit_batch(self, subjects: Iterable[Union[Subject, tuple[Subject, int]]]) -> list[Result]:
        """Checks several requests at the same time; a pair is a subject and its cost."""
        calls = [each if isinstance(each, tuple) else (each, 1) for each in subjects]
        return list(self._threads().map(lambda call: self.limit(call[0], cost=call[1]), calls))

    def wait(self, subject: Subject, *, timeout_ms: int, cost: int = 1) -> Result:
        """Waits until the request is allowed, at most ``timeout_ms``; a denial that lasts longer is returned at once."""
        end = now_ms() + timeout_ms
        while True:
            result = self.limit(subject, cost=cost)
            if result.allowed or result.retry_after_ms is None:
                return result
            pause = max(1, result.retry_after_ms)
            if now_ms() + pause > end:
                return result
            time.sleep(min(pause, MAX_PAUSE_MS) / 1000)

    def reserve(
        self,
        subject: Subject,
        *,
        cost: int = 1,
        ttl_ms: Optional[int] = None,
        idempotency_key: Optional[str] = None,
        deadline_ms: Optional[int] = None,
    ) -> Reservation:
        """Charges an estimate, to be settled or canceled."""
        order = self._core.order(
            subject, cost, deadline_ms, reserve=True, ttl_ms=ttl_ms, idempotency_key=idempotency_key
        )
        return Reservation(self, self._check(order), order)

    def reset(self, api_key: str, *, reason: str = "reset by the client") -> None:
        """Sets an API key's usage to zero, through the admin API (``admin_url``, ``admin_token``)."""
        if self._core.admin is None:
            raise ValueError("no admin API; write admin_url=... and admin_token=...")
        request = self._core.admin.request(self._core.reset_path(api_key), json.dumps({"reason": reason}).encode())
        response = self._exchange(self._core.admin, None, request, time.monotonic() + 10)
        if response.status != 200:
            text = response.body[:200].decode("utf-8", "replace")
            raise RuntimeError(f"the usage was not reset: {response.status} {text}")
        self._core.cache.clear()

    def clear_deny_cache(self) -> None:
        """Forgets cached denials, for example after a limit was raised."""
        self._core.cache.clear()

    def close(self) -> None:
        """Waits for charges that are being given back, and closes all connections."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool:
            pool.shutdown()
        for idle in self._idle:
            while not idle.empty():
                idle.get_nowait().close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, order: Order) -> Checked:
        started = now_ms()
        cached = self._core.cached(order, started)
        if cached is not None:
            return cached
        if order.path == "/v1/reserve":
            return self._reserved(order, started)
        checked: Checked = self._run(self._core.ask(order, started))
        return checked

    def _end(self, path: str, server: int, document: dict[str, Any]) -> Ended:
        ended: Ended = self._run(self._core.end(path, server, document))
        return ended

    def _run(self, call: Call) -> Any:
        try:
            attempt = next(call)
            while True:
                attempt = call.send(self._attempt(attempt))
        except StopIteration as done:
            return done.value

    def _attempt(self, attempt: Attempt) -> Reply:
        server = self._core.servers[attempt.server]
        request = server.request(attempt.path, attempt.body)
        end = time.monotonic() + attempt.timeout_ms / 1000
        try:
            return self._exchange(server, self._idle[attempt.server], request, end)
        except Fault as fault:
            return fault

    def _exchange(
        self, server: Server, idle: Optional[queue.SimpleQueue[socket.socket]], request: bytes, end: float
    ) -> Response:
        while True:
            connection, is_new = self._connection(server, idle, end)
            parser = ResponseParser()
            is_kept = False
            try:
                connection.settimeout(_left(end))
                connection.sendall(request)
                response = None
                while response is None:
                    connection.settimeout(_left(end))
                    response = parser.feed(connection.recv(65_536))
                is_kept = response.keeps_alive
                return response
            except TimeoutError:
                raise Fault(_answers.TIMEOUT) from None
            except (OSError, Fault) as error:
                # A connection that was closed while it was idle has charged nothing: the request goes over a new one.
                if not is_new and parser.is_untouched:
                    continue
                if isinstance(error, Fault):
                    raise
                raise Fault(_answers.UNREACHABLE) from None
            finally:
                if is_kept and idle is not None and idle.qsize() < _IDLE:
                    idle.put(connection)
                else:
                    connection.close()

    @staticmethod
    def _connection(
        server: Server, idle: Optional[queue.SimpleQueue[socket.socket]], end: float
    ) -> tuple[socket.socket, bool]:
        if idle is not None:
            try:
                return idle.get_nowait(), False
            except queue.Empty:
                pass
        try:
            connection = _connect(server, end)
            try:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if server.tls:
                    connection.settimeout(_left(end))
                    connection = server.tls.wrap_socket(connection, server_hostname=server.host)
            except BaseException:
                connection.close()
                raise
        except TimeoutError:
            raise Fault(_answers.TIMEOUT) from None
        except OSError:
            raise Fault(_answers.UNREACHABLE) from None
        return connection, True

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(32, thread_name_prefix="tollgate")
            return self._pool

    def _reserved(self, order: Order, started: int) -> Checked:
        """Asks a second server if the first is slow; what a slower or late answer charged is given back."""
        hedge = self._core.hedge(order, started)
        answers: queue.SimpleQueue[tuple[int, Union[Checked, Fault]]] = queue.SimpleQueue()
        lock = threading.Lock()
        is_decided = False
        used: Optional[str] = None

        def send(server: int) -> None:
            attempt = Attempt(server, order.path, order.body, order.deadline_ms + LATE_MS)
            sent = time.monotonic_ns()
            outcome = self._core.decode(server, self._attempt(attempt))
            self._core.measured(hedge, server, sent, outcome)
            with lock:
                is_late = is_decided
                if not is_late:
                    answers.put((server, outcome))
            if is_late:
                self._give_back(outcome, used)

        def start(server: Optional[int]) -> None:
            if server is not None:
                self._threads().submit(send, server)

        start(hedge.start())
        reason = _answers.TIMEOUT
        found: dict[int, Checked] = {}
        while not hedge.is_over:
            now, end = now_ms() - started, order.deadline_ms
            if now >= end:
                hedge.deadline()
                break
            until = end if hedge.ask_next_ms is None else min(end, hedge.ask_next_ms)
            try:
                server, outcome = answers.get(timeout=max(0.0, (until - now) / 1000))
            except queue.Empty:
                if hedge.ask_next_ms is not None and now_ms() - started >= hedge.ask_next_ms:
                    start(self._core.ask_next(hedge))
                continue
            if isinstance(outcome, Fault):
                reason = outcome.reason
                start(hedge.fault(server))
            else:
                found[server] = outcome
                hedge.answer(server, allowed=outcome.result.allowed, denied=outcome.result.reason == "denied")
        checked = self._core.hedged(order, hedge, found, reason, started)
        with lock:
            is_decided, used = True, checked.result.reservation
        while not answers.empty():
            self._threads().submit(self._give_back, answers.get_nowait()[1], used)
        return checked

    def _give_back(self, outcome: Union[Checked, Fault], used: Optional[str]) -> None:
        # With one idempotency key, servers that share a store return one reservation.
        if isinstance(outcome, Checked) and outcome.result.reservation and outcome.result.reservation != used:
            self._end("/v1/cancel", outcome.server, {"reservation": outcome.result.reservation})


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _forget_connections() -> None:
    """After a fork: connections belong to the parent, which would receive this process's answers; threads are gone."""
    for client in list(_clients):
        client._lock, client._pool = threading.Lock(), None
        parents, client._idle = client._idle, [queue.SimpleQueue() for _ in client._idle]
        for idle in parents:
            while not idle.empty():
                idle.get_nowait().close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_connections)


def _connect(server: Server, end: float) -> socket.socket:
    """Connects to the first address that answers. `socket.create_connection` would give each address the whole time."""
    failure: OSError = OSError("no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM):
        try:
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(_left(end))
                connection.connect(address)
            except BaseException:
                connection.close()
                raise
            return connection
        except OSError as error:
            failure = error
    raise failure


def _left(end: float) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
