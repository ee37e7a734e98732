//! Every request is planned once and charged once, over a store that answers in the first poll and over one that must be
//! waited for. A plan has effects (a split counter moves on to its next shard), so planning twice would deny what has room.

use crate::rig::rules;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};
use tollgate_core::conformance::RemoteStore;
use tollgate_core::{Clock, Cost, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Limiter};
use tollgate_store::{MemoryConfig, MemoryStore};

type Remote = RemoteStore<MemoryStore<Arc<ManualClock>>>;

fn remote(text: &str) -> (Limiter<Remote>, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let counters = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    (Limiter::new(rules(text), RemoteStore::new(counters), Arc::clone(&clock) as Arc<dyn Clock>), clock)
}

/// How often the store is charged.
fn calls<S>(limiter: &Limiter<Remote>, make: impl FnOnce(&Limiter<Remote>) -> S) -> usize {
    limiter.store().take_calls();
    make(limiter);
    limiter.store().take_calls().len()
}

#[test]
fn checks_admissions_and_reservations_charge_once() {
    let (limiter, _clock) = remote(
        "{domain: d, descriptors: [{key: user, limit: 9/minute}, {key: tenant, concurrency: {limit: 9, ttl: 9s}}]}",
    );
    let attributes = [("user", "u"), ("tenant", "t")];
    let check = Check::attributes("d", &attributes);
    assert_eq!(calls(&limiter, |limiter| pollster::block_on(limiter.check(&check))), 1);
    assert_eq!(calls(&limiter, |limiter| pollster::block_on(limiter.admit(&check))), 1);
    let reserve = |limiter: &Limiter<Remote>| {
        pollster::block_on(limiter.reserve(&check, TimeDelta::from_secs(1), None)).expect("a reservation").id
    };
    assert_eq!(calls(&limiter, reserve), 1);
}

/// A connection polls a check once, finds it pending, and awaits the same future: nothing is decided anew.
#[test]
fn a_check_that_is_pending_goes_on_from_where_it_was() {
    let (limiter, _clock) = remote("{domain: d, descriptors: [{key: user, limit: 9/minute}]}");
    let attributes = [("user", "u")];
    let check = Check::attributes("d", &attributes);
    let mut checking = pin!(limiter.check(&check));
    assert!(checking.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let decision = pollster::block_on(checking);
    assert_eq!(decision.limits[0].outcome.remaining, 8);
    assert_eq!(limiter.store().take_calls().len(), 1);
}

fn admitted(limiter: &Limiter<Remote>, attributes: &[(&str, &str)], requests: usize) -> usize {
    let check = Check::attributes("d", attributes);
    (0..requests).filter(|_| pollster::block_on(limiter.check(&check)).is_allowed()).count()
}

#[test]
fn a_split_counter_admits_its_whole_limit() {
    for (limit, split) in [(80, 8), (100, 8), (7, 3), (5, 8), (1, 2), (97, 16)] {
        let (limiter, _clock) = remote(&format!(
            "{{domain: d, descriptors: [{{key: user, limit: {limit}/minute, split: {split}}}]}}"
        ));
        assert_eq!(admitted(&limiter, &[("user", "u")], limit + 20), limit, "{limit} in {split} shards");
    }
}

#[test]
fn two_split_rules_in_one_request_admit_their_whole_limits() {
    let (limiter, _clock) = remote(
        "{domain: d, descriptors: [{key: user, limit: 80/minute, split: 8}, {key: tenant, limit: 90/minute, split: 4}]}",
    );
    assert_eq!(admitted(&limiter, &[("user", "u"), ("tenant", "t")], 100), 80);
    assert_eq!(admitted(&limiter, &[("tenant", "t")], 100), 10, "a denied request took nothing of the other");
}

/// Requests in a fixed pattern (two callers in turn, a peek after every check) must not reach some shards only.
#[test]
fn patterns_of_requests_do_not_skip_shards() {
    let (limiter, _clock) = remote("{domain: d, descriptors: [{key: user, limit: 80/minute, split: 8}]}");
    let mut passed = [0, 0];
    for _ in 0..100 {
        for (user, passed) in ["a", "b"].into_iter().zip(&mut passed) {
            let attributes = [("user", user)];
            let check = Check::attributes("d", &attributes);
            *passed += usize::from(pollster::block_on(limiter.check(&check)).is_allowed());
            pollster::block_on(limiter.check(&check.with_cost(Cost::PEEK)));
        }
    }
    assert_eq!(passed, [80, 80]);
}

#[test]
fn outcomes_report_the_whole_of_a_split_limit() {
    let (limiter, _clock) = remote("{domain: d, descriptors: [{key: user, limit: 20/minute, split: 8}]}");
    let attributes = [("user", "u")];
    let check = Check::attributes("d", &attributes);
    for left in (0..20).rev() {
        let decision = pollster::block_on(limiter.check(&check));
        let status = &decision.limits[0];
        let limit = decision.limit(status).expect("its limit").limit.capacity();
        assert!(decision.is_allowed());
        assert_eq!(limit, 20);
        // Shards differ by a unit where the limit is no multiple of their number.
        assert!(status.outcome.remaining.abs_diff(left) <= 4, "{left}: {}", status.outcome.remaining);
    }
    let denied = pollster::block_on(limiter.check(&check));
    assert_eq!((denied.is_allowed(), denied.limits[0].outcome.remaining), (false, 0));
}

#[test]
fn evenly_split_limits_count_down_one_by_one() {
    let (limiter, _clock) = remote("{domain: d, descriptors: [{key: user, limit: 80/minute, split: 8}]}");
    let attributes = [("user", "u")];
    let check = Check::attributes("d", &attributes);
    for left in (0..80).rev() {
        let peek = pollster::block_on(limiter.check(&check.with_cost(Cost::PEEK)));
        assert_eq!(peek.limits[0].outcome.remaining, left + 1);
        assert_eq!(pollster::block_on(limiter.check(&check)).limits[0].outcome.remaining, left);
    }
}

/// What a flood over a split limit costs the store: not a call for each denial's other shards.
#[test]
fn a_flood_over_a_split_limit_reads_the_other_shards_seldom() {
    let (limiter, clock) = remote("{domain: d, descriptors: [{key: user, limit: 8/minute, split: 8}]}");
    let attributes = [("user", "u")];
    assert_eq!(admitted(&limiter, &attributes, 8), 8);
    let flood = |limiter: &Limiter<Remote>| assert_eq!(admitted(limiter, &attributes, 100), 0);
    let charged = calls(&limiter, flood);
    assert_eq!(charged, 101, "one for each check, and one that read all shards");
    clock.advance(TimeDelta::from_secs(60));
    assert_eq!(admitted(&limiter, &attributes, 20), 8);
}

/// Permits and reservations of a split counter are given back to the shard that they were taken from.
#[test]
fn charges_moved_to_another_shard_are_refunded_there() {
    let (limiter, _clock) = remote("{domain: d, descriptors: [{key: user, limit: 6/minute, split: 3}]}");
    let attributes = [("user", "u")];
    let check = Check::attributes("d", &attributes);
    // The first shard is full when its turn comes again: the reservation finds room in another.
    pollster::block_on(limiter.check(&check.with_cost(Cost::new(2))));
    pollster::block_on(limiter.check(&check));
    pollster::block_on(limiter.check(&check));
    let reserved =
        pollster::block_on(limiter.reserve(&check, TimeDelta::from_secs(9), None)).expect("reserved");
    assert_eq!(admitted(&limiter, &attributes, 10), 1);
    pollster::block_on(limiter.cancel(reserved.id.expect("allowed"))).expect("canceled");
    assert_eq!(admitted(&limiter, &attributes, 10), 1);
}

/// `global: aggregate` is an attribute of every request, whatever the caller says or leaves out.
#[test]
fn every_request_is_part_of_the_total() {
    let (limiter, _clock) = remote("{domain: d, descriptors: [{key: global, name: total, limit: 3/minute}]}");
    assert_eq!(admitted(&limiter, &[("user", "u")], 1), 1);
    assert_eq!(admitted(&limiter, &[], 1), 1);
    assert_eq!(admitted(&limiter, &[("global", "mine"), ("user", "u")], 9), 1);
    let many: String = (0..12).map(|n| format!("{{key: k{n}, limit: 9/minute}}, ")).collect();
    let (limiter, _clock) = remote(&format!(
        "{{domain: d, descriptors: [{many}{{key: global, value: aggregate, limit: 2/minute}}]}}"
    ));
    assert_eq!(admitted(&limiter, &[("global", "mine"), ("k3", "v")], 9), 2);
}

/// A permit that is released may be taken at once, whichever shard's turn it is.
#[test]
fn split_permits_are_free_as_soon_as_they_are_released() {
    let (limiter, _clock) =
        remote("{domain: d, descriptors: [{key: user, concurrency: {limit: 4, ttl: 9s}, split: 4}]}");
    let attributes = [("user", "u")];
    let check = Check::attributes("d", &attributes);
    let admit = || pollster::block_on(limiter.admit(&check));
    let mut held: Vec<_> = (0..4).map(|_| admit().1.expect("a permit")).collect();
    assert!(!admit().0.is_allowed());
    for _ in 0..8 {
        pollster::block_on(limiter.release(&held.remove(0))).expect("released");
        let (decision, permit) = admit();
        assert!(decision.is_allowed());
        held.push(permit.expect("a permit"));
        assert!(!admit().0.is_allowed());
    }
}

/// Envoy's arithmetic charges each descriptor on its own; its split limits admit the whole all the same.
#[test]
fn split_limits_of_the_envoy_profile_admit_their_whole_limit() {
    let (limiter, _clock) = remote(
        "{domain: d, profile: envoy, descriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 5}, split: 8}]}",
    );
    let entries = [("user", "u")];
    let descriptors = [tollgate_rules::Descriptor { entries: &entries, ..Default::default() }];
    let check = Check::descriptors("d", &descriptors);
    let admitted = (0..30).filter(|_| pollster::block_on(limiter.check(&check)).is_allowed()).count();
    assert_eq!(admitted, 5);
}

/// Threads begin their rounds anywhere: none of them may be denied while the limit has room, and none admits beyond it.
#[test]
fn threads_share_the_whole_of_a_split_limit() {
    let (limiter, _clock) = remote("{domain: d, descriptors: [{key: user, limit: 40/minute, split: 8}]}");
    let limiter = Arc::new(limiter);
    let admitted = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                admitted.fetch_add(self::admitted(&limiter, &[("user", "u")], 10), Ordering::Relaxed)
            });
        }
    });
    assert_eq!(admitted.into_inner(), 40);
    assert_eq!(self::admitted(&limiter, &[("user", "u")], 1), 0);
}

/// A cost that no shard can hold is denied without reading the shards.
#[test]
fn a_cost_beyond_every_shard_reads_nothing() {
    let (limiter, _clock) = remote("{domain: d, descriptors: [{key: user, limit: 80/minute, split: 8}]}");
    let attributes = [("user", "u")];
    let check = Check::attributes("d", &attributes).with_cost(Cost::new(11));
    let charged = calls(&limiter, |limiter| assert!(!pollster::block_on(limiter.check(&check)).is_allowed()));
    assert_eq!(charged, 1);
}

/// What a canceled reservation gives back is there for the next request, also where the counter was known to be full.
#[test]
fn a_canceled_reservation_makes_room_at_once() {
    let (limiter, _clock) =
        remote("{domain: d, descriptors: [{key: user, limit: 8/hour, algorithm: fixed_window, split: 4}]}");
    let attributes = [("user", "u")];
    let check = Check::attributes("d", &attributes);
    let reserve =
        || pollster::block_on(limiter.reserve(&check, TimeDelta::from_secs(60), None)).expect("reserved");
    let ids: Vec<_> = (0..8).map(|_| reserve().id.expect("allowed")).collect();
    for id in ids {
        assert_eq!(admitted(&limiter, &attributes, 3), 0);
        pollster::block_on(limiter.cancel(id)).expect("canceled");
        assert_eq!(admitted(&limiter, &attributes, 1), 1);
    }
}
