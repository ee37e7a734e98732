//! Meter of an upstream: how slow it is and how many requests it has, for signals that limits follow.
//!
//! A request touches atomics of its thread's stripe, and one that all requests to the upstream share. Latencies are counted
//! in buckets of 6%; the 99th percentile is that of the last two readings' time, so that one reading with few requests does
//! not swing it. Numbers in flight and waiting are the means of what arriving requests find, which a reading at one instant
//! is not.

use crate::striped::{Padded, Striped};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use tollgate_core::TimeDelta;

/// Buckets of latencies: 64 µs each below 2 ms, then sixteen to an octave, up to 33 s.
const BUCKETS: usize = 256;
/// Microseconds of the first buckets.
const UNIT: u64 = 64;
const EXACT: u64 = 32;
/// Responses that have a meaningful percentile.
const SEVERAL: u64 = 10;

const IN_FLIGHT: usize = 0;
const WAITING: usize = 1;

/// Meter of an upstream.
#[derive(Debug)]
pub struct UpstreamMeter {
    in_flight: Padded<AtomicU32>,
    /// What arriving requests found.
    found: Striped<2>,
    latencies: Striped<BUCKETS>,
    /// The latest 99th percentile in microseconds; `u64::MAX` until there is one.
    p99: AtomicU64,
    /// Latencies of the reading before.
    before: Mutex<[u32; BUCKETS]>,
}

/// A reading of a meter.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// 99th percentile of the latency in seconds, if there were several responses.
    pub p99: Option<f64>,
    /// Mean number of requests in flight.
    pub in_flight: f64,
    /// Mean number of requests that wait for a place in flight.
    pub waiting: f64,
}

impl Default for UpstreamMeter {
    fn default() -> Self {
        Self {
            in_flight: Padded(AtomicU32::new(0)),
            found: Striped::new(),
            latencies: Striped::new(),
            p99: AtomicU64::new(u64::MAX),
            before: Mutex::new([0; BUCKETS]),
        }
    }
}

impl UpstreamMeter {
    /// Counts a request that arrives while this many wait for a place.
    #[inline]
    pub fn arrive(&self, waiting: u32) {
        self.found.add(IN_FLIGHT, self.in_flight.0.load(Ordering::Relaxed).into());
        self.found.add(WAITING, waiting.into());
    }

    /// Counts a request as in flight. Call [`UpstreamMeter::end`] once for it.
    #[inline]
    pub fn begin(&self) {
        self.in_flight.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts the time to the head of a response.
    #[inline]
    pub fn respond(&self, latency: TimeDelta) {
        self.latencies.count(bucket(latency.as_micros()));
    }

    /// Ends a request that is no longer in flight. One without a response that was abandoned after more than the 99th
    /// percentile would have taken even longer, and counts as slow.
    #[inline]
    pub fn end(&self, abandoned_after: Option<TimeDelta>) {
        self.in_flight.0.fetch_sub(1, Ordering::Relaxed);
        if let Some(age) = abandoned_after
            && age.as_micros() > self.p99.load(Ordering::Relaxed)
        {
            self.respond(age);
        }
    }

    /// Reads the meter: what was counted since the last reading, and latencies also of the one before.
    pub fn read(&self) -> Measured {
        let mean = |at| {
            let (count, sum) = self.found.take(at);
            if count == 0 { 0.0 } else { sum as f64 / f64::from(count) }
        };
        let mut before = self.before.lock().unwrap_or_else(PoisonError::into_inner);
        let both: [u32; BUCKETS] = std::array::from_fn(|at| {
            let new = self.latencies.take(at).0;
            new.saturating_add(std::mem::replace(&mut before[at], new))
        });
        drop(before);
        let p99 = percentile(&both, 0.99);
        let known = p99.map_or(u64::MAX, |seconds| (seconds * 1e6) as u64);
        self.p99.store(known, Ordering::Relaxed);
        Measured { p99, in_flight: mean(IN_FLIGHT), waiting: mean(WAITING) }
    }
}

const fn bucket(micros: u64) -> usize {
    let units = micros / UNIT;
    if units < EXACT {
        return units as usize;
    }
    let octave = 63 - units.leading_zeros() as usize;
    let fine = (units >> (octave - 4)) & 15;
    let at = EXACT as usize + (octave - 5) * 16 + fine as usize;
    if at < BUCKETS { at } else { BUCKETS - 1 }
}

/// Returns where a bucket begins, in microseconds.
const fn begin(at: usize) -> u64 {
    if at < EXACT as usize {
        return at as u64 * UNIT;
    }
    let (octave, fine) = ((at - EXACT as usize) / 16, (at - EXACT as usize) % 16);
    ((16 + fine as u64) << (octave + 1)) * UNIT
}

/// Returns a percentile in seconds, interpolated within its bucket.
fn percentile(counts: &[u32; BUCKETS], part: f64) -> Option<f64> {
    let total: u64 = counts.iter().map(|count| u64::from(*count)).sum();
    if total < SEVERAL {
        return None;
    }
    let (wanted, mut below) = (total as f64 * part, 0.0);
    for (at, count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
        let own = f64::from(*count);
        if below + own >= wanted {
            let (from, to) = (begin(at) as f64, begin(at + 1) as f64);
            return Some((from + (to - from) * (wanted - below) / own) / 1e6);
        }
        below += own;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn buckets_have_no_gaps_and_do_not_overlap() {
        for at in 0..BUCKETS - 1 {
            assert!(begin(at) < begin(at + 1), "{at}");
            assert_eq!((bucket(begin(at)), bucket(begin(at + 1) - 1)), (at, at));
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
        assert!(begin(BUCKETS - 1) > 30_000_000, "half a minute");
    }

    #[test]
    fn the_percentile_is_of_two_readings_and_needs_several_responses() {
        let meter = UpstreamMeter::default();
        (0..9).for_each(|_| meter.respond(TimeDelta::from_millis(20)));
        assert_eq!(meter.read().p99, None);
        meter.respond(TimeDelta::from_millis(20));
        let p99 = meter.read().p99.expect("ten responses");
        assert!((0.018..0.022).contains(&p99), "{p99}");
        assert_eq!(meter.read().p99, None, "the nine are too old");
        (0..98).for_each(|_| meter.respond(TimeDelta::from_millis(20)));
        (0..2).for_each(|_| meter.respond(TimeDelta::from_millis(900)));
        let p99 = meter.read().p99.expect("a hundred");
        assert!((0.8..1.0).contains(&p99), "{p99}");
    }

    /// Otherwise an upstream that answers no request in time would have no latency at all.
    #[test]
    fn requests_that_were_abandoned_late_count_as_slow() {
        let meter = UpstreamMeter::default();
        (0..20).for_each(|_| meter.respond(TimeDelta::from_millis(20)));
        meter.read();
        for after in [1, 1_000] {
            (0..50).for_each(|_| meter.begin());
            (0..50).for_each(|_| meter.end(Some(TimeDelta::from_millis(after))));
            let p99 = meter.read().p99;
            assert_eq!(p99.is_some_and(|p99| p99 > 0.9), after == 1_000, "{p99:?}");
            (0..20).for_each(|_| meter.respond(TimeDelta::from_millis(20)));
            meter.read();
        }
    }

    #[test]
    fn means_are_what_arriving_requests_find() {
        let meter = UpstreamMeter::default();
        for waiting in [0, 0, 6] {
            meter.arrive(waiting);
            meter.begin();
        }
        let found = meter.read();
        assert_eq!((found.in_flight, found.waiting), (1.0, 2.0));
        (0..3).for_each(|_| meter.end(None));
        meter.arrive(0);
        assert_eq!(meter.read().in_flight, 0.0);
        assert_eq!(meter.read(), Measured::default(), "nobody arrived");
    }

    proptest! {
        #[test]
        fn the_percentile_is_within_a_bucket_of_the_exact_one(mut micros in prop::collection::vec(1u64..20_000_000, 10..500)) {
            let meter = UpstreamMeter::default();
            micros.iter().for_each(|one| meter.respond(TimeDelta::from_micros(*one)));
            micros.sort_unstable();
            let exact = micros[((micros.len() as f64 * 0.99).ceil() as usize - 1).min(micros.len() - 1)] as f64;
            let found = meter.read().p99.expect("several") * 1e6;
            prop_assert!((found - exact).abs() <= 64.0 + exact * 0.07, "{found} for {exact}");
        }
    }
}
