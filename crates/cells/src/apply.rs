//! Applies the consumption of other cells to shared limits: each entry of a batch once, whatever its size.
//!
//! A store may fail for a part of a batch: the entries that it has debited are remembered (`inbox`), and the next
//! attempt debits the others. An overdraft is kept only once the debit beside it has succeeded.
//!
//! A large batch at a slow store is applied in several attempts: each ends in time for an answer, so that the sender does
//! not take this cell for silent.

use crate::charge_codec::cost;
use crate::inbox::Receipt;
use crate::message::{Batch, Hello, Message};
use crate::overdraft::BucketTime;
use crate::owner::Transport;
use crate::regional::RegionalStore;
use crate::stats::add;
use futures_util::future::join_all;
use std::collections::{HashMap, HashSet};
use tollgate_core::{
    Charge, Clock, Cost, CounterId, CounterKey, CounterStore, Enforcement, KeyPart, Outcome, Outcomes,
    RegionMode, StoreError, TimeDelta, Timestamp,
};

/// Entries that are debited in one call of the store.
const CHUNK: usize = 1_024;
/// Counters that are read at the same time.
const MAX_PEEKS: usize = 256;

/// Charges that could not be applied, by position, and why.
type NotApplied = (HashSet<usize>, StoreError);

impl<S: CounterStore, T: Transport + Clone, C: Clock + Clone> RegionalStore<S, T, C> {
    /// Debits the consumption of another cell, once.
    pub(crate) async fn apply(&self, from: &Hello, batch: &Batch) -> Message {
        let now = self.clock.now();
        let mut application = match self.inbox.receive(&from.cell, from.incarnation, batch.sequence) {
            Receipt::New(application) => application,
            Receipt::Repeated => {
                add(&self.counts.batches_repeated, 1);
                return Message::Done(self.members.sightings(now));
            }
            Receipt::Busy => return Message::Busy(self.members.sightings(now)),
            Receipt::Refused => {
                return Message::Failed("batches of too many cells are being applied".to_owned());
            }
        };
        let Batch { counters, entries, skipped, covers, .. } = batch;
        // What follows an earlier attempt continues its report.
        let covers = covers.map(|covers| if application.applied.is_empty() { covers } else { 0 });
        let mut covers = covers.map(TimeDelta::from_micros);
        // Only what cells share is exchanged, whatever a peer's rules say.
        let is_shared: Vec<bool> =
            counters.iter().map(|counter| counter.scope.region_mode() == RegionMode::Shared).collect();
        let is_wanted = |at: &usize| {
            let is_shared = is_shared.get(entries[*at].counter as usize);
            is_shared == Some(&true) && !application.applied.contains(at)
        };
        let wanted: Vec<usize> = (0..entries.len()).filter(is_wanted).collect();
        // For as long as the sender waits for an answer.
        let most = TimeDelta::from_micros(self.members.config().silence.as_micros() / 2);
        if wanted.is_empty() {
            self.late.on_report(from, covers, &[], &[], now);
        }
        for (at, chunk) in wanted.chunks(CHUNK).enumerate() {
            let done = at * CHUNK;
            if done > 0 && self.clock.now().since(now) >= most {
                application.applied.extend(&wanted[..done]);
                return Message::Busy(self.members.sightings(self.clock.now()));
            }
            let mut parts: Vec<KeyPart<'_>> = Vec::with_capacity(chunk.len());
            let lengths: Vec<usize> =
                chunk.iter().map(|entry| entries[*entry].values.add_to(&mut parts)).collect();
            let mut rest = parts.as_slice();
            let charge = |(entry, length): (&usize, usize)| {
                let (entry, own) = (&entries[*entry], rest.split_off(..length).unwrap_or_default());
                let counter = &counters[entry.counter as usize];
                let key = CounterKey { scope: &counter.scope, parts: own };
                let charge = Charge::new(key, &counter.limit, cost(entry.units));
                Charge { enforcement: Enforcement::Independent, ..charge }
            };
            let charges: Vec<Charge<'_>> = chunk.iter().zip(lengths).map(charge).collect();
            let overshoot = self.overshoot(&charges);
            let cut = self.cut_refunds(&charges, now);
            if let Err((failed, error)) = self.debit_shared(cut.as_deref().unwrap_or(&charges)).await {
                application.applied.extend(&wanted[..done]);
                let rest = chunk.iter().enumerate().filter(|(at, _)| !failed.contains(at));
                application.applied.extend(rest.map(|(_, entry)| *entry));
                return Message::Failed(error.to_string());
            }
            let ids: Vec<CounterId> = charges.iter().map(|charge| charge.key.id()).collect();
            self.others.add(&charges, &ids, now);
            self.late.on_report(from, covers, &charges, &ids, now);
            // The next part continues the report.
            covers = covers.map(|_| TimeDelta::ZERO);
            add(&self.counts.overshoot, overshoot);
            add(&self.counts.counters_received, chunk.len() as u64);
        }
        application.finish();
        add(&self.counts.batches_received, 1);
        add(&self.counts.unknown_messages, *skipped as u64);
        Message::Done(self.members.sightings(self.clock.now()))
    }

    /// Returns the charges with the refunds of windows cut to what they take off the window's state, if there are any.
    ///
    /// A window counts to twice its limit at most. Reports can be more, because each cell admits up to the limit before it
    /// hears of the others: if a debit is cut there and its refund is not, the refund takes off what this cell has consumed,
    /// and callers who reserve units in all cells and cancel them never reach the limit. So what other cells have consumed
    /// beyond the limit takes refunds first, and a refund takes off no more than what was reported before.
    fn cut_refunds<'c>(&self, charges: &[Charge<'c>], now: Timestamp) -> Option<Vec<Charge<'c>>> {
        let is_cut = |charge: &Charge<'_>| charge.cost.is_refund() && BucketTime::of(charge).is_none();
        let mut charges = charges.iter().any(is_cut).then(|| charges.to_vec())?;
        for charge in charges.iter_mut().filter(|charge| is_cut(charge)) {
            let (reported, limit) = (self.others.reported(charge, now), charge.limit.capacity());
            let left = reported.saturating_sub(charge.cost.units());
            charge.cost = match reported.min(limit) - left.min(limit) {
                0 => Cost::PEEK,
                units => Cost::refund(units),
            };
        }
        Some(charges)
    }

    /// Debits what other cells have consumed of shared limits, however much it is.
    async fn debit_shared(&self, charges: &[Charge<'_>]) -> Result<(), NotApplied> {
        let rooms = match self.rooms(charges).await {
            Ok(rooms) => rooms,
            Err(error) => return Err(((0..charges.len()).collect(), error)),
        };
        let (mut planned, mut latest, mut reduced) = (Vec::new(), HashMap::new(), None);
        if !rooms.is_empty() || !self.overdrafts.is_empty() {
            for (at, charge) in charges.iter().enumerate() {
                let mut charge = *charge;
                if let Some((id, full_at)) = self.overdraw(&mut charge, rooms.get(&at).copied(), &latest) {
                    reduced.get_or_insert_with(|| charges.to_vec())[at] = charge;
                    planned.push((at, id, full_at));
                    latest.insert(id, full_at);
                }
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

    /// Returns the units that buckets can still be debited, by position, where a debit may be more. All are read at once:
    /// one after another, a batch of small limits takes a round trip to the store for each.
    async fn rooms(&self, charges: &[Charge<'_>]) -> Result<HashMap<usize, u64>, StoreError> {
        // A debit far below the burst cannot exceed the debt that the state has room for, unless others have before.
        let may_exceed = |charge: &Charge<'_>| {
            !charge.cost.is_refund() && charge.cost.units() > charge.limit.capacity() / 8
        };
        let now = self.clock.now();
        let is_read = |charge: &Charge<'_>| {
            may_exceed(charge) && self.overdrafts.get(charge.key.id()).is_none_or(|full_at| full_at <= now)
        };
        let wanted: Vec<(usize, BucketTime)> = charges
            .iter()
            .enumerate()
            .filter(|(_, charge)| is_read(charge))
            .filter_map(|(at, charge)| Some((at, BucketTime::of(charge)?)))
            .collect();
        let mut rooms = HashMap::with_capacity(wanted.len());
        for some in wanted.chunks(MAX_PEEKS) {
            let read = join_all(some.iter().map(|(at, time)| self.room(&charges[*at], time))).await;
            for ((at, _), room) in some.iter().zip(read) {
                rooms.insert(*at, room?);
            }
        }
        Ok(rooms)
    }

    /// Reduces a debit to what the bucket's state can represent, and returns the rest as an overdraft, to be kept once
    /// the debit has succeeded. `room` is what the bucket can be debited, if it was read; `planned` are the overdrafts of
    /// the same batch.
    fn overdraw(
        &self,
        charge: &mut Charge<'_>,
        room: Option<u64>,
        planned: &HashMap<CounterId, Timestamp>,
    ) -> Option<(CounterId, Timestamp)> {
        let units = charge.cost.units();
        let time = BucketTime::of(charge).filter(|_| !charge.cost.is_refund())?;
        let (id, now) = (charge.key.id(), self.clock.now());
        let known = planned.get(&id).copied().or_else(|| self.overdrafts.get(id));
        let known = known.filter(|full_at| *full_at > now);
        // No more than the other cells can have admitted before they knew: a wrong number denies callers only for a
        // short time.
        let config = self.members.config();
        let each = time.max_ahead + 4 * (config.silence.as_micros() + config.tick.as_micros());
        let latest = now + TimeDelta::from_micros(each.saturating_mul(self.members.other_cells() as u64 + 1));
        if let Some(full_at) = known {
            charge.cost = Cost::PEEK;
            return Some((id, (full_at + time.time(units)).min(latest)));
        }
        let room = room.filter(|room| units > *room)?;
        let full_at = now + TimeDelta::from_micros(time.max_ahead) + time.time(units - room);
        charge.cost = Cost::new(room);
        Some((id, full_at.min(latest)))
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
        let mut left = Vec::with_capacity(peeks.len());
        if !self.own.try_charge_each(&peeks, &mut left) {
            left.extend(peeks.iter().map(|peek| {
                let mut outcomes = Outcomes::default();
                let is_read = self.own.try_charge(std::slice::from_ref(peek), &mut outcomes);
                let outcome = outcomes.per_charge.first().filter(|_| is_read);
                outcome.copied().unwrap_or(Outcome { remaining: u64::MAX, ..Outcome::UNKNOWN })
            }));
        }
        let over =
            |(charge, left): (&Charge<'_>, &Outcome)| charge.cost.units().saturating_sub(left.remaining);
        debits().zip(&left).map(over).sum()
    }
}
