"""The cases that the clients of all languages share: ``clients/conformance``."""

from __future__ import annotations

import dataclasses
import heapq
import json
import math
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))

from tollgate import _answers, _deny_cache, _failover, _guard, _headers, _latency, _pacing
from tollgate._core import Checked, Core
from tollgate.result import Result

CASES = pathlib.Path(__file__).parents[2] / "conformance"


def load(name):
    return json.loads((CASES / f"{name}.json").read_text())


class Conformance(unittest.TestCase):
    def test_headers(self):
        document = load("headers")
        self.assertEqual(document["max_wait_ms"], _headers.MAX_WAIT_MS)
        for case in document["cases"]:
            with self.subTest(case["name"]):
                signals = _headers.signals(case["status"], [tuple(line) for line in case["headers"]], case["now_ms"])
                self.assertEqual(dataclasses.asdict(signals), case["expect"])

    def test_answers(self):
        document = load("answers")
        self.assertEqual(document["max_body_bytes"], _answers.MAX_BODY_BYTES)
        for kind, decode in (("check", _answers.check), ("settle_and_cancel", _answers.ended)):
            for case in document[kind]:
                with self.subTest(case["name"]):
                    body = case["body"].encode().ljust(case.get("pad_with_spaces_to_bytes", 0))
                    try:
                        result, fault = dataclasses.asdict(decode(case["status"], body)), None
                        self.assertEqual(result.pop("response", None), case.get("response"))
                        for name in ("limits", "problem"):  # of this client alone
                            result.pop(name, None)
                    except _answers.Fault as error:
                        result, fault = None, error.reason
                    self.assertEqual((result, fault), (case.get("result"), case.get("fault")))

    def test_heads(self):
        document = load("heads")
        core = Core("http://127.0.0.1:1", "shop")
        for case in document["bodies"]:
            with self.subTest(case["name"]):
                subject = {"request": case["head"]} | ({"attributes": case["attributes"]} if case["attributes"] else {})
                order = core.order(subject, 1 if case["cost"] is None else case["cost"], None)
                self.assertEqual(json.loads(order.body), case["expect"])
        head = _guard.Head("GET", "/", "192.0.2.1", [])
        for case in document["answers"]:
            with self.subTest(case["name"]):
                try:
                    result, fault = _answers.check(case["status"], case["body"].encode()), None
                except _answers.Fault as error:
                    result, fault = None, error.reason
                self.assertEqual(fault, case.get("fault"))
                if result is None:
                    continue
                want = case["result"]
                found = (result.allowed, result.reason, result.source)
                self.assertEqual(found, (want["allowed"], want["reason"], want["source"]))
                refusal = _guard._rejected(head, Checked(result))
                self.assertEqual(refusal.status, want["problem_status"] or 400)
                if want["problem_status"] == case["status"]:
                    self.assertEqual(json.loads(refusal.body), json.loads(case["body"]))

    def test_failover(self):
        document = load("failover")
        self.assertEqual(
            (document["cooldown_ms"], document["max_cooldown_ms"]), (_failover.COOLDOWN_MS, _failover.MAX_COOLDOWN_MS)
        )
        for case in document["deadlines"]:
            self.assertEqual(_failover.deadline_ms(case["own_ms"], case["caller_ms"]), case["expect"]["deadline_ms"])
        for case in document["attempts"]:
            attempt = _failover.attempt_ms(case["deadline_ms"], case["elapsed_ms"], case["servers_left"])
            self.assertEqual(attempt, case["expect"]["attempt_ms"], case)
        for case in document["sequences"]:
            failover = _failover.Failover(case["servers"])
            for step in case["steps"]:
                with self.subTest(case["name"], step=step):
                    if step["event"] == "fault":
                        failover.fault(step["server"], step["at_ms"])
                    elif step["event"] == "ok":
                        failover.answer(step["server"])
                    else:
                        self.assertEqual(failover.order(step["at_ms"]), step["expect"])

    def test_hedging(self):
        document = load("hedging")
        self.assertEqual(document["default_hedge_after_ms"], _failover.HEDGE_AFTER_MS)
        for case in document["cases"]:
            with self.subTest(case["name"]):
                self.assertEqual(self.hedge(case), case["expect"])

    def hedge(self, case):
        servers, deadline, budget = case["servers"], case["deadline_ms"], _pacing.RetryBudget()
        budget.balance = case["budget"]
        share = deadline // len(servers)
        hedge = _failover.Hedge(list(range(len(servers))), min(case["hedge_after_ms"], share), share, budget)
        timer, end = len(servers), len(servers) + 1
        events, sent, canceled, ended_at = [(deadline, end)], [], [], None

        def send(server, now):
            if server is not None:
                sent.append([server, now])
                heapq.heappush(events, (now + servers[server]["after_ms"], server))

        send(hedge.start(), 0)
        heapq.heappush(events, (hedge.ask_next_ms, timer))
        while events:
            now, server = heapq.heappop(events)
            answer = servers[server] if server < timer else {}
            if ended_at is not None:
                if answer.get("reservation"):
                    canceled.append([server, answer["reservation"]])
                continue
            if server == end:
                hedge.deadline()
                ended_at = now
            elif server == timer:
                send(hedge.timer(), now)
                if hedge.ask_next_ms is not None:
                    heapq.heappush(events, (hedge.ask_next_ms, timer))
            elif answer["answer"] == "fault":
                send(hedge.fault(server), now)
            else:
                verdict = answer["answer"]
                hedge.answer(server, allowed=verdict == "allowed", denied=verdict == "denied")
            if hedge.is_over:
                ended_at = now
        is_denied = hedge.winner is not None and servers[hedge.winner]["answer"] == "denied"
        return {
            "sent": sent,
            "winner": hedge.winner,
            "at_ms": ended_at,
            "canceled": canceled,
            "cacheable": is_denied and hedge.is_confirmed,
            "budget": budget.balance,
            "timed_out": [] if hedge.timed_out is None else [hedge.timed_out],
        }

    def test_hedge_after(self):
        document = load("hedge-after")
        self.assertEqual(document["default_hedge_after_us"], _latency.DEFAULT_US)
        for case in document["cases"]:
            latency = _latency.LatencyP95()
            for step in case["steps"]:
                with self.subTest(case["name"], step=step):
                    for latency_us in step["latencies_us"] * step["times"]:
                        latency.record(latency_us, is_fault=step.get("fault", False))
                    expected = step["expect"]["hedge_after_us"]
                    self.assertEqual((latency.estimate_us, latency.estimate_ms), (expected, math.ceil(expected / 1000)))

    def test_deny_cache(self):
        document = load("deny-cache")
        self.assertEqual(
            (document["default_max_entries"], document["max_age_ms"]), (_deny_cache.MAX_ENTRIES, _deny_cache.MAX_AGE_MS)
        )
        for case in document["sequences"]:
            cache = _deny_cache.DenyCache(case["max_entries"])
            for step in case["steps"]:
                with self.subTest(case["name"], step=step):
                    if step["event"] == "denied":
                        times = {name: step[name] for name in ("retry_after_ms", "reset_ms")}
                        denial = Result(
                            allowed=False,
                            source="server",
                            reason="denied",
                            cacheable=step.get("cacheable", True),
                            **times,
                        )
                        cache.store(step["key"], step["cost"], denial, step["at_ms"])
                        continue
                    if step["event"] == "clear":
                        cache.clear(step.get("key"))
                        continue
                    hit = cache.lookup(step["key"], step["cost"], step["at_ms"])
                    shown = None if hit is None else {"retry_after_ms": hit.retry_after_ms, "reset_ms": hit.reset_ms}
                    self.assertEqual((shown, len(cache)), (step["expect"], step["entries"]))
                    if hit is not None:
                        self.assertEqual((hit.source, hit.reason, hit.allowed), ("cache", "denied", False))

    def test_pacing(self):
        document = load("pacing")
        for case in document["cases"]:
            delay = _pacing.pace_ms(case["limit"], case["remaining"], case["reset_ms"], case["since_last_ms"])
            self.assertEqual(delay, case["expect"]["delay_ms"], case)
        for case in document["sequences"]:
            pacer = _pacing.Pacer()
            for step in case["steps"]:
                with self.subTest(case["name"], step=step):
                    if step["event"] == "send":
                        self.assertEqual(pacer.send(step["at_ms"]), step["expect"]["delay_ms"])
                    elif step["event"] == "failed":
                        pacer.failed()
                    else:
                        signals = _headers.Signals(refused=False, **step["signals"])
                        pacer.response(step["at_ms"], signals, step.get("random", 0))
                        if "expect" in step:
                            self.assertEqual(pacer.blocked_until_ms, step["expect"]["blocked_until_ms"])

    def test_backoff(self):
        for case in load("backoff")["cases"]:
            delay = _pacing.backoff_ms(case["attempt"], case["random"], case["wait_ms"])
            got = {"bound_ms": _pacing.backoff_bound_ms(case["attempt"]), "delay_ms": delay}
            self.assertEqual(got, case["expect"], case)

    def test_retry_budget(self):
        for case in load("retry-budget")["sequences"]:
            budget = _pacing.RetryBudget()
            for step in case["steps"]:
                with self.subTest(case["name"], step=step):
                    if step["event"] == "retry":
                        self.assertEqual(budget.retry(), step["granted"])
                    else:
                        budget.request()
                    self.assertEqual(budget.balance, step["balance"])

    def test_adaptive_throttling(self):
        document = load("adaptive-throttling")
        self.assertEqual((document["k"], document["window_ms"]), (_pacing.AdaptiveThrottle.K, 120_000))
        for case in document["sequences"]:
            throttle = _pacing.AdaptiveThrottle()
            for step in case["steps"]:
                with self.subTest(case["name"], step=step):
                    if step["event"] == "probability":
                        probability = throttle.probability(step["at_ms"])
                        self.assertEqual((throttle.requests, throttle.accepts), (step["requests"], step["accepts"]))
                        self.assertEqual(probability, step["expect"])
                        if "random" in step:
                            self.assertEqual(step["random"] < probability, step["rejected"])
                        continue
                    for _ in range(step.get("times", 1)):
                        getattr(throttle, step["event"])(step["at_ms"])


if __name__ == "__main__":
    unittest.main()
