//! Whether a request is over a limit has one answer, whichever protocol gives it: over, if the limit denied it and is enforced. A
//! proxy that reads a status as a denial must not see one where callers are served.

use crate::harness::memory;
use std::sync::Arc;
use tollgate_core::{Clock, SystemClock};
use tollgate_engine::{Decision, Limiter};
use tollgate_http::response::{DecisionSummary, ResponseConfig};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_server::rls;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate_server::rls::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tollgate_server::rls::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;

const RULES: &str = "
domain: d
PROFILE
descriptors:
  - {key: degrade, name: degrade, action: degrade, limit: 1/hour}
  - {key: shadow, name: shadow, shadow: true, limit: 1/hour}
  - {key: quota, name: quota, quota_mode: true, limit: 1/hour}
  - {key: other, name: other, quota_mode: true, limit: 9/hour}
  - {key: live, name: live, limit: 1/hour}
";

fn limiter(rules: &str) -> impl Fn(&[&[&str]]) -> Decision + use<> {
    let rules = Ruleset::load(&[Source::new("over.yaml", rules)], &Options::default()).expect("rules");
    let limiter = Limiter::new(Arc::new(rules), memory(), Arc::new(SystemClock::new()) as Arc<dyn Clock>);
    move |descriptors| {
        let entry = |key: &&str| Entry { key: (*key).to_owned(), value: "v".to_owned() };
        let descriptor = |keys: &&[&str]| RateLimitDescriptor {
            entries: keys.iter().map(entry).collect(),
            ..RateLimitDescriptor::default()
        };
        let request = RateLimitRequest {
            domain: "d".to_owned(),
            descriptors: descriptors.iter().map(descriptor).collect(),
            ..RateLimitRequest::default()
        };
        pollster::block_on(rls::decide(&limiter, "rls", &request, None)).expect("a decision")
    }
}

/// The overall code and the code of each descriptor over RLS, and each limit that the fields of an HTTP response are written from.
fn shown(decision: &Decision) -> (Code, Vec<Code>, Vec<(&str, bool)>) {
    let code = |code: i32| Code::try_from(code).expect("a code");
    let response = rls::response(decision);
    let policies = DecisionSummary::from_decision(decision).policies;
    (
        code(response.overall_code),
        response.statuses.iter().map(|status| code(status.code)).collect(),
        policies.iter().map(|policy| (policy.rule, policy.is_over)).collect(),
    )
}

#[test]
fn rls_and_http_agree_on_what_a_request_is_over() {
    for profile in ["profile: native", "profile: envoy"] {
        let decide = limiter(&RULES.replace("PROFILE", profile));
        let second = |descriptors: &[&[&str]]| {
            assert!(decide(descriptors).is_allowed(), "{profile}");
            decide(descriptors)
        };
        let over = second(&[&["live"]]);
        assert_eq!(shown(&over), (Code::OverLimit, vec![Code::OverLimit], vec![("live", true)]), "{profile}");

        let degraded = second(&[&["degrade"]]);
        assert_eq!(shown(&degraded), (Code::Ok, vec![Code::Ok], vec![]), "{profile}");
        let headers = rls::response(&degraded).response_headers_to_add;
        let marked = headers.iter().any(|header| header.key == "x-ratelimit-degraded");
        assert!(marked, "{profile}: the mark says it instead");

        let shadowed = second(&[&["shadow"]]);
        assert_eq!(shown(&shadowed), (Code::Ok, vec![Code::Ok], vec![]), "{profile}");

        // A quota that is used up is over, while another one has room.
        let one = second(&[&["quota"], &["other"]]);
        let limits = vec![("quota", true), ("other", false)];
        assert_eq!(shown(&one), (Code::Ok, vec![Code::OverLimit, Code::Ok], limits), "{profile}");
        let alone = decide(&[&["quota"]]);
        let limits = vec![("quota", true)];
        assert_eq!(shown(&alone), (Code::OverLimit, vec![Code::OverLimit], limits), "{profile}");
    }
}

/// Several rules may match one descriptor, and its one status is that of the limit that denies, not of one that only counts.
#[test]
fn the_status_of_a_descriptor_is_that_of_the_limit_that_denies() {
    let decide = limiter(&RULES.replace("PROFILE", "match: all"));
    for counting in ["shadow", "degrade"] {
        let keys: &[&str] = &[counting, "live"];
        decide(&[keys]);
        let denied = decide(&[keys]);
        let response = rls::response(&denied);
        assert_eq!(denied.denied_by_name(), Some("live"), "{counting}");
        assert_eq!(response.statuses[0].code, i32::from(Code::OverLimit), "{counting}");
        let limit = response.statuses[0].current_limit.as_ref().expect("a limit");
        assert_eq!(limit.name, "live", "{counting}");
    }
}

/// A limit that cannot deny is not the nearest one: a proxy or a client would slow down for nothing.
#[test]
fn only_limits_that_can_deny_are_the_nearest() {
    let rules = RULES
        .replace("PROFILE", "match: all")
        .replace("name: live, limit: 1/hour", "name: live, limit: 4/hour");
    for counting in ["shadow", "degrade"] {
        let decide = limiter(&rules);
        let keys: &[&str] = &[counting, "live"];
        decide(&[keys]);
        let decision = decide(&[keys, &[counting]]);
        let response = rls::response(&decision);
        assert_eq!(response.overall_code, i32::from(Code::Ok), "{counting}");
        let limit = response.statuses[0].current_limit.as_ref().expect("a limit");
        assert_eq!((limit.name.as_str(), response.statuses[0].limit_remaining), ("live", 2), "{counting}");
        assert_eq!(response.statuses[1].current_limit, None, "{counting}: of its limits none can deny");
        let summary = DecisionSummary::from_decision(&decision);
        let nearest = summary.nearest().expect("a limit");
        assert_eq!((nearest.rule, nearest.remaining), ("live", 2), "{counting}");
        // A second limit of a check by attributes is the same decision.
        let tightest = decision.tightest(0).expect("a limit");
        assert_eq!(decision.limit_name(tightest), "live", "{counting}");
    }
}

/// The service cannot set the status of a response, so it says which one the rule has: a filter behind it can set it.
#[test]
fn the_status_of_a_rules_response_is_in_the_metadata_of_its_denials() {
    let decide = limiter(
        "
domain: d
descriptors: [{key: live, limit: 1/hour, response: {status: 403}}]
",
    );
    let status = |decision: &Decision| {
        let fields = rls::full_response(decision, &ResponseConfig::default(), None).dynamic_metadata;
        let fields = fields.unwrap_or_default().fields;
        fields.get("status").and_then(|value| value.kind.clone())
    };
    assert_eq!(status(&decide(&[&["live"]])), None);
    let expected = Some(prost_types::value::Kind::StringValue("403".to_owned()));
    assert_eq!(status(&decide(&[&["live"]])), expected);
}

/// What a caller behind Envoy gets is what every other caller gets; the service whose place `profile: envoy` takes sends nothing.
#[test]
fn rls_sends_the_fields_and_the_body_of_http_responses() {
    let fields = |profile: &str| {
        let rules = RULES.replace("PROFILE", profile);
        let rules = Ruleset::load(&[Source::new("over.yaml", rules)], &Options::default()).expect("rules");
        let limiter = Limiter::new(Arc::new(rules), memory(), Arc::new(SystemClock::new()) as Arc<dyn Clock>);
        let entries = vec![Entry { key: "live".to_owned(), value: "v".to_owned() }];
        let descriptors = vec![RateLimitDescriptor { entries, ..RateLimitDescriptor::default() }];
        let request = RateLimitRequest { domain: "d".to_owned(), descriptors, hits_addend: 1 };
        let how = (&rls::ResponseStyle::Own, &ResponseConfig::default());
        [(); 2].map(|()| {
            let response =
                pollster::block_on(rls::handle(&limiter, &request, None, how)).expect("a response");
            let names = response.response_headers_to_add.into_iter().map(|header| header.key);
            let body = String::from_utf8(response.raw_body).expect("text");
            (names.collect::<Vec<_>>().join(" "), body)
        })
    };
    let [(allowed, empty), (denied, body)] = fields("profile: native");
    assert_eq!((allowed.as_str(), empty.as_str()), ("ratelimit-policy ratelimit", ""));
    let expected =
        "content-type ratelimit-policy ratelimit retry-after x-ratelimit-denied-by x-ratelimit-decision-id";
    assert_eq!(denied, expected);
    assert!(body.contains("quota-exceeded") && body.contains(r#""retry_after":3600"#), "{body}");
    let [(allowed, empty), (denied, body)] = fields("profile: envoy");
    assert_eq!(
        (allowed + &empty + &body, denied.as_str()),
        (String::new(), "x-ratelimit-denied-by x-ratelimit-decision-id")
    );
}
