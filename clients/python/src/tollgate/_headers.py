"""Rate limit fields of any server's responses: how long not to call it, and what remains.

Reads ``Retry-After``, ``RateLimit`` and ``RateLimit-Policy`` (IETF draft), and the ``X-RateLimit-*`` kind. The rules are
in ``clients/conformance/README.md``; malformed fields are ignored as if absent.
"""

from __future__ import annotations

import calendar
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional

MAX_WAIT_MS = 3_600_000
_MAX_SECONDS = 999_999_999_999_999

_DIGITS = re.compile(r"[0-9]{1,15}\Z")
_SECONDS = re.compile(r"([0-9]+)(?:\.([0-9]+))?\Z")
_DAYS = "Mon|Tue|Wed|Thu|Fri|Sat|Sun"
_LONG_DAYS = "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday"
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH = "|".join(_MONTHS)
_TIME = r"([0-9]{2}):([0-9]{2}):([0-9]{2})"
_IMF = re.compile(rf"(?:{_DAYS}), ([0-9]{{2}}) ({_MONTH}) ([0-9]{{4}}) {_TIME} GMT\Z")
_RFC850 = re.compile(rf"(?:{_LONG_DAYS}), ([0-9]{{2}})-({_MONTH})-([0-9]{{2}}) {_TIME} GMT\Z")
_ASCTIME = re.compile(rf"(?:{_DAYS}) ({_MONTH}) ([0-9]{{2}}| [0-9]) {_TIME} ([0-9]{{4}})\Z")


@dataclass(frozen=True)
class Signals:
    """What a response says about the limits of its server."""

    refused: bool
    wait_ms: Optional[int] = None
    limit: Optional[int] = None
    remaining: Optional[int] = None
    reset_ms: Optional[int] = None


@dataclass
class _Member:
    name: str
    remaining: int
    reset_ms: Optional[int]
    limit: Optional[int] = None


def signals(status: int, headers: Iterable[tuple[str, str]], now_ms: int) -> Signals:
    """Returns what a response with these header lines says at ``now_ms`` (milliseconds since 1970)."""
    fields: dict[str, str] = {}
    for name, value in headers:
        lower = name.lower()
        if not (lower == "retry-after" or lower.startswith(("ratelimit", "x-ratelimit-", "x-rate-limit-"))):
            continue
        fields[lower] = f"{fields[lower]}, {value}" if lower in fields else value
    fields = {name: value.strip(" \t") for name, value in fields.items()}

    waits: list[int] = []
    if status in (403, 429, 503) and "retry-after" in fields:
        retry_after = _duration(fields["retry-after"], now_ms)
        if retry_after is not None:
            waits.append(retry_after)

    members = _members(fields)
    if not members:
        legacy = _legacy(fields, now_ms)
        members = [legacy] if legacy else []
    waits += [member.reset_ms for member in members if member.remaining == 0 and member.reset_ms is not None]
    pacing: Optional[_Member] = None
    # An absent reset is the shortest.
    if members:
        least = min(member.remaining for member in members)
        same = [member for member in members if member.remaining == least]
        pacing = max(same, key=lambda member: -1 if member.reset_ms is None else member.reset_ms)

    wait_ms = min(max(waits), MAX_WAIT_MS) if waits else None
    return Signals(
        refused=status in (429, 503) or (status == 403 and wait_ms is not None),
        wait_ms=wait_ms,
        limit=pacing.limit if pacing else None,
        remaining=pacing.remaining if pacing else None,
        reset_ms=min(pacing.reset_ms, MAX_WAIT_MS) if pacing and pacing.reset_ms is not None else None,
    )


def _seconds(text: str) -> Optional[int]:
    """Returns seconds as milliseconds, rounded up."""
    match = _SECONDS.match(text)
    if not match:
        return None
    whole = _MAX_SECONDS if len(match[1]) > 15 else int(match[1])
    fraction = match[2] or ""
    ms = int((fraction + "000")[:3])
    if fraction[3:].strip("0"):
        ms += 1
    return whole * 1000 + ms


def _date(text: str, now_ms: int) -> Optional[int]:
    """Returns an HTTP date as milliseconds since 1970."""
    if match := _IMF.match(text):
        day, month, year, hour, minute, second = match.groups()
        number = int(year)
    elif match := _RFC850.match(text):
        day, month, year, hour, minute, second = match.groups()
        number = 2000 + int(year)
        if number > time.gmtime(now_ms // 1000).tm_year + 50:
            number -= 100
    elif match := _ASCTIME.match(text):
        month, day, hour, minute, second, year = match.groups()
        number = int(year)
    else:
        return None
    at = _MONTHS.index(month) + 1
    if number < 1 or not 1 <= int(day) <= calendar.monthrange(number, at)[1]:
        return None
    if int(hour) > 23 or int(minute) > 59 or int(second) > 60:
        return None
    return calendar.timegm((number, at, int(day), int(hour), int(minute), int(second))) * 1000


def _duration(text: str, now_ms: int) -> Optional[int]:
    seconds = _seconds(text)
    if seconds is not None:
        return seconds
    date = _date(text, now_ms)
    return None if date is None else max(0, date - now_ms)


def _split(text: str, separator: str) -> Optional[list[str]]:
    """Splits outside of quoted strings; ``None`` if a quote is not closed."""
    parts, start, quoted, escaped = [], 0, False, False
    for at, char in enumerate(text):
        if escaped:
            escaped = False
        elif quoted and char == "\\":
            escaped = True
        elif char == '"':
            quoted = not quoted
        elif char == separator and not quoted:
            parts.append(text[start:at].strip(" \t"))
            start = at + 1
    if quoted:
        return None
    parts.append(text[start:].strip(" \t"))
    return parts


def _name(part: str) -> Optional[str]:
    if part.startswith('"'):
        if len(part) < 2 or not part.endswith('"'):
            return None
        return re.sub(r"\\(.)", r"\1", part[1:-1])
    return part if part and "=" not in part and '"' not in part else None


def _parse(text: Optional[str], required: str) -> list[tuple[str, dict[str, str]]]:
    """Returns the well-formed members of a structured list, each with its parameters."""
    found = []
    for member in (_split(text, ",") or []) if text else []:
        parts = _split(member, ";") or []
        name = _name(parts[0]) if parts else None
        if name is None:
            continue
        parameters = {}
        for part in parts[1:]:
            key, equals, value = part.partition("=")
            if equals:
                parameters[key.strip(" \t")] = value.strip(" \t")
        if _DIGITS.match(parameters.get(required, "")):
            found.append((name, parameters))
    return found


def _members(fields: dict[str, str]) -> list[_Member]:
    text = fields.get("ratelimit")
    policies: dict[str, int] = {}
    for name, parameters in _parse(fields.get("ratelimit-policy"), "q"):
        policies.setdefault(name, int(parameters["q"]))
    members = []
    for name, parameters in _parse(text, "r"):
        reset = parameters.get("t")
        if reset is not None and not _DIGITS.match(reset):
            continue
        members.append(
            _Member(
                name,
                int(parameters["r"]),
                None if reset is None else int(reset) * 1000,
                policies.get(name),
            )
        )
    draft7 = _draft7(text)
    return members + ([draft7] if draft7 else [])


def _draft7(text: Optional[str]) -> Optional[_Member]:
    figures: dict[str, str] = {}
    for member in (_split(text, ",") or []) if text else []:
        key, equals, value = member.partition("=")
        if equals and key in ("limit", "remaining", "reset"):
            figures[key] = value
    if "remaining" not in figures or not all(_DIGITS.match(value) for value in figures.values()):
        return None
    return _Member(
        "",
        int(figures["remaining"]),
        int(figures["reset"]) * 1000 if "reset" in figures else None,
        int(figures["limit"]) if "limit" in figures else None,
    )


def _legacy(fields: dict[str, str], now_ms: int) -> Optional[_Member]:
    for prefix in ("ratelimit-", "x-ratelimit-", "x-rate-limit-"):
        remaining = fields.get(prefix + "remaining", "")
        if not _DIGITS.match(remaining):
            continue
        limit = re.split("[,;]", fields.get(prefix + "limit", ""))[0].strip(" \t")
        reset_ms = _seconds(fields.get(prefix + "reset-after", ""))
        if reset_ms is None:
            reset_ms = _reset(fields.get(prefix + "reset", ""), now_ms)
        return _Member("", int(remaining), reset_ms, int(limit) if _DIGITS.match(limit) else None)
    return None


def _reset(text: str, now_ms: int) -> Optional[int]:
    ms = _seconds(text)
    if ms is None:
        return _duration(text, now_ms)
    if ms >= 10**15:
        return max(0, -(-ms // 1000) - now_ms)
    if ms >= 10**12:
        return max(0, ms - now_ms)
    return ms
