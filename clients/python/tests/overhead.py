"""Overhead of `limit` beside a bare call of the same check: `python tests/overhead.py [CALLS]`, with TOLLGATE_BINARY.

The calls alternate, so that whatever else the machine does meets both. Compared are medians of the time of a call, which
the server is part of, and sums of this process's own processor time.
"""

from __future__ import annotations

import asyncio
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import httpx
import requests
from servers import Tollgate

from tollgate import AsyncClient, Client

BODY = b'{"domain":"test","attributes":{"api_key":"k"}}'


class Timer:
    def __init__(self) -> None:
        self.times: dict[str, list[int]] = {}
        self.processor: dict[str, int] = {}

    def __call__(self, name: str) -> Timer:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._processor, self._time = time.process_time_ns(), time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        elapsed, used = time.perf_counter_ns() - self._time, time.process_time_ns() - self._processor
        self.times.setdefault(self._name, []).append(elapsed)
        self.processor[self._name] = self.processor.get(self._name, 0) + used

    def report(self, own: str, bare: str) -> None:
        median = {name: statistics.median(times) / 1000 for name, times in self.times.items()}
        used = {name: ns / len(self.times[name]) / 1000 for name, ns in self.processor.items()}
        print(f"{own} / {bare}: time {median[own]:.0f} / {median[bare]:.0f} us = {median[own] / median[bare]:.2f}, "
              f"processor {used[own]:.0f} / {used[bare]:.0f} us = {used[own] / used[bare]:.2f}")


def synchronous(url: str, calls: int) -> None:
    client, session, timer = Client(url, "test", timeout_ms=10_000), requests.Session(), Timer()
    for _ in range(calls):
        with timer("limit"):
            assert client.limit("k").source == "server"
        with timer("requests"):
            assert session.post(f"{url}/v1/check", data=BODY).json()["allowed"]
    timer.report("limit", "requests")


async def asynchronous(url: str, calls: int) -> None:
    timer = Timer()
    async with AsyncClient(url, "test", timeout_ms=10_000) as client, httpx.AsyncClient() as session:
        for _ in range(calls):
            with timer("await limit"):
                assert (await client.limit("k")).source == "server"
            with timer("httpx"):
                assert (await session.post(f"{url}/v1/check", content=BODY)).json()["allowed"]
    timer.report("await limit", "httpx")


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3_000
    with Tollgate() as server:
        synchronous(server.url, count)
        asyncio.run(asynchronous(server.url, count))
