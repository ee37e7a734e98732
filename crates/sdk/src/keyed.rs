//! A keyed rate limiter in three lines: one limit and one counter per key, in memory.
//!
//! It is for programs that need neither rules nor a server. Whatever the number of keys, the counters stay within their
//! memory limit: the least important ones are evicted first. Rejected: a map of limiters, because it grows with every
//! key that a client makes up.

use std::fmt;
use std::net::IpAddr;
use std::num::NonZeroU32;
use std::time::Duration;
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, KeyPart, Limit, LimitError, LimitSpec, Outcome, Rate, Scope,
    SystemClock, TimeDelta, Verdict,
};
use tollgate_store::{MemoryConfig, MemoryError, MemoryStore};

/// Default memory for counters in bytes, sufficient for about two million keys.
const DEFAULT_BYTES: usize = 64 << 20;

/// Limits each key to a rate, with counters in this process.
///
/// ```
/// use tollgate_sdk::{KeyedLimiter, nonzero};
/// let limiter = KeyedLimiter::per_second(nonzero!(50));
/// assert!(limiter.check("ann").is_ok());
/// ```
///
/// The burst is one period's units; [`KeyedLimiter::build`] takes any other limit.
pub struct KeyedLimiter {
    store: MemoryStore<SystemClock>,
    limit: Limit,
    scope: Scope,
}

impl fmt::Debug for KeyedLimiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedLimiter").field("limit", &self.limit.to_string()).finish_non_exhaustive()
    }
}

/// The result for a request within its limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Allowed {
    /// Units left.
    pub remaining: u64,
    /// Time after which all units are available again.
    pub reset_after: Duration,
    /// Delay before the request may proceed; zero unless the limit is a leaky bucket that delays.
    pub delay: Duration,
}

/// The result for a request over its limit. Nothing was charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("rate limit exceeded; {}", match .retry_after {
    Some(wait) => format!("retry after {wait:?}"),
    None => "the cost is larger than the limit, so a retry cannot succeed".to_owned(),
})]
#[non_exhaustive]
pub struct Denied {
    /// Time after which the same request would be allowed if no other is made; `None` if it never would.
    pub retry_after: Option<Duration>,
    /// Units left.
    pub remaining: u64,
    /// Time after which all units are available again.
    pub reset_after: Duration,
}

/// The reason a limiter cannot be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeyedLimiterError {
    /// The limit is invalid.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The counters cannot be allocated.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// Permits must be released, which needs [`crate::InProcess`].
    #[error(
        "KeyedLimiter does not support concurrency limits; use InProcess with a rule of `algorithm: concurrency`"
    )]
    Concurrency,
}

impl KeyedLimiter {
    /// Allows each key `count` requests per second.
    #[must_use]
    pub fn per_second(count: NonZeroU32) -> Self {
        Self::per(count, Duration::from_secs(1))
    }

    /// Allows each key `count` requests per minute.
    #[must_use]
    pub fn per_minute(count: NonZeroU32) -> Self {
        Self::per(count, Duration::from_secs(60))
    }

    /// Allows each key `count` requests per hour.
    #[must_use]
    pub fn per_hour(count: NonZeroU32) -> Self {
        Self::per(count, Duration::from_secs(3_600))
    }

    /// Allows each key `count` requests per 24 hours.
    #[must_use]
    pub fn per_day(count: NonZeroU32) -> Self {
        Self::per(count, Duration::from_secs(86_400))
    }

    /// Builds one of the four rates above, which are valid for every count.
    fn per(count: NonZeroU32, period: Duration) -> Self {
        let spec = LimitSpec::new(Algorithm::Gcra, Rate::per(count.get().into(), span(period)));
        match Self::build(spec, DEFAULT_BYTES) {
            Ok(limiter) => limiter,
            // Out of memory is handled as in the standard library's constructors.
            Err(_) => std::alloc::handle_alloc_error(std::alloc::Layout::new::<[u8; DEFAULT_BYTES]>()),
        }
    }

    /// Builds a limiter with any limit and at most `bytes` of memory for counters.
    ///
    /// ```
    /// use tollgate_core::{Algorithm, LimitSpec, Rate, nonzero};
    /// use tollgate_sdk::KeyedLimiter;
    /// let spec = LimitSpec::new(Algorithm::SlidingWindow, Rate::per_minute(nonzero!(2)));
    /// let limiter = KeyedLimiter::build(spec, 1 << 20)?;
    /// assert_eq!((0..5).filter(|_| limiter.check("ann").is_ok()).count(), 2);
    /// # Ok::<(), tollgate_sdk::KeyedLimiterError>(())
    /// ```
    ///
    /// # Errors
    /// [`KeyedLimiterError`] if the limit is invalid or the memory cannot be reserved.
    pub fn build(spec: LimitSpec, bytes: usize) -> Result<Self, KeyedLimiterError> {
        let limit = spec.build()?;
        if limit.algorithm() == Algorithm::Concurrency {
            return Err(KeyedLimiterError::Concurrency);
        }
        let store = MemoryStore::new(&MemoryConfig::with_bytes(bytes), SystemClock::new())?;
        Ok(Self { store, limit, scope: Scope::new("keyed") })
    }

    /// Charges one unit to `key`.
    ///
    /// # Errors
    /// [`Denied`] if `key` is over the limit; nothing is charged then.
    pub fn check(&self, key: impl Key) -> Result<Allowed, Denied> {
        verdict(&self.charge(&key, Cost::ONE))
    }

    /// Charges `units` to `key`, all or none.
    ///
    /// # Errors
    /// [`Denied`] if they exceed the limit; nothing is charged then.
    pub fn check_n(&self, key: impl Key, units: NonZeroU32) -> Result<Allowed, Denied> {
        verdict(&self.charge(&key, Cost::new(units.get().into())))
    }

    /// Returns the units that `key` has left, without charging.
    pub fn remaining(&self, key: impl Key) -> u64 {
        self.charge(&key, Cost::PEEK).remaining
    }

    /// Waits until `key` has a unit, and charges it. The order of waiters is not defined.
    pub async fn until_ready(&self, key: impl Key) -> Allowed {
        loop {
            match self.check(&key) {
                Ok(allowed) => {
                    tokio::time::sleep(allowed.delay).await;
                    return allowed;
                }
                // Only a limit of 0 has no retry time for one unit; it is checked again every second.
                Err(denied) => tokio::time::sleep(denied.retry_after.unwrap_or(Duration::from_secs(1))).await,
            }
        }
    }

    fn charge(&self, key: &impl Key, cost: Cost) -> Outcome {
        key.with_part(|part| {
            let key = CounterKey { scope: &self.scope, parts: &[part] };
            self.store.apply(&[Charge::new(key, &self.limit, cost)]).per_charge[0]
        })
    }
}

fn verdict(outcome: &Outcome) -> Result<Allowed, Denied> {
    let (remaining, reset_after) = (outcome.remaining, outcome.reset_after.into());
    match outcome.verdict {
        Verdict::Allowed { delay } => Ok(Allowed { remaining, reset_after, delay: delay.into() }),
        Verdict::Denied { retry_after } => {
            Err(Denied { retry_after: retry_after.map(Duration::from), remaining, reset_after })
        }
        // The memory store decides every charge.
        Verdict::Unknown => Err(Denied { retry_after: None, remaining, reset_after }),
    }
}

fn span(duration: Duration) -> TimeDelta {
    TimeDelta::from_micros(u64::try_from(duration.as_micros()).unwrap_or(u64::MAX))
}

/// A key of a [`KeyedLimiter`]: text, a number, an address, or `()` for a single counter.
pub trait Key: sealed::Sealed {
    /// Calls `charge` with the key as a part of a counter key.
    #[doc(hidden)]
    fn with_part<R>(&self, charge: impl FnOnce(KeyPart<'_>) -> R) -> R;
}

mod sealed {
    pub trait Sealed {}
    impl<K: Sealed + ?Sized> Sealed for &K {}
    impl Sealed for str {}
    impl Sealed for String {}
    impl Sealed for std::net::IpAddr {}
    impl Sealed for u64 {}
    impl Sealed for () {}
}

impl<K: Key + ?Sized> Key for &K {
    fn with_part<R>(&self, charge: impl FnOnce(KeyPart<'_>) -> R) -> R {
        (**self).with_part(charge)
    }
}

impl Key for str {
    fn with_part<R>(&self, charge: impl FnOnce(KeyPart<'_>) -> R) -> R {
        charge(KeyPart::Text(self))
    }
}

impl Key for String {
    fn with_part<R>(&self, charge: impl FnOnce(KeyPart<'_>) -> R) -> R {
        charge(KeyPart::Text(self))
    }
}

impl Key for IpAddr {
    fn with_part<R>(&self, charge: impl FnOnce(KeyPart<'_>) -> R) -> R {
        let address = match self {
            Self::V4(v4) => v4.to_ipv6_mapped(),
            Self::V6(v6) => *v6,
        };
        charge(KeyPart::Network { address: address.into(), prefix: 128 })
    }
}

impl Key for u64 {
    fn with_part<R>(&self, charge: impl FnOnce(KeyPart<'_>) -> R) -> R {
        // A `u64` has at most 20 digits.
        let mut digits = [0_u8; 20];
        let (mut at, mut rest) = (digits.len(), *self);
        loop {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        charge(KeyPart::Text(std::str::from_utf8(&digits[at..]).unwrap_or_default()))
    }
}

impl Key for () {
    fn with_part<R>(&self, charge: impl FnOnce(KeyPart<'_>) -> R) -> R {
        charge(KeyPart::Text(""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nonzero;

    /// The constructors do not fail for any count.
    #[test]
    fn every_rate_is_a_valid_limit() {
        for count in [1, 2, 50, 1_000_000, u32::MAX] {
            let count = NonZeroU32::new(count).expect("a number");
            for limiter in [
                KeyedLimiter::per_second(count),
                KeyedLimiter::per_minute(count),
                KeyedLimiter::per_hour(count),
                KeyedLimiter::per_day(count),
            ] {
                assert_eq!(limiter.remaining("a"), u64::from(count.get()), "{limiter:?}");
                assert!(limiter.check_n("a", count).is_ok());
                let denied = limiter.check_n("a", count).expect_err("over");
                assert!(denied.retry_after.is_some());
            }
        }
    }

    /// Each key has its own counter, whatever its type.
    #[test]
    fn keys_are_counted_separately() {
        let limiter = KeyedLimiter::per_hour(nonzero!(1));
        let (v4, v6): (IpAddr, IpAddr) = ("10.0.0.1".parse().expect("v4"), "::1".parse().expect("v6"));
        assert!(limiter.check("7").is_ok());
        assert!(limiter.check(7_u64).is_err(), "a number is the text of its digits");
        assert!(limiter.check(u64::MAX).is_ok());
        assert!(limiter.check(String::from("seven")).is_ok());
        assert!(limiter.check(v4).is_ok());
        assert!(limiter.check(v6).is_ok());
        assert!(limiter.check(()).is_ok());
        for denied in [limiter.check("7"), limiter.check("seven"), limiter.check(v4), limiter.check(())] {
            let wait = denied.expect_err("over").retry_after.expect("a time");
            assert!(wait > Duration::from_secs(3_500) && wait <= Duration::from_secs(3_600), "{wait:?}");
        }
    }

    #[test]
    fn concurrency_limits_are_rejected() {
        let spec = LimitSpec::new(Algorithm::Concurrency, Rate::per_minute(nonzero!(5)));
        assert!(matches!(KeyedLimiter::build(spec, 1 << 20), Err(KeyedLimiterError::Concurrency)));
    }

    #[tokio::test]
    async fn until_ready_waits_for_a_unit() {
        let limiter = KeyedLimiter::per_second(nonzero!(200));
        assert!(limiter.check_n("a", nonzero!(200)).is_ok());
        let denied = limiter.check("a").expect_err("over");
        assert!(denied.retry_after.is_some_and(|wait| wait <= Duration::from_millis(5)));
        limiter.until_ready("a").await;
    }
}
