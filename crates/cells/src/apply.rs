//! Applies the consumption of other cells to shared limits: each entry of a batch once, whatever its size.
//!
//! A store may fail for a part of a batch: the entries that it has debited are remembered (`inbox`), and the next
//! attempt debits the others. An overdraft is kept only once the debit beside it has succeeded.
//!
//! A large batch at a slow store is applied in several attempts: each ends in time for an answer, so that the sender does
//! not take this cell for silent.
//!
//! What a counter's state cannot represent is kept beside it: of buckets as overdrafts, of windows as units that were not
//! counted (`lost_units`). Refunds shorten these first, because the state never had the units.

use crate::charge_codec::cost;
use crate::counter_locks::Locked;
use crate::inbox::Receipt;
use crate::late_debits::TakenBy;
use crate::lost_units::{counts_until, has_windows};
use crate::message::{Batch, Hello, Message};
use crate::overdraft::{BucketTime, Overdraft};
use crate::owner::Transport;
use crate::regional::RegionalStore;
use crate::reported::{Reported, Reports, add_up};
use crate::stats::add;
use crate::used_units;
use futures_util::future::join_all;
use std::collections::{HashMap, HashSet};
use tollgate_core::{
    Charge, Clock, Cost, CounterId, CounterKey, CounterStore, Enforcement, Limit, Outcome, Outcomes,
    RegionMode, StoreError, TimeDelta, Timestamp,
};

/// Entries that are debited in one call of the store.
const CHUNK: usize = 1_024;
/// Counters that are read at the same time.
const MAX_PEEKS: usize = 256;

/// Charges that could not be applied, by position, and why.
pub(crate) type NotApplied = (HashSet<usize>, StoreError);

/// A change of what is kept beside a counter's state.
enum Beyond {
    /// The bucket is full again so much later; at `otherwise` if it was not overdrawn, and never after `latest`.
    Longer { time: BucketTime, more: TimeDelta, otherwise: Timestamp, latest: Timestamp },
    /// The bucket is full again so much earlier.
    Shorter(BucketTime, TimeDelta),
    /// The bucket's state represents its debt again.
    Settled,
    /// The window did not count so many more, `most` in all.
    More { units: u64, most: u64, until: Timestamp },
    /// Of what the window did not count, so many were refunded.
    Fewer(u64),
}

/// Returns whether a report may be beyond a counter's state: a debit far below the burst cannot exceed the debt that the state
/// has room for, unless others have before.
fn is_large(charge: &Charge<'_>) -> bool {
    !charge.cost.is_refund() && charge.cost.units() > charge.limit.capacity() / 8
}

/// Returns the time after which an overdrawn bucket is full again without these units.
fn after(known: &Overdraft, time: &BucketTime, units: u64, now: Timestamp) -> TimeDelta {
    (now + known.ahead(time, now) - time.time(units)).since(now)
}

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
        let Batch { counters, entries, skipped, covers, made_at, .. } = batch;
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
        let Reports { counters: reported, parts } = add_up(batch, |at| is_wanted(&at));
        let is_any_dated = counters.iter().any(|counter| counter.limit.refunds_of().is_some());
        // For as long as the sender waits for an answer.
        let most = TimeDelta::from_micros(self.members.config().silence.as_micros() / 2);
        if reported.is_empty() {
            self.late.on_report(from, covers, &[], &[], now);
        }
        // When what is reported may have been consumed at the earliest: a sender is silent after that time.
        let oldest = now - covers.unwrap_or_default() - self.members.config().silence;
        for (at, chunk) in reported.chunks(CHUNK).enumerate() {
            let done = &reported[..at * CHUNK];
            if !done.is_empty() && self.clock.now().since(now) >= most {
                application.applied.extend(done.iter().flat_map(Reported::entries));
                return Message::Busy(self.members.sightings(self.clock.now()));
            }
            let dated = |one: &Reported| {
                let limit = &counters[entries[one.entry].counter as usize].limit;
                limit.refunds_of().map(|taken| self.refunding_here(limit, taken, *made_at, one.id, now))
            };
            let dated: Vec<Option<Limit>> = chunk.iter().filter(|_| is_any_dated).map(dated).collect();
            let all = chunk.iter().enumerate().map(|(at, one)| {
                let counter = &counters[entries[one.entry].counter as usize];
                let key = CounterKey { scope: &counter.scope, parts: &parts[one.parts.clone()] };
                let limit = dated.get(at).and_then(Option::as_ref).unwrap_or(&counter.limit);
                Charge { enforcement: Enforcement::Independent, ..Charge::new(key, limit, cost(one.units)) }
            });
            let mut charges: Vec<Charge<'_>> = all.collect();
            let ids: Vec<CounterId> = chunk.iter().map(|one| one.id).collect();
            charges.iter_mut().for_each(|charge| self.cut_old_refund(charge, oldest, now));
            let overshoot = self.overshoot(&charges);
            let _locked = self.lock(&charges, &ids).await;
            // The reports of others have taken the time.
            if done.is_empty() && self.clock.now().since(now) >= most {
                return Message::Busy(self.members.sightings(self.clock.now()));
            }
            if let Err((failed, error)) = self.debit_shared(&charges, &ids).await {
                application.applied.extend(done.iter().flat_map(Reported::entries));
                let rest = chunk.iter().enumerate().filter(|(at, _)| !failed.contains(at));
                application.applied.extend(rest.flat_map(|(_, one)| one.entries()));
                return Message::Failed(error.to_string());
            }
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

    /// Waits until no other cell's report of these counters is applied, where something may be kept beside their states.
    pub(crate) async fn lock(&self, charges: &[Charge<'_>], ids: &[CounterId]) -> Locked<'_> {
        let is_empty = self.overdrafts.is_empty() && self.lost_units.is_empty();
        let is_locked = |charge: &Charge<'_>| !is_empty || charge.cost.is_refund() || is_large(charge);
        let locked = charges.iter().zip(ids).filter(|(charge, _)| is_locked(charge)).map(|(_, id)| *id);
        self.locks.lock(locked).await
    }

    /// Returns the limit by which units of a log that another cell took at `taken`, by its clock, are refunded here: those that were
    /// logged here by then, and in the time that a report takes at most while the cell is not silent. What was reported later
    /// stays, on the safe side: the newest units instead would be what this cell and others have consumed since.
    fn refunding_here(
        &self,
        limit: &Limit,
        taken: Timestamp,
        made_at: Option<u64>,
        id: CounterId,
        now: Timestamp,
    ) -> Limit {
        // Times of a log are shifted by the key's phase.
        let phase = limit.phase(id.1);
        let age = made_at.map(|made_at| (Timestamp::from_micros(made_at) + phase).since(taken));
        let config = self.members.config();
        let known = |age| (now - age + config.silence + config.tick + config.tick).min(now) + phase;
        let logged = age.map(known);
        limit.refunding(logged)
    }

    /// Cuts a refund of a window that may have turned since it was made: it would take off what was consumed in the new one.
    /// Of that, no more is refunded than other cells have reported.
    fn cut_old_refund(&self, charge: &mut Charge<'_>, oldest: Timestamp, now: Timestamp) {
        if !charge.cost.is_refund() || charge.cost.units() >= charge.limit.refill_cost() {
            return;
        }
        if let Some((start, _)) = charge.limit.window(now, charge.key.stable_hash())
            && start > oldest
        {
            let reported = self.others.used_in_window(charge, now);
            charge.cost = Cost::refund(charge.cost.units().min(reported));
        }
    }

    /// Debits what other cells have consumed of shared limits, however much it is. `ids` are those of the charges' counters.
    pub(crate) async fn debit_shared(
        &self,
        charges: &[Charge<'_>],
        ids: &[CounterId],
    ) -> Result<(), NotApplied> {
        let rooms = match self.rooms(charges, ids).await {
            Ok(rooms) => rooms,
            Err(error) => return Err(((0..charges.len()).collect(), error)),
        };
        let (now, mut changes, mut reduced) = (self.clock.now(), Vec::new(), None);
        if !rooms.is_empty() || !self.overdrafts.is_empty() || !self.lost_units.is_empty() {
            for (at, (charge, id)) in charges.iter().zip(ids).enumerate() {
                let room = rooms.get(&at).copied();
                let change = match BucketTime::of(charge) {
                    Some(time) => self.beyond_bucket(charge, *id, &time, room, now),
                    None => self.beyond_window(charge, *id, room, now),
                };
                if let Some((cost, change)) = change {
                    reduced.get_or_insert_with(|| charges.to_vec())[at].cost = cost;
                    changes.push((at, change));
                }
            }
        }
        let charges = reduced.as_deref().unwrap_or(charges);
        let debited: Vec<usize> = (0..charges.len()).filter(|at| !charges[*at].cost.is_peek()).collect();
        let some: Vec<Charge<'_>>;
        let sent = if debited.len() == charges.len() {
            charges
        } else {
            some = debited.iter().map(|at| charges[*at]).collect();
            &some
        };
        let result = if sent.is_empty() { Ok(()) } else { self.own.debit_reported(sent).await };
        if let Err(error) = &result {
            self.keep_late(sent, error, TakenBy::OtherCell);
        }
        let failed: HashSet<usize> = match &result {
            Ok(()) => HashSet::new(),
            // The store may have debited them, or may yet, and is debited again if it says that it did not: they count as
            // applied. The sender repeats what has failed, and a connection may be lost more than once.
            Err(error) if error.is_in_doubt() => HashSet::new(),
            Err(StoreError::Partial { failed, .. }) => {
                failed.iter().filter_map(|at| debited.get(*at).copied()).collect()
            }
            Err(_) => debited.into_iter().collect(),
        };
        for (at, change) in changes {
            if !failed.contains(&at) {
                self.change_beyond(ids[at], &change, now);
            }
        }
        match result {
            Err(error) if !failed.is_empty() => Err((failed, error)),
            _ => Ok(()),
        }
    }

    /// Returns the units that counters can still be debited, by position, where a report may be beyond their states. All are
    /// read at once: one after another, a batch of small limits takes a round trip to the store for each.
    async fn rooms(
        &self,
        charges: &[Charge<'_>],
        ids: &[CounterId],
    ) -> Result<HashMap<usize, u64>, StoreError> {
        let now = self.clock.now();
        let has_room = |charge: &Charge<'_>, id: &CounterId| match BucketTime::of(charge) {
            // What comes after an overdraft is added to it.
            Some(_) => self.overdrafts.get(*id).is_none_or(|known| known.full_at <= now),
            None => has_windows(charge.limit),
        };
        let is_read = |(charge, id): (&Charge<'_>, &CounterId)| is_large(charge) && has_room(charge, id);
        let wanted: Vec<usize> =
            charges.iter().zip(ids).enumerate().filter(|(_, one)| is_read(*one)).map(|(at, _)| at).collect();
        let mut rooms = HashMap::with_capacity(wanted.len());
        for some in wanted.chunks(MAX_PEEKS) {
            let read = join_all(some.iter().map(|at| self.room(&charges[*at]))).await;
            for (at, room) in some.iter().zip(read) {
                match room {
                    Ok(room) => drop(rooms.insert(*at, room)),
                    // The deadline of a read is that of a check, and a debit has more time. A store between the two must not
                    // silence the cell: its last answer is the best that is known.
                    Err(error) if error.late().is_empty() && error != StoreError::Timeout => {
                        return Err(error);
                    }
                    Err(_) => rooms.extend(self.last_room(&charges[*at]).map(|room| (*at, room))),
                }
            }
        }
        Ok(rooms)
    }

    /// Returns what a bucket's state is debited or refunded of a report, and the change of its overdraft, to be made once
    /// that has succeeded; `None` if the report concerns the state alone. `room` is what the bucket can be debited, if it was
    /// read.
    fn beyond_bucket(
        &self,
        charge: &Charge<'_>,
        id: CounterId,
        time: &BucketTime,
        room: Option<u64>,
        now: Timestamp,
    ) -> Option<(Cost, Beyond)> {
        let units = charge.cost.units();
        let known = self.overdrafts.get(id).filter(|known| known.full_at > now);
        if charge.cost.is_refund() {
            let known = known?;
            // A reset leaves nothing.
            if units >= charge.limit.refill_cost() {
                return Some((charge.cost, Beyond::Settled));
            }
            // Of what the state does not have first, and the rest of what it has.
            let beyond = known.units(time, now);
            return Some(match beyond.checked_sub(units) {
                None | Some(0) => (Cost::refund(units - beyond), Beyond::Settled),
                Some(left) if time.is_held(after(&known, time, units, now)) => {
                    (Cost::new(left), Beyond::Settled)
                }
                Some(_) => (Cost::PEEK, Beyond::Shorter(*time, time.time(units))),
            });
        }
        // No more than the other cells can have admitted before they knew: a wrong number denies callers only for a
        // short time.
        let config = self.members.config();
        let each = time.max_ahead + 4 * (config.silence.as_micros() + config.tick.as_micros());
        let latest = now + TimeDelta::from_micros(each.saturating_mul(self.members.other_cells() as u64 + 1));
        if known.is_some() {
            let more = time.time(units);
            return Some((Cost::PEEK, Beyond::Longer { time: *time, more, otherwise: now + more, latest }));
        }
        let room = room.filter(|room| units > *room)?;
        let more = time.time(units - room);
        let otherwise = now + TimeDelta::from_micros(time.max_ahead) + more;
        Some((Cost::new(room), Beyond::Longer { time: *time, more, otherwise, latest }))
    }

    /// The same for a window, whose units beyond its state are remembered until it ends.
    fn beyond_window(
        &self,
        charge: &Charge<'_>,
        id: CounterId,
        room: Option<u64>,
        now: Timestamp,
    ) -> Option<(Cost, Beyond)> {
        let (units, lost) = (charge.cost.units(), self.lost_units.get(id, now));
        if charge.cost.is_refund() {
            // A reset leaves nothing.
            let is_reset = units >= charge.limit.refill_cost();
            let taken = if is_reset { 0 } else { lost.min(units) };
            return (lost > 0)
                .then(|| (Cost::refund(units - taken), Beyond::Fewer(if is_reset { lost } else { taken })));
        }
        let room = room.or((lost > 0).then_some(0)).filter(|room| units > *room)?;
        let most = charge.limit.refill_cost().saturating_mul(self.members.other_cells() as u64 + 1);
        let until = counts_until(charge, id, now);
        Some((Cost::new(room), Beyond::More { units: units - room, most, until }))
    }

    fn change_beyond(&self, id: CounterId, change: &Beyond, now: Timestamp) {
        match *change {
            Beyond::Longer { time, more, otherwise, latest } => {
                self.overdrafts.extend(id, &time, more, (otherwise, latest), now);
            }
            Beyond::Shorter(time, less) => self.overdrafts.reduce(id, &time, less),
            Beyond::Settled => drop(self.overdrafts.remove(id)),
            Beyond::More { units, most, until } => self.lost_units.add(id, units, most, until, now),
            Beyond::Fewer(units) => self.lost_units.take(id, units),
        }
    }

    /// Returns the units that a counter can still be debited.
    pub(crate) async fn room(&self, charge: &Charge<'_>) -> Result<u64, StoreError> {
        Ok(used_units::read(&self.own, charge).await?.room)
    }

    /// Returns the units that a counter could still be debited by the store's last answer about it. That is no basis for a
    /// refund.
    fn last_room(&self, charge: &Charge<'_>) -> Option<u64> {
        if charge.cost.is_refund() {
            return None;
        }
        let known = self.own.last_known(charge);
        let ahead =
            known.map_or(0, |known| known.reset_after.as_micros().saturating_sub(known.age.as_micros()));
        let used = known.filter(|_| ahead > 0).map_or(0, |known| known.used);
        Some(match BucketTime::of(charge) {
            Some(time) => time.room(TimeDelta::from_micros(ahead)),
            None => (2 * charge.limit.capacity()).saturating_sub(used),
        })
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
        let over = |(charge, left): (&Charge<'_>, &Outcome)| {
            // No counter holds more than twice its limit, whatever was reported.
            let units = charge.cost.units().min(charge.limit.capacity().saturating_mul(2));
            units.saturating_sub(left.remaining) / charge.limit.parts_of_unit().max(1)
        };
        debits().zip(&left).map(over).fold(0, u64::saturating_add)
    }
}
