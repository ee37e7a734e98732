"""Asks over gRPC for each of some API keys, and prints what Envoy would be told of each as a line of JSON.

    python emergency.py GRPC_ADDRESS HTTP_ADDRESS

grpcio with Envoy's own messages.
"""

import json
import sys

import grpc
from envoy.extensions.common.ratelimit.v3 import ratelimit_pb2
from envoy.service.ratelimit.v3 import rls_pb2, rls_pb2_grpc

Descriptor = ratelimit_pb2.RateLimitDescriptor
stub = rls_pb2_grpc.RateLimitServiceStub(grpc.insecure_channel(sys.argv[1]))
for key in ("attacker-key", "friend-key", "customer"):
    entry = Descriptor.Entry(key="api_key", value=key)
    request = rls_pb2.RateLimitRequest(domain="d", descriptors=[Descriptor(entries=[entry])])
    answer = stub.ShouldRateLimit(request, timeout=10)
    code = rls_pb2.RateLimitResponse.Code.Name(answer.overall_code)
    headers = {header.key: header.value for header in answer.response_headers_to_add}
    wait = answer.statuses[0].duration_until_reset.seconds
    metadata = dict(answer.dynamic_metadata)
    print(json.dumps({"key": key, "code": code, "metadata": metadata, "headers": headers, "wait": wait}))
