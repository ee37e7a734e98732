//! A capacity in shadow mode over a store that fails at any of a request's calls: no rule counts the request twice.

use crate::rig::{Memory, rules};
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use tollgate_core::conformance::{Fault, FaultyStore, StoreCall};
use tollgate_core::{Charge, Clock, Cost, LateCharge, ManualClock, StoreError, TimeDelta, Timestamp};
use tollgate_engine::{Check, Decision, Limiter};
use tollgate_store::{MemoryConfig, MemoryStore};

/// What becomes of one charge.
#[derive(Clone, Copy, Debug)]
enum Outage {
    /// Counters with this in their names cannot be charged.
    Away(&'static str),
    Down,
    /// Charged too late, and undone because the charge is not kept.
    Late,
}

impl Outage {
    fn fault(self, charges: &[Charge<'_>]) -> Fault {
        match self {
            Self::Away(name) => Fault::partial(charges, |charge| charge.key.scope.label().contains(name)),
            Self::Down => Fault::timeout(),
            Self::Late => Fault::Fail(StoreError::Late(LateCharge::new().0)),
        }
    }
}

const RULES: &str = "
domain: d
descriptors:
  - {key: tenant, value: any*, name: own, limit: 1000/day}
  - {key: path, name: seen, limit: 1000/day, shadow_mode: true}
overload:
  shadow: true
  priorities: [{when: {mode: vip}, priority: critical}]
  fleet: {capacity: 10/day, reserve: {critical: 20%}}
  fairness: {by: tenant, guarantees: {enterprise: 20% each}}
";

struct Node {
    clock: Arc<ManualClock>,
    limiter: Limiter<FaultyStore<Memory>>,
}

fn node() -> Node {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
    let memory = MemoryConfig::with_bytes(1 << 20);
    let counters = MemoryStore::new(&memory, Arc::clone(&clock)).expect("a small store");
    let fallback = MemoryStore::new(&memory, Arc::clone(&time)).expect("a small store");
    let store = FaultyStore::new(counters);
    Node { limiter: Limiter::new(rules(RULES), store, time).with_fallback(fallback), clock }
}

type Request = &'static [(&'static str, &'static str)];
const GREEDY: Request = &[("tenant", "any-greedy"), ("path", "/")];
const ACME: Request = &[("tenant", "any-acme"), ("tier", "enterprise"), ("path", "/")];
const VIP: Request = &[("tenant", "any-acme"), ("tier", "enterprise"), ("path", "/"), ("mode", "vip")];

impl Node {
    fn send(&self, request: Request, script: &[Option<Outage>]) -> Decision {
        let script = Mutex::new(script.iter().copied().collect::<VecDeque<_>>());
        self.limiter.store().set_fault(move |call, charges| match call {
            StoreCall::Charge => {
                let next = script.lock().expect("a list").pop_front().flatten();
                next.map_or(Fault::None, |outage| outage.fault(charges))
            }
            _ => Fault::None,
        });
        let decision = pollster::block_on(self.limiter.check(&Check::attributes("d", request)));
        self.limiter.store().clear_fault();
        decision
    }

    /// Returns the units that are used of a rule, once the store has all that was decided without it.
    fn used(&self, request: Request, rule: &str) -> u64 {
        pollster::block_on(self.limiter.reconcile());
        let peek = Check::attributes("d", request).with_cost(Cost::PEEK);
        let peeked = pollster::block_on(self.limiter.check(&peek));
        let limit = peeked.limits.iter().find(|one| peeked.limit_name(one) == rule).expect("a limit");
        1_000 - limit.outcome.remaining
    }
}

/// A part of the store fails when the request is tried by its guarantee.
#[test]
fn a_second_attempt_that_fails_counts_nothing_twice() {
    for fault in
        [Outage::Away("guarantee"), Outage::Away("fleet"), Outage::Away("tenant"), Outage::Down, Outage::Late]
    {
        let node = node();
        (0..8).for_each(|_| assert!(node.send(GREEDY, &[]).reason.is_none(), "there is room"));
        let decision = node.send(ACME, &[None, Some(fault)]);
        assert!(decision.is_allowed(), "{fault:?}: {decision:?}");
        assert_eq!((node.used(ACME, "own"), node.used(ACME, "seen")), (1, 9), "{fault:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// Whatever fails, and at whichever call, every request is counted once by its rules; by those in shadow mode at most once.
    #[test]
    fn every_request_is_counted_once(
        sent in prop::collection::vec((0_usize..3, prop::collection::vec(0_usize..9, 0..4)), 1..40),
    ) {
        const FAULTS: [Option<Outage>; 9] = [
            None,
            None,
            None,
            Some(Outage::Away("guarantee")),
            Some(Outage::Away("fleet")),
            Some(Outage::Away("tenant")),
            Some(Outage::Away("path")),
            Some(Outage::Down),
            Some(Outage::Late),
        ];
        let node = node();
        let mut own = [0; 3];
        let (all, mut undisturbed) = (sent.len() as u64, 0);
        for (request, faults) in sent {
            let script: Vec<Option<Outage>> = faults.iter().map(|at| FAULTS[*at]).collect();
            let decision = node.send([GREEDY, ACME, VIP][request], &script);
            prop_assert!(decision.is_allowed(), "{:?}: {:?}", script, decision);
            own[request] += 1;
            undisturbed += u64::from(script.iter().all(Option::is_none));
            node.clock.advance(TimeDelta::from_millis(3));
        }
        prop_assert_eq!(node.used(GREEDY, "own"), own[0]);
        prop_assert_eq!(node.used(ACME, "own"), own[1] + own[2]);
        // What a rule in shadow mode would count is lost while the store fails.
        let seen = node.used(ACME, "seen");
        prop_assert!((undisturbed..=all).contains(&seen), "{} of {}, {} without a fault", seen, all, undisturbed);
    }
}
