//! Patches of Istio and Envoy Gateway.

use super::{ISTIO, findings, only, problems};

const RULES: &str = "domain: ratelimit\ndescriptors: [{key: PATH, limit: 1/s}]\n";

fn with_match(operation: &str) -> String {
    let router = "match: {context: GATEWAY, listener: {filterChain: {filter: {name: hcm, subFilter: {name: envoy.filters.http.router}}}}}";
    let text = ISTIO.replacen("match: {context: GATEWAY}", router, 1);
    text.replacen("operation: INSERT_BEFORE", &format!("operation: {operation}"), 1)
}

#[test]
fn where_istio_puts_a_filter_is_checked() {
    assert_eq!(problems(&with_match("INSERT_BEFORE"), Some(RULES)), Vec::<String>::new());
    for operation in ["INSERT_AFTER", "ADD"] {
        only(&problems(&with_match(operation), Some(RULES)), "after the router");
    }
    // Without a filter to be put after, Istio appends too.
    let last = ISTIO.replacen("operation: INSERT_BEFORE", "operation: INSERT_AFTER", 1);
    only(&problems(&last, Some(RULES)), "after the router");
    let (problems, _, notes) = findings(&with_match("REMOVE"), Some(RULES));
    assert_eq!(problems, Vec::<String>::new());
    assert!(notes.iter().any(|note| note.contains("the patch removes what it matches")), "{notes:#?}");
    assert!(notes.iter().any(|note| note.contains("no rate limit filter here")), "{notes:#?}");
    assert!(!notes.iter().any(|note| note.contains("Envoy asks")), "{notes:#?}");
}

#[test]
fn a_change_of_a_filter_that_is_elsewhere_is_not_judged() {
    let part = "            domain: ratelimit\n";
    assert!(ISTIO.contains(part));
    let text = with_match("MERGE").replacen(part, "", 1);
    assert_eq!(problems(&text, Some(RULES)), Vec::<String>::new());
}

const POLICY: &str = r#"
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: EnvoyPatchPolicy
spec:
  jsonPatches:
  - operation:
      op: add
      path: /default_filter_chain/filters/0/typed_config/http_filters/0
      value:
        name: envoy.filters.http.ratelimit
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
          domain: ratelimit
          timeout: 0.02s
          rate_limit_service: {grpc_service: {envoy_grpc: {cluster_name: limits}}}
  - operation:
      op: add
      path: /virtual_hosts/0/rate_limits
      value: [{actions: [{request_headers: {header_name: ":path", descriptor_key: PATH}}]}]
  - operation:
      op: add
      path: ""
      value: {name: limits, http2_protocol_options: {}, load_assignment: {cluster_name: limits}}
"#;

#[test]
fn a_json_patch_is_read_by_its_path() {
    let (found, warnings, notes) = findings(POLICY, Some(RULES));
    assert_eq!((found, warnings), (vec![], vec![]));
    assert!(notes.iter().any(|note| note.starts_with("PATH: rule `")), "{notes:#?}");
    assert!(!notes.iter().any(|note| note.contains("no `rate_limits` here")), "{notes:#?}");
    for (from, to, part) in [
        ("descriptor_key: PATH", "descriptor_key: path", "no rule matches the descriptor path"),
        ("http_filters/0", "http_filters/-", "after the router"),
        ("http2_protocol_options: {}, ", "", "does not use HTTP/2"),
    ] {
        only(&problems(&POLICY.replacen(from, to, 1), Some(RULES)), part);
    }
    // One entry of the list instead of the list.
    let one = POLICY
        .replacen("0/rate_limits", "0/rate_limits/-", 1)
        .replacen("[{actions", "{actions", 1)
        .replacen("PATH}}]}]", "path}}]}", 1);
    only(&problems(&one, Some(RULES)), "no rule matches the descriptor path");
    let (found, _, notes) = findings(&POLICY.replace("op: add", "op: remove"), Some(RULES));
    assert_eq!(found, Vec::<String>::new());
    assert!(notes.iter().any(|note| note.contains("removes what its path names")), "{notes:#?}");
    assert!(!notes.iter().any(|note| note.contains("Envoy asks")), "{notes:#?}");
}

/// Envoy Gateway's own examples patch by `jsonPath`, with or without `path`.
#[test]
fn a_json_patch_is_read_by_its_json_path() {
    let manager = "..filters[?(@.name=='envoy.filters.network.http_connection_manager')].typed_config";
    let filters = "path: /default_filter_chain/filters/0/typed_config/http_filters/0";
    let limits = "path: /virtual_hosts/0/rate_limits";
    let with = |place: &str| {
        let text = POLICY.replacen(filters, place, 1);
        let of_route = "jsonPath: \"..routes[?(@.name=='r')].route\"\n      path: rate_limits";
        text.replacen(limits, of_route, 1)
    };
    for place in [
        format!("jsonPath: \"{manager}.http_filters\"\n      path: /0"),
        format!("jsonPath: \"{manager}\"\n      path: http_filters/0"),
        format!("jsonPath: \"{manager}.http_filters[0]\""),
    ] {
        let (found, _, notes) = findings(&with(&place), Some(RULES));
        assert_eq!(found, Vec::<String>::new(), "{place}");
        assert!(notes.iter().any(|note| note.starts_with("PATH: rule `")), "{place}: {notes:#?}");
    }
    let last = with(&format!("jsonPath: \"{manager}.http_filters\"\n      path: /-"));
    only(&problems(&last, Some(RULES)), "after the router");
    let other = with("path: /http_filters/0").replacen("descriptor_key: PATH", "descriptor_key: path", 1);
    only(&problems(&other, Some(RULES)), "no rule matches the descriptor path");
}
