//! Faulty store for tests: wraps any store, and a hook decides of each call whether it fails, waits, or is answered late.
//!
//! It declines every attempt to charge without waiting, so that the hook sees every charge. The store inside can be replaced, as
//! a server that restarts empty. A store whose faults follow a state of their own is better written for its test.

use super::owned_charge::OwnedCharge;
use super::yield_once;
use crate::charge::{Admission, Charge, Outcomes, Permit, UnitReturn};
use crate::counter_key::KeyPart;
use crate::late::{CounterId, LateAnswer, LateCharge, LateResponder};
use crate::region::RegionStatus;
use crate::store::{CounterStore, LastKnown, StoreError};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A call of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreCall {
    /// [`CounterStore::charge`].
    Charge,
    /// [`CounterStore::debit`].
    Debit,
    /// [`CounterStore::release`].
    Release,
    /// [`CounterStore::return_units`].
    Return,
}

/// What a call waits for.
pub type Waiting = Pin<Box<dyn Future<Output = ()> + Send>>;

/// What becomes of a call.
pub enum Fault {
    /// The store inside answers.
    None,
    /// Nothing is applied.
    Fail(StoreError),
    /// A charge or debit is answered by [`FaultyStore::answer_late`] or [`FaultyStore::refuse_late`]; other calls are in time.
    Late,
    /// The store inside answers after a wait.
    WaitThenApply(Waiting),
    /// The store inside applies the call, and its answer comes after a wait.
    ApplyThenWait(Waiting),
}

impl Fault {
    /// The call times out, and nothing is applied.
    #[must_use]
    pub const fn timeout() -> Self {
        Self::Fail(StoreError::Timeout)
    }

    /// As a hook: charges and debits time out. Permits can be released.
    #[must_use]
    pub const fn outage(call: StoreCall, _: &[Charge<'_>]) -> Self {
        match call {
            StoreCall::Charge | StoreCall::Debit => Self::timeout(),
            StoreCall::Release | StoreCall::Return => Self::None,
        }
    }

    /// Those of `charges` for which `is_away` is true time out; none of the others is applied. Without such a charge there is
    /// no fault.
    pub fn partial(charges: &[Charge<'_>], is_away: impl Fn(&Charge<'_>) -> bool) -> Self {
        let failed: Vec<usize> = (0..charges.len()).filter(|at| is_away(&charges[*at])).collect();
        match failed.is_empty() {
            true => Self::None,
            false => Self::Fail(StoreError::Partial { failed, cause: Box::new(StoreError::Timeout) }),
        }
    }

    /// The call is applied when it is polled again.
    #[must_use]
    pub fn wait() -> Self {
        Self::WaitThenApply(Box::pin(yield_once()))
    }
}

type Hook = dyn Fn(StoreCall, &[Charge<'_>]) -> Fault + Send + Sync;

/// A store with faults; see the module.
///
/// ```
/// use std::sync::Arc;
/// use tollgate_core::conformance::{Fault, FaultyStore, ReferenceStore, StoreCall, block_on};
/// use tollgate_core::{CounterStore, ManualClock, StoreError};
/// let store = FaultyStore::new(ReferenceStore::new(ManualClock::default()));
/// store.set_fault(|call, _| if call == StoreCall::Debit { Fault::timeout() } else { Fault::None });
/// assert_eq!(block_on(store.debit(&[])), Err(StoreError::Timeout));
/// assert!(block_on(store.charge(&[])).is_ok());
/// assert_eq!((store.calls(StoreCall::Charge), store.calls(StoreCall::Debit)), (1, 1));
/// ```
pub struct FaultyStore<S> {
    inner: Mutex<Arc<S>>,
    hook: Mutex<Arc<Hook>>,
    calls: [AtomicU64; 4],
    unanswered: Mutex<Vec<Unanswered>>,
    last_known: Mutex<Option<LastKnown>>,
}

/// A charge or debit that waits for its answer.
struct Unanswered {
    call: StoreCall,
    charges: Vec<OwnedCharge>,
    responder: LateResponder,
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S> FaultyStore<S> {
    /// Wraps a store, without a fault.
    pub fn new(inner: S) -> Self {
        Self {
            inner: Mutex::new(Arc::new(inner)),
            hook: Mutex::new(Arc::new(|_, _| Fault::None)),
            calls: [const { AtomicU64::new(0) }; 4],
            unanswered: Mutex::default(),
            last_known: Mutex::default(),
        }
    }

    /// Sets what decides of each call from now on. It sees the charges of charges and debits.
    pub fn set_fault(&self, hook: impl Fn(StoreCall, &[Charge<'_>]) -> Fault + Send + Sync + 'static) {
        *lock(&self.hook) = Arc::new(hook);
    }

    /// Lets the store inside answer every call from now on.
    pub fn clear_fault(&self) {
        self.set_fault(|_, _| Fault::None);
    }

    /// Returns the store inside.
    pub fn inner(&self) -> Arc<S> {
        Arc::clone(&lock(&self.inner))
    }

    /// Replaces the store inside.
    pub fn replace_inner(&self, inner: S) {
        *lock(&self.inner) = Arc::new(inner);
    }

    /// Sets what the store returns as its last outcome, instead of what the store inside returns.
    pub fn set_last_known(&self, known: LastKnown) {
        *lock(&self.last_known) = Some(known);
    }

    /// Returns the number of calls of a kind, with those that failed.
    pub fn calls(&self, call: StoreCall) -> u64 {
        self.calls[call as usize].load(Ordering::Relaxed)
    }

    /// Answers that nothing was charged of all that is late.
    pub fn refuse_late(&self) {
        for one in std::mem::take(&mut *lock(&self.unanswered)) {
            one.responder.answer(LateAnswer::NotCharged, || unreachable!("nothing was charged"));
        }
    }

    /// Counts a call and applies its fault. Returns the store to call, and what its answer waits for.
    async fn begin(
        &self,
        call: StoreCall,
        charges: &[Charge<'_>],
    ) -> Result<(Arc<S>, Option<Waiting>), StoreError> {
        self.calls[call as usize].fetch_add(1, Ordering::Relaxed);
        let hook = Arc::clone(&lock(&self.hook));
        let waiting = match hook(call, charges) {
            Fault::Fail(error) => return Err(error),
            Fault::Late if matches!(call, StoreCall::Charge | StoreCall::Debit) => {
                let (late, responder) = LateCharge::new();
                let charges = charges.iter().map(OwnedCharge::from).collect();
                lock(&self.unanswered).push(Unanswered { call, charges, responder });
                return Err(StoreError::Late(late));
            }
            Fault::None | Fault::Late => None,
            Fault::WaitThenApply(waiting) => {
                waiting.await;
                None
            }
            Fault::ApplyThenWait(waiting) => Some(waiting),
        };
        Ok((self.inner(), waiting))
    }
}

impl<S: CounterStore + 'static> FaultyStore<S> {
    /// Applies all that is late, as a server that had stopped for a moment, and answers it. What no caller keeps is undone.
    pub async fn answer_late(&self) {
        let unanswered = std::mem::take(&mut *lock(&self.unanswered));
        for Unanswered { call, charges, responder } in unanswered {
            let inner = self.inner();
            let charged = apply(&*inner, call, &charges).await;
            let answer = match charged {
                Ok(ids) if ids.is_empty() => LateAnswer::NotCharged,
                Ok(ids) => LateAnswer::Charged(ids),
                Err(_) => LateAnswer::Unknown,
            };
            responder.answer(answer, move || {
                charges.iter().for_each(|charge| charge.undo(&*inner));
            });
        }
    }
}

/// Returns the counters that a late call has charged.
async fn apply<S: CounterStore>(
    inner: &S,
    call: StoreCall,
    charges: &[OwnedCharge],
) -> Result<Vec<CounterId>, StoreError> {
    let parts: Vec<Vec<KeyPart<'_>>> = charges.iter().map(OwnedCharge::parts).collect();
    let charges: Vec<Charge<'_>> =
        charges.iter().zip(&parts).map(|(charge, parts)| charge.borrow(parts)).collect();
    let is_charged: Vec<bool> = match call {
        StoreCall::Debit => {
            inner.debit(&charges).await?;
            vec![true; charges.len()]
        }
        _ => {
            let outcomes = inner.charge(&charges).await?;
            let is_admitted = outcomes.admission == Admission::Admitted;
            outcomes.per_charge.iter().map(|one| is_admitted && !one.verdict.is_denied()).collect()
        }
    };
    let charged =
        charges.iter().zip(is_charged).filter(|(charge, is_charged)| *is_charged && !charge.cost.is_peek());
    Ok(charged.map(|(charge, _)| charge.key.id()).collect())
}

impl<S: CounterStore> CounterStore for FaultyStore<S> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let (inner, waiting) = self.begin(StoreCall::Charge, charges).await?;
        let outcomes = inner.charge(charges).await;
        answer(outcomes, waiting).await
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        let (inner, waiting) = self.begin(StoreCall::Debit, charges).await?;
        let debited = inner.debit(charges).await;
        answer(debited, waiting).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        let (inner, waiting) = self.begin(StoreCall::Release, &[]).await?;
        let released = inner.release(permits).await;
        answer(released, waiting).await
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        let (inner, waiting) = self.begin(StoreCall::Return, &[]).await?;
        let returned = inner.return_units(back).await;
        answer(returned, waiting).await
    }

    fn last_known(&self, charge: &Charge<'_>) -> Option<LastKnown> {
        lock(&self.last_known).or_else(|| self.inner().last_known(charge))
    }

    fn leased_units(&self, charge: &Charge<'_>) -> u64 {
        self.inner().leased_units(charge)
    }

    fn region_status(&self, charge: &Charge<'_>) -> Option<RegionStatus> {
        self.inner().region_status(charge)
    }

    fn is_down(&self) -> bool {
        self.inner().is_down()
    }

    fn is_regional_only(&self) -> bool {
        self.inner().is_regional_only()
    }
}

async fn answer<T>(answer: T, waiting: Option<Waiting>) -> T {
    if let Some(waiting) = waiting {
        waiting.await;
    }
    answer
}

impl<S> fmt::Debug for FaultyStore<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultyStore").field("calls", &self.calls).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
