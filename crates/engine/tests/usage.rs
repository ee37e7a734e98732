//! What is used is told without charging, for every algorithm; and given back whole.

mod rig;

use rig::rig;
use tollgate_core::{Cost, TimeDelta};
use tollgate_engine::{LimitSource, Usage, UsageError};

const FORMS: [&str; 8] = [
    "limit: 7/second",
    "limit: 10/minute, burst: 4",
    "limit: 10/minute, algorithm: leaky_bucket",
    "limit: 10/minute, algorithm: fixed_window",
    "limit: 10/minute, algorithm: sliding_window",
    "limit: 10/minute, algorithm: strict_window",
    "limit: 10/minute, algorithm: sliding_log",
    "limit: 10/day, algorithm: fixed_window, jitter: true",
];

fn usage(rig: &rig::Rig, attributes: &[(&str, &str)]) -> Usage {
    pollster::block_on(rig.limiter.usage(None, attributes, None)).expect("usage")
}

#[test]
fn peeks_charge_nothing_and_a_reset_refunds_everything() {
    for form in FORMS {
        let rig = rig(&format!("{{domain: d, descriptors: [{{key: api_key, {form}}}]}}"));
        let key = [("api_key", "k")];
        let capacity = rig.left(&key, "api_key");
        for spent in 1..=3 {
            assert!(rig.take(&key).is_allowed(), "{form}");
            for _ in 0..3 {
                let told = usage(&rig, &key);
                assert_eq!((told.limits.len(), told.limits[0].used()), (1, Some(spent)), "{form}");
                assert_eq!(told.limits[0].remaining, Some(capacity - spent), "{form}");
                assert!(told.limits[0].reset_after > TimeDelta::ZERO, "{form}");
            }
        }
        // Far beyond the limit, as after an outage, and into the next window.
        let check = tollgate_engine::Check::attributes("d", &key);
        let reserved = pollster::block_on(rig.limiter.reserve(&check, TimeDelta::from_secs(60), None))
            .expect("reserved");
        pollster::block_on(rig.limiter.settle(reserved.id.expect("held"), 1_000)).expect("settled");
        assert!(!rig.take(&key).is_allowed(), "{form}");
        let told = pollster::block_on(rig.limiter.reset(None, &key, None)).expect("a reset");
        assert_eq!((told.limits[0].used(), told.limits[0].remaining), (Some(0), Some(capacity)), "{form}");
        let passed = (0..20).take_while(|_| rig.take(&key).is_allowed()).count() as u64;
        assert_eq!(passed, capacity, "{form}: exactly the limit again, once");
    }
}

const RULES: &str = "
domain: d
descriptors:
  - key: api_key
    limit: 10/minute
    concurrency: 2
    tiers: {pro: 50/minute}
    descriptors:
      - {key: endpoint, limit: 5/minute, name: each-endpoint}
      - {key: endpoint, value: POST /orders, limit: 3/minute, name: orders}
      - {key: region, value: eu, descriptors: [{key: method, limit: 4/minute, name: eu-method}]}
  - {key: endpoint, limit: 100/minute, name: everybody}
  - {key: api_key, value: team-*, share_threshold: true, limit: 9/minute, name: shared}
";

#[test]
fn rules_that_need_more_are_named_with_what_they_need() {
    let rig = rig(RULES);
    let told = usage(&rig, &[("api_key", "k")]);
    assert_eq!(told.limits.len(), 2, "the window and the permits: {:?}", told.limits);
    let mut needs: Vec<(&str, Vec<String>)> =
        told.unmatched.iter().map(|needs| (needs.rule.as_str(), needs.attributes.clone())).collect();
    needs.sort();
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    assert_eq!(
        needs,
        [
            ("each-endpoint", words(&["endpoint"])),
            ("eu-method", words(&["region", "method"])),
            ("orders", words(&["endpoint"])),
        ]
    );
    let order = [("api_key", "k"), ("endpoint", "POST /orders"), ("region", "us"), ("tier", "pro")];
    assert!(rig.take(&order).is_allowed());
    let told = usage(&rig, &order);
    let names: Vec<(&str, u64, LimitSource)> =
        told.limits.iter().map(|one| (one.rule.as_str(), one.used().expect("known"), one.source)).collect();
    let own = ("api_key", 1, LimitSource::Tier);
    assert_eq!(
        names,
        [own, own, ("orders", 1, LimitSource::Rule)],
        "its window, its permits, and the endpoint's"
    );
    assert!(told.unmatched.is_empty(), "another region and a less specific endpoint can never be met");
    assert_eq!(told.tier.as_deref(), Some("pro"));
}

#[test]
fn a_reset_of_one_rule_leaves_the_others_and_other_callers() {
    let rig = rig(RULES);
    let order = [("api_key", "k"), ("endpoint", "POST /orders")];
    let other = [("api_key", "l"), ("endpoint", "POST /orders")];
    for _ in 0..2 {
        assert!(rig.take(&order).is_allowed() && rig.take(&other).is_allowed());
    }
    let told =
        pollster::block_on(rig.limiter.reset(None, &order, Some("endpoint=POST /orders"))).expect("a reset");
    assert_eq!((told.limits.len(), told.limits[0].used()), (1, Some(0)));
    let used = |attributes: &[(&str, &str)]| -> Vec<u64> {
        usage(&rig, attributes).limits.iter().map(|one| one.used().expect("known")).collect()
    };
    // The permits of requests under way are held, not used.
    assert_eq!((used(&order), used(&other)), (vec![2, 2, 0], vec![2, 2, 2]));
    assert_eq!(rig.left(&order, "everybody"), 96, "what all share is nobody's to give back");
    let unknown = pollster::block_on(rig.limiter.reset(None, &order, Some("everybody")));
    assert!(matches!(unknown, Err(UsageError::Rule(_))), "{unknown:?}");
    let unknown = pollster::block_on(rig.limiter.usage(Some("nowhere"), &order, None));
    assert!(matches!(unknown, Err(UsageError::Domain(_))), "{unknown:?}");
}

#[test]
fn split_counters_are_reported_as_one() {
    let rig = rig("{domain: d, descriptors: [{key: api_key, limit: 40/minute, split: 4}]}");
    let key = [("api_key", "k")];
    for _ in 0..8 {
        assert!(rig::check(&rig.limiter, &key, Cost::ONE).is_allowed());
    }
    let told = usage(&rig, &key);
    assert_eq!(
        (told.limits[0].limit.capacity(), told.limits[0].used(), told.limits[0].remaining),
        (40, Some(8), Some(32))
    );
    let told = pollster::block_on(rig.limiter.reset(None, &key, None)).expect("a reset");
    assert_eq!(told.limits[0].used(), Some(0));
}
