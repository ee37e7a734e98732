//! `class: security` without a stated algorithm: the limit holds in every window, as who writes `5/minute` for a login
//! expects.

use tollgate_core::{Algorithm, Cost, State, TimeDelta, Timestamp};
use tollgate_rules::{Descriptor, Options, Override, OverrideRate, Profile, Ruleset, Source};

fn load(text: &str) -> Ruleset {
    Ruleset::load(&[Source::new("t.yaml", text)], &Options::default())
        .unwrap_or_else(|errors| panic!("{errors}"))
}

/// The algorithms of all limits of the rule `r`.
fn algorithms(text: &str) -> Vec<Algorithm> {
    let rules = load(text);
    let rule = rules.rules().iter().find(|rule| rule.name == "r").expect("the rule");
    rule.all_limits().map(|limit| limit.limit.algorithm()).collect()
}

#[test]
fn only_what_nothing_states_is_decided_by_the_class() {
    use Algorithm::{FixedWindow, Gcra, LeakyBucket, SlidingLog, StrictWindow, TokenBucket};
    let one =
        |settings: &str| algorithms(&format!("domain: d\ndescriptors: [{{key: u, name: r, {settings}}}]"));
    for (settings, expected) in [
        ("class: security, limit: 5/minute", &[StrictWindow][..]),
        ("class: security, limit: [5/minute, 20/hour]", &[StrictWindow, StrictWindow]),
        ("class: security, limit: 5/minute, tiers: {pro: 9/minute}", &[StrictWindow, StrictWindow]),
        ("class: security, limit: 5/minute, candidate: 3/minute", &[StrictWindow, StrictWindow]),
        ("class: security, limit: 5/minute, slots: 20", &[StrictWindow]),
        ("class: security, limit: 5/minute, jitter: true", &[StrictWindow]),
        ("class: security, limit: 5/minute, split: 2", &[StrictWindow]),
        ("class: security, limit: 5/minute, mode: leased", &[StrictWindow]),
        ("class: security, limit: 5/minute, region: split", &[StrictWindow]),
        ("class: security, limit: 5/minute, durable: true", &[StrictWindow]),
        ("class: security, rate_limit: {unit: minute, requests_per_unit: 5}", &[StrictWindow]),
        // stated, or implied by what only a bucket has
        ("class: security, limit: 5/minute, burst: 2", &[Gcra]),
        ("class: security, limit: {count: 5, period: minute, burst: 2}", &[Gcra]),
        ("class: security, limit: [5/minute, {count: 2, period: 1s, burst: 4}]", &[StrictWindow, Gcra]),
        ("class: security, limit: 5/minute, refill_interval: 30s", &[TokenBucket]),
        ("class: security, limit: 5/minute, action: delay", &[LeakyBucket]),
        ("class: security, limit: 5/minute, algorithm: sliding_log", &[SlidingLog]),
        ("class: security, limit: {count: 5, period: minute, algorithm: gcra}", &[Gcra]),
        ("class: security, limit: 5/day in UTC", &[FixedWindow]),
        ("class: strict, limit: 5/minute", &[Gcra]),
        ("limit: 5/minute", &[Gcra]),
    ] {
        assert_eq!(one(settings), expected, "{settings}");
    }
    for (text, expected) in [
        ("{domain: d, class: security, descriptors: [{key: u, name: r, limit: 5/minute}]}", StrictWindow),
        (
            "{domain: d, class: security, descriptors: [{key: u, name: r, class: comfort, limit: 5/minute}]}",
            Gcra,
        ),
        (
            "{domain: d, algorithm: gcra, descriptors: [{key: u, name: r, class: security, limit: 5/minute}]}",
            Gcra,
        ),
        (
            "{domain: d, descriptors: [{key: g, class: security, descriptors: [{key: u, name: r, limit: 5/minute}]}]}",
            StrictWindow,
        ),
        (
            "{domain: d, descriptors: [{key: g, class: security, algorithm: gcra, descriptors: [{key: u, name: r, limit: 5/minute}]}]}",
            Gcra,
        ),
        (
            "{domain: d, profile: envoy, descriptors: [{key: u, name: r, class: security, limit: 5/minute}]}",
            FixedWindow,
        ),
    ] {
        assert_eq!(algorithms(text), [expected], "{text}");
    }
}

/// The promise itself: at no instant have more than five passed within the last minute.
#[test]
fn five_a_minute_are_five_in_any_minute() {
    let rules = load("domain: d\ndescriptors: [{key: u, class: security, limit: 5/minute}]");
    let limit = &rules.rules()[0].limits.limits[0].limit;
    let (mut state, mut passed) = (State::default(), Vec::new());
    let start = Timestamp::from_secs(1_000_000);
    for second in 0..600 {
        let now = start + TimeDelta::from_secs(second);
        if limit.step(&mut state, now, Cost::ONE).verdict.is_allowed() {
            passed.push(second);
        }
    }
    let most =
        passed.iter().map(|from| passed.iter().filter(|at| (*from..from + 60).contains(*at)).count()).max();
    assert_eq!(most, Some(5), "{passed:?}");
}

/// A quota that says how much may burst says that a bucket is meant; without it the limit is as the rule's.
#[test]
fn overrides_and_inline_limits_follow() {
    let rules = load("domain: d\ndescriptors: [{key: api_key, class: security, limit: 5/minute}]");
    let wanted = |burst| {
        let limit = Some(OverrideRate { count: 9, period: "minute".into(), burst });
        Override { limit, ..Override::new("default", 9, "minute") }
    };
    for (burst, expected) in [(None, Algorithm::StrictWindow), (Some(3), Algorithm::Gcra)] {
        let (overrides, errors) = rules.compile_overrides("api_key", None, &[wanted(burst)]);
        assert!(errors.is_empty(), "{errors:?}");
        let limit = &overrides.set_for(&rules.rules()[0], None).limits[0].limit;
        assert_eq!((limit.algorithm(), limit.rate().count), (expected, 9));
    }
    // Whoever has written `strict_window` gets no bucket.
    let stated = load(
        "domain: d\ndescriptors: [{key: api_key, class: security, algorithm: strict_window, limit: 5/minute}]",
    );
    assert_eq!(stated.compile_overrides("api_key", None, &[wanted(Some(3))]).1.len(), 1);
    let entries = [("x", "y")];
    let descriptor =
        Descriptor { entries: &entries, limit: Some((5, TimeDelta::from_secs(60))), ..Descriptor::default() };
    for (text, expected) in [
        ("{domain: d, class: security}", Algorithm::StrictWindow),
        ("{domain: d, class: security, algorithm: gcra}", Algorithm::Gcra),
        ("{domain: d}", Algorithm::Gcra),
    ] {
        let rules = load(text);
        let domain = rules.domain("d").expect("a domain");
        assert_eq!(domain.profile(), Profile::Native);
        let descriptors = [descriptor];
        let plan = domain.plan_descriptors(&descriptors, Cost::ONE);
        assert_eq!(plan.limits[0].limit.limit.algorithm(), expected, "{text}");
    }
}
