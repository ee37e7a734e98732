"""An adapter for `requests` that respects the limits of the APIs it calls.

>>> import requests
>>> from tollgate.requests import PoliteAdapter
>>> session = requests.Session()
>>> session.mount("https://", PoliteAdapter())
"""

from __future__ import annotations

import time
from typing import Any, Optional
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter

from ._polite import Pause, PoliteCaller, Politeness, Received, Throttled, lines

__all__ = ["PoliteAdapter", "Politeness", "Throttled"]


class PoliteAdapter(HTTPAdapter):
    """Waits, paces and retries around the usual adapter."""

    def __init__(self, settings: Optional[Politeness] = None, **options: Any) -> None:
        self._caller = PoliteCaller(settings)
        super().__init__(**options)

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        is_repeatable = request.body is None or isinstance(request.body, (bytes, str))
        call = self._caller.call(urlsplit(request.url or "").netloc, request.method or "GET", is_repeatable)
        reply: Optional[Received] = None
        failure: Optional[requests.RequestException] = None
        try:
            step = next(call)
            while True:
                if isinstance(step, Pause):
                    time.sleep(step.ms / 1000)
                    step = call.send(None)
                    continue
                if reply is not None:
                    reply.response.close()
                reply, failure = None, None
                try:
                    response = super().send(request, *arguments, **options)
                    reply = Received(response.status_code, lines(response.raw.headers.items()), response)
                except requests.ConnectionError as error:
                    failure = error
                step = call.send(reply)
        except StopIteration as done:
            if failure is not None:
                raise failure from None
            answered: requests.Response = done.value.response
            return answered
