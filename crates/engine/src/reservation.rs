//! Reservations: charge an estimate now and settle the actual cost later (LLM tokens).
//!
//! A reservation charges its estimate like any check. Settling it adjusts each counter by the difference: a higher cost
//! is debited (it has already happened), a lower one is refunded, except for units that have been refilled over time.
//! Canceling refunds everything. Both release the permits. A reservation that is neither settled nor canceled by its
//! deadline stays as charged, and its permits expire.
//!
//! All operations are idempotent: reserving again with the same idempotency key returns the same reservation, and
//! settling again to the same cost has no further effect. Reservations are stored in this process, bounded in number
//! and in time.

use crate::charge_record::ChargeRecord;
use crate::check::Check;
use crate::decision::{Decision, DecisionDetails};
use crate::decision_id::DecisionId;
use crate::limiter::Limiter;
use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{
    Charge, Cost, CounterStore, KeyPart, Permit, PermitId, StoreError, TimeDelta, Timestamp, Verdict,
};
use tollgate_rules::{Charges, CostFrom, Plan};

/// ID of a reservation: that of the decision that made it.
pub type ReservationId = DecisionId;

/// Open and recently closed reservations, by ID and by idempotency key.
#[derive(Default)]
pub(crate) struct Reservations(Mutex<ReservationTable>);

#[derive(Default)]
struct ReservationTable {
    entries: HashMap<ReservationId, ReservationEntry>,
    keys: HashMap<String, Option<ReservationId>>,
    deadlines: BTreeSet<(Timestamp, ReservationId)>,
}

struct ReservationEntry {
    decision: Decision,
    charges: Vec<ReservedCharge>,
    deadline: Timestamp,
    key: Option<String>,
    status: Status,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Status {
    Open,
    Closing,
    Closed(Settlement),
}

/// Units that a reservation charged to one counter.
#[derive(Clone)]
pub(crate) struct ReservedCharge {
    pub(crate) record: ChargeRecord,
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
    /// ID of the reservation; `None` if it was denied and nothing is held.
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
}

/// Reason why nothing was reserved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The reservation table is full.
    #[error("too many reservations are open; settle or cancel some, or ask for shorter deadlines")]
    TooMany,
    /// A reservation with the same idempotency key is in progress.
    #[error("a reservation with this idempotency key is under way; try again")]
    InProgress,
}

/// Reason why a reservation could not be settled or canceled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettleError {
    /// There is no reservation with this ID, or its deadline has passed and it stays as charged.
    #[error("there is no such reservation, or its deadline has passed and it stands as it was taken")]
    Unknown,
    /// The reservation has already ended in another way.
    #[error("the reservation has already been {}", match .0 { Settlement::Settled(_) => "settled", Settlement::Canceled => "cancelled" })]
    Ended(Settlement),
    /// The reservation is being settled or canceled at this moment.
    #[error("the reservation is being settled or cancelled at this moment; try again")]
    InProgress,
    /// The store did not apply the difference; the reservation is still open.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Reservations {
    /// Maximum number of stored reservations.
    const MAX_OPEN: usize = 1_000_000;

    fn table(&self) -> MutexGuard<'_, ReservationTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReservationTable {
    fn sweep(&mut self, now: Timestamp) {
        while let Some((deadline, id)) = self.deadlines.first().copied() {
            if deadline > now {
                return;
            }
            self.deadlines.pop_first();
            if let Some(entry) = self.entries.remove(&id)
                && let Some(key) = entry.key
            {
                self.keys.remove(&key);
            }
        }
    }
}

impl<S: CounterStore> Limiter<S> {
    /// Decides like [`Limiter::check`] and, if allowed, stores the reservation so that it can be settled or canceled
    /// until `within` has passed.
    ///
    /// # Errors
    /// [`ReserveError`] if the reservation cannot be stored; nothing is charged in that case.
    pub async fn reserve(
        &self,
        check: &Check<'_>,
        within: TimeDelta,
        idempotency_key: Option<&str>,
    ) -> Result<Reservation, ReserveError> {
        let asked = self.clock.now();
        let deadline = asked + within;
        {
            let mut ledger = self.reservations.table();
            ledger.sweep(self.clock.now());
            match idempotency_key.and_then(|key| ledger.keys.get(key)) {
                Some(Some(id)) => {
                    if let Some(entry) = ledger.entries.get(id) {
                        return Ok(Reservation {
                            id: Some(*id),
                            decision: entry.decision.clone(),
                            deadline: entry.deadline,
                        });
                    }
                }
                Some(None) => return Err(ReserveError::InProgress),
                None => {}
            }
            if ledger.entries.len() >= Reservations::MAX_OPEN {
                return Err(ReserveError::TooMany);
            }
            if let Some(key) = idempotency_key {
                ledger.keys.insert(key.to_owned(), None);
            }
        }
        let mut pending = PendingKey { reservations: &self.reservations, key: idempotency_key };
        let (id, mut charged) = (DecisionId::generate(), Vec::new());
        let keep = |plan: &Plan<'_>, details: &DecisionDetails| {
            if details.is_allowed() {
                charged = reserved_charges(plan, details, asked);
            }
        };
        let decision = self.decide(check, id, keep).await;
        if !decision.is_allowed() {
            return Ok(Reservation { id: None, decision, deadline });
        }
        let key = pending.key.take().map(str::to_owned);
        let mut ledger = self.reservations.table();
        if let Some(key) = &key {
            ledger.keys.insert(key.clone(), Some(id));
        }
        ledger.deadlines.insert((deadline, id));
        let entry = ReservationEntry {
            decision: decision.clone(),
            charges: charged,
            deadline,
            key,
            status: Status::Open,
        };
        ledger.entries.insert(id, entry);
        Ok(Reservation { id: Some(id), decision, deadline })
    }

    /// Replaces the estimate with the actual cost.
    ///
    /// # Errors
    /// [`SettleError`] if the reservation is not open, or has ended in another way.
    pub async fn settle(&self, id: ReservationId, cost: u64) -> Result<Settlement, SettleError> {
        self.end(id, Settlement::Settled(cost)).await
    }

    /// Refunds everything.
    ///
    /// # Errors
    /// [`SettleError`] if the reservation is not open, or has ended in another way.
    pub async fn cancel(&self, id: ReservationId) -> Result<Settlement, SettleError> {
        self.end(id, Settlement::Canceled).await
    }

    async fn end(&self, id: ReservationId, wanted: Settlement) -> Result<Settlement, SettleError> {
        let records = {
            let mut ledger = self.reservations.table();
            ledger.sweep(self.clock.now());
            let entry = ledger.entries.get_mut(&id).ok_or(SettleError::Unknown)?;
            match entry.status {
                Status::Closed(done) if done == wanted => return Ok(done),
                Status::Closed(done) => return Err(SettleError::Ended(done)),
                Status::Closing => return Err(SettleError::InProgress),
                Status::Open => {}
            }
            entry.status = Status::Closing;
            entry.charges.clone()
        };
        let mut closing = Closing { reservations: &self.reservations, id, next_status: Status::Open };
        self.move_counters(&records, id, wanted).await?;
        closing.next_status = Status::Closed(wanted);
        Ok(wanted)
    }

    pub(crate) async fn move_counters(
        &self,
        records: &[ReservedCharge],
        id: ReservationId,
        wanted: Settlement,
    ) -> Result<(), StoreError> {
        let parts: Vec<Vec<KeyPart<'_>>> = records.iter().map(|reserved| reserved.record.parts()).collect();
        let permit = PermitId(id.0);
        let now = self.clock.now();
        let mut charges = Vec::new();
        let mut permits = Vec::new();
        for (ReservedCharge { record, taken_at: taken, turn, follows }, parts) in records.iter().zip(&parts) {
            let key = record.key(parts);
            if record.limit.algorithm() == tollgate_core::Algorithm::Concurrency {
                permits.push(Permit { key, limit: &record.limit, id: permit });
                continue;
            }
            let real = match wanted {
                Settlement::Settled(cost) if *follows => cost,
                Settlement::Settled(_) => record.units,
                Settlement::Canceled => 0,
            };
            let cost = match real.checked_sub(record.units) {
                Some(more) => Cost::new(more),
                // Units that have been refilled over time are not refunded again.
                None => {
                    let whole = now < *turn;
                    let most =
                        if whole { record.units } else { record.limit.refundable(record.units, *taken, now) };
                    Cost::refund(most.min(record.units - real))
                }
            };
            if !cost.is_peek() {
                charges.push(Charge { permit, ..record.charge(parts, cost) });
            }
        }
        if !charges.is_empty() {
            self.store.debit(&charges).await?;
            self.full_counters.clear();
        }
        if !permits.is_empty() {
            self.store.release(&permits).await?;
        }
        Ok(())
    }
}

/// Removes the mark of an idempotency key if the reservation fails, also when the future is dropped.
struct PendingKey<'a> {
    reservations: &'a Reservations,
    key: Option<&'a str>,
}

impl Drop for PendingKey<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.reservations.table().keys.remove(key);
        }
    }
}

/// Reopens a reservation if ending it fails, also when the future is dropped.
struct Closing<'a> {
    reservations: &'a Reservations,
    id: ReservationId,
    next_status: Status,
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        if let Some(entry) = self.reservations.table().entries.get_mut(&self.id) {
            entry.status = self.next_status;
        }
    }
}

/// Returns the charges of an allowed plan: every charge that its limit allowed. `taken` must not be later than the
/// actual charge, so that units that have been refilled do not count as still charged.
pub(crate) fn reserved_charges(
    plan: &Plan<'_>,
    details: &DecisionDetails,
    taken: Timestamp,
) -> Vec<ReservedCharge> {
    let mut charges = Charges::new();
    plan.charges(PermitId::ANONYMOUS, &mut charges);
    let statuses = details.limits.iter();
    // Limits covered by a grant were charged to the grant.
    let granted = |at: usize| details.granted.as_ref()?.iter().find(|paid| paid.limit == at);
    (charges.iter().zip(&plan.limits).zip(statuses).enumerate())
        .filter(|(_, (_, status))| matches!(status.outcome.verdict, Verdict::Allowed { .. }))
        .map(|(at, ((charge, matched), status))| ReservedCharge {
            record: granted(at).map_or_else(|| ChargeRecord::from_charge(charge), |paid| paid.record.clone()),
            taken_at: taken,
            turn: match status.outcome.verdict {
                Verdict::Allowed { delay } => taken + delay,
                _ => taken,
            },
            follows: !matches!(matched.rule.map(|rule| &rule.cost), Some(CostFrom::Fixed(_))),
        })
        .collect()
}
