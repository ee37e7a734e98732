"""Middleware for ASGI apps (FastAPI, Starlette, Django, Quart) that limits their callers.

>>> from tollgate import AsyncClient
>>> from tollgate.asgi import TollgateMiddleware
>>> client = AsyncClient("http://127.0.0.1:8080", domain="shop")
>>> async def app(scope, receive, send): ...
>>> app = TollgateMiddleware(app, client)  # FastAPI, Starlette: app.add_middleware(TollgateMiddleware, client=client)
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Optional
from urllib.parse import quote

from ._core import Checked, Order
from ._guard import Fields, Guard, Head, Refusal, added, holds_permit
from .aio import AsyncClient, AsyncReservation

__all__ = ["TollgateMiddleware"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class TollgateMiddleware:
    """Asks before each request and WebSocket. The result is ``scope["tollgate"]``.

    :param client: its ``fail`` decides what happens to requests if no server answers
    :param cost: units of a request, or a function of its scope
    :param attributes: a function of the scope; what it returns is checked besides what identifies the caller
    :param skip: a function of the scope that returns whether the request passes unchecked
    :param permits: whether permits of ``concurrency`` limits are returned when the response ends; ``auto`` finds out
        which paths have such limits
    :param permit_ttl_ms: longest time that a response may take before its permit expires
    :param max_delay_ms: longest delay (``action: delay``) that is waited for; longer ones get 503
    """

    def __init__(self, app: App, client: AsyncClient, **settings: Any) -> None:
        self._app = app
        self._client = client
        self._guard: Guard[Scope] = Guard(client._core, **settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        head = _head(scope)
        order = self._guard.order(head, scope)
        if order is None:
            return await self._app(scope, receive, send)
        checked = await self._client._check(order)
        release = self._release(checked, order)
        try:
            refusal = self._guard.refusal(head, checked)
            scope["tollgate"] = checked.result
            if refusal is not None:
                return await _refuse(scope, receive, send, refusal)
            if checked.result.delay_ms > 0:
                await asyncio.sleep(checked.result.delay_ms / 1000)
            await self._app(scope, receive, _sender(send, list(checked.fields), release))
        finally:
            release()

    def _release(self, checked: Checked, order: Order) -> Callable[[], None]:
        """Returns what gives the permit back: once, in a task of its own, which a caller that leaves does not cancel."""
        reservation: Optional[AsyncReservation] = None
        if checked.result.reservation is not None and holds_permit(checked.result):
            reservation = AsyncReservation(self._client, checked, order)

        def release() -> None:
            nonlocal reservation
            held, reservation = reservation, None
            if held is not None:
                self._client._spawn(held.settle(order.cost))

        return release


def _head(scope: Scope) -> Head:
    raw = scope.get("raw_path")
    path = raw.decode("latin-1").partition("?")[0] if raw else quote(scope["path"])
    client = scope.get("client")
    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
    return Head(scope.get("method", "GET"), path, client[0] if client else None, headers)


def _bytes(fields: Fields) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]


def _sender(send: Send, fields: Fields, release: Callable[[], None]) -> Send:
    async def sender(message: Message) -> None:
        kind = message["type"]
        if kind in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
            own = list(message.get("headers") or ())
            names = [(name.decode("latin-1"), "") for name, _ in own]
            message = {**message, "headers": own + _bytes(added(fields, names))}
        await send(message)
        # Work that an app does after its response does not hold the permit.
        if kind == "http.response.body" and not message.get("more_body"):
            release()

    return sender


async def _refuse(scope: Scope, receive: Receive, send: Send, refusal: Refusal) -> None:
    kind = "http.response"
    if scope["type"] == "websocket":
        await receive()
        if "websocket.http.response" not in (scope.get("extensions") or {}):
            # The server answers 403: without the extension a refusal has no status of its own.
            return await send({"type": "websocket.close", "code": 1008})
        kind = "websocket.http.response"
    await send({"type": f"{kind}.start", "status": refusal.status, "headers": _bytes(refusal.fields)})
    await send({"type": f"{kind}.body", "body": refusal.body})
