//! A store that does not answer, or only in part: the rules' policy does.

use crate::rig::{Memory, check, rules};
use std::sync::Arc;
use tollgate_core::conformance::{DeadStore, Fault, FaultyStore, StoreCall};
use tollgate_core::{Charge, Clock, Cost, ManualClock, SystemClock, TimeDelta, Timestamp};
use tollgate_engine::{Limiter, Origin};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

fn limiter() -> Limiter<DeadStore> {
    let text = "
domain: d
descriptors:
  - {key: user, name: comfort, limit: 10/minute}
  - {key: login, name: security, class: security, limit: 5/minute}
  - {key: tokens, name: cost, class: cost, limit: 5/minute}
  - {key: path, name: chosen, limit: 5/minute, on_error: closed}
  - {key: trial, name: trial, class: security, limit: 5/minute, shadow: true}
";
    Limiter::new(rules(text), DeadStore, Arc::new(SystemClock::new()))
}

/// An outage of the store must not become an outage of the API, nor open the doors that must stay shut.
#[test]
fn each_class_applies_its_fail_policy() {
    type Case = (&'static [(&'static str, &'static str)], Origin, Option<&'static str>);
    let cases: [Case; 8] = [
        (&[("user", "u")], Origin::FailOpen, None),
        (&[("login", "u")], Origin::FailClosed, Some("security")),
        (&[("user", "u"), ("login", "u")], Origin::FailClosed, Some("security")),
        (&[("tokens", "u"), ("tier", "free")], Origin::FailClosed, Some("cost")),
        (&[("tokens", "u"), ("tier", "pro")], Origin::FailOpen, None),
        (&[("path", "u")], Origin::FailClosed, Some("chosen")),
        (&[("trial", "u")], Origin::FailOpen, None),
        (&[("other", "u")], Origin::Unmatched, None),
    ];
    for (request, origin, denied_by) in cases {
        let limiter = limiter();
        let decision = check(&limiter, request, Cost::ONE);
        assert_eq!(decision.origin, origin, "{request:?}");
        // A rule in shadow is not counted as letting a request through: it always does.
        let counted: Vec<_> =
            limiter.fallback_counts().into_iter().map(|(_, origin, count)| (origin, count)).collect();
        let is_counted = request != [("trial", "u")] && origin != Origin::Unmatched;
        assert_eq!(counted, if is_counted { vec![(origin.name(), 1)] } else { vec![] }, "{request:?}");
        assert_eq!(decision.denied_by_name(), denied_by, "{request:?}");
        assert_eq!(decision.is_allowed(), origin != Origin::FailClosed, "{request:?}");
    }
}

type Hook = fn(StoreCall, &[Charge<'_>]) -> Fault;
const AVAILABLE: Hook = |_, _| Fault::None;
const UNAVAILABLE: Hook = Fault::outage;
/// A part of the store is away: the counters of which a value starts with `dead`.
const PARTIAL: Hook = |_, charges| {
    let is_dead =
        |charge: &Charge<'_>| charge.key.parts.iter().any(|part| part.to_string().starts_with("dead"));
    Fault::partial(charges, is_dead)
};

struct Outage {
    clock: Arc<ManualClock>,
    limiter: Limiter<FaultyStore<Memory>>,
}

fn outage(text: &str) -> Outage {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
    let memory = MemoryConfig::with_bytes(1 << 20);
    let counters = MemoryStore::new(&memory, Arc::clone(&clock)).expect("a small store");
    let fallback = MemoryStore::new(&memory, Arc::clone(&time)).expect("a small store");
    Outage {
        limiter: Limiter::new(rules(text), FaultyStore::new(counters), time).with_fallback(fallback),
        clock,
    }
}

impl Outage {
    fn set(&self, fault: Hook) {
        self.limiter.store().set_fault(fault);
    }

    /// How many of `tries` pass, and on what they rest.
    fn passed(&self, request: &[(&str, &str)], tries: u32) -> (u32, Origin) {
        let decisions: Vec<_> = (0..tries).map(|_| check(&self.limiter, request, Cost::ONE)).collect();
        let passed = decisions.iter().filter(|decision| decision.is_allowed()).count();
        (u32::try_from(passed).expect("few"), decisions[0].origin)
    }
}

/// While the store is away a comfort limit must still deny; when it is back, no caller must get a fresh burst.
#[test]
fn an_outage_neither_allows_everything_nor_ends_in_a_burst() {
    let outage = outage("{domain: d, descriptors: [{key: user, name: u, limit: 10/hour}]}");
    outage.set(UNAVAILABLE);
    assert_eq!(outage.passed(&[("user", "x")], 30), (10, Origin::Local));
    assert!(pollster::block_on(outage.limiter.reconcile()), "it cannot be paid yet");
    outage.set(AVAILABLE);
    outage.clock.advance(TimeDelta::from_secs(1));
    pollster::block_on(outage.limiter.reconcile());
    assert_eq!(outage.passed(&[("user", "x")], 30), (0, Origin::Store), "the outage was paid for");
    assert_eq!(outage.passed(&[("user", "y")], 30), (10, Origin::Store));
    let counted = outage.limiter.fallback_counts();
    assert_eq!(counted, [("u".to_owned(), "local", 30)]);
}

/// The first request after an outage must not pass on units that the outage has spent, however soon it comes.
#[test]
fn pending_charges_are_reconciled_before_a_check() {
    let outage = outage(
        "{domain: d, descriptors: [{key: user, name: u, limit: 10/hour}, {key: t, name: t, limit: 50/hour}]}",
    );
    assert_eq!(outage.passed(&[("user", "x")], 4), (4, Origin::Store));
    outage.set(UNAVAILABLE);
    assert_eq!(outage.passed(&[("user", "x"), ("t", "one")], 3), (3, Origin::Local));
    outage.set(AVAILABLE);
    assert_eq!(outage.passed(&[("user", "x"), ("t", "one")], 30), (3, Origin::Store), "ten in all");
    // Debts that cannot be paid leave the others alone, and are not forgotten.
    outage.set(UNAVAILABLE);
    assert_eq!(outage.passed(&[("user", "dead")], 6), (6, Origin::Local));
    outage.set(PARTIAL);
    let (passed, origin) = outage.passed(&[("user", "dead"), ("t", "two")], 30);
    assert_eq!((passed, origin), (4, Origin::Local));
    outage.set(AVAILABLE);
    assert_eq!(outage.passed(&[("user", "dead")], 30), (0, Origin::Store));
    assert_eq!(outage.passed(&[("t", "two")], 100), (46, Origin::Store));
}

/// Parts of a request that fail one after the other, as where units of one counter are still to be charged: what can be decided is, by its
/// own counters.
#[test]
fn parts_that_fail_one_after_the_other_leave_the_rest_alone() {
    let outage = outage(
        "
domain: d
descriptors:
  - {key: login, name: login, class: security, limit: 1000/hour}
  - {key: tenant, name: tenant, limit: 1000/hour}
  - {key: user, name: user, limit: 1000/hour}
",
    );
    outage.set(PARTIAL);
    for user in ["dead1", "dead2", "dead3", "dead4"] {
        let request = [("login", "k"), ("tenant", "dead"), ("user", user)];
        assert_eq!(outage.passed(&request, 1), (1, Origin::Local), "{user}");
    }
    assert_eq!(
        outage.passed(&[("login", "k")], 1_000),
        (996, Origin::Store),
        "four were charged where they belong"
    );
}

/// A part that is set aside for outages is divided by the nodes that are alive; without knowing how many, no node has it.
#[test]
fn a_reserved_part_is_divided_by_the_nodes_alive() {
    let outage = outage("{domain: d, descriptors: []}");
    let text = "{domain: d, descriptors: [{key: user, name: u, limit: 1000/hour, fallback: 6%}]}";
    let options = Options { lease_shared: true, ..Options::default() };
    let set = Ruleset::load(&[Source::new("t.yaml", text)], &options).expect("rules");
    outage.limiter.replace_rules(Arc::new(set));
    assert_eq!(outage.passed(&[("user", "store")], 1_000), (940, Origin::Store));
    outage.set(UNAVAILABLE);
    assert_eq!(outage.passed(&[("user", "x")], 1), (0, Origin::FailClosed));
    outage.limiter.set_live_nodes(3);
    assert_eq!(outage.passed(&[("user", "x")], 100), (20, Origin::Local));
    outage.limiter.set_live_nodes(100);
    assert_eq!(outage.passed(&[("user", "y")], 1), (0, Origin::FailClosed), "less than one for each");
    outage.set(AVAILABLE);
    assert_eq!(outage.passed(&[("user", "x")], 2_000).0, 940, "what was set aside is not charged");
}

/// Otherwise the dead Redis of one region adds a whole limit to what the other regions admit, for as long as it is dead.
#[test]
fn a_dead_store_of_one_cell_leaves_the_others_their_parts() {
    let outage = outage(
        "
domain: d
descriptors:
  - {key: user, name: shared, limit: 60/hour}
  - {key: part, name: split, limit: 60/hour, region: split}
  - {key: slow, name: permits, concurrency: 6}
",
    );
    outage.limiter.set_cells(3);
    outage.set(UNAVAILABLE);
    assert_eq!(outage.passed(&[("user", "x")], 100), (20, Origin::Local), "a third");
    outage.limiter.set_live_nodes(2);
    assert_eq!(outage.passed(&[("user", "y")], 100), (10, Origin::Local), "of which this node has a half");
    // These are this cell's part already when rules are compiled.
    assert_eq!(outage.passed(&[("part", "x")], 100), (30, Origin::Local));
    assert_eq!(outage.passed(&[("slow", "x")], 100), (3, Origin::Local));
}

/// One dead shard must not cost the others their limits, nor a request turned away its quota there.
#[test]
fn a_dead_shard_leaves_the_others_limits_as_they_are() {
    let outage = outage(
        "
domain: d
descriptors:
  - {key: tenant, name: tenant, limit: 5/hour}
  - {key: user, name: user, limit: 100/hour, on_error: open}
  - {key: login, name: login, limit: 100/hour, class: security}
",
    );
    outage.set(PARTIAL);
    let open = [("tenant", "t"), ("user", "dead")];
    assert_eq!(outage.passed(&open, 3), (3, Origin::FailOpen));
    let closed = [("tenant", "t"), ("login", "dead")];
    assert_eq!(outage.passed(&closed, 20), (0, Origin::FailClosed));
    let (passed, _) = outage.passed(&open, 20);
    assert_eq!(passed, 2, "what was turned away has taken nothing from the tenant");
    let denied = check(&outage.limiter, &open, Cost::ONE);
    assert_eq!((denied.denied_by_name(), denied.origin), (Some("tenant"), Origin::Store));
}
