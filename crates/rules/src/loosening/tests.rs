//! Each way to lose a protection is found, and daily changes ask nothing.

use crate::{LooseningKind, Options, Ruleset, Source};
use tollgate_core::{Cost, State, Timestamp};

fn load(descriptors: &str) -> Ruleset {
    let text = format!("{{domain: d, descriptors: [{descriptors}]}}");
    Ruleset::load(&[Source::new("d.yaml", text)], &Options::default())
        .unwrap_or_else(|errors| panic!("{errors}"))
}

const OTHER: &str = "{key: api_key, limit: 10/s}";

fn loosened(before: &str, after: &str) -> Vec<String> {
    let (before, after) = (load(&format!("{OTHER}, {before}")), load(&format!("{OTHER}, {after}")));
    before.loosened(&after).into_iter().map(|one| one.detail).collect()
}

#[test]
fn whatever_weakens_a_security_rule_is_found() {
    let login = "{key: login, name: login, class: security, limit: 5/minute}";
    let rule = "security rule `d: login`";
    for (after, says) in [
        ("{key: user, limit: 5/minute}", "is removed"),
        ("{key: login, class: security, shadow: true, limit: 5/minute}", "no longer denies anything"),
        ("{key: login, class: security, rate_limit: {unlimited: true}}", "no longer denies anything"),
        ("{key: login, class: comfort, on_error: closed, limit: 5/minute}", "is no longer of class security"),
        ("{key: login, class: security, limit: 50/minute}", "allows 10 times as much"),
        ("{key: login, class: security, limit: 5/minute, burst: 60}", "allows 12 times as much"),
        ("{key: login, class: security, limit: 5/s}", "allows 60 times as much"),
        (
            "{key: login, class: security, limit: 5/minute, on_error: open}",
            "no longer fails closed while the store is unavailable",
        ),
        ("{key: login, class: security, limit: 5/minute, action: degrade}", "no longer denies anything"),
        ("{key: login, class: security, limit: 5/minute, cost: 0}", "no longer counts anything (cost 0)"),
        (
            "{key: login, class: security, limit: 5/minute, cost: tokens}",
            "counts what the attribute `tokens` holds (cost)",
        ),
        (
            "{key: login, class: security, limit: 5/minute, mode: local}",
            "counts on each node alone (mode: local), so that each allows the whole limit",
        ),
        (
            "{key: login, class: security, limit: 5/minute, on_error: local}",
            "no longer fails closed while the store is unavailable",
        ),
        (
            "{key: login, class: security, limit: 5/minute, action: delay}",
            "delays requests instead of denying them (action: delay)",
        ),
        (
            "{key: login, class: security, limit: 5/minute, algorithm: fixed_window}",
            "lets up to 3 times as much through in a short time (algorithm: fixed_window)",
        ),
        (
            "{key: login, class: security, quota_mode: true, limit: 5/minute}",
            "denies only when all quota limits of a request are used up (quota_mode)",
        ),
        (
            "{key: login, value: 'b*', limit: 5/minute}, {key: login, class: security, limit: 5/minute}",
            "is replaced by `login=b*` for some requests",
        ),
        (
            "{key: login, value: bob, rate_limit: {unlimited: true}}, {key: login, class: security, limit: 5/minute}",
            "is replaced by `login=bob` for some requests",
        ),
        (
            "{key: login, value: bob, descriptors: [{key: a, limit: 1/s}]}, {key: login, class: security, limit: 5/minute}",
            "no longer matches requests with login=bob",
        ),
        (
            "{key: login, class: security, limit: 5/minute, tiers: {pro: 500/minute}}",
            "allows 100 times as much for tier pro",
        ),
        (
            "{key: login, name: login, class: security, limit: 5/minute}, \
             {key: login, value: bob, replaces: [{name: login}], limit: 900/s}",
            "is replaced by `login=bob` for some requests",
        ),
    ] {
        assert!(
            loosened(login, after).contains(&format!("{rule} {says}")),
            "{after}: {:?}",
            loosened(login, after)
        );
    }
}

/// The domain may place counters by an attribute that any caller can set: each value is a fresh budget.
#[test]
fn counters_that_are_divided_are_found() {
    let load = |more: &str| {
        let text =
            format!("{{domain: d, {more} descriptors: [{{key: login, class: security, limit: 5/minute}}]}}");
        Ruleset::load(&[Source::new("d.yaml", text)], &Options::default()).expect("rules")
    };
    let found = load("").loosened(&load("shard_by: device,"));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].detail.ends_with("counts separately for each value of a further key"), "{found:?}");
    assert_eq!(load("shard_by: device,").loosened(&load("")), []);
}

/// Small steps are judged against the rules of a day ago, and only those that raise further.
#[test]
fn small_steps_add_up() {
    let login = |limit: &str| load(&format!("{OTHER}, {{key: login, class: security, limit: {limit}}}"));
    let (day_ago, now) = (login("5/minute"), login("45/minute"));
    let found = now.loosened_since(&day_ago, &login("50/minute"));
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].detail, "security rule `d: login` allows 10 times as much as a day ago");
    // What has been confirmed is not asked again by a change of something else, or a tighter limit.
    let confirmed = login("500/minute");
    assert_eq!(confirmed.loosened_since(&day_ago, &login("400/minute")), []);
    assert_eq!(confirmed.loosened_since(&day_ago, &confirmed), []);
    // One step that is enormous by itself is reported once.
    assert_eq!(now.loosened_since(&day_ago, &login("5000/minute")).len(), 1);
}

/// The oracle floods a caller's limits and counts what passes: whatever lets ten times as much through is found.
#[test]
fn what_a_flood_would_gain_is_found() {
    let flood = |rules: &Ruleset| -> u64 {
        let limits: Vec<_> = rules.rules()[0].limits.limits.iter().map(|limit| limit.limit.clone()).collect();
        let mut states = vec![State::default(); limits.len()];
        let mut passed = 0;
        for second in 0..7_200 {
            let now = Timestamp::from_secs(1_000_000 + second);
            // A denied request changes nothing, so all limits must be asked before any is charged.
            let mut next = states.clone();
            while limits
                .iter()
                .zip(&mut next)
                .all(|(limit, state)| limit.step(state, now, Cost::ONE).verdict.is_allowed())
            {
                states.clone_from(&next);
                passed += 1;
            }
        }
        passed
    };
    let all: Vec<(String, Ruleset, u64)> = [
        "limit: 5/minute",
        "limit: 5/hour",
        "limit: 5/s",
        "limit: [5/minute, 20/hour]",
        "limit: [5/minute, 1000/hour]",
        "limit: 50/hour, algorithm: fixed_window",
        "limit: 60/hour, algorithm: strict_window",
        "limit: 3/minute, algorithm: sliding_log",
        "limit: 5/minute, burst: 100",
        "limit: 0/minute",
    ]
    .into_iter()
    .map(|limits| {
        let rules = load(&format!("{{key: login, class: security, {limits}}}, {OTHER}"));
        let passed = flood(&rules);
        (limits.to_owned(), rules, passed)
    })
    .collect();
    let mut gains = 0;
    for (before, old, few) in &all {
        for (after, new, many) in &all {
            if *many >= few * 10 && many > few {
                gains += 1;
                assert!(!old.loosened(new).is_empty(), "{before} → {after}: {few} → {many}");
            }
        }
    }
    assert!(gains > 20, "{gains}");
}

#[test]
fn daily_changes_ask_nothing() {
    let login = "{key: login, class: security, limit: 5/minute}";
    for after in [
        login,
        "{key: login, class: security, limit: 20/minute}",
        "{key: login, class: security, limit: 1/hour}",
        "{key: login, class: security, limit: 5/minute, descriptors: [{key: user, limit: 1/s}]}",
        "{key: login, class: security, limit: 5/minute}, {key: new, rate_limit: {unlimited: true}}",
        "{key: login, class: security, limit: 5/minute}, {key: new, value: bob, limit: 1/s}",
        "{key: login, class: security, limit: 5/minute, priority: 7, name: log-in}",
        "{key: login, class: security, limit: 5/minute}, {key: login, value: bob, class: security, limit: 9/minute}",
        "{key: login, class: security, limit: 5/minute, algorithm: strict_window}",
        "{key: login, class: security, limit: [5/minute, 100/day]}",
    ] {
        assert_eq!(loosened(login, after), [""; 0], "{after}");
    }
    assert_eq!(loosened("{key: user, limit: 5/minute}", "{key: user, limit: 9000/s}"), [""; 0]);
    assert_eq!(loosened("{key: user, limit: 5/minute}", "{key: tenant, limit: 1/s}"), [""; 0]);
}

#[test]
fn a_domain_is_not_lost_without_a_word() {
    let (before, other) =
        (load(OTHER), Source::new("e.yaml", "{domain: e, descriptors: [{key: a, limit: 1/s}]}"));
    let elsewhere = Ruleset::load(&[other], &Options::default()).expect("rules");
    let all = before.loosened(&elsewhere);
    assert_eq!((all.len(), all[0].kind), (1, LooseningKind::DomainRemoved));
    assert_eq!(all[0].detail, "domain `d` is removed");
    for nothing in
        ["", "{key: api_key, shadow: true, limit: 10/s}", "{key: api_key, rate_limit: {unlimited: true}}"]
    {
        let all = before.loosened(&load(nothing));
        assert_eq!(all.len(), 1, "{nothing}");
        assert_eq!(all[0].detail, "domain `d` has no limit left that denies anything", "{nothing}");
    }
}

/// Requests and tokens have no common measure: each is compared with its own kind.
#[test]
fn limits_with_costs_of_their_own_are_compared_apart() {
    let rule = |limits: &str| format!("{{key: login, name: login, class: security, limit: [{limits}]}}");
    let tokens = |count: u32| format!("5/minute, {{count: {count}, period: minute, cost: tokens}}");
    let before = rule(&tokens(1_000));
    assert!(loosened(&before, &rule(&tokens(2_000))).is_empty());
    assert_eq!(
        loosened(&before, &rule(&tokens(20_000))),
        ["security rule `d: login` allows 20 times as much"]
    );
    assert_eq!(
        loosened(&before, &rule("5/minute")),
        ["security rule `d: login` no longer limits what `cost: tokens` counts"]
    );
}

#[test]
fn enforcing_a_security_rule_for_fewer_callers_is_found() {
    let rule = |share: &str| format!("{{key: login, name: login, class: security, limit: 5/minute{share}}}");
    assert_eq!(
        loosened(&rule(""), &rule(", enforce: 50%")),
        ["security rule `d: login` is enforced for 50% of the callers only"]
    );
    assert!(loosened(&rule(", enforce: 10%"), &rule(", enforce: 50%")).is_empty());
}
