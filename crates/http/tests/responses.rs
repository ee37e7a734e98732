//! What callers are told, read back by a parser of structured fields that nobody here wrote, and held against what then
//! happens: who waits as long as told gets through.

use http::HeaderMap;
use proptest::prelude::*;
use sfv::{BareItem, List, ListEntry, Parser};
use std::sync::Arc;
use tollgate_core::{CalendarUnit, Clock, Cost, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Decision, Limiter, Window};
use tollgate_http::response::{
    BodyFormat, DecisionSummary, Disposition, LegacyHeaders, Policy, ResponseConfig,
};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

/// A member of a list: its name and its whole-number parameters; texts are left out.
type Member = (String, Vec<(String, i64)>, Option<String>);

fn members(headers: &HeaderMap, field: &str) -> Vec<Member> {
    let text = headers[field].to_str().expect("ASCII");
    let list: List = Parser::new(text).parse().unwrap_or_else(|error| panic!("{error} in `{text}`"));
    list.into_iter()
        .map(|entry| {
            let ListEntry::Item(item) = entry else { panic!("an inner list in `{text}`") };
            let BareItem::String(name) = item.bare_item else {
                panic!("a name that is no String in `{text}`")
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
    /// A field that a client cannot parse is ignored whole: whatever rules are called, and however large numbers are.
    #[test]
    fn whatever_the_facts_both_fields_parse_and_say_them(
        limits in proptest::collection::vec((".{0,20}", any::<u64>(), window(), any::<u64>(), any::<u64>(), any::<bool>()), 1..6),
    ) {
        const LARGEST: u64 = 999_999_999_999_999;
        let policies = limits.iter().map(|(rule, quota, window, left, reset, over)| {
            let policy = Policy::new(rule, *quota, *window).remaining_fraction(*left).until(*reset);
            if *over { policy.over() } else { policy }
        });
        let facts = DecisionSummary::from_policies(policies);
        let headers = headers(&ResponseConfig::default(), &facts, Timestamp::ZERO);
        let told = members(&headers, "ratelimit-policy");
        prop_assert_eq!(told.len(), limits.len());
        for (member, (rule, quota, window, ..)) in told.iter().zip(&limits) {
            let seen: String = rule.chars().map(|c| if (' '..='~').contains(&c) { c } else { '?' }).collect();
            let several = limits.iter().filter(|(other, ..)| other == rule).count() > 1;
            let name = if several { format!("{seen}/{window}") } else { seen };
            prop_assert_eq!(&member.0, &name);
            prop_assert_eq!(number(member, "q"), Some((*quota).min(LARGEST) as i64));
            prop_assert!(number(member, "w").is_none_or(|w| w > 0));
            prop_assert_eq!(member.2.as_deref(), (*window == Window::Concurrent).then_some("concurrent-requests"));
        }
        let near = members(&headers, "ratelimit");
        prop_assert_eq!(near.len(), 1);
        prop_assert!(told.iter().any(|policy| policy.0 == near[0].0), "it names one of the policies");
        let least = limits.iter().map(|limit| limit.3).min().unwrap_or(0);
        if limits.iter().all(|limit| !limit.5) {
            prop_assert_eq!(number(&near[0], "r"), Some(least.min(LARGEST) as i64));
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

    fn ask(&self, keys: &[&str], cost: u64) -> Decision {
        let attributes: Vec<_> = keys.iter().map(|key| (*key, "x")).collect();
        pollster::block_on(
            self.limiter.check(&Check::attributes("d", &attributes).with_cost(Cost::new(cost))),
        )
    }
}

fn told(decision: &Decision) -> HeaderMap {
    headers(&ResponseConfig::default(), &DecisionSummary::from_decision(decision), Timestamp::ZERO)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// A `Retry-After` that is too short makes callers hammer; a `t` beyond it makes them wait for nothing.
    #[test]
    fn who_waits_as_long_as_told_gets_through(
        keys in proptest::sample::subsequence(vec!["bucket", "token", "fixed", "sliding", "strict", "log", "many"], 1..4),
        steps in proptest::collection::vec((0_u64..3_000_000, 1_u64..3), 1..40),
    ) {
        let rig = Rig::new();
        for (pause, cost) in steps {
            rig.clock.advance(TimeDelta::from_micros(pause));
            let decision = rig.ask(&keys, cost);
            let fields = told(&decision);
            let near = &members(&fields, "ratelimit")[0];
            let (left, reset) = (number(near, "r").expect("r"), number(near, "t").expect("t"));
            let wait: Option<u64> = fields.get("retry-after").map(|v| v.to_str().expect("ASCII").parse().expect("seconds"));
            prop_assert_eq!(wait.is_some(), !decision.is_allowed());
            if let Some(wait) = wait {
                prop_assert_eq!(reset as u64, wait, "{:?}", fields);
                rig.clock.advance(TimeDelta::from_secs(wait));
                let again = rig.ask(&keys, cost);
                prop_assert!(again.is_allowed(), "{:?} then {:?}", fields, told(&again));
            } else if left == 0 {
                rig.clock.advance(TimeDelta::from_secs(reset as u64));
                let look = rig.ask(&keys, 0);
                let name = near.0.split('/').next().expect("a name").to_owned();
                let policies = DecisionSummary::from_decision(&look).policies;
                let policy = policies.iter().find(|policy| policy.rule == name && policy.remaining > 0);
                prop_assert!(policy.is_some(), "{:?} then {:?}", fields, policies);
            }
        }
    }
}

/// Callers slow down for what they are told; a shadow must not make them, and every window that can deny must be there.
#[test]
fn every_limit_that_can_deny_is_told_and_no_other() {
    let rig = Rig::new();
    let fields = told(&rig.ask(&["many", "shadow", "bucket"], 1));
    assert_eq!(fields["ratelimit-policy"], r#""bucket";q=7;w=1, "many/1s";q=2;w=1, "many/1m";q=5;w=60"#);
    assert_eq!(fields["ratelimit"], r#""many/1s";r=1;t=1"#);
    let held = told(&rig.ask(&["held"], 1));
    assert_eq!(held["ratelimit-policy"], r#""held";q=2;qu="concurrent-requests""#);
    let nothing = told(&rig.ask(&["unknown"], 1));
    assert!(nothing.is_empty(), "an empty list is no field: {nothing:?}");
}

/// Upstreams serve less, and dashboards warn, by these.
#[test]
fn lesser_and_warned_requests_are_marked() {
    let rig = Rig::new();
    assert!(!told(&rig.ask(&["lesser"], 1)).contains_key("x-ratelimit-degraded"));
    let fields = told(&rig.ask(&["lesser"], 1));
    assert_eq!(fields["x-ratelimit-degraded"], "lesser");
    assert!(!fields.contains_key("retry-after"), "it passes");
    let warned = rig.ask(&["warned"], 6);
    assert_eq!(told(&warned)["x-ratelimit-warning"], "warned");
    let mut upstream = HeaderMap::new();
    tollgate_http::response::write_markers(&DecisionSummary::from_decision(&warned), &mut upstream);
    assert_eq!((upstream.len(), &upstream["x-ratelimit-warning"]), (1, &"warned".parse().expect("a value")));
}

/// Dashboards and clients of ten years read these; a reset in the wrong form is a wait of fifty years.
#[test]
fn legacy_fields_are_written_when_asked_for() {
    let rig = Rig::new();
    rig.ask(&["token"], 3);
    let decision = rig.ask(&["token"], 1);
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
    assert_eq!(with(LegacyHeaders::Epoch)["x-ratelimit-reset"], "1700000021", "rounded up");
}

proptest! {
    /// The bodies are written by hand; a JSON library builds the same from the same facts.
    #[test]
    fn whatever_the_facts_both_bodies_are_the_json_that_a_library_would_write(
        limits in proptest::collection::vec((".{0,20}", any::<u64>(), window(), any::<u64>(), any::<bool>()), 0..6),
        retry_after in prop_oneof![Just(1), any::<u64>()],
        id in proptest::option::of(any::<u128>()),
        ruled in prop_oneof![Just(Disposition::Denied), Just(Disposition::Unavailable)],
    ) {
        let policies = limits.iter().map(|(rule, quota, window, left, over)| {
            let policy = Policy::new(rule, *quota, *window).remaining_fraction(*left);
            if *over { policy.over() } else { policy }
        });
        let denied_by = limits.first().map(|limit| limit.0.as_str());
        let decision = id.map(tollgate_engine::DecisionId);
        let facts = DecisionSummary { disposition: ruled, retry_after, denied_by, decision, ..DecisionSummary::from_policies(policies) };
        let nearest = facts.nearest().filter(|_| ruled == Disposition::Denied).map(|near| match near.window {
            Window::Concurrent => format!("At most {} at once. ", near.quota),
            window => format!("At most {} in {window}. ", near.quota),
        });
        let what = if ruled == Disposition::Denied { "Rate limit exceeded" } else { "No decision can be made" };
        let seconds = if retry_after == 1 { "second" } else { "seconds" };
        let message = format!("{what}. {}Retry after {retry_after} {seconds}.", nearest.unwrap_or_default());

        let read = |form| {
            let settings = ResponseConfig { body: form, ..ResponseConfig::default() };
            let (_, body) = settings.body(&facts).expect("a denial");
            serde_json::from_slice::<serde_json::Value>(&body).expect("JSON")
        };
        let (kind, title, status) = match ruled {
            Disposition::Denied => ("quota-exceeded", "Over the limit", 429),
            _ => ("temporary-reduced-capacity", "Temporarily not decidable", 503),
        };
        let mut problem = serde_json::json!({
            "type": format!("https://iana.org/assignments/http-problem-types#{kind}"),
            "title": title, "status": status, "detail": message, "retry_after": retry_after,
        });
        if ruled == Disposition::Denied {
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

        let code = if ruled == Disposition::Denied { "RATE_LIMITED" } else { "UNAVAILABLE" };
        let mut error = serde_json::json!({"code": code, "message": message, "retry_after": retry_after});
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

/// Programs act on status and type; people read the rest.
#[test]
fn a_denial_has_the_status_and_the_body_that_were_asked_for() {
    let rig = Rig::new();
    rig.ask(&["many"], 2);
    let decision = rig.ask(&["many"], 1);
    let facts = DecisionSummary::from_decision(&decision);
    let read = |settings: &str| {
        let settings: ResponseConfig = serde_saphyr::from_str(settings).expect("settings");
        let answer = settings.respond(&facts, Timestamp::ZERO);
        let body: serde_json::Value = serde_json::from_slice(answer.body()).expect("JSON");
        (answer.status().as_u16(), answer.headers()["content-type"].clone(), body)
    };
    let (status, kind, body) = read("{}");
    assert_eq!((status, kind.to_str().expect("ASCII")), (429, "application/problem+json"));
    assert_eq!(body["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
    assert_eq!(body["violated-policies"], serde_json::json!(["many/1s"]));
    assert_eq!((&body["status"], &body["retry_after"]), (&429.into(), &1.into()));
    assert_eq!(body["decision_id"], decision.id.to_string());

    let (status, kind, body) = read("{status: 403, body: plain, ratelimit: none, legacy: epoch}");
    assert_eq!((status, kind.to_str().expect("ASCII")), (403, "application/json"));
    assert_eq!(
        body,
        serde_json::json!({"error": {"code": "RATE_LIMITED", "retry_after": 1, "limit": 2, "window": "1s", "scope": "many",
            "message": "Rate limit exceeded. At most 2 in 1s. Retry after 1 second."}})
    );

    rig.ask(&["guard"], 1);
    let abuse = rig.ask(&["guard"], 1);
    let body = ResponseConfig::default().body(&DecisionSummary::from_decision(&abuse)).expect("a denial").1;
    assert!(String::from_utf8_lossy(&body).contains("#abnormal-usage-detected"));
    let allowed = rig.ask(&["bucket"], 1);
    assert_eq!(ResponseConfig::default().body(&DecisionSummary::from_decision(&allowed)), None);
}

/// 503 says that the caller has done nothing wrong: it must never be a 429, whatever status denials have.
#[test]
fn what_nobody_could_decide_is_503_whatever_denials_are() {
    let settings: ResponseConfig = serde_saphyr::from_str("{status: 403}").expect("settings");
    let facts = DecisionSummary {
        disposition: Disposition::Unavailable,
        retry_after: 1,
        ..DecisionSummary::from_policies([])
    };
    let answer = settings.respond(&facts, Timestamp::ZERO);
    assert_eq!(
        (answer.status().as_u16(), &answer.headers()["retry-after"]),
        (503, &"1".parse().expect("a value"))
    );
    assert!(String::from_utf8_lossy(answer.body()).contains("#temporary-reduced-capacity"));
    assert!(!answer.headers().contains_key("ratelimit"));
}

/// A typo that is passed over is a setting that does not act.
#[test]
fn settings_that_cannot_be_are_refused_with_what_to_write() {
    for (text, says) in [
        ("{status: 200}", "429, 403"),
        ("{status: 999}", "429, 403"),
        ("{bodi: plain}", "bodi"),
        ("{body: html}", "problem"),
        ("{legacy: yes}", "epoch"),
        ("{ratelimit: draft-3}", "draft-11"),
    ] {
        let error = serde_saphyr::from_str::<ResponseConfig>(text).expect_err(text).to_string();
        assert!(error.contains(says), "{text}: {error}");
    }
    assert_eq!(serde_saphyr::from_str::<ResponseConfig>("{}").expect("defaults").body, BodyFormat::Problem);
}
