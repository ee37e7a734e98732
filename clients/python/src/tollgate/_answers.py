"""Responses of a Tollgate server, decoded: a result, or a fault that sends the client to its next server.

The rules are in ``clients/conformance/README.md``. A response that is not understood is a fault, never an allowance.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NoReturn, Optional, Union

from .result import Ended, LimitStatus, Result

MAX_BODY_BYTES = 65_536
MAX_INTEGER = 2**53 - 1

UNREACHABLE = "unreachable"
TIMEOUT = "timeout"
UNAVAILABLE = "unavailable"
UNAUTHORIZED = "unauthorized"
INVALID_RESPONSE = "invalid_response"


class Fault(Exception):
    """A server that gave no usable answer; ``reason`` says how."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Invalid(Exception):
    pass


def _reject_constant(_: str) -> NoReturn:
    raise _Invalid


def _json(body: bytes) -> Any:
    if len(body) > MAX_BODY_BYTES:
        raise _Invalid
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        raise _Invalid from None


def _integer(value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= sys.float_info.max:
        raise _Invalid
    return min(value, MAX_INTEGER)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _Invalid
    return value


def _optional_text(value: Any) -> Optional[str]:
    return None if value is None else _text(value)


def check(status: int, body: bytes) -> Result:
    """Decodes a response of ``/v1/check`` or ``/v1/reserve``; raises `Fault`."""
    if status in (400, 409, 413, 422):
        return Result.rejected(_problem(body))
    if status in (401, 403):
        # The caller's credential in the head that was sent, not the client's own: no other server reads it differently.
        problem = _problem(body)
        if status == 401 and problem is not None and problem.get("field") == "request":
            return Result.rejected(problem)
        raise Fault(UNAUTHORIZED)
    try:
        if status in (200, 429, 503):
            document = _json(body)
            if isinstance(document, dict) and "allowed" in document:
                return _decision(status, document)
            if status == 200:
                raise _Invalid
    except _Invalid:
        if status == 200 or _has_allowed(body):
            raise Fault(INVALID_RESPONSE) from None
        raise Fault(UNAVAILABLE) from None
    raise Fault(UNAVAILABLE if status >= 500 or status == 429 else INVALID_RESPONSE)


def _problem(body: bytes) -> Optional[dict[str, Any]]:
    try:
        document = _json(body)
    except _Invalid:
        return None
    return document if isinstance(document, dict) else None


def _has_allowed(body: bytes) -> bool:
    try:
        document = _json(body)
    except _Invalid:
        return False
    return isinstance(document, dict) and "allowed" in document


def _decision(status: int, document: dict[str, Any]) -> Result:
    allowed = document["allowed"]
    if not isinstance(allowed, bool) or allowed != (status == 200):
        raise _Invalid
    decision_id = _text(document.get("decision_id"))
    limits = document.get("limits")
    if not isinstance(limits, list):
        raise _Invalid
    shown = tuple(_limit(limit) for limit in limits)
    retry_after = document.get("retry_after_ms")
    retry_after_ms = None if retry_after is None else _integer(retry_after)
    delay = document.get("delay_ms")
    delay_ms = 0 if delay is None else _integer(delay)
    origin = _optional_text(document.get("origin"))
    denied_by = _optional_text(document.get("denied_by"))
    reported = _reported(allowed, denied_by, shown)
    is_shed = _optional_text(document.get("shed")) is not None or origin == "shed"
    if origin == "shed" or (is_shed and origin in ("fail_open", "fail_closed")):
        reason = "shed"
    elif origin in ("fail_open", "fail_closed", "unmatched"):
        reason = origin
    else:
        reason = "allowed" if allowed else "denied"
    is_concurrent = any(limit.over and limit.window == "concurrent" for limit in shown)
    return Result(
        allowed=allowed,
        source="server",
        reason=reason,
        origin=origin,
        rule=denied_by if not allowed else (reported.rule if reported else None),
        limit=reported.limit if reported else None,
        remaining=reported.remaining if reported else None,
        reset_ms=reported.reset_ms if reported else None,
        retry_after_ms=0 if allowed else retry_after_ms,
        delay_ms=delay_ms,
        decision_id=decision_id,
        reservation=_optional_text(document.get("reservation")),
        cacheable=status == 429
        and origin == "store"
        and not is_shed
        and bool(retry_after_ms)
        and not is_concurrent,
        shed=is_shed,
        limits=shown,
        response=_response(document.get("response")),
    )


def _response(response: Any) -> Optional[dict[str, Any]]:
    if not isinstance(response, dict):
        return None
    status, body, kind = response.get("status"), response.get("body"), response.get("content_type")
    is_status = isinstance(status, int) and not isinstance(status, bool) and 400 <= status < 600
    # A field ends with its line.
    is_kind = isinstance(kind, str) and kind.isascii() and kind.isprintable()
    return {
        "status": status if is_status else None,
        "body": body if isinstance(body, str) else None,
        "content_type": kind if is_kind else None,
    }


def _limit(limit: Any) -> LimitStatus:
    if not isinstance(limit, dict):
        raise _Invalid
    window, role = limit.get("window"), limit.get("role")
    return LimitStatus(
        rule=_text(limit.get("rule")),
        limit=_integer(limit.get("limit")),
        remaining=_integer(limit.get("remaining")),
        reset_ms=_integer(limit.get("reset_ms")),
        window=window if isinstance(window, str) else None,
        over=limit.get("over") is True,
        role=role if isinstance(role, str) else None,
    )


def _reported(allowed: bool, denied_by: Optional[str], limits: tuple[LimitStatus, ...]) -> Optional[LimitStatus]:
    deciding = [limit for limit in limits if limit.decides]
    if not allowed:
        over = [limit for limit in deciding if limit.over]
        own = [limit for limit in over if limit.rule == denied_by]
        return max(own or over, key=lambda limit: limit.reset_ms, default=None)
    return min(deciding, key=lambda limit: (limit.remaining, -limit.reset_ms), default=None)


def ended(status: int, body: bytes) -> Ended:
    """Decodes a response of ``/v1/settle`` or ``/v1/cancel``; raises `Fault`."""
    if status in (401, 403):
        raise Fault(UNAUTHORIZED)
    if status in (400, 422):
        return Ended(None, reason="rejected")
    if status == 409:
        return Ended(None, reason="conflict")
    if status >= 500 or status == 429:
        raise Fault(UNAVAILABLE)
    try:
        document: Union[dict[str, Any], Any] = _json(body)
        if not isinstance(document, dict):
            raise _Invalid
        if status == 404 and "title" in document:
            return Ended(None, reason="unknown")
        if status == 200 and document.get("settled") is True:
            return Ended("settled", cost=_integer(document.get("cost")))
        if status == 200 and document.get("cancelled") is True:
            return Ended("canceled")
    except _Invalid:
        pass
    raise Fault(INVALID_RESPONSE)
