//! A state in a word answers as the state does, and a stranger who knows only the tag never frees it too early.

use crate::traces::{START, costs, gaps, limits_of, micros};
use proptest::prelude::*;
use tollgate_core::{
    Algorithm, Calendar, CalendarUnit, Cost, Limit, LimitSpec, Packed, Period, PermitId, Rate, State,
    TimeDelta, Timestamp,
};

#[derive(Clone, Copy, Debug)]
enum Event {
    Charge(u64),
    Refund(u64),
    Debit(u64),
}

fn packable() -> BoxedStrategy<Limit> {
    let attempts = (600_000_u64..5_000_000, 0_u64..20).prop_map(|(period, count)| {
        let rate = Rate::per(count, TimeDelta::from_micros(period));
        LimitSpec::new(Algorithm::FixedWindow, rate).count_denied().build().expect("in range")
    });
    let calendar = (1_u64..40, any::<bool>()).prop_map(|(count, day)| {
        let unit = if day { CalendarUnit::Day } else { CalendarUnit::Month };
        let period = Period::Calendar(Calendar::new(unit, "America/New_York").expect("a zone"));
        LimitSpec::new(Algorithm::FixedWindow, Rate { count, period }).build().expect("in range")
    });
    let blocked = Just(
        LimitSpec::new(Algorithm::Gcra, Rate::per(0, TimeDelta::from_secs(1))).build().expect("in range"),
    );
    prop_oneof![
        3 => limits_of(Algorithm::Gcra),
        1 => limits_of(Algorithm::LeakyBucket),
        3 => limits_of(Algorithm::FixedWindow),
        3 => limits_of(Algorithm::SlidingWindow),
        2 => attempts,
        2 => calendar,
        1 => blocked,
    ]
    .prop_filter("has a packed form", |limit| limit.packed().is_some())
    .boxed()
}

/// Limits as large as they come, by every algorithm that packs.
fn giants() -> BoxedStrategy<Limit> {
    let spec = (
        proptest::sample::select(vec![Algorithm::Gcra, Algorithm::FixedWindow, Algorithm::SlidingWindow]),
        prop_oneof![1_u64..=Rate::MAX_COUNT, Just(Rate::MAX_COUNT), 1_u64..5_000],
        prop_oneof![
            1_000_u64..=Period::MAX_LENGTH.as_micros(),
            Just(Period::MAX_LENGTH.as_micros()),
            Just(1_000)
        ],
        prop_oneof![1_u64..=Rate::MAX_COUNT, Just(Rate::MAX_COUNT), 1_u64..5_000],
    );
    spec.prop_filter_map("can be built and packed", |(algorithm, count, period, burst)| {
        let mut spec = LimitSpec::new(algorithm, Rate::per(count, TimeDelta::from_micros(period)));
        spec.burst = algorithm.has_burst().then_some(burst);
        spec.build().ok()
    })
    .boxed()
}

fn events(limit: &Limit, back: bool) -> BoxedStrategy<Vec<(i64, Event)>> {
    let period = i64::try_from(micros(limit)).expect("short");
    let forward = gaps(limit).prop_map(|gap| i64::try_from(gap).expect("short"));
    let swing = if back {
        prop_oneof![4 => forward, 1 => Just(-1_i64), 1 => -period..=0, 1 => -5 * period..=0].boxed()
    } else {
        forward.boxed()
    };
    let event = prop_oneof![
        6 => costs(limit).prop_map(Event::Charge),
        1 => Just(Event::Charge(0)),
        1 => (0_u64..9).prop_map(Event::Refund),
        1 => prop_oneof![0_u64..9, Just(u64::MAX), Just(1_u64 << 29)].prop_map(Event::Debit),
    ];
    proptest::collection::vec((swing, event), 1..60).boxed()
}

fn case(limits: BoxedStrategy<Limit>, back: bool) -> impl Strategy<Value = (Limit, Vec<(i64, Event)>)> {
    limits.prop_flat_map(move |limit| {
        let events = events(&limit, back);
        (Just(limit), events)
    })
}

fn moved(now: Timestamp, by: i64) -> Timestamp {
    let span = TimeDelta::from_micros(by.unsigned_abs());
    if by < 0 { now - span } else { now + span }
}

fn same_outcomes(limit: &Limit, start: Timestamp, events: &[(i64, Event)]) -> Result<(), TestCaseError> {
    let (mut state, mut word, mut now) = (State::default(), None, start);
    for (by, event) in events {
        now = moved(now, *by);
        let cost = match event {
            Event::Charge(units) => Cost::new(*units),
            Event::Refund(units) => Cost::refund(*units),
            Event::Debit(units) => {
                limit.debit(PermitId::ANONYMOUS, &mut state, now, *units);
                word = Some(limit.debit_word(word, 0, now, *units));
                continue;
            }
        };
        let (next, packed) = limit.step_word(word, 0, now, cost);
        prop_assert_eq!(packed, limit.step(&mut state, now, cost));
        word = Some(next);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Without it the table gives other answers than the algorithm that the documents describe.
    #[test]
    fn a_word_answers_as_its_state((limit, events) in case(packable(), true)) {
        same_outcomes(&limit, START, &events)?;
    }

    /// Without it the largest limits and the last decades overflow: a panic, or a limit that forgets.
    #[test]
    fn giants_neither_overflow_nor_differ((limit, events) in case(giants(), true), end in any::<bool>(), huge in 0_u64..=(1 << 41)) {
        let start = if end { Timestamp::MAX - TimeDelta::from_micros(5) } else { START };
        let mut events = events;
        events.push((0, Event::Charge(huge)));
        events.push((0, Event::Charge(u64::MAX)));
        events.push((0, Event::Refund(u64::MAX)));
        if limit.packed().is_some() {
            same_outcomes(&limit, start, &events)?;
        } else {
            let (mut state, mut now) = (State::default(), start);
            for (by, event) in events {
                now = moved(now, by);
                match event {
                    Event::Charge(units) => {
                        let outcome = limit.step(&mut state, now, Cost::new(units));
                        prop_assert!(outcome.remaining <= limit.capacity());
                    }
                    Event::Refund(units) => prop_assert!(limit.step(&mut state, now, Cost::refund(units)).verdict.is_allowed()),
                    Event::Debit(units) => limit.debit(PermitId::ANONYMOUS, &mut state, now, units),
                }
            }
        }
    }

    /// Without it a full table frees a slot that still matters, and a tenant's quota starts again.
    #[test]
    fn what_has_expired_changes_no_answer((limit, events) in case(packable(), false)) {
        let tag = limit.packed().expect("packable").tag;
        let (mut kept, mut swept, mut state, mut now) = (None, None, State::default(), START);
        for (by, event) in events {
            now = moved(now, by);
            if swept.is_some_and(|word| tag.expires(word) <= now) {
                swept = None;
            }
            if limit.expires(&state) <= now {
                state = State::default();
            }
            let cost = match event {
                Event::Charge(units) => Cost::new(units),
                Event::Refund(units) => Cost::refund(units),
                Event::Debit(units) => {
                    kept = Some(limit.debit_word(kept, 0, now, units));
                    swept = Some(limit.debit_word(swept, 0, now, units));
                    limit.debit(PermitId::ANONYMOUS, &mut state, now, units);
                    continue;
                }
            };
            let (word, outcome) = limit.step_word(kept, 0, now, cost);
            kept = Some(word);
            let (word, after_sweep) = limit.step_word(swept, 0, now, cost);
            swept = Some(word);
            prop_assert_eq!(outcome, after_sweep);
            prop_assert_eq!(outcome, limit.step(&mut state, now, cost));
            // Not absurdly late: the slots of keys that went away come free again.
            let latest = now + limit.retention() + limit.retention() + TimeDelta::from_micros(1);
            if limit.rate().count > 0 {
                prop_assert!(tag.expires(word) <= latest, "{:?} after {now:?}", tag.expires(word));
            }
        }
    }

    /// Without it a flood of new keys pushes out a key that is near its limit, or keeps one that is not.
    #[test]
    fn pressure_is_between_half_and_all_of_what_is_used((limit, events) in case(packable(), false), later in 0_u64..1_000) {
        prop_assume!(limit.rate().count > 0);
        let Packed { tag, layout, .. } = limit.packed().expect("packable");
        let bucket = limit.algorithm().has_burst();
        let (mut word, mut now) = (None, START);
        for (by, event) in events {
            now = moved(now, by);
            let Event::Charge(units) = event else { continue };
            let (next, outcome) = limit.step_word(word, 0, now, Cost::new(units));
            word = Some(next);
            // A bucket is read later than it was written; a window is read as it was stored.
            let read = if bucket { now + TimeDelta::from_micros(limit.retention().as_micros() / 2 * later / 1_000) } else { now };
            let mark = if bucket { (layout >> 8) as u8 } else { limit.pressure(&outcome) };
            let pressure = f64::from(tag.pressure(next, mark, read));
            let (used, rounding) = if bucket {
                let fill = limit.capacity() as f64 * micros(&limit) as f64 / limit.rate().count as f64;
                let State::Bucket(tat) = state_of(&limit, next) else { unreachable!("a bucket") };
                let owed = (tat.micros as f64 + tat.fraction as f64 / 4_096.0 - read.as_micros() as f64).max(0.0);
                (256.0 * owed / fill, 1.0 + 256.0 / fill)
            } else {
                let used = limit.capacity().saturating_sub(outcome.remaining);
                (256.0 * used as f64 / limit.capacity() as f64, 2.0)
            };
            // The fraction is read coarsely above: a microsecond of it either way.
            let slack = if bucket { rounding } else { 0.0 };
            prop_assert!(pressure <= used + slack, "{pressure} of {used}");
            prop_assert!(pressure >= (used / 2.0).min(127.0) - rounding, "{pressure} of {used}");
        }
    }
}

fn state_of(_: &Limit, word: u64) -> State {
    State::Bucket(tollgate_core::Tat { micros: word >> 11, fraction: word & 2_047, reach: 0, scale: None })
}

/// Without it an idle bucket of a few microseconds looks used, and is kept when a used one should be.
#[test]
fn unused_bucket_has_no_pressure() {
    let limit = LimitSpec::new(Algorithm::Gcra, Rate::per(1_000, TimeDelta::from_millis(1)))
        .burst(1)
        .build()
        .expect("in range");
    let (word, _) = limit.step_word(None, 0, START, Cost::ONE);
    let Packed { tag, layout, .. } = limit.packed().expect("narrow");
    let mark = (layout >> 8) as u8;
    assert_eq!(tag.pressure(word, mark, START), 128); // one microsecond owed, of two: the next power above its fill time
    assert_eq!(tag.pressure(word, mark, START + TimeDelta::from_micros(1)), 0);
    assert_eq!(tollgate_core::Tag::from_byte(tag.byte()), tag);
}

/// Without it a table keeps what a blocked rule sees: an attacker fills it with keys that remember nothing.
#[test]
fn a_blocked_limit_leaves_nothing_behind() {
    let limit = LimitSpec::new(Algorithm::TokenBucket, Rate::per(0, TimeDelta::from_secs(1)))
        .burst(5)
        .build()
        .expect("in range");
    let (word, outcome) = limit.step_word(None, 0, START, Cost::ONE);
    let tag = limit.packed().expect("no state at all").tag;
    assert!(outcome.verdict.is_denied());
    assert!(tag.expires(word) <= START);
    assert_eq!(tag.pressure(word, limit.pressure(&outcome), START), 0);
}
