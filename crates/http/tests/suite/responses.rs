//! Responses to decisions, parsed by an independent structured-field parser and compared with later decisions: a caller
//! that waits as long as `Retry-After` requires is allowed.

use http::HeaderMap;
use proptest::prelude::*;
use sfv::{BareItem, List, ListEntry, Parser};
use std::sync::Arc;
use tollgate_core::conformance::DeadStore;
use tollgate_core::{CalendarUnit, Clock, Cost, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{
    ActiveMeasures, Check, Decision, Limiter, Measure, MeasureAction, MeasureTarget, Window,
};
use tollgate_http::response::{
    BodyFormat, DecisionSummary, Disposition, LegacyHeaders, Policy, ResponseConfig,
};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{DenyCache, MemoryConfig, MemoryStore};

/// A member of a list: its name, its integer parameters, and its `qu` parameter.
type Member = (String, Vec<(String, i64)>, Option<String>);

fn members(headers: &HeaderMap, field: &str) -> Vec<Member> {
    let text = headers[field].to_str().expect("ASCII");
    let list: List = Parser::new(text).parse().unwrap_or_else(|error| panic!("{error} in `{text}`"));
    list.into_iter()
        .map(|entry| {
            let ListEntry::Item(item) = entry else { panic!("an inner list in `{text}`") };
            let BareItem::String(name) = item.bare_item else {
                panic!("a name that is not a String in `{text}`")
            };
            let (mut numbers, mut unit) = (Vec::new(), None);
            for (key, value) in item.params {
                match value {
                    BareItem::Integer(number) => numbers.push((key.to_string(), i64::from(number))),
                    BareItem::String(text) if key.as_str() == "qu" => unit = Some(text.as_str().to_owned()),
                    other => panic!("{key} = {other:?} in `{text}`"),
                }
            }
            (name.as_str().to_owned(), numbers, unit)
        })
        .collect()
}

fn number(member: &Member, name: &str) -> Option<i64> {
    member.1.iter().find(|(key, _)| key == name).map(|(_, value)| *value)
}

fn headers(settings: &ResponseConfig, facts: &DecisionSummary<'_>, now: Timestamp) -> HeaderMap {
    let mut headers = HeaderMap::new();
    settings.write(facts, now, &mut headers);
    headers
}

fn window() -> impl Strategy<Value = Window> {
    prop_oneof![
        (1_u64..10_000_000_000).prop_map(|micros| Window::Rolling(TimeDelta::from_micros(micros))),
        Just(Window::Calendar(CalendarUnit::Day)),
        Just(Window::Calendar(CalendarUnit::Month)),
        Just(Window::Concurrent),
    ]
}

proptest! {
    /// A client ignores a field that it cannot parse, so both must parse for any rule name and any number.
    #[test]
    fn both_fields_parse_and_match_the_summary(
        limits in proptest::collection::vec((".{0,20}", any::<u64>(), window(), any::<u64>(), any::<u64>(), any::<bool>()), 1..6),
    ) {
        const MAX_INTEGER: u64 = 999_999_999_999_999;
        let policies = limits.iter().map(|(rule, quota, window, left, reset, over)| {
            let policy = Policy::new(rule, *quota, *window).with_remaining(*left).with_reset(*reset);
            if *over { policy.denied() } else { policy }
        });
        let facts = DecisionSummary::from_policies(policies);
        let headers = headers(&ResponseConfig::default(), &facts, Timestamp::ZERO);
        let listed = members(&headers, "ratelimit-policy");
        prop_assert_eq!(listed.len(), limits.len());
        for (member, (rule, quota, window, ..)) in listed.iter().zip(&limits) {
            let seen: String = rule.chars().map(|c| if (' '..='~').contains(&c) { c } else { '?' }).collect();
            let several = limits.iter().filter(|(other, ..)| other == rule).count() > 1;
            let name = if several { format!("{seen}/{window}") } else { seen };
            prop_assert_eq!(&member.0, &name);
            prop_assert_eq!(number(member, "q"), Some((*quota).min(MAX_INTEGER) as i64));
            prop_assert!(number(member, "w").is_none_or(|w| w > 0));
            prop_assert_eq!(member.2.as_deref(), (*window == Window::Concurrent).then_some("concurrent-requests"));
        }
        // One item for rates and one for requests at once: neither replaces the other.
        let near = members(&headers, "ratelimit");
        let kinds = [false, true].map(|at_once| {
            limits.iter().filter(|limit| (limit.2 == Window::Concurrent) == at_once).collect::<Vec<_>>()
        });
        prop_assert_eq!(near.len(), kinds.iter().filter(|kind| !kind.is_empty()).count());
        for (member, kind) in near.iter().zip(kinds.iter().filter(|kind| !kind.is_empty())) {
            prop_assert!(listed.iter().any(|policy| policy.0 == member.0), "it names one of the policies");
            let least = kind.iter().map(|limit| limit.3.min(limit.1)).min().unwrap_or(0);
            if kind.iter().all(|limit| !limit.5) {
                prop_assert_eq!(number(member, "r"), Some(least.min(MAX_INTEGER) as i64));
            }
        }
        let whole = |field: &str| headers.get(field).map(|value| value.to_str().expect("ASCII").parse::<u64>().expect("a number"));
        for (limit, remaining, is_there) in [
            ("x-ratelimit-limit", "x-ratelimit-remaining", !kinds[0].is_empty()),
            ("x-ratelimit-concurrency-limit", "x-ratelimit-concurrency-remaining", !kinds[1].is_empty()),
        ] {
            prop_assert_eq!((whole(limit).is_some(), whole(remaining).is_some()), (is_there, is_there));
            prop_assert!(whole(remaining) <= whole(limit), "{:?}", headers);
        }
    }
}

const RULES: &str = "
domain: d
descriptors:
  - {key: bucket, name: bucket, limit: 7/second, burst: 3}
  - {key: token, name: token, limit: 3/minute, algorithm: token_bucket}
  - {key: fixed, name: fixed, limit: 4/minute, algorithm: fixed_window}
  - {key: sliding, name: sliding, limit: 4 per 7s, algorithm: sliding_window}
  - {key: strict, name: strict, limit: 5/minute, algorithm: strict_window}
  - {key: log, name: log, limit: 3 per 1500ms, algorithm: sliding_log}
  - {key: many, name: many, limit: [2/second, 5/minute]}
  - {key: shadow, name: shadow, limit: 1/hour, shadow_mode: true}
  - {key: lesser, name: lesser, limit: 1/hour, action: degrade}
  - {key: warned, name: warned, limit: 10/hour, soft: 5}
  - {key: guard, name: guard, limit: 1/minute, class: security}
  - {key: held, name: held, concurrency: 2}
";

struct Rig {
    clock: Arc<ManualClock>,
    limiter: Limiter<MemoryStore<Arc<ManualClock>>>,
}

impl Rig {
    fn new() -> Self {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
        let store =
            MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
        let rules = Ruleset::load(&[Source::new("test.yaml", RULES)], &Options::default());
        let rules = rules.unwrap_or_else(|errors| panic!("{errors}"));
        let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
        Self { limiter: Limiter::new(Arc::new(rules), store, time), clock }
    }

    fn check(&self, keys: &[&str], cost: u64) -> Decision {
        let attributes: Vec<_> = keys.iter().map(|key| (*key, "x")).collect();
        pollster::block_on(
            self.limiter.check(&Check::attributes("d", &attributes).with_cost(Cost::new(cost))),
        )
    }
}

fn fields(decision: &Decision) -> HeaderMap {
    headers(&ResponseConfig::default(), &DecisionSummary::from_decision(decision), Timestamp::ZERO)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// A `Retry-After` that is too short causes needless retries; a `t` beyond it makes callers wait for nothing.
    #[test]
    fn a_caller_that_waits_for_retry_after_is_allowed(
        keys in proptest::sample::subsequence(vec!["bucket", "token", "fixed", "sliding", "strict", "log", "many"], 1..4),
        steps in proptest::collection::vec((0_u64..3_000_000, 1_u64..3), 1..40),
    ) {
        let rig = Rig::new();
        for (pause, cost) in steps {
            rig.clock.advance(TimeDelta::from_micros(pause));
            let decision = rig.check(&keys, cost);
            let headers = fields(&decision);
            let near = &members(&headers, "ratelimit")[0];
            let (left, reset) = (number(near, "r").expect("r"), number(near, "t").expect("t"));
            let wait: Option<u64> = headers.get("retry-after").map(|v| v.to_str().expect("ASCII").parse().expect("seconds"));
            prop_assert_eq!(wait.is_some(), !decision.is_allowed());
            if let Some(wait) = wait {
                // With units left, the field has the time until all are back, which is never before the request passes.
                prop_assert!(reset as u64 == wait || (left > 0 && reset as u64 > wait), "{:?}", headers);
                rig.clock.advance(TimeDelta::from_secs(wait));
                let again = rig.check(&keys, cost);
                prop_assert!(again.is_allowed(), "{:?} then {:?}", headers, fields(&again));
            } else if left == 0 {
                rig.clock.advance(TimeDelta::from_secs(reset as u64));
                let peek = rig.check(&keys, 0);
                let name = near.0.split('/').next().expect("a name").to_owned();
                let policies = DecisionSummary::from_decision(&peek).policies;
                let policy = policies.iter().find(|policy| policy.rule == name && policy.remaining > 0);
                prop_assert!(policy.is_some(), "{:?} then {:?}", headers, policies);
            }
        }
    }
}

/// Callers slow down by these fields: a shadow limit must not cause that, and every window that can deny must be
/// listed.
#[test]
fn exactly_the_limits_that_can_deny_are_listed() {
    let rig = Rig::new();
    let headers = fields(&rig.check(&["many", "shadow", "bucket"], 1));
    assert_eq!(headers["ratelimit-policy"], r#""bucket";q=7;w=1, "many/1s";q=2;w=1, "many/1m";q=5;w=60"#);
    assert_eq!(headers["ratelimit"], r#""many/1s";r=1;t=1"#);
    let permits = fields(&rig.check(&["held"], 1));
    assert_eq!(permits["ratelimit-policy"], r#""held";q=2;qu="concurrent-requests""#);
    assert_eq!(permits["ratelimit"], r#""held";r=1"#);
    assert!(!permits.contains_key("x-ratelimit-limit"), "it is no rate: {permits:?}");
    let both = fields(&rig.check(&["held", "fixed"], 1));
    assert_eq!(both["ratelimit"], r#""fixed";r=3;t=20, "held";r=0"#);
    let numbers = ["limit", "remaining", "concurrency-limit", "concurrency-remaining"];
    let numbers = numbers.map(|name| both[format!("x-ratelimit-{name}")].to_str().expect("ASCII").to_owned());
    assert_eq!(numbers, ["4", "3", "2", "0"]);
    assert_eq!(both["x-ratelimit-policy"], "4;w=60");
    let unmatched = fields(&rig.check(&["unknown"], 1));
    assert!(unmatched.is_empty(), "an empty list has no field: {unmatched:?}");
}

/// Upstreams degrade their service, and dashboards warn, by these fields.
#[test]
fn degraded_and_warned_requests_are_marked() {
    let rig = Rig::new();
    assert!(!fields(&rig.check(&["lesser"], 1)).contains_key("x-ratelimit-degraded"));
    let headers = fields(&rig.check(&["lesser"], 1));
    assert_eq!(headers["x-ratelimit-degraded"], "lesser");
    assert!(!headers.contains_key("retry-after"), "the request is allowed");
    let warned = rig.check(&["warned"], 6);
    assert_eq!(fields(&warned)["x-ratelimit-warning"], "warned");
    let mut upstream = HeaderMap::new();
    tollgate_http::response::write_markers(&DecisionSummary::from_decision(&warned), &mut upstream);
    assert_eq!((upstream.len(), &upstream["x-ratelimit-warning"]), (1, &"warned".parse().expect("a value")));
}

/// Existing clients and dashboards read these fields; with a reset in the wrong format they would wait for fifty years.
#[test]
fn legacy_fields_are_written_unless_disabled() {
    let rig = Rig::new();
    rig.check(&["token"], 3);
    let decision = rig.check(&["token"], 1);
    // Another clock than the one that counts the window.
    let now = Timestamp::from_micros(1_700_000_000_500_000);
    let with = |legacy| {
        headers(
            &ResponseConfig { legacy, ..ResponseConfig::default() },
            &DecisionSummary::from_decision(&decision),
            now,
        )
    };
    assert!(!with(LegacyHeaders::None).contains_key("x-ratelimit-limit"));
    let delta = with(LegacyHeaders::Delta);
    for (field, value) in [
        ("x-ratelimit-limit", "3"),
        ("x-ratelimit-remaining", "0"),
        ("x-ratelimit-reset", "20"),
        ("x-ratelimit-policy", "3;w=60"),
        ("x-ratelimit-denied-by", "token"),
        ("retry-after", "20"),
    ] {
        assert_eq!(delta[field], value, "{field}");
    }
    let epoch = headers(&ResponseConfig::default(), &DecisionSummary::from_decision(&decision), now);
    assert_eq!(epoch["x-ratelimit-reset"], "1000020", "by the clock that counts");
    let facts = DecisionSummary { at: None, ..DecisionSummary::from_decision(&decision) };
    let epoch = headers(&ResponseConfig::default(), &facts, now);
    assert_eq!(epoch["x-ratelimit-reset"], "1700000021", "rounded up");
}

/// A client that computes the end of a window must get the same second, whenever within the window it asks.
#[test]
fn an_epoch_reset_is_the_end_of_the_window() {
    let rig = Rig::new();
    let mut seen = Vec::new();
    for micros in [0, 1, 499_999, 500_000, 999_999, 7_000_000] {
        rig.clock.advance(TimeDelta::from_micros(micros));
        let decision = rig.check(&["fixed"], 0);
        let headers =
            headers(&ResponseConfig::default(), &DecisionSummary::from_decision(&decision), Timestamp::ZERO);
        seen.push(headers["x-ratelimit-reset"].to_str().expect("ASCII").to_owned());
    }
    assert_eq!(seen, vec!["1000020"; 6]);
}

/// Clients pace themselves by these fields; without them they would fall back to guessing just when it matters.
#[test]
fn every_decision_on_a_limit_has_the_fields() {
    let rules = "
domain: d
descriptors:
  - {key: open, name: open, limit: 5/minute, on_error: open}
  - {key: closed, name: closed, limit: 7/minute, on_error: closed}
";
    let rules = Ruleset::load(&[Source::new("test.yaml", rules)], &Options::default()).expect("rules");
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let limiter = Limiter::new(Arc::new(rules), DeadStore, Arc::clone(&clock) as Arc<dyn Clock>);
    for (key, status, numbers) in [
        ("open", Disposition::Allowed, ["5", "5", "1000000", "5;w=60"]),
        ("closed", Disposition::Unavailable, ["7", "0", "1000001", "7;w=60"]),
    ] {
        let decision = pollster::block_on(limiter.check(&Check::attributes("d", &[(key, "x")])));
        let facts = DecisionSummary::from_decision(&decision);
        assert_eq!(facts.disposition, status, "{key}");
        let headers = headers(&ResponseConfig::default(), &facts, clock.now());
        let fields = ["limit", "remaining", "reset", "policy"];
        let fields = fields.map(|name| headers[format!("x-ratelimit-{name}")].to_str().expect("ASCII"));
        assert_eq!(fields, numbers, "{key}");
        assert!(headers.contains_key("ratelimit") && headers.contains_key("ratelimit-policy"), "{key}");
    }
    // The limit that failed is the one that is reported, whatever else matched.
    let both = [("open", "x"), ("closed", "x")];
    let decision = pollster::block_on(limiter.check(&Check::attributes("d", &both)));
    let headers = fields(&decision);
    assert_eq!(headers["x-ratelimit-denied-by"], "closed");
    assert_eq!(
        (&headers["ratelimit"], &headers["x-ratelimit-limit"]),
        (&r#""closed";r=0;t=1"#.parse().expect("a value"), &"7".parse().expect("a value"),)
    );
    assert_eq!(headers["retry-after"], "1");
}

/// A measure replaces the limits, not the fields by which clients pace themselves.
#[test]
fn decisions_of_emergency_measures_have_the_fields() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let rules = Ruleset::load(&[Source::new("test.yaml", RULES)], &Options::default()).expect("rules");
    let measures = Arc::new(ActiveMeasures::new(|_| 0));
    let limiter = Limiter::new(Arc::new(rules), store, Arc::clone(&clock) as Arc<dyn Clock>)
        .with_measures(Arc::clone(&measures));
    for (action, numbers, policy) in [
        (MeasureAction::Block, ["0", "0", "1000030"], r#""fixed";q=4;w=60, "emergency:1";q=0;w=30"#),
        (MeasureAction::Exempt, ["4", "4", "1000000"], r#""fixed";q=4;w=60"#),
    ] {
        measures.replace([Measure {
            name: "emergency:1".into(),
            action,
            target: MeasureTarget::Tenant("t".into()),
            expires_at: Timestamp::from_secs(1_000_030),
        }]);
        let attributes = [("fixed", "x"), ("tenant", "t")];
        let decision = pollster::block_on(limiter.check(&Check::attributes("d", &attributes)));
        assert_eq!(decision.is_allowed(), action == MeasureAction::Exempt);
        let facts = DecisionSummary::from_decision(&decision);
        let headers = headers(&ResponseConfig::default(), &facts, clock.now());
        let fields = ["limit", "remaining", "reset"];
        let fields = fields.map(|name| headers[format!("x-ratelimit-{name}")].to_str().expect("ASCII"));
        assert_eq!((fields, &headers["ratelimit-policy"]), (numbers, &policy.parse().expect("a value")));
    }
}

/// The second denial does not ask the store; a client must not see limits come and go.
#[test]
fn a_denial_from_the_cache_has_the_same_policies() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let store = DenyCache::new(store, Arc::clone(&clock), 64);
    let rules = Ruleset::load(&[Source::new("test.yaml", RULES)], &Options::default()).expect("rules");
    let limiter = Limiter::new(Arc::new(rules), store, Arc::clone(&clock) as Arc<dyn Clock>);
    let ask = || {
        let attributes = [("fixed", "x"), ("guard", "x"), ("held", "x"), ("strict", "x")];
        fields(&pollster::block_on(limiter.check(&Check::attributes("d", &attributes))))
    };
    assert!(!ask().contains_key("retry-after"));
    let first = ask();
    let again = ask();
    assert_eq!(limiter.store().hits(), 1, "the last one is from the cache");
    for field in
        ["ratelimit-policy", "x-ratelimit-policy", "x-ratelimit-limit", "x-ratelimit-reset", "retry-after"]
    {
        assert_eq!(first[field], again[field], "{field}");
    }
}

/// A paced client that has taken the last unit sends its next request when `t` is over: not a moment later than it could, and
/// never to be denied.
#[test]
fn with_no_unit_left_the_time_is_that_of_the_next_one() {
    let algorithms = [
        "gcra",
        "token_bucket",
        "leaky_bucket",
        "fixed_window",
        "sliding_window",
        "strict_window",
        "sliding_log",
    ];
    for algorithm in algorithms {
        let rules =
            format!("{{domain: d, descriptors: [{{key: k, limit: 10 per 100s, algorithm: {algorithm}}}]}}");
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_037)));
        let store =
            MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
        let rules = Ruleset::load(&[Source::new("test.yaml", &rules)], &Options::default()).expect("rules");
        let limiter = Limiter::new(Arc::new(rules), store, Arc::clone(&clock) as Arc<dyn Clock>);
        let ask = || pollster::block_on(limiter.check(&Check::attributes("d", &[("k", "v")])));
        // Spread, so that the last unit and the whole limit do not come back together.
        let last = loop {
            let decision = ask();
            assert!(decision.is_allowed(), "{algorithm}");
            if decision.limits[0].outcome.remaining == 0 {
                break decision;
            }
            clock.advance(TimeDelta::from_millis(700));
        };
        let near = members(&fields(&last), "ratelimit").remove(0);
        assert_eq!(number(&near, "r"), Some(0), "{algorithm}");
        let seconds = u64::try_from(number(&near, "t").expect("a time")).expect("a time");
        clock.advance(TimeDelta::from_secs(seconds - 1));
        assert!(!ask().is_allowed(), "{algorithm}: a second before");
        clock.advance(TimeDelta::from_secs(1));
        assert!(ask().is_allowed(), "{algorithm}: after {seconds} s");
    }
}

/// A limit that degrades lets every request pass, so a client that waited for it would wait for nothing.
#[test]
fn limits_that_only_degrade_are_not_listed() {
    let rig = Rig::new();
    rig.check(&["lesser"], 1);
    let headers = fields(&rig.check(&["lesser", "fixed"], 1));
    assert_eq!(headers["ratelimit-policy"], r#""fixed";q=4;w=60"#);
    assert_eq!(headers["x-ratelimit-remaining"], "3");
    assert_eq!(headers["x-ratelimit-degraded"], "lesser");
}

/// A limit whose counter was not read is listed as always, and never reported as the nearest one.
#[test]
fn unknown_limits_are_listed_but_not_nearest() {
    let minute = Window::Rolling(TimeDelta::from_secs(60));
    let known = Policy::new("known", 9, minute).with_remaining(0).with_reset(7).denied();
    let mut unknown = Policy::new("unknown", 1, minute);
    unknown.is_known = false;
    let facts = DecisionSummary::from_policies([unknown, known]);
    let headers = headers(&ResponseConfig::default(), &facts, Timestamp::ZERO);
    assert_eq!(headers["ratelimit-policy"], r#""unknown";q=1;w=60, "known";q=9;w=60"#);
    assert_eq!(headers["ratelimit"], r#""known";r=0;t=7"#);
    assert_eq!(headers["x-ratelimit-limit"], "9");
}

/// A denial is served in no form, so an upstream or a dashboard must not count it as a degraded response.
#[test]
fn a_denial_is_never_marked() {
    let rig = Rig::new();
    rig.check(&["lesser", "guard", "warned"], 1);
    let decision = rig.check(&["lesser", "guard", "warned"], 9);
    // Also in what is not written as a field: bodies, metadata, the log.
    assert!(!decision.is_allowed() && decision.degraded_by.is_none() && decision.warned_by.is_none());
    let headers = fields(&decision);
    assert!(headers.contains_key("x-ratelimit-denied-by"));
    assert!(!headers.contains_key("x-ratelimit-degraded") && !headers.contains_key("x-ratelimit-warning"));
    let facts = DecisionSummary {
        disposition: Disposition::Denied,
        degraded_by: Some("lesser"),
        ..DecisionSummary::from_policies([])
    };
    let mut markers = HeaderMap::new();
    tollgate_http::response::write_markers(&facts, &mut markers);
    assert!(markers.is_empty(), "{markers:?}");
}

/// People find out from the body whose limit it was and where it is described; a key is never in it.
#[test]
fn a_denial_reports_its_rule_and_limit() {
    let rules = "
domain: d
descriptors:
  - key: api_key
    descriptors:
      - {key: endpoint, name: per-endpoint, limit: 1/hour}
";
    let rules = Ruleset::load(&[Source::new("test.yaml", rules)], &Options::default()).expect("rules");
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let limiter = Limiter::new(Arc::new(rules), store, Arc::clone(&clock) as Arc<dyn Clock>);
    let settings: ResponseConfig =
        serde_saphyr::from_str("{documentation_url: 'https://example.com/limits', bucket: true}")
            .expect("settings");
    let ask = |settings: &ResponseConfig, key: &str, endpoint: &str| {
        let attributes = [("endpoint", endpoint), ("api_key", key), ("user_id", "ann")];
        let check = Check::attributes("d", &attributes);
        let decision = pollster::block_on(limiter.check(&check));
        let scope = settings.scope(&decision, check.input);
        settings.respond(&DecisionSummary::from_decision(&decision).with_scope(scope.as_deref()), clock.now())
    };
    let (key, other) = ("sk_live_0123456789", "sk_live_9876543210");
    let first = ask(&settings, key, "POST /login");
    let denied = ask(&settings, key, "POST /login");
    assert_eq!((first.status().as_u16(), denied.status().as_u16()), (200, 429));
    let bucket = |response: &http::Response<bytes::Bytes>| response.headers()["x-ratelimit-bucket"].clone();
    assert_eq!(bucket(&first), bucket(&denied), "the same counter");
    assert_ne!(bucket(&first), bucket(&ask(&settings, key, "POST /other")), "another endpoint");
    assert_ne!(bucket(&first), bucket(&ask(&settings, other, "POST /login")), "another key");
    let body: serde_json::Value = serde_json::from_slice(denied.body()).expect("JSON");
    assert_eq!(body["endpoint"], "POST /login");
    assert_eq!(body["scope"], "api_key:sk_l…:endpoint:POST /login");
    assert_eq!(body["documentation_url"], "https://example.com/limits");
    assert!(!body.to_string().contains(key), "{body}");

    let plain = ResponseConfig { body: BodyFormat::Plain, bucket: false, ..settings };
    let denied = ask(&plain, key, "POST /login");
    let body: serde_json::Value = serde_json::from_slice(denied.body()).expect("JSON");
    assert_eq!(body["error"]["scope"], "api_key:sk_l…:endpoint:POST /login");
    assert_eq!(body["error"]["documentation_url"], "https://example.com/limits");
    assert!(!denied.headers().contains_key("x-ratelimit-bucket"));
}

proptest! {
    /// A flood is answered in one small packet, whatever the rule is called.
    #[test]
    fn a_minimal_body_has_at_most_200_bytes(
        rule in ".{0,300}",
        retry_after in any::<Option<u64>>(),
        is_abnormal in any::<bool>(),
        disposition in prop_oneof![Just(Disposition::Denied), Just(Disposition::Unavailable)],
    ) {
        let settings: ResponseConfig = serde_saphyr::from_str(
            "{body: minimal, documentation_url: 'https://example.com/limits'}",
        ).expect("settings");
        let policy = Policy::new(&rule, 1, Window::Concurrent).denied();
        let facts = DecisionSummary {
            disposition, retry_after, is_abnormal, denied_by: Some(&rule), ..DecisionSummary::from_policies([policy])
        };
        let (kind, body) = settings.body(&facts).expect("a denial");
        prop_assert!(body.len() <= 200, "{} bytes", body.len());
        let body: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
        prop_assert_eq!((kind, body["retry_after"].as_u64()), ("application/problem+json", retry_after));
        prop_assert_eq!(body["status"].as_u64(), Some(u64::from(settings.status(&facts).as_u16())));
    }
}

proptest! {
    /// The bodies are written without a JSON library; one that builds them from the same facts must agree.
    #[test]
    fn both_bodies_equal_those_of_a_json_library(
        limits in proptest::collection::vec((".{0,20}", any::<u64>(), window(), any::<u64>(), any::<bool>()), 0..6),
        retry_after in prop_oneof![Just(Some(1)), any::<Option<u64>>()],
        id in proptest::option::of(any::<u128>()),
        disposition in prop_oneof![Just(Disposition::Denied), Just(Disposition::Unavailable)],
    ) {
        let policies = limits.iter().map(|(rule, quota, window, left, over)| {
            let policy = Policy::new(rule, *quota, *window).with_remaining(*left);
            if *over { policy.denied() } else { policy }
        });
        let denied_by = limits.first().map(|limit| limit.0.as_str());
        let decision = id.map(tollgate_engine::DecisionId);
        let facts = DecisionSummary { disposition, retry_after, denied_by, decision, ..DecisionSummary::from_policies(policies) };
        let nearest = facts.nearest().filter(|_| disposition == Disposition::Denied);
        let limit = nearest.map(|near| match near.window {
            Window::Concurrent => format!("At most {} at once. ", near.quota),
            window => format!("At most {} in {window}. ", near.quota),
        });
        let reason = match (disposition, nearest) {
            (Disposition::Denied, None) if retry_after.is_none() => {
                "No limit is set for this request, and such requests are denied."
            }
            (Disposition::Denied, _) => "Rate limit exceeded. ",
            _ => "The request could not be checked. ",
        };
        let advice = match (retry_after, nearest) {
            (Some(1), _) => "Retry after 1 second.".to_owned(),
            (Some(wait), _) => format!("Retry after {wait} seconds."),
            (None, Some(near)) if near.quota == 0 => "No request can pass, now or later.".to_owned(),
            (None, Some(_)) => "A request of this cost can never pass; send a smaller cost.".to_owned(),
            (None, None) => String::new(),
        };
        let message = format!("{reason}{}{advice}", limit.unwrap_or_default());

        let read = |form| {
            let settings = ResponseConfig { body: form, ..ResponseConfig::default() };
            let (_, body) = settings.body(&facts).expect("a denial");
            serde_json::from_slice::<serde_json::Value>(&body).expect("JSON")
        };
        let (kind, title, status) = match disposition {
            Disposition::Denied => ("quota-exceeded", "Over the limit", 429),
            _ => ("temporary-reduced-capacity", "Temporarily unavailable", 503),
        };
        let mut problem = serde_json::json!({
            "type": format!("https://iana.org/assignments/http-problem-types#{kind}"),
            "title": title, "status": status, "detail": message,
        });
        if let Some(wait) = retry_after {
            problem["retry_after"] = wait.into();
        }
        if disposition == Disposition::Denied {
            let over = facts.policies.iter().filter(|policy| policy.is_over).map(|policy| {
                let seen = policy.rule.chars().map(|c| if (' '..='~').contains(&c) { c } else { '?' });
                let seen: String = seen.collect();
                if policy.is_one_of_several { format!("{seen}/{}", policy.window) } else { seen }
            });
            problem["violated-policies"] = over.collect();
        }
        if let Some(id) = id {
            problem["decision_id"] = format!("{id:032x}").into();
        }
        prop_assert_eq!(read(BodyFormat::Problem), problem);

        let code = if disposition == Disposition::Denied { "RATE_LIMITED" } else { "UNAVAILABLE" };
        let mut error = serde_json::json!({"code": code, "message": message});
        if let Some(wait) = retry_after {
            error["retry_after"] = wait.into();
        }
        if let Some(near) = facts.nearest() {
            error["limit"] = near.quota.into();
            error["window"] = near.window.to_string().into();
        }
        if let Some(rule) = denied_by {
            error["scope"] = rule.into();
        }
        prop_assert_eq!(read(BodyFormat::Plain), serde_json::json!({ "error": error }));
    }
}

/// Programs act on the status and the problem type; people read the rest.
#[test]
fn a_denial_has_the_configured_status_and_body() {
    let rig = Rig::new();
    rig.check(&["many"], 2);
    let decision = rig.check(&["many"], 1);
    let facts = DecisionSummary::from_decision(&decision);
    let read = |settings: &str| {
        let settings: ResponseConfig = serde_saphyr::from_str(settings).expect("settings");
        let response = settings.respond(&facts, Timestamp::ZERO);
        let body: serde_json::Value = serde_json::from_slice(response.body()).expect("JSON");
        (response.status().as_u16(), response.headers()["content-type"].clone(), body)
    };
    let (status, kind, body) = read("{}");
    assert_eq!((status, kind.to_str().expect("ASCII")), (429, "application/problem+json"));
    assert_eq!(body["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
    assert_eq!(body["violated-policies"], serde_json::json!(["many/1s"]));
    assert_eq!((&body["status"], &body["retry_after"]), (&429.into(), &1.into()));
    assert_eq!(body["decision_id"], decision.id().to_string());

    let (status, kind, body) = read("{status: 403, body: plain, ratelimit: none, legacy: epoch}");
    assert_eq!((status, kind.to_str().expect("ASCII")), (403, "application/json"));
    assert_eq!(
        body,
        serde_json::json!({"error": {"code": "RATE_LIMITED", "retry_after": 1, "limit": 2, "window": "1s", "scope": "many",
            "message": "Rate limit exceeded. At most 2 in 1s. Retry after 1 second."}})
    );

    rig.check(&["guard"], 1);
    let abuse = rig.check(&["guard"], 1);
    let body = ResponseConfig::default().body(&DecisionSummary::from_decision(&abuse)).expect("a denial").1;
    assert!(String::from_utf8_lossy(&body).contains("#abnormal-usage-detected"));
    let allowed = rig.check(&["bucket"], 1);
    assert_eq!(ResponseConfig::default().body(&DecisionSummary::from_decision(&allowed)), None);
}

/// 503 means that the caller has not exceeded a limit; it must not depend on the configured denial status.
#[test]
fn an_unavailable_limiter_is_503_whatever_the_denial_status() {
    let settings: ResponseConfig = serde_saphyr::from_str("{status: 403}").expect("settings");
    let facts = DecisionSummary {
        disposition: Disposition::Unavailable,
        retry_after: Some(1),
        ..DecisionSummary::from_policies([])
    };
    let response = settings.respond(&facts, Timestamp::ZERO);
    assert_eq!(
        (response.status().as_u16(), &response.headers()["retry-after"]),
        (503, &"1".parse().expect("a value"))
    );
    assert!(String::from_utf8_lossy(response.body()).contains("#temporary-reduced-capacity"));
    assert!(!response.headers().contains_key("ratelimit"));
}

/// A typo that was ignored would be a setting without effect.
#[test]
fn invalid_settings_are_rejected_with_a_fix() {
    for (text, message) in [
        ("{status: 200}", "429, 403"),
        ("{status: 999}", "429, 403"),
        ("{bodi: plain}", "bodi"),
        ("{body: html}", "problem"),
        ("{legacy: yes}", "epoch"),
        ("{ratelimit: draft-3}", "draft-11"),
        ("{documentation_url: limits}", "https://"),
        ("{documentation_url: 'javascript:x'}", "https://"),
    ] {
        let error = serde_saphyr::from_str::<ResponseConfig>(text).expect_err(text).to_string();
        assert!(error.contains(message), "{text}: {error}");
    }
    assert_eq!(serde_saphyr::from_str::<ResponseConfig>("{}").expect("defaults").body, BodyFormat::Problem);
}

/// A time to retry that is invented is a promise that is not kept: a client would try again and again.
#[test]
fn a_request_that_can_never_pass_has_no_time_to_retry() {
    let rig = Rig::new();
    for key in ["fixed", "bucket", "token", "strict", "log", "sliding"] {
        let denied = rig.check(&[key], 1_000_000);
        assert!(!denied.is_allowed());
        let headers = fields(&denied);
        assert!(!headers.contains_key("retry-after"), "{key}: {headers:?}");
        let body =
            ResponseConfig::default().body(&DecisionSummary::from_decision(&denied)).expect("a denial").1;
        let body: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
        assert!(body.get("retry_after").is_none(), "{body}");
        assert!(body["detail"].as_str().expect("text").contains("can never pass"), "{body}");
        let left = number(&members(&headers, "ratelimit")[0], "r");
        assert!(left.is_some_and(|left| left > 0), "all units are left: {headers:?}");
    }
    // A limit of 0 has no time at which more of it is available either.
    let closed = Policy::new("closed", 0, Window::Rolling(TimeDelta::from_secs(60))).denied();
    let facts =
        DecisionSummary { disposition: Disposition::Denied, ..DecisionSummary::from_policies([closed]) };
    let headers = headers(&ResponseConfig::default(), &facts, Timestamp::from_secs(1_000));
    assert_eq!(headers["ratelimit"], r#""closed";r=0"#);
    assert!(
        !headers.contains_key("x-ratelimit-reset") && !headers.contains_key("retry-after"),
        "{headers:?}"
    );
    // Of two limits that deny, the one that lasts longest is reported: one that never ends.
    rig.check(&["guard", "fixed"], 1);
    let both = fields(&rig.check(&["guard", "fixed"], 1_000));
    assert!(!both.contains_key("retry-after"), "{both:?}");
}

/// A denial although units are left reports how many, and when all are back; when to retry is a field of its own.
#[test]
fn a_denial_with_units_left_reports_the_reset() {
    let rig = Rig::new();
    rig.check(&["bucket"], 2);
    let denied = rig.check(&["bucket"], 2);
    assert!(!denied.is_allowed());
    let summary = DecisionSummary::from_decision(&denied);
    let status = denied.limits[0].outcome;
    let near = summary.nearest().expect("a limit");
    assert_eq!((near.remaining, near.reset), (status.remaining, status.reset_after.ceil_secs()));
    assert_eq!(summary.retry_after, denied.retry_after().map(|wait| wait.ceil_secs().max(1)));
}

/// An API's clients read the errors that it has always sent: GitHub's 403, Stripe's `error.type`.
#[test]
fn a_rule_sets_the_status_and_the_body_of_its_denials() {
    let rules = r#"
domain: d
response: {status: 403}
descriptors:
  - key: k
    name: a "quoted" rule
    limit: 2 per 60s
    algorithm: fixed_window
    response:
      body: '{"error": {"type": "rate_limit", "rule": "{{rule}}", "limit": {{limit}}, "per": "{{ window }}", "left": {{remaining}}, "reset": {{reset}}, "retry_after": {{retry_after}}}}'
  - {key: page, name: <b>, limit: 1/minute, response: {status: 503, body: '<p>{{rule}}', content_type: text/html}}
  - {key: plain, limit: 1/minute}
"#;
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let rules = Ruleset::load(&[Source::new("test.yaml", rules)], &Options::default()).expect("rules");
    let limiter = Limiter::new(Arc::new(rules), store, Arc::clone(&clock) as Arc<dyn Clock>);
    let ask = |key: &str, cost: u64| {
        let attributes = [(key, "v")];
        let check = Check::attributes("d", &attributes).with_cost(Cost::new(cost));
        let decision = pollster::block_on(limiter.check(&check));
        let response =
            ResponseConfig::default().respond(&DecisionSummary::from_decision(&decision), clock.now());
        let text = String::from_utf8(response.body().to_vec()).expect("text");
        let kind =
            response.headers().get("content-type").map(|kind| kind.to_str().expect("ASCII").to_owned());
        (response.status().as_u16(), kind.unwrap_or_default(), text)
    };
    assert_eq!(ask("k", 1), (200, String::new(), String::new()), "an allowed request is untouched");
    ask("k", 1);
    let (status, kind, body) = ask("k", 1);
    assert_eq!((status, kind.as_str()), (403, "application/json"), "the status is that of the file");
    let body: serde_json::Value = serde_json::from_str(&body).expect("JSON");
    let expected = serde_json::json!({"error": {
        "type": "rate_limit", "rule": "a \"quoted\" rule", "limit": 2, "per": "1m", "left": 0, "reset": 20, "retry_after": 20,
    }});
    assert_eq!(body, expected);
    // No time helps a request that costs more than the limit.
    let body: serde_json::Value = serde_json::from_str(&ask("k", 3).2).expect("JSON");
    assert_eq!(body["error"]["retry_after"], serde_json::Value::Null);
    ask("page", 1);
    assert_eq!(ask("page", 1), (503, "text/html".to_owned(), "<p>&lt;b&gt;".to_owned()));
    ask("plain", 1);
    let (status, kind, body) = ask("plain", 1);
    assert_eq!(
        (status, kind.as_str()),
        (403, "application/problem+json"),
        "the usual body with the file's status"
    );
    assert!(body.contains("\"status\":403"), "{body}");
}
