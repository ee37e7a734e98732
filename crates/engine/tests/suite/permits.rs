//! What a request holds while it is under way comes back when it ends, and no more than that.

use crate::rig::{self, rig};
use tollgate_core::{Cost, TimeDelta};
use tollgate_engine::{Check, HeldPermits};
use tollgate_rules::Descriptor;

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: per-user, limit: 1000/hour, algorithm: fixed_window}
  - {key: slot, name: slots, concurrency: {limit: 2, ttl: 60s}}
  - {key: queue, name: queue, limit: 1/second, burst: 10, action: delay}
";

const SLOT: [(&str, &str); 2] = [("user", "u"), ("slot", "s")];
const QUEUE: [(&str, &str); 1] = [("queue", "q")];

fn admit(rig: &rig::Rig, attributes: &[(&str, &str)]) -> (tollgate_engine::Decision, Option<HeldPermits>) {
    pollster::block_on(rig.limiter.admit(&Check::attributes("d", attributes)))
}

/// A slot is free again when its request has ended; what the request used up otherwise stays used.
#[test]
fn releasing_frees_the_permit_and_nothing_else() {
    let rig = rig(RULES);
    assert!(admit(&rig, &[("user", "u")]).1.is_none(), "a usual request holds nothing");
    let (_, first) = admit(&rig, &SLOT);
    let (_, second) = admit(&rig, &SLOT);
    let (denied, nothing) = admit(&rig, &SLOT);
    assert!(!denied.is_allowed() && nothing.is_none());
    let first = first.expect("a permit is held");
    assert_eq!(first.expires_after(), Some(TimeDelta::from_secs(60)));
    for _ in 0..2 {
        // Twice is once.
        assert_eq!(pollster::block_on(rig.limiter.release(&first)), Ok(()));
        assert_eq!(rig.left(&SLOT, "slots"), 1);
    }
    assert_eq!(rig.left(&SLOT, "per-user"), 997);
    assert!(second.is_some());
}

/// A request that outlives its permit keeps it while it is renewed, and loses it otherwise.
#[test]
fn renewing_extends_the_deadline() {
    let rig = rig(RULES);
    let (_, held) = admit(&rig, &SLOT);
    let held = held.expect("a permit");
    for _ in 0..5 {
        rig.clock.advance(TimeDelta::from_secs(40));
        assert_eq!(pollster::block_on(rig.limiter.renew(&held)), Ok(()));
        assert_eq!(rig.left(&SLOT, "slots"), 1);
    }
    rig.clock.advance(TimeDelta::from_secs(61));
    assert_eq!(rig.left(&SLOT, "slots"), 2);
}

/// Who leaves the queue gives its place to those behind.
#[test]
fn canceling_refunds_the_delay_queue_entry() {
    let rig = rig(RULES);
    let (first, none) = admit(&rig, &QUEUE);
    assert!(first.delay() == TimeDelta::ZERO && none.is_none());
    let (second, held) = admit(&rig, &QUEUE);
    assert_eq!(second.delay(), TimeDelta::from_secs(1));
    let (third, late) = admit(&rig, &QUEUE);
    assert_eq!(third.delay(), TimeDelta::from_secs(2));
    rig.clock.advance(TimeDelta::from_millis(900));
    assert_eq!(pollster::block_on(rig.limiter.cancel_held(&held.expect("a place in the queue"))), Ok(()));
    let (fourth, _) = admit(&rig, &QUEUE);
    assert_eq!(fourth.delay(), TimeDelta::from_millis(1_100), "a second less than if no request had left");
    // Once its turn has come there is nothing to give back: that would mint.
    rig.clock.advance(TimeDelta::from_secs(20));
    assert!(admit(&rig, &QUEUE).0.delay() == TimeDelta::ZERO);
    assert_eq!(pollster::block_on(rig.limiter.cancel_held(&late.expect("a place in the queue"))), Ok(()));
    assert_eq!(admit(&rig, &QUEUE).0.delay(), TimeDelta::from_secs(1));
}

/// Envoy reports the end of a stream by negative hits: a slot is free again, whichever check took it, and never more
/// slots than there are. Permits of requests that are under way elsewhere stay theirs.
#[test]
fn negative_hits_give_a_permit_of_a_check_back() {
    let rig = rig(RULES);
    let entries = [("slot", "s")];
    let check = |hits: Cost| {
        let descriptors = [Descriptor { entries: &entries, hits: Some(hits), limit: None }];
        pollster::block_on(rig.limiter.check(&Check::descriptors("d", &descriptors))).is_allowed()
    };
    let left = || rig.left(&entries, "slots");
    assert!(check(Cost::ONE) && check(Cost::ONE) && !check(Cost::ONE));
    assert!(check(Cost::refund(1)));
    assert_eq!(left(), 1);
    assert!(check(Cost::ONE) && !check(Cost::ONE));
    // However many units a request gives back, it held one permit.
    assert!(check(Cost::refund(300)));
    assert_eq!(left(), 1);
    assert!(check(Cost::refund(1)) && check(Cost::refund(1)));
    assert_eq!(left(), 2, "never below zero used");
    let (_, held) = admit(&rig, &entries);
    assert!(held.is_some());
    assert!(check(Cost::refund(1)));
    assert_eq!(left(), 1, "the permit of a request under way is its own");
}
