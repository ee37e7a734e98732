"""The 95th percentile of recent latencies, after which a call is hedged.

A histogram whose counts are halved from time to time, with integers only, so that it is the same in every language
(``clients/conformance/README.md``, section Hedge after).
"""

from __future__ import annotations

#: The estimate until enough is measured.
DEFAULT_US = 3_000
#: Latencies are counted in this unit, rounded up.
UNIT_US = 125
#: 1 ms or less, then eight buckets for each doubling, to 16.384 s and more.
BUCKETS = 1 + 8 * 14
#: Requests between two estimates, and before the first.
ESTIMATE_EVERY = 100
#: When an estimate finds this many, it halves all counts.
HALVE_AT = 1_000


def _bucket(latency_us: int) -> int:
    above = -(-latency_us // UNIT_US) - 1
    if above < 8:
        return 0
    doublings = above.bit_length() - 4
    return min(BUCKETS - 1, 8 * doublings + (above >> doublings) - 7)


def _upper_edge_us(bucket: int) -> int:
    """Returns the longest latency of a bucket."""
    doublings, eighths = divmod(bucket - 1, 8)
    return 1_000 if bucket == 0 else UNIT_US * (eighths + 9 << doublings)


class LatencyP95:
    """The estimate of one client. Without a lock, which a fork could leave locked: threads lose a count at worst."""

    def __init__(self) -> None:
        self._counts = [0] * BUCKETS
        self._recorded = 0
        self._estimate = _bucket(DEFAULT_US)

    @property
    def estimate_us(self) -> int:
        """The latency that 95 of 100 requests do not exceed."""
        return _upper_edge_us(self._estimate)

    @property
    def estimate_ms(self) -> int:
        """The estimate in whole milliseconds, which the client's clock has."""
        return -(-self.estimate_us // 1_000)

    @property
    def recorded(self) -> int:
        """How many were recorded."""
        return self._recorded

    def record(self, latency_us: int, *, is_fault: bool = False) -> None:
        """Records how long a first request took. A fault that came sooner than the estimate says nothing about answers."""
        bucket = _bucket(latency_us)
        if is_fault and bucket < self._estimate:
            return
        self._counts[bucket] += 1
        self._recorded = recorded = self._recorded + 1
        if recorded % ESTIMATE_EVERY == 0:
            self._update()

    def _update(self) -> None:
        total, below = sum(self._counts), 0
        for bucket, count in enumerate(self._counts):
            below += count
            if below * 100 >= total * 95:
                self._estimate = bucket
                break
        if total >= HALVE_AT:
            self._counts = [count // 2 for count in self._counts]
