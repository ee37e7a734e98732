//! Clocks: the only module that reads time. Everything else takes `now`.
//!
//! `SystemClock` is anchored to the wall clock once and then follows the monotonic clock: a wall clock step (NTP, a
//! leap second, an operator) moves no window while the process lives. Rejected for that reason: reading the wall clock
//! for every decision. `ticks` describes how the clock is read cheaply.

mod ticks;

use crate::time::{TimeDelta, Timestamp};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

/// The source of `now`.
pub trait Clock: Send + Sync {
    /// Returns the current instant, never earlier than one that this clock has already returned on the same thread.
    fn now(&self) -> Timestamp;
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Timestamp {
        (**self).now()
    }
}

impl<C: Clock + ?Sized> Clock for &C {
    fn now(&self) -> Timestamp {
        (**self).now()
    }
}

/// Monotonic time, anchored to the Unix epoch when the clock is created.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    /// Microseconds from the epoch to the first time reading of this process.
    start: u64,
}

impl SystemClock {
    /// Creates a clock that matches the wall clock now.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "this is the one place where clocks are read")]
    pub fn new() -> Self {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Self { start: u64::try_from(unix.as_micros()).unwrap_or(0).saturating_sub(ticks::micros()) }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    #[inline(always)]
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.start + ticks::micros())
    }
}

/// A clock that stands still until it is advanced, for tests, impact previews and simulations.
///
/// ```
/// use tollgate_core::{Clock, ManualClock, TimeDelta, Timestamp};
/// let clock = ManualClock::at(Timestamp::from_secs(1_000));
/// clock.advance(TimeDelta::from_secs(19));
/// assert_eq!(clock.now(), Timestamp::from_secs(1_019));
/// ```
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// Creates a clock that stands at `now`.
    #[must_use]
    pub const fn at(now: Timestamp) -> Self {
        Self(AtomicU64::new(now.as_micros()))
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: TimeDelta) {
        self.0.fetch_add(by.as_micros(), Ordering::SeqCst);
    }

    /// Sets the clock to any instant, including earlier ones, so that tests can move time backward.
    pub fn set(&self, now: Timestamp) {
        self.0.store(now.as_micros(), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Timestamp::from_micros(self.0.load(Ordering::SeqCst))
    }
}
