"""One host's state for calling a third party's API: pacing, retries and throttling, without I/O.

A call is a generator, as in `tollgate._core`: it yields `Pause`s and `Send`s, and receives the time and the responses, so
that `tollgate.httpx` (both kinds) and `tollgate.requests` share every decision.
"""

from __future__ import annotations

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any, Optional

from ._headers import Signals, signals
from ._pacing import AdaptiveThrottle, Pacer, RetryBudget, backoff_ms

#: Methods whose repetition changes nothing (RFC 9110).
IDEMPOTENT = frozenset({"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"})
_MAX_HOSTS = 1_024
_MIN_REQUESTS = 10


class Throttled(Exception):
    """The request was not sent: the server refuses most requests, or the wait would be longer than allowed."""

    def __init__(self, host: str, reason: str, retry_after_ms: Optional[int] = None) -> None:
        super().__init__(f"{host}: {reason}")
        self.host = host
        self.reason = reason
        self.retry_after_ms = retry_after_ms


@dataclass(frozen=True)
class Pause:
    """The caller waits."""

    ms: int


@dataclass(frozen=True)
class Send:
    """The caller sends the request, and sends back a `Received`; a failed connection is ``None``."""


@dataclass(frozen=True)
class Received:
    """A response, as far as limits are concerned."""

    status: int
    headers: list[tuple[str, str]]
    response: Any


@dataclass(frozen=True)
class Politeness:
    """Settings.

    :param max_retries: retries of one request, beside the budget of all
    :param max_wait_ms: longest pause before a request; a longer one raises `Throttled`
    :param retry_non_idempotent: also retries POST and PATCH
    :param pace: spreads what remains over the time to the reset
    :param throttle: rejects locally while the server refuses most requests
    """

    max_retries: int = 3
    max_wait_ms: int = 60_000
    retry_non_idempotent: bool = False
    pace: bool = True
    throttle: bool = True


class _Host:
    def __init__(self) -> None:
        self.pacer = Pacer()
        self.budget = RetryBudget()
        self.throttle = AdaptiveThrottle()


Call = Generator[Any, Any, Any]


class PoliteCaller:
    """State of all hosts, bounded; safe to share between threads."""

    def __init__(self, settings: Optional[Politeness] = None) -> None:
        self._settings = settings or Politeness()
        self._hosts: OrderedDict[str, _Host] = OrderedDict()
        self._lock = threading.Lock()

    def _host(self, name: str) -> _Host:
        host = self._hosts.pop(name, None) or _Host()
        self._hosts[name] = host
        if len(self._hosts) > _MAX_HOSTS:
            self._hosts.popitem(last=False)
        return host

    def call(self, name: str, method: str, is_repeatable: bool) -> Call:
        """Sends one request with its retries; returns the last response, or ``None`` if the connection failed."""
        settings = self._settings
        may_retry = is_repeatable and (settings.retry_non_idempotent or method.upper() in IDEMPOTENT)
        with self._lock:
            host = self._host(name)
            host.budget.request()
        attempt = 0
        while True:
            received: Optional[Received] = None
            said = None
            throttled: Optional[Throttled] = None
            with self._lock:
                now = _monotonic_ms()
                if settings.throttle and random.random() < self._rejection(host, now):
                    host.throttle.request(now)
                    throttled = Throttled(name, "it refuses most requests; try again later")
                    delay = 0
                else:
                    delay = host.pacer.send(now) if settings.pace else max(0, host.pacer.blocked_until_ms - now)
                    if delay > settings.max_wait_ms:
                        host.pacer.failed()
                        raise Throttled(name, f"it allows no request for {delay} ms", delay)
            if throttled is None:
                if delay:
                    yield Pause(delay)
                try:
                    received = yield Send()
                finally:
                    said = self._record(host, received)
                if said is not None and not said.refused and received is not None and received.status not in (502, 504):
                    return received
            with self._lock:
                wait = backoff_ms(attempt, random.random(), said.wait_ms if said else None)
                is_last = not may_retry or attempt >= settings.max_retries or wait > settings.max_wait_ms
                if is_last or not host.budget.retry():
                    if throttled is not None:
                        raise throttled
                    return received
            yield Pause(wait)
            attempt += 1

    @staticmethod
    def _rejection(host: _Host, now: int) -> float:
        """Returns the probability of a local rejection; a few requests are too few to judge by."""
        probability = host.throttle.probability(now)
        return probability if host.throttle.requests >= _MIN_REQUESTS else 0.0

    def _record(self, host: _Host, received: Optional[Received]) -> Optional[Signals]:
        with self._lock:
            now = _monotonic_ms()
            # Counted now, so that requests under way are not taken for refused.
            host.throttle.request(now)
            if received is None:
                host.pacer.failed()
                return None
            said = signals(received.status, received.headers, int(time.time() * 1000))
            host.pacer.response(now, said, random.random())
            if not said.refused:
                host.throttle.accept(now)
            return said


def drive(call: Call, send: Callable[[], Received], failures: type[Exception]) -> Any:
    """Runs a call synchronously; returns its last response, or raises the failure of its connection.

    :param send: sends the request once
    :param failures: what it raises if the connection fails
    """
    reply: Optional[Received] = None
    failure: Optional[Exception] = None
    try:
        step = next(call)
        while True:
            if isinstance(step, Pause):
                time.sleep(step.ms / 1000)
                step = call.send(None)
                continue
            if reply is not None:
                reply.response.close()
            reply, failure = None, None
            try:
                reply = send()
            except failures as error:
                failure = error
            step = call.send(reply)
    except StopIteration as done:
        if failure is not None:
            raise failure from None
        return done.value.response


def _monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def lines(headers: Iterable[tuple[Any, Any]]) -> list[tuple[str, str]]:
    """Returns header lines as text."""
    return [(_text(name), _text(value)) for name, value in headers]


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
