"""The storage for `limits`: that library's own tests, Flask-Limiter and slowapi, against a real server.

The tests are those of the source distribution of the installed version. They are called as they are, with the URI of
this storage in place of the library's own ones.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import pathlib
import subprocess
import sys
import tarfile
import time
import types
import unittest
import unittest.mock

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import flask
import flask_limiter
import limits
import limits.aio.strategies
import limits.storage
import limits.strategies
import slowapi
import slowapi.util
import starlette.applications
import starlette.routing
import starlette.testclient
from servers import FaultyServer, Tollgate

import tollgate.limits

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples" / "python"


def rules() -> dict[str, str]:
    """The rule files of the example, and one that counts in buckets."""
    names = ["limits.yaml", "limits-moving.yaml", "limits-sliding.yaml"]
    return {**{name: (EXAMPLES / name).read_text() for name in names}, "buckets.yaml": "domain: buckets\n"}


def own_tests() -> pathlib.Path:
    """Returns the library's sources, which contain its tests."""
    version = importlib.metadata.version("limits")
    folder = pathlib.Path(sys.prefix) / "sdist"
    if not (folder / f"limits-{version}" / "tests").is_dir():
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*download, "--dest", str(folder), f"limits=={version}"], check=True, capture_output=True)
        with tarfile.open(folder / f"limits-{version}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder / f"limits-{version}"


def own_module(name: str) -> types.ModuleType:
    """Imports a module of the tests; the clients of other storages are not needed."""
    folder = own_tests()
    stubs = {each: unittest.mock.MagicMock() for each in ("redis", "redis.cluster", "pytest_lazy_fixtures")}
    package = types.ModuleType("tests")
    package.__path__ = [str(folder / "tests")]
    with unittest.mock.patch.dict(sys.modules, {**stubs, "tests": package}):
        return importlib.import_module(f"tests.{name}")


class LimitsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Tollgate(rules())
        cls.uri = f"tollgate://127.0.0.1:{cls.server.port}"

    @classmethod
    def tearDownClass(cls):
        cls.server.stop()

    def storage(self, **options):
        return limits.storage.storage_from_string(self.uri, timeout_ms=10_000, **options)

    def run_own(self, case, *arguments, without=()):
        ran = 0
        for name, _ in inspect.getmembers(case, inspect.isfunction):
            if name.startswith("test_") and name not in without:
                with self.subTest(f"{case.__name__}.{name}"):
                    self.repeat(lambda: getattr(case(), name)(self.uri, {"timeout_ms": 10_000}, *arguments, None))
                    ran += 1
        return ran

    def run_own_asynchronously(self, case, *arguments, without=()):
        """As `run_own`, each test on an event loop of its own."""
        uri, ran = f"async+{self.uri}", 0
        for name, _ in inspect.getmembers(case, inspect.isfunction):
            if name.startswith("test_") and name not in without:
                with self.subTest(f"{case.__name__}.{name}"):
                    test = lambda: asyncio.run(getattr(case(), name)(uri, {"timeout_ms": 10_000}, *arguments, None))
                    self.repeat(test)
                    ran += 1
        return ran

    def repeat(self, test):
        """The library's tests measure time, and are repeated there too: another process may have had the core."""
        for attempt in range(3):
            self.storage().reset()
            # The server's windows are aligned: the tests begin with the next second, which is to be even.
            while int(time.time()) % 2 == 0:
                time.sleep(0.01)
            try:
                return test()
            except AssertionError:
                if attempt == 2:
                    raise

    def test_own_tests_of_the_strategies(self):
        module = own_module("test_strategy")
        self.assertEqual(self.run_own(module.TestFixedWindow), 4)
        # Expects that the window begins with the first hit; the server's windows are aligned.
        without = ["test_sliding_window_counter_previous_window"]
        self.assertEqual(self.run_own(module.TestSlidingWindow, without=without), 6)
        # Has a limit of 1,000,000; the server's moving windows have at most 100,000.
        self.assertEqual(self.run_own(module.TestMovingWindow, without=["test_moving_window_huge_cost"]), 6)

    def test_own_tests_of_storages(self):
        module = own_module("test_storage")
        # Expects the number of keys, which nobody counts.
        without = ["test_storage_reset"]
        self.assertEqual(self.run_own(module.TestConcreteStorages, tollgate.limits.TollgateStorage, without=without), 8)

    def test_own_tests_of_the_asynchronous_strategies(self):
        module = own_module("aio.test_strategy")
        self.assertEqual(self.run_own_asynchronously(module.TestAsyncFixedWindow), 4)
        # Expect that the window begins with the first hit; the server's windows are aligned.
        without = ["test_sliding_window_counter_previous_window", "test_sliding_window_counter_stats"]
        self.assertEqual(self.run_own_asynchronously(module.TestAsyncSlidingWindow, without=without), 6)
        without = ["test_moving_window_huge_cost"]
        self.assertEqual(self.run_own_asynchronously(module.TestAsyncMovingWindow, without=without), 6)

    def test_own_tests_of_asynchronous_storages(self):
        module = own_module("aio.test_storage")
        case, without = module.TestConcreteStorages, ["test_storage_reset"]
        ran = self.run_own_asynchronously(case, tollgate.limits.AsyncTollgateStorage, without=without)
        self.assertEqual(ran, 8)

    def test_both_storages_share_their_counters(self):
        item = limits.parse("2/hour")

        async def asynchronous(strategy, call, **more):
            storage = limits.storage.storage_from_string(f"async+{self.uri}", timeout_ms=10_000)
            try:
                return await getattr(strategy(storage), call)(item, "both", **more)
            finally:
                await storage.close()

        for name, strategy in limits.strategies.STRATEGIES.items():
            with self.subTest(name):
                other = limits.aio.strategies.STRATEGIES[name]
                self.assertTrue(strategy(self.storage()).hit(item, "both"))
                self.assertTrue(asyncio.run(asynchronous(other, "hit")))
                self.assertFalse(strategy(self.storage()).hit(item, "both"))
                self.assertFalse(asyncio.run(asynchronous(other, "test")))
                asyncio.run(asynchronous(other, "clear"))
                self.assertTrue(strategy(self.storage()).test(item, "both"))

    def test_an_asynchronous_storage_explains_what_is_wrong(self):
        dead = FaultyServer("refused").url.replace("http", "async+tollgate")
        for wraps, error in ((False, tollgate.limits.TollgateError), (True, limits.errors.StorageError)):
            storage = limits.storage.storage_from_string(dead, wrap_exceptions=wraps)
            self.assertFalse(asyncio.run(storage.check()))
            with self.assertRaises(error):
                asyncio.run(storage.incr("k", 60))

    def test_processes_share_what_was_cleared(self):
        one, two = self.storage(), self.storage()
        item = limits.parse("2/hour")
        for strategy in limits.strategies.STRATEGIES.values():
            with self.subTest(strategy.__name__):
                first, second = strategy(one), strategy(two)
                self.assertTrue(first.hit(item, "shared", cost=2))
                self.assertFalse(second.hit(item, "shared"))
                first.clear(item, "shared")
                self.assertEqual(second.get_window_stats(item, "shared").remaining, 2)
                self.assertTrue(second.hit(item, "shared", cost=2))
                self.assertFalse(first.test(item, "shared"))
                one.reset()
                self.assertEqual(second.get_window_stats(item, "shared").remaining, 2)

    def test_a_denied_caller_is_told_when_the_oldest_entry_leaves(self):
        storage, item = self.storage(), limits.parse("2/minute")
        limiter = limits.strategies.MovingWindowRateLimiter(storage)
        self.assertTrue(limiter.hit(item, "oldest"))
        first = time.time()
        time.sleep(0.3)
        self.assertTrue(limiter.hit(item, "oldest"))
        self.assertFalse(limiter.hit(item, "oldest"))
        self.assertAlmostEqual(limiter.get_window_stats(item, "oldest").reset_time, first + 60, delta=0.25)

    def test_what_is_missing_is_explained(self):
        fixed = limits.strategies.FixedWindowRateLimiter(self.storage())
        self.assertEqual([fixed.hit(limits.parse("2 per 7 hours"), "any period") for _ in range(3)], [True, True, False])
        with self.assertRaisesRegex(tollgate.limits.TollgateError, "`domain: absent` and `algorithm: fixed_window`"):
            self.storage(domain="absent").incr("k", 60)
        with self.assertRaisesRegex(tollgate.limits.TollgateError, "set `algorithm: fixed_window`"):
            self.storage(domain="buckets").incr("k", 60)
        with self.assertRaisesRegex(tollgate.limits.TollgateError, "at most 100000"):
            self.storage().acquire_entry("k", 100_001, 60)
        dead = limits.storage.storage_from_string(FaultyServer("refused").url.replace("http", "tollgate"))
        self.assertFalse(dead.check())
        with self.assertRaisesRegex(tollgate.limits.TollgateError, "unreachable"):
            dead.incr("k", 60)
        wrapped = limits.storage.storage_from_string(
            FaultyServer("refused").url.replace("http", "tollgate"), wrap_exceptions=True
        )
        with self.assertRaises(limits.errors.StorageError):
            wrapped.incr("k", 60)
        two = FaultyServer("refused").url.replace("http", "tollgate") + f",127.0.0.1:{self.server.port}"
        self.assertTrue(limits.storage.storage_from_string(two).check())

    def test_flask_limiter(self):
        for strategy in limits.strategies.STRATEGIES:
            with self.subTest(strategy):
                app = flask.Flask("test")
                limiter = flask_limiter.Limiter(
                    lambda: flask.request.headers["user"],
                    app=app,
                    storage_uri=self.uri,
                    storage_options={"timeout_ms": 10_000},
                    strategy=strategy,
                    headers_enabled=True,
                )
                app.route("/")(limiter.limit("3/hour")(lambda: "ok"))
                client = app.test_client()
                answers = [client.get("/", headers={"user": strategy}) for _ in range(4)]
                self.assertEqual([answer.status_code for answer in answers], [200, 200, 200, 429])
                self.assertEqual([answer.headers["X-RateLimit-Remaining"] for answer in answers], ["2", "1", "0", "0"])
                self.assertTrue(0 <= int(answers[3].headers["Retry-After"]) <= 3_600)
                self.assertEqual(client.get("/", headers={"user": "another " + strategy}).status_code, 200)
                limiter.reset()
                self.assertEqual(client.get("/", headers={"user": strategy}).status_code, 200)

    def test_flask_limiter_falls_back_if_no_server_answers(self):
        app = flask.Flask("test")
        dead = FaultyServer("refused").url.replace("http", "tollgate")
        fallback = {"in_memory_fallback": ["1/hour"], "in_memory_fallback_enabled": True}
        limiter = flask_limiter.Limiter(lambda: "k", app=app, storage_uri=dead, default_limits=["5/hour"], **fallback)
        app.route("/")(lambda: "ok")
        self.assertEqual([app.test_client().get("/").status_code for _ in range(2)], [200, 429])
        self.assertIsNotNone(limiter)

    def test_slowapi(self):
        limiter = slowapi.Limiter(
            key_func=lambda request: request.headers["user"],
            storage_uri=self.uri,
            storage_options={"timeout_ms": 10_000},
            strategy="moving-window",
        )

        @limiter.limit("2/minute")
        async def ok(request):
            return starlette.responses.PlainTextResponse("ok")

        app = starlette.applications.Starlette(routes=[starlette.routing.Route("/", ok)])
        app.state.limiter = limiter
        app.add_exception_handler(slowapi.errors.RateLimitExceeded, slowapi._rate_limit_exceeded_handler)
        client = starlette.testclient.TestClient(app)
        statuses = [client.get("/", headers={"user": "slowapi"}).status_code for _ in range(3)]
        self.assertEqual(statuses, [200, 200, 429])


if __name__ == "__main__":
    unittest.main()
