"""Asks over gRPC as a program does that follows traces: grpcio, with `traceparent` in the call's metadata.

    python traced.py GRPC_ADDRESS HTTP_ADDRESS

Only the first of its calls is part of a trace that is sampled.
"""

import sys

import grpc
from envoy.extensions.common.ratelimit.v3 import ratelimit_pb2
from envoy.service.ratelimit.v3 import rls_pb2, rls_pb2_grpc

Descriptor = ratelimit_pb2.RateLimitDescriptor
stub = rls_pb2_grpc.RateLimitServiceStub(grpc.insecure_channel(sys.argv[1]))
entry = Descriptor.Entry(key="api_key", value="sk_live_PLANTED0123456789abcdef")
request = rls_pb2.RateLimitRequest(domain="d", descriptors=[Descriptor(entries=[entry])])
for parent in (
    "00-000000000000000000000000000000aa-00000000000000a1-01",
    "00-000000000000000000000000000000aa-00000000000000a2-00",
    "00-000000000000000000000000000000AA-00000000000000a3-01",
    None,
):
    metadata = [("traceparent", parent)] if parent else []
    stub.ShouldRateLimit(request, timeout=10, metadata=metadata)
