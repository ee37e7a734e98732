//! Concurrency limit: permits that are held, not spent.
//!
//! Each permit has a deadline, so the permit of a holder that dies is freed eventually. Taking a permit that is already
//! held renews it, at the new cost if that fits; releasing a permit is idempotent.

use crate::cost::Cost;
use crate::outcome::{Outcome, Verdict};
use crate::time::{TimeDelta, Timestamp};

/// Identifier of a permit's holder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PermitId(pub u128);

impl PermitId {
    /// An anonymous holder; its permits are freed by their deadline, or one by one by refunds.
    pub const ANONYMOUS: Self = Self(0);
}

/// The permits that are currently held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permits {
    /// Entries of (holder, units, deadline).
    pub held: Vec<(PermitId, u64, Timestamp)>,
}

impl Permits {
    /// The maximum number of permits of one limit.
    pub(crate) const MAX_LIMIT: u64 = 100_000;

    fn roll(&mut self, now: Timestamp, ttl: TimeDelta) {
        self.held.retain(|(_, _, deadline)| *deadline > now);
        // A deadline later than any permit may last means that the clock moved backward.
        for (_, _, deadline) in &mut self.held {
            *deadline = (*deadline).min(now + ttl);
        }
    }

    fn used(&self) -> u64 {
        self.held.iter().map(|(_, n, _)| n).sum()
    }

    pub(crate) fn step(
        &mut self,
        now: Timestamp,
        ttl: TimeDelta,
        limit: u64,
        cost: Cost,
        id: PermitId,
    ) -> Outcome {
        self.roll(now, ttl);
        if cost.is_refund() {
            self.refund(id, cost.units());
            return self.outcome(now, limit, Verdict::ALLOWED);
        }
        if cost.is_peek() {
            return self.outcome(now, limit, Verdict::ALLOWED);
        }
        let units = cost.units();
        let own = self.held.iter().position(|(holder, ..)| *holder == id && id != PermitId::ANONYMOUS);
        let mine = own.map_or(0, |own| self.held[own].1);
        let others = self.used() - mine;
        // A holder keeps its permits even if the limit has been lowered since.
        if others.saturating_add(units) > limit && units > mine {
            let retry_after = self.wait(now, limit, units, others, own);
            return self.outcome(now, limit, Verdict::Denied { retry_after });
        }
        let renewed = (id, units, now + ttl);
        match own {
            Some(own) => self.held[own] = renewed,
            None => self.held.push(renewed),
        }
        self.outcome(now, limit, Verdict::ALLOWED)
    }

    /// Frees all permits held by `id`.
    pub(crate) fn release(&mut self, id: PermitId) {
        self.held.retain(|(holder, ..)| *holder != id || id == PermitId::ANONYMOUS);
    }

    fn refund(&mut self, id: PermitId, units: u64) {
        let mut left = units;
        // The units taken last are refunded first.
        for (_, n, _) in self.held.iter_mut().rev().filter(|(holder, ..)| *holder == id) {
            let back = left.min(*n);
            *n -= back;
            left -= back;
        }
        self.held.retain(|(_, n, _)| *n > 0);
    }

    /// Returns the wait until the deadlines of enough other permits have passed, if no holder releases earlier.
    fn wait(
        &self,
        now: Timestamp,
        limit: u64,
        units: u64,
        others: u64,
        own: Option<usize>,
    ) -> Option<TimeDelta> {
        if units > limit {
            return None;
        }
        let others_held = self.held.iter().enumerate().filter(|(index, _)| Some(*index) != own);
        let mut deadlines: Vec<(Timestamp, u64)> = others_held.map(|(_, (_, n, at))| (*at, *n)).collect();
        deadlines.sort_unstable();
        let mut excess = others + units - limit;
        for (at, n) in deadlines {
            excess = excess.saturating_sub(n);
            if excess == 0 {
                return Some(at.since(now));
            }
        }
        None
    }

    fn outcome(&self, now: Timestamp, limit: u64, verdict: Verdict) -> Outcome {
        let reset_after = self.held.iter().map(|(_, _, at)| at.since(now)).max().unwrap_or(TimeDelta::ZERO);
        let remaining = limit.saturating_sub(self.used());
        // Holders release permits before their deadlines, and a store that shortens the list does not know the first of
        // these: the last one is when a permit is free at the latest.
        let next_after = if remaining == 0 { reset_after } else { TimeDelta::ZERO };
        Outcome { verdict, remaining, next_after, reset_after }
    }
}
