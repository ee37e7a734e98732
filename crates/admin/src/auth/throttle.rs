//! Those who send wrong tokens are slowed down, by where they come from: an address, or the /64 of an IPv6 one. Nothing is
//! counted against a token or a name, and whoever sends a right token does not come by here, so nobody can lock somebody else
//! out, not even from an address that both share.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// Wrong tokens from one place that cost nothing.
const FREE_ATTEMPTS: f64 = 5.0;
/// How fast they are forgotten: one in so long.
const FORGET_AFTER: Duration = Duration::from_secs(10);
/// What the first wrong token beyond those waits for its answer; each further one twice as long, up to the longest.
const FIRST_DELAY: Duration = Duration::from_millis(100);
const MAX_DELAY: Duration = Duration::from_secs(5);
/// So many from one place may wait at once; more are turned away.
const MAX_WAITING: usize = 4;
/// Places that are remembered. When there are more, those with the least against them are forgotten.
const MAX_SOURCES: usize = 4_096;

/// Wrong tokens, by where they came from.
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

/// Somebody whose token is wrong, or may be. As long as there is one, its place is remembered and counts it.
#[derive(Debug)]
pub(crate) struct AuthAttempt {
    sources: Arc<Mutex<HashMap<IpAddr, SourceState>>>,
    source: IpAddr,
}

impl FailedAuthThrottle {
    /// Lets somebody try; else says for how long to wait.
    pub(crate) fn begin(&self, peer: IpAddr) -> Result<AuthAttempt, Duration> {
        let place = prefix(peer);
        let now = Instant::now();
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if places.len() >= MAX_SOURCES && !places.contains_key(&place) {
            forget(&mut places, now);
        }
        let known = places.entry(place).or_insert(SourceState { failures: 0.0, at: now, waiting: 0 });
        if known.waiting >= MAX_WAITING {
            return Err(MAX_DELAY);
        }
        known.waiting += 1;
        drop(places);
        Ok(AuthAttempt { sources: Arc::clone(&self.0), source: place })
    }
}

impl AuthAttempt {
    /// The token was wrong: waits before this is told.
    pub(crate) async fn failed(self) {
        let wait = self.record(Instant::now());
        tokio::time::sleep(wait).await;
    }

    fn record(&self, now: Instant) -> Duration {
        let mut places = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(place) = places.get_mut(&self.source) else { return Duration::ZERO };
        place.failures = place.left(now) + 1.0;
        place.at = now;
        let beyond = place.failures - FREE_ATTEMPTS;
        if beyond <= 0.0 {
            Duration::ZERO
        } else {
            FIRST_DELAY.mul_f64(beyond.min(10.0).exp2()).min(MAX_DELAY)
        }
    }
}

impl Drop for AuthAttempt {
    fn drop(&mut self) {
        let mut places = self.sources.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = places.get_mut(&self.source) {
            place.waiting = place.waiting.saturating_sub(1);
            if place.waiting == 0 && place.failures == 0.0 {
                places.remove(&self.source);
            }
        }
    }
}

/// Makes room for one more at least.
fn forget(places: &mut HashMap<IpAddr, SourceState>, now: Instant) {
    places.retain(|_, place| place.waiting > 0 || place.left(now) > 0.0);
    let least = places.iter().filter(|(_, place)| place.waiting == 0);
    let least = least.min_by(|one, other| one.1.left(now).total_cmp(&other.1.left(now)));
    if let (Some(least), true) = (least.map(|(place, _)| *place), places.len() >= MAX_SOURCES) {
        places.remove(&least);
    }
}

/// Where an address counts to: whoever has one IPv6 address has the /64 it is of.
pub(crate) fn prefix(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V4(four) => IpAddr::V4(four),
        IpAddr::V6(six) => IpAddr::V6(Ipv6Addr::from_bits(six.to_bits() & (u128::MAX << 64))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    /// One place is slowed down more and more, the place beside it is not, and time forgives.
    #[test]
    fn wrong_tokens_delay_only_their_own_source() {
        let attempts = FailedAuthThrottle::default();
        #[allow(clippy::disallowed_methods)]
        let start = Instant::now();
        let fail =
            |from: &str, at: Duration| attempts.begin(address(from)).expect("its turn").record(start + at);
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
            (0..MAX_WAITING).map(|_| attempts.begin(address("10.0.0.1")).expect("a turn")).collect();
        assert!(attempts.begin(address("10.0.0.1")).is_err());
        assert!(attempts.begin(address("10.0.0.2")).is_ok());
        drop(waiting);
        assert!(attempts.begin(address("10.0.0.1")).is_ok());
        assert!(attempts.0.lock().expect("places").is_empty(), "nobody was wrong");
    }

    /// Who comes first to a place counts like those who come later: none of them leaves for another.
    #[test]
    fn a_disconnected_client_frees_only_its_own_wait() {
        let attempts = FailedAuthThrottle::default();
        let begin = || attempts.begin(address("10.0.0.1"));
        let mut here: Vec<_> = (0..MAX_WAITING).map(|_| begin().expect("a turn")).collect();
        // A wrong token is noted while others wait, whichever of them it is.
        here[MAX_WAITING - 1].record(Instant::now());
        for _ in 0..MAX_WAITING {
            drop(here.remove(0));
            here.push(begin().expect("one has left"));
            assert!(begin().is_err(), "one has left, and one has come");
        }
    }

    #[test]
    fn memory_for_untrusted_sources_is_bounded() {
        let attempts = FailedAuthThrottle::default();
        for i in 0..u32::try_from(2 * MAX_SOURCES).expect("a number") {
            let from = IpAddr::V4(std::net::Ipv4Addr::from_bits(i));
            let _ = attempts.begin(from).map(|attempt| attempt.record(Instant::now()));
        }
        assert!(attempts.0.lock().expect("places").len() <= MAX_SOURCES);
    }
}
