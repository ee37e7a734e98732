//! No algorithm lets through more than it promises, over any span; and none lets through less than it should.

use crate::traces::{Admitted, START, admitted, limits_of, micros, refill_interval, traffic};
use proptest::prelude::*;
use std::collections::HashMap;
use tollgate_core::{Algorithm, Cost, Limit, LimitSpec, PermitId, State, TimeDelta, Timestamp, Verdict};

/// `sum <= burst + rate * t` between every two admissions, in whole numbers. A bucket that is refilled at intervals may be
/// ahead by one of them.
pub(crate) fn holds_rate(limit: &Limit, log: &[Admitted]) -> Result<(), TestCaseError> {
    let (count, period) = (i128::from(limit.rate().count), i128::from(micros(limit)));
    for (first, from) in log.iter().enumerate() {
        let mut sum = 0_i128;
        for to in &log[first..] {
            sum += i128::from(to.units);
            let span = i128::from(to.at.since(from.at).as_micros() + refill_interval(limit));
            prop_assert!(
                sum * period <= i128::from(limit.capacity()) * period + count * span,
                "{sum} units in {span} us"
            );
        }
    }
    Ok(())
}

/// Never more than the limit between an admission and one period later, exclusive.
pub(crate) fn holds_every_window(limit: &Limit, log: &[Admitted]) -> Result<(), TestCaseError> {
    for (first, from) in log.iter().enumerate() {
        let inside = log[first..].iter().take_while(|a| a.at.since(from.at).as_micros() < micros(limit));
        prop_assert!(inside.map(|a| a.units).sum::<u64>() <= limit.capacity());
    }
    Ok(())
}

fn in_view(log: &[Admitted], now: Timestamp, length: u64) -> u64 {
    log.iter().filter(|a| now.since(a.at).as_micros() < length).map(|a| a.units).sum()
}

proptest! {
    /// Without it a tenant gets more than it pays for, in some span that no test looked at.
    #[test]
    fn buckets_never_pass_more_than_burst_plus_rate((limit, arrivals) in traffic(prop_oneof![
        limits_of(Algorithm::Gcra), limits_of(Algorithm::TokenBucket), limits_of(Algorithm::LeakyBucket)
    ].boxed())) {
        holds_rate(&limit, &admitted(&limit, &arrivals))?;
    }

    /// Without it a tenant is denied what it has paid for.
    #[test]
    fn buckets_pass_all_that_an_exact_bucket_has((limit, arrivals) in traffic(prop_oneof![
        limits_of(Algorithm::Gcra), limits_of(Algorithm::TokenBucket), limits_of(Algorithm::LeakyBucket)
    ].boxed())) {
        // Tokens times the period: a bucket that fills by `count` each microsecond.
        let (count, period) = (i128::from(limit.rate().count), i128::from(micros(&limit)));
        let full = i128::from(limit.capacity()) * period;
        let (mut tokens, mut state, mut now) = (full, State::default(), START);
        for arrival in arrivals {
            now = now + TimeDelta::from_micros(arrival.gap);
            tokens = full.min(tokens + i128::from(arrival.gap) * count);
            let price = i128::from(arrival.cost) * period;
            let outcome = limit.step(&mut state, now, Cost::new(arrival.cost));
            prop_assert_eq!(outcome.verdict.is_allowed(), price <= tokens);
            if price <= tokens {
                tokens -= price;
            }
            prop_assert_eq!(i128::from(outcome.remaining), tokens / period);
            let missing = full - tokens;
            prop_assert_eq!(i128::from(outcome.reset_after.as_micros()), (missing + count - 1) / count);
        }
    }

    /// Without it a queue that should protect a slow service floods it: departures follow the steady rate, each no
    /// earlier than all the units before it have had their time.
    #[test]
    fn a_leaky_bucket_that_delays_spaces_departures((limit, arrivals) in traffic(
        limits_of(Algorithm::LeakyBucket).prop_map(|limit| {
            let spec = LimitSpec::new(Algorithm::LeakyBucket, limit.rate().clone());
            spec.burst(limit.capacity()).with_delay().build().expect("in range")
        }).boxed()
    )) {
        let (count, period) = (i128::from(limit.rate().count), i128::from(micros(&limit)));
        let (mut state, mut now) = (State::default(), START);
        let mut departures: Vec<(i128, i128)> = Vec::new();
        for arrival in arrivals {
            now = now + TimeDelta::from_micros(arrival.gap);
            let outcome = limit.step(&mut state, now, Cost::new(arrival.cost));
            let Verdict::Allowed { delay } = outcome.verdict else { continue };
            // No request waits longer than the queue is.
            prop_assert!((i128::from(delay.as_micros()) - 1) * count < i128::from(limit.capacity()) * period);
            departures.push((i128::from((now + delay).as_micros()), i128::from(arrival.cost)));
        }
        for first in 0..departures.len() {
            let mut before = 0;
            for last in first + 1..departures.len() {
                before += departures[last - 1].1;
                // Departures are rounded up to a microsecond, so one may seem less than a microsecond too early.
                let apart = departures[last].0 - departures[first].0;
                prop_assert!(before * period < (apart + 1) * count, "{before} units in {apart} us");
            }
        }
    }

    /// Without it a window's limit is not what the operator wrote, in either direction.
    #[test]
    fn a_fixed_window_admits_exactly_its_count((limit, arrivals) in traffic(limits_of(Algorithm::FixedWindow))) {
        let (mut used, mut state, mut now) = (HashMap::new(), State::default(), START);
        for arrival in arrivals {
            now = now + TimeDelta::from_micros(arrival.gap);
            let count = used.entry(now.as_micros() / micros(&limit)).or_insert(0);
            let fits = *count + arrival.cost <= limit.capacity();
            *count += if fits { arrival.cost } else { 0 };
            let outcome = limit.step(&mut state, now, Cost::new(arrival.cost));
            prop_assert_eq!(outcome.verdict.is_allowed(), fits);
            prop_assert_eq!(outcome.remaining, limit.capacity() - *count);
            prop_assert_eq!(outcome.reset_after.as_micros(), micros(&limit) - now.as_micros() % micros(&limit));
        }
    }

    /// Without it the sliding window is not the weighted formula that the documents print.
    #[test]
    fn a_sliding_window_is_the_weighted_formula((limit, arrivals) in traffic(limits_of(Algorithm::SlidingWindow))) {
        let period = micros(&limit);
        let (mut used, mut state, mut now) = (HashMap::<u64, u64>::new(), State::default(), START);
        let mut log = Vec::new();
        for arrival in arrivals {
            now = now + TimeDelta::from_micros(arrival.gap);
            let (window, elapsed) = (now.as_micros() / period, now.as_micros() % period);
            let previous = u128::from(used.get(&(window - 1)).copied().unwrap_or(0));
            let current = used.entry(window).or_insert(0);
            let weigh = |current: u64| previous * u128::from(period - elapsed) + u128::from(current) * u128::from(period);
            let whole = u128::from(limit.capacity()) * u128::from(period);
            let fits = weigh(*current + arrival.cost) <= whole;
            let outcome = limit.step(&mut state, now, Cost::new(arrival.cost));
            prop_assert_eq!(outcome.verdict.is_allowed(), fits);
            if fits {
                *current += arrival.cost;
                log.push(Admitted { at: now, units: arrival.cost });
            }
            prop_assert_eq!(u128::from(outcome.remaining), whole.saturating_sub(weigh(*current)) / u128::from(period));
        }
        for last in &log {
            prop_assert!(in_view(&log.iter().copied().filter(|a| a.at <= last.at).collect::<Vec<_>>(), last.at, period) <= 2 * limit.capacity());
        }
    }

    /// Without it `strict_window` breaks the one promise it is chosen for, or blocks for longer than a slot beyond it.
    #[test]
    fn a_strict_window_never_exceeds_any_window((limit, arrivals) in traffic(limits_of(Algorithm::StrictWindow))) {
        holds_every_window(&limit, &admitted(&limit, &arrivals))?;
    }

    /// Without it a strict window costs its users more than the one slot that it says it costs.
    #[test]
    fn a_strict_window_blocks_for_at_most_a_slot_more(
        (period, slots, count) in (1_000_u64..2_000_000, 1_u64..=120, 1_u64..20),
        steps in proptest::collection::vec((0_u64..1_000, 1_u64..3), 1..60),
    ) {
        let rate = tollgate_core::Rate::per(count, TimeDelta::from_micros(period));
        let limit = LimitSpec::new(Algorithm::StrictWindow, rate).slots(slots).build().expect("in range");
        let (mut log, mut state, mut now) = (Vec::new(), State::default(), START);
        let seen = (slots + 1) * period.div_ceil(slots);
        for (permille, cost) in steps {
            now = now + TimeDelta::from_micros(period * permille / 1_000);
            let outcome = limit.step(&mut state, now, Cost::new(cost));
            if in_view(&log, now, seen) + cost <= count {
                prop_assert!(outcome.verdict.is_allowed());
            }
            if outcome.verdict.is_allowed() {
                log.push(Admitted { at: now, units: cost });
            }
        }
    }

    /// Without it the one algorithm that is called exact is not.
    #[test]
    fn a_sliding_log_admits_exactly_what_an_exact_log_does((limit, arrivals) in traffic(limits_of(Algorithm::SlidingLog))) {
        let (mut log, mut state, mut now) = (Vec::new(), State::default(), START);
        for arrival in arrivals {
            now = now + TimeDelta::from_micros(arrival.gap);
            let fits = in_view(&log, now, micros(&limit)) + arrival.cost <= limit.capacity();
            let outcome = limit.step(&mut state, now, Cost::new(arrival.cost));
            prop_assert_eq!(outcome.verdict.is_allowed(), fits);
            if fits {
                log.push(Admitted { at: now, units: arrival.cost });
            }
            prop_assert_eq!(outcome.remaining, limit.capacity() - in_view(&log, now, micros(&limit)));
        }
        holds_every_window(&limit, &log)?;
    }

    /// Without it a backend that can bear N calls at once gets more, or a permit is lost for ever.
    #[test]
    fn concurrency_never_has_more_than_its_permits_out(
        limit in limits_of(Algorithm::Concurrency),
        steps in proptest::collection::vec((0_u64..600, 0_u128..6, -1_i64..4), 1..80),
    ) {
        let ttl = TimeDelta::from_micros(micros(&limit));
        let mut held: Vec<(u128, u64, Timestamp)> = Vec::new();
        let (mut state, mut now) = (State::default(), START);
        for (permille, id, cost) in steps {
            now = now + TimeDelta::from_micros(ttl.as_micros() * permille / 1_000);
            held.retain(|(.., deadline)| *deadline > now);
            if cost < 0 {
                limit.release(PermitId(id), &mut state);
                held.retain(|(holder, ..)| *holder != id || id == 0);
                continue;
            }
            let units = cost.unsigned_abs();
            let mine: u64 = held.iter().filter(|(holder, ..)| *holder == id && id != 0).map(|h| h.1).sum();
            let others = held.iter().map(|h| h.1).sum::<u64>() - mine;
            let fits = units == 0 || units <= mine || others + units <= limit.capacity();
            let outcome = limit.step_with_permit(PermitId(id), &mut state, now, Cost::new(units));
            prop_assert_eq!(outcome.verdict.is_allowed(), fits);
            if fits && units > 0 {
                held.retain(|(holder, ..)| *holder != id || id == 0);
                held.push((id, units, now + ttl));
            }
            let out: u64 = held.iter().map(|h| h.1).sum();
            prop_assert!(out <= limit.capacity());
            prop_assert_eq!(outcome.remaining, limit.capacity() - out);
        }
    }
}
