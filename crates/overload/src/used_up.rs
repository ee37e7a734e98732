//! Counters that were found used up a moment ago, so that the next request does not ask for them in vain.
//!
//! A mark lasts [`USED_UP`], or until the counter is seen to have room again. Marks are kept in a table of fixed
//! size by a keyed hash of the counter: where two meet, the later one stays, and the other counter is asked once more than needed.

use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_core::{TimeDelta, Timestamp};

/// Time for which a counter that was found used up is not asked again.
const USED_UP: TimeDelta = TimeDelta::from_millis(10);
const SLOTS: usize = 1024;
/// Bits of a mark that are the end of its time, in microseconds; the others are those of the counter's hash.
const TIME_BITS: u32 = 40;
const TIME: u64 = (1 << TIME_BITS) - 1;

/// Marks of counters, by their hashes.
#[derive(Debug)]
pub struct UsedUpMarks(Box<[AtomicU64]>);

impl Default for UsedUpMarks {
    fn default() -> Self {
        Self((0..SLOTS).map(|_| AtomicU64::new(0)).collect())
    }
}

impl UsedUpMarks {
    fn slot(&self, counter: u64) -> &AtomicU64 {
        &self.0[counter as usize % SLOTS]
    }

    /// Records that a counter is used up.
    pub fn mark(&self, now: Timestamp, counter: u64) {
        let until = (now + USED_UP).as_micros() & TIME;
        self.slot(counter).store((counter & !TIME) | until, Ordering::Relaxed);
    }

    /// Records that a counter has room again.
    pub fn lift(&self, counter: u64) {
        let slot = self.slot(counter);
        let mark = slot.load(Ordering::Relaxed);
        if mark != 0 && mark & !TIME == counter & !TIME {
            // A mark that was set meanwhile stays.
            let _ = slot.compare_exchange(mark, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Returns whether a counter was found used up a moment ago.
    #[must_use]
    pub fn is_marked(&self, now: Timestamp, counter: u64) -> bool {
        let mark = self.slot(counter).load(Ordering::Relaxed);
        // Times are compared without their upper bits: what is left of a mark is never more than its whole time.
        let left = (mark & TIME).wrapping_sub(now.as_micros()) & TIME;
        mark & !TIME == counter & !TIME && (1..=USED_UP.as_micros()).contains(&left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(millis: u64) -> Timestamp {
        Timestamp::from_micros(1_000_000 + millis * 1_000)
    }

    #[test]
    fn a_counter_that_is_used_up_is_left_alone_for_a_moment() {
        let marks = UsedUpMarks::default();
        let (one, other) = (7 << TIME_BITS | 5, 8 << TIME_BITS | 5);
        assert!(!marks.is_marked(at(0), one));
        marks.mark(at(0), one);
        assert!(marks.is_marked(at(9), one) && !marks.is_marked(at(9), other), "each has its own");
        assert!(!marks.is_marked(at(10), one));
        marks.mark(at(10), other);
        assert!(marks.is_marked(at(11), other) && !marks.is_marked(at(11), one));
        marks.lift(one);
        assert!(marks.is_marked(at(11), other), "not that of another counter");
        marks.lift(other);
        assert!(!marks.is_marked(at(11), other), "it has room again");
    }

    proptest! {
        /// Whatever the time is, also where its lower bits begin anew.
        #[test]
        fn a_mark_lasts_as_long_at_any_time(now: u64, after in 0_u64..1 << 41, counter: u64) {
            let (marks, now) = (UsedUpMarks::default(), Timestamp::from_micros(now >> 2));
            marks.mark(now, counter);
            let is_marked = marks.is_marked(now + TimeDelta::from_micros(after), counter);
            prop_assert_eq!(is_marked, after & TIME < USED_UP.as_micros());
        }
    }
}
