//! Settings of a descriptor without a limit: `class: security` on a group of rules applies to all of them.

use tollgate_rules::{Options, Ruleset, Source};

fn load(text: &str) -> Result<Ruleset, String> {
    Ruleset::load(&[Source::new("t.yaml", text)], &Options::default()).map_err(|errors| errors.to_string())
}

fn native(descriptors: &str) -> Ruleset {
    load(&format!("domain: d\ndescriptors:\n{descriptors}")).unwrap_or_else(|errors| panic!("{errors}"))
}

/// Describes a rule's limits and settings.
fn described(rules: &Ruleset, name: &str) -> String {
    let rule =
        rules.rules().iter().find(|rule| rule.name == name).unwrap_or_else(|| panic!("no rule {name}"));
    let limits: Vec<String> = rule
        .all_limits()
        .map(|limit| format!("{} {} {:?}", limit.limit, limit.limit.is_jittered(), limit.role))
        .collect();
    let settings: Vec<String> =
        rule.settings().into_iter().map(|(name, value)| format!("{name}={value}")).collect();
    format!("{}; {}", limits.join(", "), settings.join(" "))
}

/// Each setting of a group acts exactly as if every rule below had it, and a rule's own wins.
#[test]
fn settings_of_a_group_are_those_of_its_rules() {
    for (setting, other) in [
        ("class: security", "class: cost"),
        ("on_error: closed", "on_error: open"),
        ("on_error: {free: closed, default: open}", "on_error: local"),
        ("shadow: true", "shadow: false"),
        ("shadow_mode: true", "shadow_mode: false"),
        ("quota_mode: true", "quota_mode: false"),
        ("algorithm: strict_window", "algorithm: sliding_log"),
        ("jitter: true", "jitter: false"),
        ("priority: 7", "priority: -1"),
        ("mode: central", "mode: local"),
        ("fallback: 5%", "fallback: 10%"),
        ("response: {status: 403, body: '{}'}", "response: {status: 404, body: '{\"a\": 1}'}"),
        ("split: 4", "split: 2"),
        ("action: delay", "action: reject"),
        ("action: degrade", "action: reject"),
        ("cost: 5", "cost: tokens"),
        ("metadata: {team: a, deep: {x: [1, two]}}", "metadata: {team: b, deep: null}"),
    ] {
        let base = if setting.starts_with("jitter") { ", algorithm: fixed_window" } else { "" };
        let group = native(&format!(
            "- {{key: a, value: x, {setting}, descriptors: [{{key: b, limit: 3/minute{base}}}, {{key: c, descriptors: \
             [{{key: d, limit: 5/minute{base}}}, {{key: e, limit: 7/minute, {other}{base}}}]}}]}}\n- {{key: f, limit: 9/minute{base}}}"
        ));
        let each = native(&format!(
            "- {{key: a, value: x, descriptors: [{{key: b, limit: 3/minute, {setting}{base}}}, {{key: c, descriptors: \
             [{{key: d, limit: 5/minute, {setting}{base}}}, {{key: e, limit: 7/minute, {other}{base}}}]}}]}}\n- {{key: f, limit: 9/minute{base}}}"
        ));
        for rule in ["a=x/b", "a=x/c/d", "a=x/c/e", "f"] {
            assert_eq!(described(&group, rule), described(&each, rule), "{setting}: {rule}");
        }
        assert_ne!(
            described(&group, "a=x/b").replace("3/1m", ""),
            described(&group, "f").replace("9/1m", ""),
            "{setting} has no effect"
        );
    }
}

/// A descriptor with a limit keeps its settings to itself, so that existing files mean what they meant.
#[test]
fn settings_beside_a_limit_are_about_that_limit() {
    let rules = native(
        "- key: a\n  class: security\n  descriptors:\n    - {key: b, limit: 9/minute, class: cost, priority: 3, \
         descriptors: [{key: c, limit: 1/minute}]}",
    );
    assert_eq!(
        described(&rules, "a/b").split("; ").nth(1),
        Some("class=cost on_error={free: closed, default: open} priority=3 durable=true")
    );
    assert_eq!(
        described(&rules, "a/b/c").split("; ").nth(1),
        Some("class=security on_error=closed mode=central")
    );
}

/// What belongs to one limit or one rule is refused on a group, with its position.
#[test]
fn what_no_rule_below_can_use_is_refused() {
    for setting in ["burst: 5", "slots: 5", "soft: 80%", "replaces: [{name: n}]"] {
        let text = format!(
            "domain: d\ndescriptors:\n- {{key: a, {setting}, descriptors: [{{key: b, limit: 1/s, name: m}}]}}"
        );
        let errors = load(&text).err().unwrap_or_else(|| panic!("{setting} was accepted"));
        let name = setting.split(':').next().unwrap();
        assert!(
            errors.contains(&format!("`{name}` on a descriptor without a limit has no effect")),
            "{errors}"
        );
        assert!(errors.contains("t.yaml:3:"), "{errors}");
    }
}

/// envoyproxy/ratelimit reads these keys only beside a limit: a file written for it decides alike, with a warning.
#[test]
fn envoys_flags_stay_where_that_service_reads_them() {
    let rules = load(
        "domain: d\nprofile: envoy\ndescriptors:\n- {key: a, shadow_mode: true, quota_mode: true, metadata: {x: y}, class: \
         security, descriptors: [{key: b, rate_limit: {unit: minute, requests_per_unit: 1}}]}",
    )
    .unwrap();
    assert_eq!(
        described(&rules, "a/b").split("; ").nth(1),
        Some("class=security on_error=closed mode=central")
    );
    let warned: Vec<&str> = rules.warnings().iter().map(|warning| warning.message.as_str()).collect();
    assert_eq!(warned.len(), 2, "{warned:?}");
    assert!(
        warned[0].starts_with("`shadow_mode` on a descriptor without a limit has no effect"),
        "{warned:?}"
    );
}

/// `explain` shows what takes effect, wherever it is written.
#[test]
fn explanations_show_effective_settings() {
    let rules =
        native("- {key: a, class: security, shadow: true, descriptors: [{key: b, limit: 1/s, priority: 2}]}");
    let text = rules.domain("d").unwrap().explain(&[("a", "1"), ("b", "2")]).to_string();
    let line = "  class: security, on_error: closed, shadow: true, mode: central, priority: 2";
    assert!(text.lines().any(|found| found == line), "no line `{line}` in\n{text}");
}
