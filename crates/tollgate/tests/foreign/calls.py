"""Calls a rate limit service and prints what it answers, one line of JSON a call: grpcio, with Envoy's own messages.

    python calls.py ADDRESS CALLS [CA [CERTIFICATE KEY]]

CALLS is a list. A call is {"health": NAME} or {"domain": D, "descriptors": [{"entries": [[K, V], …], "limit": [COUNT, UNIT],
"hits": N}, …], "hits": N}. With a CA the connection is encrypted, and the server must be `localhost`.
"""

import json
import sys

import grpc
from envoy.extensions.common.ratelimit.v3 import ratelimit_pb2
from envoy.service.ratelimit.v3 import rls_pb2, rls_pb2_grpc
from google.protobuf import json_format, wrappers_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

Descriptor = ratelimit_pb2.RateLimitDescriptor


def read(path):
    with open(path, "rb") as file:
        return file.read()


def connect(address, files):
    if not files:
        # By a Unix socket this client sends the path as `:authority`, which is no host; Envoy and Go send one.
        options = [("grpc.default_authority", "localhost")] if address.startswith("unix:") else []
        return grpc.insecure_channel(address, options)
    parts = [read(path) for path in files]
    credentials = grpc.ssl_channel_credentials(parts[0], *(reversed(parts[1:])))
    return grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", "localhost")])


def request(call):
    message = rls_pb2.RateLimitRequest(domain=call["domain"], hits_addend=call.get("hits", 0))
    for given in call["descriptors"]:
        descriptor = message.descriptors.add()
        for key, value in given["entries"]:
            descriptor.entries.add(key=key, value=value)
        if "limit" in given:
            descriptor.limit.requests_per_unit, descriptor.limit.unit = given["limit"]
        if "hits" in given:
            descriptor.hits_addend.CopyFrom(wrappers_pb2.UInt64Value(value=given["hits"]))
    return message


def answer(channel, call):
    if "health" in call:
        stub = health_pb2_grpc.HealthStub(channel)
        response = stub.Check(health_pb2.HealthCheckRequest(service=call["health"]), timeout=20)
        return {"health": health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)}
    response = rls_pb2_grpc.RateLimitServiceStub(channel).ShouldRateLimit(request(call), timeout=20)
    return json_format.MessageToDict(response)


channel = connect(sys.argv[1], sys.argv[3:])
for call in json.loads(sys.argv[2]):
    try:
        print(json.dumps(answer(channel, call), sort_keys=True), flush=True)
    except grpc.RpcError as error:
        print(json.dumps({"error": error.code().name, "details": error.details()}), flush=True)
