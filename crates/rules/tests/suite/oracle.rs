//! The matcher against the plainest one there is, on random trees and requests; names of counters that never collide;
//! and files of any content, which load or are refused with a place.

use proptest::prelude::*;
use std::collections::HashMap;
use std::fmt::Write;
use tollgate_core::{Cost, KeyPart};
use tollgate_rules::{Descriptor, MatchKind, Options, Plan, Ruleset, Source};

/// Keys, each with or without a value.
type KeyPath = Vec<(String, Option<String>)>;

/// A descriptor as the tests know it.
#[derive(Clone, Debug)]
struct Spec {
    key: String,
    value: Option<String>,
    limited: bool,
    children: Vec<Spec>,
}

impl Spec {
    fn yaml(&self, out: &mut String, id: &mut u32) {
        let _ = write!(out, "{{key: {}, name: \"{id}\"", self.key);
        if let Some(value) = &self.value {
            let _ = write!(out, ", value: \"{value}\"");
        }
        if self.limited {
            out.push_str(", limit: 5/s");
        }
        *id += 1;
        out.push_str(", descriptors: [");
        for child in &self.children {
            child.yaml(out, id);
            out.push(',');
        }
        out.push_str("]}");
    }

    fn size(&self) -> u32 {
        1 + self.children.iter().map(Spec::size).sum::<u32>()
    }

    /// How well it fits: exact 0, wildcard 1, key alone 2.
    fn fits(&self, key: &str, value: &str) -> Option<u32> {
        match &self.value {
            _ if self.key != key => None,
            None => Some(2),
            Some(own) if own == value => Some(0),
            Some(pattern) if pattern.contains('*') => star(pattern.as_bytes(), value.as_bytes()).then_some(1),
            Some(_) => None,
        }
    }
}

fn star(pattern: &[u8], value: &[u8]) -> bool {
    match pattern.split_first() {
        None => value.is_empty(),
        Some((b'*', rest)) => (0..=value.len()).any(|taken| star(rest, &value[taken..])),
        Some((byte, rest)) => value.first() == Some(byte) && star(rest, &value[1..]),
    }
}

/// The first of the best, with its number in the file.
fn best<'s>(level: &'s [Spec], first: u32, key: &str, value: &str) -> Option<(&'s Spec, u32)> {
    let mut id = first;
    let numbered: Vec<(&Spec, u32)> = level
        .iter()
        .map(|spec| {
            (spec, {
                let own = id;
                id += spec.size();
                own
            })
        })
        .collect();
    numbered
        .into_iter()
        .filter(|(spec, _)| spec.fits(key, value).is_some())
        .min_by_key(|(spec, id)| (spec.fits(key, value), *id))
}

/// Every path of the tree whose keys the bag has: numbers and counter values.
fn bag_oracle(
    level: &[Spec],
    first: u32,
    bag: &[(String, String)],
    path: &[String],
    found: &mut Vec<(u32, Vec<String>)>,
) {
    for (key, value) in bag {
        let Some((spec, id)) = best(level, first, key, value) else { continue };
        let mut path = path.to_vec();
        if spec.value.as_ref().is_none_or(|value| value.contains('*')) {
            path.push(value.clone());
        }
        if spec.limited {
            found.push((id, path.clone()));
        }
        bag_oracle(&spec.children, id + 1, bag, &path, found);
    }
}

fn descriptor_oracle(level: &[Spec], entries: &[(String, String)]) -> Option<(u32, Vec<String>)> {
    let (mut level, mut first, mut path, mut end) = (level, 0, Vec::new(), None);
    for (key, value) in entries {
        let (spec, id) = best(level, first, key, value)?;
        if spec.value.as_ref().is_none_or(|value| value.contains('*')) {
            path.push(value.clone());
        }
        (level, first) = (&spec.children, id + 1);
        end = Some((spec, id));
    }
    end.filter(|(spec, _)| spec.limited).map(|(_, id)| (id, path))
}

fn hits(plan: &Plan<'_>) -> Vec<(u32, Vec<String>)> {
    let values = |parts: &[KeyPart<'_>]| parts.iter().map(ToString::to_string).collect();
    let parts = |hit: &tollgate_rules::MatchedLimit<'_>| {
        values(&plan.parts[usize::from(hit.parts.0)..usize::from(hit.parts.1)])
    };
    plan.limits.iter().map(|hit| (hit.rule.unwrap().name.parse().unwrap(), parts(hit))).collect()
}

fn level(depth: u32) -> BoxedStrategy<Vec<Spec>> {
    let children = if depth == 0 { Just(Vec::new()).boxed() } else { level(depth - 1) };
    // Up to eleven keys, so that levels are searched both ways.
    let spec = (0..11_u8, proptest::option::of("[ab*]{1,3}"), any::<bool>(), children).prop_map(
        |(key, value, limited, children)| Spec { key: format!("k{key}"), value, limited, children },
    );
    proptest::collection::vec(spec, 0..if depth == 2 { 24 } else { 6 })
        .prop_map(|mut specs| {
            let mut seen = std::collections::HashSet::new();
            specs.retain(|spec| seen.insert((spec.key.clone(), spec.value.clone())));
            specs
        })
        .boxed()
}

fn entries() -> impl Strategy<Value = Vec<(String, String)>> {
    proptest::collection::vec((0..11_u8, "[ab]{0,3}"), 0..8)
        .prop_map(|entries| entries.into_iter().map(|(key, value)| (format!("k{key}"), value)).collect())
}

fn load(tree: &[Spec]) -> Ruleset {
    let (mut text, mut id) = ("domain: d\ndescriptors: [".to_owned(), 0);
    for spec in tree {
        spec.yaml(&mut text, &mut id);
        text.push(',');
    }
    text.push(']');
    Ruleset::load(&[Source::new("t", text)], &Options::default()).unwrap_or_else(|errors| panic!("{errors}"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn both_walks_agree_with_the_oracle(
        tree in level(2),
        requests in proptest::collection::vec(entries(), 1..8),
    ) {
        let rules = load(&tree);
        let domain = rules.domain("d").unwrap();
        for request in &requests {
            let borrowed: Vec<(&str, &str)> = request.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            // A bag has each key once: the first counts.
            let mut seen = std::collections::HashSet::new();
            let bag: Vec<(String, String)> = request.iter().filter(|(key, _)| seen.insert(key.clone())).cloned().collect();
            let mut expected = Vec::new();
            bag_oracle(&tree, 0, &bag, &[], &mut expected);
            expected.sort();
            prop_assert_eq!(hits(&domain.plan(&borrowed, Cost::ONE)), expected);

            let descriptors = [Descriptor { entries: &borrowed, ..Descriptor::default() }];
            let plan = domain.plan_descriptors(&descriptors, Cost::ONE);
            let expected = descriptor_oracle(&tree, request);
            prop_assert_eq!(plan.matches[0].0 == MatchKind::Limited, expected.is_some());
            prop_assert_eq!(hits(&plan), expected.into_iter().collect::<Vec<_>>());

            // Explaining asks the tree in another way and finds the same.
            let explained = domain.explain(&borrowed);
            let limited: Vec<u32> = explained.rules.iter()
                .filter(|rule| matches!(rule.result, tollgate_rules::RuleResult::Limited(_)))
                .map(|rule| rule.name.parse().unwrap()).collect();
            let planned: Vec<u32> = hits(&domain.plan(&borrowed, Cost::ONE)).into_iter().map(|(id, _)| id).collect();
            prop_assert_eq!(limited, planned);
        }
    }

    #[test]
    fn two_paths_never_share_a_counter(
        paths in proptest::collection::vec(
            proptest::collection::vec(("[ab|=~%/_]{1,3}", proptest::option::of("[ab|=~%/_]{1,3}")), 1..4), 1..12),
        domains in proptest::collection::vec("[ab|%]{1,2}", 1..3),
    ) {
        let mut names: HashMap<String, (String, KeyPath)> = HashMap::new();
        for domain in &domains {
            for path in &paths {
                let inner = path.iter().rev().enumerate().fold(String::new(), |inner, (i, (key, value))| {
                    let value = value.as_ref().map_or(String::new(), |value| format!(", value: \"{value}\""));
                    let below = if i == 0 { ", limit: 1/s".to_owned() } else { format!(", descriptors: [{inner}]") };
                    format!("{{key: \"{key}\"{value}{below}}}")
                });
                let text = format!("domain: \"{domain}\"\ndescriptors: [{inner}]");
                let rules = Ruleset::load(&[Source::new("t", text)], &Options::default()).unwrap();
                let label = rules.rules()[0].limits.limits[0].scope.label().to_owned();
                let this = (domain.clone(), path.clone());
                let other = names.insert(label.clone(), this.clone()).unwrap_or_else(|| this.clone());
                prop_assert_eq!(other, this, "{}", label);
            }
        }
    }

    #[test]
    fn a_file_of_any_content_loads_or_is_refused_with_a_place(text in "[a-z0-9:\\-\\[\\]{},&*!|>'\"%#~ \t\n/]{0,200}") {
        place_of_errors(&text)?;
    }

    #[test]
    fn a_damaged_file_loads_or_is_refused_with_a_place(
        cuts in proptest::collection::vec((0..4_000_usize, 0..30_usize, "[a-z0-9:\\-\\[\\]{},&*é\n ]{0,4}"), 1..4),
    ) {
        let mut text = EXAMPLE.to_owned();
        for (at, length, put) in cuts {
            let bound = |mut i: usize| { i = i.min(text.len()); while !text.is_char_boundary(i) { i -= 1; } i };
            let (start, end) = (bound(at % (text.len() + 1)), bound(at % (text.len() + 1) + length));
            text.replace_range(start..end, &put);
        }
        place_of_errors(&text)?;
    }
}

fn place_of_errors(text: &str) -> Result<(), TestCaseError> {
    if let Err(errors) = Ruleset::load(&[Source::new("t", text)], &Options::default()) {
        for error in errors.all() {
            prop_assert!(error.line >= 1 && error.column >= 1, "{error}");
            prop_assert!(error.line as usize <= text.lines().count() + 2, "{error}");
        }
    }
    Ok(())
}

const EXAMPLE: &str = r#"
domain: api
algorithm: gcra
tier_key: plan
descriptors:
  - key: user
    value: "a*b"
    share_threshold: true
    limit: [10/second, {count: 200, period: 1m, burst: 5}]
    tiers: {free: 1/s, pro: [5/s, 100/day in Europe/Zurich]}
    soft: {at: 80%, action: degrade}
    on_error: {free: closed, default: open}
    concurrency: {limit: 5, ttl: 10s}
    candidate: 5/s
    metadata: {a: b}
  - key: remote_address/24/64
    rate_limit: &limit {unit: minute, requests_per_unit: 5, name: n, replaces: [{name: m}]}
    descriptors:
      - {key: é, limit: 5/s, cost: tokens, priority: 3, action: throttle}
      - key: b
        rate_limit: *limit
"#;

#[test]
fn the_example_that_is_damaged_is_whole_before() {
    let rules = Ruleset::load(&[Source::new("t", EXAMPLE)], &Options::default());
    assert_eq!(rules.map(|rules| rules.rules().len()).unwrap_or_else(|errors| panic!("{errors}")), 4);
}
