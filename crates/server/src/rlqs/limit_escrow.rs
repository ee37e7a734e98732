//! Escrow of one limit of a bucket on one stream: what is charged to it, and what it still needs. Pure.
//!
//! Every limit of a bucket is charged by itself, only for what its own units do not cover: those of one limit may lapse within
//! a second, while those of another last for a day.
//!
//! Units of a window are charged for what may be admitted until it ends, and those of the next one when it has begun, with what
//! may have been admitted in it before that charge. Rejected: all units of a time to live at once, because a window of ten
//! seconds would have to hold the units of fifteen.

use super::ledger::{Ledger, Unspent};
use super::sent::{GUARD, PASS, Sent};
use smallvec::SmallVec;
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_engine::{AheadKind, CounterAhead};

/// Units of windows are returned if they are more than one in so many of those in escrow. What is left over from one report is
/// used for the next renewal.
const RETURNED_PART: u64 = 4;

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
    fn start_at(self, now: Timestamp) -> Timestamp {
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

/// Assignments before the current one, as far as they may have been used since the last report.
#[derive(Clone, Debug, Default)]
pub(super) struct Past {
    /// Most that may have been admitted by the older ones, and until when.
    older: (u64, Timestamp),
    /// The latest ones, and until when.
    latest: SmallVec<[(Sent, Timestamp); 1]>,
}

impl Past {
    /// Most of the latest ones. Of older ones only the sum is known, which counts in a window that began while they lasted.
    const MAX_LATEST: usize = 3;

    /// Returns the past after a report that was written at `read`: by what came before `sent`.
    pub(super) fn after_report(sent: Option<&Sent>, read: Timestamp) -> Self {
        let residue = sent.filter(|sent| read < sent.replaced).map(|sent| (sent.residue, sent.replaced));
        Self { older: residue.unwrap_or_default(), latest: SmallVec::new() }
    }

    /// Adds an assignment that may have been used until then.
    pub(super) fn push(&mut self, sent: Sent, until: Timestamp, settled: Timestamp) {
        self.latest.push((sent, until));
        if self.latest.len() > Self::MAX_LATEST {
            let (sent, until) = self.latest.remove(0);
            let units = self.older.0.saturating_add(sent.own(settled, until));
            self.older = (units, self.older.1.max(until));
        }
    }

    /// Returns the most that may have been admitted by them since `start`.
    pub(super) fn since(&self, start: Timestamp) -> u64 {
        let older = if start < self.older.1 { self.older.0 } else { 0 };
        let latest = self.latest.iter().filter(|(_, until)| start < *until);
        latest.map(|(sent, until)| sent.own(start, *until)).fold(older, u64::saturating_add)
    }
}

/// What a stream may have admitted since its last report, and may still admit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exposed<'a> {
    pub(super) sent: Sent,
    pub(super) past: &'a Past,
    /// The assignment that `sent` replaces, if it does.
    pub(super) replaces: Option<Sent>,
    pub(super) settled: Timestamp,
}

impl Exposed<'_> {
    /// Returns the most that may be admitted from `start` until `until`.
    fn since(&self, start: Timestamp, until: Timestamp) -> u64 {
        let replaced = self.replaces.map_or(0, |sent| sent.own(start, self.sent.replaced));
        self.past.since(start).saturating_add(replaced).saturating_add(self.sent.own(start, until))
    }
}

/// What was charged to one limit.
#[derive(Debug)]
pub(super) struct LimitEscrow {
    pub(super) counter: u64,
    ledger: Ledger,
    window: Option<Window>,
    /// Units that the limit admits at once.
    capacity: u64,
}

impl LimitEscrow {
    pub(super) fn new(counter: u64) -> Self {
        Self { counter, ledger: Ledger::default(), window: None, capacity: 0 }
    }

    /// Records what a charge has read. Units of a window that has been lowered since are not assigned anymore.
    pub(super) fn learn(&mut self, counter: &CounterAhead, taken: Timestamp) {
        if counter.kind == AheadKind::Window && counter.capacity < self.capacity {
            self.ledger.mark_stale();
        }
        self.capacity = counter.capacity;
        self.window = Window::of(counter, taken).or(self.window.filter(|_| counter.window.is_some()));
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

    /// Returns the units in escrow that a stream which spends all it may has not spent yet.
    pub(super) fn held(&self, of: Option<&Exposed<'_>>, settled: Timestamp, now: Timestamp) -> u64 {
        let since = self.unreported_start(settled, now).unwrap_or(settled);
        let spent = of.map_or(0, |of| of.sent.gain(since, now));
        self.kept_since(settled, now).saturating_sub(spent).min(self.ledger.valid(now))
    }

    /// Returns whether the limit has windows.
    pub(super) const fn has_window(&self) -> bool {
        self.window.is_some()
    }

    /// Returns the end of the window at `now`.
    pub(super) fn window_end(&self, now: Timestamp) -> Option<Timestamp> {
        self.window.map(|window| window.end_at(now))
    }

    /// Returns until when what is admitted must be covered by units that are charged now.
    fn horizon(&self, until: Timestamp, now: Timestamp) -> Timestamp {
        self.window_end(now).map_or(until, |end| until.min(end + GUARD))
    }

    /// Returns the start of the window at `now` if there was no report since.
    fn unreported_start(&self, settled: Timestamp, now: Timestamp) -> Option<Timestamp> {
        self.window.map(|window| window.start_at(now)).filter(|start| settled < *start)
    }

    /// Returns the most that may have been admitted since the last report, and may be until `until`: of that which units of
    /// the current window must be there for.
    fn since_report(&self, of: &Exposed<'_>, until: Timestamp, now: Timestamp) -> u64 {
        of.since(self.unreported_start(of.settled, now).unwrap_or(of.settled), until)
    }

    /// Returns the units that are there for it.
    fn kept_since(&self, settled: Timestamp, now: Timestamp) -> u64 {
        self.ledger.kept(if self.unreported_start(settled, now).is_some() { now } else { settled })
    }

    /// Returns the units that are missing now, and those that are missing at the end of the cover.
    pub(super) fn missing(&self, of: &Exposed<'_>, until: Timestamp, now: Timestamp) -> (u64, u64) {
        let horizon = self.horizon(until, now);
        let at_once = of.sent.exposure_until(horizon, now).saturating_sub(self.ledger.valid(now));
        let since_report =
            self.since_report(of, horizon, now).saturating_sub(self.kept_since(of.settled, now));
        (at_once.max(since_report), self.shortfall(&of.sent, (now, until), until))
    }

    /// Returns the most units that are missing at any instant between these two, for what may be admitted until `until`:
    /// exposure is linear, so only the ends of charges matter. Windows are charged again when they have ended.
    fn shortfall(&self, sent: &Sent, (now, end): (Timestamp, Timestamp), until: Timestamp) -> u64 {
        if self.window.is_some() {
            return 0;
        }
        let instants = self.ledger.ends().filter(|at| now < *at && *at < end).chain([end]);
        // At its very end, an assignment still has a full bucket.
        let missing = instants.map(|at| {
            let exposure = sent.exposure_until(until, Timestamp::from_micros(at.as_micros() - 1));
            exposure.saturating_sub(self.ledger.in_slots(at))
        });
        missing.max().unwrap_or(0)
    }

    /// Returns how many units to charge so that enough of them are valid at the end of the cover, where so many slots before it
    /// are idle.
    pub(super) fn need(&self, of: &Exposed<'_>, until: Timestamp, idle: u64, now: Timestamp) -> u64 {
        match self.missing(of, until, now) {
            (at_once, 0) => at_once,
            (at_once, at_end) => at_once.max(at_end.saturating_add(idle)),
        }
    }

    /// Returns whether the escrow covers an assignment for as long as the next pass needs, and now with regard to windows.
    pub(super) fn covers(&self, of: &Exposed<'_>, until: Timestamp, now: Timestamp) -> bool {
        let horizon = self.horizon(until, now);
        let in_window =
            self.window.is_none() || self.since_report(of, horizon, now) <= self.kept_since(of.settled, now);
        in_window
            && self.shortfall(&of.sent, (now, until.min(now + PASS)), until) == 0
            && of.sent.exposure_until(horizon, now) <= self.ledger.valid(now)
    }

    /// Returns what to charge for an assignment of a lost stream, so that it stays covered until it expires. Nothing unless
    /// the limit's burst or window is shorter than the time to live.
    pub(super) fn uncovered(&self, of: &Exposed<'_>, idle: u64, now: Timestamp) -> u64 {
        let (at, expires) = (now + PASS + GUARD, of.sent.expires);
        let later = self.shortfall(&of.sent, (now, at), expires);
        let at_once =
            of.sent.exposure_until(self.horizon(expires, now), now).saturating_sub(self.ledger.kept(now));
        if later == 0 { at_once } else { at_once.max(later.saturating_add(idle)) }
    }

    /// Removes units that a report says were spent.
    pub(super) fn spend(&mut self, units: u64, of: Option<&Exposed<'_>>, settled: Timestamp, now: Timestamp) {
        let recent = of.map_or(units, |of| self.since_report(of, now, now));
        self.ledger.spend(units, recent, settled, now);
    }

    /// Removes units that had lapsed at this instant, before which nothing is asked anymore.
    pub(super) fn forget(&mut self, before: Timestamp) {
        self.ledger.forget(before);
    }

    /// Removes and returns the units of a window that the stream has not spent and cannot spend.
    pub(super) fn unspent(
        &mut self,
        of: Option<&Exposed<'_>>,
        settled: Timestamp,
        is_spent: bool,
        now: Timestamp,
    ) -> SmallVec<[Unspent; 1]> {
        let kept = self.ledger.kept(now);
        let (outstanding, since_report) = of.map_or((0, 0), |of| {
            let horizon = self.horizon(of.sent.expires, now);
            (of.sent.exposure_until(horizon, now), self.since_report(of, horizon, now))
        });
        let surplus =
            kept.saturating_sub(outstanding).min(self.kept_since(settled, now).saturating_sub(since_report));
        if surplus.saturating_mul(RETURNED_PART) > kept || is_spent {
            return self.give_back(surplus, now);
        }
        SmallVec::new()
    }

    /// Removes and returns up to `units` of a window.
    pub(super) fn give_back(&mut self, units: u64, now: Timestamp) -> SmallVec<[Unspent; 1]> {
        self.ledger.give_back(self.counter, units, now)
    }

    /// Returns the number of tranches in escrow.
    #[cfg(test)]
    pub(super) fn tranches(&self) -> usize {
        self.ledger.len()
    }
}
