//! Gradual enforcement: a new limit denies some callers first, always the same ones, and the others are counted.

use tollgate_core::{Cost, Enforcement};
use tollgate_rules::{LooseningKind, Options, Role, Ruleset, Source};

fn load(descriptors: &str) -> Result<Ruleset, String> {
    let text = format!("domain: d\ndescriptors:\n{descriptors}\n");
    Ruleset::load(&[Source::new("t.yaml", text)], &Options::default()).map_err(|errors| errors.to_string())
}

fn rules(descriptors: &str) -> Ruleset {
    load(descriptors).unwrap_or_else(|errors| panic!("{errors}"))
}

/// Whether each of ten thousand callers is denied by the rule.
fn enforced(rules: &Ruleset, endpoint: &str) -> Vec<bool> {
    let domain = rules.domain("d").expect("a domain");
    let is_enforced = |caller: usize| {
        let caller = format!("caller-{caller}");
        let request = [("api_key", caller.as_str()), ("endpoint", endpoint)];
        let plan = domain.plan(&request, Cost::ONE);
        let hit = plan.limits.last().expect("a limit");
        let is_required = hit.enforcement == Enforcement::Required;
        assert_eq!(hit.role, if is_required { Role::Live } else { Role::Unenforced });
        assert_eq!(hit.limit.role, Role::Live, "the counter is the same for all");
        is_required
    };
    (0..10_000).map(is_enforced).collect()
}

fn share(chosen: &[bool]) -> usize {
    chosen.iter().filter(|chosen| **chosen).count()
}

#[test]
fn a_share_of_the_callers_is_denied_and_stays_in_as_it_grows() {
    let of =
        |percent: &str| enforced(&rules(&format!("- {{key: api_key, limit: 5/m, enforce: {percent}}}")), "a");
    let mut before = vec![false; 10_000];
    for (percent, least, most) in
        [("0.5%", 30, 70), ("10%", 900, 1_100), ("50%", 4_800, 5_200), ("100%", 10_000, 10_000)]
    {
        let chosen = of(percent);
        assert!((least..=most).contains(&share(&chosen)), "{percent}: {}", share(&chosen));
        assert!(before.iter().zip(&chosen).all(|(before, now)| !before || *now), "nobody leaves: {percent}");
        before = chosen;
    }
    assert_eq!(of("10%"), of("10.0%"), "every load chooses the same");
    let names: Vec<usize> =
        of("0.5%").iter().enumerate().filter(|(_, chosen)| **chosen).map(|(at, _)| at).take(3).collect();
    assert_eq!(names, GOLDEN, "another version of Tollgate must choose the same callers");
    let other = enforced(&rules("- {key: api_key, value: \"caller*\", limit: 5/m, enforce: 50%}"), "a");
    assert_eq!(other, of("50%"), "a wildcard is no other rule for its callers");
}

/// The first callers that half a percent chooses.
const GOLDEN: [usize; 3] = [22, 199, 252];

#[test]
fn a_caller_is_in_for_all_its_endpoints_and_rules_choose_apart() {
    let nested = rules("- {key: endpoint, descriptors: [{key: api_key, limit: 5/m, enforce: 30%}]}");
    let chosen = enforced(&nested, "a");
    assert!((2_800..=3_200).contains(&share(&chosen)));
    assert_eq!(enforced(&nested, "b"), chosen);
    let other = rules("- {key: tenant, limit: 1/s}\n- {key: api_key, limit: 5/m, enforce: 30%}");
    let both = enforced(&other, "a").iter().zip(&chosen).filter(|(a, b)| **a && **b).count();
    assert!((750..=1_050).contains(&both), "9% by chance, not the same callers first in every rule: {both}");
    // A group hands it down, and a rule may say otherwise.
    let group = rules("- {key: endpoint, enforce: 30%, descriptors: [{key: api_key, limit: 5/m}]}");
    assert_eq!(enforced(&group, "a"), chosen);
}

#[test]
fn mistakes_are_explained() {
    for (text, why) in [
        ("- {key: a, limit: 1/s, enforce: 0%}", "write `shadow: true` to deny nobody"),
        ("- {key: a, limit: 1/s, enforce: 101%}", "`101%` is not a share of the callers"),
        ("- {key: a, limit: 1/s, enforce: 10}", "write a percentage from 0.1% to 100%"),
        ("- {key: a, limit: 1/s, enforce: 99999999999999999999%}", "is not a share of the callers"),
        ("- {key: a, limit: 1/s, enforce: 1844674407370955161.9%}", "is not a share of the callers"),
        ("- {key: a, limit: 1/s, enforce: 10%, shadow: true}", "a rule in shadow denies nobody"),
        ("- {key: global, limit: 1/s, enforce: 10%}", "counts all callers together"),
        ("- {key: endpoint, value: /login, limit: 1/s, enforce: 10%}", "counts all callers together"),
    ] {
        let error = load(text).expect_err(text);
        assert!(error.contains(why), "{text}: {error}");
    }
}

#[test]
fn promotion_is_a_change_and_its_opposite_a_loosening() {
    let of = |more: &str| rules(&format!("- {{key: api_key, class: security, limit: 5/m{more}}}"));
    let (some, all) = (of(", enforce: 10%"), of(""));
    let change = &some.diff(&all)[0];
    assert!(change.before.as_ref().is_some_and(|text| text.contains("; enforce 10%")), "{change:?}");
    assert!(change.after.as_ref().is_some_and(|text| !text.contains("enforce")), "{change:?}");
    assert_eq!(some.loosened(&all), []);
    let loosened = all.loosened(&some);
    assert_eq!(loosened[0].kind, LooseningKind::SecurityRuleWeakened);
    assert!(loosened[0].detail.ends_with("is enforced for 10% of the callers only"), "{loosened:?}");
    let explained = some.domain("d").expect("a domain").explain(&[("api_key", "k")]).to_string();
    assert!(explained.contains("enforce: 10%"), "{explained}");
}
