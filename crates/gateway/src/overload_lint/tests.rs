use super::*;
use crate::config::GatewaySection;
use serde::Deserialize;
use tollgate_rules::{Options, Source};

#[derive(Deserialize)]
struct File {
    gateway: GatewaySection,
}

fn found(rules: &[&str], routes: &str) -> Vec<String> {
    let sources: Vec<Source> =
        (0..).zip(rules).map(|(at, text)| Source::new(format!("{at}.yaml"), *text)).collect();
    let rules = Ruleset::load(&sources, &Options::default()).expect("rules");
    let text = format!(
        "gateway: {{listeners: [{{address: '127.0.0.1:0'}}], upstreams: {{api: {{addresses: ['127.0.0.1:1']}}}}, routes: {routes}}}"
    );
    let file: File = serde_saphyr::from_str(&text).expect("settings");
    let config = GatewayConfig {
        gateway: file.gateway,
        identity: tollgate_http::identity::IdentityConfig::default(),
        responses: tollgate_http::response::ResponseConfig::default(),
    };
    let verifier = tollgate_http::identity::CredentialVerifier::new(&config.identity).expect("no keys");
    let routes = Routes::new(&config, &rules, &verifier).expect("routes");
    warnings(&config, &rules, &routes)
}

#[test]
fn endpoints_and_upstreams_that_no_route_has_are_named() {
    let rules = "
domain: d
overload:
  priorities: [{when: {endpoint: [POST /v1/charges, POST /other, charges]}, priority: critical}]
  workers: {limit: 1}
  adapt:
    order: [free]
    signals:
      own: {above: 1, measure: upstream_in_flight, upstream: api}
      lost: {above: 1, measure: upstream_in_flight, upstream: billing}
";
    let found = found(&[rules], "[{path: '/v1/{*rest}', upstream: api, domain: d}]");
    assert_eq!(found.len(), 3, "{found:#?}");
    for (warning, named) in found.iter().zip(["`POST /other`", "`charges`", "`billing`"]) {
        assert!(warning.contains(named), "{warning}");
    }
}

/// A rule that no request of the gateway can meet.
#[test]
fn endpoints_of_rules_that_no_route_takes_are_named() {
    let rules = "
domain: d
descriptors:
  - {key: endpoint, value: POST /v1/a, limit: 1/hour}
  - {key: endpoint, value: 'GET /{version}/a', limit: 1/hour}
  - {key: endpoint, value: 'GET /v1/*', limit: 1/hour}
  - {key: endpoint, value: 'GET *', limit: 1/hour}
  - {key: endpoint, value: POST /v2/a, limit: 1/hour}
  - {key: endpoint, value: 'GET /v2/{id}', limit: 1/hour}
  - {key: endpoint, value: 'POST /get/{id}', limit: 1/hour}
";
    let routes = "[{path: '/v1/{*rest}', upstream: api, domain: d}, {path: /get/all, methods: [GET], upstream: api, domain: d}]";
    let found = found(&[rules], routes);
    assert_eq!(found.len(), 3, "{found:#?}");
    for (warning, named) in found.iter().zip(["`GET /v2/{id}`", "`POST /get/{id}`", "`POST /v2/a`"]) {
        assert!(warning.contains(named), "{warning}");
    }
}

/// A gateway reads the requests itself: what it does not read, they do not have.
#[test]
fn costs_that_no_request_has_are_named() {
    let rules = "
domain: d
descriptors:
  - {key: api_key, name: budget, limit: [9/s, {count: 9, period: day, cost: tokens}]}
  - {key: endpoint, name: sizes, limit: 9/s, cost: host}
";
    let found = found(&[rules], "[{path: '/{*rest}', upstream: api, domain: d}]");
    assert_eq!(found.len(), 1, "{found:#?}");
    assert!(found[0].contains("`tokens`") && found[0].contains("`budget`"), "{found:#?}");
}

#[test]
fn one_upstream_with_two_limits_is_named() {
    let rules = |name: &str| format!("domain: {name}\noverload: {{workers: {{limit: 1}}}}\n");
    let (one, two) = (rules("one"), rules("two"));
    let routes = "[{path: /a, upstream: api, domain: one}, {path: /b, upstream: api, domain: two}]";
    let found = found(&[&one, &two], routes);
    assert!(found.len() == 1 && found[0].contains("domains one, two"), "{found:#?}");
}
