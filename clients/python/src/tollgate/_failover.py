"""Which server is asked, in which order, for how long; and when a second one is asked too (hedging)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from ._pacing import RetryBudget

COOLDOWN_MS = 1_000
MAX_COOLDOWN_MS = 30_000
HEDGE_AFTER_MS = 3


def deadline_ms(own_ms: int, caller_ms: Optional[int]) -> int:
    """Returns the time for all attempts: never past the caller's own deadline."""
    return max(0, own_ms if caller_ms is None else min(own_ms, caller_ms))


def attempt_ms(deadline: int, elapsed: int, servers_left: int) -> Optional[int]:
    """Returns the time for one attempt; ``None`` if nothing is left of the deadline."""
    if elapsed >= deadline:
        return None
    return max(1, (deadline - elapsed) // servers_left)


class Failover:
    """Order of the servers: one that failed goes behind the others for a while, longer with each failure."""

    def __init__(self, servers: int) -> None:
        self._faults = [0] * servers
        self._until = [0] * servers

    def order(self, now_ms: int) -> list[int]:
        """Returns the servers in the order in which they are to be asked."""
        if not any(self._faults):
            return list(range(len(self._until)))
        return sorted(
            range(len(self._until)),
            key=lambda server: (max(0, self._until[server] if self._until[server] > now_ms else 0), server),
        )

    def fault(self, server: int, now_ms: int) -> None:
        """Records that a server gave no usable answer."""
        self._faults[server] += 1
        pause = COOLDOWN_MS << min(self._faults[server] - 1, 16)
        self._until[server] = now_ms + min(MAX_COOLDOWN_MS, pause)

    def answer(self, server: int) -> None:
        """Records a usable answer."""
        self._faults[server] = 0
        self._until[server] = 0


@dataclass
class Hedge:
    """One hedged request, without I/O: it says which servers to ask, and which answer decides.

    The caller sends to the servers that `start`, `timer` and `fault` return, and reports what comes back.

    A denial waits for the request beside it: on one store, the charge of that one may be the reason.
    """

    order: list[int]
    #: When `timer` is due, in milliseconds since the start; ``None`` if no further server is asked for being slow.
    ask_next_ms: Optional[float]
    #: When failover asks the next server, whatever the budget: after the first one's share of the deadline.
    share_ms: int
    #: Bounds the hedges of all calls, since a second request for each would make slow servers slower.
    budget: Optional[RetryBudget] = None
    winner: Optional[int] = None
    #: Whether every request beside the winner has answered. If not, its charge may be the reason of a denial.
    is_confirmed: bool = True
    #: The server that has used its share of the deadline: a fault, although its answer still counts.
    timed_out: Optional[int] = None
    _denied: Optional[int] = None
    _next: int = 0
    _under_way: set[int] = field(default_factory=set)

    def start(self) -> Optional[int]:
        """Returns the first server to ask."""
        if self.budget is not None:
            self.budget.request()
        return self._send()

    def timer(self) -> Optional[int]:
        """Returns the server to ask because the first one has not answered in time."""
        due, self.ask_next_ms = self.ask_next_ms, None
        if due is None or self.is_over or not self._has_next:
            return None
        if self.budget is not None and due < self.share_ms and not self.budget.retry():
            self.ask_next_ms = self.share_ms
            return None
        if due >= self.share_ms:
            (self.timed_out,) = self._under_way
        return self._send()

    def fault(self, server: int) -> Optional[int]:
        """Records a fault; returns the next server to ask, if there is one."""
        self._under_way.discard(server)
        if self._denied is not None:
            self._end_unconfirmed()
        return self._send() if self.winner is None else None

    def answer(self, server: int, *, allowed: bool, denied: bool) -> None:
        """Records an answer: allowed, denied by a limit, or neither (shed, rejected, or by a rule's fail policy)."""
        self._under_way.discard(server)
        if self._denied is not None:
            self.winner = server if allowed else self._denied
        elif denied and self._under_way:
            self._denied = server
        else:
            self.winner = server

    def deadline(self) -> None:
        """Ends the request: with the denial in hand, if there is one."""
        if self._denied is not None:
            self._end_unconfirmed()

    @property
    def is_over(self) -> bool:
        """Whether an answer decides the request, or none can come any more."""
        return self.winner is not None or not self._under_way

    @property
    def _has_next(self) -> bool:
        return self._next < len(self.order) and len(self._under_way) < 2

    def _end_unconfirmed(self) -> None:
        self.winner, self.is_confirmed = self._denied, False

    def _send(self) -> Optional[int]:
        if not self._has_next:
            return None
        server = self.order[self._next]
        self._next += 1
        self._under_way.add(server)
        return server
