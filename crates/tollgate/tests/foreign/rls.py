"""Envoy's rate limit service as a client nobody here wrote meets it: grpcio, with Envoy's own messages.

    python rls.py GRPC_ADDRESS HTTP_ADDRESS

The server runs the rules of `grpc.rs`. Each check is a function; all are run, and what failed is printed.
"""

import sys
import time
import traceback

import grpc
from envoy.extensions.common.ratelimit.v3 import ratelimit_pb2
from envoy.service.ratelimit.v3 import rls_pb2, rls_pb2_grpc
from google.protobuf import json_format, wrappers_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from google.protobuf.descriptor_pool import DescriptorPool

ADDRESS = sys.argv[1]
SERVICE = "envoy.service.ratelimit.v3.RateLimitService"
METHOD = f"/{SERVICE}/ShouldRateLimit"
OK = rls_pb2.RateLimitResponse.OK
OVER = rls_pb2.RateLimitResponse.OVER_LIMIT
Limit = rls_pb2.RateLimitResponse.RateLimit
Descriptor = ratelimit_pb2.RateLimitDescriptor

channel = grpc.insecure_channel(ADDRESS)
stub = rls_pb2_grpc.RateLimitServiceStub(channel)


def descriptor(*entries, hits=None, limit=None, refund=False):
    message = Descriptor(entries=[Descriptor.Entry(key=k, value=v) for k, v in entries])
    if hits is not None:
        message.hits_addend.CopyFrom(wrappers_pb2.UInt64Value(value=hits))
    if limit is not None:
        message.limit.requests_per_unit, message.limit.unit = limit
    if refund:
        # `is_negative_hits` = 4, which is younger than this client's messages.
        message.MergeFromString(b"\x20\x01")
    return message


def ask(*descriptors, domain="d", hits=0):
    request = rls_pb2.RateLimitRequest(domain=domain, descriptors=descriptors, hits_addend=hits)
    return stub.ShouldRateLimit(request, timeout=10)


def refused(call, code, text=""):
    try:
        answer = call()
    except grpc.RpcError as error:
        assert error.code() == code, f"{error.code()}: {error.details()}"
        assert text in error.details(), error.details()
        return
    raise AssertionError(f"expected {code}, got {answer}")


def the_limit_bites_and_says_what_is_left():
    for left in (2, 1, 0):
        answer = ask(descriptor(("key", "bites")))
        status = answer.statuses[0]
        assert answer.overall_code == OK and status.code == OK, answer
        assert status.limit_remaining == left, answer
        assert status.current_limit.requests_per_unit == 3, answer
        assert status.current_limit.unit == Limit.HOUR, answer
        assert status.current_limit.name == "three", answer
        assert status.duration_until_reset.nanos == 0, "Envoy cuts fractions off"
    answer = ask(descriptor(("key", "bites")))
    assert answer.overall_code == OVER and answer.statuses[0].code == OVER, answer
    assert answer.statuses[0].limit_remaining == 0, answer
    assert 1190 <= answer.statuses[0].duration_until_reset.seconds <= 1200, answer
    assert ask(descriptor(("key", "other"))).overall_code == OK


def a_denial_names_its_rule():
    ask(descriptor(("key", "named")), hits=3)
    answer = ask(descriptor(("key", "named")))
    metadata = json_format.MessageToDict(answer.dynamic_metadata)
    assert metadata["denied_by"] == "three", metadata
    assert metadata["team"] == "payments", metadata
    assert metadata["owner"] == {"name": "ada", "pager": [1, {"night": True}], "none": None}, metadata
    assert metadata["origin"] == "store" and metadata["revision"] and metadata["decision_id"], metadata
    headers = {header.key: header.value for header in answer.response_headers_to_add}
    assert headers["x-ratelimit-denied-by"] == "three", headers


def statuses_keep_the_order_of_the_descriptors():
    answer = ask(
        descriptor(("nothing", "here")),
        descriptor(("key", "order")),
        descriptor(("free", "x")),
        descriptor(("key", "order"), ("sub", "x")),
    )
    assert len(answer.statuses) == 4, answer
    unmatched, three, free, sub = answer.statuses
    assert not unmatched.HasField("current_limit") and unmatched.limit_remaining == 0, answer
    assert three.current_limit.requests_per_unit == 3, answer
    assert not free.HasField("current_limit") and free.limit_remaining == 4294967295, answer
    assert sub.current_limit.requests_per_unit == 100 and sub.current_limit.unit == Limit.DAY, answer


def all_descriptors_are_charged_or_none():
    ask(descriptor(("key", "whole")), hits=3)
    answer = ask(descriptor(("key", "whole")), descriptor(("key", "whole2")))
    assert answer.overall_code == OVER, answer
    assert [status.code for status in answer.statuses] == [OVER, OK], answer
    assert ask(descriptor(("key", "whole2"), hits=0)).statuses[0].limit_remaining == 3, "not charged"


def a_limit_of_the_request_overrides_the_rules():
    limit = (5, ratelimit_pb2.RateLimitDescriptor.RateLimitOverride.DESCRIPTOR
             .fields_by_name["unit"].enum_type.values_by_name["DAY"].number)
    for left in (4, 3, 2, 1, 0):
        status = ask(descriptor(("key", "own"), limit=limit)).statuses[0]
        assert (status.code, status.limit_remaining) == (OK, left), status
        assert status.current_limit.requests_per_unit == 5, status
        assert status.current_limit.unit == Limit.DAY and status.current_limit.name == "", status
    assert ask(descriptor(("key", "own"), limit=limit)).overall_code == OVER
    assert ask(descriptor(("any", "thing"), limit=limit)).statuses[0].limit_remaining == 4


def hits_of_the_descriptor_win_over_those_of_the_request():
    answer = ask(descriptor(("key", "h1"), hits=2), descriptor(("key", "h2")), hits=3)
    assert [status.limit_remaining for status in answer.statuses] == [1, 0], answer


def a_look_takes_nothing():
    for _ in range(5):
        answer = ask(descriptor(("key", "look"), hits=0))
        assert (answer.overall_code, answer.statuses[0].limit_remaining) == (OK, 3), answer


def a_refund_gives_back_and_never_mints():
    ask(descriptor(("key", "back")), hits=3)
    answer = ask(descriptor(("key", "back"), hits=2, refund=True))
    assert (answer.overall_code, answer.statuses[0].limit_remaining) == (OK, 2), answer
    answer = ask(descriptor(("key", "back"), hits=50, refund=True))
    assert (answer.overall_code, answer.statuses[0].limit_remaining) == (OK, 3), answer
    answer = ask(descriptor(("key", "back")), hits=4)
    assert answer.overall_code == OVER, answer


def requests_that_are_none_are_refused_by_name():
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    refused(lambda: ask(descriptor(("key", "x")), domain=""), invalid, "rate limit domain must not be empty")
    refused(lambda: ask(), invalid, "rate limit descriptor list must not be empty")
    refused(lambda: ask(descriptor(("key", "x"), limit=(5, 0))), invalid, "descriptors[0].limit.unit")
    refused(
        lambda: ask(descriptor(("key", "x")), descriptor(("key", "x"), limit=(5, 99))),
        invalid,
        "descriptors[1].limit.unit",
    )
    refused(lambda: ask(*[descriptor(("key", "x"))] * 1025), invalid, "descriptors")
    refused(lambda: ask(descriptor(*[("key", "x")] * 65)), invalid, "descriptors[0].entries")
    assert ask(descriptor(("key", "lives"))).overall_code == OK


def bytes_that_are_no_message_are_the_callers_error():
    raw = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)
    for garbage in (b"\xff" * 50, b"\x0a\xff", b"\x0a\x01\xff", b"\x12\x05hello", bytes(range(256))):
        refused(lambda: raw(garbage, timeout=10), grpc.StatusCode.INVALID_ARGUMENT)
    refused(lambda: raw(b"", timeout=10), grpc.StatusCode.INVALID_ARGUMENT, "domain must not be empty")
    assert ask(descriptor(("key", "lives"))).overall_code == OK


def a_message_too_large_is_refused():
    raw = channel.unary_unary(METHOD, request_serializer=bytes, response_deserializer=bytes)
    try:
        raw(b"\x0a" + b"\xff" * (5 * 1024 * 1024), timeout=10)
        raise AssertionError("taken")
    except grpc.RpcError as error:
        accepted = (grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert error.code() in accepted, f"{error.code()}: {error.details()}"
    assert ask(descriptor(("key", "lives"))).overall_code == OK


def unknown_names_are_not_implemented():
    for method in (f"/{SERVICE}/Nothing", "/envoy.service.ratelimit.v2.RateLimitService/ShouldRateLimit"):
        raw = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        refused(lambda: raw(b"", timeout=10), grpc.StatusCode.UNIMPLEMENTED)


def fields_of_the_future_are_passed_over():
    request = rls_pb2.RateLimitRequest(domain="d", descriptors=[descriptor(("key", "future"))])
    request.MergeFromString(b"\xfa\x3e\x03abc")  # field 1007, bytes
    assert stub.ShouldRateLimit(request, timeout=10).statuses[0].limit_remaining == 2


def the_callers_deadline_is_honoured():
    # Envoy gives 20 ms. An answer in time or DEADLINE_EXCEEDED, and never a wait beyond it.
    for timeout in (5, 0.02, 0.000001):
        begun = time.monotonic()
        try:
            request = rls_pb2.RateLimitRequest(domain="d", descriptors=[descriptor(("key", "deadline"), hits=0)])
            stub.ShouldRateLimit(request, timeout=timeout)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED, error
        assert time.monotonic() - begun < timeout + 10


def health_is_told_for_the_server_and_for_the_service():
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, (name, answer)
    refused(
        lambda: health.Check(health_pb2.HealthCheckRequest(service="no.such.Service"), timeout=10),
        grpc.StatusCode.NOT_FOUND,
    )


def reflection_lists_and_describes_the_service():
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(stub.ServerReflectionInfo(iter([request]), timeout=10)))
    names = {service.name for service in answer.list_services_response.service}
    assert SERVICE in names and "grpc.health.v1.Health" in names, names
    service = DescriptorPool(ProtoReflectionDescriptorDatabase(channel)).FindServiceByName(SERVICE)
    method = service.methods_by_name["ShouldRateLimit"]
    fields = set(method.input_type.fields_by_name)
    assert {"domain", "descriptors", "hits_addend"} <= fields, fields


def many_callers_get_exactly_the_limit():
    def request():
        return rls_pb2.RateLimitRequest(domain="d", descriptors=[descriptor(("many", "x"))])

    channels = [grpc.insecure_channel(ADDRESS, [("grpc.use_local_subchannel_pool", 1)]) for _ in range(4)]
    stubs = [rls_pb2_grpc.RateLimitServiceStub(channel) for channel in channels]
    calls = [stubs[n % 4].ShouldRateLimit.future(request(), timeout=20) for n in range(400)]
    passed = sum(call.result().overall_code == OK for call in calls)
    assert passed == 100, passed
    for channel in channels:
        channel.close()


CHECKS = [value for value in list(globals().values()) if getattr(value, "__module__", "") == "__main__"
          and callable(value) and value.__name__ not in ("descriptor", "ask", "refused")]

failed = 0
for check in CHECKS:
    try:
        check()
        print(f"ok      {check.__name__}")
    except Exception:
        failed += 1
        print(f"FAILED  {check.__name__}\n{traceback.format_exc()}")
print(f"{len(CHECKS) - failed} passed, {failed} failed")
sys.exit(1 if failed else 0)
