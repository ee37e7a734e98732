"""An adapter for `requests` that respects the limits of the APIs it calls.

>>> import requests
>>> from tollgate.requests import PoliteAdapter
>>> session = requests.Session()
>>> session.mount("https://", PoliteAdapter())
"""

from __future__ import annotations

from typing import Any, Optional
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter

from ._polite import PoliteCaller, Politeness, Received, Throttled, drive, lines

__all__ = ["PoliteAdapter", "Politeness", "Throttled"]


class PoliteAdapter(HTTPAdapter):
    """Waits, paces and retries around the usual adapter."""

    def __init__(self, settings: Optional[Politeness] = None, **options: Any) -> None:
        self._caller = PoliteCaller(settings)
        super().__init__(**options)

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        is_repeatable = request.body is None or isinstance(request.body, (bytes, str))
        call = self._caller.call(urlsplit(request.url or "").netloc, request.method or "GET", is_repeatable)

        def once() -> Received:
            response = HTTPAdapter.send(self, request, *arguments, **options)
            return Received(response.status_code, lines(response.raw.headers.items()), response)

        answered: requests.Response = drive(call, once, requests.ConnectionError)
        return answered
