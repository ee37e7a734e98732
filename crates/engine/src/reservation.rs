//! Reservations: charge an estimate now and settle the actual cost later (LLM tokens).
//!
//! A reservation takes its estimate like any check. Settling it moves each counter by the difference: more is debited
//! (it has happened), less is given back, as far as time has not given it back already. Cancelling gives everything back. Either frees the permits. One that is
//! neither settled nor cancelled by its deadline stands as it was taken, and its permits run out by themselves.
//!
//! Everything here may be repeated: a reservation with the same idempotency key is the same reservation, settling to the
//! same cost again is settling once. Reservations live in this process; they are bounded in number and in time.

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

/// The name of a reservation: that of the decision that made it.
pub type ReservationId = DecisionId;

/// Open and lately closed reservations, by name and by idempotency key.
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

/// What a reservation took from one counter.
#[derive(Clone)]
pub(crate) struct ReservedCharge {
    pub(crate) record: ChargeRecord,
    taken_at: Timestamp,
    /// When its turn comes, where it was put into a queue. Given back before that, a turn is as if it had never been
    /// taken: a queue that is not empty has lost nothing to time.
    turn: Timestamp,
    /// Whether the real cost replaces the estimate here, or this counter took a number of its own.
    follows: bool,
}

/// A reservation and the decision on it.
#[derive(Clone, Debug)]
pub struct Reservation {
    /// Its name; `None` when it was denied, and nothing is held.
    pub id: Option<ReservationId>,
    /// The decision.
    pub decision: Decision,
    /// When it lapses.
    pub deadline: Timestamp,
}

/// How a reservation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// With this real cost.
    Settled(u64),
    /// Given back.
    Canceled,
}

/// Why nothing was reserved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// The table of reservations is full.
    #[error("too many reservations are open; settle or cancel some, or ask for shorter deadlines")]
    TooMany,
    /// The same idempotency key is being reserved at this moment.
    #[error("a reservation with this idempotency key is under way; try again")]
    InProgress,
}

/// Why a reservation could not be ended in this way.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettleError {
    /// There is none of that name, or its deadline has passed: it then stands as it was taken.
    #[error("there is no such reservation, or its deadline has passed and it stands as it was taken")]
    Unknown,
    /// It has already ended in another way.
    #[error("the reservation has already been {}", match .0 { Settlement::Settled(_) => "settled", Settlement::Canceled => "cancelled" })]
    Ended(Settlement),
    /// It is being ended at this moment.
    #[error("the reservation is being settled or cancelled at this moment; try again")]
    InProgress,
    /// The store did not take the difference; the reservation is still open.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Reservations {
    /// The most that are kept at once.
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
    /// Decides like [`Limiter::check`] and, if allowed, keeps the right to settle or cancel until `within` has passed.
    ///
    /// # Errors
    /// [`ReserveError`] if it cannot be remembered; nothing is charged then.
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

    /// Replaces the estimate by the real cost.
    ///
    /// # Errors
    /// [`SettleError`] if it is not open, or was ended in another way.
    pub async fn settle(&self, id: ReservationId, cost: u64) -> Result<Settlement, SettleError> {
        self.end(id, Settlement::Settled(cost)).await
    }

    /// Gives everything back.
    ///
    /// # Errors
    /// [`SettleError`] if it is not open, or was ended in another way.
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
                // What time has given back already is not given back twice.
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

/// Takes an idempotency key's mark away again if the reservation does not come about, also when the caller has gone.
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

/// Opens a reservation again if ending it fails, also when the caller has gone.
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

/// What an allowed plan took: every charge that its own limit let through. `taken_at` is no later than it was, so that
/// nothing counts as not yet come back that has.
pub(crate) fn reserved_charges(
    plan: &Plan<'_>,
    details: &DecisionDetails,
    taken: Timestamp,
) -> Vec<ReservedCharge> {
    let mut charges = Charges::new();
    plan.charges(PermitId::ANONYMOUS, &mut charges);
    let statuses = details.limits.iter();
    // What a grant has paid for was taken from the grant.
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
