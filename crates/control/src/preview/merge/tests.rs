//! Tests that merged samples equal what one node would have sampled that had seen all traffic.

use super::*;
use proptest::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;
use tollgate_core::{Clock, ManualClock, Timestamp};
use tollgate_engine::{Check, Limiter};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const PLENTY: SliceBudget = SliceBudget { requests: usize::MAX, bytes: usize::MAX };

fn request(at: u64, caller: u64) -> SampledRequest {
    let check = Check::attributes("d", &[("path", "/")]);
    SampledRequest::new(&check, Timestamp::from_micros(at), caller, 1).expect("a short request")
}

/// Returns a caller's number. Masks use its higher bits, so small callers are repeated there.
fn number(caller: u64) -> u64 {
    caller << 20 | caller
}

/// Returns the slice that a node keeps of these requests, by the definition.
fn keeps(number: u64, requests: &[u64], mask: u64, large: &HashSet<u64>) -> SampleSlice {
    let kept =
        requests.iter().enumerate().filter(|(_, caller)| large.contains(caller) || is_in(**caller, mask));
    let requests = kept.map(|(at, caller)| {
        let callers = if large.contains(caller) { 1 } else { mask + 1 };
        SampledRequest { callers, ..request(number * 1_000 + at as u64, *caller) }
    });
    SampleSlice { number, mask, requests: requests.collect() }
}

/// Generates requests of many similar callers, and of one that may be frequent.
fn callers() -> impl Strategy<Value = Vec<u64>> {
    let often = (0_u64..32, 0_usize..60).prop_map(|(caller, times)| vec![caller; times]);
    (prop::collection::vec(0_u64..32, 0..80), often).prop_map(|(mut few, mut often)| {
        few.append(&mut often);
        few
    })
}

proptest! {
    /// One slice: a node per mask, each with requests of these callers.
    #[test]
    fn merged_samples_keep_what_the_widest_mask_keeps(
        nodes in prop::collection::vec((0_u32..4, callers(), prop::option::of(0_u64..32)), 1..5)
    ) {
        let masks: Vec<u64> = nodes.iter().map(|(bits, ..)| (1 << bits) - 1).collect();
        let large_set = |large: Option<u64>| large.map(number).into_iter().collect::<HashSet<u64>>();
        let samples: Vec<Vec<SampleSlice>> = nodes
            .iter()
            .zip(&masks)
            .map(|((_, asked, large), mask)| {
                let asked: Vec<u64> = asked.iter().copied().map(number).collect();
                vec![keeps(7, &asked, *mask, &large_set(*large))]
            })
            .collect();
        let merged = merge(samples, PLENTY);
        let widest = masks.iter().copied().max().unwrap_or(0);
        let mut large = HashSet::new();
        for ((_, asked, own), mask) in nodes.iter().zip(&masks) {
            for caller in asked {
                let often = asked.iter().filter(|other| *other == caller).count();
                let makes_much = often >= 32 && often * 32 > asked.len();
                if if *mask > 0 { *own == Some(*caller) } else { makes_much } {
                    large.insert(number(*caller));
                }
            }
        }
        let mut expected: HashMap<(u64, u32), (u64, u64)> = HashMap::new();
        for (node, ((_, asked, own), mask)) in (0..).zip(nodes.iter().zip(&masks)) {
            for caller in asked.iter().copied().map(number) {
                let here = is_in(caller, *mask) || own.map(number) == Some(caller);
                if here && (is_in(caller, widest) || large.contains(&caller)) {
                    let weight = if large.contains(&caller) { 1 } else { widest + 1 };
                    expected.entry((caller, node)).or_insert((0, weight)).0 += 1;
                }
            }
        }
        let mut found: HashMap<(u64, u32), (u64, u64)> = HashMap::new();
        for one in &merged {
            let entry = found.entry((one.caller, one.node)).or_insert((0, one.callers));
            entry.0 += one.own;
            prop_assert_eq!(entry.1, one.callers);
        }
        prop_assert_eq!(found, expected);
        prop_assert!(merged.is_sorted_by_key(|one| one.at));
    }

    /// Whatever the budget, the result fits and represents about as many requests.
    #[test]
    fn dropped_requests_are_represented(budget in 20_usize..400, callers in 400_u64..4_000) {
        let mut slice = keeps(1, &(0..callers).map(number).collect::<Vec<_>>(), 0, &HashSet::new());
        slice.fit(SliceBudget { requests: budget, bytes: usize::MAX });
        let weight: u64 = slice.requests.iter().map(|one| one.own * one.callers).sum();
        prop_assert!(slice.requests.len() <= budget && slice.requests.len() * 4 >= budget, "{} of {budget}", slice.requests.len());
        prop_assert!(weight.abs_diff(callers) <= slice.mask + 1, "{weight} for {callers}");
    }
}

#[test]
fn a_caller_with_all_the_traffic_is_thinned() {
    let requests = vec![number(5); 1_000];
    let mut slice = keeps(1, &requests, 3, &HashSet::from([number(5)]));
    slice.fit(SliceBudget { requests: 300, bytes: usize::MAX });
    let weight: u64 = slice.requests.iter().map(|one| one.own * one.callers).sum();
    assert!(slice.requests.len() <= 300 && !slice.requests.is_empty());
    assert!((500..2_000).contains(&weight), "{weight}");
}

/// Uses real samples: the same traffic, seen by one node and by four.
#[test]
fn four_nodes_sample_what_one_would() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let text = "{domain: d, descriptors: [{key: api_key, limit: 3/minute}]}";
    let rules = Arc::new(Ruleset::load(&[Source::new("t", text)], &Options::default()).expect("rules"));
    let node = || {
        let store =
            MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
        let sample = Arc::new(crate::preview::sample::TrafficSample::new(Arc::clone(&clock) as _, 7));
        let limiter = Limiter::new(Arc::clone(&rules), store, Arc::clone(&clock) as Arc<dyn Clock>);
        (limiter.with_observer(Arc::clone(&sample) as _), sample)
    };
    let nodes = [node(), node(), node(), node()];
    let (callers, each) = (6_000, 4);
    for i in 0..callers * each {
        clock.set(Timestamp::from_micros(1_000_000_000_000 + i * 100));
        let key = format!("key-{}", i % callers);
        // Each caller's requests go to all nodes, round robin.
        let (limiter, _) = &nodes[(i / callers + i) as usize % nodes.len()];
        pollster::block_on(limiter.check(&Check::attributes("d", &[("api_key", &key)])));
    }
    let budget = SliceBudget { requests: 2_048, bytes: usize::MAX };
    let merged = merge(nodes.iter().map(|(_, sample)| sample.slices()), budget);
    assert!(merged.len() <= 2_048, "{}", merged.len());
    let weight: u64 = merged.iter().map(|one| one.own * one.callers).sum();
    let truth = callers * each;
    assert!((truth * 3 / 4..truth * 5 / 4).contains(&weight), "{weight} for {truth}");
    let mut of_caller: HashMap<u64, u64> = HashMap::new();
    merged.iter().for_each(|one| *of_caller.entry(one.caller).or_default() += one.own);
    assert!(of_caller.len() > 50, "{}", of_caller.len());
    let whole = of_caller.values().filter(|count| **count == each).count();
    assert!(
        whole * 10 > of_caller.len() * 9,
        "callers with all of their requests: {whole} of {}",
        of_caller.len()
    );
}
