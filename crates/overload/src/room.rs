//! The waiting room: requests that found no free place in flight, a bounded number for a bounded time, the first rank first.
//!
//! Waiting helps where it is short: a worker that finishes finds the next request at once, and a burst that lasts a few
//! milliseconds sheds nothing. A standing queue helps no caller (CoDel's observation): once the room has not been empty for
//! an interval, although requests are being shed, the time that a request may wait shrinks, and of one rank the newest
//! goes first, so that what is served has waited little and what has waited long is shed. Requests within a guarantee and critical ones keep the longer time and
//! their order: they are few, and go before the others.
//!
//! Requests that had a place, gave it back while they waited for their client and need it again wait here too, before new ones
//! and for as long as their callers let them: they were admitted already. Their order is that in which they came.

use crate::shares::Standing;
use std::collections::VecDeque;
use tollgate_core::{Priority, TimeDelta, Timestamp};

/// Rank of a waiting request: within a guarantee, then by priority, and within a priority by its tenant's share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(u8);

const RANKS: usize = 13;
/// The last rank that waits patiently in a standing queue: critical requests.
const PATIENT: Rank = Rank::new(Priority::Critical, Standing::Excess);

impl Rank {
    pub(crate) const fn new(priority: Priority, standing: Standing) -> Self {
        let first = priority as u8 * 3 + 1;
        match standing {
            Standing::Guaranteed => Self(0),
            Standing::Ample => Self(first),
            Standing::Fair => Self(first + 1),
            Standing::Excess => Self(first + 2),
        }
    }

    /// Returns whether the request waits patiently in a standing queue, and may use the reserve: within a guarantee, or
    /// critical.
    pub(crate) fn is_patient(self) -> bool {
        self <= PATIENT
    }
}

/// Bounds of the room.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoomBounds {
    /// Number of requests.
    pub(crate) size: usize,
    /// Longest wait in a standing queue.
    pub(crate) short: TimeDelta,
    /// Longest wait otherwise.
    pub(crate) long: TimeDelta,
    /// Time after which a queue is standing; never while nothing is shed.
    pub(crate) standing: TimeDelta,
}

#[derive(Debug)]
struct Waiting<W> {
    until: Timestamp,
    waiter: W,
}

#[derive(Debug)]
pub(crate) struct Room<W> {
    ranks: [VecDeque<Waiting<W>>; RANKS],
    count: usize,
    /// Requests that need their place again: those that may use the reserve, and the others. They are no standing queue.
    again: [VecDeque<W>; 2],
    pub(crate) bounds: RoomBounds,
    last_empty: Timestamp,
    /// Requests × microseconds since the last reading, and until when.
    area: f64,
    counted_until: Timestamp,
}

/// The request that goes next.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Next {
    /// One that had a place, and whether it may use the reserve.
    Again(bool),
    New(Rank),
}

impl Next {
    /// Returns whether it may use the reserve.
    pub(crate) fn is_patient(self) -> bool {
        match self {
            Self::Again(is_patient) => is_patient,
            Self::New(rank) => rank.is_patient(),
        }
    }
}

/// Result of entering the room.
pub(crate) enum Seated<W> {
    /// Waits until then at most, in place of the request that is returned, if any.
    Until(Timestamp, Option<W>),
    /// The room is full of requests that go first.
    Full,
}

impl<W> Room<W> {
    pub(crate) fn new(bounds: RoomBounds) -> Self {
        Self {
            ranks: std::array::from_fn(|_| VecDeque::new()),
            count: 0,
            again: [VecDeque::new(), VecDeque::new()],
            bounds,
            last_empty: Timestamp::ZERO,
            area: 0.0,
            counted_until: Timestamp::ZERO,
        }
    }

    /// Returns the number of requests that wait, also for their place again.
    pub(crate) fn waiting(&self) -> usize {
        self.count + self.again.iter().map(VecDeque::len).sum::<usize>()
    }

    fn is_standing(&self, now: Timestamp) -> bool {
        now.since(self.last_empty) > self.bounds.standing
    }

    fn advance(&mut self, now: Timestamp) {
        self.area += self.count as f64 * now.since(self.counted_until).as_micros() as f64;
        self.counted_until = self.counted_until.max(now);
        if self.count == 0 {
            self.last_empty = now;
        }
    }

    /// Adds a request, if there is room or one of a lower rank to replace.
    pub(crate) fn push(&mut self, now: Timestamp, rank: Rank, waiter: W) -> Seated<W> {
        self.advance(now);
        self.remove_overdue(now);
        let mut replaced = None;
        if self.count >= self.bounds.size {
            let last = (usize::from(rank.0) + 1..RANKS).rev().find(|at| !self.ranks[*at].is_empty());
            let Some(last) = last else { return Seated::Full };
            replaced = self.ranks[last].pop_back().map(|waiting| waiting.waiter);
            self.count -= 1;
        }
        let is_impatient = self.is_standing(now) && !rank.is_patient();
        let wait = if is_impatient { self.bounds.short } else { self.bounds.long };
        let until = now + wait;
        self.ranks[usize::from(rank.0)].push_back(Waiting { until, waiter });
        self.count += 1;
        Seated::Until(until, replaced)
    }

    /// Adds a request that needs its place again.
    pub(crate) fn push_again(&mut self, is_patient: bool, waiter: W) {
        self.again[usize::from(!is_patient)].push_back(waiter);
    }

    /// Removes the first request that needs its place again.
    pub(crate) fn pop_again(&mut self, is_patient: bool) -> Option<W> {
        self.again[usize::from(!is_patient)].pop_front()
    }

    /// Returns whether requests of this kind need their places again.
    pub(crate) fn has_again(&self, is_patient: bool) -> bool {
        !self.again[usize::from(!is_patient)].is_empty()
    }

    /// Returns the request that goes next: of those that may use the reserve one that had a place, then a new one, and of the
    /// others likewise.
    pub(crate) fn next(&self) -> Option<Next> {
        let new = self.next_rank();
        let is_new = |is_patient| new.filter(|rank| rank.is_patient() == is_patient);
        [true, false].into_iter().find_map(|is_patient| match self.has_again(is_patient) {
            true => Some(Next::Again(is_patient)),
            false => is_new(is_patient).map(Next::New),
        })
    }

    /// Returns the rank of the new request that goes next.
    fn next_rank(&self) -> Option<Rank> {
        (0..).zip(&self.ranks).find(|(_, rank)| !rank.is_empty()).map(|(at, _)| Rank(at))
    }

    /// Removes the new request that goes next; `None` if that is not one that may use the reserve, or may not, because those have
    /// waited too long.
    pub(crate) fn pop(&mut self, now: Timestamp, is_patient: bool) -> Option<W> {
        self.advance(now);
        self.remove_overdue(now);
        let is_standing = self.is_standing(now);
        loop {
            let rank = self.next_rank().filter(|rank| rank.is_patient() == is_patient)?;
            let waiting = &mut self.ranks[usize::from(rank.0)];
            let next = match is_standing && !rank.is_patient() {
                true => waiting.pop_back()?,
                false => waiting.pop_front()?,
            };
            self.count -= 1;
            if next.until >= now {
                return Some(next.waiter);
            }
        }
    }

    /// Removes requests whose time is over; they know it themselves. They did not wait any longer.
    fn remove_overdue(&mut self, now: Timestamp) {
        for rank in &mut self.ranks {
            while let Some(overdue) = rank.pop_front_if(|waiting| waiting.until < now) {
                self.area = (self.area - now.since(overdue.until).as_micros() as f64).max(0.0);
                self.count -= 1;
            }
        }
        if self.count == 0 {
            self.last_empty = now;
        }
    }

    /// Returns the mean number of waiting requests since the last call.
    pub(crate) fn take_mean(&mut self, now: Timestamp, length: TimeDelta) -> f64 {
        self.advance(now);
        self.remove_overdue(now);
        std::mem::take(&mut self.area) / (length.as_micros().max(1) as f64)
    }
}
