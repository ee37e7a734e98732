//! What is reserved for a priority is never taken by requests of lower priorities, within a guarantee or not.

use crate::rig::{Rig, rig};
use proptest::prelude::*;
use tollgate_core::TimeDelta;
use tollgate_engine::{Check, HeldPermits};

const RULES: &str = "
domain: d
overload:
  priorities:
    - {when: {path: /pay}, priority: critical}
    - {when: {path: /cart}, priority: important}
  fleet: {capacity: 60/minute, reserve: {critical: 20%, important: 10%}}
  fairness: {by: tenant, guarantees: {enterprise: 50% each}}
";
const ACME: [(&str, &str); 2] = [("tenant", "acme"), ("tier", "enterprise")];
const GREEDY: [(&str, &str); 1] = [("tenant", "greedy")];
const PAY: [(&str, &str); 2] = [("tenant", "other"), ("path", "/pay")];
const CART: [(&str, &str); 2] = [("tenant", "third"), ("path", "/cart")];

fn passed(rig: &Rig, attributes: &[(&str, &str)], tries: usize) -> usize {
    (0..tries).filter(|_| rig.take(attributes).is_allowed()).count()
}

#[test]
fn guarantees_do_not_take_what_is_reserved() {
    for text in [RULES.to_owned(), RULES.replace("60/minute", "60 in flight")] {
        let rig = rig(&text);
        assert_eq!(passed(&rig, &GREEDY, 100), 42, "70% are for all");
        assert_eq!(passed(&rig, &ACME, 100), 30, "the guarantee");
        assert_eq!(passed(&rig, &CART, 6), 6, "10% are for important requests: {text}");
        assert_eq!(passed(&rig, &PAY, 12), 12, "20% are for critical requests: {text}");
        assert_eq!(passed(&rig, &PAY, 12), 0, "and no more: {text}");
        assert_eq!(passed(&rig, &CART, 12), 0, "{text}");
    }
}

/// What is reserved adds nothing to the capacity: critical requests have all of it, and not more.
#[test]
fn a_reserve_is_a_part_of_the_capacity() {
    for text in [RULES.to_owned(), RULES.replace("60/minute", "60 in flight")] {
        let rig = rig(&text);
        let is_rate = text == RULES;
        assert_eq!(passed(&rig, &PAY, 60), 60);
        let beyond = passed(&rig, &PAY, 100);
        // A rate counts what is reserved only while the capacity is contended, as it does guarantees.
        assert!(beyond <= if is_rate { 12 } else { 0 }, "{beyond}: {text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Whatever others do, requests of a priority that has fewer in flight than is reserved for it find a place.
    #[test]
    fn a_priority_below_its_reserve_finds_a_place(
        actions in prop::collection::vec((0_u8..8, 0_usize..100), 1..400),
    ) {
        let rig = rig(&RULES.replace("60/minute", "60 in flight"));
        let mut held: [Vec<HeldPermits>; 4] = Default::default();
        let callers: [&[(&str, &str)]; 4] = [&GREEDY, &ACME, &CART, &PAY];
        for (action, pick) in actions {
            let at = usize::from(action % 4);
            if action < 4 {
                // Critical requests may use more than is reserved for them, and important ones then find less.
                if at >= 2 && held[at].len() >= [6, 12][at - 2] {
                    continue;
                }
                let (decision, permits) =
                    pollster::block_on(rig.limiter.admit(&Check::attributes("d", callers[at])));
                prop_assert!(at < 2 || decision.is_allowed(), "{:?} in flight: {:?}", held.each_ref().map(Vec::len), decision.reason);
                held[at].extend(permits);
            } else if !held[at].is_empty() {
                let index = pick % held[at].len();
                let permits = held[at].swap_remove(index);
                pollster::block_on(rig.limiter.release(&permits)).expect("memory");
            }
            rig.clock.advance(TimeDelta::from_millis(7));
            let all: usize = held.iter().map(Vec::len).sum();
            prop_assert!(all <= 90, "{} in flight", all);
        }
    }
}

/// Of the capacity and of what each reserve leaves, callers are shown the one that binds.
#[test]
fn one_limit_of_the_capacity_is_shown() {
    let rig = rig("
domain: d
descriptors: [{key: tenant, name: own, limit: 100/minute}]
overload:
  priorities: [{when: {path: /pay}, priority: critical}]
  fleet: {capacity: 10/minute, reserve: {critical: 50%}}
");
    let shown = |path: &str| {
        let decision = rig.take(&[("tenant", "a"), ("path", path)]);
        let limits = decision.shown_limits().map(|status| {
            let limit = decision.limit(status).expect("a limit of the rules");
            (decision.limit_name(status).to_owned(), limit.limit.rate().count, status.outcome.remaining)
        });
        let limits: Vec<_> = limits.filter(|(name, ..)| name != "own").collect();
        assert_eq!(decision.shown_limits().count(), limits.len() + 1, "limits of other rules are shown");
        limits
    };
    let fleet = |count, remaining| vec![("overload/fleet".to_owned(), count, remaining)];
    assert_eq!(shown("/"), fleet(5, 4), "what is not reserved");
    let critical: Vec<_> = (0..5).map(|_| shown("/pay")).collect();
    assert_eq!(critical[4], fleet(10, 4));
    assert_eq!(shown("/"), fleet(5, 3), "of two with as much left the smaller");
    assert_eq!(shown("/pay"), fleet(10, 2));
    assert_eq!(shown("/"), fleet(10, 1), "critical requests have used more than what is reserved");
    assert_eq!(shown("/"), fleet(10, 0));
    assert_eq!(shown("/"), fleet(10, 0), "the one that denies");
}
