//! Clusters of Envoy: whether calls of gRPC reach the service.

use super::finding::Report;
use super::proto::{field, find_typed, text};
use serde_json::Value;

const HTTP_OPTIONS: &str = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions";

#[derive(Debug)]
struct Cluster {
    place: String,
    name: String,
    http: HttpVersion,
}

/// The version of HTTP that Envoy uses towards a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HttpVersion {
    /// HTTP/2.
    Two,
    /// Another one.
    Other,
    /// That of the client's request.
    Downstream,
    /// By ALPN, without the TLS that this needs.
    AutoWithoutTls,
}

/// All clusters.
#[derive(Debug, Default)]
pub(super) struct Clusters {
    all: Vec<Cluster>,
    /// Whether clusters may also come from elsewhere.
    pub(super) is_partial: bool,
}

impl Clusters {
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn add(&mut self, cluster: &Value, place: &str) {
        let Some(name) = text(cluster, "name") else { return };
        if !self.all.iter().any(|known| known.name == name) {
            self.all.push(Cluster { place: place.to_owned(), name: name.to_owned(), http: version(cluster) });
        }
    }

    /// Checks the service that is called. Returns it in words.
    pub(super) fn check(&self, grpc: Option<&Value>, place: &str, report: &mut Report) -> String {
        if let Some(target) = grpc.and_then(|grpc| text(field(grpc, "google_grpc")?, "target_uri")) {
            return target.to_owned();
        }
        let Some(name) = grpc.and_then(|grpc| text(field(grpc, "envoy_grpc")?, "cluster_name")) else {
            report.problem(
                place,
                "`grpc_service` names no cluster",
                "write `grpc_service: {envoy_grpc: {cluster_name: tollgate}}`",
            );
            return "an unknown service".to_owned();
        };
        let fix =
            "add typed_extension_protocol_options with `explicit_http_config: {http2_protocol_options: {}}`";
        match self.all.iter().find(|cluster| cluster.name == name) {
            Some(Cluster { place, http, .. }) => match http {
                HttpVersion::Two => {}
                HttpVersion::Other => report.problem(
                    place,
                    format!("cluster `{name}` does not use HTTP/2, which gRPC needs: every call fails"),
                    fix,
                ),
                HttpVersion::Downstream => report.problem(
                    place,
                    format!("cluster `{name}` uses the client's version of HTTP (`use_downstream_protocol_config`): gRPC needs HTTP/2, and the call for a request by HTTP/1 fails"),
                    fix,
                ),
                HttpVersion::AutoWithoutTls => report.problem(
                    place,
                    format!("cluster `{name}` has `auto_config`, which needs TLS to agree on HTTP/2: Envoy refuses it"),
                    fix,
                ),
            },
            None if name.starts_with("outbound|") => report.note(
                place,
                format!("cluster `{name}` is made by Istio from a Service: its port must be named `grpc…` or have `appProtocol: grpc`"),
            ),
            None if self.is_partial => report.note(
                place,
                format!("cluster `{name}` is not defined here; it must come from elsewhere, with HTTP/2"),
            ),
            None => report.problem(
                place,
                format!("there is no cluster `{name}`: every call fails"),
                "add it to `clusters`, with HTTP/2 and the address of Tollgate's gRPC listener (8081)",
            ),
        }
        format!("cluster `{name}`")
    }
}

fn version(cluster: &Value) -> HttpVersion {
    let options = field(cluster, "typed_extension_protocol_options");
    let Some((_, options)) = options.and_then(|options| find_typed(options, HTTP_OPTIONS)) else {
        // The field of earlier versions, which Envoy still reads.
        return match field(cluster, "http2_protocol_options") {
            Some(_) => HttpVersion::Two,
            None => HttpVersion::Other,
        };
    };
    let explicit = field(options, "explicit_http_config");
    if explicit.is_some_and(|explicit| field(explicit, "http2_protocol_options").is_some()) {
        HttpVersion::Two
    } else if field(options, "use_downstream_protocol_config").is_some() {
        HttpVersion::Downstream
    } else if field(options, "auto_config").is_some() {
        match field(cluster, "transport_socket").or_else(|| field(cluster, "transport_socket_matches")) {
            Some(_) => HttpVersion::Two,
            None => HttpVersion::AutoWithoutTls,
        }
    } else {
        HttpVersion::Other
    }
}
