//! The counter store interface. Memory, Redis and every decorator implement this one trait.

use crate::charge::{Charge, Charged, Outcomes, Permit, UnitReturn};
use crate::counter_key::CounterKey;
use crate::late::LateCharge;
use crate::outcome::{Outcome, Verdict};
use crate::region::RegionStatus;
use crate::time::TimeDelta;
use std::future::Future;

/// A store of counters.
pub trait CounterStore: Send + Sync {
    /// Charges one request, with its required charges all or none. One round trip for any number of charges.
    fn charge(&self, charges: &[Charge<'_>]) -> impl Future<Output = Result<Outcomes, StoreError>> + Send;

    /// Charges one request without waiting, if the store can (counters in memory, leased units), and writes the results
    /// into `outcomes`, which must be empty. Returns `false` to decline, with nothing charged; the caller then awaits
    /// [`CounterStore::charge`] with the same charges.
    #[inline]
    fn try_charge(&self, _charges: &[Charge<'_>], _outcomes: &mut Outcomes) -> bool {
        false
    }

    /// Charges a request of one charge as [`CounterStore::try_charge`] does; `None` declines. `name` is the hash of its counter's key by the
    /// key hasher of this process, by which stores in memory find counters: who needs it too computes it once for both.
    #[inline]
    fn try_charge_named(&self, charge: &Charge<'_>, _name: u64) -> Option<Charged> {
        Charged::of_list(charge, |charges, outcomes| self.try_charge(charges, outcomes))
    }

    /// Begins to load the counter of a key into the processor's cache, if it is in this process's memory: the caller has
    /// other work until it charges it. Returns the key's hash as [`CounterStore::try_charge_named`] takes it, which is the same in
    /// all stores of a process, if that uses it.
    #[inline]
    fn prefetch(&self, _key: &CounterKey<'_>) -> Option<u64> {
        None
    }

    /// Charges many requests of one charge each without waiting, in order, and appends an outcome for each. Returns
    /// `false` to decline, with nothing charged. A store in memory starts all its cache misses before it waits for the
    /// first.
    #[inline]
    fn try_charge_each(&self, _charges: &[Charge<'_>], _outcomes: &mut Vec<Outcome>) -> bool {
        false
    }

    /// Charges units that were already used elsewhere, beyond the limit if necessary. A negative cost is a refund.
    fn debit(&self, charges: &[Charge<'_>]) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Restores what the store has lost of these counters, if it keeps a record of them, by the limits of the charges.
    /// Called before a counter is charged by a part of its limit: what was used of the whole would not fit the part.
    fn restore_lost_units(&self, _charges: &[Charge<'_>]) -> impl Future<Output = ()> + Send {
        std::future::ready(())
    }

    /// Debits units that other cells have reported. The same as [`CounterStore::debit`], except for a store that keeps
    /// record of what this cell has admitted itself.
    fn debit_reported(&self, charges: &[Charge<'_>]) -> impl Future<Output = Result<(), StoreError>> + Send {
        self.debit(charges)
    }

    /// Releases permits. Idempotent.
    fn release(&self, permits: &[Permit<'_>]) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Returns units that were taken some time ago and not used: only what has not been replenished since, and only
    /// once, however often the call is repeated. A store may also leave this to replenishment.
    fn return_units(&self, _back: &UnitReturn<'_>) -> impl Future<Output = Result<(), StoreError>> + Send {
        std::future::ready(Ok(()))
    }

    /// Returns the store's last outcome for a charge's counter, without a request; `None` if there is none, or the
    /// store is in this process. For decisions while the store is unavailable.
    fn last_known(&self, _charge: &Charge<'_>) -> Option<LastKnown> {
        None
    }

    /// Returns the units of a charge's counter that this process has taken from the store in advance and not given to anybody.
    fn leased_units(&self, _charge: &Charge<'_>) -> u64 {
        0
    }

    /// Returns how cells share a charge's counter; `None` if there are no others.
    fn region_status(&self, _charge: &Charge<'_>) -> Option<RegionStatus> {
        None
    }

    /// Returns whether the store is known to take no charges at the moment, so that they fail without being tried.
    fn is_down(&self) -> bool {
        false
    }

    /// Returns whether limits that cells share are decided by a part of them, because other cells are silent.
    #[inline]
    fn is_regional_only(&self) -> bool {
        false
    }
}

/// A store's last outcome for a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LastKnown {
    /// Units that were used, of whatever limit asked. Not what remained: the limit may have changed since.
    pub used: u64,
    /// Time after which, from then on, the counter is unused again.
    pub reset_after: TimeDelta,
    /// How long ago that was.
    pub age: TimeDelta,
    /// How long ago an outcome last came in time; `None` if none did. Requests whose outcome comes later were decided without
    /// it.
    pub in_time: Option<TimeDelta>,
    /// Whether the store did not know the counter's state, because it may have lost it, and assumed that it was used up.
    pub is_assumed: bool,
}

impl LastKnown {
    /// Longest time that an outcome is repeated.
    const MAX_AGE: TimeDelta = TimeDelta::from_secs(1);

    /// Returns the outcome of a charge in a request that another limit denies, without calling the store: its last one of the
    /// counter, if that is recent and the charge would fit.
    pub fn repeated<S: CounterStore + ?Sized>(store: &S, charge: &Charge<'_>) -> Outcome {
        if charge.cost.is_refund() {
            return Outcome::UNKNOWN;
        }
        let Some(known) = store.last_known(charge).filter(|known| known.age <= Self::MAX_AGE) else {
            return Outcome::UNKNOWN;
        };
        let remaining = charge.limit.capacity().saturating_sub(known.used);
        if remaining < charge.cost.units().max(1) {
            return Outcome::UNKNOWN;
        }
        let reset = known.reset_after.as_micros().saturating_sub(known.age.as_micros());
        let reset_after = TimeDelta::from_micros(reset);
        Outcome { verdict: Verdict::ALLOWED, remaining, next_after: TimeDelta::ZERO, reset_after }
    }
}

impl<S: CounterStore + ?Sized> CounterStore for std::sync::Arc<S> {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        (**self).charge(charges).await
    }

    #[inline(always)]
    fn try_charge(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) -> bool {
        (**self).try_charge(charges, outcomes)
    }

    #[inline(always)]
    fn try_charge_named(&self, charge: &Charge<'_>, name: u64) -> Option<Charged> {
        (**self).try_charge_named(charge, name)
    }

    #[inline(always)]
    fn prefetch(&self, key: &CounterKey<'_>) -> Option<u64> {
        (**self).prefetch(key)
    }

    fn try_charge_each(&self, charges: &[Charge<'_>], outcomes: &mut Vec<Outcome>) -> bool {
        (**self).try_charge_each(charges, outcomes)
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        (**self).debit(charges).await
    }

    async fn debit_reported(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        (**self).debit_reported(charges).await
    }

    async fn restore_lost_units(&self, charges: &[Charge<'_>]) {
        (**self).restore_lost_units(charges).await;
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        (**self).release(permits).await
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        (**self).return_units(back).await
    }

    fn last_known(&self, charge: &Charge<'_>) -> Option<LastKnown> {
        (**self).last_known(charge)
    }

    fn leased_units(&self, charge: &Charge<'_>) -> u64 {
        (**self).leased_units(charge)
    }

    fn region_status(&self, charge: &Charge<'_>) -> Option<RegionStatus> {
        (**self).region_status(charge)
    }

    fn is_regional_only(&self) -> bool {
        (**self).is_regional_only()
    }

    fn is_down(&self) -> bool {
        (**self).is_down()
    }
}

/// Reasons why a store call failed. The engine turns it into a decision by the rule's fail policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The store cannot be reached or refuses to work.
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    /// The store did not respond in time. A charge or debit that it may still apply is [`StoreError::Late`].
    #[error("the store did not answer in time")]
    Timeout,
    /// The store did not respond in time, and may charge the request later. Unless the caller keeps the charge, the
    /// store undoes it.
    #[error("the store did not answer in time")]
    Late(LateCharge),
    /// The connection was lost after a debit was sent: it will never be known whether the store applied it.
    #[error("the store is unavailable: {0}")]
    Lost(String),
    /// Some of a request's charges could not be decided, because the part of the store that keeps them was unavailable.
    /// None of the others is applied: the request can be charged again without the undecided ones.
    #[error("a part of the store failed: {cause}")]
    Partial {
        /// Indexes of the undecided charges within the request, in order.
        failed: Vec<usize>,
        /// Cause of the failure.
        cause: Box<StoreError>,
    },
    /// A part of a debit failed, and another is late. Only what failed is named, and may be repeated.
    #[error("{cause}")]
    BesideLate {
        /// Cause of the failure.
        cause: Box<StoreError>,
        /// Positions of debits that the store may apply later, with the handles of their answers.
        late: Vec<(Vec<usize>, Vec<LateCharge>)>,
    },
    /// Several parts of a request failed, each on its own.
    #[error("{}", .0.first().map_or_else(String::new, ToString::to_string))]
    Several(Vec<StoreError>),
}

impl StoreError {
    /// Returns the charges that may be applied later.
    pub fn late(&self) -> Vec<&LateCharge> {
        match self {
            Self::Late(late) => vec![late],
            Self::Partial { cause, .. } => cause.late(),
            Self::Several(all) => all.iter().flat_map(Self::late).collect(),
            Self::Unavailable(_) | Self::Timeout | Self::Lost(_) | Self::BesideLate { .. } => Vec::new(),
        }
    }

    /// Returns debits that the store may apply later beside those that failed: their positions, and the handles of their answers.
    #[must_use]
    pub fn late_beside(&self) -> &[(Vec<usize>, Vec<LateCharge>)] {
        match self {
            Self::Partial { cause, .. } => cause.late_beside(),
            Self::BesideLate { late, .. } => late,
            _ => &[],
        }
    }

    /// Keeps all debits that the store may apply later, whatever its answers are.
    pub fn keep_late(&self) {
        let beside = self.late_beside().iter().flat_map(|(_, late)| late);
        self.late().into_iter().chain(beside).for_each(|late| late.keep(|_| {}));
    }

    /// Returns the positions of those of `all` charges that an error concerns.
    #[must_use]
    pub fn failed_of(&self, all: usize) -> Vec<usize> {
        match self {
            Self::Partial { failed, .. } => failed.clone(),
            _ => (0..all).collect(),
        }
    }

    /// Returns whether it will never be known of a part of a debit whether it was applied.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        match self {
            Self::Lost(_) => true,
            Self::Partial { cause, .. } | Self::BesideLate { cause, .. } => cause.is_lost(),
            Self::Several(all) => all.iter().any(Self::is_lost),
            Self::Unavailable(_) | Self::Timeout | Self::Late(_) => false,
        }
    }

    /// Takes out what is late beside the failure, for a request of which the charges at `part` have failed so.
    fn without_late(self, part: &[usize], beside: &mut Vec<(Vec<usize>, Vec<LateCharge>)>) -> Self {
        match self {
            Self::Partial { failed, cause } => {
                Self::Partial { failed, cause: Box::new(cause.without_late(part, beside)) }
            }
            Self::BesideLate { cause, late } => {
                let place = |at: &usize| part.get(*at).copied();
                beside
                    .extend(late.into_iter().map(|(of, late)| (of.iter().filter_map(place).collect(), late)));
                *cause
            }
            error => error,
        }
    }

    /// Returns whether the store may have applied what failed, or may still do so. Of a debit that is so for all that failed
    /// or for none ([`StoreError::of_debits`]). Such a debit must not be repeated: it could count twice.
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        match self {
            Self::Late(_) | Self::Lost(_) => true,
            Self::Partial { cause, .. } | Self::BesideLate { cause, .. } => cause.is_in_doubt(),
            Self::Several(all) => all.iter().any(Self::is_in_doubt),
            Self::Unavailable(_) | Self::Timeout => false,
        }
    }

    /// Combines the errors of parts of a debit of `all` charges, each with the positions of its part. A caller repeats what an
    /// error names: if something was certainly not applied, the error names only that, and what is in doubt counts as applied. What
    /// is late of it has its answers in the error ([`StoreError::late_beside`]).
    ///
    /// # Errors
    /// [`StoreError`] if a part failed.
    ///
    /// ```
    /// use tollgate_core::StoreError;
    /// let down = || StoreError::Unavailable("a shard".to_owned());
    /// let lost = || StoreError::Lost("a connection".to_owned());
    /// let only_lost = StoreError::of_debits(vec![(vec![1], lost())], 2);
    /// assert!(only_lost.is_err_and(|error| error.is_in_doubt()));
    /// let mixed = StoreError::of_debits(vec![(vec![0], lost()), (vec![2], down())], 3);
    /// assert_eq!(mixed, Err(StoreError::Partial { failed: vec![2], cause: Box::new(down()) }));
    /// assert_eq!(StoreError::of_debits(Vec::new(), 3), Ok(()));
    /// let late = StoreError::Late(tollgate_core::LateCharge::new().0);
    /// let mixed = StoreError::of_debits(vec![(vec![0, 1], late), (vec![2], down())], 3).unwrap_err();
    /// assert!(!mixed.is_in_doubt() && mixed.late().is_empty() && mixed.failed_of(3) == [2]);
    /// assert_eq!(mixed.late_beside()[0].0, [0, 1]);
    /// ```
    pub fn of_debits(parts: Vec<(Vec<usize>, Self)>, all: usize) -> Result<(), Self> {
        let mut beside = Vec::new();
        let parts = parts.into_iter().map(|(part, error)| {
            let error = error.without_late(&part, &mut beside);
            (part, error)
        });
        let (doubtful, certain): (Vec<_>, Vec<_>) = parts.partition(|(_, error)| error.is_in_doubt());
        let named = if certain.is_empty() {
            doubtful
        } else {
            for (part, error) in &doubtful {
                let late: Vec<LateCharge> = error.late().into_iter().cloned().collect();
                if error.is_lost() {
                    // Not all of it will be known. Undone, it would not count at all.
                    error.keep_late();
                } else if !late.is_empty() {
                    let failed = error.failed_of(part.len());
                    beside.push((failed.into_iter().filter_map(|at| part.get(at).copied()).collect(), late));
                }
            }
            certain
        };
        let (mut failed, mut causes) = (Vec::new(), Vec::new());
        for (part, error) in named {
            match error {
                Self::Partial { failed: some, cause } => {
                    failed.extend(some.into_iter().filter_map(|at| part.get(at).copied()));
                    causes.push(*cause);
                }
                error => {
                    failed.extend(part);
                    causes.push(error);
                }
            }
        }
        failed.sort_unstable();
        failed.dedup();
        let cause = match causes.len() {
            0 => return Ok(()),
            1 => causes.remove(0),
            _ => Self::Several(causes),
        };
        let cause = match beside.is_empty() {
            true => cause,
            false => Self::BesideLate { cause: Box::new(cause), late: beside },
        };
        Err(if failed.len() == all { cause } else { Self::Partial { failed, cause: Box::new(cause) } })
    }
}
