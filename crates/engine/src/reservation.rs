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
//! closed, because moving the counters twice could hand out units, and not at all only withholds some.
//!
//! All operations are idempotent: reserving again with the same idempotency key and the same contents returns the same
//! reservation, or tells how it ended; settling again to the same cost has no further effect. The holder of the ID may
//! close a reservation, so it is 128 random bits, and records are encrypted with keys derived from it (`seal`).
//!
//! | module | contents |
//! |---|---|
//! | `record` | what is stored, as bytes |
//! | `seal` | IDs, names and encryption of records |
//! | `local` | records of this process |
//! | `outage` | records that could not be stored where all nodes find them, until they can |
//! | `budget` | bytes that this node's reservations may take, fair between callers |

mod budget;
mod local;
mod outage;
mod record;
mod seal;

use crate::charge_record::ChargeRecord;
use crate::check::{Check, CheckInput};
use crate::decision::{Decision, DecisionDetails, DecisionVerdict};
use crate::decision_body::Contents;
use crate::decision_id::DecisionId;
use crate::fold;
use crate::limiter::{Limiter, plan_into};
use budget::FairBudget;
use outage::Records;
use record::{Record, Status};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterStore, KeyPart, LateCharge, Limit, Mode, Outcomes,
    Permit, PermitId, RecordName, RecordStore, StoreError, TimeDelta, Timestamp, Verdict,
};
use tollgate_rules::{CALLER_KEY, Charges, CostFrom, Plan};

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

/// Units that a reservation charged to one counter.
#[derive(Clone, Debug)]
pub(crate) struct ReservedCharge {
    pub(crate) record: ChargeRecord,
    /// Name of the rule.
    rule: String,
    taken_at: Timestamp,
    /// Time at which a delayed request may proceed. A refund before that is complete, as if the charge had never been
    /// made: a queue that is not empty has lost nothing to time.
    turn: Timestamp,
    /// True if the actual cost replaces the estimate; false if the rule charges a fixed cost.
    follows: bool,
}

/// A reservation and its decision.
#[derive(Clone, Debug)]
pub struct Reservation {
    /// ID of the reservation; `None` if nothing is held: the request was denied, or no limit counts it.
    pub id: Option<ReservationId>,
    /// The decision on the estimate.
    pub decision: Decision,
    /// Time at which the reservation expires.
    pub deadline: Timestamp,
}

/// Final state of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// Settled with this actual cost, in units.
    Settled(u64),
    /// Canceled; everything was refunded.
    Canceled,
    /// Neither by its deadline: it stays as charged.
    Expired,
}

impl std::fmt::Display for Settlement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Settled(cost) => write!(f, "has already been settled, with a cost of {cost}"),
            Self::Canceled => f.write_str("has already been cancelled"),
            Self::Expired => f.write_str("has expired, and stands as it was taken"),
        }
    }
}

/// What remains of one limit after a reservation was closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemainingUnits {
    /// Name of the rule.
    pub rule: String,
    /// The limit.
    pub limit: Limit,
    /// Units that remain.
    pub remaining: u64,
    /// Time until the limit is unused if nothing else is charged.
    pub reset_after: TimeDelta,
}

/// A reservation that was settled or canceled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClosedReservation {
    /// How it ended.
    pub settlement: Settlement,
    /// What remains of its limits now; empty if the store is unavailable.
    pub limits: Vec<RemainingUnits>,
}

/// Reason why nothing was reserved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// This caller's share of the memory for reservations is used.
    #[error(
        "too many reservations of this caller are remembered; settle or cancel some, or ask for shorter deadlines"
    )]
    TooMany,
    /// A reservation with the same idempotency key is in progress.
    #[error("a reservation with this idempotency key is under way; try again")]
    InProgress,
    /// The idempotency key was used with another domain, caller or cost.
    #[error(
        "this idempotency key was used with another domain, other attributes or another cost; send a new key"
    )]
    OtherContents,
    /// The reservation with this idempotency key has ended.
    #[error("the reservation with this idempotency key {0}; send a new key for a new one")]
    Ended(Settlement),
    /// The store did not keep the reservation; nothing is held.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Reason why a reservation could not be settled or canceled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettleError {
    /// There is no reservation with this ID, or it ended long ago.
    #[error(
        "there is no such reservation, or it ended long ago; one made while the store was unavailable is known only to \
         its node until the store answers"
    )]
    Unknown,
    /// The reservation has already ended in another way.
    #[error("the reservation {0}")]
    Ended(Settlement),
    /// The reservation is being settled or canceled at this moment.
    #[error("the reservation is being settled or cancelled at this moment; try again")]
    InProgress,
    /// The store did not apply the difference; the reservation is still open.
    #[error(transparent)]
    Store(#[from] StoreError),
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

/// A claim on an idempotency key.
struct Claim {
    name: RecordName,
    /// What is stored of it.
    sealed: Vec<u8>,
}

/// What an idempotency key leads to.
enum Claimed {
    /// Nothing yet: the caller decides.
    New(Option<Claim>),
    /// An open reservation.
    Open(ReservationId, Box<Record>, Timestamp),
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

    /// Claims an idempotency key for the reservation `id`, or finds the one that has it.
    async fn claim(
        &self,
        check: &Check<'_>,
        id: ReservationId,
        kept_for: TimeDelta,
        idempotency_key: Option<&str>,
    ) -> Result<Claimed, ReserveError> {
        let Some(key) = idempotency_key else { return Ok(Claimed::New(None)) };
        let records = &self.reservations.records;
        let (name, seal) = seal::for_key(key, &contents(check));
        let began = self.clock.now();
        let claim = seal.close(&[&id.0.to_le_bytes()[..], &began.as_micros().to_le_bytes()].concat())?;
        let mut found = records.store(name, (&claim, kept_for)).await?;
        for _ in 0..2 {
            let Some(kept) = found.record.take() else {
                return Ok(Claimed::New(Some(Claim { name, sealed: claim })));
            };
            // Only the same contents derive the key with which the claim was encrypted.
            let Some((other, began)) = seal.open(&kept).and_then(|bytes| read_claim(&bytes)) else {
                return Err(ReserveError::OtherContents);
            };
            let (record_name, record_seal) = seal::for_id(other);
            let read = records.exchange(record_name, None, None).await?;
            if let Some(record) = read.record.and_then(|bytes| Record::decode(&record_seal.open(&bytes)?)) {
                return match record.end(read.at) {
                    Some(end) => Err(ReserveError::Ended(end)),
                    None => Ok(Claimed::Open(other, Box::new(record), read.at)),
                };
            }
            // It is being made, unless its node has died: the claim says since when.
            if read.at.since(began) < CLOSING {
                return Err(ReserveError::InProgress);
            }
            found = records.exchange(name, Some(&kept), Some((&claim, kept_for))).await?;
            if found.is_stored {
                found.record = None;
            }
        }
        Err(ReserveError::InProgress)
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
        let decision = self.decide(check, |id| PermitId(id.0), keep).await;
        charges.retain(|charge| charge.record.units > 0);
        if !decision.is_allowed() || charges.is_empty() {
            return Ok(Reservation { id: None, decision, deadline });
        }
        let caller = self.caller_of(check, &charges);
        // The store's clock counts, which every node can read.
        let began = charges.iter().map(|charge| charge.taken_at).min().unwrap_or(asked);
        let record = Record {
            decision: decision.id,
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
            let permit = PermitId(decision.id.0);
            let canceled = Settlement::Canceled;
            if let Err(error) = self.move_counters(&record.charges, permit, canceled, began).await {
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
        let mut decision = self.begin(record.decision);
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
        let movable: Vec<ReservedCharge> = record
            .charges
            .iter()
            .filter(|charge| mine || charge.record.mode != Mode::Local)
            .cloned()
            .collect();
        let mut moved = self.move_counters(&movable, permit, wanted, begun.at).await;
        if let Err(error) = &moved
            && is_of_outage
        {
            self.move_local_counters(&movable, permit, wanted, error);
            moved = Ok(());
        }
        // Before anything else is awaited: the caller may disconnect.
        if moved.is_ok() {
            self.correct_consumption(&record.consumed, wanted);
        }
        record.status = if moved.is_ok() { Status::Closed(wanted) } else { Status::Open };
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
        let parts: Vec<Vec<KeyPart<'_>>> =
            record.charges.iter().map(|charge| charge.record.parts()).collect();
        let charges: Vec<Charge<'_>> = record
            .charges
            .iter()
            .zip(&parts)
            .map(|(charge, parts)| charge.record.charge(parts, Cost::PEEK))
            .collect();
        let limits = match self.store.charge(&charges).await {
            Ok(outcomes) => record
                .charges
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

    /// Adjusts the counters to the end of a reservation, where `now` is the time by the store's clock.
    pub(crate) async fn move_counters(
        &self,
        records: &[ReservedCharge],
        permit: PermitId,
        wanted: Settlement,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let parts: Vec<Vec<KeyPart<'_>>> = records.iter().map(|reserved| reserved.record.parts()).collect();
        let refunds: Vec<Option<(Limit, Cost)>> =
            records.iter().zip(&parts).map(|(reserved, parts)| reserved.refund(parts, wanted, now)).collect();
        let mut charges = Vec::new();
        let mut permits = Vec::new();
        for ((reserved, parts), refund) in records.iter().zip(&parts).zip(&refunds) {
            let record = &reserved.record;
            if record.limit.algorithm() == Algorithm::Concurrency {
                permits.push(Permit { key: record.key(parts), limit: &record.limit, id: permit });
            } else if let Some((limit, cost)) = refund {
                charges.push(Charge { permit, limit, ..record.charge(parts, *cost) });
            } else if let Some(more) = reserved.units_in_the_end(wanted).checked_sub(record.units)
                && more > 0
            {
                charges.push(Charge { permit, ..record.charge(parts, Cost::new(more)) });
            }
        }
        if !charges.is_empty() {
            // What was taken locally is charged first: units that were never taken cannot be refunded.
            self.reconcile_before(&charges).await?;
            self.store.debit(&charges).await?;
            self.full_counters.clear();
        }
        if !permits.is_empty() {
            self.release_local(&permits);
            self.store.release(&permits).await?;
        }
        Ok(())
    }

    /// Adjusts what this node has admitted and the store has not charged yet to the end of a reservation, because the
    /// store still fails. What the store may apply after all counts as applied, so that nothing is refunded twice.
    fn move_local_counters(
        &self,
        records: &[ReservedCharge],
        permit: PermitId,
        wanted: Settlement,
        error: &StoreError,
    ) {
        let late: Vec<LateCharge> = error.late().into_iter().cloned().collect();
        for reserved in records {
            let (record, parts) = (&reserved.record, reserved.record.parts());
            let wanted = reserved.units_in_the_end(wanted);
            if record.limit.algorithm() == Algorithm::Concurrency {
                self.release_local(&[Permit { key: record.key(&parts), limit: &record.limit, id: permit }]);
            } else if let Some(more) = wanted.checked_sub(record.units).filter(|more| *more > 0) {
                let charge = record.charge(&parts, Cost::new(more));
                self.debit_local(&charge);
                if late.is_empty() {
                    self.pending.add(&charge);
                } else {
                    self.pending.add_in_doubt(std::iter::once(&charge), &late);
                }
            } else if late.is_empty() && wanted < record.units {
                let unused = record.units - wanted;
                if self.pending.take_back(&record.key(&parts).id(), unused) {
                    self.debit_local(&record.charge(&parts, Cost::refund(unused)));
                }
            }
        }
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

impl ReservedCharge {
    /// Returns the units that this counter is charged for a reservation that ends so.
    fn units_in_the_end(&self, wanted: Settlement) -> u64 {
        match wanted {
            Settlement::Settled(cost) if self.follows => cost,
            Settlement::Settled(_) | Settlement::Expired => self.record.units,
            Settlement::Canceled => 0,
        }
    }

    /// Returns the refund of what is not used in the end, without what has been refilled over time.
    fn refund(&self, parts: &[KeyPart<'_>], wanted: Settlement, now: Timestamp) -> Option<(Limit, Cost)> {
        let limit = &self.record.limit;
        let unused = self.record.units.checked_sub(self.units_in_the_end(wanted))?;
        if limit.algorithm() == Algorithm::Concurrency || unused == 0 {
            return None;
        }
        if now < self.turn {
            return Some((limit.clone(), Cost::refund(unused)));
        }
        let phase = limit.phase(self.record.key(parts).stable_hash());
        limit.refund(self.record.units, unused, self.taken_at + phase, now + phase)
    }
}

/// Returns how long a reservation that lives so long is remembered.
fn kept_for(life: TimeDelta) -> TimeDelta {
    TimeDelta::from_micros(life.as_micros().saturating_add(life.clamp(MEMORY.0, MEMORY.1).as_micros()))
}

/// Returns the reservation that has claimed an idempotency key, and since when.
fn read_claim(bytes: &[u8]) -> Option<(ReservationId, Timestamp)> {
    let (id, began) = bytes.split_at_checked(16)?;
    let began = Timestamp::from_micros(u64::from_le_bytes(began.try_into().ok()?));
    Some((DecisionId(u128::from_le_bytes(id.try_into().ok()?)), began))
}

/// Returns what an idempotency key is bound to: domain, attributes or descriptors, and cost.
fn contents(check: &Check<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut put = |text: &str| {
        bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
    };
    put(check.domain);
    put(&format!("{:?}", check.cost));
    match check.input {
        CheckInput::Attributes(attributes) => {
            // Their order has no meaning.
            let mut sorted: Vec<_> = attributes.to_vec();
            sorted.sort_unstable();
            sorted.into_iter().for_each(|(key, value)| {
                put(key);
                put(value);
            });
        }
        CheckInput::Descriptors(descriptors) => {
            for descriptor in descriptors {
                put(&format!("{:?} {:?} {}", descriptor.hits, descriptor.limit, descriptor.entries.len()));
                descriptor.entries.iter().for_each(|(key, value)| {
                    put(key);
                    put(value);
                });
            }
        }
    }
    bytes
}

/// Returns the charges of an allowed plan: every charge that its limit allowed. `asked` must not be later than the
/// actual charge, so that units that have been refilled do not count as still charged.
pub(crate) fn reserved_charges(
    plan: &Plan<'_>,
    details: &DecisionDetails,
    asked: Timestamp,
) -> Vec<ReservedCharge> {
    let mut charges = Charges::new();
    plan.charges(PermitId::ANONYMOUS, &mut charges);
    let statuses = details.limits.iter();
    let taken_at = if details.at == Timestamp::ZERO { asked } else { details.at };
    // Limits covered by a grant were charged to the grant.
    let granted = |at: usize| details.granted.as_ref()?.iter().find(|paid| paid.limit == at);
    (charges.iter().zip(&plan.limits).zip(statuses).enumerate())
        .filter(|(_, (_, status))| matches!(status.outcome.verdict, Verdict::Allowed { .. }))
        .map(|(at, ((charge, matched), status))| ReservedCharge {
            record: granted(at).map_or_else(|| ChargeRecord::from_charge(charge), |paid| paid.record.clone()),
            rule: matched.rule.map_or_else(String::new, |rule| rule.name.clone()),
            taken_at,
            turn: match status.outcome.verdict {
                Verdict::Allowed { delay } => taken_at + delay,
                _ => taken_at,
            },
            follows: !matches!(
                matched.rule.map(|rule| matched.limit.cost_from(rule)),
                Some(CostFrom::Fixed(_))
            ),
        })
        .collect()
}
