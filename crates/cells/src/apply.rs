//! Applies the consumption of other cells to shared limits: each entry of a batch once, whatever its size.
//!
//! A store may fail for a part of a batch: the entries that it has debited are remembered (`inbox`), and the next
//! attempt debits the others. An overdraft is kept only once the debit beside it has succeeded.

use crate::charge_codec::{SentCounter, cost};
use crate::inbox::Receipt;
use crate::message::{Batch, BatchEntry, Hello, Message};
use crate::overdraft::BucketTime;
use crate::owner::Transport;
use crate::regional::RegionalStore;
use crate::stats::add;
use std::collections::{HashMap, HashSet};
use tollgate_core::{
    Charge, Clock, Cost, CounterId, CounterKey, CounterStore, Enforcement, KeyPart, Outcome, Outcomes,
    OwnedKeyPart, RegionMode, StoreError, TimeDelta, Timestamp,
};

/// Charges that could not be applied, by position, and why.
type NotApplied = (HashSet<usize>, StoreError);

impl<S: CounterStore, T: Transport + Clone, C: Clock + Clone> RegionalStore<S, T, C> {
    /// Debits the consumption of another cell, once.
    pub(crate) async fn apply(&self, from: &Hello, batch: Batch) -> Message {
        let now = self.clock.now();
        let mut application = match self.inbox.receive(&from.cell, from.incarnation, batch.sequence) {
            Receipt::New(application) => application,
            Receipt::Repeated => {
                add(&self.counts.batches_repeated, 1);
                return Message::Done(self.members.sightings(now));
            }
            Receipt::Busy => return Message::Failed("a batch is being applied".to_owned()),
            Receipt::Refused => return Message::Failed("too many cells".to_owned()),
        };
        let Batch { counters, entries, skipped, covers, .. } = batch;
        // Only what cells share is exchanged, whatever a peer's rules say.
        let wanted: Vec<(usize, &BatchEntry, &SentCounter)> = entries
            .iter()
            .enumerate()
            .filter(|(at, _)| !application.applied.contains(at))
            .filter_map(|(at, entry)| Some((at, entry, counters.get(entry.counter as usize)?)))
            .filter(|(_, _, counter)| counter.scope.region_mode() == RegionMode::Shared)
            .collect();
        let parts: Vec<KeyPart<'_>> =
            wanted.iter().flat_map(|(_, entry, _)| entry.parts.iter().map(OwnedKeyPart::as_part)).collect();
        let mut rest = parts.as_slice();
        let mut charges = Vec::with_capacity(wanted.len());
        for (_, entry, counter) in &wanted {
            let (own, others) = rest.split_at(entry.parts.len());
            rest = others;
            let key = CounterKey { scope: &counter.scope, parts: own };
            let charge = Charge::new(key, &counter.limit, cost(entry.units));
            charges.push(Charge { enforcement: Enforcement::Independent, ..charge });
        }
        let overshoot = self.overshoot(&charges);
        if let Err((failed, error)) = self.debit_shared(&charges).await {
            let applied = (0..charges.len()).filter(|at| !failed.contains(at)).map(|at| wanted[at].0);
            application.applied.extend(applied);
            return Message::Failed(error.to_string());
        }
        application.finish();
        let ids: Vec<CounterId> = charges.iter().map(|charge| charge.key.id()).collect();
        self.others.add(&charges, &ids, now);
        self.late.on_report(from, covers.map(TimeDelta::from_micros), &charges, &ids, now);
        add(&self.counts.batches_received, 1);
        add(&self.counts.unknown_messages, skipped as u64);
        add(&self.counts.counters_received, charges.len() as u64);
        add(&self.counts.overshoot, overshoot);
        Message::Done(self.members.sightings(now))
    }

    /// Debits what other cells have consumed of shared limits, however much it is.
    async fn debit_shared(&self, charges: &[Charge<'_>]) -> Result<(), NotApplied> {
        let (mut planned, mut latest, mut reduced) = (Vec::new(), HashMap::new(), None);
        for (at, charge) in charges.iter().enumerate() {
            if !self.may_overdraw(charge, &latest) {
                continue;
            }
            let mut charge = *charge;
            match self.overdraw(&mut charge, &latest).await {
                Ok(None) => {}
                Ok(Some((id, full_at))) => {
                    reduced.get_or_insert_with(|| charges.to_vec())[at] = charge;
                    planned.push((at, id, full_at));
                    latest.insert(id, full_at);
                }
                Err(error) => return Err(((0..charges.len()).collect(), error)),
            }
        }
        let charges = reduced.as_deref().unwrap_or(charges);
        let debited: Vec<usize> = (0..charges.len()).filter(|at| !charges[*at].cost.is_peek()).collect();
        let result = if debited.is_empty() {
            Ok(())
        } else if debited.len() == charges.len() {
            self.own.debit_reported(charges).await
        } else {
            let some: Vec<Charge<'_>> = debited.iter().map(|at| charges[*at]).collect();
            self.own.debit_reported(&some).await
        };
        let failed: HashSet<usize> = match &result {
            Ok(()) => HashSet::new(),
            // The store may debit them yet, and undoes that unless the charge is kept: it counts as applied.
            Err(error) if !error.late().is_empty() => {
                error.late().into_iter().for_each(|late| late.keep(|_| {}));
                HashSet::new()
            }
            Err(StoreError::Partial { failed, .. }) => {
                failed.iter().filter_map(|at| debited.get(*at).copied()).collect()
            }
            Err(_) => debited.into_iter().collect(),
        };
        for (at, id, full_at) in planned {
            if !failed.contains(&at) {
                self.overdrafts.set(id, full_at);
            }
        }
        match result {
            Err(error) if !failed.is_empty() => Err((failed, error)),
            _ => Ok(()),
        }
    }

    /// Returns whether a debit may exceed what a bucket's state can represent: one far below the burst cannot, unless others
    /// have before.
    fn may_overdraw(&self, charge: &Charge<'_>, planned: &HashMap<CounterId, Timestamp>) -> bool {
        charge.cost.units() > charge.limit.capacity() / 8
            || !planned.is_empty()
            || !self.overdrafts.is_empty()
    }

    /// Reduces a debit to what the bucket's state can represent, and returns the rest as an overdraft, to be kept once
    /// the debit has succeeded. `planned` are those of the same batch.
    async fn overdraw(
        &self,
        charge: &mut Charge<'_>,
        planned: &HashMap<CounterId, Timestamp>,
    ) -> Result<Option<(CounterId, Timestamp)>, StoreError> {
        let units = charge.cost.units();
        let Some(time) = BucketTime::of(charge).filter(|_| !charge.cost.is_refund()) else { return Ok(None) };
        let (id, now) = (charge.key.id(), self.clock.now());
        let known = planned.get(&id).copied().or_else(|| self.overdrafts.get(id));
        let known = known.filter(|full_at| *full_at > now);
        if known.is_none() && units <= charge.limit.capacity() / 8 {
            return Ok(None);
        }
        // No more than the other cells can have admitted before they knew: a wrong number denies callers only for a
        // short time.
        let config = self.members.config();
        let each = time.max_ahead + 4 * (config.silence.as_micros() + config.tick.as_micros());
        let latest = now + TimeDelta::from_micros(each.saturating_mul(self.members.other_cells() as u64 + 1));
        if let Some(full_at) = known {
            charge.cost = Cost::PEEK;
            return Ok(Some((id, (full_at + time.time(units)).min(latest))));
        }
        let room = self.room(charge, &time).await?;
        if units <= room {
            return Ok(None);
        }
        let full_at = now + TimeDelta::from_micros(time.max_ahead) + time.time(units - room);
        charge.cost = Cost::new(room);
        Ok(Some((id, full_at.min(latest))))
    }

    /// Returns the units that a bucket can still be debited.
    pub(crate) async fn room(&self, charge: &Charge<'_>, time: &BucketTime) -> Result<u64, StoreError> {
        let peek = Charge { cost: Cost::PEEK, enforcement: Enforcement::Independent, ..*charge };
        let mut outcomes = Outcomes::default();
        if !self.own.try_charge(&[peek], &mut outcomes) {
            outcomes = self.own.charge(&[peek]).await?;
        }
        let ahead = outcomes.per_charge.first().map_or(TimeDelta::ZERO, |outcome| outcome.reset_after);
        Ok(time.room(ahead))
    }

    /// Returns the units that were admitted elsewhere beyond what was left here, where counters can be read without
    /// waiting.
    fn overshoot(&self, charges: &[Charge<'_>]) -> u64 {
        let debits = || charges.iter().filter(|charge| !charge.cost.is_refund());
        let peeks: Vec<Charge<'_>> = debits().map(|charge| Charge { cost: Cost::PEEK, ..*charge }).collect();
        let mut all = Vec::with_capacity(peeks.len());
        if self.own.try_charge_each(&peeks, &mut all) {
            let over =
                |(charge, left): (&Charge<'_>, &Outcome)| charge.cost.units().saturating_sub(left.remaining);
            return debits().zip(&all).map(over).sum();
        }
        let over = debits().zip(&peeks).map(|(charge, peek)| {
            let mut outcomes = Outcomes::default();
            let is_read = self.own.try_charge(std::slice::from_ref(peek), &mut outcomes);
            let left = outcomes.per_charge.first().filter(|_| is_read).map(|outcome| outcome.remaining);
            left.map_or(0, |left| charge.cost.units().saturating_sub(left))
        });
        over.sum()
    }
}
