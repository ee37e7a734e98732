//! Start of a fallback counter: a counter of this process begins from the store's last outcome, not from zero.
//!
//! A caller who had used up a limit must not get it anew because the store paused. When the store has answered in time since
//! the local counter was last set, the local one is set again: to this node's share of what remained, plus what time has
//! refilled since, minus what this node has admitted and the store may not have counted yet. While the store says
//! nothing, or answers too late, the local counter goes on by itself. A counter of permits begins with those that requests of
//! this node hold (`permit_guard.rs`), not reservations, which any node may end.
//!
//! Setting it by late answers as well was rejected. A late answer counts the request it is about, which may have been denied
//! here and is undone only later: at twice the limit, all of it is taken by requests that are denied. And where nodes or cells
//! share a limit, every answer would give each of them its share of the same units anew.
//!
//! The table that remembers when each counter was set is bounded. Beyond that it starts over, which only sets counters
//! again: what was admitted in the meantime is unconfirmed, and is subtracted.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use tollgate_core::{CounterId, LastKnown, Limit, LimitParams, TimeDelta, Timestamp};

const MAX_STARTED: usize = 65_536;

/// When each fallback counter was last set, by the time of the last answer that had come in time.
#[derive(Default)]
pub(crate) struct FallbackStarts(Mutex<HashMap<CounterId, Timestamp>>);

impl FallbackStarts {
    /// Runs `set` if the store has answered in time about this counter since it was last set, or if it was never set.
    pub(crate) fn set_once(&self, counter: CounterId, in_time_at: Option<Timestamp>, set: impl FnOnce()) {
        let mut starts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let in_time_at = in_time_at.unwrap_or(Timestamp::ZERO);
        if starts.get(&counter).is_some_and(|known| in_time_at <= *known + JITTER) {
            return;
        }
        Self::put(&mut starts, counter, in_time_at, set);
    }

    /// Runs `set` whenever the counter was set, and counts it as set by this answer.
    pub(crate) fn set_again(&self, counter: CounterId, in_time_at: Option<Timestamp>, set: impl FnOnce()) {
        let mut starts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Self::put(&mut starts, counter, in_time_at.unwrap_or(Timestamp::ZERO), set);
    }

    fn put(
        starts: &mut HashMap<CounterId, Timestamp>,
        counter: CounterId,
        in_time_at: Timestamp,
        set: impl FnOnce(),
    ) {
        if starts.len() >= MAX_STARTED && !starts.contains_key(&counter) {
            starts.clear();
        }
        starts.insert(counter, in_time_at);
        // Under the lock: another thread must not spend from a counter that is being set.
        set();
    }
}

/// The time of an answer is computed from its age, by a clock that is read twice.
const JITTER: TimeDelta = TimeDelta::from_micros(100);

/// Returns what a node may use of a limit: its share of what remains now, less what is unconfirmed.
pub(crate) fn remaining_share(limit: &Limit, share: &Limit, known: &LastKnown, unconfirmed: u64) -> u64 {
    let capacity = limit.capacity();
    let (age, reset) = (known.age.as_micros(), known.reset_after.as_micros());
    let used = match limit.params() {
        _ if age >= reset => 0,
        // Each refill since then has added its units; the last of them comes at the reset.
        LimitParams::Bucket { .. } if limit.refill_interval().is_some() => {
            let interval = limit.refill_interval().map_or(1, TimeDelta::as_micros);
            let refills = reset.div_ceil(interval) - (reset - age).div_ceil(interval);
            let (count, period) = (limit.rate().count, limit.rate().period.length().as_micros());
            let refilled =
                u128::from(refills) * u128::from(interval) * u128::from(count) / u128::from(period);
            known.used.saturating_sub(u64::try_from(refilled).unwrap_or(u64::MAX))
        }
        // It refills evenly until it is full.
        LimitParams::Bucket { .. } => {
            let left = u128::from(known.used) * u128::from(reset - age);
            u64::try_from(left.div_ceil(u128::from(reset))).unwrap_or(known.used)
        }
        _ => known.used,
    };
    let remaining = u128::from(capacity.saturating_sub(used)) * u128::from(share.capacity())
        / u128::from(capacity.max(1));
    u64::try_from(remaining).unwrap_or(u64::MAX).saturating_sub(unconfirmed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use tollgate_core::{Algorithm, LimitSpec, Rate};

    fn limit(algorithm: Algorithm, count: u64) -> Limit {
        LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_secs(60))).build().expect("a limit")
    }

    fn known(used: u64, reset_secs: u64, age_secs: u64) -> LastKnown {
        let secs = TimeDelta::from_secs;
        LastKnown {
            used,
            reset_after: secs(reset_secs),
            age: secs(age_secs),
            in_time: None,
            is_assumed: false,
        }
    }

    /// Nodes together must not admit more than what the store had left, and time refills it as in the store.
    #[test]
    fn a_node_gets_its_share_of_what_remained() {
        let (bucket, window) = (limit(Algorithm::Gcra, 60), limit(Algorithm::FixedWindow, 60));
        for limit in [&bucket, &window] {
            let share = limit.per_node_share(3);
            assert_eq!(remaining_share(limit, &share, &known(60, 30, 0), 0), 0);
            assert_eq!(remaining_share(limit, &share, &known(30, 30, 0), 0), 10);
            assert_eq!(remaining_share(limit, &share, &known(30, 30, 0), 4), 6);
            assert_eq!(remaining_share(limit, &share, &known(30, 30, 0), 99), 0);
            assert_eq!(remaining_share(limit, &share, &known(60, 30, 30), 0), 20, "all is new");
        }
        let share = bucket.per_node_share(3);
        assert_eq!(remaining_share(&bucket, &share, &known(60, 60, 30), 0), 10, "half is refilled");
        assert_eq!(remaining_share(&window, &share, &known(60, 60, 30), 0), 0, "the window is not over");
    }

    /// Without it a node alone gives tokens between two refills, or none at one.
    #[test]
    fn a_bucket_with_an_interval_has_what_its_refills_have_added() {
        let spec = LimitSpec::new(Algorithm::TokenBucket, Rate::per(60, TimeDelta::from_secs(60)));
        let limit = spec.refill_interval(TimeDelta::from_secs(10)).build().expect("a limit");
        for (age, remaining) in [(0, 15), (4, 15), (5, 25), (14, 25), (15, 35), (44, 55), (45, 60)] {
            assert_eq!(remaining_share(&limit, &limit, &known(45, 45, age), 0), remaining, "{age} s");
        }
    }

    /// A limit that was lowered or raised since the store's last answer leaves a node without it neither a fresh budget
    /// nor none.
    #[test]
    fn what_was_used_counts_under_another_limit() {
        let (small, large) = (limit(Algorithm::FixedWindow, 100), limit(Algorithm::FixedWindow, 5_000));
        let used_up = known(100, 30, 0);
        assert_eq!(remaining_share(&small, &small, &used_up, 0), 0);
        assert_eq!(remaining_share(&large, &large, &used_up, 0), 4_900);
        assert_eq!(remaining_share(&small, &small, &known(4_000, 30, 0), 0), 0);
    }

    /// A counter is set once for each answer in time, or every local decision would begin anew.
    #[test]
    fn a_counter_is_set_once_for_each_answer_in_time() {
        let (starts, set, now) = (FallbackStarts::default(), Cell::new(0), Timestamp::from_secs(1_000));
        for (secs, sets) in [(None, 1), (None, 1), (Some(0), 2), (Some(0), 2), (Some(1), 3), (Some(1), 3)] {
            let in_time_at = secs.map(|secs| now + TimeDelta::from_secs(secs));
            starts.set_once((1, 2), in_time_at, || set.set(set.get() + 1));
            assert_eq!(set.get(), sets);
        }
    }
}
