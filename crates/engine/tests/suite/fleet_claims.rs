//! What a request takes of a guarantee besides the capacity: it is given back with the request, in shadow mode too, and it is not shown as
//! a limit of the caller.

use crate::rig::{self, Rig, rig};
use std::sync::Arc;
use tollgate_core::conformance::FaultyStore;
use tollgate_core::{Clock, Cost, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, HeldPermits, Limiter};
use tollgate_store::{MemoryConfig, MemoryStore};

const IN_FLIGHT: &str = "
domain: d
overload:
  fleet: {capacity: 10 in flight}
  fairness: {by: tenant, guarantees: {enterprise: 50% each}}
";
const RATE: &str = "
domain: d
overload:
  fleet: {capacity: 100/hour}
  fairness: {by: tenant, guarantees: {enterprise: 15% each}}
";
const ACME: [(&str, &str); 2] = [("tenant", "acme"), ("tier", "enterprise")];
const GREEDY: [(&str, &str); 1] = [("tenant", "greedy")];

/// Admits a request. Returns whether a limit denies it, also in shadow mode, and the permits that it holds.
fn admit(rig: &Rig, attributes: &[(&str, &str)]) -> (bool, Option<HeldPermits>) {
    let (decision, held) = pollster::block_on(rig.limiter.admit(&Check::attributes("d", attributes)));
    (decision.limits.iter().any(|status| status.outcome.verdict.is_denied()), held)
}

fn release(rig: &Rig, held: Option<&HeldPermits>) {
    held.iter().for_each(|held| pollster::block_on(rig.limiter.release(held)).expect("memory"));
}

fn shadow(text: &str) -> Rig {
    rig(&text.replace("overload:", "overload:\n  shadow: true"))
}

/// Requests that have ended must not use up a guarantee, live or in shadow mode.
#[test]
fn a_request_that_has_ended_holds_nothing_of_its_guarantee() {
    for rig in [rig(IN_FLIGHT), shadow(IN_FLIGHT)] {
        for _ in 0..20 {
            let (is_shed, held) = admit(&rig, &ACME);
            assert!(!is_shed && held.is_some());
            release(&rig, held.as_ref());
        }
        let lent: Vec<_> = (0..10).map(|_| admit(&rig, &GREEDY)).collect();
        assert!(lent.iter().all(|(is_shed, _)| !is_shed), "nothing else is in flight");
        let own: Vec<_> = (0..6).map(|_| admit(&rig, &ACME)).collect();
        let shed: Vec<bool> = own.iter().map(|(is_shed, _)| *is_shed).collect();
        assert_eq!(shed, [false, false, false, false, false, true], "its guarantee is five");
    }
}

/// A request that is withdrawn has not used its guarantee.
#[test]
fn a_reservation_that_is_canceled_gives_its_guarantee_back() {
    let rig = rig(RATE);
    while rig.take(&GREEDY).is_allowed() {}
    let reserve = || {
        let check = Check::attributes("d", &ACME);
        pollster::block_on(rig.limiter.reserve(&check, TimeDelta::from_secs(60), None)).expect("kept")
    };
    let reserved: Vec<_> = (0..15).map(|_| reserve()).collect();
    assert!(reserved.iter().all(|one| one.decision.is_allowed()), "the guarantee");
    assert!(!reserve().decision.is_allowed(), "no more");
    for id in reserved.into_iter().filter_map(|one| one.id) {
        let closed = pollster::block_on(rig.limiter.cancel(id)).expect("open");
        assert_eq!(closed.limits.len(), 1, "what remains of the capacity: {closed:?}");
    }
    rig.clock.advance(TimeDelta::from_millis(20));
    let again = (0..20).filter(|_| reserve().decision.is_allowed()).count();
    assert_eq!(again, 15, "all of it");
}

/// The guarantee is no limit of the caller: it would be shown as half the capacity, under the same name.
#[test]
fn a_guarantee_is_not_shown_as_a_limit() {
    for text in [IN_FLIGHT, RATE] {
        let rig = rig(text);
        while rig.take(&GREEDY).is_allowed() {}
        let own = rig.take(&ACME);
        assert!(own.is_allowed());
        let shown: Vec<u64> =
            own.limits.iter().filter_map(|one| Some(own.limit(one)?.limit.capacity())).collect();
        assert_eq!(shown, [if text == IN_FLIGHT { 10 } else { 100 }], "the capacity alone");
    }
}

/// A denial beyond the fair share leaves nothing for the caller, whatever is kept for others.
#[test]
fn nothing_remains_after_a_denial_beyond_the_fair_share() {
    let rig = rig(&RATE.replace("100/hour", "100/second"));
    let mut denied = 0;
    for _ in 0..3_000 {
        for _ in 0..3 {
            let one = rig::check(&rig.limiter, &GREEDY, Cost::ONE);
            if !one.is_allowed() {
                denied += 1;
                assert_eq!(one.limits[0].outcome.remaining, 0, "{:?}", one.reason);
            }
        }
        rig.clock.advance(TimeDelta::from_millis(10));
    }
    assert!(denied > 1_000, "{denied}");
}

/// A store that has restarted empty must not hand out places that requests in flight still have, in the capacity or in a guarantee.
#[test]
fn renewals_count_all_places_again_that_a_store_has_lost() {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let counters =
        || MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a small store");
    let store = FaultyStore::new(counters());
    let limiter = Limiter::new(rig::rules(IN_FLIGHT), store, Arc::clone(&clock) as Arc<dyn Clock>);
    let admit = |attributes: &[(&str, &str)]| {
        pollster::block_on(limiter.admit(&Check::attributes("d", attributes))).1
    };
    let greedy: Vec<_> = (0..20).filter_map(|_| admit(&GREEDY)).collect();
    let own: Vec<_> = (0..20).filter_map(|_| admit(&ACME)).collect();
    assert_eq!((greedy.len(), own.len()), (10, 5), "the capacity, and the guarantee");
    limiter.store().replace_inner(counters());
    for held in greedy.iter().chain(&own) {
        pollster::block_on(limiter.renew(held)).expect("memory");
    }
    assert!(admit(&ACME).is_none(), "its guarantee is held");
    for held in &greedy[..5] {
        pollster::block_on(limiter.release(held)).expect("memory");
    }
    assert!(admit(&GREEDY).is_none(), "ten of fifteen are still in flight");
    for held in &own {
        pollster::block_on(limiter.release(held)).expect("memory");
    }
    assert!((0..5).all(|_| admit(&ACME).is_some()), "its guarantee is free");
}

/// A tenant that has used up its guarantee must still get all shards of a split limit, while the capacity has room; and while it has
/// none, its guarantee admits it by whichever shard has room.
#[test]
fn a_split_limit_has_all_of_its_shards_whatever_the_guarantee() {
    let text = |capacity: u64| {
        format!(
            "
domain: d
descriptors:
  - {{key: user, name: split, limit: 80/hour, split: 4}}
overload:
  fleet: {{capacity: {capacity} in flight, ttl: 600s}}
  fairness: {{by: tenant, guarantees: {{enterprise: 50% each}}}}
"
        )
    };
    let admitted = |rig: &Rig| -> u64 {
        let own = [("user", "u"), ACME[0], ACME[1]];
        let costs = (0..40).map(|at| if at % 4 == 3 { 5 } else { 1 });
        let admitted = costs.filter(|cost| {
            rig.clock.advance(TimeDelta::from_millis(15));
            rig::check(&rig.limiter, &own, Cost::new(*cost)).is_allowed()
        });
        admitted.sum()
    };
    assert_eq!(admitted(&rig(&text(1_000))), 80, "the guarantee is 500");
    let used_up = rig(&text(1_000));
    used_up.clock.advance(TimeDelta::from_secs(1));
    (0..500).for_each(|_| assert!(used_up.take(&ACME).is_allowed()));
    assert_eq!(admitted(&used_up), 80, "the capacity has room for 500 more");
    let full = rig(&text(100));
    while full.take(&GREEDY).is_allowed() {}
    assert_eq!(admitted(&full), 80, "40 requests of a guarantee of 50");
}
