//! The Envoy service's arithmetic, fact by fact: a user who moves over sees the same codes and numbers.

use tollgate_core::{Algorithm, Cost, Limit, LimitSpec, Outcome, Rate, State, TimeDelta, Timestamp, Verdict};

fn per_minute(count: u64) -> Limit {
    LimitSpec::new(Algorithm::FixedWindow, Rate::per(count, TimeDelta::from_secs(60)))
        .count_denied()
        .build()
        .expect("in range")
}

/// Two seconds into a minute.
const NOW: Timestamp = Timestamp::from_secs(1_000_022);

fn hit(limit: &Limit, state: &mut State, hits: u64) -> Outcome {
    limit.step(state, NOW, Cost::new(hits))
}

/// Without it the Nth of N is denied, or the N+1st passes.
#[test]
fn the_nth_of_n_is_ok_with_nothing_remaining() {
    let (limit, mut state) = (per_minute(3), State::default());
    let remaining: Vec<_> =
        (0..3).map(|_| hit(&limit, &mut state, 1)).map(|o| (o.verdict, o.remaining)).collect();
    assert_eq!(remaining, [(Verdict::ALLOWED, 2), (Verdict::ALLOWED, 1), (Verdict::ALLOWED, 0)]);
    let over = hit(&limit, &mut state, 1);
    assert_eq!((over.verdict.is_denied(), over.remaining), (true, 0));
}

/// Without it a burst that is denied leaves room that the service would not have: rejected hits count.
#[test]
fn rejected_hits_are_counted() {
    let (limit, mut state) = (per_minute(5), State::default());
    assert!(hit(&limit, &mut state, 3).verdict.is_allowed());
    assert!(hit(&limit, &mut state, 3).verdict.is_denied());
    assert!(hit(&limit, &mut state, 1).verdict.is_denied(), "the counter stands at 6 of 5");
    assert_eq!(hit(&limit, &mut state, 0).remaining, 0);
}

/// Without it a look (`hits_addend: 0`) at exactly the limit answers OVER_LIMIT, or one beyond it answers OK.
#[test]
fn a_peek_is_over_only_beyond_the_limit() {
    let (limit, mut state) = (per_minute(2), State::default());
    assert!(hit(&limit, &mut state, 2).verdict.is_allowed());
    let at = hit(&limit, &mut state, 0);
    assert_eq!((at.verdict, at.remaining), (Verdict::ALLOWED, 0));
    assert!(hit(&limit, &mut state, 1).verdict.is_denied());
    assert!(hit(&limit, &mut state, 0).verdict.is_denied());
}

/// Without it `duration_until_reset` is not the rest of a window aligned to the epoch.
#[test]
fn reset_is_the_rest_of_the_window() {
    let (limit, mut state) = (per_minute(1), State::default());
    assert_eq!(hit(&limit, &mut state, 1).reset_after, TimeDelta::from_secs(58));
    let over = hit(&limit, &mut state, 1);
    assert_eq!(over.verdict, Verdict::Denied { retry_after: Some(TimeDelta::from_secs(58)) });
    let next = limit.step(&mut state, NOW + TimeDelta::from_secs(58), Cost::ONE);
    assert_eq!((next.verdict, next.reset_after), (Verdict::ALLOWED, TimeDelta::from_secs(60)));
}

/// Without it weeks start on another day than Thursday, and months on another length than 30 days.
#[test]
fn weeks_months_and_years_are_counted_from_the_epoch() {
    for days in [7, 30, 365] {
        let span = TimeDelta::from_secs(days * 86_400);
        let limit = LimitSpec::new(Algorithm::FixedWindow, Rate::per(1, span))
            .count_denied()
            .build()
            .expect("in range");
        let turn = Timestamp::from_secs(50 * days * 86_400);
        let mut state = State::default();
        let last = limit.step(&mut state, turn - TimeDelta::from_secs(1), Cost::ONE);
        assert_eq!((last.verdict, last.reset_after), (Verdict::ALLOWED, TimeDelta::from_secs(1)));
        assert!(limit.step(&mut state, turn, Cost::ONE).verdict.is_allowed());
    }
}

/// Without it `requests_per_unit: 0` lets something through.
#[test]
fn zero_blocks() {
    let (limit, mut state) = (per_minute(0), State::default());
    assert!(hit(&limit, &mut state, 0).verdict.is_allowed());
    assert_eq!(hit(&limit, &mut state, 1).verdict, Verdict::Denied { retry_after: None });
}

/// Without it a flood of denied hits wraps a counter and opens the limit.
#[test]
fn a_flood_of_attempts_does_not_wrap() {
    let (limit, mut state) = (per_minute(10), State::default());
    let (mut word, mut outcome) = limit.step_word(None, 0, NOW, Cost::new(u64::MAX));
    for _ in 0..4 {
        assert!(outcome.verdict.is_denied());
        assert!(hit(&limit, &mut state, u64::MAX).verdict.is_denied());
        (word, outcome) = limit.step_word(Some(word), 0, NOW, Cost::new(1 << 29));
    }
    assert_eq!(limit.step_word(Some(word), 0, NOW, Cost::PEEK).1, limit.step(&mut state, NOW, Cost::PEEK));
}
