//! Slots of time: how consumption of a limit is added up for the database, and what of it still counts.
//!
//! The slot of a window is the window, so that what is read back is exact. Other limits restore units all the time:
//! their slots are a sixteenth of the period, and what was consumed in a slot counts as consumed at its last use.

use tollgate_core::{Algorithm, Cost, Limit, Period, PermitId, State, TimeDelta, Timestamp};

/// Number of slots in the period of a limit without windows.
const SLOTS: u64 = 16;
/// Shortest slot.
const MIN_SLOT: TimeDelta = TimeDelta::from_secs(1);
/// Limits that recover sooner are not kept: they have recovered before anything is read back.
const MIN_RECOVERY: TimeDelta = TimeDelta::from_secs(10);
/// Resets of a counter in one slot that are believed.
const MAX_RESETS: u64 = 8;

/// A slot of time of one counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// First instant.
    pub start: Timestamp,
    /// Instant from which the consumption no longer counts.
    pub expires: Timestamp,
}

/// Returns whether consumption of a limit is worth keeping.
#[must_use]
pub fn is_kept(limit: &Limit) -> bool {
    // A state matters for twice the time in which the limit recovers.
    limit.algorithm() != Algorithm::Concurrency
        && limit.retention().as_micros() >= 2 * MIN_RECOVERY.as_micros()
}

/// Returns the slot that contains `now`, for a key with this stable hash.
#[must_use]
pub fn slot_of(limit: &Limit, now: Timestamp, stable_hash: u64) -> Slot {
    let later = now + limit.retention();
    match limit.window(now, stable_hash) {
        Some((start, end)) if limit.algorithm() != Algorithm::SlidingWindow => Slot { start, expires: end },
        Some((start, _)) => Slot { start, expires: later },
        None => {
            let start = now.as_micros() - now.as_micros() % width(limit);
            Slot { start: Timestamp::from_micros(start), expires: later }
        }
    }
}

fn width(limit: &Limit) -> u64 {
    (limit.rate().period.length().as_micros() / SLOTS).max(MIN_SLOT.as_micros())
}

/// Returns the units of these slots that still count at `now`: of each, when it was last used and the units, in order
/// of time.
#[must_use]
pub fn used_after(limit: &Limit, slots: &[(Timestamp, i64)], now: Timestamp, stable_hash: u64) -> u64 {
    let phase = limit.phase(stable_hash);
    let mut state = State::default();
    for (last_at, units) in slots {
        let at = (*last_at).min(now) + phase;
        match u64::try_from(*units) {
            Ok(units) => limit.debit(PermitId::ANONYMOUS, &mut state, at, units),
            Err(_) => {
                let _ = limit.step(&mut state, at, Cost::refund(units.unsigned_abs()));
            }
        }
    }
    let left = limit.step(&mut state, now + phase, Cost::PEEK).remaining;
    limit.capacity().saturating_sub(left)
}

/// Returns whether a slot may have these units: a reset refunds what a counter holds, and few are made in one slot. Earlier
/// releases wrote refunds in parts of a unit as if they were units; what else such a slot had is unknown.
pub(super) fn is_plausible(limit: &Limit, units: i64) -> bool {
    units >= 0 || units.unsigned_abs() / MAX_RESETS <= limit.refill_cost()
}

/// Returns by how many units [`used_after`] may exceed the truth.
pub(super) fn inexact_units(limit: &Limit) -> u64 {
    let period = match &limit.rate().period {
        Period::Calendar(_) => return 0,
        Period::Rolling(_) if limit.algorithm() == Algorithm::FixedWindow => return 0,
        Period::Rolling(period) => period.as_micros().max(1),
    };
    let units = u128::from(limit.rate().count) * u128::from(width(limit)) / u128::from(period);
    u64::try_from(units).unwrap_or(u64::MAX).saturating_add(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::{Calendar, CalendarUnit, LimitSpec, Rate};

    fn month() -> Limit {
        let calendar = Calendar::new(CalendarUnit::Month, "UTC").expect("a zone");
        let rate = Rate { count: 1_000, period: Period::Calendar(calendar) };
        LimitSpec::new(Algorithm::FixedWindow, rate).build().expect("a limit")
    }

    /// A quota that forgets or invents a unit after an outage is a wrong bill.
    #[test]
    fn a_month_is_exact_and_ends_with_the_month() {
        let (limit, now) = (month(), Timestamp::from_secs(1_772_000_000));
        let slot = slot_of(&limit, now, 7);
        assert!(slot.start <= now && now < slot.expires);
        assert_eq!(used_after(&limit, &[(now, 640)], now + TimeDelta::from_secs(60), 7), 640);
        assert_eq!(used_after(&limit, &[(now, 640), (now, -40)], now, 7), 600);
        assert_eq!(used_after(&limit, &[(now, 640)], slot.expires, 7), 0, "another month");
        assert_eq!(inexact_units(&limit), 0);
    }

    /// What time has restored must not be debited again.
    #[test]
    fn a_bucket_recovers_while_nobody_looks() {
        let rate = Rate::per(3_600, TimeDelta::from_secs(3_600));
        let limit = LimitSpec::new(Algorithm::Gcra, rate).build().expect("a limit");
        let now = Timestamp::from_secs(1_772_000_000);
        let after = |seconds| used_after(&limit, &[(now, 600)], now + TimeDelta::from_secs(seconds), 0);
        assert_eq!((after(0), after(100), after(600)), (600, 500, 0));
        let short = LimitSpec::new(Algorithm::Gcra, Rate::per(5, TimeDelta::from_secs(1))).build();
        assert!(is_kept(&limit) && !is_kept(&short.expect("a limit")));
    }
}
