//! Estimates that are settled later: what is charged in the end is the truth, once.

use crate::rig::{Rig, rig};
use proptest::prelude::*;
use tollgate_core::{Cost, TimeDelta};
use tollgate_engine::{Check, Reservation, ReservationId, ReserveError, SettleError, Settlement};

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: tokens, limit: 1000/hour, algorithm: fixed_window}
  - {key: user2, name: bucket, limit: 1000/minute}
  - {key: calls, name: calls, limit: 100/hour, cost: 1}
  - {key: slot, name: slots, concurrency: 2}
";

const ALL: [(&str, &str); 3] = [("user", "u"), ("calls", "u"), ("slot", "u")];

fn reserve(
    rig: &Rig,
    attributes: &[(&str, &str)],
    cost: u64,
    key: Option<&str>,
) -> Result<Reservation, ReserveError> {
    let check = Check::attributes("d", attributes).with_cost(Cost::new(cost));
    pollster::block_on(rig.limiter.reserve(&check, TimeDelta::from_secs(60), key))
}

fn settle(rig: &Rig, id: ReservationId, cost: u64) -> Result<Settlement, SettleError> {
    pollster::block_on(rig.limiter.settle(id, cost)).map(|closed| closed.settlement)
}

fn cancel(rig: &Rig, id: ReservationId) -> Result<Settlement, SettleError> {
    pollster::block_on(rig.limiter.cancel(id)).map(|closed| closed.settlement)
}

/// A caller that estimated 300 tokens and used 120 must find 880 left, one call charged, and its slot free again.
#[test]
fn settling_replaces_the_estimate() {
    let rig = rig(RULES);
    let id = reserve(&rig, &ALL, 300, None).unwrap().id.expect("allowed");
    assert_eq!(rig.left(&ALL, "tokens"), 700);
    assert_eq!(rig.left(&ALL, "slots"), 1);
    assert_eq!(settle(&rig, id, 120), Ok(Settlement::Settled(120)));
    assert_eq!(rig.left(&ALL, "tokens"), 880);
    assert_eq!(rig.left(&ALL, "calls"), 99, "a limit with a cost of its own is not moved by settling");
    assert_eq!(rig.left(&ALL, "slots"), 2);
}

/// Work that cost more than estimated has happened: it is charged beyond the limit if need be.
#[test]
fn settling_to_more_is_debited() {
    let rig = rig(RULES);
    let id = reserve(&rig, &ALL, 900, None).unwrap().id.expect("allowed");
    assert_eq!(settle(&rig, id, 1_500), Ok(Settlement::Settled(1_500)));
    assert_eq!(rig.left(&ALL, "tokens"), 0);
    assert!(!rig.take(&ALL).is_allowed());
}

/// A network that doubles or loses answers must not charge twice.
#[test]
fn everything_may_be_repeated() {
    let rig = rig(RULES);
    let first = reserve(&rig, &ALL, 100, Some("k")).unwrap();
    let again = reserve(&rig, &ALL, 100, Some("k")).unwrap();
    assert_eq!(first.id, again.id);
    assert_eq!(first.decision.id(), again.decision.id());
    assert_eq!(rig.left(&ALL, "tokens"), 900);
    let id = first.id.expect("allowed");
    for _ in 0..2 {
        assert_eq!(settle(&rig, id, 10), Ok(Settlement::Settled(10)));
    }
    assert_eq!(rig.left(&ALL, "tokens"), 990);
    let other = settle(&rig, id, 20);
    assert_eq!(other, Err(SettleError::Ended(Settlement::Settled(10))));
    assert_eq!(cancel(&rig, id), Err(SettleError::Ended(Settlement::Settled(10))));
}

/// Cancelled work must leave no trace; what was denied holds nothing.
#[test]
fn canceling_refunds_everything() {
    let rig = rig(RULES);
    let id = reserve(&rig, &ALL, 1_000, None).unwrap().id.expect("allowed");
    let denied = reserve(&rig, &ALL, 1, Some("denied")).unwrap();
    assert_eq!((denied.id, denied.decision.denied_by_name()), (None, Some("tokens")));
    assert_eq!(cancel(&rig, id), Ok(Settlement::Canceled));
    assert_eq!(rig.left(&ALL, "tokens"), 1_000);
    assert_eq!(rig.left(&ALL, "calls"), 100);
    assert_eq!(rig.left(&ALL, "slots"), 2);
    assert!(reserve(&rig, &ALL, 1, Some("denied")).unwrap().id.is_some(), "a denial does not use up its key");
}

/// A request that passes only because nothing is enforced has charged nothing: canceling it must not refund what others used.
#[test]
fn global_shadow_mode_refunds_only_what_was_charged() {
    let Rig { clock, limiter } = rig("
domain: d
descriptors:
  - {key: user, name: tokens, limit: 5/hour}
  - {key: path, name: path, limit: 40/hour}
  - {key: trial, name: trial, limit: 40/hour, shadow: true}
overload:
  fleet: {capacity: 40/hour}
");
    let rig = Rig { clock, limiter: limiter.with_global_shadow(true) };
    let full = [("user", "full"), ("path", "/"), ("trial", "t")];
    let remaining = || ["path", "overload/fleet", "trial"].map(|rule| rig.left(&full, rule));
    (0..5).for_each(|_| assert!(rig.take(&full).is_allowed()));
    (0..20).for_each(|_| assert!(rig.take(&full[1..]).is_allowed()));
    assert_eq!(remaining(), [15, 15, 15]);
    for _ in 0..10 {
        let made = reserve(&rig, &full, 1, None).unwrap();
        assert!(made.decision.is_allowed(), "it would be denied by the user's limit");
        assert_eq!(remaining(), [15, 15, 14]);
        let id = made.id.expect("the shadow rule has counted it");
        assert_eq!(cancel(&rig, id), Ok(Settlement::Canceled));
        assert_eq!(remaining(), [15, 15, 15]);
    }
}

/// A caller that never comes back: the estimate stands, the slot is freed by its own deadline.
#[test]
fn past_its_deadline_a_reservation_stands() {
    let rig = rig(RULES);
    let id = reserve(&rig, &ALL, 300, Some("k")).unwrap().id.expect("allowed");
    rig.clock.advance(TimeDelta::from_secs(60));
    assert_eq!(settle(&rig, id, 1), Err(SettleError::Ended(Settlement::Expired)));
    let replayed = reserve(&rig, &ALL, 300, Some("k")).map(|made| made.id);
    assert_eq!(replayed, Err(ReserveError::Ended(Settlement::Expired)));
    assert_eq!(rig.left(&ALL, "tokens"), 700);
    assert_eq!(rig.left(&ALL, "slots"), 2);
    rig.clock.advance(TimeDelta::from_secs(60));
    assert_eq!(settle(&rig, id, 1), Err(SettleError::Unknown));
    assert_ne!(reserve(&rig, &ALL, 1, Some("k")).unwrap().id, Some(id), "the key is free again");
}

/// An exact token budget must not lose what a stream did not use because it took a while, nor forget later requests.
#[test]
fn a_log_gives_back_what_is_still_counted() {
    let rig = rig(
        "{domain: d, descriptors: [{key: user, name: tokens, limit: 1000/minute, algorithm: sliding_log}]}",
    );
    let user = [("user", "u")];
    let id = reserve(&rig, &user, 300, None).unwrap().id.expect("allowed");
    rig.clock.advance(TimeDelta::from_secs(20));
    let later = reserve(&rig, &user, 500, None).unwrap().id.expect("allowed");
    rig.clock.advance(TimeDelta::from_secs(20));
    settle(&rig, id, 100).expect("settled");
    assert_eq!(rig.left(&user, "tokens"), 400, "of 300 and 500, 200 were not used");
    rig.clock.advance(TimeDelta::from_secs(21));
    assert_eq!(rig.left(&user, "tokens"), 500, "the first is over, the second counts");
    cancel(&rig, later).expect("canceled");
    assert_eq!(rig.left(&user, "tokens"), 1_000);
}

/// One idempotency key must not give free passes to everybody: it is bound to what was asked with it.
#[test]
fn an_idempotency_key_is_bound_to_its_contents() {
    let rig = rig(RULES);
    let first = reserve(&rig, &ALL, 100, Some("k")).unwrap();
    let mallory = [("user", "mallory"), ("calls", "u"), ("slot", "u")];
    let more = [("user", "u"), ("calls", "u"), ("slot", "u"), ("plan", "free")];
    for (attributes, cost) in [(&ALL[..], 101), (&ALL[..], 1), (&mallory, 100), (&more, 100)] {
        let other = reserve(&rig, attributes, cost, Some("k")).map(|made| made.id);
        assert_eq!(other, Err(ReserveError::OtherContents), "{attributes:?} at {cost}");
    }
    let check = Check::attributes("other", &ALL).with_cost(Cost::new(100));
    let other = pollster::block_on(rig.limiter.reserve(&check, TimeDelta::from_secs(60), Some("k")));
    assert_eq!(other.map(|made| made.id), Err(ReserveError::OtherContents));
    let turned = [ALL[2], ALL[0], ALL[1]];
    assert_eq!(reserve(&rig, &turned, 100, Some("k")).unwrap().id, first.id, "their order has no meaning");
    assert_eq!(rig.left(&ALL, "tokens"), 900);
    assert_eq!(rig.left(&[("user", "mallory")], "tokens"), 1_000);
}

/// A reservation that has ended reports how, and is never allowed again.
#[test]
fn a_closed_reservation_is_not_replayed() {
    let rig = rig(RULES);
    let settled = reserve(&rig, &ALL, 100, Some("settled")).unwrap().id.expect("allowed");
    let canceled = reserve(&rig, &ALL, 100, Some("canceled")).unwrap().id.expect("allowed");
    assert_eq!(settle(&rig, settled, 7), Ok(Settlement::Settled(7)));
    assert_eq!(cancel(&rig, canceled), Ok(Settlement::Canceled));
    let again = |key| reserve(&rig, &ALL, 100, Some(key)).map(|made| made.id);
    assert_eq!(again("settled"), Err(ReserveError::Ended(Settlement::Settled(7))));
    assert_eq!(again("canceled"), Err(ReserveError::Ended(Settlement::Canceled)));
    assert_eq!(rig.left(&ALL, "tokens"), 993);
}

/// What no limit counts holds nothing, and fills no table.
#[test]
fn what_holds_nothing_is_not_stored() {
    let rig = rig(RULES);
    for (domain, attributes) in [("nowhere", &ALL[..]), ("d", &[("colour", "red")][..])] {
        let check = Check::attributes(domain, attributes);
        let made =
            pollster::block_on(rig.limiter.reserve(&check, TimeDelta::from_secs(60), Some("k"))).unwrap();
        assert!(made.decision.is_allowed());
        assert_eq!(made.id, None);
    }
    assert!(reserve(&rig, &ALL, 1, Some("k")).unwrap().id.is_some(), "its key is free");
}

/// A client reads from the answer what it may still spend.
#[test]
fn closing_returns_what_remains() {
    let rig = rig(RULES);
    let id = reserve(&rig, &ALL, 300, None).unwrap().id.expect("allowed");
    for _ in 0..2 {
        let closed = pollster::block_on(rig.limiter.settle(id, 120)).expect("open, then closed alike");
        let left: Vec<(&str, u64)> =
            closed.limits.iter().map(|limit| (limit.rule.as_str(), limit.remaining)).collect();
        assert_eq!(left, [("tokens", 880), ("calls", 99), ("slots", 2)]);
    }
}

/// A stranger must not find another's reservation by counting on from its own.
#[test]
fn ids_are_not_guessed_from_each_other() {
    let rig = rig(RULES);
    let mut seen = std::collections::HashSet::new();
    for number in 0..200_u32 {
        let made = reserve(&rig, &[("user", &number.to_string())], 1, None).unwrap();
        let id = made.id.expect("allowed").0;
        assert_ne!(id, made.decision.id().0, "decision IDs are shown to operators");
        assert!(seen.insert(id >> 64) && seen.insert(id & u128::from(u64::MAX)), "a half repeats");
    }
}

/// A cancelled request gives back all that it took, also where a unit takes long to come back.
#[test]
fn canceling_a_bucket_is_exact() {
    let slow = "
domain: d
descriptors:
  - {key: user, name: slow, limit: 5/hour}
  - {key: odd, name: odd, limit: 7/minute, burst: 3}
  - {key: wide, name: wide, limit: 99991/day, burst: 5}
";
    for (attribute, capacity) in [("user", 5), ("odd", 3), ("wide", 5)] {
        let name = if attribute == "user" { "slow" } else { attribute };
        for (wait, taken_before) in
            [(0, 0), (1, 0), (900_000, 0), (0, 1), (1, 1), (700_000, 1), (3_000_000, 2)]
        {
            let rig = rig(slow);
            let caller = [(attribute, "u")];
            for _ in 0..taken_before {
                let _ = rig.take(&caller);
            }
            let id = reserve(&rig, &caller, 1, None).unwrap().id.expect("allowed");
            rig.clock.advance(TimeDelta::from_micros(wait));
            assert_eq!(cancel(&rig, id), Ok(Settlement::Canceled));
            // As if only the others had been: one that has been refilled since is there in both cases.
            let other = self::rig(slow);
            for _ in 0..taken_before {
                let _ = other.take(&caller);
            }
            // What remains of a microsecond has been refilled after one.
            rig.clock.advance(TimeDelta::from_micros(1));
            other.clock.advance(TimeDelta::from_micros(wait + 1));
            assert_eq!(
                rig.left(&caller, name),
                other.left(&caller, name),
                "{name} after {wait} us, {taken_before} before"
            );
            assert!(taken_before > 0 || rig.left(&caller, name) == capacity);
        }
    }
}

proptest! {
    /// Giving back late must not let more through than burst + rate·t: time has given some back already.
    #[test]
    fn late_settlements_mint_nothing(
        steps in prop::collection::vec((0_u64..30_000_000, 1_u64..600, 0_u64..600, any::<bool>()), 1..40),
    ) {
        let rig = rig(RULES);
        let request = [("user2", "u")];
        // (instant, units that this admission cost in the end)
        let mut admitted: Vec<(u64, u64)> = Vec::new();
        let (mut open, mut now) = (std::collections::VecDeque::new(), 0_u64);
        for (wait, estimate, real, settle) in steps {
            rig.clock.advance(TimeDelta::from_micros(wait));
            now += wait;
            if let Some(id) = reserve(&rig, &request, estimate, None).unwrap().id {
                open.push_back((id, admitted.len(), estimate.min(real)));
                admitted.push((now, estimate));
            }
            // The oldest first, so that settlements come late.
            if settle
                && let Some((id, at, real)) = open.pop_front()
                && self::settle(&rig, id, real).is_ok()
            {
                admitted[at].1 = real;
            }
        }
        while rig.take(&request).is_allowed() {
            admitted.push((now, 1));
        }
        for (first, (start, _)) in admitted.iter().enumerate() {
            let mut units = 0;
            for (end, cost) in &admitted[first..] {
                units += cost;
                let ceiling = 1_000_u128 * 60_000_000 + u128::from(end - start) * 1_000;
                prop_assert!(u128::from(units) * 60_000_000 <= ceiling, "{units} units from {start} to {end} us");
            }
        }
    }
}
