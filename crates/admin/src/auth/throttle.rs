//! Throttle for wrong tokens, per source: an IPv4 address or an IPv6 /64. Nothing is counted against a token or a
//! name, and valid tokens bypass the throttle, so no client can lock out another, not even from a shared address.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_http::server::connections::network;

/// Wrong tokens per source without a delay.
const FREE_ATTEMPTS: f64 = 5.0;
/// Time after which one wrong token is forgotten.
const FORGET_AFTER: Duration = Duration::from_secs(10);
/// Delay of the response to the first wrong token beyond those; it doubles with each further one, up to the maximum.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const MAX_DELAY: Duration = Duration::from_secs(5);
/// Maximum number of waiting attempts per source; further attempts are rejected.
const MAX_WAITING: usize = 4;
/// Maximum number of tracked sources. Beyond it, the source with the fewest failures is forgotten.
const MAX_SOURCES: usize = 4_096;

/// Wrong tokens per source.
#[derive(Debug, Default)]
pub struct FailedAuthThrottle(Arc<Mutex<HashMap<IpAddr, SourceState>>>);

#[derive(Debug)]
struct SourceState {
    failures: f64,
    at: Instant,
    waiting: usize,
}

impl SourceState {
    fn left(&self, now: Instant) -> f64 {
        let forgotten = now.duration_since(self.at).as_secs_f64() / FORGET_AFTER.as_secs_f64();
        (self.failures - forgotten).max(0.0)
    }
}

/// An authentication attempt whose token is or may be wrong. Its source stays tracked, and counts it, until it is
/// dropped.
#[derive(Debug)]
pub(crate) struct AuthAttempt {
    sources: Arc<Mutex<HashMap<IpAddr, SourceState>>>,
    source: IpAddr,
}

impl FailedAuthThrottle {
    /// Starts an attempt; otherwise returns how long the client must wait.
    pub(crate) fn begin(&self, peer: IpAddr) -> Result<AuthAttempt, Duration> {
        let source = network(peer);
        let now = Instant::now();
        let mut sources = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if sources.len() >= MAX_SOURCES && !sources.contains_key(&source) {
            forget(&mut sources, now);
        }
        let known = sources.entry(source).or_insert(SourceState { failures: 0.0, at: now, waiting: 0 });
        if known.waiting >= MAX_WAITING {
            return Err(MAX_DELAY);
        }
        known.waiting += 1;
        drop(sources);
        Ok(AuthAttempt { sources: Arc::clone(&self.0), source })
    }
}

impl AuthAttempt {
    /// Records a wrong token and waits before the response is sent.
    pub(crate) async fn failed(self) {
        let wait = self.record(Instant::now());
        tokio::time::sleep(wait).await;
    }

    fn record(&self, now: Instant) -> Duration {
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(source) = sources.get_mut(&self.source) else { return Duration::ZERO };
        source.failures = source.left(now) + 1.0;
        source.at = now;
        let beyond = source.failures - FREE_ATTEMPTS;
        if beyond <= 0.0 {
            Duration::ZERO
        } else {
            FIRST_DELAY.mul_f64(beyond.min(10.0).exp2()).min(MAX_DELAY)
        }
    }
}

impl Drop for AuthAttempt {
    fn drop(&mut self) {
        let mut sources = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(source) = sources.get_mut(&self.source) {
            source.waiting = source.waiting.saturating_sub(1);
            if source.waiting == 0 && source.failures == 0.0 {
                sources.remove(&self.source);
            }
        }
    }
}

/// Removes entries to make room for at least one more.
fn forget(sources: &mut HashMap<IpAddr, SourceState>, now: Instant) {
    sources.retain(|_, source| source.waiting > 0 || source.left(now) > 0.0);
    let least = sources.iter().filter(|(_, source)| source.waiting == 0);
    let least = least.min_by(|one, other| one.1.left(now).total_cmp(&other.1.left(now)));
    if let (Some(least), true) = (least.map(|(source, _)| *source), sources.len() >= MAX_SOURCES) {
        sources.remove(&least);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    /// Delays grow for one source, do not affect its neighbor, and decay with time.
    #[test]
    fn wrong_tokens_delay_only_their_own_source() {
        let attempts = FailedAuthThrottle::default();
        #[allow(clippy::disallowed_methods)]
        let start = Instant::now();
        let fail = |from: &str, at: Duration| {
            attempts.begin(address(from)).expect("not throttled").record(start + at)
        };
        let waits: Vec<_> = (0..14).map(|_| fail("2001:db8::1", Duration::ZERO)).collect();
        assert!(waits[..5].iter().all(Duration::is_zero), "{waits:?}");
        assert!(waits[5] > Duration::ZERO && waits[5..].is_sorted() && waits[13] == MAX_DELAY, "{waits:?}");
        assert!(fail("2001:db8::ffff", Duration::ZERO) == MAX_DELAY, "the same /64");
        assert!(fail("2001:db8:0:1::1", Duration::ZERO).is_zero());
        assert!(fail("10.0.0.1", Duration::ZERO).is_zero());
        assert!(fail("2001:db8::1", Duration::from_secs(200)).is_zero());
    }

    #[test]
    fn the_number_of_waiting_attempts_is_bounded() {
        let attempts = FailedAuthThrottle::default();
        let waiting: Vec<_> =
            (0..MAX_WAITING).map(|_| attempts.begin(address("10.0.0.1")).expect("not throttled")).collect();
        assert!(attempts.begin(address("10.0.0.1")).is_err());
        assert!(attempts.begin(address("10.0.0.2")).is_ok());
        drop(waiting);
        assert!(attempts.begin(address("10.0.0.1")).is_ok());
        assert!(attempts.0.lock().expect("sources").is_empty(), "no token was wrong");
    }

    /// All waiting attempts of a source count alike, whichever came first: a dropped attempt frees exactly one slot.
    #[test]
    fn a_disconnected_client_frees_only_its_own_wait() {
        let attempts = FailedAuthThrottle::default();
        let begin = || attempts.begin(address("10.0.0.1"));
        let mut here: Vec<_> = (0..MAX_WAITING).map(|_| begin().expect("not throttled")).collect();
        // Records a wrong token while others wait, no matter which attempt it is.
        here[MAX_WAITING - 1].record(Instant::now());
        for _ in 0..MAX_WAITING {
            drop(here.remove(0));
            here.push(begin().expect("a slot is free"));
            assert!(begin().is_err(), "the slot is taken again");
        }
    }

    #[test]
    fn memory_for_untrusted_sources_is_bounded() {
        let attempts = FailedAuthThrottle::default();
        for i in 0..u32::try_from(2 * MAX_SOURCES).expect("a number") {
            let from = IpAddr::V4(std::net::Ipv4Addr::from_bits(i));
            let _ = attempts.begin(from).map(|attempt| attempt.record(Instant::now()));
        }
        assert!(attempts.0.lock().expect("sources").len() <= MAX_SOURCES);
    }
}
