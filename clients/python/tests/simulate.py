"""Virtual time: callers of one API that is limited, with plain exponential backoff or with pacing.

Prints how many requests were refused and how many were served. ``python tests/simulate.py``
"""

from __future__ import annotations

import heapq
import pathlib
import random
import sys
from dataclasses import dataclass

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

from tollgate._headers import Signals
from tollgate._pacing import AdaptiveThrottle, Pacer, backoff_ms

LIMIT, WINDOW_MS, LATENCY_MS = 100, 10_000, 40
CALLERS, SPAN_MS = 20, 120_000


@dataclass
class Outcome:
    served: int
    refused: int


def run(kind: str, seed: int) -> Outcome:
    """Twenty workers of one process that all want to call as often as they can."""
    rng = random.Random(seed)
    pacer, throttle = Pacer(), AdaptiveThrottle()
    used: dict[int, int] = {}
    served = refused = 0
    # (time, order, worker, event, attempt)
    events = [(rng.randrange(1_000), at, at, "ready", 0) for at in range(CALLERS)]
    heapq.heapify(events)
    order = CALLERS
    while events:
        now, _, worker, event, attempt = heapq.heappop(events)
        if now >= SPAN_MS:
            break

        def later(ms: int, what: str, attempt: int) -> None:
            nonlocal order
            order += 1
            heapq.heappush(events, (now + ms, order, worker, what, attempt))

        if event == "ready":
            if kind == "polite":
                if rng.random() < throttle.probability(now):
                    throttle.request(now)
                    later(backoff_ms(attempt, rng.random()), "ready", attempt + 1)
                    continue
                throttle.request(now)
                later(pacer.send(now), "send", attempt)
            else:
                later(0, "send", attempt)
            continue
        window = now // WINDOW_MS
        used[window] = used.get(window, 0) + 1
        is_refused = used[window] > LIMIT
        reset_ms = (window + 1) * WINDOW_MS - now
        if kind == "polite":
            said = Signals(is_refused, reset_ms if used[window] >= LIMIT else None, LIMIT, max(0, LIMIT - used[window]), reset_ms)
            pacer.response(now + LATENCY_MS, said, rng.random())
            if not is_refused:
                throttle.accept(now + LATENCY_MS)
        if is_refused:
            refused += 1
            later(LATENCY_MS + backoff_ms(attempt, rng.random()), "ready", attempt + 1)
        else:
            served += 1
            later(LATENCY_MS + rng.randrange(50), "ready", 0)
    return Outcome(served, refused)


if __name__ == "__main__":
    for kind in ("backoff", "polite"):
        runs = [run(kind, seed) for seed in range(100)]
        print(kind, "served", sum(each.served for each in runs), "refused", sum(each.refused for each in runs))
