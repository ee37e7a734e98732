//! Outbox: consumption that one peer has not acknowledged. A pure state machine: consumption and acknowledgments go in,
//! batches come out.
//!
//! One batch is in flight at a time, with a number. If the link breaks before the acknowledgement, the same batch is
//! sent again under the same number, and the receiver applies it once (`inbox`); so nothing is lost, and nothing is
//! counted twice unless the receiver forgot its numbers in between, which is one batch, on the safe side.
//!
//! While the peer is silent, both sides decide by their shares (`regional`), and what is consumed then was never over
//! the limit. It is kept as the state of a counter, which forgets what time has restored; the rest is owed in full. So
//! a healed link debits what still counts, and not an hour of consumption at once. A bucket is restored at the rate of this
//! side's share meanwhile: at the whole rate, each side would forget what the bucket has restored of the other's.

use crate::charge_codec::SentCounter;
use crate::key_values::KeyValues;
use crate::ledger::{BYTES_EACH, Consumed, LimitNumbers, limit_numbers};
use crate::members::WHOLE;
use crate::message::{Batch, BatchEntry, MAX_BATCH, MAX_MESSAGE};
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::sync::Arc;
use tollgate_core::{Cost, CounterKey, Limit, LimitParams, PermitId, State, TimeDelta, Timestamp};

/// Bytes that a batch may take: half of a message, so that an estimate suffices.
const MAX_BYTES: usize = MAX_MESSAGE / 2;
/// Scopes and limits in one batch.
const MAX_LIMITS: usize = 4_000;
/// Number of counters compared when one must give way.
const SAMPLE: usize = 8;

#[derive(Debug)]
struct Pending {
    /// Units owed in full.
    units: i64,
    /// What was consumed while the peer was silent.
    shared_out: Option<Box<State>>,
    /// By how much the windows of this key are shifted: `jitter`.
    phase: TimeDelta,
    /// Time of the last consumption: a counter whose state has run out since is not reported.
    last_at: Timestamp,
}

impl Pending {
    /// Returns the units that count at `now`.
    fn total(&self, limit: &Limit, now: Now) -> i64 {
        let now = now.of(limit) + self.phase;
        let silent = self.shared_out.as_deref().map_or(0, |state| used(limit, state, now));
        self.units.saturating_add(i64::try_from(silent).unwrap_or(i64::MAX))
    }

    /// Takes back units while the peer is silent: of what was not reported to it, and no more. A refund of what time
    /// has restored since would be new units to a peer that hears of it later. `limit` may count parts of a unit.
    fn give_back(&mut self, limit: &Limit, units: u64, now: Now) {
        let (mut rest, now) = (units, now.of(limit) + self.phase);
        if let Some(state) = self.shared_out.as_deref_mut() {
            let taken = used(limit, state, now).min(rest);
            limit.step(state, now, Cost::refund(taken));
            rest -= taken;
        }
        let owed = u64::try_from(self.units).unwrap_or(0).min(rest / limit.parts_of_unit().max(1));
        self.units -= i64::try_from(owed).unwrap_or(0);
    }
}

/// The time.
#[derive(Clone, Copy, Debug)]
struct Now {
    real: Timestamp,
    /// That of buckets. While the peer is silent, it passes at the rate of this side's share.
    bucket: Timestamp,
}

impl Now {
    fn of(self, limit: &Limit) -> Timestamp {
        match limit.params() {
            LimitParams::Bucket { .. } => self.bucket,
            _ => self.real,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Name {
    scope: u64,
    limit: LimitNumbers,
    values: KeyValues,
}

/// Consumption of one tick, shared by the outboxes of all peers.
#[derive(Debug)]
struct Fresh {
    consumed: Arc<Vec<Consumed>>,
    /// Number of them that are in batches.
    sent: usize,
    added_at: Timestamp,
}

impl Fresh {
    fn left(&self) -> &[Consumed] {
        self.consumed.get(self.sent..).unwrap_or_default()
    }
}

/// Consumption that a peer has not acknowledged.
#[derive(Debug)]
pub struct Outbox {
    /// Consumption of the last tick, if nothing was left of the ticks before it: it is sent as it is.
    fresh: Option<Fresh>,
    pending: HashMap<Name, (Arc<SentCounter>, Pending), RandomState>,
    most: usize,
    /// The time at the last tick.
    last: Now,
    /// How fast the time of buckets passes since then, in millionths.
    pace: u64,
    /// Bytes of the values that are waiting.
    bytes: usize,
    sequence: u64,
    /// The batch in flight, until when consumption is in it, and when it was made.
    in_flight: Option<(Arc<Batch>, Timestamp, Timestamp)>,
    /// Memory of the last batch, which the next uses again.
    spare: Vec<BatchEntry>,
    /// Until when consumption has been added.
    filled_until: Timestamp,
    /// Until when consumption was in a batch the last time that none was left behind.
    drained_until: Timestamp,
    /// Whether the last batch left some behind, so that the next continues it.
    is_continued: bool,
    /// Until when the peer knows all consumption.
    acked_until: Timestamp,
    dropped: u64,
    /// Batches that the peer did not apply.
    refused: u64,
}

impl Outbox {
    /// Creates an outbox of at most this many counters, of 512 bytes on average; the peer knows everything until `now`. Batches are numbered from
    /// the time on, so that a peer that was forgotten and is there again never takes a new batch for one that it has had.
    #[must_use]
    pub fn new(most: usize, now: Timestamp) -> Self {
        Self {
            fresh: None,
            pending: HashMap::default(),
            most: most.max(1),
            last: Now { real: now, bucket: now },
            pace: WHOLE,
            bytes: 0,
            sequence: now.as_micros(),
            in_flight: None,
            spare: Vec::new(),
            filled_until: now,
            drained_until: now,
            is_continued: false,
            acked_until: now,
            dropped: 0,
            refused: 0,
        }
    }

    /// Says that this cell decides by this share, in millionths, since the last tick and until the next.
    pub fn set_share(&mut self, share: u64, now: Timestamp) {
        self.pace = share.min(WHOLE);
        self.last = self.at(now);
    }

    fn at(&self, now: Timestamp) -> Now {
        let passed = u128::from(now.since(self.last.real).as_micros()) * u128::from(self.pace);
        let passed = u64::try_from(passed / u128::from(WHOLE)).unwrap_or(u64::MAX);
        Now { real: now, bucket: self.last.bucket + TimeDelta::from_micros(passed) }
    }

    /// Adds the consumption of a tick until `now`, which the ledger has added up. `is_silent` is whether it was decided by this
    /// cell's share.
    pub fn add_tick(&mut self, consumed: &Arc<Vec<Consumed>>, is_silent: bool, now: Timestamp) {
        let bytes = || consumed.iter().map(|one| one.values.len()).sum::<usize>();
        let is_next = !is_silent && self.fresh.is_none() && self.pending.is_empty();
        if is_next && consumed.len() <= self.most && bytes() <= self.max_bytes() {
            let consumed = Arc::clone(consumed);
            self.fresh =
                Some(Fresh { consumed, sent: 0, added_at: now }).filter(|fresh| !fresh.left().is_empty());
            self.filled_until = now;
        } else {
            self.add(consumed, is_silent, now);
        }
    }

    /// Adds the consumption until `now`. `is_silent` is whether it was decided by this cell's share.
    pub fn add(&mut self, consumed: &[Consumed], is_silent: bool, now: Timestamp) {
        // What the last tick has left is added up with it.
        if let Some(fresh) = self.fresh.take_if(|_| !consumed.is_empty()) {
            self.add_pending(fresh.left(), false, fresh.added_at);
        }
        self.filled_until = now;
        self.add_pending(consumed, is_silent, now);
    }

    fn add_pending(&mut self, consumed: &[Consumed], is_silent: bool, now: Timestamp) {
        let is_given_back = |one: &&Consumed| is_silent && one.units < 0;
        let at = self.at(now);
        for Consumed { counter, values, units } in consumed.iter().filter(|one| !is_given_back(one)) {
            let limit = &counter.limit;
            let name =
                Name { scope: counter.scope.id(), limit: limit_numbers(limit), values: values.clone() };
            if !self.pending.contains_key(&name) {
                self.make_room(values.len(), now);
            }
            let fresh = || {
                let phase = phase(counter, values);
                (Arc::clone(counter), Pending { units: 0, shared_out: None, phase, last_at: now })
            };
            let (_, pending) = self.pending.entry(name).or_insert_with(fresh);
            pending.last_at = now;
            match u64::try_from(*units) {
                Ok(units) if is_silent => {
                    let state = pending.shared_out.get_or_insert_with(Box::default);
                    limit.debit(PermitId::ANONYMOUS, state, at.of(limit) + pending.phase, units);
                }
                _ => pending.units = pending.units.saturating_add(*units),
            }
        }
        // After what was consumed, of which they may be.
        for Consumed { counter, values, units } in consumed.iter().filter(is_given_back) {
            let (scope, limit) = (counter.scope.id(), whole_numbers(&counter.limit));
            if let Some((_, pending)) = self.pending.get_mut(&Name { scope, limit, values: values.clone() }) {
                pending.last_at = now;
                pending.give_back(&counter.limit, units.unsigned_abs(), at);
            }
        }
    }

    fn max_bytes(&self) -> usize {
        self.most.saturating_mul(BYTES_EACH)
    }

    /// Drops counters until there is room for another, whose values have this many bytes.
    fn make_room(&mut self, bytes: usize, now: Timestamp) {
        while self.pending.len() >= self.most
            || self.bytes + bytes > self.max_bytes() && !self.pending.is_empty()
        {
            self.drop_smallest(now);
        }
        self.bytes += bytes;
    }

    fn remove(&mut self, name: &Name) {
        if self.pending.remove(name).is_some() {
            self.bytes = self.bytes.saturating_sub(name.values.len());
        }
    }

    fn drop_smallest(&mut self, now: Timestamp) {
        let now = self.at(now);
        let size = |(name, (counter, pending)): (&Name, &(Arc<SentCounter>, Pending))| {
            (pending.total(&counter.limit, now).unsigned_abs(), name.clone())
        };
        let smallest = self.pending.iter().take(SAMPLE).map(size).min_by_key(|(units, _)| *units);
        if let Some((units, name)) = smallest {
            self.remove(&name);
            self.dropped = self.dropped.saturating_add(units);
        }
    }

    /// Returns the batch to send: the one in flight if its acknowledgement is missing, else the next. It may be empty:
    /// it is the heartbeat as well.
    pub fn next_batch(&mut self, now: Timestamp) -> Arc<Batch> {
        if let Some((batch, _, made_at)) = &mut self.in_flight {
            clear_old(batch, *made_at, now);
            return Arc::clone(batch);
        }
        self.sequence += 1;
        let mut draft = Draft::new(self.sequence, std::mem::take(&mut self.spare));
        let fresh = self.fresh.as_ref().map_or(0, |fresh| fresh.left().len());
        draft.batch.entries.reserve(fresh.min(MAX_BATCH));
        match self.fresh.take() {
            Some(mut fresh) => {
                while let Some(one) = fresh.consumed.get(fresh.sent).filter(|_| !draft.is_full()) {
                    fresh.sent += 1;
                    let lost = draft.add(&one.counter, &one.values, one.units, fresh.added_at, now);
                    self.dropped = self.dropped.saturating_add(lost);
                }
                self.fresh = Some(fresh).filter(|fresh| !fresh.left().is_empty());
            }
            None => {
                let (mut taken, at) = (Vec::new(), self.at(now));
                for (name, (counter, pending)) in &self.pending {
                    if draft.is_full() {
                        break;
                    }
                    taken.push(name.clone());
                    let units = pending.total(&counter.limit, at);
                    let lost = draft.add(counter, &name.values, units, pending.last_at, now);
                    self.dropped = self.dropped.saturating_add(lost);
                }
                for name in taken {
                    self.remove(&name);
                }
            }
        }
        let mut batch = draft.batch;
        let covers =
            if self.is_continued { 0 } else { self.filled_until.since(self.drained_until).as_micros() };
        (batch.covers, batch.made_at) = (Some(covers), Some(now.as_micros()));
        let is_complete = self.fresh.is_none() && self.pending.is_empty();
        (self.is_continued, self.drained_until) = (!is_complete, self.filled_until);
        // Only what is complete is known to the peer afterwards.
        let covers = if is_complete { self.filled_until } else { self.acked_until };
        let batch = Arc::new(batch);
        self.in_flight = Some((Arc::clone(&batch), covers, now));
        batch
    }

    /// Takes everything that is not acknowledged, to be sent to another node of the same cell. A batch whose
    /// acknowledgement was lost is counted twice, on the safe side.
    pub fn take(&mut self, now: Timestamp) -> Vec<Consumed> {
        let mut all = Vec::new();
        if let Some((batch, ..)) = self.in_flight.take() {
            let counters: Vec<Arc<SentCounter>> = batch.counters.iter().cloned().map(Arc::new).collect();
            for BatchEntry { counter, values, units } in &batch.entries {
                if let Some(counter) = counters.get(*counter as usize) {
                    let (counter, values) = (Arc::clone(counter), values.clone());
                    all.push(Consumed { counter, values, units: *units });
                }
            }
        }
        all.extend(self.fresh.take().iter().flat_map(Fresh::left).cloned());
        self.bytes = 0;
        let now = self.at(now);
        for (name, (counter, pending)) in self.pending.drain() {
            let units = pending.total(&counter.limit, now);
            all.push(Consumed { counter, values: name.values, units });
        }
        all
    }

    /// Removes the batch in flight, because the peer has applied it.
    pub fn acknowledge(&mut self, sequence: u64) {
        if let Some((batch, covers, _)) = self.in_flight.take_if(|(batch, ..)| batch.sequence == sequence) {
            self.acked_until = self.acked_until.max(covers);
            self.spare = Arc::try_unwrap(batch).map(|batch| batch.entries).unwrap_or_default();
            self.spare.clear();
        }
    }

    /// Counts that the peer did not apply the batch in flight: it is sent again.
    pub fn refuse(&mut self) {
        self.refused += 1;
    }

    /// Returns the number of batches that the peer did not apply, each time that they were sent.
    #[must_use]
    pub const fn refused(&self) -> u64 {
        self.refused
    }

    /// Returns whether there is more to send at once.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.in_flight.is_none() && (self.fresh.is_some() || !self.pending.is_empty())
    }

    /// Returns the time since which the peer does not know all consumption.
    #[must_use]
    pub const fn acked_until(&self) -> Timestamp {
        self.acked_until
    }

    /// Returns the number of counters that are waiting.
    #[must_use]
    pub fn waiting(&self) -> usize {
        let fresh = self.fresh.as_ref().map_or(0, |fresh| fresh.left().len());
        let in_flight = self.in_flight.as_ref().map_or(0, |(batch, ..)| batch.entries.len());
        fresh + self.pending.len() + in_flight
    }

    /// Returns the units that were not reported because the outbox was full.
    #[must_use]
    pub const fn dropped(&self) -> u64 {
        self.dropped
    }
}

/// Returns the units of a state that still count at `now`, which has the key's phase added.
pub(crate) fn used(limit: &Limit, state: &State, now: Timestamp) -> u64 {
    let mut state = state.clone();
    limit.capacity().saturating_sub(limit.step(&mut state, now, Cost::PEEK).remaining)
}

/// Returns what distinguishes the limit of whole units, now: what is refunded in parts of one, or to a log, was consumed under
/// that.
fn whole_numbers(limit: &Limit) -> LimitNumbers {
    match limit.refunds_of() {
        Some(_) => limit_numbers(&limit.refunding(None)),
        None if limit.parts_of_unit() > 1 => limit_numbers(&limit.in_whole_units()),
        None => limit_numbers(limit),
    }
}

/// Returns whether units that were added at `since` no longer count: their state has run out; or they are a refund, and its
/// window has ended, so that it would take off what was consumed in the next one.
fn is_over(counter: &SentCounter, values: &KeyValues, units: i64, since: Timestamp, now: Timestamp) -> bool {
    let has_turned = || {
        let phase = phase(counter, values);
        let windows = counter.limit.window(since + phase, 0).zip(counter.limit.window(now + phase, 0));
        windows.is_some_and(|((was, _), (is, _))| was != is)
    };
    now.since(since) > counter.limit.retention() || units < 0 && has_turned()
}

/// Empties the entries of a batch that no longer count since it was made: a peer may be cut off for long. Their places stay, by
/// which a receiver remembers what it has applied.
fn clear_old(batch: &mut Arc<Batch>, made_at: Timestamp, now: Timestamp) {
    let is_old = |entry: &BatchEntry| {
        let counter = batch.counters.get(entry.counter as usize);
        entry.units != 0
            && counter.is_some_and(|counter| is_over(counter, &entry.values, entry.units, made_at, now))
    };
    let old: Vec<usize> =
        batch.entries.iter().enumerate().filter(|(_, entry)| is_old(entry)).map(|(at, _)| at).collect();
    if !old.is_empty() {
        let emptied = Arc::make_mut(batch);
        old.into_iter().for_each(|at| emptied.entries[at].units = 0);
    }
}

/// Returns by how much the windows of a counter are shifted.
fn phase(counter: &SentCounter, values: &KeyValues) -> TimeDelta {
    match counter.limit.is_jittered() {
        true => {
            let parts = values.parts();
            counter.limit.phase(CounterKey { scope: &counter.scope, parts: &parts }.stable_hash())
        }
        false => TimeDelta::ZERO,
    }
}

/// A batch that is being filled.
struct Draft {
    batch: Batch,
    /// Indexes of scopes and limits, by identity and by what they say.
    counters: HashMap<*const SentCounter, u32, RandomState>,
    by_limit: HashMap<(u64, LimitNumbers), u32, RandomState>,
    /// The last of them and its index: most counters have the limit of the one before them.
    last: Option<(*const SentCounter, u32)>,
    bytes: usize,
}

impl Draft {
    /// Creates an empty batch; `entries` is an empty list whose memory it uses.
    fn new(sequence: u64, entries: Vec<BatchEntry>) -> Self {
        Self {
            batch: Batch { sequence, entries, ..Batch::default() },
            counters: HashMap::default(),
            by_limit: HashMap::default(),
            last: None,
            bytes: 0,
        }
    }

    fn is_full(&self) -> bool {
        let Batch { counters, entries, .. } = &self.batch;
        entries.len() >= MAX_BATCH || self.bytes >= MAX_BYTES || counters.len() >= MAX_LIMITS
    }

    /// Adds a counter whose consumption was added at `since`, unless it no longer counts. Returns the units that cannot be
    /// sent.
    fn add(
        &mut self,
        counter: &Arc<SentCounter>,
        values: &KeyValues,
        units: i64,
        since: Timestamp,
        now: Timestamp,
    ) -> u64 {
        if units == 0 || is_over(counter, values, units, since, now) {
            return 0;
        }
        // One that no peer can read would make the whole batch unreadable.
        if !values.can_be_sent() {
            return units.unsigned_abs();
        }
        let counter = self.index(counter);
        self.bytes += 12 + values.len();
        self.batch.entries.push(BatchEntry { counter, values: values.clone(), units });
        0
    }

    /// Returns the index of a scope and limit.
    fn index(&mut self, counter: &Arc<SentCounter>) -> u32 {
        let at = Arc::as_ptr(counter);
        if let Some((_, index)) = self.last.filter(|(last, _)| *last == at) {
            return index;
        }
        let Self { batch, counters, by_limit, bytes, .. } = self;
        let index = *counters.entry(at).or_insert_with(|| {
            *by_limit.entry((counter.scope.id(), limit_numbers(&counter.limit))).or_insert_with(|| {
                *bytes += counter.scope.label().len() + 64;
                batch.counters.push((**counter).clone());
                u32::try_from(batch.counters.len() - 1).unwrap_or(u32::MAX)
            })
        });
        self.last = Some((at, index));
        index
    }
}
