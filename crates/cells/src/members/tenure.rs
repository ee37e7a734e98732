//! Tenure: since when this cell knows what has been counted of what a hash gives it.
//!
//! It knows all that it has decided since it joined the others, until another may have decided in its place (`majority`). Of a
//! counter that another cell would decide if it were alive, it knows what was counted since that cell may have been alive last.
//!
//! **Its record.** The nodes of a cell share its counters, and so do the processes that follow each other. What one has decided
//! without a break, the others know too: it is in a record in their store. Each of them extends it by the time up to which its
//! own majority shows that no other cell has decided. A process whose majority answers at most 3/4 T after that time takes the
//! tenure over, by the same argument by which one goes on that stood still. So a node that joins others, or replaces one at
//! once, knows what they knew, also which other cells are alive; one that comes back after others decided for it does not trust
//! the counters that are in its store still.
//!
//! The record has the store's time. The clocks of two processes are never compared: a call shows by how much, at least and at
//! most, the store's clock is ahead of this process's, and each time is converted by that of the two by which less is known. A
//! write that the store carries out late extends nothing: it has the time of what it says. A record whose time has not come yet
//! was written before the store's clock was set back: it counts as none. If the record is gone, so are the counters: then the
//! tenure begins anew, and so does the record's number, by which the other nodes see that too.

use super::majority::score;
use super::{Members, UNREACHED};
use crate::message::MAX_CELLS;
use crate::wire::{Reader, Writer};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use tollgate_core::{CounterKey, TimeDelta, Timestamp};

/// Longest name of a cell, and of a region, in a record.
const MAX_NAME: usize = 512;
/// By how much a store's clock may be set back without that being noticed: a failover to a server whose clock is behind.
const SET_BACK: TimeDelta = TimeDelta::from_millis(250);
/// First byte of a record.
const VERSION: u8 = 1;

/// How far the store's clock is ahead of this process's, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StoreClock {
    least: i64,
    most: i64,
}

impl StoreClock {
    /// Returns what a call tells that was sent and received at these times, and took place at `at` by the store's clock.
    pub(crate) fn new(sent: Timestamp, received: Timestamp, at: Timestamp) -> Self {
        let ahead = |here: Timestamp| at.as_micros().wrapping_sub(here.as_micros()).cast_signed();
        Self { least: ahead(received), most: ahead(sent) }
    }

    fn first_there(self, here: Timestamp) -> Timestamp {
        Timestamp::from_micros(here.as_micros().saturating_add_signed(self.least))
    }

    fn last_there(self, here: Timestamp) -> Timestamp {
        Timestamp::from_micros(here.as_micros().saturating_add_signed(self.most))
    }

    fn first_here(self, there: Timestamp) -> Timestamp {
        Timestamp::from_micros(there.as_micros().saturating_add_signed(self.most.saturating_neg()))
    }

    fn last_here(self, there: Timestamp) -> Timestamp {
        Timestamp::from_micros(there.as_micros().saturating_add_signed(self.least.saturating_neg()))
    }
}

/// A moment: by this process's clock, and by the store's once the record has it.
#[derive(Clone, Copy, Debug)]
struct Moment {
    here: Timestamp,
    there: Option<Timestamp>,
}

impl Moment {
    const fn new(here: Timestamp) -> Self {
        Self { here, there: None }
    }

    fn of_record(there: Timestamp, clock: StoreClock) -> Self {
        Self { here: clock.last_here(there), there: Some(there) }
    }

    /// Returns it as it is in the record: always the same, or it would grow by each exchange.
    fn there(&mut self, clock: StoreClock) -> Timestamp {
        *self.there.get_or_insert_with(|| clock.last_there(self.here))
    }

    /// Raises it to a time of the record.
    fn raise(&mut self, there: Timestamp, clock: StoreClock) {
        if there > self.there(clock) {
            *self = Self::of_record(there, clock);
        }
    }
}

/// Another cell, which was alive during the tenure.
#[derive(Clone, Debug)]
struct Other {
    name: String,
    region: String,
    /// Until when it may decide: 2 T after the last sign of it.
    alive: Moment,
}

/// What a process knows of its cell's tenure.
#[derive(Debug, Default)]
pub(super) struct Tenure {
    /// Since when it lasts; `None` before this cell has joined, or taken it over.
    since: Option<Moment>,
    others: Vec<Other>,
    /// What the record said last.
    read: Option<(TenureRecord, StoreClock)>,
    /// The number of the record.
    life: Option<u64>,
}

/// What a store has for a record.
pub(crate) enum Kept {
    Nothing,
    /// Something that cannot be right.
    Wrong,
    Record(TenureRecord),
}

impl Tenure {
    /// Forgets what may be wrong because another cell may have decided.
    pub(super) fn end(&mut self) {
        (self.since, self.others) = (None, Vec::new());
    }

    /// Takes over what the record said last, if no other cell can have decided since: a majority answered what was sent at
    /// `heard_at`.
    pub(super) fn take_over(&mut self, heard_at: Timestamp, silence: TimeDelta) {
        let Some((record, clock)) = self.read.as_ref().filter(|_| self.since.is_none()) else { return };
        let most = TimeDelta::from_micros(silence.as_micros() / 4 * 3);
        if heard_at.since(clock.first_here(record.until)) > most {
            return;
        }
        let last = clock.last_here(record.until) + TimeDelta::from_micros(2 * silence.as_micros());
        let other = |(name, region, alive): &(String, String, Timestamp)| {
            let known = Moment::of_record(*alive, *clock);
            // The one that wrote the record may have heard of it until its own end.
            let is_alive = *alive > record.until;
            let alive = if is_alive && last > known.here { Moment::new(last) } else { known };
            Other { name: name.clone(), region: region.clone(), alive }
        };
        self.others = record.others.iter().map(other).collect();
        self.since = Some(Moment::of_record(record.since, *clock));
    }

    /// Adds what another node of the cell knows to a tenure that this one has too.
    fn join(&mut self, record: &TenureRecord, clock: StoreClock) {
        let Some(since) = &mut self.since else { return };
        // The other one has lasted until after this one began: together they are one.
        if clock.first_here(record.until) >= since.here && record.since < since.there(clock) {
            let known = Moment::of_record(record.since, clock);
            *since = Moment { here: known.here.min(since.here), ..known };
        }
        for (name, region, alive) in &record.others {
            match self.others.iter_mut().find(|other| other.name == *name) {
                Some(other) => other.alive.raise(*alive, clock),
                None => self.others.push(Other {
                    name: name.clone(),
                    region: region.clone(),
                    alive: Moment::of_record(*alive, clock),
                }),
            }
        }
        self.shorten();
    }

    /// Forgets what the moments of the tenure are by the store's clock: that was set.
    fn forget_clock(&mut self) {
        let moments = self.others.iter_mut().map(|other| &mut other.alive).chain(&mut self.since);
        moments.for_each(|moment| moment.there = None);
    }

    /// Begins the tenure anew, if there is one: what was counted before is lost.
    fn restart(&mut self, now: Timestamp) {
        self.since = self.since.map(|_| Moment::new(now));
    }

    /// Begins a tenure unless there is one.
    pub(super) fn begin(&mut self, now: Timestamp) {
        self.since.get_or_insert(Moment::new(now));
    }

    /// Records that another cell may decide until then.
    pub(super) fn see(&mut self, name: &str, region: &str, until: Timestamp) {
        if self.since.is_none() {
            return;
        }
        match self.others.iter_mut().find(|other| other.name == name) {
            Some(other) if other.alive.here < until => other.alive = Moment::new(until),
            Some(_) => {}
            None => {
                let (name, region) = (name.to_owned(), region.to_owned());
                self.others.push(Other { name, region, alive: Moment::new(until) });
            }
        }
    }

    /// Returns the cells that may decide at `now`, as this node or others of its cell have heard.
    pub(super) fn alive(&self, now: Timestamp) -> impl Iterator<Item = &str> {
        self.others.iter().filter(move |other| other.alive.here > now).map(|other| other.name.as_str())
    }

    /// Bounds the number of other cells: without one of them less is known.
    pub(super) fn shorten(&mut self) {
        while self.others.len() > MAX_CELLS {
            let oldest = (0..self.others.len()).min_by_key(|at| self.others[*at].alive.here);
            let Some(oldest) = oldest.map(|at| self.others.swap_remove(at)) else { return };
            if self.since.is_some_and(|since| since.here < oldest.alive.here) {
                self.since = Some(oldest.alive);
            }
        }
    }

    /// Returns since when what was counted is known, of a counter that a hash gives to the cell with the best score in `region`, or
    /// anywhere.
    fn known_since(&self, own: &str, key: u64, region: Option<&str>) -> Option<Timestamp> {
        let best = score(own, key);
        let would_decide = |other: &&Other| {
            region.is_none_or(|region| other.region == region) && score(&other.name, key) > best
        };
        let others = self.others.iter().filter(would_decide).map(|other| other.alive.here);
        self.since.map(|since| others.fold(since.here, Timestamp::max))
    }
}

/// The tenure of a cell, as its nodes share it, by their store's clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TenureRecord {
    /// A number that changes when a store has lost its record, and so its counters.
    pub(crate) life: u64,
    /// Name of the cell.
    pub(crate) cell: String,
    /// Since when it lasts.
    pub(crate) since: Timestamp,
    /// Until when no other cell has decided in its place.
    pub(crate) until: Timestamp,
    /// Names and regions of other cells, and until when each may decide.
    pub(crate) others: Vec<(String, String, Timestamp)>,
}

impl TenureRecord {
    /// Encodes it.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Writer::default();
        out.byte(VERSION);
        out.number(self.life);
        out.text(&self.cell);
        out.number(self.since.as_micros());
        out.number(self.until.as_micros());
        out.number(self.others.len() as u64);
        for (name, region, alive) in &self.others {
            out.text(name);
            out.text(region);
            out.number(alive.as_micros());
        }
        out.0
    }

    /// Reads what a store had at that time by its clock.
    pub(crate) fn read(bytes: Option<&[u8]>, at: Timestamp) -> Kept {
        let Some(bytes) = bytes else { return Kept::Nothing };
        // Otherwise the store's clock was set back.
        Self::decode(bytes).filter(|read| read.until <= at + SET_BACK).map_or(Kept::Wrong, Kept::Record)
    }

    /// Decodes it; `None` if it is none that this version reads.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        (from.byte()? == VERSION).then_some(())?;
        let (life, cell) = (from.number()?, from.text(MAX_NAME)?.to_owned());
        let (since, until) = (Timestamp::from_micros(from.number()?), Timestamp::from_micros(from.number()?));
        let count = from.count(MAX_CELLS)?;
        let mut other = || {
            let (name, region) = (from.text(MAX_NAME)?.to_owned(), from.text(MAX_NAME)?.to_owned());
            Some((name, region, Timestamp::from_micros(from.number()?)))
        };
        let others = (0..count).map(|_| other()).collect::<Option<Vec<_>>>()?;
        Some(Self { life, cell, since, until, others })
    }

    /// Returns whether this one says more than `kept` by more than `least`.
    fn adds_to(&self, kept: &Self, least: TimeDelta) -> bool {
        let is_later = |own: Timestamp, kept: Timestamp| own > kept + least;
        let adds = |(name, _, alive): &(String, String, Timestamp)| {
            let known = kept.others.iter().find(|(known, ..)| known == name);
            known.is_none_or(|(.., known)| is_later(*alive, *known))
        };
        (self.life, &self.cell) != (kept.life, &kept.cell)
            || self.since != kept.since
            || is_later(self.until, kept.until)
            || self.others.iter().any(adds)
    }
}

impl Members {
    /// Returns whether this cell's tenure has a record: a hash gives it counters, and they outlive this process.
    pub(crate) fn shares_tenure(&self) -> bool {
        self.config.keeps_counters && !self.config.learns_peers && !self.config.peers.is_empty()
    }

    /// Takes note of the record of this cell's tenure. A store that has lost it has lost its counters: what was counted is known
    /// from now on.
    pub(crate) fn on_tenure(&self, kept: Kept, clock: StoreClock, now: Timestamp) {
        let mut tenure = self.tenure.lock().unwrap_or_else(PoisonError::into_inner);
        let tenure = &mut *tenure;
        let most = i64::try_from(self.config.silence.as_micros() / 8).unwrap_or(i64::MAX);
        let was_set = tenure.read.as_ref().is_some_and(|(_, before)| {
            clock.least > before.most.saturating_add(most) || clock.most < before.least.saturating_sub(most)
        });
        let record = match kept {
            Kept::Record(record) => {
                let is_other = tenure.life.is_some_and(|life| life != record.life);
                let last = tenure.read.as_ref().filter(|_| !was_set).map(|(last, _)| last.until);
                // An old copy was restored.
                let is_old = last.is_some_and(|last| record.until + self.config.silence < last);
                if is_other || is_old {
                    tenure.restart(now);
                }
                tenure.life = Some(record.life).filter(|_| !is_old);
                Some(record)
            }
            Kept::Wrong => None,
            Kept::Nothing => {
                if tenure.life.take().is_some() {
                    tenure.restart(now);
                }
                None
            }
        };
        if was_set || record.is_none() {
            tenure.forget_clock();
        }
        if let Some(record) = &record {
            tenure.join(record, clock);
        }
        tenure.read = record.map(|record| (record, clock));
    }

    /// Records that the store has this record now.
    pub(crate) fn on_tenure_written(&self, record: &TenureRecord) {
        self.tenure.lock().unwrap_or_else(PoisonError::into_inner).life = Some(record.life);
    }

    /// Returns since when this cell knows what was counted of all that a hash gives it while all others are alive.
    #[must_use]
    pub fn known_from(&self) -> Option<Timestamp> {
        self.tenure.lock().unwrap_or_else(PoisonError::into_inner).since.map(|since| since.here)
    }

    /// Returns the record to be written instead of the one that was read last, if it says more. A node that is left out extends
    /// nothing: its majority does not show that no other cell decides.
    pub(crate) fn tenure_to_write(&self, clock: StoreClock, now: Timestamp) -> Option<TenureRecord> {
        if !self.has_majority(now) || self.is_left_out() {
            return None;
        }
        let mut tenure = self.tenure.lock().unwrap_or_else(PoisonError::into_inner);
        let tenure = &mut *tenure;
        let since = tenure.since.as_mut()?.there(clock);
        // Who may have decided before the tenure only is of no account.
        tenure.others.retain_mut(|other| other.alive.there(clock) > since);
        let others = tenure.others.iter_mut();
        let others = others.map(|other| (other.name.clone(), other.region.clone(), other.alive.there(clock)));
        let until = clock.first_there(self.majority_heard_at(now));
        let kept = tenure.read.as_ref().map(|(kept, _)| kept).filter(|kept| kept.cell == self.config.cell);
        let record = TenureRecord {
            life: tenure.life.unwrap_or(self.incarnation ^ now.as_micros()),
            cell: self.config.cell.clone(),
            since,
            until: kept.map_or(until, |kept| kept.until.max(until)),
            others: others.collect(),
        };
        kept.is_none_or(|kept| record.adds_to(kept, self.config.tick)).then_some(record)
    }

    /// Returns since when this cell knows what was counted: before, another cell may have owned the counter, or this
    /// one has lost it. `None` if it knows everything.
    pub(crate) fn known_since(&self, key: &CounterKey<'_>, now: Timestamp) -> Option<Known> {
        if self.has_one_owner(key) {
            return (!self.config.keeps_counters)
                .then_some(Known { since: self.started_at, has_moved: false });
        }
        let (hash, region) = (super::majority::key_hash(key), self.owning_region(key));
        let tenure = self.tenure.lock().unwrap_or_else(PoisonError::into_inner);
        let since = tenure.known_since(&self.config.cell, hash, region).unwrap_or(now);
        // The counters of a new process in memory begin with it.
        let has_moved =
            self.config.keeps_counters || since.as_micros() > self.first_joined_at.load(Ordering::Relaxed);
        Some(Known { since, has_moved })
    }

    /// Returns the region of a living cell: of a peer with this index, or of one that was not reached.
    pub(super) fn region_of_living<'r>(
        roster: &'r crate::roster::Roster,
        name: &'r str,
        peer: usize,
    ) -> &'r str {
        match peer {
            UNREACHED => name.split('/').next().unwrap_or(name),
            at => roster.region(at),
        }
    }
}

/// Since when a cell knows what was counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    /// Since then.
    pub(crate) since: Timestamp,
    /// Whether another cell may have decided before: what this cell's store has of that time is not all.
    pub(crate) has_moved: bool,
}

#[cfg(test)]
mod tests;
