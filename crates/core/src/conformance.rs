//! Conformance suite that every counter store must pass.
//!
//! Each case applies the same operations to a store and to a [`Ledger`], a plain map stepped by
//! [`Limit::step`](crate::Limit::step), and compares every field of every outcome. Time comes from a [`ManualClock`]
//! that the suite advances: `make` passes it to the store, which reads it in place of its own clock (a store that takes
//! time from elsewhere passes the clock's `now` there). Each case requests a new store and uses its own scopes; `make`
//! must return a store without state.
//!
//! The suite returns violations instead of panicking, so that tests can show that a faulty fake is caught. It needs no
//! runtime: [`block_on`] drives a store that completes in place. Rejected: unit tests in each store, because two stores
//! that pass different tests are two products.
//!
//! ```
//! use tollgate_core::conformance::{ReferenceStore, block_on, run};
//! block_on(run(async |clock| ReferenceStore::new(clock)))?;
//! # Ok::<(), tollgate_core::conformance::Violation>(())
//! ```

mod any_store;
mod cases;
mod changed_limits;
mod dead_store;
mod faulty_store;
mod fixtures;
mod ledger;
mod many_permits;
mod memory_records;
mod owned_charge;
mod panicking_store;
mod remote_store;
mod reset_and_grant;
mod rng;
#[cfg(test)]
mod tests;

pub use any_store::AnyStore;
pub use dead_store::DeadStore;
pub use faulty_store::{Fault, FaultyStore, StoreCall, Waiting};
pub use ledger::{Ledger, ReferenceStore};
pub use memory_records::MemoryRecords;
pub use panicking_store::PanickingStore;
pub use remote_store::RemoteStore;
pub use rng::SplitMix64;

use crate::charge::{Admission, Charge, Outcomes, Permit, UnitReturn};
use crate::clock::{Clock, ManualClock};
use crate::store::{CounterStore, StoreError};
use crate::time::{TimeDelta, Timestamp};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

/// Start of each case's clock: an ordinary day, away from window boundaries.
const START: Timestamp = Timestamp::from_micros(1_700_000_017_123_457);

/// A violation: store behavior that differs from the specification.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{case}: {detail}")]
#[non_exhaustive]
pub struct Violation {
    /// Name of the failed case.
    pub case: &'static str,
    /// Expected and actual results.
    pub detail: String,
}

/// Runs every case, each on a store from `make`.
///
/// # Errors
/// [`Violation`] at the first difference from the specified behavior.
pub async fn run<S: CounterStore>(make: impl AsyncFn(Arc<ManualClock>) -> S) -> Result<(), Violation> {
    for name in cases::NAMES {
        let clock = Arc::new(ManualClock::at(START));
        let store = make(Arc::clone(&clock)).await;
        let mut harness = Harness { case: name, store, clock, ledger: Ledger::default(), requests: 0 };
        cases::run(&mut harness).await?;
    }
    Ok(())
}

/// Drives a future to completion on this thread.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(std::thread::Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let (mut future, mut context) = (pin!(future), Context::from_waker(&waker));
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Is pending once: for futures that shall be polled twice.
pub async fn yield_once() {
    let mut has_waited = false;
    poll_fn(|cx| {
        cx.waker().wake_by_ref();
        if std::mem::replace(&mut has_waited, true) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// A store and the ledger that it is compared with.
struct Harness<S> {
    case: &'static str,
    store: S,
    clock: Arc<ManualClock>,
    ledger: Ledger,
    /// Requests charged so far.
    requests: usize,
}

impl<S: CounterStore> Harness<S> {
    fn now(&self) -> Timestamp {
        self.clock.now()
    }

    fn advance(&self, micros: u64) {
        self.clock.advance(TimeDelta::from_micros(micros));
    }

    /// Charges both and compares their outcomes.
    async fn charge(&mut self, charges: &[Charge<'_>]) -> Result<Outcomes, Violation> {
        let now = self.now();
        let actual = match self.charge_prefetched(charges) {
            Some(actual) => actual,
            None => self.store.charge(charges).await.map_err(|error| self.violation(&error))?,
        };
        let expected = self.ledger.charge(now, charges);
        self.compare(&actual, &expected, charges)?;
        Ok(actual)
    }

    /// Charges every second request of one charge as the engine does, by the name that a prefetch returns, if the store
    /// can: both ways must reach the same counter.
    fn charge_prefetched(&mut self, charges: &[Charge<'_>]) -> Option<Outcomes> {
        self.requests += 1;
        let [charge] = charges else { return None };
        let name = self.store.prefetch(&charge.key).filter(|_| self.requests.is_multiple_of(2))?;
        let charged = self.store.try_charge_named(charge, name)?;
        let mut outcomes = Outcomes::default();
        charged.write_to(charge, &mut outcomes);
        Some(outcomes)
    }

    /// Debits both; the effect shows in later charges.
    async fn debit(&mut self, charges: &[Charge<'_>]) -> Result<(), Violation> {
        self.store.debit(charges).await.map_err(|error| self.violation(&error))?;
        self.ledger.debit(self.clock.now(), charges);
        Ok(())
    }

    /// Releases permits in both.
    async fn release(&mut self, permits: &[Permit<'_>]) -> Result<(), Violation> {
        self.store.release(permits).await.map_err(|error| self.violation(&error))?;
        self.ledger.release(permits);
        Ok(())
    }

    /// Returns units to both, twice: the second return must have no effect.
    async fn return_units(&mut self, back: &UnitReturn<'_>) -> Result<(), Violation> {
        for _ in 0..2 {
            self.store.return_units(back).await.map_err(|error| self.violation(&error))?;
        }
        self.ledger.return_units(self.clock.now(), back);
        Ok(())
    }

    /// Charges both and also asserts the admission, which states explicitly what the ledger implies in numbers.
    async fn expect(&mut self, charges: &[Charge<'_>], admission: Admission) -> Result<Outcomes, Violation> {
        let outcomes = self.charge(charges).await?;
        self.check(outcomes.admission == admission, || format!("expected {admission:?}, got {outcomes:?}"))?;
        Ok(outcomes)
    }

    fn check(&self, holds: bool, what: impl FnOnce() -> String) -> Result<(), Violation> {
        if holds { Ok(()) } else { Err(Violation { case: self.case, detail: what() }) }
    }

    fn compare(
        &self,
        actual: &Outcomes,
        expected: &Outcomes,
        charges: &[Charge<'_>],
    ) -> Result<(), Violation> {
        self.check(actual == expected, || {
            let charged: Vec<String> = charges
                .iter()
                .map(|charge| {
                    let Charge { key, limit, cost, enforcement, permit, .. } = charge;
                    format!(
                        "  {} {:?}: {limit}, {cost:?}, {enforcement:?}, {permit:?}",
                        key.scope.label(),
                        key.parts
                    )
                })
                .collect();
            let charged = charged.join("\n");
            format!("at {:?}, asked\n{charged}\nexpected {expected:?}\ngot {actual:?}", self.clock.now())
        })
    }

    fn violation(&self, error: &StoreError) -> Violation {
        Violation { case: self.case, detail: format!("the store failed: {error}") }
    }
}
