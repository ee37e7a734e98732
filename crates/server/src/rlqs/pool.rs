//! Units of one limit that this node has charged for its streams, and the most that these may spend of them. Pure.
//!
//! **Invariant.** At every instant x, past or to come, the units that lapse after x are at least the most that all streams
//! together may have admitted since x and may still admit while they are covered.
//!
//! By it every admission can be matched with a charged unit whose slot has not begun (Hall's condition for nested sets of
//! deadlines). The lease proof (`docs/internals/lease-proof.md`) then bounds everything that is admitted in any time t, by streams
//! and by checks together, by burst + rate × t.
//!
//! Time is divided into cells. What is admitted in a cell counts from its start, and units that lapse in it are not valid in it,
//! so that the invariant is checked once per cell ([`super::curve`]). A report says how many requests were admitted since the
//! one before and not when: they count as late as the stream's assignments allowed. Cells before the last report of every stream
//! become one number, the backlog: by how much more has been admitted since some instant than has lapsed.
//!
//! Units of a window are valid until it ends. They are charged for what may be admitted until then, and those of the next window
//! when it has begun, with what may have been admitted in it before. Those beyond what streams may spend are returned.
//!
//! Rejected: units of each stream apart. Its units are then blocks of slots with those of others between them, and while these
//! pass, it must have more units than it can spend: of a burst of one second, half of the limit could not be assigned.

use super::exposed::Exposed;
use super::ledger::{Ledger, Unspent};
use super::sent::GUARD;
use super::table::Bucket;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::Arc;
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_engine::{AheadKind, CounterAhead};

/// Units of windows are returned if they are more than one in so many of those in the pool. What is left over from one report is
/// used for the next renewal.
const RETURNED_PART: u64 = 4;
/// Cells in the time in which a limit's burst comes back.
const CELLS_OF_BURST: u64 = 12;
/// Shortest and longest cell in microseconds.
const CELL: (u64, u64) = (40_000, 2_000_000);
/// Longest time in microseconds for which cells are kept for a stream that does not report. What it may have admitted before
/// counts as admitted.
const KEPT: u64 = 8_000_000;
/// Cells by which a limit may be behind when its curve is drawn. Older ones are removed at once: a process may have been suspended
/// for hours.
const MAX_BEHIND: u64 = 1024;

/// The windows of a limit, which follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    end: Timestamp,
    width: TimeDelta,
}

impl Window {
    /// Returns the window that was charged at `taken`, by the node's clock; `None` if the limit has none, or was not charged.
    pub(super) fn of(counter: &CounterAhead, taken: Timestamp) -> Option<Self> {
        let (escrow, width) = (counter.escrow?, counter.window?);
        Some(Self { end: taken + escrow.lifetime(), width })
    }

    /// Returns the end of the window at `now`.
    pub(super) fn end_at(self, now: Timestamp) -> Timestamp {
        if now < self.end {
            return self.end;
        }
        let width = self.width.as_micros().max(1);
        let passed = now.since(self.end).as_micros() / width + 1;
        self.end + TimeDelta::from_micros(passed.saturating_mul(width))
    }

    /// Returns the start of the window at `now`.
    pub(super) fn start_at(self, now: Timestamp) -> Timestamp {
        self.end_at(now) - self.width
    }

    /// Returns whether the window has ended.
    pub(super) fn has_ended(self, now: Timestamp) -> bool {
        now >= self.end
    }

    /// Returns the length of each.
    pub(super) const fn width(self) -> TimeDelta {
        self.width
    }
}

/// What was admitted and reported, in cells of time.
#[derive(Debug)]
struct History {
    /// Length of a cell in microseconds.
    cell: u64,
    /// Number of the first cell.
    first: u64,
    /// Units of each cell.
    spent: VecDeque<u64>,
    /// By how many units the first cell's units have been spent before it.
    backlog: u64,
}

/// All units of one limit.
#[derive(Debug)]
pub(super) struct Pool {
    counter: u64,
    /// One of its buckets.
    bucket: Arc<Bucket>,
    ledger: Ledger,
    window: Option<Window>,
    history: History,
    /// Units that the limit admits at once.
    capacity: u64,
}

/// Returns the length of a cell of this limit in microseconds.
fn cell_of(counter: &CounterAhead) -> u64 {
    let reach = u128::from(counter.period.as_micros()) * u128::from(counter.capacity)
        / u128::from(counter.count.max(1));
    u64::try_from(reach).unwrap_or(u64::MAX).checked_div(CELLS_OF_BURST).unwrap_or(0).clamp(CELL.0, CELL.1)
}

impl Pool {
    pub(super) fn new(counter: &CounterAhead, bucket: Arc<Bucket>, now: Timestamp) -> Self {
        let cell = cell_of(counter);
        let history = History { cell, first: now.as_micros() / cell, spent: VecDeque::new(), backlog: 0 };
        let (counter, ledger) = (counter.counter, Ledger::default());
        Self { counter, bucket, ledger, window: None, history, capacity: 0 }
    }

    /// Returns one of the buckets that the units are for.
    pub(super) fn bucket(&self) -> Arc<Bucket> {
        Arc::clone(&self.bucket)
    }

    /// Records what a charge has read, and returns whether cells or windows are others now. Units of a window that has been lowered
    /// since are not assigned anymore.
    pub(super) fn learn(&mut self, counter: &CounterAhead, taken: Timestamp) -> bool {
        if counter.kind == AheadKind::Window && counter.capacity < self.capacity {
            self.ledger.mark_stale();
        }
        self.capacity = counter.capacity;
        let had_window = self.window.is_some();
        self.window = Window::of(counter, taken).or(self.window.filter(|_| counter.window.is_some()));
        self.history.resize(cell_of(counter)) || had_window != self.window.is_some()
    }

    /// Adds units that were charged; see [`Ledger::add`].
    pub(super) fn add(
        &mut self,
        units: u64,
        counter: &CounterAhead,
        taken: Timestamp,
        taken_at: Option<Timestamp>,
    ) {
        self.ledger.add(units, counter, taken, taken_at);
    }

    /// Returns whether the limit has windows.
    pub(super) const fn has_window(&self) -> bool {
        self.window.is_some()
    }

    /// Returns the start of the window at `now`, and until when what is admitted counts in it.
    pub(super) fn window_at(&self, now: Timestamp) -> Option<(Timestamp, Timestamp)> {
        self.window.map(|window| (window.start_at(now), window.end_at(now) + GUARD))
    }

    /// Returns the end of the window at `now`.
    pub(super) fn window_end(&self, now: Timestamp) -> Option<Timestamp> {
        self.window.map(|window| window.end_at(now))
    }

    /// Returns the units that may be spent at `at` by what is assigned now.
    pub(super) fn valid(&self, at: Timestamp) -> u64 {
        self.ledger.valid(at)
    }

    /// Returns the units that may be spent at `at` by what has been assigned.
    pub(super) fn kept(&self, at: Timestamp) -> u64 {
        self.ledger.kept(at)
    }

    /// Returns the units that streams have not spent, if they have spent so many since their last reports.
    pub(super) fn held(&self, spent: u64, now: Timestamp) -> u64 {
        self.ledger.kept(now).saturating_sub(spent).min(self.ledger.valid(now))
    }

    /// Records that a stream has reported so many units since its last report.
    pub(super) fn settle(&mut self, units: u64, of: &Exposed<'_>, now: Timestamp) {
        match self.window_at(now) {
            // As many as may have been admitted in the current window count in it.
            Some((start, _)) => self.ledger.spend(units.min(of.between(start, now)), now),
            None => self.history.settle(units, of, now),
        }
    }

    /// Returns whether the first cell is too old to be kept, even if a stream has not reported since.
    pub(super) fn is_first_too_old(&self, now: Timestamp) -> bool {
        let oldest = Timestamp::from_micros(now.as_micros().saturating_sub(KEPT));
        self.history.first < self.history.number(oldest)
    }

    /// Removes the first cell, in which so many units may have been admitted by streams that have not reported since.
    pub(super) fn drop_first(&mut self, unreported: u64) {
        let end = self.history.start(self.history.first + 1);
        let next = end + TimeDelta::from_micros(self.history.cell);
        let lapsed = self.ledger.kept(end).saturating_sub(self.ledger.kept(next));
        self.history.drop_first(unreported, lapsed);
    }

    /// Removes units that had lapsed at this instant, before which nothing is asked anymore.
    pub(super) fn forget(&mut self, before: Timestamp) {
        self.ledger.forget(before);
    }

    /// Removes all cells that are far too old at once, after a time without a pass. All that these streams may have admitted in
    /// them counts as admitted, and none of it as lapsed.
    pub(super) fn catch_up(&mut self, all: &[Exposed<'_>], now: Timestamp) {
        let first = self.history.number(now).saturating_sub(MAX_BEHIND);
        if self.history.first < first {
            let start = self.history.start(first);
            let unreported = all
                .iter()
                .map(|of| of.between(of.settled, of.until).saturating_sub(of.between(start, of.until)));
            self.history.skip(first, unreported.fold(0, u64::saturating_add));
        }
    }

    /// Returns the starts of all cells until after `end`, with the units that were admitted and reported since, and the units that are
    /// valid after the cell.
    pub(super) fn cells(&self, end: Timestamp) -> impl Iterator<Item = (Timestamp, u64, u64)> {
        let History { first, spent, backlog, .. } = &self.history;
        let mut since: u64 = spent.iter().fold(0, |sum, units| sum.saturating_add(*units));
        let count = self.history.number(end).saturating_sub(*first) + 2;
        (0..count).map(move |at| {
            let (start, next) = (self.history.start(first + at), self.history.start(first + at + 1));
            let admitted = since.saturating_add(if at == 0 { *backlog } else { 0 });
            let own = usize::try_from(at).ok().and_then(|at| spent.get(at)).copied().unwrap_or(0);
            since = since.saturating_sub(own);
            (start, admitted, self.ledger.kept(next))
        })
    }

    /// Removes and returns the units of a window of which streams may have spent so many, and may spend so many more.
    pub(super) fn unspent(&mut self, spent: u64, outstanding: u64, now: Timestamp) -> SmallVec<[Unspent; 1]> {
        let kept = self.ledger.kept(now);
        let surplus = kept.saturating_sub(outstanding.max(spent));
        if self.window.is_some() && (surplus.saturating_mul(RETURNED_PART) > kept || outstanding == 0) {
            return self.give_back(surplus, now);
        }
        SmallVec::new()
    }

    /// Removes and returns up to `units` of a window.
    pub(super) fn give_back(&mut self, units: u64, now: Timestamp) -> SmallVec<[Unspent; 1]> {
        self.ledger.give_back(self.counter, units, now)
    }

    /// Returns the number of tranches in the pool.
    #[cfg(test)]
    pub(super) fn tranches(&self) -> usize {
        self.ledger.len()
    }
}

impl History {
    fn number(&self, at: Timestamp) -> u64 {
        at.as_micros() / self.cell
    }

    fn start(&self, number: u64) -> Timestamp {
        Timestamp::from_micros(number.saturating_mul(self.cell))
    }

    /// Changes the length of cells, and returns whether it was another. All that was admitted in those of before counts as
    /// backlog.
    fn resize(&mut self, cell: u64) -> bool {
        let is_other = cell != self.cell;
        if is_other {
            self.backlog = self.spent.drain(..).fold(self.backlog, u64::saturating_add);
            self.first = self.first.saturating_mul(self.cell) / cell;
            self.cell = cell;
        }
        is_other
    }

    /// Begins with the cell of this number, before which so many more may have been admitted.
    fn skip(&mut self, first: u64, unreported: u64) {
        let skipped = usize::try_from(first - self.first).unwrap_or(usize::MAX).min(self.spent.len());
        let spent = self.spent.drain(..skipped).fold(unreported, u64::saturating_add);
        (self.backlog, self.first) = (self.backlog.saturating_add(spent), first);
    }

    /// Adds `units` that a stream has reported, as late as it may have admitted them. What it may have admitted before the first
    /// cell is in the backlog already, but for the parts of tokens that become whole ones with those of later.
    fn settle(&mut self, units: u64, of: &Exposed<'_>, now: Timestamp) {
        let last = self.number(now.min(of.end()));
        let first = self.number(of.settled).max(self.first);
        let (mut number, mut later) = (last, 0);
        while number >= first && later < units {
            let is_cut = number == self.first && of.settled < self.start(number);
            let parts = if is_cut { of.parts() } else { 0 };
            let since = units.min(of.between(self.start(number), now).saturating_add(parts));
            let own = since.saturating_sub(later);
            if own > 0 {
                let at = usize::try_from(number - self.first).unwrap_or(usize::MAX);
                if self.spent.len() <= at {
                    self.spent.resize(at + 1, 0);
                }
                self.spent[at] = self.spent[at].saturating_add(own);
            }
            later = later.max(since);
            let Some(before) = number.checked_sub(1) else { return };
            number = before;
        }
    }

    /// Removes the first cell, in which so many more may have been admitted by streams that have not reported, and after which so
    /// many units lapse in the next one.
    fn drop_first(&mut self, unreported: u64, lapsed: u64) {
        let spent = self.spent.pop_front().unwrap_or(0).saturating_add(unreported);
        self.backlog = self.backlog.saturating_add(spent).saturating_sub(lapsed);
        self.first += 1;
    }
}
