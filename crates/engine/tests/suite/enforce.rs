//! A rule that is enforced for some callers denies those and counts the others, on the same counters.

use crate::rig::{self, rig};
use tollgate_core::Verdict;
use tollgate_engine::Check;
use tollgate_rules::Role;

fn rules(more: &str) -> String {
    format!(
        "{{domain: d, descriptors: [{{key: user, name: per-user, algorithm: fixed_window, class: security, limit: 1/hour{more}}}]}}"
    )
}

#[test]
fn callers_outside_the_cohort_are_counted_and_marked() {
    let rig = rig(&rules(", enforce: 50%"));
    let decide =
        |user: &str| pollster::block_on(rig.limiter.check(&Check::attributes("d", &[("user", user)])));
    let (mut denied, mut counted) = (Vec::new(), Vec::new());
    for user in (0..200).map(|n| format!("u{n}")) {
        assert!(decide(&user).is_allowed());
        let again = decide(&user);
        let limit = &again.limits[0];
        assert!(matches!(limit.outcome.verdict, Verdict::Denied { .. }), "over the limit either way");
        assert_eq!(limit.role, if again.is_allowed() { Role::Unenforced } else { Role::Live });
        assert_eq!(again.denied_by_name(), (!again.is_allowed()).then_some("per-user"));
        if again.is_allowed() { counted.push(user) } else { denied.push(user) }
    }
    assert!((70..=130).contains(&denied.len()), "about half: {}", denied.len());
    // Promoted, the rule denies everybody who is over, by what was counted before.
    rig.limiter.replace_rules(rig::rules(&rules("")));
    assert!(counted.iter().chain(&denied).all(|user| !decide(user).is_allowed()));
}
