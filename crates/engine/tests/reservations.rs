//! Estimates that are settled later: what is charged in the end is the truth, once.

mod rig;

use proptest::prelude::*;
use rig::{Rig, rig};
use tollgate_core::{Cost, TimeDelta};
use tollgate_engine::{Check, Reservation, ReserveError, SettleError, Settlement};

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

/// A caller that estimated 300 tokens and used 120 must find 880 left, one call charged, and its slot free again.
#[test]
fn settling_replaces_the_estimate() {
    let rig = rig(RULES);
    let id = reserve(&rig, &ALL, 300, None).unwrap().id.expect("allowed");
    assert_eq!(rig.left(&ALL, "tokens"), 700);
    assert_eq!(rig.left(&ALL, "slots"), 1);
    assert_eq!(pollster::block_on(rig.limiter.settle(id, 120)), Ok(Settlement::Settled(120)));
    assert_eq!(rig.left(&ALL, "tokens"), 880);
    assert_eq!(rig.left(&ALL, "calls"), 99, "a limit with a cost of its own is not moved by settling");
    assert_eq!(rig.left(&ALL, "slots"), 2);
}

/// Work that cost more than estimated has happened: it is charged beyond the limit if need be.
#[test]
fn settling_to_more_is_debited() {
    let rig = rig(RULES);
    let id = reserve(&rig, &ALL, 900, None).unwrap().id.expect("allowed");
    assert_eq!(pollster::block_on(rig.limiter.settle(id, 1_500)), Ok(Settlement::Settled(1_500)));
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
    assert_eq!(first.decision.id, again.decision.id);
    assert_eq!(rig.left(&ALL, "tokens"), 900);
    let id = first.id.expect("allowed");
    for _ in 0..2 {
        assert_eq!(pollster::block_on(rig.limiter.settle(id, 10)), Ok(Settlement::Settled(10)));
    }
    assert_eq!(rig.left(&ALL, "tokens"), 990);
    let other = pollster::block_on(rig.limiter.settle(id, 20));
    assert_eq!(other, Err(SettleError::Ended(Settlement::Settled(10))));
    assert_eq!(pollster::block_on(rig.limiter.cancel(id)), Err(SettleError::Ended(Settlement::Settled(10))));
}

/// Cancelled work must leave no trace; what was denied holds nothing.
#[test]
fn canceling_refunds_everything() {
    let rig = rig(RULES);
    let id = reserve(&rig, &ALL, 1_000, None).unwrap().id.expect("allowed");
    let denied = reserve(&rig, &ALL, 1, Some("denied")).unwrap();
    assert_eq!((denied.id, denied.decision.denied_by_name()), (None, Some("tokens")));
    assert_eq!(pollster::block_on(rig.limiter.cancel(id)), Ok(Settlement::Canceled));
    assert_eq!(rig.left(&ALL, "tokens"), 1_000);
    assert_eq!(rig.left(&ALL, "calls"), 100);
    assert_eq!(rig.left(&ALL, "slots"), 2);
    assert!(reserve(&rig, &ALL, 1, Some("denied")).unwrap().id.is_some(), "a denial does not use up its key");
}

/// A caller that never comes back: the estimate stands, the slot is freed by its own deadline.
#[test]
fn past_its_deadline_a_reservation_stands() {
    let rig = rig(RULES);
    let id = reserve(&rig, &ALL, 300, Some("k")).unwrap().id.expect("allowed");
    rig.clock.advance(TimeDelta::from_secs(60));
    assert_eq!(pollster::block_on(rig.limiter.settle(id, 1)), Err(SettleError::Unknown));
    assert_eq!(rig.left(&ALL, "tokens"), 700);
    assert_eq!(rig.left(&ALL, "slots"), 2);
    assert_ne!(reserve(&rig, &ALL, 1, Some("k")).unwrap().id, Some(id), "the key is free again");
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
                && pollster::block_on(rig.limiter.settle(id, real)).is_ok()
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
