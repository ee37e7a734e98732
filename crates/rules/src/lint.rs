//! Lints for rules that can never match or never deny, and ([`hazards`]) for rules that limit less than they seem to.
//!
//! Few and precise: users stop reading warnings after one false alarm. So each lint reports only what can be proved
//! from the file, the names in it, and what is known of the server that loads it ([`Options`]).

mod attributes;
mod hazards;
mod invented;
mod overload;
mod stores;

pub use attributes::value_mistake;

use crate::compile::NodeLocation;
use crate::reader::Reader;
use crate::rule::{Action, Profile, Role, Rule, RuleLimit};
use crate::ruleset::{Domain, Options};
use crate::tree::{KeyIndex, TreeNode, ValueTest};
use std::collections::HashSet;
use tollgate_core::{Algorithm, Limit, Period, Timestamp};

/// The maximum number of wildcards of one key that are compared with each other; more would take too long.
const MAX_COMPARED: usize = 1_000;

pub(crate) fn domain(domain: &Domain, places: &[NodeLocation], options: &Options, reader: &mut Reader<'_>) {
    let names: HashSet<&str> =
        domain.domain_rules().filter(|rule| rule.has_explicit_name).map(|rule| rule.name.as_str()).collect();
    for (id, node) in domain.tree.iter().enumerate() {
        for index in node.children.keys() {
            never_reached(domain, index, places, reader);
        }
        if id != 0 {
            hazards::unique_key(node, &places[id], reader);
            hazards::head_method(node, &places[id], reader);
        }
        let Some(rule) = node.rule.map(|id| &domain.rules[id as usize]) else { continue };
        let place = &places[id];
        does_nothing(rule, node, place, reader);
        named_by_secret(domain, rule, id, place, reader);
        never_denies(domain, rule, place, reader);
        soft_at_the_limit(rule, place, reader);
        under_a_stricter_parent(domain, rule, node, place, reader);
        hazards::burst_at_boundary(rule, place, reader);
        hazards::one_for_all(domain, id, place, reader);
        hazards::long_window(domain, id, place, reader);
        hazards::durable_for_nothing(rule, place, reader);
        hazards::unreleased_permits(place, options, reader);
        hazards::empty_part(rule, place, options, reader);
        for name in rule.replaces.iter().filter(|name| !names.contains(name.as_str())) {
            let message =
                format!("no rule of this domain has the name `{name}`, so `replaces` has no effect");
            reader.warning(
                place.at,
                message,
                "give the other rule that `name`, or remove it from `replaces`",
            );
        }
    }
    attributes::domain(domain, places, reader);
    hazards::shard_by(domain, &places[0], reader);
    hazards::several_slots(domain, places, options, reader);
    stores::several(domain, places, reader);
    invented::escapes(domain, places, options, reader);
    overload::section(domain, places, reader);
}

/// Warns about wildcards after one that matches everything they could, and a key alone after a `*`.
fn never_reached(domain: &Domain, index: &KeyIndex, places: &[NodeLocation], reader: &mut Reader<'_>) {
    let patterns: Vec<_> = index.patterns.iter().take(MAX_COMPARED).collect();
    for (i, (pattern, node)) in patterns.iter().enumerate() {
        if let Some((earlier, _)) = patterns[..i].iter().find(|(earlier, _)| earlier.covers(pattern)) {
            let message = format!(
                "`{}` can never match: the earlier `{}={}` matches all its values",
                domain.tree[*node as usize].element,
                index.name,
                earlier.text()
            );
            reader.warning(places[*node as usize].at, message, "put it before the wider one");
        }
    }
    if let Some(any) = index.any
        && let Some((all, _)) = patterns.iter().find(|(pattern, _)| pattern.matches_all())
    {
        let message =
            format!("`{0}` alone can never match: `{0}={1}` matches every value", index.name, all.text());
        reader.warning(places[any as usize].at, message, "keep one of them");
    }
}

/// Warns about an unnamed rule whose path contains a secret: its path identifies it in responses, metrics and logs.
fn named_by_secret(
    domain: &Domain,
    rule: &Rule,
    mut id: usize,
    place: &NodeLocation,
    reader: &mut Reader<'_>,
) {
    while !rule.has_explicit_name && id != 0 {
        let node = &domain.tree[id];
        if node.is_secret && matches!(node.element.test, ValueTest::Exact(_)) {
            let message = format!(
                "the rule has no name, so its path with the value of `{}` appears in responses, metrics and logs",
                node.element.key
            );
            reader.warning(place.at, message, "give it a `name`");
            return;
        }
        id = node.parent as usize;
    }
}

/// Warns about a key alone without a limit: leaving it out changes nothing.
fn does_nothing(rule: &Rule, node: &TreeNode, place: &NodeLocation, reader: &mut Reader<'_>) {
    let idle = rule.limits.limits.is_empty() && rule.tiers.is_empty() && !rule.limits.unlimited;
    if idle && matches!(node.element.test, ValueTest::Any) {
        let message = format!("`{}` has no limit and no descriptors, so it has no effect", node.element.key);
        reader.warning(place.at, message, "add a `limit` or `descriptors`, or remove it");
    }
}

/// Warns about a window next to a stricter one that is always reached first.
fn never_denies(domain: &Domain, rule: &Rule, place: &NodeLocation, reader: &mut Reader<'_>) {
    if !all_or_none(domain, rule) {
        return;
    }
    let limits = &rule.limits.limits;
    for (limit, at) in limits.iter().zip(&place.limits) {
        let stricter = limits.iter().zip(&place.limits).map(|(other, _)| other).find(|other| {
            !std::ptr::eq(*other, limit) && other.cost == limit.cost && holds_back(&other.limit, &limit.limit)
        });
        if let Some(stricter) = stricter.filter(|other| !holds_back(&limit.limit, &other.limit)) {
            let message = format!(
                "`{}` never denies: `{}` beside it is always reached first",
                limit.limit.rate(),
                stricter.limit.rate()
            );
            reader.warning(*at, message, "lower it, or remove it");
        }
    }
}

fn soft_at_the_limit(rule: &Rule, place: &NodeLocation, reader: &mut Reader<'_>) {
    let Some(at) = place.soft else { return };
    let sets = std::iter::once(&rule.limits).chain(rule.tiers.iter().map(|(_, set)| set));
    let mut marks = sets
        .flat_map(|set| &set.limits)
        .filter_map(|limit| limit.soft.map(|soft| soft.threshold >= limit.limit.capacity()))
        .peekable();
    if marks.peek().is_some() && marks.all(|late| late) {
        reader.warning(
            at,
            "the soft limit is not below the limit, so it has no effect",
            "lower it, as in `soft: 80%`",
        );
    }
}

/// With attributes, every request that matches a child has matched its parent, whose counter is the wider one.
fn under_a_stricter_parent(
    domain: &Domain,
    rule: &Rule,
    node: &TreeNode,
    place: &NodeLocation,
    reader: &mut Reader<'_>,
) {
    if !all_or_none(domain, rule) || !rule.tiers.is_empty() {
        return;
    }
    let mut above = node.parent;
    while above != 0 {
        let parent = &domain.tree[above as usize];
        above = parent.parent;
        let Some(parent) = parent.rule.map(|id| &domain.rules[id as usize]) else { continue };
        if !parent.tiers.is_empty() || parent.action != Action::Reject {
            continue;
        }
        for (limit, at) in rule.limits.limits.iter().zip(&place.limits) {
            let stricter = parent.limits.limits.iter().find(|above| {
                above.role == Role::Live
                    && above.cost_from(parent) == limit.cost_from(rule)
                    && same_period(above, limit)
                    && holds_back(&above.limit, &limit.limit)
            });
            if let Some(stricter) = stricter {
                let message = format!(
                    "`{}` never denies a check by attributes: `{}` of its parent `{}` is always reached first",
                    limit.limit.rate(),
                    stricter.limit.rate(),
                    parent.name
                );
                let help = "lower it; only an RLS descriptor that ends here is held to it alone";
                reader.warning(*at, message, help);
                return;
            }
        }
    }
}

/// Returns whether requests that one limit denies are not counted by the others: only then does a stricter limit shield
/// a looser one.
fn all_or_none(domain: &Domain, rule: &Rule) -> bool {
    let live = rule.limits.limits.iter().all(|limit| matches!(limit.role, Role::Live | Role::Candidate));
    domain.profile == Profile::Native && rule.action != Action::Degrade && live
}

fn same_period(a: &RuleLimit, b: &RuleLimit) -> bool {
    a.limit.rate().period == b.limit.rate().period
}

/// Returns whether everything that passes `strict` passes `loose`, for any sequence of requests.
fn holds_back(strict: &Limit, loose: &Limit) -> bool {
    let (Period::Rolling(short), Period::Rolling(long)) = (&strict.rate().period, &loose.rate().period)
    else {
        return strict.algorithm() == loose.algorithm()
            && strict.rate().period == loose.rate().period
            && strict.capacity() <= loose.capacity();
    };
    let (short, long) = (u128::from(short.as_micros()), u128::from(long.as_micros()));
    let (few, many) = (u128::from(strict.rate().count), u128::from(loose.rate().count));
    match (strict.algorithm(), loose.algorithm()) {
        // Burst plus rate over time: one line lies below the other, if both have the same steps.
        (a, b) if a.has_burst() && b.has_burst() => {
            strict.refill_interval() == loose.refill_interval()
                && !strict.is_jittered()
                && !loose.is_jittered()
                && strict.capacity() <= loose.capacity()
                && few * long <= many * short
        }
        // Windows of one grid: a long window is a whole number of short ones.
        (Algorithm::FixedWindow, Algorithm::FixedWindow) => {
            !strict.is_jittered() && !loose.is_jittered() && long % short == 0 && few * (long / short) <= many
        }
        (Algorithm::SlidingLog, Algorithm::SlidingLog) => few * long.div_ceil(short) <= many,
        // The looser one counts up to a slot more than its period.
        (Algorithm::StrictWindow, Algorithm::StrictWindow) => {
            let slot = |limit: &Limit| {
                limit.escrow_window(Timestamp::ZERO).map_or(0, |slot| u128::from(slot.as_micros()))
            };
            let are_aligned = !strict.is_jittered() && !loose.is_jittered() && slot(strict) == slot(loose);
            match short == long && are_aligned {
                true => few <= many,
                false => few * (long + slot(loose)).div_ceil(short) <= many,
            }
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests;
