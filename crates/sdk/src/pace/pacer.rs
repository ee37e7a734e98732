//! When the next request to a host may be sent. What remains of its limit is spread over the time to the reset, so that
//! the limit is not reached, instead of being reached and waited for. While more than half remains nothing is delayed: a
//! short burst is what limits are for. Requests under way are subtracted, because a response does not count them.

use super::signals::Signals;

/// Returns the delay before the next request, by what remains, to a host that was last called `since_last_ms` ago.
#[must_use]
pub fn pace_delay(limit: Option<u64>, remaining: u64, reset_ms: u64, since_last_ms: u64) -> u64 {
    match remaining {
        0 => reset_ms,
        _ if is_plenty(limit, remaining) => 0,
        _ => (reset_ms / remaining).saturating_sub(since_last_ms),
    }
}

fn is_plenty(limit: Option<u64>, remaining: u64) -> bool {
    limit.is_some_and(|limit| remaining.saturating_mul(2) > limit)
}

/// Gives the requests to one host their slots in time.
#[derive(Clone, Debug, Default)]
pub struct Pacer {
    blocked_until: u64,
    remaining: Option<u64>,
    limit: Option<u64>,
    reset_at: u64,
    last: Option<u64>,
    in_flight: u64,
}

impl Pacer {
    /// Returns the time before which the host wants no request.
    #[must_use]
    pub fn blocked_until(&self) -> u64 {
        self.blocked_until
    }

    /// Gives the next request its slot and returns the delay until then. The request is then under way, until
    /// [`response`](Self::response) or [`failed`](Self::failed).
    pub fn send(&mut self, now: u64) -> u64 {
        if self.reset_at <= now {
            self.remaining = None;
        }
        let mut slot = now.max(self.blocked_until);
        match self.remaining.filter(|_| slot < self.reset_at) {
            None => {}
            Some(0) => slot = self.reset_at,
            Some(remaining) => {
                if let Some(last) = self.last.filter(|_| !is_plenty(self.limit, remaining)) {
                    // Slots already given lie in the future: the rest of the time starts after them.
                    let base = self.reset_at.min(now.max(last));
                    slot = self.reset_at.min(slot.max(last + (self.reset_at - base) / remaining));
                }
                self.remaining = Some(remaining - 1);
            }
        }
        self.last = Some(slot);
        self.in_flight += 1;
        slot - now
    }

    /// A response arrived; `random` in [0, 1) spreads the end of a block, so that not all clients return at once.
    pub fn response(&mut self, now: u64, signals: &Signals, random: f64) {
        self.failed();
        if let Some(wait) = signals.wait_ms.filter(|wait| *wait > 0) {
            let spread = (random * (wait / 10) as f64).floor() as u64;
            self.blocked_until = self.blocked_until.max(now.saturating_add(wait).saturating_add(spread));
        }
        if let (Some(remaining), Some(reset)) = (signals.remaining, signals.reset_ms) {
            self.remaining = Some(remaining.saturating_sub(self.in_flight));
            self.limit = signals.limit;
            self.reset_at = now.saturating_add(reset);
        }
    }

    /// A request ended without a response, or was not sent.
    pub fn failed(&mut self) {
        self.in_flight = self.in_flight.saturating_sub(1);
    }
}
