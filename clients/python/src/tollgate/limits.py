"""Storage for `limits <https://limits.readthedocs.io>`_, and so for Flask-Limiter and slowapi: ``tollgate://host:port``.

>>> import tollgate.limits  # registers the scheme
>>> from limits.storage import storage_from_string
>>> storage = storage_from_string("tollgate://127.0.0.1:8080")
>>> asynchronous = storage_from_string("async+tollgate://127.0.0.1:8080")

The library's own limit goes with each check (an inline limit), so its configuration stays where it is, and all processes
share one counter. Inline limits use their domain's algorithm, so each strategy has a domain: ``limits``
(``fixed_window``), ``limits-moving`` (``sliding_log``) and ``limits-sliding`` (``sliding_window``).

A fixed window is counted under a limit that is never reached, because ``incr`` has no limit to pass on: the strategy
compares the count itself. The other two are decided by the server, atomically.

Counters of inline limits cannot be set to zero, so ``clear`` and ``reset`` begin new ones: a number that is part of the
counter's name is kept on the server and read in the same call. Rejected: such a number in each process, which others
would not see.
"""

from __future__ import annotations

from typing import Any, Optional, TypeVar

from limits.aio.storage import MovingWindowSupport as AsyncMovingWindowSupport
from limits.aio.storage import SlidingWindowCounterSupport as AsyncSlidingWindowCounterSupport
from limits.aio.storage import Storage as AsyncStorage
from limits.storage import MovingWindowSupport, SlidingWindowCounterSupport, Storage

from ._limits import FIXED, KINDS, Counters, Steps, TollgateError, settings_of
from .aio import AsyncClient
from .client import Client

__all__ = ["AsyncTollgateStorage", "TollgateError", "TollgateStorage"]

V = TypeVar("V")


class TollgateStorage(Storage, MovingWindowSupport, SlidingWindowCounterSupport):
    """Counters on Tollgate servers.

    :param uri: ``tollgate://HOST:PORT``, or ``tollgates://`` for TLS; several servers are separated by commas. A path is
        the domain (``limits`` if there is none), a user name the bearer token
    :param timeout_ms: time for an answer, all servers together; a query parameter of the URI does the same
    """

    STORAGE_SCHEME = ["tollgate", "tollgates"]

    def __init__(self, uri: str, wrap_exceptions: bool = False, **options: Any) -> None:
        super().__init__(uri, wrap_exceptions=wrap_exceptions)
        urls, domain, settings = settings_of(uri, options)
        self._clients = {kind: Client(urls, domain + kind, **settings) for kind in KINDS}
        self._counters = Counters(domain)

    def _run(self, steps: Steps[V]) -> V:
        try:
            kind, descriptors = next(steps)
            while True:
                kind, descriptors = steps.send(self._clients[kind].limit({"descriptors": descriptors}))
        except StopIteration as done:
            value: V = done.value
            return value

    @property
    def base_exceptions(self) -> type[Exception]:
        return TollgateError

    def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        """Returns the new count."""
        return self._run(self._counters.incr(key, expiry, amount))

    def get(self, key: str) -> int:
        return self._run(self._counters.get(key))

    def get_expiry(self, key: str) -> float:
        return self._run(self._counters.get_expiry(key))

    def check(self) -> bool:
        """Whether a server answers."""
        return self._clients[FIXED].peek("check").source == "server"

    def reset(self) -> Optional[int]:
        """Begins new counters for every key."""
        return self._run(self._counters.reset())

    def clear(self, key: str) -> None:
        """Begins a new counter for a key."""
        self._run(self._counters.clear(key))

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        return self._run(self._counters.acquire_entry(key, limit, expiry, amount))

    def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        return self._run(self._counters.get_moving_window(key, limit, expiry))

    def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        return self._run(self._counters.acquire_sliding_window_entry(key, limit, expiry, amount))

    def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        return self._run(self._counters.get_sliding_window(key, expiry))

    def clear_sliding_window(self, key: str, expiry: int) -> None:
        self._run(self._counters.clear_sliding_window(key))


class AsyncTollgateStorage(AsyncStorage, AsyncMovingWindowSupport, AsyncSlidingWindowCounterSupport):
    """As `TollgateStorage`, for `limits.aio` and one event loop: ``async+tollgate://HOST:PORT``."""

    STORAGE_SCHEME = ["async+tollgate", "async+tollgates"]

    def __init__(self, uri: str, wrap_exceptions: bool = False, **options: Any) -> None:
        super().__init__(uri, wrap_exceptions=wrap_exceptions)
        urls, domain, settings = settings_of(uri, options)
        self._clients = {kind: AsyncClient(urls, domain + kind, **settings) for kind in KINDS}
        self._counters = Counters(domain)

    async def _run(self, steps: Steps[V]) -> V:
        try:
            kind, descriptors = next(steps)
            while True:
                kind, descriptors = steps.send(await self._clients[kind].limit({"descriptors": descriptors}))
        except StopIteration as done:
            value: V = done.value
            return value

    async def close(self) -> None:
        """Closes all connections."""
        for client in self._clients.values():
            await client.close()

    @property
    def base_exceptions(self) -> type[Exception]:
        return TollgateError

    async def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        """Returns the new count."""
        return await self._run(self._counters.incr(key, expiry, amount))

    async def get(self, key: str) -> int:
        return await self._run(self._counters.get(key))

    async def get_expiry(self, key: str) -> float:
        return await self._run(self._counters.get_expiry(key))

    async def check(self) -> bool:
        """Whether a server answers."""
        return (await self._clients[FIXED].peek("check")).source == "server"

    async def reset(self) -> Optional[int]:
        """Begins new counters for every key."""
        return await self._run(self._counters.reset())

    async def clear(self, key: str) -> None:
        """Begins a new counter for a key."""
        await self._run(self._counters.clear(key))

    async def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        return await self._run(self._counters.acquire_entry(key, limit, expiry, amount))

    async def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        return await self._run(self._counters.get_moving_window(key, limit, expiry))

    async def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        return await self._run(self._counters.acquire_sliding_window_entry(key, limit, expiry, amount))

    async def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        return await self._run(self._counters.get_sliding_window(key, expiry))

    async def clear_sliding_window(self, key: str, expiry: int) -> None:
        await self._run(self._counters.clear_sliding_window(key))
