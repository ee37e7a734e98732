//! What is known of a limit's counter from the last charge, and the rate that can be assigned of it. Pure.

use super::allocation::Capacity;
use super::pool::Window;
use super::sent::Terms;
use super::table::AccountId;
use std::collections::BTreeSet;
use tollgate_core::{TimeDelta, Timestamp};
use tollgate_engine::{AheadKind, CounterAhead};

/// What is left of a limit's burst is assigned over this time.
const SPREAD_SECONDS: f64 = 10.0;
/// The same for windows: longer than any assignment lasts, because what is charged is gone until the window ends.
const WINDOW_SPREAD_SECONDS: f64 = 20.0;
/// The same for what no stream has claimed: over the longest time to live, one part in 32 of it.
const UNCLAIMED_SECONDS: f64 = 15.0 * 32.0;
/// Windows of up to so many seconds are divided evenly over their time: those that want more would use them up before the next
/// report of the others.
const EVEN_SECONDS: f64 = 31.0;
/// Time of its rate by which a stream's assignment takes more of a window than it admits: its tokens at the end, and the time
/// until the next one is charged.
const WINDOW_SURPLUS_SECONDS: f64 = 0.25;
/// Share of a short limit that is assigned.
const SHORT_SHARE: f64 = 0.95;
/// Factor of a limit's capacity after a denial, for what other users of the limit take, and its recovery per pass.
const AFTER_DENIAL: f64 = 0.95;
const RECOVERY: f64 = 1.2;
const MIN_FACTOR: f64 = 0.5;
/// The same of a short limit, and the time that must have passed since the last change: each changes the assignments, and a
/// changed one may start full.
const SHORT_AFTER_DENIAL: f64 = 0.9;
const SHORT_CUT: TimeDelta = TimeDelta::from_secs(1);
const SHORT_RECOVERY: f64 = 1.1;
const SHORT_RECOVERED: TimeDelta = TimeDelta::from_secs(4);

/// The last known state of a limit's counter.
#[derive(Debug)]
pub(super) struct Counter {
    /// Units per second.
    rate: f64,
    capacity: u64,
    pub(super) remaining: u64,
    read: Timestamp,
    is_slotted: bool,
    /// The window of a limit that has all its units again when it ends.
    window: Option<Window>,
    /// Part of the capacity that is assigned.
    factor: f64,
    /// The accounts that use it.
    pub(super) accounts: BTreeSet<AccountId>,
    /// Number of those that need a charge in every pass.
    pub(super) short_accounts: usize,
    /// Its index among the limits that are divided.
    pub(super) index: u32,
    /// Denied in the current pass.
    is_denied: bool,
    /// Time of the last change of `factor` of a short limit.
    changed: Timestamp,
}

impl Counter {
    /// Creates the state of a counter that has not been read.
    pub(super) const fn new(index: u32, now: Timestamp) -> Self {
        Self {
            rate: 0.0,
            capacity: 0,
            remaining: 0,
            read: now,
            is_slotted: false,
            window: None,
            factor: 1.0,
            accounts: BTreeSet::new(),
            short_accounts: 0,
            index,
            is_denied: false,
            changed: now,
        }
    }

    /// Begins a pass: what the last one learned of denials applies.
    pub(super) fn begin_pass(&mut self, now: Timestamp) {
        let passed = now.since(self.changed);
        let factor = match (self.is_denied, self.is_short()) {
            (true, false) => AFTER_DENIAL,
            (false, false) => RECOVERY,
            (true, true) if passed >= SHORT_CUT => SHORT_AFTER_DENIAL,
            (false, true) if passed >= SHORT_RECOVERED => SHORT_RECOVERY,
            (_, true) => 1.0,
        };
        let factor = (self.factor * factor).clamp(MIN_FACTOR, 1.0);
        if factor != self.factor {
            self.changed = now;
        }
        (self.factor, self.is_denied) = (factor, false);
    }

    /// Returns whether its assignments are covered until the next pass only.
    fn is_short(&self) -> bool {
        self.is_slotted && Terms::is_short(self.reach())
    }

    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and saturating"
    )]
    fn reach(&self) -> TimeDelta {
        TimeDelta::from_micros((self.capacity as f64 * 1e6 / self.rate.max(1e-6)) as u64)
    }

    /// Records what a charge has read.
    pub(super) fn record(&mut self, counter: &CounterAhead, is_denied: bool, now: Timestamp) {
        self.rate = counter.count as f64 / (counter.period.as_micros() as f64 / 1e6).max(1e-6);
        (self.capacity, self.remaining, self.read) = (counter.capacity, counter.remaining, now);
        self.is_slotted = counter.kind == AheadKind::Slots;
        let resets = counter.resets && counter.window.is_some();
        self.window = Window::of(counter, now).or(self.window).filter(|_| resets);
        self.is_denied |= is_denied;
    }

    /// Records that units are returned to a window.
    pub(super) fn give_back(&mut self, units: u64) {
        if !self.is_slotted {
            self.remaining = self.remaining.saturating_add(units).min(self.capacity);
        }
    }

    fn elapsed_units(&self, now: Timestamp) -> f64 {
        self.rate * now.since(self.read).as_micros() as f64 / 1e6
    }

    /// Returns the rate that can be assigned, where streams have `held` units already. Of a short limit less than its rate: assignments are renewed in every pass, by
    /// units that must be there, and are kept while shares change by a few percent.
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "not negative, and saturating"
    )]
    pub(super) fn assignable(&self, held: u64, now: Timestamp) -> Capacity {
        if self.is_short() {
            let most = self.factor * self.rate * SHORT_SHARE;
            return Capacity { most, sustained: most, unclaimed: 0.0 };
        }
        let width = self.window.map(|window| window.width().as_micros() as f64 / 1e6);
        if let Some(width) = width.filter(|_| self.window.is_some_and(|own| Terms::is_short(own.width()))) {
            let most = self.factor * self.rate * width / (width + WINDOW_SURPLUS_SECONDS);
            return Capacity { most, sustained: most, unclaimed: 0.0 };
        }
        // Units of a window that streams have are theirs to use; those of a bucket lapse.
        let (spread, held) =
            if self.is_slotted { (SPREAD_SECONDS, 0.0) } else { (WINDOW_SPREAD_SECONDS, held as f64) };
        let remaining = match self.window {
            Some(window) if window.has_ended(now) => self.capacity as f64,
            Some(_) => self.remaining as f64,
            None => (self.remaining as f64 + self.elapsed_units(now)).min(self.capacity as f64),
        };
        let most = self.rate + (remaining + held) / spread;
        // What is left until a window ends is all there is; then assignments are charged to the next one.
        let left = self.window.map(|window| window.end_at(now).since(now).as_micros() as f64 / 1e6);
        let is_even = width.is_some_and(|width| width <= EVEN_SECONDS);
        let until_end = left.filter(|left| is_even || *left < WINDOW_SPREAD_SECONDS);
        let most =
            until_end.map_or(most, |left| most.min((remaining + held) / (left + WINDOW_SURPLUS_SECONDS)));
        Capacity {
            most: self.factor * most,
            sustained: self.factor * self.rate,
            unclaimed: self.factor * remaining / UNCLAIMED_SECONDS,
        }
    }

    /// Returns the number of slots that begin within `cover` and that no stream has taken.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "rounded up and not negative")]
    pub(super) fn idle(&self, cover: TimeDelta, now: Timestamp) -> u64 {
        if !self.is_slotted {
            return 0;
        }
        let taken = self.capacity.saturating_sub(self.remaining) as f64 - self.elapsed_units(now);
        (self.rate * cover.as_micros() as f64 / 1e6 - taken.max(0.0)).ceil().max(0.0) as u64
    }
}
