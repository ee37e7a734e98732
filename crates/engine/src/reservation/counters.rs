//! Counters of a reservation: what was charged to each, and how they move when it ends.

use super::Settlement;
use crate::charge_record::ChargeRecord;
use crate::decision::DecisionDetails;
use crate::limiter::Limiter;
use tollgate_core::{
    Admission, Algorithm, Charge, Cost, CounterStore, Enforcement, KeyPart, LateCharge, Limit, Outcomes,
    Permit, PermitId, StoreError, Timestamp, Verdict,
};
use tollgate_rules::{Charges, CostFrom, Plan};

/// Name of a guarantee of the fleet's capacity in records. What remains of it is not reported.
const GUARANTEE: &str = "overload/fleet guarantee";

/// Units that a reservation charged to one counter.
#[derive(Clone, Debug)]
pub(crate) struct ReservedCharge {
    pub(crate) record: ChargeRecord,
    /// Name of the rule.
    pub(super) rule: String,
    pub(super) taken_at: Timestamp,
    /// Time at which a delayed request may proceed. A refund before that is complete, as if the charge had never been
    /// made: a queue that is not empty has lost nothing to time.
    pub(super) turn: Timestamp,
    /// True if the actual cost replaces the estimate; false if the rule charges a fixed cost.
    pub(super) follows: bool,
}

impl ReservedCharge {
    /// Returns whether the counter is one of the limits that callers see.
    pub(super) fn is_limit(&self) -> bool {
        self.rule != GUARANTEE
    }

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

/// Returns the charges of a request that passes: every charge that its limit allowed. If the request passes although a limit
/// denies it (global shadow mode), only independent charges were made. `asked` must not be later than the actual charge, so
/// that units that have been refilled do not count as still charged.
pub(crate) fn reserved_charges(
    plan: &Plan<'_>,
    details: &DecisionDetails,
    asked: Timestamp,
) -> Vec<ReservedCharge> {
    let mut charges = Charges::new();
    plan.charges(PermitId::ANONYMOUS, &mut charges);
    let statuses = details.limits.iter();
    let per_charge = charges.iter().zip(statuses.clone());
    let admission =
        Outcomes::admission(per_charge.map(|(charge, status)| (charge.enforcement, &status.outcome)));
    let is_charged = |charge: &Charge<'_>| {
        admission == Admission::Admitted || charge.enforcement == Enforcement::Independent
    };
    let taken_at = if details.at == Timestamp::ZERO { asked } else { details.at };
    // Limits covered by a grant were charged to the grant.
    let granted = |at: usize| details.granted.as_ref()?.iter().find(|paid| paid.limit == at);
    let mut reserved: Vec<ReservedCharge> = (charges.iter().zip(&plan.limits).zip(statuses).enumerate())
        .filter(|(_, ((charge, _), status))| status.outcome.verdict.is_allowed() && is_charged(charge))
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
        .collect();
    reserved.extend(plan.held_guarantee().map(|(matched, delay)| ReservedCharge {
        record: ChargeRecord::from_charge(&plan.charge(&matched, PermitId::ANONYMOUS)),
        rule: GUARANTEE.to_owned(),
        taken_at,
        turn: taken_at + delay,
        follows: false,
    }));
    reserved
}

impl<S: CounterStore> Limiter<S> {
    /// Adjusts the counters to the end of a reservation, where `now` is the time by the store's clock. The records have what
    /// is charged afterwards: if a part of the store fails, another attempt moves only what has not been moved. A counter that
    /// the store may have moved, or may still move, counts as moved: moved again, it could hand out units.
    ///
    /// # Errors
    /// [`StoreError`] if a counter was not moved or a permit not released.
    pub(crate) async fn move_counters(
        &self,
        records: &mut [ReservedCharge],
        permit: PermitId,
        wanted: Settlement,
        now: Timestamp,
    ) -> Result<(), StoreError> {
        let (released, moved) = {
            let records = &*records;
            (
                self.release_permits(records, permit).await,
                self.debit_moved(records, permit, wanted, now).await,
            )
        };
        let is_moved = |at: usize| moved.as_ref().err().is_none_or(|(_, unmoved)| !unmoved.contains(&at));
        for (_, reserved) in records.iter_mut().enumerate().filter(|(at, _)| is_moved(*at)) {
            if reserved.record.limit.algorithm() != Algorithm::Concurrency {
                reserved.record.units = reserved.units_in_the_end(wanted);
            }
        }
        moved.map_err(|(error, _)| error).and(released)
    }

    /// Releases the permits among the counters of a reservation. Idempotent.
    async fn release_permits(&self, records: &[ReservedCharge], permit: PermitId) -> Result<(), StoreError> {
        let is_permit = |one: &&ReservedCharge| one.record.limit.algorithm() == Algorithm::Concurrency;
        let held: Vec<&ReservedCharge> = records.iter().filter(is_permit).collect();
        if held.is_empty() {
            return Ok(());
        }
        let parts: Vec<Vec<KeyPart<'_>>> = held.iter().map(|reserved| reserved.record.parts()).collect();
        let permits = held.iter().zip(&parts).map(|(reserved, parts)| {
            let record = &reserved.record;
            Permit { key: record.key(parts), limit: &record.limit, id: permit }
        });
        let permits: Vec<Permit<'_>> = permits.collect();
        self.release_local(&permits);
        let released = self.store.release(&permits).await;
        self.fleet_shares.on_released(&permits);
        released
    }

    /// Charges the differences between what was reserved and what is charged in the end. The error has the indexes of the
    /// records whose counters have not been moved.
    async fn debit_moved(
        &self,
        records: &[ReservedCharge],
        permit: PermitId,
        wanted: Settlement,
        now: Timestamp,
    ) -> Result<(), (StoreError, Vec<usize>)> {
        let parts: Vec<Vec<KeyPart<'_>>> = records.iter().map(|reserved| reserved.record.parts()).collect();
        let refunds: Vec<Option<(Limit, Cost)>> =
            records.iter().zip(&parts).map(|(reserved, parts)| reserved.refund(parts, wanted, now)).collect();
        let (mut charges, mut charged) = (Vec::new(), Vec::new());
        for (at, ((reserved, parts), refund)) in records.iter().zip(&parts).zip(&refunds).enumerate() {
            let record = &reserved.record;
            let (limit, cost) = match refund {
                Some((limit, cost)) => (limit, *cost),
                None if record.limit.algorithm() == Algorithm::Concurrency => continue,
                None => match reserved.units_in_the_end(wanted).checked_sub(record.units) {
                    None | Some(0) => continue,
                    Some(more) => (&record.limit, Cost::new(more)),
                },
            };
            charges.push(Charge { permit, limit, ..record.charge(parts, cost) });
            charged.push(at);
        }
        if charges.is_empty() {
            return Ok(());
        }
        // What was taken locally is charged first: units that were never taken cannot be refunded.
        if let Err(error) = self.reconcile_before(&charges).await {
            // Nothing has been moved, whichever charges it names.
            return Err((StoreError::Unavailable(error.to_string()), charged));
        }
        let debited = self.store.debit(&charges).await;
        self.full_counters.clear();
        let Err(error) = debited else { return Ok(()) };
        let failed = error.failed_of(charges.len());
        if error.is_in_doubt() {
            let late: Vec<LateCharge> = error.late().into_iter().cloned().collect();
            self.keep_doubtful(failed.iter().map(|at| &charges[*at]), &late, error.is_lost());
            return Ok(());
        }
        for (at, late) in error.late_beside() {
            self.keep_doubtful(at.iter().map(|at| &charges[*at]), late, false);
        }
        Err((error, failed.into_iter().map(|at| charged[at]).collect()))
    }

    /// Keeps debits that the store may still apply, whose answers are late. If it answers that it has not applied them, what
    /// is charged becomes pending, unless the answer for a part of them is lost; a refund is not repeated, because time may have
    /// refilled its units by then.
    fn keep_doubtful<'c>(
        &self,
        charges: impl Iterator<Item = &'c Charge<'c>>,
        late: &[LateCharge],
        is_lost: bool,
    ) {
        let mut more: Vec<&Charge<'_>> = charges.filter(|charge| !charge.cost.is_refund()).collect();
        // Meanwhile this node may decide by its own counters.
        more.iter().for_each(|charge| self.debit_local(charge));
        if is_lost {
            more.clear();
        }
        self.pending.add_unless_charged(more.into_iter(), late);
    }

    /// Adjusts what this node has admitted and the store has not charged yet to the end of a reservation, because the
    /// store still fails.
    pub(super) fn move_local_counters(
        &self,
        records: &[ReservedCharge],
        permit: PermitId,
        wanted: Settlement,
    ) {
        for reserved in records {
            let (record, parts) = (&reserved.record, reserved.record.parts());
            let wanted = reserved.units_in_the_end(wanted);
            if record.limit.algorithm() == Algorithm::Concurrency {
                self.release_local(&[Permit { key: record.key(&parts), limit: &record.limit, id: permit }]);
            } else if let Some(more) = wanted.checked_sub(record.units).filter(|more| *more > 0) {
                let charge = record.charge(&parts, Cost::new(more));
                self.debit_local(&charge);
                self.pending.add(&charge, None);
            } else if wanted < record.units {
                let unused = record.units - wanted;
                if self.pending.take_back(&record.key(&parts).id(), unused) {
                    self.debit_local(&record.charge(&parts, Cost::refund(unused)));
                }
            }
        }
    }
}
