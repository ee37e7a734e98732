//! The worker's rounds, at times that the test says.

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
    .expect("a watcher");
    let rules = Ruleset::load(&[Source::new("r.yaml", text)], &Options::default()).expect("rules");
    let clock = SystemClock::new();
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("memory");
    let limiter = Limiter::new(Arc::new(rules), store, Arc::new(clock));
    (limiter.with_observer(Arc::clone(&observe) as _), observe)
}

fn decide(limiter: &Memory, pairs: &[(&str, &str)]) -> bool {
    pollster::block_on(limiter.check(&Check::attributes("d", pairs))).is_allowed()
}

/// Somebody is near a limit by what it alone has used: what many share, and what is only tried out, accuses nobody.
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
    let ask = |key: &str| {
        let more = [("plan", "free"), ("endpoint", "/"), ("remote_address", "10.1.2.3")];
        decide(&limiter, &[&[("api_key", key)], &more[..]].concat())
    };
    let begin = observe.clock.now();
    let others = |count: usize| {
        (0..6).flat_map(|n| (0..count).map(move |_| format!("sk_live_{n}"))).filter(|key| ask(key)).count()
    };
    assert!((0..9).all(|_| ask("sk_live_greedy")));
    assert_eq!(others(2), 11, "what all share is used up");
    for second in (0..=330).step_by(10) {
        assert!(!ask("sk_live_greedy") && others(1) == 0);
        drop(observe.drain_buffers_until(begin + TimeDelta::from_secs(second)));
    }
    let top = observe.top_talkers(&limiter.rules());
    let near = top["near_limit"].as_array().expect("a list");
    assert_eq!(near.len(), 1, "{top}");
    assert_eq!((&near[0]["rule"], &near[0]["minutes"]), (&json!("own"), &json!(5)), "{top}");
    assert!((near[0]["utilisation"].as_f64().expect("a part") - 0.9).abs() < 0.01, "{top}");
    assert_eq!(observe.top().near_keys(), 1);
    assert_eq!(top["shared_address"], json!([]), "one of seven is near");
}

/// Many callers of one network who have all used up what is theirs.
#[test]
fn a_network_whose_callers_are_all_near_a_limit_is_reported() {
    let (limiter, observe) =
        start("{domain: d, descriptors: [{key: user, name: own, limit: 2/hour, tiers: {pro: 9/hour}}]}");
    for n in 0..5 {
        let user = format!("u{n}");
        let asked = (0..3).map(|_| decide(&limiter, &[("user", &user), ("remote_address", "10.1.2.3")]));
        assert_eq!(asked.filter(|passed| *passed).count(), 2);
    }
    observe.drain_buffers();
    let told = |observe: &Telemetry| observe.top_talkers(&limiter.rules())["shared_address"].clone();
    assert_eq!(told(&observe), json!([{"prefix": "10.1.2.0/24", "keys": 5, "near_limit": 5}]));
    // One more, whose tier has room.
    decide(&limiter, &[("user", "u9"), ("tier", "pro"), ("remote_address", "10.1.2.4")]);
    observe.drain_buffers();
    assert_eq!(told(&observe), json!([]));
}

/// Those who look on, however many and often, do not make threads show more: it would cost every decision.
#[test]
fn readers_do_not_slow_down_decisions() {
    let (limiter, observe) = start("{domain: d, descriptors: [{key: user, limit: 100000000/hour}]}");
    assert!((0..20_000).all(|_| decide(&limiter, &[("user", "busy")])));
    let step = || observe.stripes.all()[0].sample_rate.step();
    let rushed = step();
    assert!(rushed >= 16, "{rushed}");
    (0..200).for_each(|_| observe.drain_buffers());
    assert_eq!(step(), rushed);
    // What readers took has been shown: the worker does not find too little.
    observe.run_once();
    assert_eq!(step(), rushed);
    // When nothing more comes it does.
    (0..30).for_each(|_| observe.run_once());
    assert_eq!(step(), 1);
}

/// One who says as much as can be said takes neither all memory nor the places of others.
#[test]
fn a_verbose_caller_is_bounded_and_displaces_nobody() {
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
    // All that one thread has room for until the worker comes, and others last.
    (0..4_000).for_each(hostile);
    (0..90_u32).for_each(|n| assert!(!decide(&limiter, &[("api_key", &format!("sk_live_quiet_{n:08}"))])));
    observe.drain_buffers();
    assert_eq!(observe.dropped(), 0);
    assert!((0..90).all(|n| find(&format!("sk_live_quiet_{n:08}")).is_some()));
    assert!(find(&key(3_999)).is_some(), "who asks is kept, whatever else is left out");
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
    // Who says little is kept as often as was asked for.
    for n in 0..7_000 {
        decide(&limiter, &[("api_key", &format!("sk_live_{n}"))]);
        if n % 1_000 == 0 {
            observe.drain_buffers();
        }
    }
    observe.drain_buffers();
    assert_eq!(observe.log.len(), 5_000);
}
