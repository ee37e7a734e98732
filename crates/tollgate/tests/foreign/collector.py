"""A collector of traces that knows OpenTelemetry's own messages and nothing of ours.

    python collector.py PORT [STATUS] [--tls CERTIFICATE KEY]

Prints its address, then each span that it is sent as a line of JSON, its resource's attributes with it. The first message
is refused with STATUS, where one is given. Anything that is no such message ends it.
"""

import json
import os
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

refuse = [int(status) for status in sys.argv[2:3] if status != "--tls"]


def plain(attributes):
    named = {attribute.key: attribute.value for attribute in attributes}
    assert len(named) == len(attributes), "an attribute is there twice"
    return {key: getattr(value, value.WhichOneof("value")) for key, value in named.items()}


def told(span, resource, headers):
    return {
        "trace": span.trace_id.hex(),
        "span": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "name": span.name,
        "kind": span.SpanKind.Name(span.kind),
        "start": span.start_time_unix_nano,
        "end": span.end_time_unix_nano,
        "flags": span.flags,
        "status": span.status.StatusCode.Name(span.status.code),
        "attributes": plain(span.attributes),
        "resource": resource,
        "headers": headers,
        "whole": json.dumps(MessageToDict(span)),
    }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        try:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces", self.path
            assert self.headers["content-type"] == "application/x-protobuf"
            request = trace_service_pb2.ExportTraceServiceRequest()
            assert request.ParseFromString(body) == len(body)
            # A field that OpenTelemetry does not have would be told here, and lost on the way back.
            known = trace_service_pb2.ExportTraceServiceRequest()
            known.CopyFrom(request)
            known.DiscardUnknownFields()
            assert known.ByteSize() == len(body), "a field is not OpenTelemetry's"
            status = refuse.pop(0) if refuse else 200
            if status == 200:
                headers = {name.lower(): value for name, value in self.headers.items()}
                for group in request.resource_spans:
                    resource = plain(group.resource.attributes)
                    for scope in group.scope_spans:
                        for span in scope.spans:
                            print(json.dumps(told(span, resource, headers)), flush=True)
            answer = trace_service_pb2.ExportTraceServiceResponse().SerializeToString()
            self.send_response(status)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)
        except Exception as error:
            print("bad", repr(error), file=sys.stderr, flush=True)
            os._exit(1)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
if "--tls" in sys.argv:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*sys.argv[-2:])
    server.socket = context.wrap_socket(server.socket, server_side=True)
print("127.0.0.1:%d" % server.server_address[1], flush=True)
server.serve_forever()
