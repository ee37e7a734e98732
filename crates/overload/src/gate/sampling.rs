//! Which requests are measured: their latency, and from where in the order of shedding they come.
//!
//! All of them as long as there are few. The controllers need some hundred samples in an interval, not ten thousand, and
//! measuring takes a reading of the clock, a hash and the counters of all threads, more than everything else. So where many
//! complete, one in [`sample_period`](super::places::Bounds::sample_period) is measured, and counts for as many. Which one is known when
//! it begins, whatever its latency will be. The number between two of them is random: a fixed one could follow a pattern of the
//! requests. While requests are shed or wait, all arrivals are counted by their place in the order.

use super::places::{Places, ThreadPlaces};
use crate::cohort::mix;
use crate::striped::Own;
use std::sync::atomic::Ordering;

/// Samples in a second that suffice.
const SUFFICIENT: f64 = 1_000.0;
/// Most requests of which one is measured.
const MAX_PERIOD: f64 = 1_024.0;

/// Returns how many requests are to have one sample where this many complete in a second.
pub(super) fn period(per_second: f64) -> u32 {
    (per_second / SUFFICIENT).clamp(1.0, MAX_PERIOD) as u32
}

impl<W> Places<W> {
    /// Returns how many requests the one that begins counts for as a sample; 0 if it is none.
    #[inline(always)]
    pub(super) fn sample_weight(&self, own: &Own<'_, ThreadPlaces>) -> u16 {
        let period = self.bounds.0.sample_period.load(Ordering::Relaxed);
        let until = &own.value.until_sample;
        let left = until.load(Ordering::Relaxed);
        // A number from a time with a longer period is void.
        if left == 0 || left > 2 * (period - 1) {
            own.value.draw_next_sample(period);
            return period as u16;
        }
        until.store(left - 1, Ordering::Relaxed);
        0
    }
}

impl ThreadPlaces {
    /// Draws the number of requests until the next sample. Apart, because few requests need it.
    #[inline(never)]
    fn draw_next_sample(&self, period: u32) {
        self.until_sample.store(self.random_below(2 * period - 1), Ordering::Relaxed);
    }

    fn random_below(&self, bound: u32) -> u32 {
        if bound == 1 {
            return 0;
        }
        let next = self.random.load(Ordering::Relaxed).wrapping_add(0x9e37_79b9_7f4a_7c15);
        self.random.store(next, Ordering::Relaxed);
        (mix(next) % u64::from(bound)) as u32
    }
}
