//! Days and months as people count them, at both ends of the world and on the days when clocks change; and windows
//! that start at an instant of their own for each key.

use tollgate_core::{
    Algorithm, Calendar, CalendarUnit, Cost, CounterKey, KeyPart, Limit, LimitSpec, Period, Rate, Scope,
    State, TimeDelta, Timestamp, Verdict, nonzero,
};

const HOUR: u64 = 3_600;

fn window(unit: CalendarUnit, zone: &str, at: u64) -> (u64, u64) {
    let calendar = Calendar::new(unit, zone).expect("a zone");
    let (start, end) = calendar.window(Timestamp::from_secs(at));
    assert_eq!((start, end), calendar.window(Timestamp::from_secs(at)), "the remembered answer is the same");
    assert!(end.since(start) <= calendar.max_length(), "{zone} {at}");
    (start.as_secs(), end.as_secs())
}

/// Without it a daily quota resets at the wrong hour for everybody who does not live in Greenwich.
#[test]
fn days_begin_at_local_midnight() {
    let noon = 1_718_452_800; // 2024-06-15 12:00 UTC
    assert_eq!(window(CalendarUnit::Day, "UTC", noon), (noon - 12 * HOUR, noon + 12 * HOUR));
    // Kiritimati, UTC+14: already the 16th, 02:00. Pago Pago, UTC-11: the 15th, 01:00.
    assert_eq!(window(CalendarUnit::Day, "Pacific/Kiritimati", noon), (noon - 2 * HOUR, noon + 22 * HOUR));
    assert_eq!(window(CalendarUnit::Day, "Pacific/Pago_Pago", noon), (noon - HOUR, noon + 23 * HOUR));
}

/// Without it the days on which clocks change give too little or too much time, or are two windows.
#[test]
fn days_on_which_clocks_change_are_one_window() {
    let hours = |zone, at| {
        let (start, end) = window(CalendarUnit::Day, zone, at);
        for second in [start, start + 1, (start + end) / 2, end - 1] {
            assert_eq!(window(CalendarUnit::Day, zone, second), (start, end), "{zone} {second}");
        }
        assert_eq!(window(CalendarUnit::Day, zone, end).0, end);
        (end - start) as f64 / HOUR as f64
    };
    assert_eq!(hours("Europe/Zurich", 1_711_846_800), 23.0); // 2024-03-31
    assert_eq!(hours("Europe/Zurich", 1_729_990_800), 25.0); // 2024-10-27
    assert_eq!(hours("Australia/Lord_Howe", 1_728_136_800), 23.5); // 2024-10-06
    assert_eq!(hours("Antarctica/Troll", 1_729_990_800), 26.0); // 2024-10-27, two hours at once
    assert_eq!(hours("Antarctica/Casey", 1_678_312_800), 27.0); // 2023-03-09, three hours at once
    assert_eq!(hours("America/Havana", 1_730_606_400), 25.0); // 2024-11-03, midnight comes twice
    assert_eq!(hours("Africa/Cairo", 1_714_082_400), 23.0); // 2024-04-26, midnight does not come
    assert_eq!(hours("Pacific/Apia", 1_325_066_400), 24.0); // 2011-12-28
    assert_eq!(hours("Pacific/Apia", 1_325_200_000), 24.0); // 2011-12-29, then the 31st: the 30th never was
}

/// Without it a clock set back just after midnight answers from a window that is over: reset in no time, for an hour.
#[test]
fn clocks_set_back_after_midnight_stay_in_the_new_day() {
    // St. John's, 2006-10-29: at 00:01 clocks went back to 23:01. Midnight was at 02:30 UTC.
    let midnight = 1_162_089_000;
    let (start, end) = window(CalendarUnit::Day, "America/St_Johns", midnight + 1_800);
    assert_eq!(start, midnight);
    assert_eq!(window(CalendarUnit::Day, "America/St_Johns", midnight - 1).1, midnight);
    assert_eq!(end, midnight + 25 * HOUR);
}

/// Without it a monthly quota is a quota of 30 days, and a February pays for a March.
#[test]
fn months_follow_the_calendar() {
    let days = |at| {
        let (start, end) = window(CalendarUnit::Month, "UTC", at);
        (end - start) / 86_400
    };
    assert_eq!(days(1_707_955_200), 29); // February 2024
    assert_eq!(days(1_739_577_600), 28); // February 2025
    assert_eq!(days(1_710_460_800), 31); // March 2024
    let (start, end) = window(CalendarUnit::Month, "Europe/Zurich", 1_710_460_800);
    assert_eq!(end - start, 31 * 86_400 - HOUR, "March is an hour short where clocks go forward");
    // New Year comes first to Kiritimati: 2023-12-31 10:00 UTC.
    assert_eq!(window(CalendarUnit::Month, "Pacific/Kiritimati", 1_704_016_800).0, 1_704_016_800);
    assert_eq!(window(CalendarUnit::Day, "Asia/Tokyo", 0).0, 0, "the first day is cut off at the epoch");
}

fn daily(zone: &str, count: u64) -> Limit {
    let period = Period::Calendar(Calendar::new(CalendarUnit::Day, zone).expect("a zone"));
    LimitSpec::new(Algorithm::FixedWindow, Rate { count, period }).build().expect("in range")
}

/// Without it a day of 26 hours is forgotten after 25, and its quota is given twice.
#[test]
fn a_25_hour_day_is_one_window_to_its_end() {
    for (zone, at, hours) in [
        ("Antarctica/Troll", 1_729_990_800, 26),
        ("Antarctica/Casey", 1_678_312_800, 27),
        ("Europe/Zurich", 1_729_990_800, 25),
    ] {
        let limit = daily(zone, 1);
        let start = Timestamp::from_secs(window(CalendarUnit::Day, zone, at).0);
        let end = start + TimeDelta::from_secs(hours * HOUR);
        let mut state = State::default();
        let first = limit.step(&mut state, start, Cost::ONE);
        assert_eq!(first.reset_after, end.since(start));
        assert_eq!(limit.expires(&state), end);
        let (word, _) = limit.step_word(None, 0, start, Cost::ONE);
        assert!(limit.packed().expect("packs").tag.expires(word) >= end);
        let denied = limit.step(&mut state, end - TimeDelta::from_micros(1), Cost::ONE);
        assert_eq!(denied.verdict, Verdict::Denied { retry_after: Some(TimeDelta::from_micros(1)) });
        assert!(limit.step(&mut state, end, Cost::ONE).verdict.is_allowed());
        assert!(limit.retention() >= end.since(start));
    }
}

/// Without it a typing error in a zone becomes UTC.
#[test]
fn an_unknown_zone_is_an_error() {
    let error = Calendar::new(CalendarUnit::Day, "Europe/Zurick").expect_err("no such place");
    assert!(error.to_string().contains("Europe/Zurick"));
}

/// Without it all keys reset at once, and their clients come back at once.
#[test]
fn jitter_spreads_the_keys_over_the_window() {
    let limit = LimitSpec::new(Algorithm::FixedWindow, Rate::per_minute(nonzero!(5)))
        .jitter()
        .build()
        .expect("in range");
    let scope = Scope::new("api/user");
    let mut tenths = [0_u32; 10];
    for number in 0..10_000 {
        let name = number.to_string();
        let hash = CounterKey { scope: &scope, parts: &[KeyPart::Text(&name)] }.stable_hash();
        tenths[usize::try_from(limit.phase(hash).as_micros() / 6_000_000).expect("within the minute")] += 1;
    }
    assert!(tenths.iter().all(|keys| (900..=1_100).contains(keys)), "{tenths:?}");
    let plain =
        LimitSpec::new(Algorithm::FixedWindow, Rate::per_minute(nonzero!(5))).build().expect("in range");
    assert_eq!(plain.phase(12_345_678), TimeDelta::ZERO);
}

/// Without it a jittered key gets a wrong instant: what an outcome says is relative to now, whatever the phase.
#[test]
fn a_jittered_window_enforces_its_limit() {
    for algorithm in [Algorithm::FixedWindow, Algorithm::SlidingWindow, Algorithm::StrictWindow] {
        let limit =
            LimitSpec::new(algorithm, Rate::per_minute(nonzero!(5))).jitter().build().expect("in range");
        let phase = limit.phase(0x9e37_79b9_7f4a_7c15);
        let now = Timestamp::from_secs(1_700_000_000);
        let mut state = State::default();
        assert!(limit.step(&mut state, now + phase, Cost::new(5)).verdict.is_allowed());
        let denied = limit.step(&mut state, now + phase, Cost::ONE).verdict;
        let Verdict::Denied { retry_after: Some(wait) } = denied else { panic!("{algorithm}: {denied:?}") };
        let early = now + TimeDelta::from_micros(wait.as_micros() - 1) + phase;
        assert!(limit.step(&mut state, early, Cost::ONE).verdict.is_denied());
        assert!(limit.step(&mut state, now + wait + phase, Cost::ONE).verdict.is_allowed());
    }
}
