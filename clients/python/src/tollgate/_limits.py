"""How the strategies of `limits` are counted on a server, without I/O: a call yields checks (the kind of counter, and the
descriptors) and is sent their results, so that the synchronous and the asynchronous storage are one."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Generator
from typing import Any, Generic, Optional, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from limits.limits import TIME_TYPES

from .result import LimitStatus, Result

_UNITS = {1: "second", 60: "minute", 3_600: "hour", 86_400: "day", 604_800: "week", 2_592_000: "month"}
_NEVER_REACHED = 2**32 - 1
#: Most entries of the server's logs; inline limits above it would be fixed windows.
_MAX_LOG = 100_000
_MAX_REMEMBERED = 10_000
FIXED, _MOVING, _SLIDING = "", "-moving", "-sliding"
_ALGORITHMS = {FIXED: "fixed_window", _MOVING: "sliding_log", _SLIDING: "sliding_window"}
#: What each strategy appends to the domain.
KINDS = tuple(_ALGORITHMS)

V = TypeVar("V")
Check = tuple[str, list[dict[str, Any]]]
#: A call in steps.
Steps = Generator[Check, Result, V]


class TollgateError(Exception):
    """The server could not decide, or its rules lack what the limit needs."""


def settings_of(uri: str, options: dict[str, Any]) -> tuple[list[str], str, dict[str, Any]]:
    """Returns the servers, the domain and the client's settings of a storage's URI."""
    parts = urlsplit(uri)
    user, _, hosts = parts.netloc.rpartition("@")
    options = {**dict(parse_qsl(parts.query)), **options}
    domain = str(options.pop("domain", parts.path.strip("/") or "limits"))
    settings: dict[str, Any] = {"timeout_ms": int(options.pop("timeout_ms", 1_000))}
    if user:
        settings["token"] = unquote(user)
    scheme = "https" if parts.scheme.endswith("tollgates") else "http"
    urls = [f"{scheme}://{host.strip()}" for host in hosts.split(",")]
    return urls, domain, {**options, **settings, "deny_cache": 0}


class Counters:
    """The counters of one storage."""

    def __init__(self, domain: str) -> None:
        self._domain = domain
        #: How often a key was cleared, and everything was reset, by what the server last said.
        self._cleared: _Recent[int] = _Recent()
        self._resets: dict[str, int] = dict.fromkeys(KINDS, 0)
        self._periods: _Recent[int] = _Recent()
        self._passes_at: _Recent[float] = _Recent()

    def incr(self, key: str, expiry: int, amount: int) -> Steps[int]:
        """Returns the new count."""
        self._periods[key] = int(expiry)
        return _used((yield from self._count(key, int(expiry), amount)))

    def get(self, key: str) -> Steps[int]:
        period = self._period(key)
        return 0 if period is None else _used((yield from self._count(key, period, 0)))

    def get_expiry(self, key: str) -> Steps[float]:
        period = self._period(key)
        status = None if period is None else (yield from self._count(key, period, 0))
        return time.time() + (status.reset_ms / 1000 if status and _used(status) else 0)

    def reset(self) -> Steps[None]:
        """Begins new counters for every key."""
        for kind in _ALGORITHMS:
            yield from self._bump(kind, "reset", "all")

    def clear(self, key: str) -> Steps[None]:
        """Begins a new counter for a key."""
        for kind in (FIXED, _MOVING):
            yield from self._bump(kind, "clear", key)
        self._passes_at.pop(key)

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int) -> Steps[bool]:
        if amount > limit:
            return False
        if limit > _MAX_LOG:
            raise TollgateError(f"a moving window has at most {_MAX_LOG} entries; use sliding-window-counter")
        result, _ = yield from self._ask(_MOVING, key, limit, int(expiry), amount)
        if not result.allowed and result.retry_after_ms is not None:
            self._passes_at[key] = time.time() + result.retry_after_ms / 1000
        return result.allowed

    def get_moving_window(self, key: str, limit: int, expiry: int) -> Steps[tuple[float, int]]:
        """The start is that of the newest entry; after a denial, that of the one which has to leave."""
        _, status = yield from self._ask(_MOVING, key, limit, int(expiry), 0)
        now = time.time()
        ends = now + status.reset_ms / 1000
        passes_at = self._passes_at.get(key)
        if status.remaining == 0 and passes_at is not None and now < passes_at < ends:
            ends = passes_at
        used = _used(status)
        return (ends - expiry if used else now), used

    def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int) -> Steps[bool]:
        if amount > limit:
            return False
        self._periods[f"limit of {key}"] = limit
        return (yield from self._ask(_SLIDING, key, limit, int(expiry), amount))[0].allowed

    def get_sliding_window(self, key: str, expiry: int) -> Steps[tuple[int, float, int, float]]:
        """The weighted count is reported as the current window's: the server does not distinguish the two."""
        limit = self._periods.get(f"limit of {key}") or _amount(key)
        if limit is None:
            return 0, 0.0, 0, 0.0
        _, status = yield from self._ask(_SLIDING, key, limit, int(expiry), 0)
        return 0, 0.0, _used(status), status.reset_ms / 1000

    def clear_sliding_window(self, key: str) -> Steps[None]:
        yield from self._bump(_SLIDING, "clear", key)

    def _period(self, key: str) -> Optional[int]:
        """A key ends in amount, multiples and granularity, unless it was made by hand."""
        parts = key.rsplit("/", 2)
        if len(parts) == 3 and parts[1].isdecimal() and parts[2] in TIME_TYPES:
            return int(parts[1]) * TIME_TYPES[parts[2]].seconds
        return self._periods.get(key)

    def _count(self, key: str, period: int, amount: int) -> Steps[LimitStatus]:
        return (yield from self._ask(FIXED, key, _NEVER_REACHED, period, amount))[1]

    def _ask(self, kind: str, key: str, limit: int, period: int, amount: int) -> Steps[tuple[Result, LimitStatus]]:
        for _ in range(8):
            cleared, resets = self._cleared.get(kind + key) or 0, self._resets[kind]
            name = f"{key}#{resets}.{cleared}" if cleared or resets else key
            counter = _counter(name, limit, period)
            numbers = [_number("clear", key), _number("reset", "all")]
            result = _decided((yield kind, [{**counter, "hits": amount}, *numbers]))
            if len(result.limits) != 3:
                raise TollgateError(self._missing(kind))
            status, *seen = result.limits
            if kind == FIXED and not seen[0].reset_ms:
                # A bucket forgets what it has counted under a limit that is never reached.
                raise TollgateError(f"the domain {self._domain!r} counts in buckets; set `algorithm: fixed_window`")
            if (_used(seen[0]), _used(seen[1])) == (cleared, resets):
                return result, status
            self._cleared[kind + key], self._resets[kind] = _used(seen[0]), _used(seen[1])
        raise TollgateError("the counter was cleared again and again while it was read")

    def _bump(self, kind: str, what: str, key: str) -> Steps[None]:
        if not _decided((yield kind, [{**_number(what, key), "hits": 1}])).allowed:
            raise TollgateError(f"{key} was cleared {_MAX_LOG} times within a year")

    def _missing(self, kind: str) -> str:
        domain = f"no limit matched; the server needs a rule file with `domain: {self._domain + kind}` and"
        return f"{domain} `algorithm: {_ALGORITHMS[kind]}`"


def _decided(result: Result) -> Result:
    if result.source == "policy" or result.reason in ("fail_open", "fail_closed", "shed"):
        raise TollgateError(f"no decision: {result.reason}")
    if result.reason == "rejected":
        detail = (result.problem or {}).get("detail")
        raise TollgateError(f"the server rejected the check: {detail}")
    return result


def _counter(name: str, limit: int, period: int) -> dict[str, Any]:
    unit = _UNITS.get(period, f"{period}s")
    return {"entries": [["key", name]], "limit": {"requests_per_unit": limit, "unit": unit}}


def _number(what: str, key: str) -> dict[str, Any]:
    """A number on the server, as the used part of a limit that is never reached."""
    return {"entries": [[what, key]], "hits": 0, "limit": {"requests_per_unit": _MAX_LOG, "unit": "year"}}


def _used(status: LimitStatus) -> int:
    return status.limit - status.remaining


def _amount(key: str) -> Optional[int]:
    parts = key.rsplit("/", 3)
    return int(parts[1]) if len(parts) == 4 and parts[1].isdecimal() else None


class _Recent(Generic[V]):
    """What was stored last, for a bounded number of keys."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Optional[V]:
        return self._entries.get(key)

    def pop(self, key: str) -> None:
        with self._lock:
            self._entries.pop(key, None)

    def __setitem__(self, key: str, value: V) -> None:
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > _MAX_REMEMBERED:
                self._entries.popitem(last=False)
