#!/usr/bin/env python3
"""Sends traffic to a running server with the sample rules, so that the dashboard has something to show.

    python3 examples/demo.py [--server 127.0.0.1:8080] [--seconds 120]

About 150 checks per second, on loopback only: callers well within their limit, some over it, two tiers, too many
logins, callers without a key. It stops after the given time.
"""

import argparse
import http.client
import ipaddress
import json
import math
import random
import sys
import threading
import time
from collections import Counter

# Callers: a name, how many there are, requests per second of each, and further attributes.
CALLERS = [
    ("calm", 12, 2.0, {}),
    ("steady", 3, 9.2, {}),  # near its 10 a second
    ("greedy", 3, 16.0, {}),  # over them
    ("pro", 2, 20.0, {"tier": "pro"}),
    ("guess", 2, 0.5, {"endpoint": "POST /login"}),  # over 5 a minute
]
NETWORKS = [("10.20.%d.%d" % (net, net * 7 + 1), 0.8) for net in range(1, 5)]  # without a key, 30 a minute each


def callers():
    """Yields (attributes, checks per second) for each caller."""
    for name, number, rate, more in CALLERS:
        for i in range(number):
            yield {"api_key": "demo-%s-%02d-key" % (name, i + 1), **more}, rate
    for address, rate in NETWORKS:
        yield {"remote_address": address}, rate


def drive(server, mine, until, seen, failed):
    """Asks for the callers of one thread until the time is over."""
    connection = http.client.HTTPConnection(server, timeout=5)
    start = time.monotonic()
    due = [(start + random.random() / rate, attributes, rate) for attributes, rate in mine]
    while not failed:
        due.sort(key=lambda one: one[0])
        at, attributes, rate = due[0]
        if at >= until:
            return
        time.sleep(max(0.0, at - time.monotonic()))
        # Rates swell and ebb by a third, so that lines on a chart are no ruler's.
        swell = 1 + math.sin((at - start) / 20 * math.pi) / 3
        due[0] = (at + random.expovariate(rate * swell), attributes, rate)
        try:
            connection.request("POST", "/v1/check", json.dumps({"domain": "sample", "attributes": attributes}))
            answer = connection.getresponse()
            answer.read()
            seen[answer.status] += 1
        except (OSError, http.client.HTTPException) as error:
            failed.append("http://%s does not answer (%s); start the server with `make run`" % (server, error))


def main():
    words = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    words.add_argument("--server", default="127.0.0.1:8080", help="its HTTP address, on loopback")
    words.add_argument("--seconds", type=float, default=120)
    words = words.parse_args()
    host = words.server.rsplit(":", 1)[0].strip("[]")
    if not (host == "localhost" or ipaddress.ip_address(host).is_loopback):
        sys.exit("demo: %s is not this machine; the demo drives only a server on loopback" % host)
    everybody, seen, failed = list(callers()), Counter(), []
    until = time.monotonic() + min(words.seconds, 3600)
    threads = [threading.Thread(target=drive, args=(words.server, everybody[i::4], until, seen, failed)) for i in range(4)]
    print("demo: real checks against http://%s for %d s; watch http://127.0.0.1:8082" % (words.server, words.seconds), flush=True)
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:
        failed.append("stopped")
    if failed:
        sys.exit("demo: " + failed[0])
    print("demo: " + ", ".join("%d times %d" % (number, status) for status, number in sorted(seen.items())))


if __name__ == "__main__":
    main()
