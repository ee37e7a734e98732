//! Tests of the worker at simulated times.

use super::*;
use serde_json::json;
use tollgate_engine::{Check, Limiter};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

type Memory = Limiter<MemoryStore<SystemClock>>;

fn start(text: &str) -> (Memory, Arc<Telemetry>) {
    let observe = Telemetry::new(TelemetryConfig {
        allowed_sample: 0.0,
        max_records: 5_000,
        ..TelemetryConfig::default()
    })
    .expect("telemetry");
    let rules = Ruleset::load(&[Source::new("r.yaml", text)], &Options::default()).expect("rules");
    let clock = SystemClock::new();
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("memory");
    let limiter = Limiter::new(Arc::new(rules), store, Arc::new(clock));
    (limiter.with_observer(Arc::clone(&observe) as _), observe)
}

fn decide(limiter: &Memory, pairs: &[(&str, &str)]) -> bool {
    pollster::block_on(limiter.check(&Check::attributes("d", pairs))).is_allowed()
}

/// Only per-caller limits put a caller near a limit: shared limits and shadow limits do not describe one caller.
#[test]
fn only_limits_of_its_own_put_a_caller_near_a_limit() {
    let text = "{domain: d, descriptors: [
        {key: global, name: total, limit: 20/hour},
        {key: plan, name: plan, limit: 20/hour},
        {key: remote_address/24, name: network, limit: 20/hour},
        {key: api_key, name: tried, shadow: true, limit: 1/hour},
        {key: endpoint, name: endpoint, limit: 20/hour},
        {key: api_key, value: \"sk_live_*\", descriptors: [{key: endpoint, name: own, limit: 10/hour}]}]}";
    let (limiter, observe) = start(text);
    let check = |key: &str| {
        let more = [("plan", "free"), ("endpoint", "/"), ("remote_address", "10.1.2.3")];
        decide(&limiter, &[&[("api_key", key)], &more[..]].concat())
    };
    let begin = observe.clock.now();
    let others = |count: usize| {
        (0..6).flat_map(|n| (0..count).map(move |_| format!("sk_live_{n}"))).filter(|key| check(key)).count()
    };
    assert!((0..9).all(|_| check("sk_live_greedy")));
    assert_eq!(others(2), 11, "the shared limit is exhausted");
    for second in (0..=330).step_by(10) {
        assert!(!check("sk_live_greedy") && others(1) == 0);
        drop(observe.drain_buffers_until(begin + TimeDelta::from_secs(second)));
    }
    let top = observe.top_talkers(&limiter.rules());
    let near = top["near_limit"].as_array().expect("a list");
    assert_eq!(near.len(), 1, "{top}");
    assert_eq!((&near[0]["rule"], &near[0]["minutes"]), (&json!("own"), &json!(5)), "{top}");
    assert!((near[0]["utilisation"].as_f64().expect("a part") - 0.9).abs() < 0.01, "{top}");
    assert_eq!(observe.top().near_keys(), 1);
    assert_eq!(top["shared_address"], json!([]), "only one of seven is near");
}

/// Reports a network with many callers that have all exhausted their limits.
#[test]
fn a_network_whose_callers_are_all_near_a_limit_is_reported() {
    let (limiter, observe) =
        start("{domain: d, descriptors: [{key: user, name: own, limit: 2/hour, tiers: {pro: 9/hour}}]}");
    for n in 0..5 {
        let user = format!("u{n}");
        let verdicts = (0..3).map(|_| decide(&limiter, &[("user", &user), ("remote_address", "10.1.2.3")]));
        assert_eq!(verdicts.filter(|passed| *passed).count(), 2);
    }
    observe.drain_buffers();
    let shared = |observe: &Telemetry| observe.top_talkers(&limiter.rules())["shared_address"].clone();
    assert_eq!(shared(&observe), json!([{"prefix": "10.1.2.0/24", "keys": 5, "near_limit": 5}]));
    // One more caller, whose tier has room.
    decide(&limiter, &[("user", "u9"), ("tier", "pro"), ("remote_address", "10.1.2.4")]);
    observe.drain_buffers();
    assert_eq!(shared(&observe), json!([]));
}

/// Readers must not raise the sampling rate, however many there are: it would slow down every decision.
#[test]
fn readers_do_not_slow_down_decisions() {
    let (limiter, observe) = start("{domain: d, descriptors: [{key: user, limit: 100000000/hour}]}");
    assert!((0..20_000).all(|_| decide(&limiter, &[("user", "busy")])));
    let step = || observe.stripes.all()[0].sample_rate.step();
    let rushed = step();
    assert!(rushed >= 16, "{rushed}");
    (0..200).for_each(|_| observe.drain_buffers());
    assert_eq!(step(), rushed);
    // Samples drained by readers count for the worker too, so it does not shorten the interval.
    observe.run_once();
    assert_eq!(step(), rushed);
    // Without new samples it does.
    (0..30).for_each(|_| observe.run_once());
    assert_eq!(step(), 1);
}

/// A client that sends as many attributes as possible neither exhausts memory nor displaces the records of others.
#[test]
fn a_caller_with_long_values_is_bounded_and_displaces_no_other() {
    let (limiter, observe) = start("{domain: d, descriptors: [{key: api_key, name: none, limit: 0/hour}]}");
    let names: Vec<String> = (0..16).map(|n| format!("{n:x<255}")).collect();
    let values: Vec<String> = (0..200).map(|n| format!("{n:y<255}")).collect();
    let key = |n: usize| format!("sk_live_hostile_{n:08}");
    let hostile = |n: usize| {
        let key = key(n);
        let much = names.iter().enumerate().map(|(at, name)| (&**name, &*values[(n + at) % 200]));
        let pairs: Vec<(&str, &str)> = much.chain([("api_key", &*key)]).collect();
        assert!(!decide(&limiter, &pairs));
    };
    let find = |key: &str| {
        let search = DecisionQuery { key: Some(key.to_owned()), limit: 1, ..DecisionQuery::default() };
        observe.search(&search).0.pop()
    };
    // As much as one thread can buffer between visits of the worker, followed by other callers.
    (0..4_000).for_each(hostile);
    (0..90_u32).for_each(|n| assert!(!decide(&limiter, &[("api_key", &format!("sk_live_quiet_{n:08}"))])));
    observe.drain_buffers();
    assert_eq!(observe.dropped(), 0);
    assert!((0..90).all(|n| find(&format!("sk_live_quiet_{n:08}")).is_some()));
    assert!(find(&key(3_999)).is_some(), "the identity is captured, whatever else is omitted");
    for n in 4_000..8_000 {
        hostile(n);
        if n % 500 == 0 {
            observe.drain_buffers();
        }
    }
    observe.drain_buffers();
    let (count, bytes) = (observe.log.len(), observe.log.bytes());
    assert!(bytes <= 5_000 * 1_024, "{bytes}");
    assert!((1_200..4_000).contains(&count), "{count} of these in {bytes} bytes");
    assert!(find(&key(7_999)).is_some());
    // With short attributes the log holds as many records as configured.
    for n in 0..7_000 {
        decide(&limiter, &[("api_key", &format!("sk_live_{n}"))]);
        if n % 1_000 == 0 {
            observe.drain_buffers();
        }
    }
    observe.drain_buffers();
    assert_eq!(observe.log.len(), 5_000);
}
