"""Reads the RateLimit fields of real answers with http-sf, a parser of structured fields (RFC 9651) that nobody here wrote."""

import http.client
import json
import sys

import http_sf

HTTP = sys.argv[2]


def check(attributes):
    connection = http.client.HTTPConnection(HTTP, timeout=20)
    body = json.dumps({"domain": "fields", "attributes": attributes})
    connection.request("POST", "/v1/check", body)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


def field(answer, name):
    values = answer.headers.get_all(name)
    assert values is not None and len(values) == 1, (name, answer.headers.items())
    return http_sf.parse(values[0].encode(), tltype="list")


# Names that a careless writer would break the list with.
quoted = 'say "hi", \\ back'
for left in (2, 1, 0):
    answer = check({"a": "x", "b": "x"})
    assert answer.status == 200, answer.status
    policies = field(answer, "RateLimit-Policy")
    assert policies == [
        (quoted, {"q": 3, "w": 3600}),
        ("windows/1h", {"q": 100, "w": 3600}),
        ("windows/1d", {"q": 500, "w": 86400}),
        ("st?rke", {"q": 9, "qu": "concurrent-requests"}),
    ], policies
    [(name, said), (permits, held)] = field(answer, "RateLimit")
    assert (name, said["r"]) == (quoted, left), (name, said)
    # Permits have an item of their own, and do not replace the rate's.
    assert (permits, held["r"]) == ("st?rke", 6 + left), (permits, held)
    assert answer.headers["Retry-After"] is None

answer = check({"a": "x", "b": "x"})
assert answer.status == 429, answer.status
(name, said) = field(answer, "RateLimit")[0]
assert (name, said["r"]) == (quoted, 0), (name, said)
assert said["t"] == int(answer.headers["Retry-After"]), (said, answer.headers.items())
assert 0 < said["t"] <= 1200, said
assert answer.headers["X-RateLimit-Denied-By"] == quoted

# What meets no limit has no fields: an empty list is none.
answer = check({"nothing": "x"})
assert answer.status == 200 and answer.headers["RateLimit"] is None and answer.headers["RateLimit-Policy"] is None
print("fields ok")
