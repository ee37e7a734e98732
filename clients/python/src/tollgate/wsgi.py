"""Middleware for WSGI apps (Flask, Django, Pyramid) that limits their callers.

>>> from tollgate import Client
>>> from tollgate.wsgi import TollgateMiddleware
>>> client = Client("http://127.0.0.1:8080", domain="shop")
>>> def app(environ, start_response): ...
>>> app = TollgateMiddleware(app, client)  # Flask: app.wsgi_app = TollgateMiddleware(app.wsgi_app, client)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any, Optional
from urllib.parse import quote

from ._core import Checked, Order
from ._guard import Guard, Head, added, holds_permit
from .client import Client, Reservation

__all__ = ["TollgateMiddleware"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]


class TollgateMiddleware:
    """Asks before each request. The result is ``environ["tollgate.result"]``.

    :param client: its ``fail`` decides what happens to requests if no server answers
    :param cost: units of a request, or a function of its environ
    :param attributes: a function of the environ; what it returns is checked besides what identifies the caller
    :param skip: a function of the environ that returns whether the request passes unchecked
    :param permits: whether permits of ``concurrency`` limits are returned when the response ends; ``auto`` finds out
        which paths have such limits
    :param permit_ttl_ms: longest time that a response may take before its permit expires
    :param max_delay_ms: longest delay (``action: delay``) that is waited for; longer ones get 503
    """

    def __init__(self, app: App, client: Client, **settings: Any) -> None:
        self._app = app
        self._client = client
        self._guard: Guard[Environ] = Guard(client._core, **settings)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        head = _head(environ)
        order = self._guard.order(head, environ)
        if order is None:
            return self._app(environ, start_response)
        checked = self._client._check(order)
        release = self._release(checked, order)
        try:
            refusal = self._guard.refusal(head, checked)
            environ["tollgate.result"] = checked.result
            if refusal is not None:
                if release is not None:
                    release()
                start_response(f"{refusal.status} {HTTPStatus(refusal.status).phrase}", _titled(refusal.fields))
                return [refusal.body]
            if checked.result.delay_ms > 0:
                time.sleep(checked.result.delay_ms / 1000)

            def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
                return start_response(status, headers + _titled(added(list(checked.fields), headers)), *more)

            response = self._app(environ, start)
        except BaseException:
            if release is not None:
                release()
            raise
        return response if release is None else _Released(response, release)

    def _release(self, checked: Checked, order: Order) -> Optional[Callable[[], None]]:
        """Returns what gives the permit back, once and in the background; ``None`` if there is none."""
        if checked.result.reservation is None or not holds_permit(checked.result):
            return None
        held: list[Reservation] = [Reservation(self._client, checked, order)]

        def release() -> None:
            try:
                reservation = held.pop()
            except IndexError:
                return
            try:
                self._client._threads().submit(reservation.settle, order.cost)
            except RuntimeError:
                # The interpreter is shutting down, and starts no threads.
                reservation.settle(order.cost)

        return release


class _Released:
    """A response whose permit is given back when it ends: read to its end, closed, or failed."""

    def __init__(self, response: Iterable[bytes], release: Callable[[], None]) -> None:
        self._response = response
        self._chunks: Optional[Iterator[bytes]] = None
        self._release = release

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            if self._chunks is None:
                self._chunks = iter(self._response)
            return next(self._chunks)
        except BaseException:
            self._release()
            raise

    def close(self) -> None:
        try:
            close = getattr(self._response, "close", None)
            if close is not None:
                close()
        finally:
            self._release()


def _head(environ: Environ) -> Head:
    headers = [
        (name[5:].replace("_", "-").lower(), value)
        for name, value in environ.items()
        if name.startswith("HTTP_") and isinstance(value, str)
    ]
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            headers.append((name.replace("_", "-").lower(), environ[name]))
    # As received, where the server tells it; else as the app reads it.
    raw = environ.get("RAW_URI") or environ.get("REQUEST_URI")
    decoded = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    path = raw.partition("?")[0] if raw else quote(decoded.encode("latin-1")) or "/"
    return Head(environ["REQUEST_METHOD"], path, environ.get("REMOTE_ADDR"), headers)


def _titled(fields: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name.title(), value) for name, value in fields]
