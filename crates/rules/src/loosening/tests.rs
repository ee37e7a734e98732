//! Each way to lose a protection is found, and daily changes ask nothing.

use crate::{LooseningKind, Options, Ruleset, Source};

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

#[test]
fn daily_changes_ask_nothing() {
    let login = "{key: login, class: security, limit: 5/minute}";
    for after in [
        login,
        "{key: login, class: security, limit: 20/minute}",
        "{key: login, class: security, limit: 1/hour}",
        "{key: login, class: security, limit: 5/minute, descriptors: [{key: user, limit: 1/s}]}",
        "{key: login, class: security, limit: 5/minute}, {key: new, rate_limit: {unlimited: true}}",
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
