"""Deny cache: a denial that is still in force is answered without asking a server, until its exact end."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Optional

from .result import Result

MAX_ENTRIES = 10_000
MAX_AGE_MS = 300_000
#: Longest key that is stored, in characters: callers choose what is in it.
MAX_KEY = 4_096


@dataclass(frozen=True)
class _Entry:
    at_ms: int
    end_ms: int
    cost: int
    result: Result


class DenyCache:
    """Denials by domain, attributes and kind of request. Bounded: the oldest entry makes room."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max = max_entries
        self._entries: OrderedDict[Hashable, _Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def lookup(self, key: Hashable, cost: int, now_ms: int) -> Optional[Result]:
        """Returns the denial of a request of this cost, if it is still in force."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if now_ms >= entry.end_ms:
            self._entries.pop(key, None)
            return None
        if cost < entry.cost or cost == 0:
            return None
        return entry.result.from_cache(now_ms - entry.at_ms)

    def clear(self, key: Optional[Hashable] = None) -> None:
        """Drops the denial of one key, or all."""
        if key is None:
            self._entries.clear()
        else:
            self._entries.pop(key, None)

    def store(self, key: Hashable, cost: int, result: Result, at_ms: int) -> None:
        """Stores a denial of a request that was sent at ``at_ms``."""
        if self._max == 0 or not result.cacheable or not result.retry_after_ms:
            return
        self._entries.pop(key, None)
        while len(self._entries) >= self._max:
            try:
                self._entries.popitem(last=False)
            except KeyError:
                break
        end = at_ms + min(result.retry_after_ms, MAX_AGE_MS)
        self._entries[key] = _Entry(at_ms, end, cost, result)
