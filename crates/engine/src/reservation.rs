//! Reservations: charge an estimate now and settle the actual cost later (LLM tokens).
//!
//! A reservation charges its estimate like any check. Settling it adjusts each counter by the difference: a higher cost
//! is debited (it has already happened), a lower one is refunded, except for units that have been refilled over time.
//! Canceling refunds everything. Both release the permits. A reservation that is neither settled nor canceled by its
//! deadline stays as charged, and its permits expire.
//!
//! A reservation is a record in a [`RecordStore`]: in this process, or where all nodes find it, so that any of them can
//! settle what another has reserved and not lived to settle. Every change is one compare and exchange, so of two nodes
//! one wins. A node that dies while it moves the counters leaves the record closing; after [`CLOSING`] it counts as
//! closed, because moving the counters twice could hand out units, and not at all only withholds some. For the same reason
//! a counter whose answer is late or lost counts as moved. If a part of the store fails meanwhile, the record is open again
//! and has what the other counters were moved to: a client may repeat its request as often as it likes.
//!
//! All operations are idempotent: reserving again with the same idempotency key and the same contents returns the same
//! reservation, or tells how it ended; settling again to the same cost has no further effect. The holder of the ID may
//! close a reservation, so it is 128 random bits, and records are encrypted with keys derived from it (`seal`).
//!
//! | module | contents |
//! |---|---|
//! | `results` | what reserving, settling and canceling return |
//! | `claim` | idempotency keys |
//! | `counters` | what was charged to each counter, and how it moves in the end |
//! | `record` | what is stored, as bytes |
//! | `seal` | IDs, names and encryption of records |
//! | `local` | records of this process |
//! | `outage` | records that could not be stored where all nodes find them, until they can |
//! | `budget` | bytes that this node's reservations may take, fair between callers |

mod budget;
mod claim;
mod counters;
mod local;
mod outage;
mod record;
mod results;
mod seal;

pub(crate) use counters::{ReservedCharge, reserved_charges};
pub use results::{ClosedReservation, RemainingUnits, Reservation, ReserveError, SettleError, Settlement};

use crate::check::Check;
use crate::decide::plan_into;
use crate::decision::{Decision, DecisionDetails, DecisionVerdict};
use crate::decision_body::Contents;
use crate::decision_id::{DecisionId, DrawnId};
use crate::fold;
use crate::limiter::Limiter;
use budget::FairBudget;
use claim::{Claim, Claimed};
use outage::Records;
use record::{Record, Status};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tollgate_core::{
    Admission, Charge, Clock, Cost, CounterStore, KeyPart, Mode, Outcomes, PermitId, RecordStore, TimeDelta,
    Timestamp,
};
use tollgate_rules::{CALLER_KEY, Charges, Plan};

/// ID of a reservation: 128 random bits, returned only to its creator.
pub type ReservationId = DecisionId;

/// Default bytes for the reservations of a limiter.
const DEFAULT_BYTES: usize = 64 << 20;
/// How long a reservation may be made or closed before the node that does so counts as dead.
const CLOSING: TimeDelta = TimeDelta::from_secs(10);
/// How long a reservation that has ended or expired tells so: as long as it was to live, within these bounds.
const MEMORY: (TimeDelta, TimeDelta) = (TimeDelta::from_secs(60), TimeDelta::from_secs(3_600));

/// Open and recently closed reservations.
pub(crate) struct Reservations {
    records: Records,
    budget: Mutex<FairBudget>,
    /// Number of this process: counters of rules with `mode: local` are its own.
    process: u64,
}

impl Reservations {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            records: Records::of_this_process(clock),
            budget: Mutex::new(FairBudget::new(DEFAULT_BYTES)),
            process: seal::random_bits().map_or(0, |bits| bits as u64),
        }
    }

    fn budget(&self) -> MutexGuard<'_, FairBudget> {
        self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Keeps reservations where all nodes find them, for a store of counters that nodes share.
    #[must_use]
    pub fn with_shared_reservations(mut self, records: Arc<dyn RecordStore>) -> Self {
        self.reservations.records = Records::shared(records, Arc::clone(&self.clock));
        self
    }

    /// Returns the records that all nodes share, if there are any.
    #[must_use]
    pub fn shared_records(&self) -> Option<Arc<dyn RecordStore>> {
        self.reservations.records.shared_store()
    }

    /// Sets the bytes that this node's reservations may take.
    #[must_use]
    pub fn with_reservation_bytes(mut self, bytes: usize) -> Self {
        self.reservations.budget = Mutex::new(FairBudget::new(bytes));
        self
    }

    /// Decides like [`Limiter::check`] and, if allowed, stores the reservation so that it can be settled or canceled
    /// until `within` has passed. While the store is unavailable, the rules' fail policy decides, as for a check; what it
    /// admits only this node can close until the store answers again.
    ///
    /// # Errors
    /// [`ReserveError`] if the reservation cannot be stored or replayed; nothing is charged in that case.
    pub async fn reserve(
        &self,
        check: &Check<'_>,
        within: TimeDelta,
        idempotency_key: Option<&str>,
    ) -> Result<Reservation, ReserveError> {
        let id = DecisionId(seal::random_bits()?);
        let kept_for = kept_for(within);
        let claim = match self.claim(check, id, kept_for, idempotency_key).await? {
            Claimed::New(claim) => claim,
            Claimed::Open(id, record, now) => {
                let decision = self.replayed(check, &record, now).await;
                return Ok(Reservation { id: Some(id), decision, deadline: record.deadline });
            }
        };
        let made = self.make(check, id, within, kept_for, claim.as_ref()).await;
        // A key that led to no reservation is free again.
        if let Some(claim) = claim
            && !made.as_ref().is_ok_and(|made| made.id.is_some())
            && let Err(error) = self.reservations.records.remove(claim.name).await
        {
            tracing::debug!(%error, "an idempotency key that leads to nothing stays for a while");
        }
        made
    }

    /// Decides, and stores what the reservation holds.
    async fn make(
        &self,
        check: &Check<'_>,
        id: ReservationId,
        within: TimeDelta,
        kept_for: TimeDelta,
        claim: Option<&Claim>,
    ) -> Result<Reservation, ReserveError> {
        let asked = self.clock.now();
        let deadline = asked + within;
        let mut charges = Vec::new();
        let keep = |plan: &Plan<'_>, details: &DecisionDetails| {
            if details.is_allowed() {
                charges = reserved_charges(plan, details, asked);
            }
        };
        let decision = self.decide(check, |drawn| PermitId(drawn.id().0), keep).await;
        charges.retain(|charge| charge.record.units > 0);
        if !decision.is_allowed() || charges.is_empty() {
            return Ok(Reservation { id: None, decision, deadline });
        }
        let caller = self.caller_of(check, &charges);
        // The store's clock counts, which every node can read.
        let began = charges.iter().map(|charge| charge.taken_at).min().unwrap_or(asked);
        let mut record = Record {
            decision: decision.id(),
            process: self.reservations.process,
            deadline: began + within,
            proceeds_at: began + decision.delay(),
            outcomes: decision.limits.iter().map(|limit| limit.outcome).collect(),
            status: Status::Open,
            charges,
            consumed: self.reserved_consumption(check, &decision),
        };
        let kept = self.keep(&record, id, caller, kept_for, claim).await;
        if let Err(error) = kept {
            let permit = PermitId(decision.id().0);
            let canceled = Settlement::Canceled;
            if let Err(error) = self.move_counters(&mut record.charges, permit, canceled, began).await {
                tracing::warn!(%error, "a reservation that was not kept stays charged");
            }
            self.correct_consumption(&record.consumed, canceled);
            return Err(error);
        }
        Ok(Reservation { id: Some(id), decision, deadline: record.deadline })
    }

    /// Stores a record, within the share of its caller.
    async fn keep(
        &self,
        record: &Record,
        id: ReservationId,
        caller: u64,
        kept_for: TimeDelta,
        claim: Option<&Claim>,
    ) -> Result<(), ReserveError> {
        let Reservations { records, .. } = &self.reservations;
        let (name, seal) = seal::for_id(id);
        let sealed = seal.close(&record.encode())?;
        let bytes = sealed.len() + claim.map_or(0, |claim| claim.sealed.len());
        let now = self.clock.now();
        let names = [Some(name), claim.map(|claim| claim.name)];
        let evicted = self.reservations.budget().take(caller, names, bytes, now + kept_for, now);
        let evicted = evicted.ok_or(ReserveError::TooMany)?;
        for name in evicted {
            if let Err(error) = records.remove(name).await {
                // It expires there by itself; the bytes of this node are free.
                tracing::debug!(%error, "a reservation that made room is still stored");
            }
        }
        let stored = records.store(name, (&sealed, kept_for)).await;
        if let Err(error) = stored {
            self.reservations.budget().release(name);
            return Err(error.into());
        }
        if let Some(claim) = claim
            && records.is_of_outage(name)
        {
            // A retry finds it as well, though the claim was stored before the outage.
            records.store_here(claim.name, (&claim.sealed, kept_for)).await?;
        }
        Ok(())
    }

    /// Returns the decision of an open reservation: as it was returned, or if the rules have changed, with what remains now.
    async fn replayed(&self, check: &Check<'_>, record: &Record, now: Timestamp) -> Decision {
        let mut decision = self.begin(DrawnId::Known(record.decision));
        let Contents { details, rules, quotas, .. } = &mut *decision.body;
        *quotas = self.quota_for(check, rules).quotas;
        {
            let (mut plan, mut charges) = (Plan::default(), Charges::new());
            plan_into(rules, quotas, check, &mut plan);
            if plan.limits.len() == record.outcomes.len() {
                let per_charge = record.outcomes.iter().copied().collect();
                let outcomes = Outcomes { admission: Admission::Admitted, at: now, per_charge };
                fold::fold(&plan, &outcomes, details);
                details
                    .limits
                    .iter_mut()
                    .zip(&record.outcomes)
                    .for_each(|(limit, outcome)| limit.outcome = *outcome);
            } else {
                plan.limits.iter_mut().for_each(|matched| matched.cost = Cost::PEEK);
                plan.charges(PermitId(record.decision.0), &mut charges);
                match self.store.charge(&charges).await {
                    Ok(outcomes) => fold::fold(&plan, &outcomes, details),
                    Err(_) => fold::push_unknown(&plan, details),
                }
            }
            fold::descriptors(&plan, details);
        }
        details.verdict = DecisionVerdict::Allowed { delay: record.proceeds_at.since(now) };
        details.denied_by = None;
        decision
    }

    /// Replaces the estimate with the actual cost.
    ///
    /// # Errors
    /// [`SettleError`] if the reservation is not open, or has ended in another way.
    pub async fn settle(&self, id: ReservationId, cost: u64) -> Result<ClosedReservation, SettleError> {
        self.end(id, Settlement::Settled(cost)).await
    }

    /// Refunds everything.
    ///
    /// # Errors
    /// [`SettleError`] if the reservation is not open, or has ended in another way.
    pub async fn cancel(&self, id: ReservationId) -> Result<ClosedReservation, SettleError> {
        self.end(id, Settlement::Canceled).await
    }

    async fn end(&self, id: ReservationId, wanted: Settlement) -> Result<ClosedReservation, SettleError> {
        let records = &self.reservations.records;
        let (name, seal) = seal::for_id(id);
        let is_of_outage = records.is_of_outage(name);
        let read = records.exchange(name, None, None).await?;
        let kept = read.record.ok_or(SettleError::Unknown)?;
        let mut record =
            seal.open(&kept).and_then(|bytes| Record::decode(&bytes)).ok_or(SettleError::Unknown)?;
        match record.end(read.at) {
            Some(done) if done == wanted => return Ok(self.closed(&record, done).await),
            Some(done) => return Err(SettleError::Ended(done)),
            None if record.status != Status::Open => return Err(SettleError::InProgress),
            None => {}
        }
        let life = record.deadline.since(read.at);
        let kept_for = kept_for(life);
        record.status = Status::Closing(wanted, read.at + CLOSING);
        let closing = seal.close(&record.encode())?;
        let begun = records.exchange(name, Some(&kept), Some((&closing, kept_for))).await?;
        if !begun.is_stored {
            return Err(SettleError::InProgress);
        }
        let permit = PermitId(record.decision.0);
        let mine = record.process == self.reservations.process;
        let is_movable = |charge: &ReservedCharge| mine || charge.record.mode != Mode::Local;
        let mut movable: Vec<ReservedCharge> =
            record.charges.iter().filter(|charge| is_movable(charge)).cloned().collect();
        let mut moved = self.move_counters(&mut movable, permit, wanted, begun.at).await;
        if moved.is_err() && is_of_outage {
            self.move_local_counters(&movable, permit, wanted);
            moved = Ok(());
        }
        // Before anything else is awaited: the caller may disconnect.
        if moved.is_ok() {
            self.correct_consumption(&record.consumed, wanted);
        }
        record.status = if moved.is_ok() { Status::Closed(wanted) } else { Status::Open };
        if moved.is_err() {
            // What has been moved must not be moved again by the next attempt.
            let open = record.charges.iter_mut().filter(|charge| is_movable(charge));
            open.zip(movable).for_each(|(charge, moved)| *charge = moved);
        }
        let closed = seal.close(&record.encode())?;
        let recorded = records.exchange(name, Some(&closing), Some((&closed, kept_for))).await;
        moved?;
        if let Err(error) = recorded {
            tracing::debug!(%error, "a closed reservation is reported as closed only after a while");
        }
        Ok(self.closed(&record, wanted).await)
    }

    /// Returns how a reservation ended, with what remains of its limits.
    async fn closed(&self, record: &Record, settlement: Settlement) -> ClosedReservation {
        let shown: Vec<&ReservedCharge> = record.charges.iter().filter(|charge| charge.is_limit()).collect();
        let parts: Vec<Vec<KeyPart<'_>>> = shown.iter().map(|charge| charge.record.parts()).collect();
        let peeks = shown.iter().zip(&parts).map(|(charge, parts)| charge.record.charge(parts, Cost::PEEK));
        let peeks: Vec<Charge<'_>> = peeks.collect();
        let limits = match self.store.charge(&peeks).await {
            Ok(outcomes) => shown
                .iter()
                .zip(&outcomes.per_charge)
                .map(|(charge, outcome)| RemainingUnits {
                    rule: charge.rule.clone(),
                    limit: charge.record.limit.clone(),
                    remaining: outcome.remaining,
                    reset_after: outcome.reset_after,
                })
                .collect(),
            Err(_) => Vec::new(),
        };
        ClosedReservation { settlement, limits }
    }

    /// Hands reservations that were made during an outage to the shared records. Returns whether that failed.
    pub(crate) async fn hand_over_reservations(&self) -> bool {
        self.reservations.records.hand_over().await.is_err()
    }

    /// Returns whose share of the memory a reservation takes: the caller's key, or else the value that its first limit
    /// counts by.
    fn caller_of(&self, check: &Check<'_>, charges: &[ReservedCharge]) -> u64 {
        let mut hasher = tollgate_core::StableHasher::default();
        match check.value(CALLER_KEY) {
            Some(key) => hasher.bytes(key.as_bytes()),
            None => {
                let first = charges
                    .iter()
                    .find_map(|charge| charge.record.parts().first().map(|part| format!("{part:?}")));
                hasher.bytes(first.unwrap_or_default().as_bytes());
            }
        }
        hasher.finish()
    }
}

/// Returns how long a reservation that lives so long is remembered.
fn kept_for(life: TimeDelta) -> TimeDelta {
    TimeDelta::from_micros(life.as_micros().saturating_add(life.clamp(MEMORY.0, MEMORY.1).as_micros()))
}
