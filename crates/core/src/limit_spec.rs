//! Limit specification: the options of a limit, and their validation.
//!
//! An option that has no meaning for an algorithm is rejected, never ignored: a rule must not state what its limit does
//! not do.

use crate::algorithm::Algorithm;
use crate::algorithm::bucket::{Bucket, Shaping, Sharing};
use crate::algorithm::concurrency::Permits;
use crate::algorithm::fixed_window::Counting;
use crate::algorithm::refill_steps::RefillSteps;
use crate::algorithm::sliding_log::AdmissionLog;
use crate::algorithm::strict_window::Slots;
use crate::limit::{Limit, Shape};
use crate::rate::{Period, Rate};
use crate::time::TimeDelta;

/// The specification of a limit. [`LimitSpec::build`] validates it.
///
/// ```
/// use tollgate_core::{Algorithm, LimitSpec, Rate, nonzero};
/// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(100))).burst(20).build()?;
/// assert_eq!(limit.capacity(), 20);
/// # Ok::<(), tollgate_core::LimitError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitSpec {
    /// Algorithm that enforces the limit.
    pub algorithm: Algorithm,
    /// Rate to enforce.
    pub rate: Rate,
    /// Units that may pass at once, for bucket algorithms; the rate's count if absent.
    pub burst: Option<u64>,
    /// Leaky bucket only: returns delays instead of passing its burst at once.
    pub delay: bool,
    /// Slots of a strict window; 10 if absent.
    pub slots: Option<u64>,
    /// Jitter: each key's windows start at a different instant.
    pub jitter: bool,
    /// Token bucket only: its units are added together at the start of each interval of this length, not continuously.
    pub refill_interval: Option<TimeDelta>,
    /// Fixed window only: also counts denied requests, as the Envoy service does.
    pub count_denied: bool,
    /// Bucket algorithms only: limits with other periods may charge the same counter, because the caller states the
    /// whole limit with each request.
    pub any_period: bool,
}

impl LimitSpec {
    /// Creates a specification with this algorithm and rate and no options. For concurrency the count is the number of
    /// permits and the period is the maximum time that one may be held.
    #[must_use]
    pub const fn new(algorithm: Algorithm, rate: Rate) -> Self {
        Self {
            algorithm,
            rate,
            burst: None,
            delay: false,
            slots: None,
            jitter: false,
            refill_interval: None,
            count_denied: false,
            any_period: false,
        }
    }

    /// Sets the burst.
    #[must_use]
    pub fn burst(mut self, burst: u64) -> Self {
        self.burst = Some(burst);
        self
    }

    /// Makes a leaky bucket return delays.
    #[must_use]
    pub fn with_delay(mut self) -> Self {
        self.delay = true;
        self
    }

    /// Sets the number of slots of a strict window.
    #[must_use]
    pub fn slots(mut self, slots: u64) -> Self {
        self.slots = Some(slots);
        self
    }

    /// Starts each key's windows at a different instant.
    #[must_use]
    pub fn jitter(mut self) -> Self {
        self.jitter = true;
        self
    }

    /// Refills a token bucket at intervals: a share of the rate at the start of each, counted from the Unix epoch.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, Rate, State, TimeDelta, Timestamp, Verdict, nonzero};
    /// // Ten tokens every ten seconds.
    /// let limit = LimitSpec::new(Algorithm::TokenBucket, Rate::per_minute(nonzero!(60)))
    ///     .burst(20)
    ///     .refill_interval(TimeDelta::from_secs(10))
    ///     .build()?;
    /// let (mut state, now) = (State::default(), Timestamp::from_secs(1_003));
    /// assert!(limit.step(&mut state, now, Cost::new(20)).verdict.is_allowed());
    /// let denied = limit.step(&mut state, now, Cost::ONE);
    /// assert_eq!(denied.verdict, Verdict::Denied { retry_after: Some(TimeDelta::from_secs(7)) });
    /// assert_eq!(limit.step(&mut state, Timestamp::from_secs(1_010), Cost::PEEK).remaining, 10);
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn refill_interval(mut self, interval: TimeDelta) -> Self {
        self.refill_interval = Some(interval);
        self
    }

    /// Makes a fixed window count denied requests.
    #[must_use]
    pub fn count_denied(mut self) -> Self {
        self.count_denied = true;
        self
    }

    /// Lets limits with other periods charge the same counter: what this one has counted stays when another denies.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, Cost, LimitSpec, Rate, State, Timestamp, nonzero};
    /// let hourly = LimitSpec::new(Algorithm::Gcra, Rate::per_hour(nonzero!(5))).any_period().build()?;
    /// let secondly = LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(1))).any_period().build()?;
    /// let (mut state, now) = (State::default(), Timestamp::from_secs(1_000));
    /// assert!(hourly.step(&mut state, now, Cost::new(5)).verdict.is_allowed());
    /// assert!(secondly.step(&mut state, now, Cost::ONE).verdict.is_denied());
    /// assert!(hourly.step(&mut state, now, Cost::ONE).verdict.is_denied());
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn any_period(mut self) -> Self {
        self.any_period = true;
        self
    }

    /// Validates the specification and precomputes what stepping needs.
    ///
    /// # Errors
    /// A [`LimitError`] that names the invalid option.
    pub fn build(self) -> Result<Limit, LimitError> {
        let LimitSpec {
            algorithm,
            rate,
            burst,
            delay,
            slots,
            jitter,
            refill_interval,
            count_denied,
            any_period,
        } = self;
        let length = rate.period.length();
        if rate.count > Rate::MAX_COUNT || burst.is_some_and(|burst| burst > Rate::MAX_COUNT) {
            return Err(LimitError::TooMany);
        }
        if length < Period::MIN_LENGTH || length > Period::MAX_LENGTH {
            return Err(LimitError::Period(length));
        }
        let calendar = matches!(rate.period, Period::Calendar(_));
        if calendar && algorithm != Algorithm::FixedWindow {
            return Err(LimitError::CalendarNeedsFixedWindow(algorithm));
        }
        if burst.is_some() && !algorithm.has_burst() {
            return Err(LimitError::NoBurst(algorithm));
        }
        if let Some(interval) = refill_interval {
            if !algorithm.has_refill_interval() {
                return Err(LimitError::RefillIntervalNeedsTokenBucket(algorithm));
            }
            if interval < Period::MIN_LENGTH || interval > Period::MAX_LENGTH {
                return Err(LimitError::RefillInterval(interval));
            }
        }
        if jitter && (calendar || !algorithm.has_windows() && refill_interval.is_none()) {
            return Err(LimitError::NoJitter(algorithm));
        }
        if delay && algorithm != Algorithm::LeakyBucket {
            return Err(LimitError::DelayNeedsLeakyBucket(algorithm));
        }
        if slots.is_some() && algorithm != Algorithm::StrictWindow {
            return Err(LimitError::NoSlots(algorithm));
        }
        if count_denied && algorithm != Algorithm::FixedWindow {
            return Err(LimitError::CountDeniedNeedsFixedWindow(algorithm));
        }
        if any_period && !algorithm.has_burst() {
            return Err(LimitError::AnyPeriodNeedsBucket(algorithm));
        }
        let capacity = burst.unwrap_or(rate.count);
        let shape = match algorithm {
            Algorithm::Gcra | Algorithm::TokenBucket | Algorithm::LeakyBucket => {
                if rate.count == 0 || capacity == 0 {
                    Shape::Blocked
                } else {
                    let shaping = if delay { Shaping::Delay } else { Shaping::Police };
                    let sharing = if any_period { Sharing::AnyPeriod } else { Sharing::SamePeriod };
                    let bucket = Bucket::new(rate.count, length, capacity, shaping, sharing);
                    let bucket = bucket.ok_or(LimitError::TooSlow)?;
                    match refill_interval {
                        Some(interval) => Shape::Stepped(bucket, RefillSteps::new(interval)),
                        None => Shape::Bucket(bucket),
                    }
                }
            }
            Algorithm::FixedWindow if count_denied => Shape::Fixed(Counting::Attempts),
            Algorithm::FixedWindow => Shape::Fixed(Counting::Admitted),
            Algorithm::SlidingWindow => Shape::Sliding,
            Algorithm::StrictWindow => {
                let k = slots.unwrap_or(Slots::DEFAULT);
                if k == 0 || k > Slots::MAX {
                    return Err(LimitError::Slots(k));
                }
                Shape::Strict(Slots::new(k, length))
            }
            Algorithm::SlidingLog if rate.count > AdmissionLog::MAX_LIMIT => {
                return Err(LimitError::LogTooLarge);
            }
            Algorithm::SlidingLog => Shape::Log(None),
            Algorithm::Concurrency if rate.count > Permits::MAX_LIMIT => {
                return Err(LimitError::TooManyPermits);
            }
            Algorithm::Concurrency => Shape::Permits,
        };
        let limit = Limit { algorithm, rate, capacity, jitter, refill_interval, shape, packed: None };
        Ok(Limit { packed: limit.packing(), ..limit })
    }
}

impl Limit {
    /// Returns one of `nodes` equal shares of this limit, at least one unit; the algorithm and the period stay.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(100))).burst(20).build()?;
    /// let share = limit.per_node_share(4);
    /// assert_eq!((share.rate().count, share.capacity()), (25, 5));
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn per_node_share(&self, nodes: u32) -> Self {
        let share = |units: u64| if units == 0 { 0 } else { (units / u64::from(nodes.max(1))).max(1) };
        self.resized(share)
    }

    /// Divides the limit into this many shards, which sum to it exactly: the first ones get the remainders. A limit
    /// with fewer units than shards has shards that admit nothing.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(100))).burst(20).build()?;
    /// let shards: Vec<_> = limit.shards(8).iter().map(|shard| (shard.rate().count, shard.capacity())).collect();
    /// assert_eq!(shards, [(13, 3), (13, 3), (13, 3), (13, 3), (12, 2), (12, 2), (12, 2), (12, 2)]);
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn shards(&self, shards: u32) -> Box<[Self]> {
        let parts = u64::from(shards).min(self.rate.count).min(self.capacity).max(1);
        let shard = |at: u64| {
            let part = |units: u64| units / parts + u64::from(at < units % parts);
            self.resized(|units| if at < parts { part(units) } else { 0 })
        };
        (0..u64::from(shards)).map(shard).collect()
    }

    /// Returns the part of the limit that the weight at index `at` has. The parts of all weights sum to the limit exactly,
    /// count and burst alike; a part of less than a unit admits nothing.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(100))).burst(20).build()?;
    /// let parts = [0, 1, 2].map(|at| limit.weighted_part(&[2, 1, 1], at));
    /// assert_eq!(parts.map(|part| (part.rate().count, part.capacity())), [(50, 10), (25, 5), (25, 5)]);
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn weighted_part(&self, weights: &[u64], at: usize) -> Self {
        let sum = |until: usize| weights[..until].iter().map(|weight| u128::from(*weight)).sum::<u128>();
        let (before, through, all) =
            (sum(at.min(weights.len())), sum((at + 1).min(weights.len())), sum(weights.len()));
        let below = |units: u64, weight: u128| u128::from(units) * weight / all.max(1);
        let part = |units: u64| u64::try_from(below(units, through) - below(units, before)).unwrap_or(0);
        self.part(part)
    }

    /// Returns the limit with the units that `part` gives of its count and of its burst.
    #[must_use]
    pub fn part(&self, part: impl Fn(u64) -> u64) -> Self {
        // What cannot be built (a burst that would take decades to refill) admits nothing, never the whole limit.
        self.try_resized(part).or_else(|| self.try_resized(|_| 0)).unwrap_or_else(|| self.clone())
    }

    /// Returns this fraction of the limit, rounded down; `None` if that is less than a unit. Fractions that sum to one
    /// or less admit no more than the whole limit.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(100))).burst(20).build()?;
    /// let part = limit.fraction(95, 100).ok_or(tollgate_core::LimitError::TooMany)?;
    /// assert_eq!((part.rate().count, part.capacity()), (95, 19));
    /// assert_eq!(limit.fraction(1, 25), None);
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn fraction(&self, parts: u64, of: u64) -> Option<Self> {
        let part = |units: u64| {
            u64::try_from(u128::from(units) * u128::from(parts) / u128::from(of.max(1))).unwrap_or(units)
        };
        let smaller = self.resized(part);
        (smaller.capacity > 0 && smaller.rate.count > 0 && smaller.capacity <= part(self.capacity))
            .then_some(smaller)
    }

    /// Returns a limit that admits in any span of its period no more than this one in one window; for a counter whose
    /// windows begin at other times than those of the counter beside which it counts. Calendar windows stay.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, nonzero};
    /// let windows = LimitSpec::new(Algorithm::FixedWindow, Rate::per_minute(nonzero!(100))).build()?;
    /// assert_eq!(windows.for_any_span().algorithm(), Algorithm::StrictWindow);
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn for_any_span(&self) -> Self {
        let is_aligned = matches!(self.rate.period, Period::Calendar(_));
        if self.algorithm != Algorithm::FixedWindow || is_aligned {
            return self.clone();
        }
        let spec = LimitSpec { algorithm: Algorithm::StrictWindow, ..self.spec() };
        spec.build().unwrap_or_else(|_| self.clone())
    }

    /// Returns the limit with this many units kept free: it admits as much less at one instant, but at least one unit if
    /// it had any. A bucket keeps its rate. For units of its counter that are used elsewhere and not counted yet.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(100))).burst(20).build()?;
    /// let smaller = limit.keeping_free(5);
    /// assert_eq!((smaller.rate().count, smaller.capacity()), (100, 15));
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn keeping_free(&self, units: u64) -> Self {
        let left = self.capacity.saturating_sub(units).max(self.capacity.min(1));
        let mut spec = self.spec();
        if self.algorithm.has_burst() {
            spec.burst = Some(left);
        } else {
            spec.rate.count = left;
        }
        spec.build().unwrap_or_else(|_| self.clone())
    }

    /// Returns this many thousandths of the limit, rounded down, but at least one unit if the limit had any.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, nonzero};
    /// let limit = LimitSpec::new(Algorithm::Gcra, Rate::per_minute(nonzero!(100))).burst(20).build()?;
    /// let tighter = limit.scaled_permille(125);
    /// assert_eq!((tighter.rate().count, tighter.capacity()), (12, 2));
    /// assert_eq!(limit.scaled_permille(1).capacity(), 1);
    /// # Ok::<(), tollgate_core::LimitError>(())
    /// ```
    #[must_use]
    pub fn scaled_permille(&self, thousandths: u32) -> Self {
        self.resized(|units| if units == 0 { 0 } else { (units * u64::from(thousandths) / 1_000).max(1) })
    }

    /// Returns a limit of the same kind with another rate. Calendar periods use fixed windows.
    ///
    /// # Errors
    /// A [`LimitError`] that names the invalid option.
    pub fn with_rate(&self, rate: Rate, burst: Option<u64>) -> Result<Self, LimitError> {
        let like = self.spec();
        if matches!(rate.period, Period::Calendar(_)) && self.algorithm != Algorithm::FixedWindow {
            return LimitSpec { burst, ..LimitSpec::new(Algorithm::FixedWindow, rate) }.build();
        }
        let jitter = like.jitter && !matches!(rate.period, Period::Calendar(_));
        LimitSpec { rate, burst, jitter, ..like }.build()
    }

    fn resized(&self, share: impl Fn(u64) -> u64) -> Self {
        // A smaller limit of the same kind is valid too, except for a burst that would then take decades to refill.
        self.try_resized(share).unwrap_or_else(|| self.clone())
    }

    fn try_resized(&self, share: impl Fn(u64) -> u64) -> Option<Self> {
        let spec = LimitSpec {
            rate: Rate { count: share(self.rate.count), period: self.rate.period.clone() },
            burst: self.algorithm.has_burst().then(|| share(self.capacity)),
            ..self.spec()
        };
        spec.build().ok()
    }

    /// Returns the specification of this limit.
    #[must_use]
    pub fn spec(&self) -> LimitSpec {
        LimitSpec {
            algorithm: self.algorithm,
            rate: self.rate.clone(),
            burst: self.algorithm.has_burst().then_some(self.capacity),
            delay: matches!(self.shape, Shape::Bucket(Bucket { shaping: Shaping::Delay, .. })),
            slots: match self.shape {
                Shape::Strict(slots) => Some(slots.k),
                _ => None,
            },
            jitter: self.jitter,
            refill_interval: self.refill_interval,
            count_denied: self.counts_denied(),
            any_period: matches!(
                self.shape,
                Shape::Bucket(Bucket { sharing: Sharing::AnyPeriod, .. })
                    | Shape::Stepped(Bucket { sharing: Sharing::AnyPeriod, .. }, _)
            ),
        }
    }
}

/// Reasons why a limit is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// A count beyond [`Rate::MAX_COUNT`].
    #[error("a count or burst can be at most {max}", max = Rate::MAX_COUNT)]
    TooMany,
    /// A period out of range.
    #[error("a period of {0} is out of range; write one from 1ms to 10 years")]
    Period(TimeDelta),
    /// A bucket that would take decades to fill.
    #[error(
        "this burst would take more than 35 years to come back at this rate; lower `burst` or raise the rate"
    )]
    TooSlow,
    /// A burst with an algorithm that has none.
    #[error("`burst` has no meaning for {0}; use gcra, token_bucket or leaky_bucket, or leave it out")]
    NoBurst(Algorithm),
    /// Jitter with an algorithm that has no windows.
    #[error(
        "`jitter` has no meaning for {0} here; it shifts the windows of fixed, sliding and strict windows, and the refills of a token_bucket with `refill_interval`"
    )]
    NoJitter(Algorithm),
    /// A refill interval with an algorithm that has no tokens.
    #[error(
        "only token_bucket refills at intervals, not {0}; write token_bucket or leave `refill_interval` out"
    )]
    RefillIntervalNeedsTokenBucket(Algorithm),
    /// A refill interval out of range.
    #[error("a refill interval of {0} is out of range; write one from 1ms to 10 years")]
    RefillInterval(TimeDelta),
    /// Delays with an algorithm that has no queue.
    #[error("only leaky_bucket can delay, not {0}; leave `algorithm` out or write leaky_bucket")]
    DelayNeedsLeakyBucket(Algorithm),
    /// A calendar period with an algorithm that needs a fixed length.
    #[error("calendar periods need fixed_window, not {0}")]
    CalendarNeedsFixedWindow(Algorithm),
    /// Slots with an algorithm that has none.
    #[error("`slots` has no meaning for {0}; use strict_window, or leave it out")]
    NoSlots(Algorithm),
    /// Counted attempts with an algorithm that has no plain count.
    #[error("only fixed_window can count what it denies, not {0}")]
    CountDeniedNeedsFixedWindow(Algorithm),
    /// Counters shared between periods, with an algorithm whose state depends on the period.
    #[error("only buckets can share a counter between periods, not {0}")]
    AnyPeriodNeedsBucket(Algorithm),
    /// A number of slots out of range.
    #[error("{0} slots are out of range; write 1 to {most}", most = Slots::MAX)]
    Slots(u64),
    /// A log larger than the maximum.
    #[error("sliding_log keeps an entry a unit: at most {max}; use strict_window for larger limits", max = AdmissionLog::MAX_LIMIT)]
    LogTooLarge,
    /// Too many permits.
    #[error("at most {max} permits can be held at once", max = Permits::MAX_LIMIT)]
    TooManyPermits,
}
