//! How much of a counter is used, also beyond its limit, and how much more it can be debited.
//!
//! A look by the limit itself shows nothing of a debt: a counter with no units left may be overdrawn by as much again. So
//! a counter is read by a limit of twice the size, whose state has the same form.

use crate::lost_units::whole_window;
use crate::overdraft::{BucketTime, whole_bucket};
use tollgate_core::{Charge, Cost, CounterStore, Enforcement, Limit, Mode, Outcomes, StoreError, TimeDelta};

/// What a store says about a counter.
pub(crate) struct Reading {
    /// Units that are used. No more than the limit where none of twice the size can be made: too little is refunded then.
    pub(crate) used: u64,
    /// Units that can still be debited.
    pub(crate) room: u64,
}

/// Reads a counter of a store.
pub(crate) async fn read<S: CounterStore>(store: &S, charge: &Charge<'_>) -> Result<Reading, StoreError> {
    let time = BucketTime::of(charge);
    let whole = match time {
        Some(_) => whole_bucket(charge.limit),
        None => Some(whole_window(charge.limit)),
    };
    let peek = Charge {
        cost: Cost::PEEK,
        enforcement: Enforcement::Independent,
        mode: Mode::Central,
        limit: whole.as_ref().unwrap_or(charge.limit),
        ..*charge
    };
    let mut outcomes = Outcomes::default();
    if !store.try_charge(&[peek], &mut outcomes) {
        outcomes = store.charge(&[peek]).await?;
    }
    let outcome = outcomes.per_charge.first();
    let (room, most) = match time.filter(|_| whole.is_none()) {
        Some(time) => {
            let ahead = outcome.map_or(TimeDelta::ZERO, |outcome| outcome.reset_after);
            (time.room(ahead), charge.limit.capacity().saturating_mul(2))
        }
        None => (outcome.map_or(0, |outcome| outcome.remaining), whole.as_ref().map_or(0, Limit::capacity)),
    };
    Ok(Reading { used: most.saturating_sub(room), room })
}

/// Returns what a counter with so many used units gives back of a refund.
pub(crate) fn given_back(refund: &Charge<'_>, used: u64) -> Cost {
    Cost::refund(refund.cost.units().min(used))
}
