"""Asks a server over the Redis protocol, with redis-py.

    python resp.py GRPC_ADDRESS HTTP_ADDRESS RESP_ADDRESS
"""

import sys
import time

import redis

host, port = sys.argv[3].rsplit(":", 1)
passed = failed = 0


def expect(what, seen, wanted):
    global passed, failed
    if seen == wanted:
        passed += 1
    else:
        failed += 1
        print(f"FAILED {what}: {seen!r} instead of {wanted!r}")


def refused(what, ask, words):
    global passed, failed
    try:
        seen = ask()
    except redis.exceptions.ResponseError as error:
        expect(f"{what}: {error}", words in str(error), True)
    else:
        failed += 1
        print(f"FAILED {what}: {seen!r} instead of an error")


def within_a_second(calls):
    """Replies to calls that count whole seconds, with a key of their own: again, with another key, if they took longer."""
    for attempt in range(30):
        began = time.monotonic()
        replies = calls(f"k{attempt}")
        if time.monotonic() - began < 0.9:
            return replies
    raise TimeoutError("no calls within a second")


for protocol in (2, 3):
    client = redis.Redis(host=host, port=int(port), protocol=protocol, client_name="tester", decode_responses=True)
    named = f"resp{protocol}"

    def throttle(key, *numbers):
        return client.execute_command("CL.THROTTLE", f"{named}:{key}", *numbers)

    expect("ping", client.ping(), True)
    expect("echo", client.echo("hi"), "hi")
    expect("name", client.client_getname(), "tester")
    expect("id", client.client_id() > 0, True)

    # What redis-cell answers, line by line.
    expect("a first call", throttle("u", 15, 30, 60), [0, 16, 15, -1, 2])
    only, many, look = within_a_second(
        lambda key: (throttle(f"b{key}", 0, 1, 10), throttle(f"b{key}", 0, 1, 10), throttle(f"b{key}", 0, 1, 10, 0))
    )
    expect("the only one", only, [0, 1, 0, -1, 10])
    expect("one too many", many, [1, 1, 0, 10, 10])
    expect("a look", look, [0, 1, 0, -1, 10])
    expect("over the limit", throttle("q", 2, 1, 1, 4), [1, 3, 3, -1, 0])
    _, refunded = within_a_second(lambda key: (throttle(f"r{key}", 5, 1, 10, 3), throttle(f"r{key}", 5, 1, 10, -1)))
    expect("a refund", refunded, [0, 6, 4, -1, 20])
    throttle("w", 15, 30, 3600)
    for wrong in ((15, 0, 60), (15, 30, 0), ("x", 30, 60), (15, "1.5", 60), (15, 30, "", 1), (15, 30), (1, 2, 3, 4, 5)):
        refused(f"CL.THROTTLE {wrong}", lambda: throttle("w", *wrong), "")
    expect("errors change nothing", throttle("w", 15, 30, 3600, 0)[2], 15)
    _, other = within_a_second(lambda key: (throttle(f"n{key}", 9, 1, 60, 5), throttle(f"n{key}", 4, 1, 60, 1)))
    expect("the same key by other numbers", other, [1, 5, 0, 60, 300])
    bytes_key = redis.Redis(host=host, port=int(port), protocol=protocol)
    for remaining in (1, 0):
        told = bytes_key.execute_command("CL.THROTTLE", b"\xff\x00" + named.encode(), 1, 1, 60)
        expect("a key of any bytes", told[2], remaining)

    # Many at once, in order.
    pipe = client.pipeline(transaction=False)
    for n in range(500):
        pipe.execute_command("CL.THROTTLE", f"{named}:pipe", 99, 1, 3600)
        if n % 100 == 50:
            pipe.echo(f"mark {n}")
            pipe.execute_command("TG.PEEK", "d", "user", f"{named}:pipe")
    told = pipe.execute()
    expect("replies", len(told), 510)
    verdicts = [reply[0] for reply in told if isinstance(reply, list) and len(reply) == 5]
    expect("allowed in a pipeline", verdicts, [0] * 100 + [1] * 400)
    expect("in order", told[51], "mark 50")

    # By the rules.
    def read(reply):
        return dict(zip(NAMES, reply)) if isinstance(reply, list) else reply

    NAMES = ["limited", "limit", "remaining", "retry_after", "reset_after", "rule", "delay_ms", "origin", "decision_id", "reason"]
    decision = dict(zip(NAMES, [0, 10, 9, -1, 360, "per-user", 0, "store", None] + ([None] if protocol == 3 else [])))
    checks = [("TG.CHECK",), ("TG.CHECK", "COST", 5), ("TG.PEEK",), ("TG.PEEK",), ("TG.PEEK",), ("TG.CHECK", "COST", 5)]
    reply, cost, *looks, denied = within_a_second(
        lambda key: [client.execute_command(verb, "d", "user", f"{named}:{key}", *more) for verb, *more in checks]
    )
    expect("the reply's form", type(reply), list if protocol == 2 else dict)
    expect("a check", read(reply), decision)
    decision.update(remaining=4, reset_after=2160)
    expect("a cost", read(cost), decision)
    for look in looks:
        expect("a look", read(look), decision)
    decision.update(limited=1, retry_after=360)
    denied = read(denied)
    expect("the name of a denial", len(denied["decision_id"]), 32)
    decision.update(decision_id=denied["decision_id"])
    expect("a denial", denied, decision)
    unmatched = read(client.execute_command("TG.CHECK", "nobody", "user", named))
    expect("no limit", (unmatched["limited"], unmatched["limit"], unmatched["rule"]), (0, -1, None))
    reasoned = client.execute_command("TG.PEEK", "d", "user", named, "WITHREASON")
    expect("a reply with a reason", (len(reasoned), read(reasoned)["reason"]), (10, None))
    refused("an odd number of words", lambda: client.execute_command("TG.CHECK", "d", "user"), "wrong number")

    # What it is not.
    refused("a database", lambda: client.set("a", "b"), "unknown command")
    refused("another database", lambda: client.execute_command("SELECT", 3), "out of range")
    expect("commands", client.command_count(), len(client.command()))
    client.close()

print(f"{passed} passed, {failed} failed")
