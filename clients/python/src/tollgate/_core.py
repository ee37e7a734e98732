"""What both clients do, without I/O: which request is sent to which server, and what its answer means.

A call is a generator. It yields `Attempt`s and receives responses or faults, so that failover, deadlines, the deny cache
and the fail policy are written once for `Client` and `AsyncClient`.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Optional, Union
from urllib.parse import quote

from . import _answers
from ._answers import Fault
from ._deny_cache import MAX_ENTRIES, MAX_KEY, DenyCache
from ._failover import Failover, Hedge, attempt_ms, deadline_ms
from ._http1 import Response, Server
from ._latency import LatencyP95
from ._pacing import RetryBudget
from .result import Ended, Result

#: A caller's identifier, attributes, descriptors as Envoy sends them (``{"descriptors": [...]}``), or the head of a
#: request whose caller the server identifies (``{"request": {"method", "target", "peer", "headers"}}``).
Subject = Union[str, Mapping[str, Any]]

#: The longest pause before a denied request is asked for again; what `time.sleep` takes has a bound, too.
MAX_PAUSE_MS = 3_600_000
#: How long a hedged reservation waits for its cancellation; then it stands, as a check's charge does.
HEDGE_TTL_MS = 10_000
#: How long a request goes on after the deadline if its charge would have to be given back.
LATE_MS = 1_000


def now_ms() -> int:
    """Returns monotonic time in milliseconds."""
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True)
class Attempt:
    """One request to one server."""

    server: int
    path: str
    body: bytes
    timeout_ms: int


Reply = Union[Response, Fault]
Call = Generator[Attempt, Reply, Any]


@dataclass(frozen=True)
class Checked:
    """A result with the fields that the response of a guarded request carries, and the server that decided."""

    result: Result
    fields: tuple[tuple[str, str], ...] = ()
    server: int = 0


@dataclass(frozen=True)
class Order:
    """A check or reservation that is to be asked."""

    path: str
    body: bytes
    key: tuple[Any, ...]
    cost: int
    deadline_ms: int
    #: When a reservation asks its second server: after the first one's share of the deadline, or sooner if it is hedged.
    share_ms: int
    hedge_after_ms: Optional[float]
    may_use_cache: bool
    may_fill_cache: bool


class Core:
    """Settings and shared state of a client."""

    def __init__(
        self,
        url: Union[str, Sequence[str]],
        domain: str,
        *,
        attribute: str = "api_key",
        timeout_ms: int = 50,
        fail: str = "open",
        hedge_after_ms: Union[float, Literal["p95"], None] = None,
        deny_cache: int = MAX_ENTRIES,
        token: Optional[str] = None,
        headers: Optional[Mapping[str, str]] = None,
        ssl_context: Optional[ssl.SSLContext] = None,
        admin_url: Optional[str] = None,
        admin_token: Optional[str] = None,
        on_fault: Optional[Callable[[str, str], None]] = None,
    ) -> None:
        self.urls = [url] if isinstance(url, str) else list(url)
        if not self.urls:
            raise ValueError("no server; write url='http://127.0.0.1:8080'")
        if not domain:
            raise ValueError("no domain; write the domain of a rule file")
        if fail not in ("open", "closed"):
            raise ValueError(f"fail={fail!r} is unknown; write 'open' or 'closed'")
        if timeout_ms <= 0:
            raise ValueError("timeout_ms is not positive; write milliseconds, such as 50")
        if hedge_after_ms not in (None, "p95") and not _is_time(hedge_after_ms):
            raise ValueError(f"hedge_after_ms={hedge_after_ms!r} is no time; write milliseconds, such as 3, or 'p95'")
        self.servers = [
            Server.parse(each, token=token, headers=headers or {}, context=ssl_context) for each in self.urls
        ]
        self.admin = (
            Server.parse(admin_url, token=admin_token, headers={}, context=ssl_context) if admin_url else None
        )
        self.domain = domain
        self.attribute = attribute
        self.timeout_ms = timeout_ms
        self.is_open = fail == "open"
        self._hedge_after_ms = hedge_after_ms
        self.latency = LatencyP95()
        self.cache = DenyCache(deny_cache)
        self.failover = Failover(len(self.servers))
        # Without a lock, which a fork could leave locked: two threads at once are granted one hedge too many at worst.
        self.hedges = RetryBudget()
        self._on_fault = on_fault
        self._domain_json = json.dumps(domain)

    @property
    def hedge_after_ms(self) -> Optional[float]:
        """When the next server is asked; ``None`` without hedging."""
        return self.latency.estimate_ms if self._hedge_after_ms == "p95" else self._hedge_after_ms

    def order(
        self,
        subject: Subject,
        cost: int,
        caller_ms: Optional[int],
        *,
        reserve: bool = False,
        ttl_ms: Optional[int] = None,
        idempotency_key: Optional[str] = None,
    ) -> Order:
        """Writes the request of a check or reservation."""
        if isinstance(cost, bool) or not isinstance(cost, int) or cost < 0:
            raise ValueError(f"cost {cost!r} is not a whole number of at least 0")
        # Heads of one caller differ in fields that do not identify it, so a denial of one would not be found again.
        may_cache = True
        if isinstance(subject, str):
            part = f'"attributes":{{{json.dumps(self.attribute)}:{json.dumps(subject)}}}'
        elif "descriptors" in subject and not isinstance(subject["descriptors"], str):
            part = f'"descriptors":{json.dumps(subject["descriptors"])}'
        elif "request" in subject and not isinstance(subject["request"], str):
            part = f'"request":{json.dumps(subject["request"])}'
            if subject.get("attributes"):
                part += "," + _attributes(subject["attributes"])
            may_cache = False
        else:
            part = _attributes(subject)
        hedge_after_ms = self.hedge_after_ms
        is_hedged = hedge_after_ms is not None and len(self.servers) > 1 and cost > 0
        text = f'{{"domain":{self._domain_json},{part}'
        if cost != 1:
            text += f',"cost":{cost}'
        if reserve and ttl_ms is not None:
            text += f',"deadline_ms":{ttl_ms}'
        elif is_hedged and not reserve:
            text += f',"deadline_ms":{HEDGE_TTL_MS}'
        if idempotency_key is not None:
            text += f',"idempotency_key":{json.dumps(idempotency_key)}'
        deadline = deadline_ms(self.timeout_ms, caller_ms)
        return Order(
            path="/v1/reserve" if reserve or is_hedged else "/v1/check",
            body=(text + "}").encode(),
            key=(reserve, part),
            cost=cost,
            deadline_ms=deadline,
            share_ms=deadline // len(self.servers),
            hedge_after_ms=hedge_after_ms if is_hedged else None,
            may_use_cache=may_cache and idempotency_key is None,
            may_fill_cache=may_cache and len(part) <= MAX_KEY,
        )

    def cached(self, order: Order, now: int) -> Optional[Checked]:
        """Returns a denial that is still in force."""
        hit = self.cache.lookup(order.key, order.cost, now) if order.may_use_cache else None
        return None if hit is None else Checked(hit)

    def forget(self, order: Order) -> None:
        """Drops denials of a subject whose reservation ended: there may be room again."""
        for reserve in (False, True):
            self.cache.clear((reserve, order.key[1]))

    def ask(self, order: Order, started: int) -> Generator[Attempt, Reply, Checked]:
        """Asks the servers one after the other until one answers."""
        servers = self.failover.order(started)
        reason = _answers.TIMEOUT
        for at, server in enumerate(servers):
            elapsed = now_ms() - started if at else 0
            timeout = attempt_ms(order.deadline_ms, elapsed, len(servers) - at)
            if timeout is None:
                break
            decided = self.decode(server, (yield Attempt(server, order.path, order.body, timeout)))
            if isinstance(decided, Checked):
                self._cache_denial(order, decided.result, started)
                return decided
            reason = decided.reason
        return self.by_policy(reason)

    def hedge(self, order: Order, started: int) -> Hedge:
        """Returns the state of a reservation, which may be under way at two servers."""
        servers = self.failover.order(started)
        if order.hedge_after_ms is None:
            return Hedge(servers, order.share_ms, order.share_ms)
        return Hedge(servers, min(order.hedge_after_ms, order.share_ms), order.share_ms, self.hedges)

    def measured(self, hedge: Hedge, server: int, sent_ns: int, outcome: Union[Checked, Fault]) -> None:
        """Records how long the first request of a call took, if that decides when to hedge.

        Also if a hedge was faster: without the slow ones the estimate would sink with every hedge.
        """
        if self._hedge_after_ms == "p95" and hedge.budget is not None and server == hedge.order[0]:
            latency_us = (time.monotonic_ns() - sent_ns) // 1_000
            self.latency.record(latency_us, is_fault=isinstance(outcome, Fault))

    def ask_next(self, hedge: Hedge) -> Optional[int]:
        """Returns the server to ask because the first one is slow."""
        server = hedge.timer()
        if hedge.timed_out is not None:
            self.fault(hedge.timed_out, Fault(_answers.TIMEOUT))
        return server

    def hedged(self, order: Order, hedge: Hedge, found: Mapping[int, Checked], reason: str, started: int) -> Checked:
        """Returns the answer that decides, or what the fail policy does."""
        if hedge.winner is None:
            return self.by_policy(reason)
        winner = found[hedge.winner]
        if hedge.is_confirmed:
            self._cache_denial(order, winner.result, started)
        return winner

    def by_policy(self, reason: str) -> Checked:
        """Returns what the fail policy decides."""
        return Checked(Result.by_policy(allowed=self.is_open, reason=reason))

    def decode(self, server: int, reply: Reply) -> Union[Checked, Fault]:
        """Decodes one server's reply, and records what it says about the server."""
        if isinstance(reply, Response):
            try:
                result = _answers.check(reply.status, reply.body)
            except Fault as fault:
                reply = fault
            else:
                self.failover.answer(server)
                return Checked(result, fields(reply.headers), server)
        self.fault(server, reply)
        return reply

    def _cache_denial(self, order: Order, result: Result, sent: int) -> None:
        if result.cacheable and order.may_fill_cache and order.cost > 0:
            self.cache.store(order.key, order.cost, result, sent)

    def fault(self, server: int, fault: Fault) -> None:
        """Records a server that gave no usable answer."""
        self.failover.fault(server, now_ms())
        if self._on_fault:
            self._on_fault(self.urls[server], fault.reason)

    def end(self, path: str, server: int, document: dict[str, Any]) -> Generator[Attempt, Reply, Ended]:
        """Settles or cancels a reservation at the server that made it."""
        reply = yield Attempt(server, path, json.dumps(document).encode(), max(self.timeout_ms, LATE_MS))
        try:
            if isinstance(reply, Fault):
                raise reply
            return _answers.ended(reply.status, reply.body)
        except Fault as fault:
            return Ended(None, reason=fault.reason)

    def reset_path(self, api_key: str) -> str:
        """Returns the admin API's path that resets a caller's usage."""
        return f"/admin/v1/usage/{quote(api_key, safe='')}/reset?domain={quote(self.domain, safe='')}"


def _is_time(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _attributes(attributes: Mapping[str, Any]) -> str:
    for name, value in attributes.items():
        if not isinstance(value, str):
            raise ValueError(f"attribute {name!r} is not a string; write str(...)")
    return f'"attributes":{json.dumps(dict(attributes), sort_keys=True)}'


def fields(headers: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Returns the rate limit fields among header lines."""
    return tuple(
        line for line in headers if line[0].startswith(("ratelimit", "x-ratelimit-")) or line[0] == "retry-after"
    )
