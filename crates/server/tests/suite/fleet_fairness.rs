//! Fairness in the fleet's capacity by every protocol: a tenant within its guarantee is served although another one uses the
//! whole capacity, and a request beyond the guarantee says so.

use crate::harness::{Server, memory};
use serde_json::{Value, json};
use std::sync::Arc;
use tollgate_core::{Clock, SystemClock};
use tollgate_engine::Limiter;
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_server::rls;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;

/// Forward authentication has the path and the method of a request: here they are its tenant and its tier.
const RULES: &str = "
domain: d
tier_key: method
overload:
  fleet: {capacity: 40/day}
  fairness: {by: path, guarantees: {GET: 10% each}}
";
/// A tenth of the capacity.
const GUARANTEED: usize = 4;

/// Uses the whole capacity, by a tenant without a guarantee that sends three times of it.
fn flood(server: &Server) {
    let greedy = json!({"path": "/greedy", "method": "POST"});
    let statuses: Vec<u16> = (0..120).map(|_| server.check("d", &greedy).status).collect();
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 40, "what nobody uses is lent");
    assert_eq!(statuses.last(), Some(&503));
}

#[test]
fn over_http_a_tenant_within_its_guarantee_is_served_and_told_when_it_is_beyond() {
    let server = Server::with_rules(RULES);
    flood(&server);
    let own = json!({"path": "/checked", "method": "GET"});
    let answers: Vec<_> = (0..=GUARANTEED).map(|_| server.check("d", &own)).collect();
    let statuses: Vec<u16> = answers.iter().map(|answer| answer.status).collect();
    assert_eq!(statuses, [200, 200, 200, 200, 503]);
    let shed = answers[GUARANTEED].json();
    assert_eq!(shed["denied_by"], "overload/fleet");
    let reason = shed["reason"].as_str().unwrap_or_default();
    assert!(reason.contains("the fleet's capacity of 40/1d is in use"), "{reason}");
    assert_eq!(answers[0].json()["limits"][0]["limit"], 40, "as the rules have it: {}", answers[0].text());
    // Forward authentication, and Envoy's service as JSON.
    let forwarded: Vec<u16> = (0..=GUARANTEED).map(|_| server.get("/check/forwarded").status).collect();
    assert_eq!(forwarded, [200, 200, 200, 200, 503]);
    let entry = |key: &str, value: &str| json!({"key": key, "value": value});
    let message = json!({"domain": "d", "descriptors": [{"entries": [entry("path", "/json"), entry("method", "GET")]}]});
    let codes: Vec<Value> =
        (0..=GUARANTEED).map(|_| server.post("/json", &message).json()["overallCode"].clone()).collect();
    assert_eq!(codes, ["OK", "OK", "OK", "OK", "OVER_LIMIT"]);
    assert_eq!(server.check("d", &json!({"path": "/greedy", "method": "POST"})).status, 503);
}

#[test]
fn over_the_redis_protocol_a_tenant_within_its_guarantee_is_served() {
    let server = Server::with_rules(RULES);
    flood(&server);
    let client = redis::Client::open(format!("redis://{}/", server.resp)).expect("a URL");
    let mut connection = client.get_connection().expect("a connection");
    let mut limited = || {
        let reply: Vec<redis::Value> = redis::cmd("TG.CHECK")
            .arg(&["d", "path", "/resp", "method", "GET"])
            .query(&mut connection)
            .expect("a reply");
        matches!(reply[0], redis::Value::Int(1))
    };
    let all: Vec<bool> = (0..=GUARANTEED).map(|_| limited()).collect();
    assert_eq!(all, [false, false, false, false, true]);
}

#[test]
fn over_rls_a_tenant_within_its_guarantee_is_served() {
    let rules = Ruleset::load(&[Source::new("fleet.yaml", RULES)], &Options::default()).expect("rules");
    let limiter = Limiter::new(Arc::new(rules), memory(), Arc::new(SystemClock::new()) as Arc<dyn Clock>);
    let check = |path: &str, method: &str| {
        let entry = |key: &str, value: &str| Entry { key: key.to_owned(), value: value.to_owned() };
        // The tenant and the tier may be in different descriptors.
        let descriptor =
            |entry| RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
        let request = RateLimitRequest {
            domain: "d".to_owned(),
            descriptors: vec![descriptor(entry("path", path)), descriptor(entry("method", method))],
            ..RateLimitRequest::default()
        };
        let decision = pollster::block_on(rls::decide(&limiter, "rls", &request, None)).expect("a decision");
        Code::try_from(rls::response(&decision).overall_code).expect("a code")
    };
    let greedy = (0..120).filter(|_| check("/greedy", "POST") == Code::Ok).count();
    assert_eq!(greedy, 40);
    let own: Vec<Code> = (0..=GUARANTEED).map(|_| check("/own", "GET")).collect();
    assert_eq!(own, [Code::Ok, Code::Ok, Code::Ok, Code::Ok, Code::OverLimit]);
}

#[test]
fn in_shadow_mode_answers_say_what_would_be_shed() {
    let server = Server::with_rules(&RULES.replace("overload:", "overload:\n  shadow: true"));
    let over = |path: &str, method: &str| {
        let answer = server.check("d", &json!({"path": path, "method": method}));
        assert_eq!(answer.status, 200, "{}", answer.text());
        let limits = answer.json()["limits"].clone();
        limits.as_array().is_some_and(|limits| limits.iter().any(|limit| limit["over"] == true))
    };
    let greedy = (0..120).filter(|_| over("/greedy", "POST")).count();
    assert_eq!(greedy, 80);
    let own: Vec<bool> = (0..=GUARANTEED).map(|_| over("/own", "GET")).collect();
    assert_eq!(own, [false, false, false, false, true]);
}
