//! What remains of a split limit is the same whether a caller is denied by another rule or only looks: a denied request was
//! charged nothing, and a caller that paces itself by its answers must not be misled by retries.

use crate::rig::rules;
use std::sync::Arc;
use tollgate_core::conformance::RemoteStore;
use tollgate_core::{Clock, Cost, CounterStore, ManualClock, Timestamp};
use tollgate_engine::{Check, Decision, Limiter};
use tollgate_store::{MemoryConfig, MemoryStore};

const USER: (&str, &str) = ("user", "u");
const TENANT: (&str, &str) = ("tenant", "t");

/// Decides a request of these attributes, at this cost.
type Decide<'d> = dyn Fn(&[(&str, &str)], Cost) -> Decision + 'd;

/// Runs a test over a store that answers at once, and over one that must be awaited. Each has a thread of its own, because a
/// thread takes the shards of a split counter in turn.
fn over_both(text: &'static str, test: fn(&Decide<'_>)) {
    fn run<S: CounterStore>(
        text: &str,
        wrap: impl FnOnce(MemoryStore<Arc<ManualClock>>) -> S,
        test: fn(&Decide<'_>),
    ) {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
        let store =
            MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
        let limiter = Limiter::new(rules(text), wrap(store), clock as Arc<dyn Clock>);
        test(&|attributes, cost| {
            pollster::block_on(limiter.check(&Check::attributes("d", attributes).with_cost(cost)))
        });
    }
    std::thread::scope(|scope| {
        scope.spawn(|| run(text, |memory| memory, test)).join().expect("over memory");
        scope.spawn(|| run(text, RemoteStore::new, test)).join().expect("over a store that is awaited");
    });
}

fn remaining(decision: &Decision, rule: &str) -> u64 {
    let status = decision.limits.iter().find(|status| decision.limit_name(status) == rule);
    status.unwrap_or_else(|| panic!("no limit of {rule}")).outcome.remaining
}

#[test]
fn a_request_that_another_split_rule_denies_reports_what_a_peek_does() {
    over_both(
        "{domain: d, descriptors: [{key: user, name: user, limit: 8/minute, split: 4}, \
         {key: tenant, name: tenant, limit: 80/minute, split: 8}]}",
        |check| {
            // In the middle of a round, where an estimate has something to be wrong about.
            for _ in 0..3 {
                assert!(check(&[TENANT], Cost::ONE).is_allowed());
            }
            for _ in 0..8 {
                assert!(check(&[USER, TENANT], Cost::ONE).is_allowed());
            }
            for _ in 0..20 {
                let denied = check(&[USER, TENANT], Cost::ONE);
                assert_eq!(denied.denied_by_name(), Some("user"));
                let peek = check(&[USER, TENANT], Cost::PEEK);
                for rule in ["user", "tenant"] {
                    assert_eq!(remaining(&denied, rule), remaining(&peek, rule), "{rule}");
                }
                assert_eq!(remaining(&denied, "tenant"), 80 - 11);
            }
            assert_eq!(remaining(&check(&[TENANT], Cost::ONE), "tenant"), 80 - 12);
        },
    );
}

#[test]
fn a_request_that_a_rule_without_shards_denies_reports_what_a_peek_does() {
    over_both(
        "{domain: d, descriptors: [{key: user, name: user, limit: 1/minute}, \
         {key: tenant, name: tenant, limit: 80/minute, split: 8}]}",
        |check| {
            assert!(check(&[USER, TENANT], Cost::ONE).is_allowed());
            for _ in 0..11 {
                let denied = check(&[USER, TENANT], Cost::ONE);
                assert_eq!((denied.denied_by_name(), remaining(&denied, "tenant")), (Some("user"), 79));
            }
            for left in (0..79).rev() {
                let decision = check(&[TENANT], Cost::ONE);
                assert_eq!((decision.is_allowed(), remaining(&decision, "tenant")), (true, left));
            }
        },
    );
}

/// A shadow rule is charged whatever the others say: its shards stay in turn, and it counts on.
#[test]
fn a_shadow_rule_is_charged_by_denied_requests_too() {
    over_both(
        "{domain: d, descriptors: [{key: user, name: user, limit: 1/minute}, \
         {key: tenant, name: tenant, shadow: true, limit: 80/minute, split: 8}]}",
        |check| {
            for left in (0..80).rev() {
                let decision = check(&[USER, TENANT], Cost::ONE);
                assert_eq!((decision.is_allowed(), remaining(&decision, "tenant")), (left == 79, left));
            }
        },
    );
}

#[test]
fn a_refund_reports_what_a_peek_does() {
    over_both(
        "{domain: d, descriptors: [{key: tenant, name: tenant, limit: 80/minute, split: 8}]}",
        |check| {
            (0..16).for_each(|_| assert!(check(&[TENANT], Cost::ONE).is_allowed()));
            for left in 65..=80 {
                assert_eq!(remaining(&check(&[TENANT], Cost::refund(1)), "tenant"), left);
                assert_eq!(remaining(&check(&[TENANT], Cost::PEEK), "tenant"), left);
            }
        },
    );
}
