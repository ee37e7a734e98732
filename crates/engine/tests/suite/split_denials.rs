//! A split limit denies only what no shard has room for, although the limiter remembers for a while that a counter was full: the
//! shards have room again at different times. A denial says when the first of them has.

use crate::rig::rules;
use proptest::prelude::*;
use std::sync::Arc;
use tollgate_core::{Clock, Cost, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Limiter};
use tollgate_store::{MemoryConfig, MemoryStore};

const LIMITS: [&str; 5] = [
    "algorithm: fixed_window, limit: 1/second, split: 2",
    "algorithm: fixed_window, limit: 7/2s, split: 4",
    "limit: 4/second, split: 2",
    "limit: {count: 10, period: 2s, burst: 4}, split: 4",
    "limit: 90/minute, split: 8",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn a_denial_is_not_older_than_the_room(
        limit in prop::sample::select(&LIMITS[..]),
        cost in prop::option::of(1_u64..3),
        requests in prop::collection::vec((0_u64..700, 1_u64..3, any::<bool>()), 1..60),
    ) {
        let rules = rules(&format!("{{domain: d, descriptors: [{{key: user, {limit}}}]}}"));
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
        let store = Arc::new(
            MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store"),
        );
        let limiter = || Limiter::new(Arc::clone(&rules), Arc::clone(&store), Arc::clone(&clock) as Arc<dyn Clock>);
        let of_long_ago = limiter();
        for (pause, other, waits) in requests {
            // What it remembers of one cost says of another only that there is no room.
            let (units, waits) = cost.map_or((other, true), |units| (units, waits));
            clock.advance(TimeDelta::from_millis(pause));
            let attributes = [("user", "u")];
            let check = Check::attributes("d", &attributes).with_cost(Cost::new(units));
            let decision = pollster::block_on(of_long_ago.check(&check));
            if decision.is_allowed() {
                continue;
            }
            // One that remembers nothing reads all shards.
            let fresh = || pollster::block_on(limiter().check(&check));
            prop_assert!(!fresh().is_allowed(), "{limit}: {units}");
            if let Some(wait) = decision.retry_after().filter(|_| waits) {
                let early = TimeDelta::from_micros(wait.as_micros().saturating_sub(1_000));
                clock.advance(early);
                prop_assert!(early == TimeDelta::ZERO || !fresh().is_allowed(), "{limit}: room before {wait}");
                clock.advance(TimeDelta::from_micros(wait.as_micros() - early.as_micros()));
                prop_assert!(fresh().is_allowed(), "{limit}: no room after {wait}");
            }
        }
    }
}
