"""HTTP/1.1 without I/O: the bytes of a request, and a parser of its response.

One implementation for the synchronous and the asynchronous client. Rejected: ``http.client``, which has no deadline for
a whole response and no asynchronous counterpart.
"""

from __future__ import annotations

import base64
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Optional
from urllib.parse import unquote, urlsplit

from ._answers import INVALID_RESPONSE, MAX_BODY_BYTES, UNREACHABLE, Fault

_MAX_HEAD = 65_536
#: `int` takes more than digits, and fails on thousands of them.
_LENGTH = re.compile("[0-9]{1,15}")
_CHUNK = re.compile(b"[0-9A-Fa-f]{1,15}")


@dataclass(frozen=True)
class Server:
    """Where a server listens."""

    host: str
    port: int
    tls: Optional[ssl.SSLContext]
    prefix: str
    head: bytes

    @classmethod
    def parse(
        cls, url: str, *, token: Optional[str], headers: Mapping[str, str], context: Optional[ssl.SSLContext]
    ) -> Server:
        """Reads a base URL such as ``http://127.0.0.1:8080``."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not a server; write http://HOST:PORT or https://HOST:PORT")
        try:
            parts.hostname.encode("idna")
        except UnicodeError:
            raise ValueError(f"{url!r} has no valid host name; write http://HOST:PORT or https://HOST:PORT") from None
        if parts.query or parts.fragment:
            raise ValueError(f"{url!r} has a query or fragment; write only http://HOST:PORT")
        tls = (context or ssl.create_default_context()) if parts.scheme == "https" else None
        lines = {"host": parts.netloc.rpartition("@")[2], "content-type": "application/json"}
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            lines["authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
        if token is not None:
            lines["authorization"] = f"Bearer {token}"
        lines.update({name.lower(): value for name, value in headers.items()})
        for name, value in lines.items():
            if any(char in name + value for char in "\r\n\0"):
                raise ValueError(f"header {name!r} contains a line break")
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        port = parts.port or (443 if tls else 80)
        return cls(parts.hostname, port, tls, parts.path.rstrip("/"), head.encode("latin-1"))

    def request(self, path: str, body: bytes, method: str = "POST") -> bytes:
        """Returns the bytes of a request."""
        line = f"{method} {self.prefix}{path} HTTP/1.1\r\n".encode("ascii")
        return b"%s%scontent-length: %d\r\n\r\n%s" % (line, self.head, len(body), body)


@dataclass
class Response:
    """A response whose body is whole, or cut off beyond the bound."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes
    keeps_alive: bool


@dataclass
class ResponseParser:
    """Takes what a connection reads until there is a response."""

    _buffer: bytearray = field(default_factory=bytearray)
    _status: int = 0
    _headers: list[tuple[str, str]] = field(default_factory=list)
    _length: Optional[int] = None
    _is_chunked: bool = False
    _keeps_alive: bool = False
    _body: bytearray = field(default_factory=bytearray)
    _chunk: int = -1
    _is_interim: bool = False

    @property
    def is_untouched(self) -> bool:
        """Whether nothing has arrived yet: the connection may have been closed before the request was read."""
        return not self._buffer and not self._status and not self._is_interim

    def feed(self, data: bytes) -> Optional[Response]:
        """Takes more bytes; ``b""`` is the end of the connection. Returns the response when it is whole."""
        self._buffer += data
        while not self._status:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(self._buffer) > _MAX_HEAD:
                    raise Fault(INVALID_RESPONSE)
                if not data:
                    raise Fault(UNREACHABLE)
                return None
            self._head(bytes(self._buffer[:end]))
            del self._buffer[: end + 4]
            if 100 <= self._status < 200:
                # Interim, and without a body; the answer follows. The server has read the request.
                self._status, self._length, self._is_chunked, self._is_interim = 0, None, False, True
        if self._is_chunked:
            is_whole = self._chunks()
        elif self._length is not None:
            self._body += self._buffer
            self._buffer.clear()
            is_whole = len(self._body) >= self._length
            if len(self._body) > self._length:
                del self._body[self._length :]
                self._keeps_alive = False
        else:
            self._body += self._buffer
            self._buffer.clear()
            is_whole = not data
        if not is_whole and len(self._body) > MAX_BODY_BYTES:
            self._keeps_alive = False
            is_whole = True
        if is_whole:
            return Response(self._status, self._headers, bytes(self._body), self._keeps_alive and not self._buffer)
        if not data:
            raise Fault(UNREACHABLE)
        return None

    def _head(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        version, _, rest = lines[0].partition(" ")
        status = rest[:3]
        if version not in ("HTTP/1.1", "HTTP/1.0") or not (status.isascii() and status.isdigit() and len(status) == 3):
            raise Fault(INVALID_RESPONSE)
        self._status = int(status)
        self._keeps_alive = version == "HTTP/1.1"
        self._headers = []
        for line in lines[1:]:
            name, colon, value = line.partition(":")
            if not colon:
                raise Fault(INVALID_RESPONSE)
            name, value = name.lower(), value.strip(" \t")
            # A server that is guarded writes some of these fields itself.
            if "\r" in line or "\n" in line or "\0" in line:
                raise Fault(INVALID_RESPONSE)
            self._headers.append((name, value))
            if name == "content-length":
                if not _LENGTH.fullmatch(value) or self._length not in (None, int(value)):
                    raise Fault(INVALID_RESPONSE)
                self._length = int(value)
            elif name == "transfer-encoding":
                self._is_chunked = value.lower() == "chunked"
                if not self._is_chunked:
                    raise Fault(INVALID_RESPONSE)
            elif name == "connection" and "close" in value.lower():
                self._keeps_alive = False
        if self._status in (204, 304):
            self._length, self._is_chunked = 0, False
        elif self._length is None and not self._is_chunked:
            self._keeps_alive = False

    def _chunks(self) -> bool:
        while True:
            if self._chunk < 0:
                end = self._buffer.find(b"\r\n")
                if end < 0:
                    if len(self._buffer) > 1024:
                        raise Fault(INVALID_RESPONSE)
                    return False
                size = bytes(self._buffer[:end]).split(b";")[0].strip()
                if not _CHUNK.fullmatch(size):
                    raise Fault(INVALID_RESPONSE)
                self._chunk = int(size, 16)
                del self._buffer[: end + 2]
                if self._chunk == 0:
                    self._chunk = -2
            if self._chunk == -2:
                # Trailers, then an empty line.
                end = self._buffer.find(b"\r\n")
                if end < 0:
                    if len(self._buffer) > _MAX_HEAD:
                        raise Fault(INVALID_RESPONSE)
                    return False
                del self._buffer[: end + 2]
                if end == 0:
                    return True
                continue
            if len(self._buffer) < self._chunk + 2:
                if self._chunk > MAX_BODY_BYTES:
                    self._body += self._buffer
                    self._buffer.clear()
                return False
            self._body += self._buffer[: self._chunk]
            del self._buffer[: self._chunk + 2]
            self._chunk = -1
