//! The suite itself: it passes what is right and catches what is wrong.

use super::changed_limits::DENIED;
use super::{DeadStore, Ledger, ReferenceStore, Violation, block_on, run};
use crate::charge::{Admission, Charge, Enforcement, Outcomes, Permit, UnitReturn};
use crate::clock::{Clock, ManualClock};
use crate::cost::Cost;
use crate::counter_key::{CounterKey, KeyPart};
use crate::store::{CounterStore, StoreError};
use std::sync::{Arc, Mutex};

/// A way of being wrong that a real store has had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// Takes the charges one by one, and leaves what it took when a later one is denied.
    ChargesOneByOne,
    /// Joins the parts of a key with a separator.
    JoinsParts,
    /// Takes back with a refund what a look had not taken.
    RefundsPeeks,
    /// Forgets a counter as soon as its window could have turned.
    ForgetsEarly,
    /// A second release frees an anonymous permit.
    ReleasesTwice,
    /// Debits only what fits.
    DebitsWithinLimit,
    /// A denied shadow refuses the request.
    ObeysShadows,
    /// Steps jittered keys at the plain instant.
    IgnoresPhase,
    /// Returns the same units as often as it is called.
    ReturnsTwice,
    /// Gives all units back, however long ago they were taken.
    ReturnsLate,
    /// Cuts what a counter holds down to the limit of a request that it denies.
    TruncatesWhenDenying,
    /// Cuts what a counter holds down to the limit of each request.
    TruncatesWhenPeeking,
}

const FAULTS: [(Fault, &str); 12] = [
    (Fault::ChargesOneByOne, "a request's charges are all taken or none"),
    (Fault::JoinsParts, "keys that differ do not share a counter"),
    (Fault::RefundsPeeks, "every algorithm answers as its step does"),
    (Fault::ForgetsEarly, "every algorithm answers as its step does"),
    (Fault::ReleasesTwice, "a permit is released once, and only by its holder"),
    (Fault::DebitsWithinLimit, "every algorithm answers as its step does"),
    (Fault::ObeysShadows, "every algorithm answers as its step does"),
    (Fault::IgnoresPhase, "every algorithm answers as its step does"),
    (Fault::ReturnsTwice, RETURN_CASE),
    (Fault::ReturnsLate, RETURN_CASE),
    (Fault::TruncatesWhenDenying, DENIED),
    (Fault::TruncatesWhenPeeking, DENIED),
];

const RETURN_CASE: &str = "what was taken ahead is given back once, and only what time has not given back";

struct Faulty {
    clock: Arc<ManualClock>,
    ledger: Mutex<Ledger>,
    fault: Fault,
    /// The limit that last charged each scope.
    writers: Mutex<std::collections::HashMap<String, crate::Limit>>,
}

impl Faulty {
    fn ledger(&self) -> std::sync::MutexGuard<'_, Ledger> {
        self.ledger.lock().expect("one thread")
    }
}

/// Does `what` with the charges as a store sees them that joins the parts of a key. But for jittered keys, whose phase
/// comes from the parts: only the joining is at fault.
fn joining<T>(charges: &[Charge<'_>], what: impl FnOnce(&[Charge<'_>]) -> T) -> T {
    let join =
        |charge: &Charge<'_>| charge.key.parts.iter().map(|part| format!("_{part}")).collect::<String>();
    let joined: Vec<String> = charges.iter().map(join).collect();
    let texts: Vec<[KeyPart<'_>; 1]> = joined.iter().map(|text| [KeyPart::Text(text)]).collect();
    let mut shared = Vec::new();
    for (charge, text) in charges.iter().zip(&texts) {
        let parts = if charge.limit.is_jittered() { charge.key.parts } else { text };
        shared.push(Charge { key: CounterKey { scope: charge.key.scope, parts }, ..*charge });
    }
    what(&shared)
}

impl CounterStore for Faulty {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let (now, mut ledger) = (self.clock.now(), self.ledger());
        let outcomes = match self.fault {
            Fault::ChargesOneByOne => {
                let outcomes = ledger.clone().charge(now, charges);
                for charge in charges {
                    let alone = ledger.charge(now, std::slice::from_ref(charge));
                    if alone.admission == Admission::Denied {
                        break;
                    }
                }
                outcomes
            }
            Fault::JoinsParts => joining(charges, |charges| ledger.charge(now, charges)),
            Fault::RefundsPeeks => {
                let outcomes = ledger.charge(now, charges);
                for charge in charges.iter().filter(|charge| charge.cost.is_peek()) {
                    ledger.debit(now, &[Charge { cost: Cost::refund(1), ..*charge }]);
                }
                outcomes
            }
            Fault::ForgetsEarly => {
                let period =
                    charges.first().map_or(1, |charge| charge.limit.rate().period.length().as_micros());
                if now.as_micros() % period < period / 16 {
                    *ledger = Ledger::default();
                }
                ledger.charge(now, charges)
            }
            Fault::ObeysShadows => {
                let mut strict = charges.to_vec();
                strict.iter_mut().for_each(|charge| charge.enforcement = Enforcement::Required);
                ledger.charge(now, &strict)
            }
            Fault::IgnoresPhase => {
                let plain: Vec<_> = charges
                    .iter()
                    .map(|charge| {
                        let limit = charge.limit;
                        let spec = crate::LimitSpec::new(limit.algorithm(), limit.rate().clone());
                        if limit.is_jittered() { spec.build().expect("in range") } else { limit.clone() }
                    })
                    .collect();
                let charges: Vec<Charge<'_>> =
                    charges.iter().zip(&plain).map(|(charge, limit)| Charge { limit, ..*charge }).collect();
                ledger.charge(now, &charges)
            }
            Fault::TruncatesWhenDenying | Fault::TruncatesWhenPeeking => {
                let outcomes = ledger.charge(now, charges);
                for (charge, outcome) in charges.iter().zip(&outcomes.per_charge) {
                    let peeks = self.fault == Fault::TruncatesWhenPeeking && charge.cost.is_peek();
                    let full = Charge { cost: Cost::refund(u64::MAX), ..*charge };
                    let writer =
                        self.writers.lock().expect("one thread").get(charge.key.scope.label()).cloned();
                    if (peeks || outcome.verdict.is_denied())
                        && writer.is_some_and(|limit| limit != *charge.limit)
                    {
                        let mut rest = ledger.clone();
                        rest.debit(now, &[full]);
                        let used = charge.limit.capacity().min(1);
                        rest.debit(now, &[Charge { cost: Cost::new(used), ..*charge }]);
                        *ledger = rest;
                    } else if outcomes.admission == Admission::Admitted {
                        let label = charge.key.scope.label().to_owned();
                        self.writers.lock().expect("one thread").insert(label, charge.limit.clone());
                    }
                }
                outcomes
            }
            Fault::ReleasesTwice | Fault::DebitsWithinLimit | Fault::ReturnsTwice | Fault::ReturnsLate => {
                ledger.charge(now, charges)
            }
        };
        Ok(outcomes)
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        let (now, mut ledger) = (self.clock.now(), self.ledger());
        if self.fault == Fault::JoinsParts {
            joining(charges, |charges| ledger.debit(now, charges));
        } else if self.fault == Fault::DebitsWithinLimit {
            for charge in charges {
                let _ = ledger.charge(now, std::slice::from_ref(charge));
            }
        } else {
            ledger.debit(now, charges);
        }
        Ok(())
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        if self.fault == Fault::JoinsParts {
            for permit in permits {
                joining(&[Charge::new(permit.key, permit.limit, Cost::PEEK)], |charges| {
                    self.ledger().release(&[Permit { key: charges[0].key, ..*permit }]);
                });
            }
            return Ok(());
        }
        self.ledger().release(permits);
        if self.fault == Fault::ReleasesTwice {
            for permit in permits {
                let freed = crate::PermitId(permit.id.0 + 1);
                self.ledger().release(&[Permit { id: freed, ..*permit }]);
            }
        }
        Ok(())
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        let now = self.clock.now();
        let taken = if self.fault == Fault::ReturnsLate { now } else { back.taken_at };
        self.ledger().return_units(now, &UnitReturn { taken_at: taken, ..*back });
        if self.fault == Fault::ReturnsTwice {
            let id = crate::PermitId(back.id.0 + 1_000_000);
            self.ledger().return_units(now, &UnitReturn { id, ..*back });
        }
        Ok(())
    }
}

/// Without it the suite asks for what no store can do.
#[test]
fn the_reference_passes() {
    assert_eq!(block_on(run(async |clock| ReferenceStore::new(clock))), Ok(()));
}

/// Without it the suite passes stores that lose their users' quota: each of these faults must be caught, and in the
/// case that is about it.
#[test]
fn every_fault_is_caught() {
    for (fault, case) in FAULTS {
        let make = async |clock| Faulty { clock, ledger: Mutex::default(), fault, writers: Mutex::default() };
        match block_on(run(make)) {
            Ok(()) => panic!("{fault:?} was not caught"),
            Err(Violation { case: caught, detail: what }) => {
                assert_eq!(caught, case, "{fault:?} was caught by: {what}");
            }
        }
    }
}

/// Without it a store that fails is taken for one that conforms.
#[test]
fn a_store_that_fails_does_not_conform() {
    let broken = block_on(run(async |_| DeadStore)).expect_err("dead");
    assert!(broken.to_string().contains("did not answer in time"), "{broken}");
}

/// Without it a store that has to wait for something hangs the suite.
#[test]
fn block_on_wakes() {
    let mut polls = 0;
    let waits = std::future::poll_fn(|context| {
        polls += 1;
        if polls < 3 {
            context.waker().wake_by_ref();
            return std::task::Poll::Pending;
        }
        std::task::Poll::Ready(polls)
    });
    assert_eq!(block_on(waits), 3);
}
