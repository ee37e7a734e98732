//! What Envoy Gateway has of its own: rules of three levels, and certificates for its Envoys.

use super::{RULES, authority, call, codes, rules, signed, variables};
use crate::harness::{Ratelimit, Redis, calls_at};
use serde_json::json;
use std::path::Path;

/// The certificate that Envoy Gateway gives to its Envoys has a wildcard with one label after it.
#[test]
fn the_certificate_of_envoy_gateway_is_taken() {
    let (redis, folder) = (Redis::start(), rules(RULES));
    let url = format!("127.0.0.1:{}", redis.port());
    let path = |name: &str| folder.join(name).to_str().expect("a path").to_owned();
    let ca = authority(&folder);
    signed(&folder, "server", "/CN=server", "localhost");
    signed(&folder, "envoy", "/CN=envoy", "*.envoy-gateway-system");
    let (server_crt, server_key) = (path("server.crt"), path("server.key"));
    let files = [ca.clone(), path("envoy.crt"), path("envoy.key")];
    let files: Vec<&Path> = files.iter().map(Path::new).collect();
    for name in ["envoy.envoy-gateway-system", "*.envoy-gateway-system"] {
        let mut all = variables(&folder, &url);
        all.extend([
            ("GRPC_SERVER_USE_TLS", "true"),
            ("GRPC_SERVER_TLS_CERT", &server_crt),
            ("GRPC_SERVER_TLS_KEY", &server_key),
            ("GRPC_CLIENT_TLS_CACERT", &ca),
            ("GRPC_CLIENT_TLS_SAN", name),
        ]);
        let service = Ratelimit::start(&all).healthy();
        let answers = calls_at(&service.grpc, &json!([call(&[("free", "x")])]), &files);
        assert_eq!(codes(&answers), ["OK"], "{name}: {}", service.log());
    }
}

/// Two rules below one path are one series in Prometheus, which keeps the first of equal ones and drops the others.
#[test]
fn each_series_is_on_the_page_once() {
    let text = "domain: one\ndescriptors:\n  - key: route\n    descriptors:\n      - key: a\n        descriptors:\n          \
                - {key: b, rate_limit: {unit: hour, requests_per_unit: 9}}\n          \
                - {key: c, rate_limit: {unit: hour, requests_per_unit: 9}}\n  \
                - {key: dm, detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 9}}\n";
    let (redis, folder) = (Redis::start(), rules(text));
    let url = format!("127.0.0.1:{}", redis.port());
    let mut all = variables(&folder, &url);
    all.extend([("USE_STATSD", "false"), ("USE_PROMETHEUS", "true"), ("PROMETHEUS_ADDR", "127.0.0.1:0")]);
    let service = Ratelimit::start(&all).healthy();
    let unknown = |domain: &str| json!({"domain": domain, "descriptors": [{"entries": [["k", "v"]]}]});
    service.calls(&json!([
        call(&[("route", "r"), ("a", "x"), ("b", "x")]),
        call(&[("route", "r"), ("a", "x"), ("c", "x")]),
        call(&[("dm", "a:b")]),
        call(&[("dm", "a|b")]),
        call(&[("dm", "a_b")]),
        unknown("x:y"),
        unknown("x|y"),
    ]));
    let page = service.get(service.metrics.expect("a port"), "/metrics").text();
    let series: Vec<&str> = page
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| Some(line.rsplit_once(' ')?.0))
        .collect();
    let mut once = series.clone();
    once.sort_unstable();
    once.dedup();
    assert_eq!(once.len(), series.len(), "{page}");
    for line in [
        "ratelimit_service_rate_limit_total_hits{domain=\"one\",key1=\"route\",key2=\"a\"} 2",
        "ratelimit_service_rate_limit_total_hits{domain=\"one\",key1=\"dm_a_b\"} 3",
        "ratelimit_service_rate_limit_domain_not_found{domain=\"x_y\"} 2",
    ] {
        assert!(page.lines().any(|own| own == line), "`{line}` in {page}");
    }
}
