"""Transports for `httpx` that respect the limits of the APIs they call.

>>> import httpx
>>> from tollgate.httpx import PoliteTransport
>>> client = httpx.Client(transport=PoliteTransport())
"""

from __future__ import annotations

import asyncio
from typing import Any, Optional

import httpx

from ._polite import Pause, PoliteCaller, Politeness, Received, Throttled, drive, lines

__all__ = ["AsyncPoliteTransport", "PoliteTransport", "Politeness", "Throttled"]


def _is_repeatable(request: httpx.Request) -> bool:
    try:
        request.content  # noqa: B018 - raises for a body that is a stream
    except httpx.RequestNotRead:
        return False
    return True


class PoliteTransport(httpx.BaseTransport):
    """Waits, paces and retries around another transport."""

    def __init__(self, transport: Optional[httpx.BaseTransport] = None, settings: Optional[Politeness] = None) -> None:
        self._transport = transport or httpx.HTTPTransport()
        self._caller = PoliteCaller(settings)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        call = self._caller.call(request.url.netloc.decode(), request.method, _is_repeatable(request))

        def once() -> Received:
            response = self._transport.handle_request(request)
            return Received(response.status_code, lines(response.headers.raw), response)

        answered: httpx.Response = drive(call, once, httpx.TransportError)
        return answered

    def close(self) -> None:
        self._transport.close()


class AsyncPoliteTransport(httpx.AsyncBaseTransport):
    """As `PoliteTransport`, for `httpx.AsyncClient`."""

    def __init__(
        self, transport: Optional[httpx.AsyncBaseTransport] = None, settings: Optional[Politeness] = None
    ) -> None:
        self._transport = transport or httpx.AsyncHTTPTransport()
        self._caller = PoliteCaller(settings)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        call = self._caller.call(request.url.netloc.decode(), request.method, _is_repeatable(request))
        reply: Optional[Received] = None
        failure: Optional[httpx.TransportError] = None
        try:
            step: Any = next(call)
            while True:
                if isinstance(step, Pause):
                    await asyncio.sleep(step.ms / 1000)
                    step = call.send(None)
                    continue
                if reply is not None:
                    await reply.response.aclose()
                reply, failure = None, None
                try:
                    response = await self._transport.handle_async_request(request)
                    reply = Received(response.status_code, lines(response.headers.raw), response)
                except httpx.TransportError as error:
                    failure = error
                step = call.send(reply)
        except StopIteration as done:
            if failure is not None:
                raise failure from None
            answered: httpx.Response = done.value.response
            return answered

    async def aclose(self) -> None:
        await self._transport.aclose()
