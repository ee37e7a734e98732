//! Which hits of a request count as within, near or over a limit, as envoyproxy/ratelimit weighs them: of a request that
//! crosses the limit the part above it is over, and the part between the ratio and the limit is near.
//!
//! A denial does not say how much was used before. The last use that an outcome reported is kept, for a bounded number of
//! counters; where it is not known, the request counts as if the limit had been used up, or unused if it could never have
//! fitted.

use std::sync::atomic::{AtomicU64, Ordering};

/// Number of counters whose last use is kept.
const COUNTERS: usize = 16_384;

/// The use of a counter whose last hits did not fit.
const DENIED: u64 = u32::MAX as u64;

/// The hits of a charge by where they lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Weights {
    pub(super) within: u64,
    pub(super) near: u64,
    pub(super) over: u64,
}

impl Weights {
    /// Weighs hits that fitted; `after` is what is used with them.
    pub(super) fn fitting(hits: u64, after: u64, near: u64) -> Self {
        let before = after.saturating_sub(hits);
        Self { within: hits, near: after.saturating_sub(near.max(before)), over: 0 }
    }

    /// Weighs hits that did not fit; `before` is what was used without them.
    pub(super) fn denied(hits: u64, before: u64, max: u64, near: u64) -> Self {
        if before >= max {
            return Self { over: hits, ..Self::default() };
        }
        let over = before.saturating_add(hits).saturating_sub(max);
        Self { within: 0, near: max - near.max(before).min(max), over }
    }
}

/// The last use of counters, by a hash of each. A counter takes the place of another with the same remainder.
#[derive(Debug)]
pub(super) struct LastUse {
    /// In each place a tag of the counter and its window, and below it the use; both 32 bits.
    places: Box<[AtomicU64]>,
}

impl Default for LastUse {
    fn default() -> Self {
        Self { places: (0..COUNTERS).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl LastUse {
    fn place(&self, counter: u64, window: u64) -> (&AtomicU64, u64) {
        let place = usize::try_from(counter % COUNTERS as u64).unwrap_or_default();
        // Windows are seconds: multiplied, they change the upper bits too. A tag is never that of an empty place.
        let tag = (counter ^ window.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 32 | 1;
        (&self.places[place], tag)
    }

    /// Records what is used of a counter in a window.
    pub(super) fn record(&self, counter: u64, window: u64, used: u64) {
        let (place, tag) = self.place(counter, window);
        place.store(tag << 32 | used.min(DENIED - 1), Ordering::Relaxed);
    }

    /// Records that hits did not fit into a window.
    pub(super) fn record_denial(&self, counter: u64, window: u64) {
        let (place, tag) = self.place(counter, window);
        place.store(tag << 32 | DENIED, Ordering::Relaxed);
    }

    /// Returns whether the last hits of a window did not fit, as far as is known.
    pub(super) fn was_denied(&self, counter: u64, window: u64) -> bool {
        let (place, tag) = self.place(counter, window);
        place.load(Ordering::Relaxed) == tag << 32 | DENIED
    }

    /// Returns what was used of a counter in this window, before hits that did not fit.
    pub(super) fn before(&self, counter: u64, window: u64, hits: u64, max: u64) -> u64 {
        let (place, tag) = self.place(counter, window);
        let known = place.load(Ordering::Relaxed);
        match known >> 32 == tag {
            // Hits that did not fit leave no room for less.
            true if known & DENIED == DENIED => max,
            true => (known & DENIED).max(max.saturating_add(1).saturating_sub(hits)),
            false if hits > max => 0,
            false => max,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_are_weighed_as_the_service_does() {
        let (max, near) = (10, 8);
        assert_eq!(Weights::fitting(1, 8, near), Weights { within: 1, near: 0, over: 0 });
        assert_eq!(Weights::fitting(1, 9, near), Weights { within: 1, near: 1, over: 0 });
        assert_eq!(Weights::fitting(5, 9, near), Weights { within: 5, near: 1, over: 0 });
        assert_eq!(Weights::denied(5, 7, max, near), Weights { within: 0, near: 2, over: 2 });
        assert_eq!(Weights::denied(5, 8, max, near), Weights { within: 0, near: 2, over: 3 });
        assert_eq!(Weights::denied(1, 0, 0, 8), Weights { within: 0, near: 0, over: 1 });
        assert_eq!(Weights::denied(5, 9, max, near), Weights { within: 0, near: 1, over: 4 });
        assert_eq!(Weights::denied(5, 10, max, near), Weights { within: 0, near: 0, over: 5 });
    }

    #[test]
    fn the_last_use_is_that_of_the_window() {
        let last = LastUse::default();
        assert_eq!(last.before(1, 60, 5, 10), 10, "not known");
        assert_eq!(last.before(1, 60, 15, 10), 0, "it could never have fitted");
        last.record(1, 60, 7);
        assert_eq!(last.before(1, 60, 5, 10), 7);
        assert_eq!(last.before(1, 60, 2, 10), 9, "others have used more since");
        assert_eq!(last.before(1, 120, 5, 10), 10, "another window");
        assert!(!last.was_denied(1, 60));
        last.record_denial(1, 60);
        assert!(last.was_denied(1, 60) && !last.was_denied(1, 120));
        assert_eq!(last.before(1, 60, 5, 10), 10, "used up");
        last.record((1 << 40) + 1, 60, 3);
        assert_eq!(last.before(1, 60, 5, 10), 10, "another counter has its place");
    }
}
