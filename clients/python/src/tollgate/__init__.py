"""Client of Tollgate, the rate limiter: limit callers, guard servers, and respect the limits of other APIs.

>>> from tollgate import Client
>>> limiter = Client("http://127.0.0.1:8080", domain="sample")
>>> limiter.limit("key-1").allowed  # doctest: +SKIP
True
"""

from .aio import AsyncClient, AsyncReservation
from .client import Client, Reservation
from .result import Ended, LimitStatus, Result

__all__ = ["AsyncClient", "AsyncReservation", "Client", "Ended", "LimitStatus", "Reservation", "Result"]
__version__ = "0.1.0"
