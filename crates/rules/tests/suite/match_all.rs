//! `match: all`: over RLS, as by attributes, every rule applies whose keys the request has. Without it an Envoy user must
//! list each combination of keys that any rule is about.

use std::collections::BTreeSet;
use tollgate_core::Cost;
use tollgate_rules::{Descriptor, LooseningKind, MatchKind, Options, Plan, Ruleset, Source};

const RULES: &str = "
descriptors:
  - {key: global, limit: 1000/s}
  - key: tenant
    limit: 100/s
    tiers: {pro: 500/s}
    descriptors:
      - {key: path, value: \"/a*\", limit: 10/s}
      - {key: path, value: /login, name: logins, limit: 1/s, replaces: [{name: addresses}]}
      - key: user
        descriptors: [{key: path, limit: 5/s, cost: tokens}]
  - {key: user, limit: [20/s, 90/m]}
  - {key: address/24, name: addresses, limit: 7/s}
  - {key: generic_key, split: 4, limit: 50/s}
  - {key: vip, rate_limit: {unlimited: true}}
";

fn rules(top: &str) -> Ruleset {
    let text = format!("domain: d\n{top}{RULES}");
    Ruleset::load(&[Source::new("t.yaml", text)], &Options::default())
        .unwrap_or_else(|errors| panic!("{errors}"))
}

/// The counters of a plan with what each is charged, without the shard, which differs from one match to the next.
fn charges(plan: &Plan<'_>) -> BTreeSet<(String, String)> {
    let matched = plan.limits.iter().map(|hit| {
        let parts = &plan.parts[usize::from(hit.parts.0)..usize::from(hit.parts.1)];
        let shard = hit.limit.shards.is_some().then_some(usize::from(hit.shard_at));
        let parts = parts.iter().enumerate().filter(|(at, _)| Some(*at) != shard).map(|(_, part)| part);
        (
            format!("{} {}", hit.limit.scope.label(), hit.limit.limit),
            format!("{:?} {:?}", parts.collect::<Vec<_>>(), hit.cost),
        )
    });
    let all: Vec<_> = matched.collect();
    let set: BTreeSet<_> = all.iter().cloned().collect();
    assert_eq!(set.len(), all.len(), "a counter is charged once: {all:?}");
    set
}

const ENTRIES: [(&str, &str); 8] = [
    ("tenant", "t"),
    ("path", "/login"),
    ("user", "u"),
    ("address", "192.0.2.9"),
    ("generic_key", "g"),
    ("tokens", "12"),
    ("tier", "pro"),
    ("vip", "1"),
];

/// The oracle: attributes. However the entries are spread over descriptors, and in whatever order, the same counters are
/// charged.
#[test]
fn any_descriptors_match_what_their_entries_match_as_attributes() {
    let rules = rules("match: all\n");
    let domain = rules.domain("d").expect("a domain");
    for chosen in 1..(1_usize << ENTRIES.len()) {
        let mut entries: Vec<_> =
            (0..ENTRIES.len()).filter(|at| chosen >> at & 1 == 1).map(|at| ENTRIES[at]).collect();
        let wanted = charges(&domain.plan(&entries, Cost::new(3)));
        let turn = chosen % entries.len();
        entries.rotate_left(turn);
        for size in 1..=entries.len() {
            let descriptors: Vec<Descriptor<'_>> =
                entries.chunks(size).map(|entries| Descriptor { entries, ..Descriptor::default() }).collect();
            let plan = domain.plan_descriptors(&descriptors, Cost::new(3));
            assert_eq!(charges(&plan), wanted, "{entries:?} in pieces of {size}");
            assert_eq!(plan.matches.len(), descriptors.len());
            for (at, (matched, rule)) in (0..).zip(&plan.matches) {
                let own = plan.limits.iter().any(|hit| hit.descriptor == at);
                assert_eq!(
                    (own, own),
                    (*matched == MatchKind::Limited, own && rule.is_some()),
                    "{entries:?}"
                );
            }
        }
    }
}

fn costs<'a>(plan: &'a Plan<'_>) -> Vec<(&'a str, u16, Cost)> {
    plan.limits
        .iter()
        .map(|hit| (hit.rule.expect("a rule").name.as_str(), hit.descriptor, hit.cost))
        .collect()
}

/// Envoy sends hits by descriptor: those of the one that a rule's last key comes from count.
#[test]
fn hits_are_those_of_the_descriptor_with_the_last_key() {
    let rules = rules("match: all\n");
    let domain = rules.domain("d").expect("a domain");
    let one = |entries, hits: Option<u64>| Descriptor { entries, hits: hits.map(Cost::new), limit: None };
    let descriptors =
        [one(&[("tenant", "t")], None), one(&[("path", "/a1")], Some(40)), one(&[("user", "u")], Some(0))];
    let plan = domain.plan_descriptors(&descriptors, Cost::ONE);
    let forty = Cost::new(40);
    let wanted = [
        ("global", 0, Cost::ONE),
        ("tenant", 0, Cost::ONE),
        ("tenant/path=/a*", 1, forty),
        ("tenant/user/path", 1, forty),
        ("user", 2, Cost::PEEK),
        ("user", 2, Cost::PEEK),
    ];
    assert_eq!(costs(&plan), wanted);
    // What one descriptor only looks at, another may charge.
    let descriptors = [one(&[("user", "u"), ("vip", "1")], Some(0)), one(&[("user", "u")], Some(5))];
    let plan = domain.plan_descriptors(&descriptors, Cost::ONE);
    assert_eq!(costs(&plan)[1..], [("user", 0, Cost::new(5)), ("user", 0, Cost::new(5))]);
    assert_eq!(plan.matches[1].0, MatchKind::None, "it adds nothing");
}

/// `generic_key` is the key of every generic action: each of its values counts.
#[test]
fn a_key_with_two_values_matches_for_both() {
    let rules = rules("match: all\n");
    let domain = rules.domain("d").expect("a domain");
    let entries = [[("generic_key", "a")], [("generic_key", "b")], [("generic_key", "a")]];
    let descriptors: Vec<_> =
        entries.iter().map(|entries| Descriptor { entries, ..Descriptor::default() }).collect();
    let plan = domain.plan_descriptors(&descriptors, Cost::ONE);
    assert_eq!(charges(&plan).len(), 3, "the total, a and b");
}

#[test]
fn without_it_descriptors_match_as_in_envoy() {
    for top in ["", "match: one\n"] {
        let rules = rules(top);
        let descriptors = [Descriptor { entries: &ENTRIES, ..Descriptor::default() }];
        let plan = rules.domain("d").expect("a domain").plan_descriptors(&descriptors, Cost::ONE);
        assert!(plan.limits.is_empty());
    }
}

#[test]
fn mistakes_changes_and_loosenings_are_reported() {
    let load = |text: &str| Ruleset::load(&[Source::new("t.yaml", text)], &Options::default());
    let error = load("{domain: d, match: al, descriptors: []}").expect_err("no such word").to_string();
    assert!(error.contains("unknown match `al`") && error.contains("did you mean `all`?"), "{error}");
    let secure = |top: &str| {
        load(&format!("domain: d\n{top}descriptors: [{{key: login, class: security, limit: 5/minute}}]"))
            .expect("rules")
    };
    let (all, one) = (secure("match: all\n"), secure(""));
    assert!(all.diff(&one)[0].before.as_ref().is_some_and(|text| text.contains("; match all")));
    let loosened = all.loosened(&one);
    assert_eq!(loosened[0].kind, LooseningKind::SecurityRuleWeakened);
    assert_eq!(loosened[0].detail, "domain `d` no longer has `match: all`");
    assert_eq!(one.loosened(&all), []);
}

/// A message of the largest size costs no more than its length allows.
#[test]
fn many_descriptors_stay_affordable() {
    let rules = rules("match: all\n");
    let keys: Vec<String> = (0..16_384).map(|at| format!("k{at}")).collect();
    let entries: Vec<(&str, &str)> = keys.iter().map(|key| (key.as_str(), "v")).collect();
    let descriptors: Vec<_> =
        entries.chunks(64).map(|entries| Descriptor { entries, ..Descriptor::default() }).collect();
    let plan = rules.domain("d").expect("a domain").plan_descriptors(&descriptors, Cost::ONE);
    assert_eq!((plan.limits.len(), plan.matches.len()), (1, 256), "the total, once");
}
