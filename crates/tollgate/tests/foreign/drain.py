"""Watches the health of a server until it drains, as a load balancer does.

    python drain.py GRPC_ADDRESS HTTP_ADDRESS

Prints what it is told, and stays until the server ends the stream: it never hangs up by itself.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

channel = grpc.insecure_channel(sys.argv[1])
stub = health_pb2_grpc.HealthStub(channel)
name = "envoy.service.ratelimit.v3.RateLimitService"
updates = stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=25)
told = ""
try:
    for update in updates:
        told = health_pb2.HealthCheckResponse.ServingStatus.Name(update.status)
        print(told, flush=True)
except grpc.RpcError as error:
    # The server ends the stream; that nobody told us first is what would be wrong.
    print(error.code(), error.details(), file=sys.stderr)
sys.exit(0 if told == "NOT_SERVING" else "the stream ended, and nothing said NOT_SERVING")
