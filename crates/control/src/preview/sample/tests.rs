//! Tests that the sample represents the traffic: otherwise every impact preview would be wrong.

use super::*;
use tollgate_core::{ManualClock, Timestamp};
use tollgate_engine::{CheckInput, Limiter};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

struct Rig {
    clock: Arc<ManualClock>,
    sample: Arc<TrafficSample>,
    limiter: Limiter<MemoryStore<Arc<ManualClock>>>,
}

fn rig() -> Rig {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let text = "{domain: d, descriptors: [{key: api_key, limit: 3/minute}]}";
    let rules = Ruleset::load(&[Source::new("t", text)], &Options::default()).expect("rules");
    let sample = Arc::new(TrafficSample::new(Arc::clone(&clock) as _, 7));
    let limiter = Limiter::new(Arc::new(rules), store, Arc::clone(&clock) as Arc<dyn Clock>);
    let limiter = limiter.with_observer(Arc::clone(&sample) as _);
    Rig { clock, sample, limiter }
}

impl Rig {
    fn check(&self, key: &str) {
        let attributes = [("path", "/"), ("api_key", key)];
        pollster::block_on(self.limiter.check(&Check::attributes("d", &attributes)));
    }

    fn weight(&self) -> u64 {
        self.sample.requests().iter().map(|one| one.own * one.callers).sum()
    }
}

#[test]
fn light_traffic_is_sampled_completely() {
    let rig = rig();
    for i in 0..500 {
        rig.clock.set(Timestamp::from_micros(1_000_000_000_000 + i * 1_000));
        rig.check(&format!("key-{}", i % 50));
    }
    let sampled = rig.sample.requests();
    assert_eq!(sampled.len(), 500);
    assert!(sampled.iter().all(|one| one.own == 1 && one.callers == 1));
    assert!(sampled.is_sorted_by_key(|one| one.at));
    sampled[7].with(|check| {
        let CheckInput::Attributes(attributes) = check.input else { panic!("the check had attributes") };
        assert_eq!((check.domain, attributes), ("d", &[("path", "/"), ("api_key", "key-7")][..]));
    });
    // The sample covers only five minutes.
    rig.clock.set(Timestamp::from_secs(1_000_000 + 400));
    assert_eq!(rig.sample.requests().len(), 0);
}

#[test]
fn heavy_traffic_is_bounded_and_weighted() {
    let rig = rig();
    // Twenty thousand callers with three requests each, and one with sixty thousand.
    let (callers, each) = (20_000, 3);
    for i in 0..callers * each {
        rig.clock.set(Timestamp::from_micros(1_000_000_000_000 + i * 100));
        rig.check(&format!("key-{}", i % callers));
        rig.check("large");
    }
    let sampled = rig.sample.requests();
    assert!(sampled.len() <= MAX_REQUESTS, "{}", sampled.len());
    let truth = 2 * callers * each;
    let weight = rig.weight();
    assert!((truth / 2..truth * 2).contains(&weight), "{weight} for {truth}");
    let large = rig.sample.hasher.clone();
    let large = {
        let attributes = [("api_key", "large")];
        caller::number(&large, &Check::attributes("d", &attributes)).expect("a caller")
    };
    let of_large: u64 =
        sampled.iter().filter(|one| one.caller == large).map(|one| one.own * one.callers).sum();
    assert!(of_large > truth / 4, "the caller with half of the traffic: {of_large} of {truth}");
    // All requests of a selected small caller are sampled.
    let mut of_small = std::collections::HashMap::<u64, u64>::new();
    for one in sampled.iter().filter(|one| one.caller != large && one.at.as_secs() < 1_000_010) {
        *of_small.entry(one.caller).or_default() += one.own;
    }
    assert!(of_small.len() > 50, "{}", of_small.len());
    assert!(of_small.values().filter(|count| **count == each).count() * 2 > of_small.len(), "{of_small:?}");
}
