"""Being limited well: pacing before the limit, backoff with full jitter, a retry budget, adaptive throttling.

Pure state machines of time and random numbers; `tollgate.httpx` and `tollgate.requests` drive them. The arithmetic is
that of ``clients/conformance/README.md``.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Optional

from ._headers import Signals

BACKOFF_BASE_MS = 100
BACKOFF_CAP_MS = 10_000


def pace_ms(limit: Optional[int], remaining: int, reset_ms: int, since_last_ms: int) -> int:
    """Returns the delay before the next request that spreads what remains over the time to the reset."""
    if remaining == 0:
        return reset_ms
    if limit is not None and 2 * remaining > limit:
        return 0
    return max(0, reset_ms // remaining - since_last_ms)


def backoff_bound_ms(attempt: int) -> int:
    """Returns the longest backoff before retry number ``attempt`` (from 0)."""
    return min(BACKOFF_CAP_MS, BACKOFF_BASE_MS << min(attempt, 32))


def backoff_ms(attempt: int, random: float, wait_ms: Optional[int] = None) -> int:
    """Returns the backoff with full jitter, after what the server asked to wait."""
    return (wait_ms or 0) + math.floor(random * backoff_bound_ms(attempt))


class Pacer:
    """Pacing of the requests to one host."""

    def __init__(self) -> None:
        self.blocked_until_ms = 0
        self._remaining: Optional[int] = None
        self._limit: Optional[int] = None
        self._reset_at = 0
        self._last: Optional[int] = None
        self._in_flight = 0

    def send(self, now_ms: int) -> int:
        """Takes a slot for one request; returns the delay before it."""
        if self._remaining is not None and self._reset_at <= now_ms:
            self._remaining = None
        slot = max(now_ms, self.blocked_until_ms)
        if self._remaining is not None and slot < self._reset_at:
            if self._remaining == 0:
                slot = self._reset_at
            else:
                is_short = self._limit is None or 2 * self._remaining <= self._limit
                if is_short and self._last is not None:
                    base = min(self._reset_at, max(now_ms, self._last))
                    spread = self._last + (self._reset_at - base) // self._remaining
                    slot = min(self._reset_at, max(slot, spread))
                self._remaining -= 1
        self._last = slot
        self._in_flight += 1
        return slot - now_ms

    def response(self, now_ms: int, signals: Signals, random: float) -> None:
        """Records a response."""
        self._in_flight = max(0, self._in_flight - 1)
        if signals.wait_ms:
            jitter = math.floor(random * (signals.wait_ms // 10))
            self.blocked_until_ms = max(self.blocked_until_ms, now_ms + signals.wait_ms + jitter)
        if signals.remaining is not None and signals.reset_ms is not None:
            self._remaining = max(0, signals.remaining - self._in_flight)
            self._limit = signals.limit
            self._reset_at = now_ms + signals.reset_ms

    def failed(self) -> None:
        """Records a request without a response."""
        self._in_flight = max(0, self._in_flight - 1)


class RetryBudget:
    """Retries are at most a tenth of the requests, and ten at once."""

    MAX = 10_000
    DEPOSIT = 100
    PRICE = 1_000

    def __init__(self) -> None:
        self.balance = self.MAX

    def request(self) -> None:
        """Records a first attempt."""
        self.balance = min(self.MAX, self.balance + self.DEPOSIT)

    def retry(self) -> bool:
        """Takes the price of a retry; returns whether it is granted."""
        if self.balance < self.PRICE:
            return False
        self.balance -= self.PRICE
        return True


@dataclass
class _Bucket:
    second: int
    requests: int = 0
    accepts: int = 0


class AdaptiveThrottle:
    """Rejects requests locally while most are refused ("Handling overload" in Google's SRE book, K = 2)."""

    K = 2
    BUCKETS = 120

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque()
        self.requests = 0
        self.accepts = 0

    def request(self, now_ms: int) -> None:
        """Records a request, also one that is rejected locally."""
        self._bucket(now_ms).requests += 1
        self.requests += 1

    def accept(self, now_ms: int) -> None:
        """Records a response that is not refused."""
        self._bucket(now_ms).accepts += 1
        self.accepts += 1

    def probability(self, now_ms: int) -> float:
        """Returns the probability of a local rejection."""
        self._expire(now_ms)
        return max(0.0, (self.requests - self.K * self.accepts) / (self.requests + 1))

    def _bucket(self, now_ms: int) -> _Bucket:
        self._expire(now_ms)
        second = now_ms // 1000
        if not self._buckets or self._buckets[-1].second < second:
            self._buckets.append(_Bucket(second))
        return self._buckets[-1]

    def _expire(self, now_ms: int) -> None:
        oldest = now_ms // 1000 - self.BUCKETS
        while self._buckets and self._buckets[0].second <= oldest:
            bucket = self._buckets.popleft()
            self.requests -= bucket.requests
            self.accepts -= bucket.accepts
