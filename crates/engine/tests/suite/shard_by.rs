//! `shard_by` moves counters, and decides nothing: where every user has one customer, each outcome is what it was.

use crate::rig::{Rig, check, rig};
use proptest::prelude::*;
use tollgate_core::{Cost, TimeDelta};

const RULES: &str = "
domain: d
SHARD
descriptors:
  - {key: user, name: user, limit: [4/second, 20/minute]}
  - {key: api_key, name: key, algorithm: fixed_window, limit: 9/second}
  - {key: customer, name: customer, limit: 12/second, descriptors: [{key: endpoint, name: nested, limit: 6/second}]}
  - {key: busy, name: split, split: 3, limit: 9/second}
  - {key: user, value: user-0, name: shadow, shadow: true, limit: 2/second}
  - {key: either, name: one, quota_mode: true, limit: 3/second}
  - {key: or, name: other, quota_mode: true, limit: 5/second}
  - {key: global, name: total, limit: 30/second}
";

type Step = (usize, usize, u64, u64, u8);

/// Decides the steps on a thread of its own, because a thread takes the shards of a split counter in turn.
fn trace(rules: String, steps: Vec<Step>) -> Vec<String> {
    std::thread::spawn(move || {
        let rig = rig(&rules);
        steps.into_iter().map(|step| decide(&rig, step)).collect()
    })
    .join()
    .expect("a trace")
}

fn decide(rig: &Rig, (user, endpoint, cost, wait, keys): Step) -> String {
    // Every user and key has one customer; some callers have none.
    let names = [format!("user-{user}"), format!("key-{user}"), format!("customer-{}", user % 2)];
    let mut request = vec![("user", names[0].as_str()), ("api_key", names[1].as_str())];
    if user != 3 {
        request.push(("customer", names[2].as_str()));
    }
    if endpoint == 1 {
        request.push(("endpoint", "GET /x"));
    }
    for (bit, key) in [(1, "busy"), (2, "either"), (4, "or")] {
        if keys & bit != 0 {
            request.push((key, names[0].as_str()));
        }
    }
    rig.clock.advance(TimeDelta::from_millis(wait));
    let decision = check(&rig.limiter, &request, Cost::new(cost));
    let outcomes: Vec<_> =
        decision.limits.iter().map(|status| (decision.limit_name(status), status.outcome)).collect();
    format!("{request:?}: {:?} {:?} {outcomes:?}", decision.verdict, decision.denied_by_name())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn outcomes_are_the_same_with_and_without(
        steps in prop::collection::vec((0..4_usize, 0..2_usize, 0..3_u64, 0..300_u64, any::<u8>()), 1..150),
    ) {
        let plain = trace(RULES.replace("SHARD", ""), steps.clone());
        let sharded = trace(RULES.replace("SHARD", "shard_by: customer"), steps);
        prop_assert_eq!(plain, sharded);
    }
}
