//! Adaptive concurrency: how many requests an upstream can work on before more only wait there.
//!
//! By Little's law an upstream that completes X requests a second, each of which takes S without queueing, works on X·S at
//! once: the knee. Below it more requests in flight mean more throughput; above it they mean more latency. S, the base
//! latency, is that of the requests that met the fewest others: every completion is a sample (requests in flight when it
//! began, latency), the samples are kept by the number in flight, and S is the mean of the lowest eighth of them. While the
//! limit is reached, it moves to [`HEADROOM`] × S ÷ (mean latency now) of itself. If the limit is what holds requests back,
//! the mean latency is limit ÷ X and the limit converges to `HEADROOM` times the knee; if it is reached only by bursts, the
//! latency is S, and it rises.
//!
//! A base line that is measured under load must not drift with it. While the limit is reached it is lowered by [`DITHER`]
//! for one interval in [`DITHER_EVERY`], so that there are always samples at a lower number in flight. If these were above
//! the knee too, their latency is proportional to their number, and `HEADROOM × (1 − DITHER)` < 1, so the limit shrinks until
//! they are below it. It cannot rise unless throughput does.
//!
//! A latency that changes for good, or comes back after an outage with fast answers, must become the base line all the same.
//! While the limit is reached, requests begin with no fewer in flight than the lowered limit: samples from below it are of
//! another time, and are forgotten within a second. Requests that were abandoned late move the limit, but are not samples:
//! their latency is their clients' patience. Where nothing completes, nothing is forgotten.
//!
//! Rejected: the smallest latency ever seen (one lucky request, and a permanent slowdown looks like overload for ever); a
//! long-term average (it follows the load upward); probe windows in which the limit falls to a minimum (what arrives then is
//! shed, and what is measured is an empty upstream).

use crate::samples::{Samples, bucket};

/// The limit over the knee: enough that a worker that finishes finds the next request.
const HEADROOM: f64 = 1.15;
/// Part of the limit that is withheld in one interval of [`DITHER_EVERY`].
const DITHER: f64 = 0.2;
const DITHER_EVERY: u64 = 7;
/// Part of the samples, those with the fewest in flight, that give the base latency.
const LOW_SAMPLES: f64 = 0.125;
/// Change of the limit in one interval, as a part of the distance and as factors.
const STEP: f64 = 0.3;
const MAX_FALL: f64 = 0.7;
const MAX_RISE: f64 = 1.1;
/// The initial limit as a multiple of the floor, until there are measurements.
const INITIAL: f64 = 4.0;
/// Until queueing has been seen for the first time, the limit doubles when requests that began near it took no longer than
/// this times the base latency.
const FIRST_QUEUEING: f64 = 1.3;
const AT_LIMIT: f64 = 0.8;
/// Time constants in seconds, and the number of samples that the longer one is extended for.
const THROUGHPUT_MEMORY: f64 = 0.7;
/// Waiting requests, as a part of the limit, from which on an interval is one of full load.
const CONFIDENT: f64 = 0.1;
const LATENCY_MEMORY: f64 = 4.0;
/// Part of the samples from below the lowered limit that is kept after an interval of full load.
const KEPT_BELOW: f64 = 0.8;
/// Requests abandoned late that show queueing.
const SEVERAL: f64 = 8.0;

/// Configuration of the adaptive limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LimitConfig {
    /// The limit never falls below this.
    pub floor: u32,
    /// The limit never rises above this.
    pub ceiling: u32,
}

/// Controller of the limit of requests in flight.
#[derive(Clone, Debug)]
pub(crate) struct LimitController {
    config: LimitConfig,
    limit: f64,
    throughput: f64,
    was_saturated: bool,
    has_queued: bool,
    /// Completions of late and the seconds they took, fading.
    recent: (f64, f64),
    /// The same of requests without a result, as long as they are more than the completions.
    late: (f64, f64),
    /// Those of the present interval.
    new_late: (f64, f64),
    samples: Samples,
    base_latency: Option<f64>,
    ticks: u64,
}

/// What happened in one control interval.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Interval {
    /// Length in seconds.
    pub(crate) length: f64,
    /// Requests completed.
    pub(crate) completed: u32,
    /// Requests that one latency sample stands for.
    pub(crate) per_sample: u32,
    /// Mean number of requests that waited because the limit was reached.
    pub(crate) waiting: f64,
    /// Whether the limit was passed and not enforced: no sample shows the latency without queueing then.
    pub(crate) is_flooded: bool,
}

impl LimitController {
    pub(crate) fn new(config: LimitConfig) -> Self {
        let limit = (f64::from(config.floor) * INITIAL).min(f64::from(config.ceiling));
        Self {
            config,
            limit,
            throughput: 0.0,
            was_saturated: false,
            has_queued: false,
            recent: (0.0, 0.0),
            late: (0.0, 0.0),
            new_late: (0.0, 0.0),
            samples: Samples::default(),
            base_latency: None,
            ticks: 0,
        }
    }

    /// Returns a controller with other bounds that knows what this one has learned.
    pub(crate) fn with_config(&self, config: LimitConfig) -> Self {
        let (floor, ceiling) = (f64::from(config.floor), f64::from(config.ceiling));
        Self { config, limit: self.limit.clamp(floor, ceiling.max(floor)), ..self.clone() }
    }

    /// Adds `count` completions that began with a number in flight of this bucket and took `seconds` together.
    pub(crate) fn add_samples(&mut self, bucket: usize, count: u32, seconds: f64) {
        let count = f64::from(count);
        self.recent = (self.recent.0 + count, self.recent.1 + seconds);
        self.samples.add(bucket, count, seconds);
    }

    /// Adds `count` requests without a result that took `seconds` together, and would have taken longer.
    pub(crate) fn add_late(&mut self, count: u32, seconds: f64) {
        let (sum_count, sum) = self.new_late;
        self.new_late = (sum_count + f64::from(count), sum + seconds);
    }

    /// Ends a control interval.
    pub(crate) fn update(&mut self, interval: Interval) {
        let Interval { length, completed, per_sample, waiting, is_flooded } = interval;
        self.samples.set_per_sample(per_sample.into());
        let is_saturated = waiting > 0.0;
        self.ticks += 1;
        if !is_flooded || self.base_latency.is_none() {
            self.base_latency = self.samples.low_mean(LOW_SAMPLES).or(self.base_latency);
        }
        if completed > 0 {
            self.samples.fade(length, LATENCY_MEMORY, is_saturated);
        }
        if self.was_saturated && waiting >= self.limit * CONFIDENT {
            self.samples.fade_below(bucket(self.lowered_limit()), KEPT_BELOW);
        }
        let current = f64::from(completed) / length;
        let weight = 1.0 - (-length / THROUGHPUT_MEMORY).exp();
        // While no request waits, completions are what arrived: a lower bound of what the upstream is capable of.
        self.throughput = match waiting > 0.0 {
            true if self.was_saturated => {
                let confidence = (waiting / (self.limit * CONFIDENT)).min(1.0);
                self.throughput + confidence * weight * (current - self.throughput)
            }
            _ => self.throughput.max(current),
        };
        self.was_saturated = is_saturated;
        // Where requests are completed again, those that were not are of the past.
        let new_late = std::mem::take(&mut self.new_late);
        let before = if f64::from(completed) > new_late.0 { (0.0, 0.0) } else { self.late };
        self.late = (before.0 + new_late.0, before.1 + new_late.1);
        let (count, seconds) = (self.recent.0 + self.late.0, self.recent.1 + self.late.1);
        if let (true, Some(base)) = (is_saturated, self.base_latency)
            && count >= 1.0
        {
            let latency = seconds / count;
            let at_limit = self.samples.mean_from(bucket((self.limit * AT_LIMIT) as u32));
            let is_slow = |latency: f64| latency > FIRST_QUEUEING * base;
            self.has_queued |= at_limit.is_some_and(is_slow)
                || (self.late.0 >= self.samples.weight_of(SEVERAL) && is_slow(latency));
            let factor = 1.0 + STEP * (HEADROOM * base / latency - 1.0);
            let next = match self.has_queued {
                true => {
                    (self.limit * factor.max(MAX_FALL)).min((self.limit * MAX_RISE).max(self.limit + 1.0))
                }
                false if at_limit.is_some() => self.limit * 2.0,
                false => self.limit,
            };
            let (floor, ceiling) = (f64::from(self.config.floor), f64::from(self.config.ceiling));
            self.limit = next.clamp(floor, ceiling.max(floor));
        }
        self.recent = (self.recent.0 * (1.0 - weight), self.recent.1 * (1.0 - weight));
        self.late = (self.late.0 * (1.0 - weight), self.late.1 * (1.0 - weight));
    }

    /// Returns the limit for the next interval.
    pub(crate) fn limit(&self, is_saturated: bool) -> u32 {
        let is_lowered = is_saturated && self.ticks.is_multiple_of(DITHER_EVERY);
        if is_lowered { self.lowered_limit() } else { self.rounded(self.limit) }
    }

    /// Returns the limit for the intervals in which a part is withheld.
    fn lowered_limit(&self) -> u32 {
        self.rounded(self.limit * (1.0 - DITHER))
    }

    fn rounded(&self, limit: f64) -> u32 {
        (limit.max(f64::from(self.config.floor)).round() as u32).max(1)
    }

    /// Returns the limit without the dither.
    pub(crate) fn steady_limit(&self) -> f64 {
        self.limit
    }

    /// Returns the completions per second that the upstream has shown to be capable of.
    pub(crate) fn throughput(&self) -> f64 {
        self.throughput
    }

    /// Returns the latency without queueing, in seconds, as far as known.
    pub(crate) fn base_latency(&self) -> Option<f64> {
        self.base_latency
    }
}
