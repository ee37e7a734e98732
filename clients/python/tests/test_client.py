"""Both clients against real servers, and against faults."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import sys
import threading
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

from servers import FaultyServer, Tollgate
from test_conformance import load

from tollgate import AsyncClient, Client


ALLOWED = json.dumps({"allowed": True, "decision_id": "d", "origin": "store", "limits": []})
DENIED = json.dumps(
    {
        "allowed": False,
        "decision_id": "d",
        "origin": "store",
        "denied_by": "r",
        "retry_after_ms": 60_000,
        "limits": [{"rule": "r", "limit": 1, "remaining": 0, "reset_ms": 60_000, "over": True}],
    }
)


class Loop:
    """Calls an `AsyncClient` from synchronous tests, so that both clients run the same ones."""

    def __init__(self, *arguments, **settings):
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient(*arguments, **settings)

    def __getattr__(self, name):
        method = getattr(self._client, name)
        if not asyncio.iscoroutinefunction(method):
            return method
        return lambda *arguments, **named: self._wrap(self._loop.run_until_complete(method(*arguments, **named)))

    def _wrap(self, value):
        if type(value).__name__ != "AsyncReservation":
            return value
        outer = self

        class Reservation:
            result, id, allowed = value.result, value.id, value.allowed

            def settle(self, cost):
                return outer._loop.run_until_complete(value.settle(cost))

            def cancel(self):
                return outer._loop.run_until_complete(value.cancel())

        return Reservation()

    def close(self):
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._client.close())
            self._loop.close()


class ClientTest(unittest.TestCase):
    kind = Client

    @classmethod
    def setUpClass(cls):
        cls.server = Tollgate()

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def client(self, url=None, **settings):
        settings.setdefault("timeout_ms", 5_000)
        client = self.kind(url or self.server.url, "test", **settings)
        self.addCleanup(client.close)
        return client

    def core(self, client):
        return getattr(client, "_client", client)._core

    def user(self):
        return {"user": f"{self.kind.__name__}-{self.id()}"}

    def test_limits_as_the_rules_say(self):
        client, user = self.client(), self.user()
        results = [client.limit(user) for _ in range(4)]
        self.assertEqual([result.allowed for result in results], [True, True, True, False])
        self.assertEqual([result.remaining for result in results], [2, 1, 0, 0])
        denied = results[-1]
        self.assertEqual((denied.source, denied.reason, denied.rule, denied.limit), ("server", "denied", "per-user", 3))
        self.assertTrue(0 < denied.retry_after_ms <= 3_600_000)
        self.assertEqual(len(denied.decision_id), 32)

    def test_an_identifier_is_an_api_key(self):
        self.assertEqual(self.client().limit("key-1").rule, "per-key")

    def test_a_known_denial_is_not_asked_again(self):
        client, user = self.client(), self.user()
        client.limit(user, cost=3)
        self.assertEqual((client.limit(user).source, client.limit(user).source), ("server", "cache"))
        self.assertEqual(client.peek(user).source, "server")
        client.clear_deny_cache()
        self.assertEqual(client.limit(user).source, "server")

    def test_peek_charges_nothing(self):
        client, user = self.client(), self.user()
        self.assertEqual([client.peek(user).remaining for _ in range(3)], [3, 3, 3])

    def test_batches_keep_their_order(self):
        client, user = self.client(), self.user()
        results = client.limit_batch([(user, 0), ("k", 1), (user, 3)])
        self.assertEqual([result.rule for result in results], ["per-user", "per-key", "per-user"])

    def test_reservations_are_settled_and_canceled(self):
        client, user = self.client(), self.user()
        reservation = client.reserve(user, cost=3)
        self.assertTrue(reservation.allowed)
        self.assertFalse(client.reserve(user).allowed)
        settled = reservation.settle(1)
        self.assertEqual((settled.ended, settled.cost), ("settled", 1))
        self.assertEqual(client.peek(user).remaining, 2)
        other = client.reserve(user, cost=2)
        self.assertEqual(other.cancel().ended, "canceled")
        self.assertEqual(client.peek(user).remaining, 2)
        self.assertEqual(reservation.settle(2).reason, "conflict")

    def test_waits_until_it_is_allowed(self):
        client = self.client()
        subject = {"fast": self.id()}
        self.assertTrue(all(client.wait(subject, timeout_ms=30_000).allowed for _ in range(4)))
        self.assertFalse(client.wait(subject, timeout_ms=30_000, cost=100).allowed)

    def test_faults_end_as_the_conformance_suite_says(self):
        for case in load("faults")["cases"]:
            with self.subTest(case["name"]):
                servers = [FaultyServer(does if isinstance(does, str) else (does["status"], does["body"])) for does in case["servers"]]
                faults = []
                client = self.kind(
                    [server.url for server in servers],
                    "test",
                    fail=case["policy"],
                    timeout_ms=300 * len(servers),
                    on_fault=lambda url, reason: faults.append(url),
                )
                result = client.limit("k")
                client.close()
                last = [server.url for server in servers].index(faults[-1]) + 1 if faults else 0
                asked = list(range(last if result.source == "policy" else last + 1))
                got = {
                    "allowed": result.allowed,
                    "source": result.source,
                    "reason": result.reason,
                    "retry_after_ms": result.retry_after_ms,
                    "asked": asked,
                }
                for server in servers:
                    server.stop()
                self.assertEqual(got, case["expect"])

    def test_two_servers_one_dead(self):
        dead = FaultyServer("refused")
        client = self.client([dead.url, self.server.url], fail="closed")
        self.assertEqual([client.limit(self.user()).source for _ in range(2)], ["server"] * 2)

    def test_a_restarted_server_is_reached_over_a_new_connection(self):
        with Tollgate() as first:
            client = self.client(first.url, fail="closed")
            self.assertTrue(client.limit("k").allowed)
        self.assertEqual(client.limit("k").reason, "unreachable")

    def test_hedging_charges_once(self):
        slow = FaultyServer("hang")
        self.addCleanup(slow.stop)
        client, user = self.client([slow.url, self.server.url], hedge_after_ms=1), self.user()
        result = client.limit(user)
        self.assertEqual((result.source, result.allowed), ("server", True))
        self.assertEqual(self.client().peek(user).remaining, 2)
        # The answer of the other server does not wait for it.
        self.assertTrue(slow.received.wait(60))
        self.assertEqual(json.loads(slow.asked[0])["deadline_ms"], 10_000)

    def test_hedging_to_one_store_gives_the_slower_charge_back(self):
        client, user = self.client([self.server.url, self.server.url], hedge_after_ms=0), self.user()
        self.assertTrue(client.limit(user).allowed)
        client.close()
        self.assertEqual(self.client().peek(user).remaining, 2)

    def test_a_hedged_request_is_not_denied_because_of_its_own_hedge(self):
        quick = FaultyServer((429, DENIED))

        def charged_first():
            quick.responded.wait(60)
            return 200, ALLOWED

        slow = FaultyServer(charged_first)
        self.addCleanup(quick.stop)
        self.addCleanup(slow.stop)
        client = self.client([slow.url, quick.url], hedge_after_ms=1, timeout_ms=60_000)
        self.assertTrue(client.limit("k").allowed)
        self.assertEqual((len(slow.asked), len(quick.asked)), (1, 1), "nothing is given back")
        # Denials that lost are not cached: the next request is asked for.
        self.assertEqual(client.limit("k").source, "server")

    def test_a_denial_beside_a_request_that_did_not_answer_is_not_cached(self):
        quick, never = FaultyServer((429, DENIED)), FaultyServer("hang")
        self.addCleanup(quick.stop)
        self.addCleanup(never.stop)
        client = self.client([never.url, quick.url], hedge_after_ms=1, timeout_ms=2_000)
        result = client.limit("k")
        self.assertEqual((result.source, result.reason, len(self.core(client).cache)), ("server", "denied", 0))
        alone = self.client(quick.url)
        self.assertEqual((alone.limit("k").reason, len(self.core(alone).cache)), ("denied", 1))

    def test_calls_take_their_hedges_from_one_budget(self):
        quick, never = FaultyServer((200, ALLOWED)), FaultyServer("hang")
        self.addCleanup(quick.stop)
        self.addCleanup(never.stop)
        client = self.client([never.url, quick.url], hedge_after_ms=1, timeout_ms=2_000)
        hedges = self.core(client).hedges
        for balance in (9_000, 8_100):
            self.assertEqual((client.limit("k").source, hedges.balance), ("server", balance))
        client.reserve("k")
        self.assertEqual(hedges.balance, 7_200)

    def test_the_p95_counts_first_requests_that_their_hedges_overtook(self):
        quick = FaultyServer((200, ALLOWED))

        def overtaken():
            quick.responded.wait(60)
            time.sleep(0.05)
            return 200, ALLOWED

        slow = FaultyServer(overtaken)
        self.addCleanup(quick.stop)
        self.addCleanup(slow.stop)
        client = self.client([slow.url, quick.url], hedge_after_ms="p95", timeout_ms=60_000)
        core = self.core(client)
        self.assertEqual(core.hedge_after_ms, 3)
        # Counted as the hundredth, so that the estimate is made.
        for _ in range(90):
            core.latency.record(1_000)
        for _ in range(9):
            core.latency.record(500_000)
        self.assertEqual(client.limit("k").source, "server")
        client.peek("k")
        client.close()
        self.assertEqual((core.latency.recorded, core.hedge_after_ms), (100, 512))

    def test_a_fixed_time_to_hedge_after_measures_nothing(self):
        client = self.client([self.server.url, self.server.url], hedge_after_ms=2.5)
        self.assertTrue(client.limit(self.user()).allowed)
        client.close()
        self.assertEqual((self.core(client).latency.recorded, self.core(client).hedge_after_ms), (0, 2.5))

    def test_a_server_that_has_used_its_share_of_the_deadline_moves_back(self):
        quick, never, faults = FaultyServer((200, ALLOWED)), FaultyServer("hang"), []
        self.addCleanup(quick.stop)
        self.addCleanup(never.stop)
        report = lambda *fault: faults.append(fault)
        client = self.client([never.url, quick.url], hedge_after_ms=2_000, timeout_ms=2_000, on_fault=report)
        self.assertEqual((client.limit("k").source, faults), ("server", [(never.url, "timeout")]))
        self.assertEqual(self.core(client).hedges.balance, 10_000)

    def test_a_reservation_that_both_servers_return_is_not_canceled(self):
        answer = json.dumps({**json.loads(ALLOWED), "reservation": "r"})
        quick = FaultyServer((200, answer))

        def same_reservation():
            quick.responded.wait(60)
            return 200, answer

        slow = FaultyServer(same_reservation)
        self.addCleanup(quick.stop)
        self.addCleanup(slow.stop)
        client = self.client([slow.url, quick.url], hedge_after_ms=1, timeout_ms=60_000)
        self.assertEqual(client.reserve("k", idempotency_key="i").id, "r")
        client.close()
        self.assertEqual((len(slow.asked), len(quick.asked)), (1, 1))

    def test_wrong_arguments_are_explained(self):
        for arguments, settings, text in [
            (("ftp://x", "d"), {}, "write http://"),
            ((), {}, "missing"),
            (("http://x", ""), {}, "domain"),
            (("http://x", "d"), {"fail": "maybe"}, "'open' or 'closed'"),
            (("http://x", "d"), {"timeout_ms": 0}, "timeout_ms"),
            (("http://x", "d"), {"hedge_after_ms": -1}, "milliseconds, such as 3, or 'p95'"),
            (("http://x", "d"), {"hedge_after_ms": float("nan")}, "such as 3, or 'p95'"),
            (("http://x", "d"), {"hedge_after_ms": "p99"}, "such as 3, or 'p95'"),
            (("http://x", "d"), {"hedge_after_ms": True}, "such as 3, or 'p95'"),
        ]:
            with self.assertRaisesRegex((ValueError, TypeError), text):
                Client(*arguments, **settings)
        for cost in (-1, 1.5, True, "1"):
            with self.assertRaises(ValueError):
                self.client().limit("k", cost=cost)
        with self.assertRaises(ValueError):
            self.client().limit({"user": 5})


class AsyncClientTest(ClientTest):
    kind = Loop

    def test_a_forked_process_has_its_own_connections(self):
        client, user = Client(self.server.url, "test", timeout_ms=5_000), {"user": self.id()}
        self.addCleanup(client.close)
        self.assertEqual(client.limit(user).remaining, 2)
        self.assertEqual(client._idle[0].qsize(), 1)
        child = os.fork()
        if child == 0:
            os._exit(0 if client._idle[0].empty() and client.limit(user).remaining == 1 else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual((client._idle[0].qsize(), client.limit(user).remaining), (1, 0))

    def test_threads_share_a_client(self):
        client, user = Client(self.server.url, "test", timeout_ms=5_000), {"user": self.id()}
        allowed = []
        threads = [threading.Thread(target=lambda: allowed.append(client.limit(user).allowed)) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        client.close()
        self.assertEqual(sorted(allowed), [False] * 13 + [True] * 3)


if __name__ == "__main__":
    unittest.main()
