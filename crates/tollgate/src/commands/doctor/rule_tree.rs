//! The rule tree of a domain, walked level by level with values that are known at run time only.
//!
//! Each step goes to the children that some value of the entry selects, and keeps one such value for each. A node has one
//! parent, so it is visited once however many values rules name. Trying combinations of values instead would need their
//! product. What a path reaches is asked from the domain itself, with the values that were kept.

use super::actions::{Entry, EntryValue, Template};
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use tollgate_core::Cost;
use tollgate_rules::{Descriptor, Domain, GLOBAL, MatchKind, Plan, Profile, Rule};

/// Stands for a value that no rule names.
const ANY: &str = "\u{2026}";
/// Addresses for rules about networks.
const ADDRESSES: [&str; 2] = ["192.0.2.1", "2001:db8::1"];
/// What a wildcard may stand for; the last ones complete addresses.
const FILLINGS: [&str; 8] = ["", "x", "x/x", "1", "0.1", "0.0.1", ":1", "2001:db8::1"];

/// The tree of a domain.
pub(super) struct RuleTree<'r> {
    domain: &'r Domain,
    /// The root is the first.
    nodes: Vec<Node<'r>>,
    /// The node of each rule.
    by_rule: BTreeMap<u32, usize>,
}

struct Node<'r> {
    element: String,
    /// The root is its own.
    parent: usize,
    children: Vec<usize>,
    rule: Option<&'r Rule>,
}

/// The condition of a node on the value of a key.
#[derive(Clone, Copy)]
enum Test<'n> {
    Any,
    Exact(&'n str),
    Pattern(&'n str),
    Network,
}

/// Rules that are reached, by their IDs, with what they do.
pub(super) type Reached = BTreeMap<u32, String>;

impl<'r> RuleTree<'r> {
    pub(super) fn new(domain: &'r Domain) -> Self {
        let root = Node { element: String::new(), parent: 0, children: Vec::new(), rule: None };
        let (mut nodes, mut by_rule) = (vec![root], BTreeMap::new());
        // The last node of each depth; the root is above the first.
        let mut path = vec![0];
        for node in domain.outline() {
            path.truncate(node.depth as usize + 1);
            let (at, parent) = (nodes.len(), path[path.len() - 1]);
            nodes[parent].children.push(at);
            by_rule.extend(node.rule.map(|rule| (rule.id, at)));
            nodes.push(Node { element: node.element, parent, children: Vec::new(), rule: node.rule });
            path.push(at);
        }
        Self { domain, nodes, by_rule }
    }

    /// Returns the conditions at the top of the tree.
    pub(super) fn first_elements(&self) -> BTreeSet<&str> {
        self.nodes[0].children.iter().map(|at| self.nodes[*at].element.as_str()).collect()
    }

    /// Returns the rules of the tree, in the order of the file.
    pub(super) fn rules(&self) -> impl Iterator<Item = &'r Rule> {
        self.nodes.iter().filter_map(|node| node.rule)
    }

    /// Returns whether a rule's path has a key of a descriptor, or the one that every request has.
    pub(super) fn is_about(&self, rule: u32, template: &Template) -> bool {
        let mut at = self.by_rule.get(&rule).copied().unwrap_or(0);
        while at != 0 {
            let has = |key: &str| self.test(at, key).is_some();
            if has(GLOBAL.0) || template.entries.iter().any(|entry| has(&entry.key)) {
                return true;
            }
            at = self.nodes[at].parent;
        }
        false
    }

    /// Returns the rules that a descriptor reaches: those at which its entries end.
    pub(super) fn reached_by(&self, template: &Template) -> Reached {
        let mut states: BTreeMap<usize, Vec<(&str, String)>> = BTreeMap::from([(0, Vec::new())]);
        let tier_key = self.domain.tier_key();
        for (number, entry) in template.entries.iter().enumerate() {
            let mut next = BTreeMap::new();
            for (at, values) in states {
                let steps = self.steps(at, entry);
                let has_tiers = self.nodes[at].rule.is_some_and(|rule| !rule.tiers.is_empty());
                let is_tier = number + 1 == template.entries.len() && entry.key == tier_key && has_tiers;
                if is_tier && steps.is_empty() {
                    let tier = match &entry.value {
                        EntryValue::Fixed(value) => value.clone(),
                        _ => ANY.to_owned(),
                    };
                    next.insert(at, [values.clone(), vec![(entry.key.as_str(), tier)]].concat());
                }
                for (child, value) in steps {
                    next.insert(child, [values.clone(), vec![(entry.key.as_str(), value)]].concat());
                }
                if entry.is_optional {
                    next.entry(at).or_insert(values);
                }
            }
            states = next;
        }
        let mut reached = Reached::new();
        for values in states.into_values().filter(|values| !values.is_empty()) {
            let entries: Vec<(&str, &str)> =
                values.iter().map(|(key, value)| (*key, value.as_str())).collect();
            let descriptors = [Descriptor { entries: &entries, hits: None, limit: None }];
            let plan = self.domain.plan_descriptors(&descriptors, Cost::PEEK);
            if let Some((kind, Some(rule))) = plan.matches.first() {
                reached.insert(rule.id, effect(&plan, *kind, rule));
            }
        }
        reached
    }

    /// Returns the rules that entries reach as attributes, all together: those whose keys are among them. `planned` makes the
    /// plan of a request with these keys and values, one for each entry.
    fn reached_together(
        &self,
        entries: &[&Entry],
        planned: impl Fn(&[(&str, &str)], &mut dyn FnMut(&Plan<'_>)),
    ) -> Reached {
        let global = Entry::new(GLOBAL.0, EntryValue::Fixed(GLOBAL.1.to_owned()));
        let mut reached = Reached::new();
        let mut open: Vec<(usize, Vec<(usize, String)>)> = vec![(0, Vec::new())];
        let mut visited = BTreeSet::new();
        while let Some((at, values)) = open.pop() {
            // At most once by each entry, because several may have the same key.
            if !visited.insert((at, values.last().map(|(entry, _)| *entry))) {
                continue;
            }
            if let Some(rule) = self.nodes[at].rule {
                let mut all: Vec<String> = entries.iter().map(|entry| sample(&entry.value)).collect();
                for (entry, value) in &values {
                    all[*entry].clone_from(value);
                }
                let pairs: Vec<(&str, &str)> = entries
                    .iter()
                    .zip(&all)
                    .map(|(entry, value)| (entry.key.as_str(), value.as_str()))
                    .collect();
                planned(&pairs, &mut |plan| {
                    let is_charged =
                        plan.limits.iter().any(|one| one.rule.is_some_and(|own| own.id == rule.id));
                    let kind = match () {
                        () if is_charged => MatchKind::Limited,
                        () if plan.set_for(rule).unlimited => MatchKind::Unlimited,
                        () if plan.set_for(rule).limits.is_empty() => MatchKind::Exempt,
                        // Another rule takes its place.
                        () => return,
                    };
                    reached.insert(rule.id, effect(plan, kind, rule));
                });
            }
            for (number, entry) in entries.iter().enumerate() {
                for (child, value) in self.steps(at, entry) {
                    open.push((child, [values.clone(), vec![(number, value)]].concat()));
                }
            }
            if !entries.iter().any(|entry| entry.key == GLOBAL.0) {
                open.extend(self.steps(at, &global).into_iter().map(|(child, _)| (child, values.clone())));
            }
        }
        reached
    }

    /// Returns the rules that descriptors reach under `match: all`.
    pub(super) fn reached_by_all(&self, templates: &[&Template]) -> Reached {
        let entries: Vec<&Entry> = templates.iter().flat_map(|template| &template.entries).collect();
        self.reached_together(&entries, |pairs, take| {
            let mut rest = pairs;
            let descriptors = templates.iter().map(|template| {
                let (own, others) = rest.split_at(template.entries.len());
                rest = others;
                Descriptor { entries: own, hits: None, limit: None }
            });
            let descriptors: Vec<Descriptor<'_>> = descriptors.collect();
            take(&self.domain.plan_descriptors(&descriptors, Cost::PEEK));
        })
    }

    /// Returns the rules that the entries of a descriptor reach as attributes.
    pub(super) fn reached_by_attributes(&self, template: &Template) -> Reached {
        let entries: Vec<&Entry> = template.entries.iter().collect();
        self.reached_together(&entries, |pairs, take| take(&self.domain.plan(pairs, Cost::PEEK)))
    }

    /// Returns the children of a node that some value of an entry selects, each with such a value.
    fn steps(&self, at: usize, entry: &Entry) -> Vec<(usize, String)> {
        let test = |child: usize| Some((child, self.test(child, &entry.key)?));
        let children: Vec<(usize, Test<'_>)> =
            self.nodes[at].children.iter().filter_map(|child| test(*child)).collect();
        if let EntryValue::Fixed(value) = &entry.value {
            return select(&children, value).map(|child| (child, value.clone())).into_iter().collect();
        }
        let exact: BTreeSet<&str> = children
            .iter()
            .filter_map(|(_, test)| match test {
                Test::Exact(value) => Some(*value),
                _ => None,
            })
            .collect();
        // An exact value is always selected by itself; only the others compete.
        let rest: Vec<(usize, Test<'_>)> =
            children.iter().copied().filter(|(_, test)| !matches!(test, Test::Exact(_))).collect();
        let mut steps = Vec::new();
        for (child, test) in &children {
            let values: Vec<String> = match test {
                Test::Exact(value) if is_possible(value, &entry.value) => {
                    steps.push((*child, (*value).to_owned()));
                    continue;
                }
                Test::Exact(_) => continue,
                Test::Pattern(pattern) => {
                    FILLINGS.iter().map(|filling| pattern.replace('*', filling)).collect()
                }
                Test::Network => ADDRESSES.map(str::to_owned).to_vec(),
                Test::Any => {
                    let others = ADDRESSES.iter().copied().chain([ANY]).map(str::to_owned);
                    [sample(&entry.value)].into_iter().chain(others).collect()
                }
            };
            let is_selected =
                |value: &String| !exact.contains(value.as_str()) && select(&rest, value) == Some(*child);
            let mut fitting = values.into_iter().filter(|value| is_possible(value, &entry.value));
            let beginning = || match test {
                // No filling makes an address of it, and another may.
                Test::Pattern(pattern) if pattern.bytes().all(is_of_address) => {
                    Some(pattern.replace('*', "")).filter(is_selected)
                }
                _ => None,
            };
            if let Some(value) = fitting.find(is_selected).or_else(beginning) {
                steps.push((*child, value));
            }
        }
        steps
    }

    /// Returns the condition of a node if it is about this key.
    fn test(&self, at: usize, key: &str) -> Option<Test<'_>> {
        let rest = self.nodes[at].element.strip_prefix(key)?;
        match (rest.strip_prefix('='), rest.strip_prefix('/')) {
            _ if rest.is_empty() => Some(Test::Any),
            (Some(value), _) if value.contains('*') => Some(Test::Pattern(value)),
            (Some(value), _) => Some(Test::Exact(value)),
            (None, Some(bits)) => {
                let is_prefix = bits.bytes().all(|byte| byte.is_ascii_digit() || byte == b'/');
                (is_prefix && self.domain.profile() == Profile::Native).then_some(Test::Network)
            }
            (None, None) => None,
        }
    }
}

/// Returns the child that a value selects: the exact value, the first wildcard, a network, the key alone.
fn select(children: &[(usize, Test<'_>)], value: &str) -> Option<usize> {
    let find = |fits: &dyn Fn(Test<'_>) -> bool| {
        children.iter().find(|(_, test)| fits(*test)).map(|(child, _)| *child)
    };
    find(&|test| matches!(test, Test::Exact(own) | Test::Pattern(own) if own == value))
        .or_else(|| find(&|test| matches!(test, Test::Pattern(pattern) if matches(pattern, value))))
        .or_else(|| find(&|test| matches!(test, Test::Network) && value.parse::<IpAddr>().is_ok()))
        .or_else(|| find(&|test| matches!(test, Test::Any)))
}

/// Returns whether a value has the fixed parts of a pattern, in order.
fn matches(pattern: &str, value: &str) -> bool {
    let mut parts = pattern.split('*');
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = value.strip_prefix(first) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// Returns a value that an entry may have.
fn sample(value: &EntryValue) -> String {
    match value {
        EntryValue::Fixed(value) => value.clone(),
        EntryValue::Address => ADDRESSES[0].to_owned(),
        EntryValue::Network { v4, .. } if *v4 < 32 => format!("0.0.0.0/{v4}"),
        EntryValue::Network { .. } => format!("{}/32", ADDRESSES[0]),
        EntryValue::Any => ANY.to_owned(),
    }
}

/// Returns whether an entry may have this value.
fn is_possible(value: &str, entry: &EntryValue) -> bool {
    match entry {
        EntryValue::Fixed(own) => own == value,
        EntryValue::Any => true,
        EntryValue::Address => value.parse::<IpAddr>().is_ok(),
        EntryValue::Network { v4, v6 } => {
            let Some((address, bits)) = value.split_once('/') else { return false };
            let (Ok(address), Ok(bits)) = (address.parse::<IpAddr>(), bits.parse::<u32>()) else {
                return false;
            };
            match address {
                IpAddr::V4(address) => {
                    bits == u32::from(*v4) && u32::from(address).checked_shl(bits).unwrap_or(0) == 0
                }
                IpAddr::V6(address) => {
                    bits == u32::from(*v6) && u128::from(address).checked_shl(bits).unwrap_or(0) == 0
                }
            }
        }
    }
}

/// Returns whether addresses, networks and wildcards are written with this byte.
const fn is_of_address(byte: u8) -> bool {
    byte.is_ascii_hexdigit() || matches!(byte, b'.' | b':' | b'/' | b'*')
}

fn effect(plan: &Plan<'_>, kind: MatchKind, rule: &Rule) -> String {
    let name = &rule.name;
    match kind {
        MatchKind::Limited => {
            let own = |at: &usize| plan.limits[*at].rule.is_some_and(|matched| matched.id == rule.id);
            let limits: Vec<String> =
                (0..plan.limits.len()).filter(own).map(|at| plan.describe(at).0).collect();
            format!("rule `{name}`, {}", limits.join(", "))
        }
        MatchKind::Unlimited => format!("rule `{name}`, unlimited"),
        _ => format!("rule `{name}`, no limit"),
    }
}
