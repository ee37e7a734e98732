"""What both middlewares do, apart from their interface: the check of a request's head, and what to respond.

The head goes to the server, which identifies the caller by the gateway's own settings. Rejected: identity rules in the
client, which are many, and whose differences from the server's would be ways around a limit.

Fields and bodies are those of the gateway, so that callers need not know which of the two stands before a service.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Optional, TypeVar, Union

from ._core import Checked, Core, Order
from .result import Result

_TYPES = "https://iana.org/assignments/http-problem-types#"
_MAX_ENDPOINTS = 1_024
_MAX_SEGMENTS = 8
#: A segment that looks like a name, not like an id.
_NAME = re.compile("[A-Za-z][A-Za-z_.-]{0,31}")
#: Who is connected to a Unix socket is a process of this machine, such as its proxy.
_LOCAL = "127.0.0.1"

R = TypeVar("R")
Fields = list[tuple[str, str]]


@dataclass(frozen=True)
class Head:
    """A request's head. Each character is one byte of it (ISO 8859-1)."""

    method: str
    path: str
    peer: Optional[str]
    headers: Fields


@dataclass(frozen=True)
class Refusal:
    """A response in place of the app's."""

    status: int
    fields: Fields
    body: bytes


class Guard(Generic[R]):
    """Settings of a middleware, and what it has learned about its endpoints.

    Permits of ``concurrency`` limits can only be returned if they were reserved, and a return is a second request to the
    server. With ``permits="auto"`` an endpoint is checked with a reservation until an answer shows that none of its limits is
    a concurrency limit. With ``True`` every request is, with ``False`` permits end by their ``ttl``.
    """

    def __init__(
        self,
        core: Core,
        *,
        cost: Union[int, Callable[[R], int]] = 1,
        attributes: Optional[Callable[[R], Mapping[str, str]]] = None,
        skip: Optional[Callable[[R], bool]] = None,
        permits: Union[bool, str] = "auto",
        permit_ttl_ms: int = 60_000,
        max_delay_ms: int = 30_000,
    ) -> None:
        if permits not in (True, False, "auto"):
            raise ValueError(f"permits={permits!r} is unknown; write 'auto', True or False")
        self._core = core
        self._cost = cost
        self._attributes = attributes
        self._skip = skip
        self._permits = permits
        self._permit_ttl_ms = permit_ttl_ms
        self._max_delay_ms = max_delay_ms
        self._is_concurrent: dict[str, bool] = {}
        self._lock = threading.Lock()

    def order(self, head: Head, request: R) -> Optional[Order]:
        """Writes the check of a request; ``None`` if it is to pass unchecked."""
        if self._skip is not None and self._skip(request):
            return None
        cost = self._cost(request) if callable(self._cost) else self._cost
        subject: dict[str, Any] = {
            "request": {
                "method": head.method,
                "target": head.path,
                "peer": (head.peer or _LOCAL).partition("%")[0],
                "headers": [line for line in head.headers if not line[0].startswith(":")],
            }
        }
        if self._attributes is not None:
            subject["attributes"] = dict(self._attributes(request))
        reserve = cost > 0 and self._may_hold(head)
        return self._core.order(subject, cost, None, reserve=reserve, ttl_ms=self._permit_ttl_ms if reserve else None)

    def _may_hold(self, head: Head) -> bool:
        if self._permits != "auto":
            return self._permits is True
        return self._is_concurrent.get(endpoint(head), True)

    def refusal(self, head: Head, checked: Checked) -> Optional[Refusal]:
        """Returns the response if the request may not pass; learns from the answer."""
        result = checked.result
        is_concurrent = any(limit.window == "concurrent" for limit in result.limits)
        # A denial says nothing of the other limits.
        if result.source == "server" and (result.allowed or is_concurrent):
            self._learn(endpoint(head), is_concurrent)
        if not result.allowed:
            return _denial(head, checked)
        if result.delay_ms > self._max_delay_ms:
            return _unavailable(head, checked, -(-result.delay_ms // 1000))
        return None

    def _learn(self, key: str, is_concurrent: bool) -> None:
        # Some callers of an endpoint may have a limit that others do not.
        if self._is_concurrent.get(key) in (True, is_concurrent):
            return
        with self._lock:
            if key not in self._is_concurrent and len(self._is_concurrent) >= _MAX_ENDPOINTS:
                self._is_concurrent.pop(next(iter(self._is_concurrent)))
            self._is_concurrent[key] = is_concurrent


def endpoint(head: Head) -> str:
    """Endpoints are the server's to tell; here a method and the shape of a path stand for one: ``GET /users/*``."""
    segments = head.path.split("/", _MAX_SEGMENTS + 1)[1 : _MAX_SEGMENTS + 1]
    shape = (each if not each or _NAME.fullmatch(each) else "*" for each in segments)
    # Callers may invent methods, of any length.
    return f"{head.method if _NAME.fullmatch(head.method) else '*'} /{'/'.join(shape)}"


def callers_problem(result: Result) -> Optional[Mapping[str, Any]]:
    """Returns the problem document of a head that is no request's or ambiguous, or whose credential is unreadable."""
    problem = result.problem
    field = None if problem is None else problem.get("field")
    is_head = isinstance(field, str) and (field == "request" or field.startswith("request."))
    return problem if is_head else None


def added(fields: Fields, own: Fields) -> Fields:
    """Returns the fields that a response does not have itself."""
    names = {name.lower() for name, _ in own}
    return [line for line in fields if line[0] not in names]


def _denial(head: Head, checked: Checked) -> Refusal:
    result = checked.result
    if result.reason == "rejected":
        return _rejected(head, checked)
    seconds = _seconds(checked)
    if result.reason != "denied":
        return _unavailable(head, checked, seconds or 1)
    detail = "Rate limit exceeded." + (f" Retry after {_plural(seconds)}." if seconds is not None else "")
    own = result.response or {}
    status = own.get("status") or 429
    if own.get("body") is not None:
        return _own_refusal(head, status, checked, own, seconds)
    document: dict[str, Any] = {
        "type": f"{_TYPES}quota-exceeded",
        "title": "Over the limit",
        "status": status,
        "detail": detail,
    }
    if seconds is not None:
        document["retry_after"] = seconds
    if result.rule is not None:
        document["violated-policies"] = [result.rule]
    return _refusal(head, status, checked, document, seconds)


def _seconds(checked: Checked) -> Optional[int]:
    seconds = dict(checked.fields).get("retry-after", "")
    if re.fullmatch("[0-9]{1,15}", seconds):
        return int(seconds)
    wait = checked.result.retry_after_ms
    return None if wait is None else max(1, -(-wait // 1000))


def _unavailable(head: Head, checked: Checked, seconds: int) -> Refusal:
    document: dict[str, Any] = {
        "type": f"{_TYPES}temporary-reduced-capacity",
        "title": "Temporarily unavailable",
        "status": 503,
        "detail": f"The request could not be checked. Retry after {_plural(seconds)}.",
        "retry_after": seconds,
    }
    return _refusal(head, 503, checked, document, seconds)


def _rejected(head: Head, checked: Checked) -> Refusal:
    problem = callers_problem(checked.result)
    if problem is not None:
        status = 401 if problem.get("status") == 401 else 400
        return _refusal(head, status, checked, dict(problem), None)
    problem = checked.result.problem
    status, title, detail = 400, "Bad request", "The request could not be checked."
    if problem is not None and problem.get("status") == 413:
        status, title, detail = 431, "Request header fields too large", "The header fields are too large to be checked."
    document = {"type": "about:blank", "title": title, "status": status, "detail": detail}
    return _refusal(head, status, checked, document, None)


def _refusal(head: Head, status: int, checked: Checked, document: dict[str, Any], seconds: Optional[int]) -> Refusal:
    if checked.result.decision_id is not None:
        document["decision_id"] = checked.result.decision_id
    body = json.dumps(document, separators=(",", ":")).encode()
    return _response(head, status, checked, ("application/problem+json", body), seconds)


def _own_refusal(
    head: Head, status: int, checked: Checked, own: Mapping[str, Any], seconds: Optional[int]
) -> Refusal:
    kind = own.get("content_type") or "application/json"
    return _response(head, status, checked, (kind, own["body"].encode()), seconds)


def _response(
    head: Head, status: int, checked: Checked, content: tuple[str, bytes], seconds: Optional[int]
) -> Refusal:
    kind, body = content
    own = [("content-type", kind), ("content-length", str(len(body)))]
    if seconds is not None:
        own.append(("retry-after", str(seconds)))
    if status == 401:
        own.append(("www-authenticate", "Bearer"))
    return Refusal(status, own + added(list(checked.fields), own), b"" if head.method == "HEAD" else body)


def _plural(seconds: int) -> str:
    return "1 second" if seconds == 1 else f"{seconds} seconds"
