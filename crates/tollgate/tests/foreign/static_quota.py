"""A quota server (RLQS) that gives each bucket of each stream the same assignment, without counters: grpcio, with Envoy's messages.

    python static_quota.py RATE

Prints its address.
"""

import sys
from concurrent import futures

import grpc
from envoy.service.rate_limit_quota.v3 import rlqs_pb2, rlqs_pb2_grpc

RATE = int(sys.argv[1])


class Quotas(rlqs_pb2_grpc.RateLimitQuotaServiceServicer):
    def StreamRateLimitQuotas(self, reports, context):
        for report in reports:
            response = rlqs_pb2.RateLimitQuotaResponse()
            for usage in report.bucket_quota_usages:
                action = response.bucket_action.add()
                action.bucket_id.CopyFrom(usage.bucket_id)
                assignment = action.quota_assignment_action
                assignment.assignment_time_to_live.FromSeconds(60)
                bucket = assignment.rate_limit_strategy.token_bucket
                bucket.max_tokens = RATE
                bucket.tokens_per_fill.value = RATE
                bucket.fill_interval.FromSeconds(1)
            yield response


server = grpc.server(futures.ThreadPoolExecutor(max_workers=8))
rlqs_pb2_grpc.add_RateLimitQuotaServiceServicer_to_server(Quotas(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(f"127.0.0.1:{port}", flush=True)
server.wait_for_termination()
