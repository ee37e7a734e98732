//! When a call is hedged: after a fixed time, or after the 95th percentile of the latency that this client measures
//! (`clients/conformance/README.md`, section Hedge after). The estimate is a histogram with halved counts: a few hundred
//! bytes, integers only, and the same in every language. Rejected: a sorted window of samples, because it needs a lock and
//! more memory, and a quantile that moves by steps, because how fast it moves depends on the unit of time.
//!
//! Recording is two atomic additions; every hundredth one also reads the histogram. Threads that do so at the same time may
//! halve the counts once too often, which forgets a little sooner.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

/// When the next server is asked as well.
///
/// ```
/// use std::time::Duration;
/// use tollgate_sdk::HedgeAfter;
/// assert_eq!(HedgeAfter::from(Duration::from_millis(3)), HedgeAfter::Fixed(Duration::from_millis(3)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HedgeAfter {
    /// After this time; 3 ms suits servers on the same network.
    Fixed(Duration),
    /// After the 95th percentile of the latency of recent first requests: those that a call sends before any hedge. At least 1 ms;
    /// 3 ms until there are 100 of them.
    P95,
}

impl From<Duration> for HedgeAfter {
    fn from(after: Duration) -> Self {
        Self::Fixed(after)
    }
}

/// The time of a hedge until enough is measured, and a good one for servers on the same network.
pub(crate) const DEFAULT: Duration = Duration::from_millis(3);

/// Latencies are counted in this unit, rounded up.
const UNIT_MICROS: u128 = 125;
/// 1 ms or less, then eight buckets for each doubling, to 16.384 s and more.
const BUCKETS: usize = 1 + 8 * 14;
/// Requests between two estimates, and before the first.
const ESTIMATE_EVERY: u32 = 100;
/// When an estimate finds this many, it halves all counts.
const HALVE_AT: u32 = 1_000;

/// Returns the bucket of a latency.
fn bucket(latency: Duration) -> usize {
    // Below this, the first bucket.
    let Some(above) = latency.as_micros().div_ceil(UNIT_MICROS).checked_sub(1).filter(|units| *units >= 8)
    else {
        return 0;
    };
    let doublings = above.ilog2() - 3;
    let eighths = usize::try_from(above >> doublings).unwrap_or(usize::MAX);
    (8 * doublings as usize + eighths - 7).min(BUCKETS - 1)
}

/// Returns the longest latency of a bucket.
fn upper_edge(bucket: usize) -> Duration {
    let micros = match bucket.checked_sub(1) {
        None => 1_000,
        Some(above) => 125 * ((above as u64 % 8 + 9) << (above / 8)),
    };
    Duration::from_micros(micros)
}

/// How a first request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    Answered,
    Faulted,
}

/// The 95th percentile of the latency of recent first requests.
#[derive(Debug)]
pub(crate) struct LatencyP95 {
    counts: [AtomicU32; BUCKETS],
    recorded: AtomicU32,
    /// Bucket whose upper edge is the estimate.
    estimate: AtomicU8,
}

impl Default for LatencyP95 {
    fn default() -> Self {
        Self {
            counts: [const { AtomicU32::new(0) }; BUCKETS],
            recorded: AtomicU32::new(0),
            estimate: AtomicU8::new(bucket_number(bucket(DEFAULT))),
        }
    }
}

fn bucket_number(bucket: usize) -> u8 {
    u8::try_from(bucket).unwrap_or(u8::MAX)
}

impl LatencyP95 {
    /// Returns the estimate.
    pub(crate) fn get(&self) -> Duration {
        upper_edge(self.estimate.load(Ordering::Relaxed).into())
    }

    /// Records how long a first request took, also if a hedge was faster: without the slow ones the estimate would sink with
    /// every hedge. A fault that came sooner than the estimate says nothing about answers.
    pub(crate) fn record(&self, latency: Duration, ended: Ended) {
        let bucket = bucket(latency);
        if ended == Ended::Faulted && bucket < self.estimate.load(Ordering::Relaxed).into() {
            return;
        }
        self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        if self.recorded.fetch_add(1, Ordering::Relaxed) % ESTIMATE_EVERY == ESTIMATE_EVERY - 1 {
            self.update_estimate();
        }
    }

    /// Returns how many were recorded.
    #[cfg(test)]
    pub(crate) fn recorded(&self) -> u32 {
        self.recorded.load(Ordering::Relaxed)
    }

    fn update_estimate(&self) {
        let counts = self.counts.each_ref().map(|count| u64::from(count.load(Ordering::Relaxed)));
        let total: u64 = counts.iter().sum();
        let mut below = 0;
        let p95 = counts.iter().position(|count| {
            below += count;
            below * 100 >= total * 95
        });
        self.estimate.store(bucket_number(p95.unwrap_or_default()), Ordering::Relaxed);
        if total >= HALVE_AT.into() {
            for count in &self.counts {
                let _ = count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| Some(count / 2));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance_cases::load_cases;
    use serde_json::{Value, json};

    fn number(value: &Value) -> u64 {
        value.as_u64().expect("a number")
    }

    /// A client that hedges sooner than others loads the servers that all of them share.
    #[test]
    fn the_estimate_is_that_of_the_other_clients() {
        let data = load_cases("hedge-after");
        for case in data["cases"].as_array().filter(|cases| !cases.is_empty()).expect("cases") {
            let latency = LatencyP95::default();
            for step in case["steps"].as_array().expect("steps") {
                let ended = if step["fault"] == true { Ended::Faulted } else { Ended::Answered };
                for _ in 0..number(&step["times"]) {
                    for micros in step["latencies_us"].as_array().expect("latencies") {
                        latency.record(Duration::from_micros(number(micros)), ended);
                    }
                }
                let after = u64::try_from(latency.get().as_micros()).expect("a short time");
                assert_eq!(json!(after), step["expect"]["hedge_after_us"], "{}: {step}", case["name"]);
            }
        }
    }

    /// A latency that is longer than its bucket's edge would be hedged although it is not slow.
    #[test]
    fn a_bucket_has_the_latencies_up_to_its_edge() {
        for at in 0..BUCKETS - 1 {
            let edge = upper_edge(at);
            assert_eq!((bucket(edge), bucket(edge + Duration::from_micros(1))), (at, at + 1));
            assert!(upper_edge(at + 1) <= edge + edge / 8);
        }
        assert_eq!((bucket(Duration::ZERO), bucket(Duration::MAX)), (0, BUCKETS - 1));
    }

    /// Counts that threads lose or halve below zero would make the estimate jump.
    #[test]
    fn threads_record_at_the_same_time() {
        let latency = LatencyP95::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for at in 0..25_000_u64 {
                        let slow = if at % 20 < 2 { 9_000 } else { 2_000 };
                        latency.record(Duration::from_micros(slow), Ended::Answered);
                    }
                });
            }
        });
        assert_eq!(latency.get(), Duration::from_micros(9_000));
        let counts: u32 = latency.counts.iter().map(|count| count.load(Ordering::Relaxed)).sum();
        assert!(counts < 2 * HALVE_AT, "{counts}");
    }
}
