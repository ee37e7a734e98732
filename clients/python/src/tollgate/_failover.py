"""Which server is asked, in which order, for how long; and when a second one is asked too (hedging)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

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
    """

    order: list[int]
    winner: Optional[int] = None
    _next: int = 0
    _under_way: set[int] = field(default_factory=set)

    def start(self) -> Optional[int]:
        """Returns the first server to ask."""
        return self._send()

    def timer(self) -> Optional[int]:
        """Returns the server to ask because the first one has not answered in time."""
        return self._send() if self.winner is None and len(self._under_way) == 1 else None

    def fault(self, server: int) -> Optional[int]:
        """Records a fault; returns the next server to ask, if there is one."""
        self._under_way.discard(server)
        return self._send() if self.winner is None else None

    def answer(self, server: int) -> bool:
        """Records an answer; returns whether it decides the request."""
        self._under_way.discard(server)
        if self.winner is None:
            self.winner = server
            return True
        return False

    @property
    def is_over(self) -> bool:
        """Whether no answer can come any more."""
        return self.winner is None and not self._under_way

    def _send(self) -> Optional[int]:
        if self._next >= len(self.order) or len(self._under_way) >= 2:
            return None
        server = self.order[self._next]
        self._next += 1
        self._under_way.add(server)
        return server
