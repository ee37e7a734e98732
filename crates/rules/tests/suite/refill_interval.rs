//! `refill_interval`: where it may be written, what it means there, and what is refused or warned about.

use tollgate_core::{Algorithm, TimeDelta};
use tollgate_rules::{Options, Ruleset, Source};

fn load(text: &str) -> Ruleset {
    Ruleset::load(&[Source::new("t.yaml", text)], &Options::default()).unwrap_or_else(|e| panic!("{e}"))
}

fn descriptor(text: &str) -> String {
    format!("domain: d\ndescriptors:\n- {{key: k, {text}}}\n")
}

fn limits(text: &str) -> Vec<String> {
    let set = load(&descriptor(text));
    set.rules()[0].limits.limits.iter().map(|limit| limit.limit.to_string()).collect()
}

/// Without it a bucket that was written to refill at intervals refills continuously.
#[test]
fn a_token_bucket_may_be_refilled_at_intervals() {
    let refilled = "token_bucket 60/1m burst 100 refilled every 10s";
    for text in [
        "limit: {count: 60, period: minute, burst: 100, algorithm: token_bucket, refill_interval: 10s}",
        "limit: {count: 60, period: minute, burst: 100, refill_interval: 10s}",
        "limit: 60/minute, burst: 100, refill_interval: 10s",
        "algorithm: token_bucket, limit: 60/minute, burst: 100, refill_interval: 10s",
        "rate_limit: {unit: minute, requests_per_unit: 60, burst: 100, refill_interval: 10s}",
    ] {
        assert_eq!(limits(text), [refilled], "{text}");
    }
    assert_eq!(
        limits(
            "refill_interval: 10s, limit: [60/minute, {count: 9, period: hour, algorithm: gcra}, 9/day in UTC]"
        ),
        ["token_bucket 60/1m refilled every 10s", "gcra 9/1h", "fixed_window 9/calendar day in UTC"]
    );
}

/// Without it a bucket with another interval reads a state that means another time, and a tier forgets its usage.
#[test]
fn each_interval_has_its_own_counter_and_tiers_share_it() {
    let scope = |text: &str| load(&descriptor(text)).rules()[0].limits.limits[0].scope.label().to_owned();
    assert_eq!(scope("limit: 60/minute, refill_interval: 10s"), "d|k|token_bucket.every=10s|1m");
    assert_eq!(scope("limit: 90/minute, refill_interval: 10s, burst: 200"), "d|k|token_bucket.every=10s|1m");
    assert_eq!(scope("limit: 60/minute, algorithm: token_bucket"), "d|k|token_bucket|1m");
    let set =
        load(&descriptor("limit: 60/minute, tiers: {pro: 600/minute, none: 0/minute}, refill_interval: 10s"));
    let rule = &set.rules()[0];
    for tier in ["pro", "none"] {
        let limit = &rule.limits_for(Some(tier))[0];
        assert_eq!(limit.scope, rule.limits_for(None)[0].scope, "{tier}");
        assert_eq!(limit.limit.refill_interval(), Some(TimeDelta::from_secs(10)));
        assert_eq!(limit.limit.algorithm(), Algorithm::TokenBucket);
    }
}

#[test]
fn refills_are_jittered_as_windows_are() {
    for (text, jittered) in [
        ("domain: d\njitter: true\ndescriptors:\n- {key: k, limit: 60/minute, refill_interval: 10s}\n", true),
        ("domain: d\ndescriptors:\n- {key: k, limit: 60/minute, refill_interval: 10s, jitter: true}\n", true),
        (
            "domain: d\njitter: true\ndescriptors:\n- {key: k, limit: 60/minute, algorithm: token_bucket}\n",
            false,
        ),
    ] {
        assert_eq!(load(text).rules()[0].limits.limits[0].limit.is_jittered(), jittered, "{text}");
    }
}

#[test]
fn mistakes_are_refused_with_their_place() {
    for (text, expected) in [
        (
            "limit: {count: 9, period: minute, algorithm: gcra, refill_interval: 10s}",
            "3:80 `refill_interval` has no meaning for gcra | write `algorithm: token_bucket`",
        ),
        (
            "limit: 9/minute, algorithm: sliding_window, refill_interval: 10s",
            "3:73 `refill_interval` has no meaning for any limit of this rule | it is for token_bucket",
        ),
        (
            "limit: {count: 9, calendar: day, refill_interval: 10s}",
            "3:62 `refill_interval` has no meaning for fixed_window",
        ),
        ("limit: 9/minute, refill_interval: 20y", "3:46 a refill interval of 7300d is out of range"),
        (
            "limit: 9/minute, refill_interval: soon",
            "3:46 `refill_interval` must be a length of time, not `soon`",
        ),
        ("limit: 9/minute, refill_intervall: 10s", "did you mean `refill_interval`?"),
        (
            "limit: 9/minute, refill_interval: 10s, mode: leased",
            "token_bucket with `refill_interval` cannot be leased: its units come back together",
        ),
        (
            "refill_interval: 10s, descriptors: [{key: q, limit: 9/minute}]",
            "`refill_interval` on a descriptor without",
        ),
    ] {
        let errors = Ruleset::load(&[Source::new("t.yaml", descriptor(text))], &Options::default())
            .expect_err(text)
            .all()
            .iter()
            .map(|e| format!("{}:{} {} | {}", e.line, e.column, e.message, e.help.as_deref().unwrap_or("")))
            .collect::<Vec<_>>();
        assert!(
            errors.len() == 1 && errors[0].contains(expected),
            "{text}\nwanted {expected}\ngot {errors:#?}"
        );
    }
}

#[test]
fn refills_that_surprise_are_warned_about() {
    for (text, expected) in [
        ("limit: 1/minute, refill_interval: 10s", Some("1/1m is less than one unit every 10s")),
        (
            "limit: 600/minute, burst: 50, refill_interval: 10s",
            Some("each refill adds 100, and the bucket holds 50"),
        ),
        ("limit: 600/minute, burst: 100, refill_interval: 10s", None),
        ("limit: 10/second, burst: 100, refill_interval: 1s", None),
    ] {
        let set = load(&descriptor(text));
        let warnings: Vec<String> = set.warnings().iter().map(|warning| warning.message.clone()).collect();
        match expected {
            Some(expected) => {
                assert!(warnings.iter().any(|text| text.contains(expected)), "{text}: {warnings:?}");
            }
            None => assert!(warnings.is_empty(), "{text}: {warnings:?}"),
        }
    }
}
