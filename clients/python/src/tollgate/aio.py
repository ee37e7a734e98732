"""The asynchronous client, on asyncio alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterable
from typing import Any, Optional, Union

from . import _answers
from ._answers import Fault
from ._core import LATE_MS, MAX_PAUSE_MS, Attempt, Call, Checked, Core, Order, Reply, Subject, now_ms
from ._http1 import Response, ResponseParser, Server
from .result import Ended, Result

__all__ = ["AsyncClient", "AsyncReservation"]

_IDLE = 32
_Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class AsyncReservation:
    """An estimated charge. As a context manager it is canceled unless it was settled inside."""

    def __init__(self, client: AsyncClient, checked: Checked, order: Order) -> None:
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

    async def settle(self, cost: int) -> Ended:
        """Replaces the estimate by the actual cost."""
        return await self._end("/v1/settle", {"cost": cost})

    async def cancel(self) -> Ended:
        """Refunds everything."""
        return await self._end("/v1/cancel", {})

    async def _end(self, path: str, more: dict[str, Any]) -> Ended:
        if self.id is None:
            return Ended(None, reason="unknown")
        self._is_ended = True
        ended = await self._client._end(path, self._server, {"reservation": self.id, **more})
        self._client._core.forget(self._order)
        return ended

    async def __aenter__(self) -> AsyncReservation:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._is_ended:
            await self.cancel()


class AsyncClient:
    """As `tollgate.Client`, for one event loop."""

    def __init__(self, url: Union[str, Iterable[str]], domain: str, **settings: Any) -> None:
        self._core = Core(url if isinstance(url, str) else list(url), domain, **settings)
        self._idle: list[list[_Connection]] = [[] for _ in self._core.servers]
        self._tasks: set[asyncio.Task[Any]] = set()

    async def limit(self, subject: Subject, *, cost: int = 1, deadline_ms: Optional[int] = None) -> Result:
        """Charges ``cost`` units if every matching limit allows it."""
        return (await self._check(self._core.order(subject, cost, deadline_ms))).result

    async def peek(self, subject: Subject, *, deadline_ms: Optional[int] = None) -> Result:
        """As `limit`, without charging anything."""
        return await self.limit(subject, cost=0, deadline_ms=deadline_ms)

    async def limit_batch(self, subjects: Iterable[Union[Subject, tuple[Subject, int]]]) -> list[Result]:
        """Checks several requests at the same time; a pair is a subject and its cost."""
        slots = asyncio.Semaphore(_IDLE)

        async def one(subject: Subject, cost: int) -> Result:
            async with slots:
                return await self.limit(subject, cost=cost)

        calls = [each if isinstance(each, tuple) else (each, 1) for each in subjects]
        return list(await asyncio.gather(*(one(subject, cost) for subject, cost in calls)))

    async def wait(self, subject: Subject, *, timeout_ms: int, cost: int = 1) -> Result:
        """Waits until the request is allowed, at most ``timeout_ms``; a denial that lasts longer is returned at once."""
        end = now_ms() + timeout_ms
        while True:
            result = await self.limit(subject, cost=cost)
            if result.allowed or result.retry_after_ms is None:
                return result
            pause = max(1, result.retry_after_ms)
            if now_ms() + pause > end:
                return result
            await asyncio.sleep(min(pause, MAX_PAUSE_MS) / 1000)

    async def reserve(
        self,
        subject: Subject,
        *,
        cost: int = 1,
        ttl_ms: Optional[int] = None,
        idempotency_key: Optional[str] = None,
        deadline_ms: Optional[int] = None,
    ) -> AsyncReservation:
        """Charges an estimate, to be settled or canceled."""
        order = self._core.order(
            subject, cost, deadline_ms, reserve=True, ttl_ms=ttl_ms, idempotency_key=idempotency_key
        )
        return AsyncReservation(self, await self._check(order), order)

    async def reset(self, api_key: str, *, reason: str = "reset by the client") -> None:
        """Sets an API key's usage to zero, through the admin API (``admin_url``, ``admin_token``)."""
        if self._core.admin is None:
            raise ValueError("no admin API; write admin_url=... and admin_token=...")
        request = self._core.admin.request(self._core.reset_path(api_key), json.dumps({"reason": reason}).encode())
        response = await asyncio.wait_for(self._exchange(self._core.admin, None, request), 10)
        if response.status != 200:
            text = response.body[:200].decode("utf-8", "replace")
            raise RuntimeError(f"the usage was not reset: {response.status} {text}")
        self._core.cache.clear()

    def clear_deny_cache(self) -> None:
        """Forgets cached denials, for example after a limit was raised."""
        self._core.cache.clear()

    async def close(self) -> None:
        """Waits for charges that are being given back, and closes all connections."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for idle in self._idle:
            while idle:
                _close(idle.pop())

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _check(self, order: Order) -> Checked:
        started = now_ms()
        cached = self._core.cached(order, started)
        if cached is not None:
            return cached
        if order.path == "/v1/reserve":
            return await self._reserved(order, started)
        checked: Checked = await self._run(self._core.ask(order, started))
        return checked

    async def _end(self, path: str, server: int, document: dict[str, Any]) -> Ended:
        ended: Ended = await self._run(self._core.end(path, server, document))
        return ended

    async def _run(self, call: Call) -> Any:
        try:
            attempt = next(call)
            while True:
                attempt = call.send(await self._attempt(attempt))
        except StopIteration as done:
            return done.value

    async def _attempt(self, attempt: Attempt) -> Reply:
        server = self._core.servers[attempt.server]
        request = server.request(attempt.path, attempt.body)
        exchange = self._exchange(server, self._idle[attempt.server], request)
        try:
            return await asyncio.wait_for(exchange, attempt.timeout_ms / 1000)
        except Fault as fault:
            return fault
        except (TimeoutError, asyncio.TimeoutError):
            return Fault(_answers.TIMEOUT)

    async def _exchange(self, server: Server, idle: Optional[list[_Connection]], request: bytes) -> Response:
        while True:
            is_new = not idle
            if idle:
                connection = idle.pop()
            else:
                try:
                    connection = await asyncio.open_connection(server.host, server.port, ssl=server.tls)
                except OSError:
                    raise Fault(_answers.UNREACHABLE) from None
            reader, writer = connection
            parser = ResponseParser()
            is_kept = False
            try:
                writer.write(request)
                response = None
                while response is None:
                    response = parser.feed(await reader.read(65_536))
                is_kept = response.keeps_alive
                return response
            except (OSError, Fault) as error:
                # A connection that was closed while it was idle has charged nothing: the request goes over a new one.
                if not is_new and parser.is_untouched:
                    continue
                if isinstance(error, Fault):
                    raise
                raise Fault(_answers.UNREACHABLE) from None
            finally:
                if is_kept and idle is not None and len(idle) < _IDLE:
                    idle.append(connection)
                else:
                    _close(connection)

    async def _reserved(self, order: Order, started: int) -> Checked:
        """Asks a second server if the first is slow; what a slower or late answer charged is given back."""
        hedge = self._core.hedge(order, started)
        answers: asyncio.Queue[tuple[int, Union[Checked, Fault]]] = asyncio.Queue()
        is_decided = False
        used: Optional[str] = None

        async def send(server: int) -> None:
            attempt = Attempt(server, order.path, order.body, order.deadline_ms + LATE_MS)
            sent = time.monotonic_ns()
            outcome = self._core.decode(server, await self._attempt(attempt))
            self._core.measured(hedge, server, sent, outcome)
            if is_decided:
                await self._give_back(outcome, used)
            else:
                answers.put_nowait((server, outcome))

        def start(server: Optional[int]) -> None:
            if server is not None:
                self._spawn(send(server))

        start(hedge.start())
        reason = _answers.TIMEOUT
        found: dict[int, Checked] = {}
        try:
            while not hedge.is_over:
                now, end = now_ms() - started, order.deadline_ms
                if now >= end:
                    hedge.deadline()
                    break
                until = end if hedge.ask_next_ms is None else min(end, hedge.ask_next_ms)
                try:
                    server, outcome = await asyncio.wait_for(answers.get(), max(0.0, (until - now) / 1000))
                except (TimeoutError, asyncio.TimeoutError):
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
            used = checked.result.reservation
            return checked
        finally:
            is_decided = True
            while not answers.empty():
                self._spawn(self._give_back(answers.get_nowait()[1], used))

    async def _give_back(self, outcome: Union[Checked, Fault], used: Optional[str]) -> None:
        # With one idempotency key, servers that share a store return one reservation.
        if isinstance(outcome, Checked) and outcome.result.reservation and outcome.result.reservation != used:
            await self._end("/v1/cancel", outcome.server, {"reservation": outcome.result.reservation})

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _close(connection: _Connection) -> None:
    with contextlib.suppress(Exception):
        connection[1].close()
