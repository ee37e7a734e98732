//! Decides requests whose secrets are replaced: overdrafts first, then by the part of shared limits that this cell has.

use super::{Charges, RegionalStore, WHOLE};
use crate::guarded::is_guarded;
use crate::late_debits::TakenBy;
use crate::late_record::record_if_kept;
use crate::members::Known;
use crate::outbox::used;
use crate::overdraft::{BucketTime, denial};
use crate::owner::{Transport, is_applied};
use crate::pseudonym::is_shared_name;
use crate::stats::add;
use smallvec::SmallVec;
use std::sync::atomic::Ordering;
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterStore, Enforcement, Limit, LossPolicy, Mode, Outcome,
    Outcomes, PermitId, RegionMode, State, StoreError, TimeDelta, Timestamp, Verdict,
};

impl<S: CounterStore, T: Transport + Clone, C: Clock + Clone> RegionalStore<S, T, C> {
    /// Charges a request whose secrets are replaced.
    pub(super) async fn charge_renamed(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        if self.overdrafts.is_empty() {
            return self.charge_settled(charges).await;
        }
        if let Some(denied) = self.overdrawn(charges).await? {
            return Ok(denied);
        }
        let mut outcomes = self.charge_settled(charges).await?;
        self.show_overdrafts(charges, &mut outcomes);
        Ok(outcomes)
    }

    /// Charges a request of which no bucket is overdrawn beyond what its state can represent.
    async fn charge_settled(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        let refunds = charges.iter().filter(|charge| charge.cost.is_refund() && is_exchanged(charge));
        let _locked = self.locks.lock(refunds.map(|charge| charge.key.id())).await;
        let mut recorded: Charges<'_> = charges.iter().copied().collect();
        self.cut_refunds(&mut recorded, |_| true).await;
        let limits = self.limits(charges);
        let decided: Charges<'_> = charges
            .iter()
            .zip(&limits)
            .map(|(charge, limit)| Charge { limit: limit.as_ref().unwrap_or(charge.limit), ..*charge })
            .collect();
        let (here, there): (SmallVec<[usize; 4]>, SmallVec<[usize; 4]>) =
            (0..charges.len()).partition(|at| self.is_own(&charges[*at].key));
        if there.is_empty() {
            let charged = self.charge_own(&decided).await;
            let mut outcomes = charged.map_err(|error| self.record_if_kept(&recorded, error))?;
            self.record(&recorded, &outcomes);
            self.set_retries(charges, &decided, &mut outcomes);
            return Ok(outcomes);
        }
        let charged = self.charge_both(&decided, &here, &there).await;
        let mut outcomes = charged.map_err(|error| self.record_if_kept(&recorded, error))?;
        self.set_retries(charges, &decided, &mut outcomes);
        let own =
            Outcomes { per_charge: here.iter().map(|at| outcomes.per_charge[*at]).collect(), ..outcomes };
        let charged: Charges<'_> = here.iter().map(|at| recorded[*at]).collect();
        self.record(&charged, &own);
        Ok(outcomes)
    }

    /// Gives denials by a part that is smaller than the cost a time: that after which the limit itself would admit it.
    /// Other cells may answer again before, so no caller is denied for ever.
    fn set_retries(&self, charges: &[Charge<'_>], decided: &[Charge<'_>], outcomes: &mut Outcomes) {
        for ((charge, part), outcome) in charges.iter().zip(decided).zip(&mut outcomes.per_charge) {
            if outcome.verdict == (Verdict::Denied { retry_after: None })
                && part.limit.capacity() < charge.cost.units()
                && charge.cost.units() <= charge.limit.capacity()
            {
                let wait = restored_after(charge, self.clock.now());
                *outcome = Outcome {
                    verdict: Verdict::Denied { retry_after: Some(wait) },
                    reset_after: outcome.reset_after.max(wait),
                    ..*outcome
                };
            }
        }
    }

    /// Returns the denial of a request of which a bucket is overdrawn. One whose state can represent the debt again is
    /// debited, and decided as any other. Refunds are never denied.
    #[cold]
    async fn overdrawn(&self, charges: &[Charge<'_>]) -> Result<Option<Outcomes>, StoreError> {
        let mut denied = None;
        for (at, charge) in charges.iter().enumerate().filter(|(_, charge)| is_shared_bucket(charge)) {
            let id = charge.key.id();
            if self.overdrafts.get(id).is_none() {
                continue;
            }
            let _locked = self.locks.lock(std::iter::once(id)).await;
            let Some((known, time)) = self.overdrafts.get(id).zip(BucketTime::of(charge)) else { continue };
            let now = self.clock.now();
            // It has ended: what the state owes came after it.
            if known.full_at <= now {
                self.overdrafts.remove(id);
                continue;
            }
            let ahead = known.ahead(&time, now);
            if time.is_held(ahead) {
                let owed = Cost::new(known.units(&time, now));
                // Before it is debited: a request that is abandoned meanwhile may have debited it.
                if self.overdrafts.remove(id) && !owed.is_peek() {
                    let debit = [Charge { cost: owed, ..*charge }];
                    let debited = self.or_keep_late(&debit, self.own.debit_reported(&debit).await);
                    debited.inspect_err(|_| self.overdrafts.put_back(id, known))?;
                }
            } else if charge.enforcement == Enforcement::Required
                && is_exchanged(charge)
                && !charge.cost.is_refund()
            {
                denied.get_or_insert((at, denial(charge, &time, &known, now)));
            }
        }
        let Some((at, outcome)) = denied else { return Ok(None) };
        let mut outcomes =
            Outcomes { admission: Admission::Denied, at: self.clock.now(), ..Outcomes::default() };
        outcomes.per_charge = charges.iter().map(|_| Outcome::UNKNOWN).collect();
        outcomes.per_charge[at] = outcome;
        Ok(Some(outcomes))
    }

    /// Makes peeks and refunds show what overdrawn buckets have left: nothing.
    #[cold]
    fn show_overdrafts(&self, charges: &[Charge<'_>], outcomes: &mut Outcomes) {
        let now = self.clock.now();
        for (charge, outcome) in charges.iter().zip(&mut outcomes.per_charge) {
            if is_shared_bucket(charge)
                && let Some(known) = self.overdrafts.get(charge.key.id())
                && known.full_at > now
            {
                let Some(time) = BucketTime::of(charge) else { continue };
                let owed = denial(charge, &time, &known, now);
                let (next_after, reset_after) =
                    (outcome.next_after.max(owed.next_after), outcome.reset_after.max(owed.reset_after));
                *outcome = Outcome { remaining: 0, next_after, reset_after, ..*outcome };
            }
        }
    }

    /// Shortens overdrafts by what this cell has refunded of charges.
    pub(crate) fn shorten_overdrafts<'c>(&self, refunded: impl Iterator<Item = &'c Charge<'c>>) {
        if self.overdrafts.is_empty() {
            return;
        }
        for charge in refunded.filter(|charge| charge.cost.is_refund() && is_exchanged(charge)) {
            let (id, units) = (charge.key.id(), charge.cost.units());
            if units >= charge.limit.refill_cost() {
                self.overdrafts.remove(id);
            } else if let Some(time) = BucketTime::of(charge) {
                self.overdrafts.shorten(id, &time, time.time(units));
            }
        }
    }

    /// Charges the own store with charges that this cell decides.
    pub(crate) async fn charge_own(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        for charge in charges.iter().filter(|charge| may_be_lost(charge)) {
            self.restore_lost(charge).await?;
        }
        if charges.iter().any(is_guarded) {
            return self.charge_and_refund(charges).await;
        }
        let mut outcomes = Outcomes::default();
        if self.own.try_charge(charges, &mut outcomes) {
            return Ok(outcomes);
        }
        self.own.charge(charges).await
    }

    /// Debits a counter that this cell may have taken over from another, or lost: it counts as used up at that moment.
    async fn restore_lost(&self, charge: &Charge<'_>) -> Result<(), StoreError> {
        let now = self.clock.now();
        let Some(Known { since, has_moved }) = self.members.known_since(&charge.key, now) else {
            return Ok(());
        };
        if now.since(since) > charge.limit.retention() {
            return Ok(());
        }
        // Another cell may still decide.
        let since = since.min(now);
        let peek = Charge { cost: Cost::PEEK, enforcement: Enforcement::Independent, ..*charge };
        let outcomes = self.own.charge(&[peek]).await.map_err(unkept)?;
        let Some(outcome) = outcomes.per_charge.first() else { return Ok(()) };
        let known = charge.limit.capacity().saturating_sub(outcome.remaining);
        // What is known was counted since, unless it was left here when the counter moved away.
        if known > 0 && !has_moved {
            return Ok(());
        }
        let (mut state, phase) = (State::default(), charge.limit.phase(charge.key.stable_hash()));
        charge.limit.debit(PermitId::ANONYMOUS, &mut state, since + phase, charge.limit.capacity());
        let lost = used(charge.limit, &state, now + phase).saturating_sub(known);
        if lost == 0 {
            return Ok(());
        }
        add(&self.counts.assumed_lost, 1);
        let debit = [Charge { cost: Cost::new(lost), ..peek }];
        self.or_keep_late(&debit, self.own.debit_reported(&debit).await)
    }

    /// Keeps a debit that the store may still apply, or may have applied: it counts as applied.
    fn or_keep_late(&self, debit: &[Charge<'_>], result: Result<(), StoreError>) -> Result<(), StoreError> {
        match result {
            Err(error) if error.is_in_doubt() => {
                self.keep_late(debit, &error, TakenBy::OtherCell);
                Ok(())
            }
            other => other,
        }
    }

    /// Writes what a decided request has taken from shared limits to the ledger.
    #[inline]
    pub(super) fn record(&self, charges: &[Charge<'_>], outcomes: &Outcomes) {
        if self.outboxes.is_empty() {
            return;
        }
        self.ledger.record_applied(charges, outcomes, is_exchanged);
        if !self.overdrafts.is_empty() {
            let applied = charges.iter().zip(&outcomes.per_charge);
            let applied = applied
                .filter(|(charge, outcome)| is_applied(charge.enforcement, outcome, outcomes.admission));
            self.shorten_overdrafts(applied.map(|(charge, _)| charge));
        }
    }

    /// Writes what the own store charges too late to the ledger, if the caller keeps it: the other cells must know of it as of
    /// every other charge.
    #[cold]
    fn record_if_kept(&self, charges: &[Charge<'_>], error: StoreError) -> StoreError {
        match self.outboxes.is_empty() {
            true => error,
            false => record_if_kept(&self.ledger, charges, error, is_exchanged),
        }
    }

    /// Returns the limits by which shared charges are decided while peers are silent or late; `None` if they are the
    /// rules'.
    fn limits(&self, charges: &[Charge<'_>]) -> SmallVec<[Option<Limit>; 4]> {
        let share = self.share.load(Ordering::Relaxed).min(WHOLE);
        let division = self.division.load();
        let part = |charge: &Charge<'_>| division.part(charge.limit, charge.key.stable_hash());
        // A share leaves the others theirs: nothing more is kept free for them.
        let (is_part, is_late) = (share < WHOLE, share == WHOLE && self.late.count() > 0);
        let is_displaced = is_part && self.members.is_displaced(self.clock.now());
        let one = |charge: &Charge<'_>| match is_exchanged(charge) {
            // Nothing of any limit that cells share is this process's; what it has admitted may be refunded.
            _ if is_displaced => (is_between_cells(charge) && !charge.cost.is_refund()).then(|| part(charge)),
            true if is_part => Some(part(charge)),
            true if is_late => self.kept_free(charge),
            _ => None,
        };
        let limits: SmallVec<[Option<Limit>; 4]> = charges.iter().map(one).collect();
        if limits.iter().any(Option::is_some) {
            add(if is_part { &self.counts.regional_only } else { &self.counts.late_assumed }, 1);
        }
        limits
    }

    /// Returns the limit of a charge without the units that late peers are assumed to have used.
    #[cold]
    fn kept_free(&self, charge: &Charge<'_>) -> Option<Limit> {
        if charge.cost.is_refund() {
            return None;
        }
        let (now, capacity) = (self.clock.now(), charge.limit.capacity());
        let units = self.late.expected(charge, now);
        if units == 0 {
            return None;
        }
        // No more than the limit could have given them; and room for the charge itself, because a denial that no time ends
        // would be wrong.
        let given = capacity.saturating_sub(self.others.used(charge, now));
        let units = units.min(given).min(capacity.saturating_sub(charge.cost.units()));
        (units > 0).then(|| charge.limit.keeping_free(units))
    }
}

/// Returns the time in which a limit gives the units of a charge, or that until its window ends.
fn restored_after(charge: &Charge<'_>, now: Timestamp) -> TimeDelta {
    if let Some((_, end)) = charge.limit.window(now, charge.key.stable_hash()) {
        return end.since(now);
    }
    let rate = charge.limit.rate();
    let micros = u128::from(rate.period.length().as_micros()) * u128::from(charge.cost.units());
    let micros = micros.div_ceil(u128::from(rate.count.max(1)));
    TimeDelta::from_micros(u64::try_from(micros).unwrap_or(u64::MAX / 4).min(u64::MAX / 4))
}

/// Returns whether a charge is exchanged with other cells.
#[inline(always)]
pub(super) fn is_exchanged(charge: &Charge<'_>) -> bool {
    charge.key.scope.region_mode() == RegionMode::Shared
        && is_shared_name(charge)
        && !charge.cost.is_peek()
        && charge.limit.algorithm() != Algorithm::Concurrency
}

/// Returns whether a charge takes units of a limit that cells share and each decides by itself.
fn is_between_cells(charge: &Charge<'_>) -> bool {
    !charge.key.scope.region_mode().has_owner() && charge.mode != Mode::Local && !charge.cost.is_peek()
}

/// Returns whether a charge's counter is a bucket that may be overdrawn.
fn is_shared_bucket(charge: &Charge<'_>) -> bool {
    charge.key.scope.region_mode() == RegionMode::Shared
        && is_shared_name(charge)
        && BucketTime::of(charge).is_some()
}

/// Returns the error of a call beside the request's own: what that charges late is not the request's, which must not take
/// it for its own.
fn unkept(error: StoreError) -> StoreError {
    if error.late().is_empty() { error } else { StoreError::Timeout }
}

/// Returns whether a charge's counter counts as used up if its state was lost.
pub(super) fn may_be_lost(charge: &Charge<'_>) -> bool {
    charge.loss_policy == LossPolicy::AssumeExhausted
        && charge.key.scope.region_mode().has_owner()
        && !charge.cost.is_refund()
        && charge.limit.algorithm() != Algorithm::Concurrency
}
