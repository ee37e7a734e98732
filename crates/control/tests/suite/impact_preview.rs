//! Tests that the replay of a complete sample reports what the engine itself would have decided, request by request.

use proptest::prelude::*;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tollgate_control::{ImpactReport, TightenedImpact, TrafficSample, replay};
use tollgate_core::{Clock, Cost, ManualClock, Timestamp};
use tollgate_engine::{Check, CounterSharing, Limiter};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const START: u64 = 1_000_000_000_000;

fn rules(each: u64, path: u64, algorithm: &str) -> Arc<Ruleset> {
    let text = format!(
        "{{domain: d, algorithm: {algorithm}, descriptors: [{{key: api_key, limit: {each}/10s}}, \
         {{key: path, value: /a, limit: {path}/10s}}, {{key: user, concurrency: 1}}]}}"
    );
    let rules = Ruleset::load(&[Source::new("t", text)], &Options::default());
    Arc::new(rules.unwrap_or_else(|errors| panic!("{errors}")))
}

type TrafficRequest = (u64, &'static str, &'static str, u64);

/// Generates milliseconds since the previous request, keys, paths and costs.
fn traffic() -> impl Strategy<Value = Vec<TrafficRequest>> {
    let one = (
        0_u64..400,
        prop::sample::select(vec!["ann", "bob", "cy"]),
        prop::sample::select(vec!["/a", "/b"]),
        0_u64..4,
    );
    prop::collection::vec(one, 1..60)
}

fn limiter(rules: &Arc<Ruleset>, clock: &Arc<ManualClock>) -> Limiter<MemoryStore<Arc<ManualClock>>> {
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(clock)).expect("a store");
    Limiter::new(Arc::clone(rules), store, Arc::clone(clock) as Arc<dyn Clock>)
}

/// Checks each request in turn; returns the verdicts and the traffic sample.
fn play(rules: &Arc<Ruleset>, traffic: &[TrafficRequest]) -> (Vec<bool>, TrafficSample) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(START)));
    let sample = Arc::new(TrafficSample::new(Arc::clone(&clock) as _, 7));
    let limiter = limiter(rules, &clock).with_observer(Arc::clone(&sample) as _);
    let mut at = START;
    let mut allowed = Vec::new();
    for (later, key, path, cost) in traffic {
        at += later * 1_000;
        clock.set(Timestamp::from_micros(at));
        let attributes = [("path", *path), ("api_key", *key)];
        let check = Check::attributes("d", &attributes).with_cost(Cost::new(*cost));
        allowed.push(pollster::block_on(limiter.check(&check)).is_allowed());
    }
    drop(limiter);
    (allowed, Arc::into_inner(sample).expect("no other owner"))
}

fn share(part: usize, whole: usize) -> f64 {
    part as f64 / whole as f64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_replay_agrees_with_the_engine(
        traffic in traffic(), live in (1_u64..8, 1_u64..20), new in (1_u64..8, 1_u64..20),
        algorithm in prop::sample::select(vec!["gcra", "fixed_window", "sliding_window"]),
    ) {
        let (live, new) = (rules(live.0, live.1, algorithm), rules(new.0, new.1, algorithm));
        let (before, sample) = play(&live, &traffic);
        let (after, _) = play(&new, &traffic);
        let report = replay(&sample.requests(), &live, &new, None, CounterSharing::Shared);
        let pairs: Vec<_> = before.iter().zip(&after).zip(&traffic).collect();
        let newly: Vec<_> = pairs.iter().filter(|((was, is), _)| **was && !**is).map(|(_, request)| request.1).collect();
        let allowed = pairs.iter().filter(|((was, is), _)| !**was && **is).count();
        prop_assert_eq!((report.requests, report.weight), (traffic.len() as u64, traffic.len() as u64));
        prop_assert_eq!(report.newly_denied_share, share(newly.len(), traffic.len()));
        prop_assert_eq!(report.newly_allowed_share, share(allowed, traffic.len()));
        let keys: HashSet<_> = traffic.iter().map(|request| request.1).collect();
        let hit: HashSet<_> = newly.iter().copied().collect();
        prop_assert_eq!(report.tenants_affected_share, share(hit.len(), keys.len()));
        let spared: HashSet<_> =
            pairs.iter().filter(|((was, is), _)| !**was && **is).map(|(_, request)| request.1).collect();
        prop_assert_eq!(report.callers_newly_allowed_share, share(spared.len(), keys.len()));
        let mut by_key: HashMap<&str, usize> = HashMap::new();
        newly.iter().for_each(|key| *by_key.entry(*key).or_default() += 1);
        prop_assert_eq!(report.top.len(), by_key.len());
    }

    /// Per-node counters: the report for all nodes is the sum of what each node's engine would have decided.
    #[test]
    fn per_node_counters_add_up(
        traffic in traffic(), on in prop::collection::vec(0_u32..3, 60), live in 1_u64..8, new in 1_u64..8,
    ) {
        let (live, new) = (rules(live, 1_000, "gcra"), rules(new, 1_000, "gcra"));
        let (_, sample) = play(&live, &traffic);
        let mut sample = sample.requests();
        sample.iter_mut().zip(&on).for_each(|(one, node)| one.node = *node);
        let report = replay(&sample, &live, &new, None, CounterSharing::PerNode);
        let mut newly = 0;
        for node in 0..3 {
            // Requests of other nodes become peeks, which cost nothing, so that time passes in the same way.
            let here = |(request, on): (&TrafficRequest, &u32)| if *on == node { *request } else { (request.0, request.1, request.2, 0) };
            let part: Vec<TrafficRequest> = traffic.iter().zip(&on).map(here).collect();
            let (before, _) = play(&live, &part);
            let (after, _) = play(&new, &part);
            let pairs = before.iter().zip(&after).zip(&on).filter(|(_, on)| **on == node);
            newly += pairs.filter(|((was, is), _)| **was && !**is).count();
        }
        prop_assert_eq!(report.newly_denied_share, share(newly, traffic.len()));
    }
}

/// With a shared store, rules in local mode count on each node, and the others on all nodes together.
#[test]
fn local_rules_are_counted_per_node() {
    let candidate = |more: &str| {
        let text = format!("{{domain: d, descriptors: [{{key: api_key, limit: 6/hour{more}}}]}}");
        Arc::new(Ruleset::load(&[Source::new("t", text)], &Options::default()).expect("rules"))
    };
    let (_, sample) = play(&rules(100, 100, "gcra"), &[(1, "ann", "/b", 1); 10]);
    let mut sample = sample.requests();
    sample.iter_mut().zip([0, 1].into_iter().cycle()).for_each(|(one, node)| one.node = node);
    let nothing = Ruleset::load(&[Source::new("t", "{domain: d, descriptors: []}")], &Options::default());
    let nothing = Arc::new(nothing.expect("rules"));
    for (rules, counters, denied) in [
        (candidate(""), CounterSharing::Shared, 0.4),
        (candidate(", mode: local"), CounterSharing::Shared, 0.0),
        (candidate(""), CounterSharing::PerNode, 0.0),
    ] {
        assert_eq!(replay(&sample, &nothing, &rules, None, counters).newly_denied_share, denied);
    }
}

/// Who publishes a capacity for the fleet must see whom it will shed: not those that it gives a guarantee.
#[test]
fn tenants_within_their_guarantees_of_the_fleet_are_not_denied() {
    let load = |more: &str| {
        let text = format!(
            "{{domain: d, tier_key: api_key, descriptors: [{{key: api_key, limit: 1000/hour}}]{more}}}"
        );
        Arc::new(Ruleset::load(&[Source::new("t", text)], &Options::default()).expect("rules"))
    };
    let plain = load("");
    let capacity = load(", overload: {fleet: {capacity: 10/day}}");
    let fair =
        load(", overload: {fleet: {capacity: 10/day}, fairness: {by: api_key, guarantees: {bob: 50% each}}}");
    let traffic = [vec![(1, "ann", "/b", 1); 18], vec![(1, "bob", "/b", 1); 7]].concat();
    let (_, sample) = play(&plain, &traffic);
    let mut sample = sample.requests();
    for node in [0, 1] {
        // On a node of its own too, where each counts for itself.
        sample.iter_mut().for_each(|one| one.node = node);
        for counters in [CounterSharing::Shared, CounterSharing::PerNode] {
            let denied = |rules| replay(&sample, &plain, rules, None, counters).newly_denied_share;
            assert_eq!(denied(&capacity), 15.0 / 25.0, "node {node}, {counters:?}");
            assert_eq!(denied(&fair), 10.0 / 25.0, "eight of the one, two of the other beyond its five");
        }
    }
    // The last three stand for two callers each: the capacity, of which guarantees take back half, counts both, a guarantee one.
    sample.truncate(23);
    sample[20..].iter_mut().for_each(|one| one.callers = 2);
    let report = replay(&sample, &plain, &fair, None, CounterSharing::Shared);
    assert_eq!((report.weight, report.newly_denied_share), (26, 12.0 / 26.0));
}

/// Signals of the past are not known, but the most that they can do is.
#[test]
fn limits_that_follow_signals_are_replayed_whole_and_at_their_least() {
    let load = |adapt: &str| {
        let text = format!(
            "{{domain: d, tier_key: api_key, algorithm: fixed_window, descriptors: [{{key: api_key, limit: 10/hour}}]{adapt}}}"
        );
        Arc::new(Ruleset::load(&[Source::new("t", text)], &Options::default()).expect("rules"))
    };
    let plain = load("");
    let adapted = load(", overload: {adapt: {signals: {q: 1}, order: [ann], least: 50%}}");
    let traffic: Vec<TrafficRequest> =
        (0..10).flat_map(|_| [(1, "ann", "/b", 1), (1, "bob", "/b", 1)]).collect();
    let (_, sample) = play(&plain, &traffic);
    let report = replay(&sample.requests(), &plain, &adapted, None, CounterSharing::Shared);
    assert_eq!(report.newly_denied_share, 0.0);
    let tightened = TightenedImpact { newly_denied_share: 0.25, callers_affected_share: 0.5 };
    assert_eq!(report.tightened, Some(tightened));
    assert_eq!(replay(&sample.requests(), &adapted, &plain, None, CounterSharing::Shared).tightened, None);
}

#[test]
fn without_traffic_the_report_is_empty() {
    let rules = rules(1, 1, "gcra");
    assert_eq!(replay(&[], &rules, &rules, None, CounterSharing::Shared), ImpactReport::default());
}

/// A rule whose permits are never released in a replay must not deny everything.
#[test]
fn permits_are_left_out() {
    let live = rules(100, 100, "gcra");
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(START)));
    let sample = Arc::new(TrafficSample::new(Arc::clone(&clock) as _, 7));
    let limiter = limiter(&live, &clock).with_observer(Arc::clone(&sample) as _);
    for _ in 0..5 {
        pollster::block_on(limiter.check(&Check::attributes("d", &[("user", "u"), ("api_key", "k")])));
    }
    let nothing = Ruleset::load(&[Source::new("t", "{domain: d, descriptors: []}")], &Options::default());
    let nothing = Arc::new(nothing.expect("rules"));
    let report = replay(&sample.requests(), &nothing, &live, None, CounterSharing::Shared);
    assert_eq!((report.weight, report.newly_denied_share), (5, 0.0));
}

/// Many callers with few requests: halving everybody's limit is reported correctly, though few callers are sampled.
#[test]
fn a_sample_of_many_callers_represents_all() {
    let (live, new) = (rules(100, 1_000_000, "gcra"), rules(3, 1_000_000, "gcra"));
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(START)));
    let sample = Arc::new(TrafficSample::new(Arc::clone(&clock) as _, 7));
    let limiter = limiter(&live, &clock).with_observer(Arc::clone(&sample) as _);
    // Half of the callers send one request, the others six, three of which are over the limit.
    let keys: Vec<String> = (0..8_000).map(|i| format!("key-{i}")).collect();
    for round in 0..6 {
        for (i, key) in keys.iter().enumerate() {
            if round == 0 || i % 2 == 0 {
                clock.set(Timestamp::from_micros(START + round * 8_000 + i as u64));
                pollster::block_on(
                    limiter.check(&Check::attributes("d", &[("api_key", key), ("path", "/b")])),
                );
            }
        }
    }
    let sampled = sample.requests();
    assert!(sampled.len() <= 2_048, "{}", sampled.len());
    let report = replay(&sampled, &live, &new, None, CounterSharing::Shared);
    let truth = 12_000.0 / 28_000.0;
    assert!((report.newly_denied_share - truth).abs() < 0.1, "{} for {truth}", report.newly_denied_share);
    assert!((report.tenants_affected_share - 0.5).abs() < 0.15, "{}", report.tenants_affected_share);
}
