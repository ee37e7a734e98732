"""Results of checks: what a server, the deny cache or the fail policy decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Optional

__all__ = ["Ended", "LimitStatus", "Result"]


@dataclass(frozen=True)
class LimitStatus:
    """One limit that a request met."""

    rule: str
    limit: int
    remaining: int
    reset_ms: int
    #: Its period, such as ``1m``; ``concurrent`` if it limits requests in flight.
    window: Optional[str] = None
    #: Whether it denies the request, or would if its role let it.
    over: bool = False
    #: ``shadow``, ``candidate``, ``unenforced``, ``degrade`` or ``quota``; ``None`` if it simply decides.
    role: Optional[str] = None

    @property
    def decides(self) -> bool:
        """Whether it can deny requests."""
        return self.role in (None, "quota")


@dataclass(frozen=True)
class Result:
    """Decision about one request. Times are in milliseconds; ``None`` means unknown or never."""

    allowed: bool
    #: ``server``, ``cache`` (a denial that is still in force) or ``policy`` (no server could be asked).
    source: str
    #: ``allowed``, ``denied``, ``unmatched``, ``fail_open``, ``fail_closed``, ``shed``, ``rejected``; for ``policy`` the
    #: fault: ``unreachable``, ``timeout``, ``unavailable``, ``unauthorized``, ``invalid_response``.
    reason: str
    origin: Optional[str] = None
    rule: Optional[str] = None
    limit: Optional[int] = None
    remaining: Optional[int] = None
    reset_ms: Optional[int] = None
    #: 0 if allowed; ``None`` if the same request would never be allowed, or if that is unknown.
    retry_after_ms: Optional[int] = None
    #: How long an allowed request should wait (rules with ``action: delay``).
    delay_ms: int = 0
    decision_id: Optional[str] = None
    reservation: Optional[str] = None
    cacheable: bool = False
    #: Whether the server was overloaded itself and decided without its store. Denials say when to ask again, and are not
    #: cached.
    shed: bool = False
    #: Every limit that the request met, in the server's order.
    limits: tuple[LimitStatus, ...] = field(default=(), compare=False)
    #: What the denying rule has callers answered with, as far as it sets it: ``status``, ``body``, ``content_type``.
    response: Optional[Mapping[str, Any]] = field(default=None, compare=False)
    #: What the server found wrong with a check that it rejected: ``status``, ``title``, ``detail``, ``field``.
    problem: Optional[Mapping[str, Any]] = field(default=None, compare=False)

    def __bool__(self) -> bool:
        return self.allowed

    @classmethod
    def by_policy(cls, *, allowed: bool, reason: str) -> Result:
        """Returns the decision of the fail policy."""
        return cls(allowed=allowed, source="policy", reason=reason, retry_after_ms=0 if allowed else None)

    @classmethod
    def rejected(cls, problem: Optional[Mapping[str, Any]] = None) -> Result:
        """Returns the denial of a check that the server calls invalid."""
        return cls(allowed=False, source="server", reason="rejected", problem=problem)

    def from_cache(self, elapsed_ms: int) -> Result:
        """Returns the same denial ``elapsed_ms`` later."""

        def left(ms: Optional[int]) -> Optional[int]:
            return None if ms is None else max(0, ms - elapsed_ms)

        return replace(
            self,
            source="cache",
            reason="denied",
            retry_after_ms=left(self.retry_after_ms),
            reset_ms=left(self.reset_ms),
            reservation=None,
        )


@dataclass(frozen=True)
class Ended:
    """What became of a reservation. ``ended`` is ``settled`` or ``canceled``; if it is ``None``, ``reason`` says why:
    ``unknown``, ``conflict``, ``rejected``, or a fault."""

    ended: Optional[str]
    cost: Optional[int] = None
    reason: Optional[str] = None

    def __bool__(self) -> bool:
        return self.ended is not None
