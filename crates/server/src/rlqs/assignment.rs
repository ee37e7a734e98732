//! Quota assignments: what one stream may admit for one bucket, and the most that this can come to.
//!
//! Only strategies that Envoy accepts: blanket rules, and token buckets with an interval of whole seconds. A token bucket
//! of `max` tokens that gains `tokens` every `interval` seconds admits at most `max` + rate × time requests, full at the
//! start or not.

use tollgate_core::TimeDelta;

/// Rates below this many requests per second are assigned over several seconds, so that rounding down costs less.
const SLOW: f64 = 20.0;
/// The same where the cover lasts until the next pass only: what is rounded off is then needed to change assignments.
const SHORT_SLOW: f64 = 4.0;
/// Interval of slow rates in seconds.
const SLOW_INTERVAL: u32 = 5;
/// Longest interval in seconds: the slowest rate that is assigned.
const MAX_INTERVAL: u32 = 60;
/// A bucket holds the tokens of an eighth of a second: a changed assignment may start full.
const BURSTS_PER_SECOND: f64 = 8.0;

/// An assignment of one bucket on one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Assignment {
    /// No limit applies.
    AllowAll,
    /// Nothing can be granted.
    DenyAll,
    /// A share of the limits.
    Tokens(Tokens),
}

/// A token bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tokens {
    /// Maximum number of tokens.
    pub(super) max: u32,
    /// Tokens per interval.
    pub(super) tokens: u32,
    /// Interval in seconds.
    pub(super) interval: u32,
}

impl Tokens {
    /// Returns the bucket for a rate per second, which it does not exceed unless that is too slow to be assigned.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "floored and bounded")]
    pub(super) fn for_rate(rate: f64, is_short: bool) -> Self {
        let rate = rate.clamp(0.0, f64::from(u32::MAX / 2));
        let slow = if is_short { SHORT_SLOW } else { SLOW };
        let (tokens, interval) = if rate >= slow {
            (rate as u32, 1)
        } else if rate * f64::from(SLOW_INTERVAL) >= 1.0 {
            ((rate * f64::from(SLOW_INTERVAL)) as u32, SLOW_INTERVAL)
        } else {
            (1, ((1.0 / rate).ceil().min(f64::from(MAX_INTERVAL)) as u32).max(SLOW_INTERVAL))
        };
        // With a single token, what refills between two requests is lost.
        let min = if rate >= 1.0 { 2 } else { 1 };
        Self { max: ((rate / BURSTS_PER_SECOND) as u32 + 1).max(min), tokens, interval }
    }

    /// Returns the rate per second.
    pub(super) fn rate(self) -> f64 {
        f64::from(self.tokens) / f64::from(self.interval)
    }

    /// Returns the tokens that it gains in this time, rounded up.
    pub(super) fn gain(self, time: TimeDelta) -> u64 {
        let each = u64::from(self.interval) * 1_000_000;
        match u64::from(self.tokens).checked_mul(time.as_micros()) {
            Some(micros) => micros.div_ceil(each),
            None => u64::MAX,
        }
    }

    /// Returns the whole tokens that it gains in this time.
    pub(super) fn whole_gain(self, time: TimeDelta) -> u64 {
        let each = u64::from(self.interval) * 1_000_000;
        u64::from(self.tokens).checked_mul(time.as_micros()).map_or(u64::MAX, |micros| micros / each)
    }

    /// Returns the most requests that it admits in this time.
    pub(super) fn exposure(self, time: TimeDelta) -> u64 {
        u64::from(self.max).saturating_add(self.whole_gain(time))
    }

    /// Returns the bucket with twice the tokens in twice the time if Envoy would not see it as a change of `old`: it does not
    /// compare intervals.
    pub(super) fn distinct_from(self, old: Self) -> Self {
        let is_hidden = (self.max, self.tokens) == (old.max, old.tokens) && self.interval != old.interval;
        if is_hidden { Self { tokens: self.tokens * 2, interval: self.interval * 2, ..self } } else { self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Envoy divides by the interval in whole seconds, and a rate that is rounded up would exceed the limit.
    #[test]
    fn buckets_never_exceed_their_rate_and_have_whole_seconds() {
        for rate in [0.017, 0.19, 0.2, 0.7, 1.0, 1.9, 3.99, 4.0, 17.6, 1e6, 1e12] {
            let tokens = Tokens::for_rate(rate, false);
            assert!(tokens.interval >= 1 && tokens.tokens >= 1 && tokens.max >= 1);
            assert!(tokens.rate() <= rate && tokens.rate() >= (rate / 2.0).min(1e9), "{rate}: {tokens:?}");
        }
        assert_eq!(Tokens::for_rate(0.0, true), Tokens { max: 1, tokens: 1, interval: MAX_INTERVAL });
    }

    #[test]
    fn a_change_of_the_interval_alone_changes_the_tokens_too() {
        let (old, new) =
            (Tokens { max: 1, tokens: 4, interval: 5 }, Tokens { max: 1, tokens: 4, interval: 1 });
        assert_eq!(new.distinct_from(old), Tokens { tokens: 8, interval: 2, ..new });
        assert_eq!(old.distinct_from(old), old);
    }
}
