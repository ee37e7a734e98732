//! Concurrency: permits that are held, not spent.
//!
//! Each permit has a deadline, so that a holder that dies gives it back in the end. Taking a permit that is already
//! held renews it; giving one back twice is giving it back once.

use crate::cost::Cost;
use crate::outcome::{Outcome, Verdict};
use crate::time::{Span, Timestamp};

/// Who holds a permit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PermitId(pub u128);

impl PermitId {
    /// A holder without a name: such permits are only freed by their deadline.
    pub const ANONYMOUS: Self = Self(0);
}

/// The permits that are out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permits {
    /// (holder, units, deadline)
    pub held: Vec<(PermitId, u64, Timestamp)>,
}

impl Permits {
    /// The largest number of permits a limit may have.
    pub(crate) const LARGEST: u64 = 100_000;

    fn roll(&mut self, now: Timestamp, ttl: Span) {
        self.held.retain(|(_, _, deadline)| *deadline > now);
        // A deadline further off than any permit may last means that the clock went back.
        for (_, _, deadline) in &mut self.held {
            *deadline = (*deadline).min(now + ttl);
        }
    }

    fn used(&self) -> u64 {
        self.held.iter().map(|(_, n, _)| n).sum()
    }

    pub(crate) fn step(&mut self, now: Timestamp, ttl: Span, limit: u64, cost: Cost, id: PermitId) -> Outcome {
        self.roll(now, ttl);
        if cost.is_refund() {
            self.give_back(id, cost.units());
            return self.outcome(now, limit, Verdict::PASS);
        }
        let held = self.held.iter_mut().find(|(holder, ..)| *holder == id && id != PermitId::ANONYMOUS);
        if let Some((_, _, deadline)) = held {
            *deadline = now + ttl;
            return self.outcome(now, limit, Verdict::PASS);
        }
        if cost.is_look() {
            return self.outcome(now, limit, Verdict::PASS);
        }
        let used = self.used();
        if used.saturating_add(cost.units()) <= limit {
            self.held.push((id, cost.units(), now + ttl));
            return self.outcome(now, limit, Verdict::PASS);
        }
        let retry_after = self.wait(now, limit, cost.units(), used);
        self.outcome(now, limit, Verdict::Denied { retry_after })
    }

    /// Frees everything that `id` holds.
    pub(crate) fn release(&mut self, id: PermitId) {
        self.held.retain(|(holder, ..)| *holder != id || id == PermitId::ANONYMOUS);
    }

    fn give_back(&mut self, id: PermitId, units: u64) {
        let mut left = units;
        self.held.retain_mut(|(holder, n, _)| {
            if *holder == id {
                let back = left.min(*n);
                *n -= back;
                left -= back;
            }
            *n > 0
        });
    }

    /// The wait until enough deadlines have passed, if no holder gives back before.
    fn wait(&self, now: Timestamp, limit: u64, units: u64, used: u64) -> Option<Span> {
        if units > limit {
            return None;
        }
        let mut deadlines: Vec<(Timestamp, u64)> = self.held.iter().map(|(_, n, at)| (*at, *n)).collect();
        deadlines.sort_unstable();
        let mut excess = used + units - limit;
        for (at, n) in deadlines {
            excess = excess.saturating_sub(n);
            if excess == 0 {
                return Some(at.since(now));
            }
        }
        None
    }

    fn outcome(&self, now: Timestamp, limit: u64, verdict: Verdict) -> Outcome {
        let reset_after =
            self.held.iter().map(|(_, _, at)| at.since(now)).max().unwrap_or(Span::ZERO);
        Outcome { verdict, remaining: limit.saturating_sub(self.used()), reset_after }
    }
}
