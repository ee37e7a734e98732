//! Outbox: consumption that one peer has not acknowledged. A pure state machine: consumption and acknowledgments go in,
//! batches come out.
//!
//! One batch is in flight at a time, with a number. If the link breaks before the acknowledgement, the same batch is
//! sent again under the same number, and the receiver applies it once (`inbox`); so nothing is lost, and nothing is
//! counted twice unless the receiver forgot its numbers in between, which is one batch, on the safe side.
//!
//! While the peer is silent, both sides decide by their shares (`regional`), and what is consumed then was never over
//! the limit. It is kept as the state of a counter, which forgets what time has restored; the rest is owed in full. So
//! a healed link debits what still counts, and not an hour of consumption at once.

use crate::charge_codec::{SentCounter, can_be_sent, parts_bytes};
use crate::ledger::{BYTES_EACH, Consumed};
use crate::message::{Batch, BatchEntry, MAX_BATCH, MAX_MESSAGE};
use foldhash::fast::RandomState;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::Arc;
use tollgate_core::{Cost, CounterKey, KeyPart, Limit, OwnedKeyPart, PermitId, State, TimeDelta, Timestamp};

/// Bytes that a batch may take: half of a message, so that an estimate suffices.
const MAX_BYTES: usize = MAX_MESSAGE / 2;
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
    fn total(&self, limit: &Limit, now: Timestamp) -> i64 {
        let silent = self.shared_out.as_deref().map_or(0, |state| used(limit, state, now + self.phase));
        self.units.saturating_add(i64::try_from(silent).unwrap_or(i64::MAX))
    }

    /// Takes back units while the peer is silent: of what was not reported to it, and no more. A refund of what time
    /// has restored since would be new units to a peer that hears of it later.
    fn give_back(&mut self, limit: &Limit, units: u64, now: Timestamp) {
        let (mut rest, now) = (units, now + self.phase);
        if let Some(state) = self.shared_out.as_deref_mut() {
            let taken = used(limit, state, now).min(rest);
            limit.step(state, now, Cost::refund(taken));
            rest -= taken;
        }
        let owed = u64::try_from(self.units).unwrap_or(0).min(rest);
        self.units -= i64::try_from(owed).unwrap_or(0);
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Name {
    scope: u64,
    limit: (u64, u64),
    parts: Arc<[OwnedKeyPart]>,
}

/// Consumption that a peer has not acknowledged.
#[derive(Debug)]
pub struct Outbox {
    pending: HashMap<Name, (Arc<SentCounter>, Pending), RandomState>,
    most: usize,
    /// Bytes of the values that are waiting.
    bytes: usize,
    sequence: u64,
    in_flight: Option<(Batch, Timestamp)>,
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
            pending: HashMap::default(),
            most: most.max(1),
            bytes: 0,
            sequence: now.as_micros(),
            in_flight: None,
            filled_until: now,
            drained_until: now,
            is_continued: false,
            acked_until: now,
            dropped: 0,
            refused: 0,
        }
    }

    /// Adds the consumption until `now`. `is_silent` is whether it was decided by this cell's share.
    pub fn add(&mut self, consumed: &[Consumed], is_silent: bool, now: Timestamp) {
        self.filled_until = now;
        for Consumed { counter, parts, units } in consumed {
            let limit = &counter.limit;
            let name = Name {
                scope: counter.scope.id(),
                limit: (limit.rate().count, limit.capacity()),
                parts: Arc::clone(parts),
            };
            if !self.pending.contains_key(&name) {
                self.make_room(parts_bytes(parts), now);
            }
            let fresh = || {
                let phase = phase(counter, parts);
                (Arc::clone(counter), Pending { units: 0, shared_out: None, phase, last_at: now })
            };
            let (_, pending) = self.pending.entry(name).or_insert_with(fresh);
            pending.last_at = now;
            match u64::try_from(*units) {
                Ok(units) if is_silent => {
                    let state = pending.shared_out.get_or_insert_with(Box::default);
                    limit.debit(PermitId::ANONYMOUS, state, now + pending.phase, units);
                }
                Err(_) if is_silent => pending.give_back(limit, units.unsigned_abs(), now),
                _ => pending.units = pending.units.saturating_add(*units),
            }
        }
    }

    /// Drops counters until there is room for another, whose values have this many bytes.
    fn make_room(&mut self, bytes: usize, now: Timestamp) {
        let max_bytes = self.most.saturating_mul(BYTES_EACH);
        while self.pending.len() >= self.most || self.bytes + bytes > max_bytes && !self.pending.is_empty() {
            self.drop_smallest(now);
        }
        self.bytes += bytes;
    }

    fn remove(&mut self, name: &Name) {
        if self.pending.remove(name).is_some() {
            self.bytes = self.bytes.saturating_sub(parts_bytes(&name.parts));
        }
    }

    fn drop_smallest(&mut self, now: Timestamp) {
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
    pub fn next_batch(&mut self, now: Timestamp) -> Batch {
        if let Some((batch, _)) = &self.in_flight {
            return batch.clone();
        }
        self.sequence += 1;
        let mut batch = Batch { sequence: self.sequence, ..Batch::default() };
        let mut counters: HashMap<*const SentCounter, u32> = HashMap::new();
        let mut by_limit: HashMap<(u64, (u64, u64)), u32> = HashMap::new();
        let (mut bytes, mut taken) = (0, Vec::new());
        for (name, (counter, pending)) in &self.pending {
            if batch.entries.len() >= MAX_BATCH || bytes >= MAX_BYTES || batch.counters.len() >= 4_000 {
                break;
            }
            taken.push(name.clone());
            let units = pending.total(&counter.limit, now);
            if units == 0 || now.since(pending.last_at) > counter.limit.retention() {
                continue;
            }
            // One that no peer can read would make the whole batch unreadable.
            if !can_be_sent(&name.parts) {
                self.dropped = self.dropped.saturating_add(units.unsigned_abs());
                continue;
            }
            let at = *counters.entry(Arc::as_ptr(counter)).or_insert_with(|| {
                *by_limit.entry((name.scope, name.limit)).or_insert_with(|| {
                    bytes += counter.scope.label().len() + 64;
                    batch.counters.push((**counter).clone());
                    u32::try_from(batch.counters.len() - 1).unwrap_or(u32::MAX)
                })
            });
            bytes += 12 + parts_bytes(&name.parts);
            batch.entries.push(BatchEntry { counter: at, parts: name.parts.to_vec(), units });
        }
        for name in taken {
            self.remove(&name);
        }
        let covers =
            if self.is_continued { 0 } else { self.filled_until.since(self.drained_until).as_micros() };
        batch.covers = Some(covers);
        (self.is_continued, self.drained_until) = (!self.pending.is_empty(), self.filled_until);
        // Only what is complete is known to the peer afterwards.
        let covers = if self.pending.is_empty() { self.filled_until } else { self.acked_until };
        self.in_flight = Some((batch.clone(), covers));
        batch
    }

    /// Takes everything that is not acknowledged, to be sent to another node of the same cell. A batch whose
    /// acknowledgement was lost is counted twice, on the safe side.
    pub fn take(&mut self, now: Timestamp) -> Vec<Consumed> {
        let mut all = Vec::new();
        if let Some((Batch { counters, entries, .. }, _)) = self.in_flight.take() {
            let counters: Vec<Arc<SentCounter>> = counters.into_iter().map(Arc::new).collect();
            for BatchEntry { counter, parts, units } in entries {
                if let Some(counter) = counters.get(counter as usize) {
                    all.push(Consumed { counter: Arc::clone(counter), parts: parts.into(), units });
                }
            }
        }
        self.bytes = 0;
        for (name, (counter, pending)) in self.pending.drain() {
            let units = pending.total(&counter.limit, now);
            all.push(Consumed { counter, parts: name.parts, units });
        }
        all
    }

    /// Removes the batch in flight, because the peer has applied it.
    pub fn acknowledge(&mut self, sequence: u64) {
        if let Some((_, covers)) = self.in_flight.take_if(|(batch, _)| batch.sequence == sequence) {
            self.acked_until = self.acked_until.max(covers);
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
        self.in_flight.is_none() && !self.pending.is_empty()
    }

    /// Returns the time since which the peer does not know all consumption.
    #[must_use]
    pub const fn acked_until(&self) -> Timestamp {
        self.acked_until
    }

    /// Returns the number of counters that are waiting.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.pending.len() + self.in_flight.as_ref().map_or(0, |(batch, _)| batch.entries.len())
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

/// Returns by how much the windows of a counter are shifted.
fn phase(counter: &SentCounter, parts: &[OwnedKeyPart]) -> TimeDelta {
    let parts: SmallVec<[KeyPart<'_>; 4]> = parts.iter().map(OwnedKeyPart::as_part).collect();
    counter.limit.phase(CounterKey { scope: &counter.scope, parts: &parts }.stable_hash())
}
