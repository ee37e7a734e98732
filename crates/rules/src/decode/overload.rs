//! Decodes the `overload` section.

use super::adapt;
use crate::overload::{AttributeValue, Condition, Fairness, Overload, PriorityRule, TierFairness, Workers};
use crate::period;
use crate::reader::{Reader, Spanned, scalar};
use crate::yaml::{Position, YamlNode, YamlValue, shorten};
use tollgate_core::{Period, Priority, Rate, TimeDelta};

const KEYS: [&str; 6] = ["priorities", "fleet", "workers", "fairness", "adapt", "shadow"];
const EXAMPLE: &str = "{workers: {limit: adaptive}}";
/// Most entries of priorities, and most tiers.
const MOST: usize = 256;
/// Most values of one attribute.
const MAX_VALUES: usize = 64;
/// Most requests in flight that a limit counts.
pub(crate) const MAX_IN_FLIGHT: u64 = 100_000;

/// The section as written.
#[derive(Debug, Default)]
pub(crate) struct OverloadDraft {
    /// All but the fleet, which becomes a rule.
    pub(crate) section: Overload,
    pub(crate) fleet: Option<Spanned<FleetDraft>>,
    /// Where `workers` and `adapt` are written.
    pub(crate) workers_at: Option<Position>,
    pub(crate) adapt_at: Option<Position>,
}

/// `fleet` as written.
#[derive(Clone, Debug)]
pub(crate) struct FleetDraft {
    pub(crate) capacity: Capacity,
    /// Reserved thousandths by priority.
    pub(crate) reserve: [u64; 4],
}

/// The fleet's capacity.
#[derive(Clone, Debug)]
pub(crate) enum Capacity {
    /// Requests in flight, and how long one is counted at most whose end is not reported.
    InFlight(u64, TimeDelta),
    /// Requests per time.
    Rate(u64, Period),
}

pub(super) fn read(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<OverloadDraft>> {
    let (mut draft, mut needs_workers) = (OverloadDraft::default(), None);
    warn_about_empty_keys(reader, node);
    let mut is_limited = false;
    for (key, node) in reader.mapping(node, "overload", EXAMPLE)? {
        let section = &mut draft.section;
        is_limited |= matches!(scalar(key), "fleet" | "workers");
        match scalar(key) {
            "priorities" => section.priorities = priorities(reader, node),
            "fleet" => draft.fleet = fleet(reader, node),
            "workers" => (section.workers, draft.workers_at) = (workers(reader, node), Some(node.at)),
            "fairness" => section.fairness = fairness(reader, node),
            "adapt" => {
                section.adapt = adapt::read(reader, node, &mut needs_workers);
                draft.adapt_at = Some(node.at);
            }
            "shadow" => section.shadow = reader.boolean(node, "shadow").is_some_and(|on| on.value),
            _ => reader.unknown_key(key, "`overload`", &KEYS),
        }
    }
    // With a mistake in one of them, that has been reported already.
    if draft.section.fairness.is_some() && !is_limited {
        reader.error_help(
            node.at,
            "`fairness` shares what `workers` and `fleet` limit, and there is neither",
            "add `workers: {limit: adaptive}` or `fleet: {capacity: 5000 in flight}`",
        );
    }
    if let (Some(needed), None) = (&needs_workers, &draft.section.workers) {
        needed.report(reader);
    }
    warn_about_idle_settings(reader, node, &draft);
    Some(Spanned { at: node.at, value: draft })
}

/// Warns about keys without a value, which mean the same as none: half of a section may have been forgotten.
fn warn_about_empty_keys(reader: &mut Reader<'_>, node: &YamlNode<'_>) {
    let YamlValue::Mapping(pairs) = &node.value else { return };
    for (key, _) in pairs.iter().filter(|(key, value)| value.is_null() && KEYS.contains(&scalar(key))) {
        reader.warning(
            key.at,
            format!("`{}` has no value, so it has no effect", scalar(key)),
            "write what belongs to it, or remove it",
        );
    }
}

/// Warns about what is accepted but has no effect.
fn warn_about_idle_settings(reader: &mut Reader<'_>, node: &YamlNode<'_>, draft: &OverloadDraft) {
    let OverloadDraft { section, fleet, .. } = draft;
    let has_order = fleet.is_some() || section.workers.is_some();
    if !has_order && (section.adapt.is_none() || !section.priorities.is_empty()) {
        reader.warning(
            node.at,
            "nothing is shed: the section has neither `fleet` nor `workers`",
            "add `workers: {limit: adaptive}` or `fleet: {capacity: 5000 in flight}`",
        );
    }
    let Some(Spanned { at, value: fleet }) = fleet else { return };
    // Requests that no entry matches are normal.
    let gives = |wanted: &dyn Fn(Priority) -> bool| {
        wanted(Priority::default()) || section.priorities.iter().any(|rule| wanted(rule.priority))
    };
    for priority in Priority::ALL.into_iter().filter(|priority| fleet.reserve[priority.index()] > 0) {
        let name = priority.name();
        if !gives(&|given| given.index() <= priority.index()) {
            reader.warning(
                *at,
                format!("no request has priority {name}, so that nobody can use what is reserved for it"),
                format!("add an entry with `priority: {name}` to `priorities`, or leave the reserve out"),
            );
        } else if !gives(&|given| given.index() > priority.index()) {
            reader.warning(
                *at,
                format!("no request has a priority below {name}, so that its reserve has no effect"),
                "add entries with lower priorities to `priorities`, or leave the reserve out",
            );
        }
    }
}

fn priorities(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Vec<PriorityRule> {
    const EXAMPLE: &str = "[{when: {mode: test}, priority: sheddable}]";
    let Some(items) = reader.sequence(node, "priorities", EXAMPLE) else { return Vec::new() };
    if items.len() > MOST {
        reader.error(node.at, format!("`priorities` has at most {MOST} entries"));
    }
    let mut rules: Vec<PriorityRule> = Vec::new();
    for item in items.iter().take(MOST) {
        let (mut when, mut priority, mut given) = (None, None, 0);
        let Some(pairs) = reader.mapping(item, "priorities", EXAMPLE) else { continue };
        for (key, node) in pairs {
            given += 1;
            match scalar(key) {
                "when" => when = conditions(reader, node),
                "priority" => priority = level(reader, node),
                _ => reader.unknown_key(key, "`priorities`", &["when", "priority"]),
            }
        }
        let (Some(when), Some(priority)) = (when, priority) else {
            // With both, one of them has been reported already.
            if given < 2 {
                reader.error_help(
                    item.at,
                    "a priority needs `when` and `priority`",
                    format!("write it as in {EXAMPLE}"),
                );
            }
            continue;
        };
        if when.is_empty() {
            reader.warning(
                item.at,
                format!(
                    "`when` is empty, so every request that reaches this entry has priority {}",
                    priority.name()
                ),
                "name attributes, as in `when: {mode: test}`, or remove the entry",
            );
        }
        let rule = PriorityRule::new(when, priority);
        if rules.iter().any(|earlier| earlier.covers(&rule)) {
            reader.warning(
                item.at,
                "an earlier entry matches every request that this one does, so it never applies",
                "put the narrower entry first, or remove one of them",
            );
        }
        rules.push(rule);
    }
    rules
}

impl PriorityRule {
    /// Returns whether every request that `other` matches is matched.
    fn covers(&self, other: &Self) -> bool {
        self.when.iter().all(|Condition { name, values, .. }| {
            let same = other.when.iter().find(|theirs| theirs.name == *name);
            same.is_some_and(|theirs| {
                theirs.values.iter().all(|value| values.iter().any(|own| own.covers(value)))
            })
        })
    }
}

fn conditions(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Vec<Condition>> {
    let mut when = Vec::new();
    for (key, node) in reader.mapping(node, "when", "{mode: test}")? {
        let one = std::slice::from_ref(node);
        let items = match &node.value {
            YamlValue::Sequence(items) => &items[..],
            _ => one,
        };
        if items.is_empty() || items.len() > MAX_VALUES {
            reader.error_help(
                node.at,
                format!("`{}` needs 1 to {MAX_VALUES} values", shorten(scalar(key))),
                "write them as in `method: [POST, PUT]`",
            );
            return None;
        }
        let mut values = Vec::with_capacity(items.len());
        for item in items {
            values.push(AttributeValue::new(reader.text(item, scalar(key), "POST")?.value));
        }
        when.push(Condition::new(scalar(key).to_owned(), values));
    }
    Some(when)
}

fn level(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Priority> {
    let Spanned { at, value } = reader.text(node, "priority", "critical")?;
    let priority = Priority::from_name(&value);
    if priority.is_none() {
        reader.unknown_value(at, "priority", &value, &Priority::ALL.map(Priority::name));
    }
    priority
}

fn fleet(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<FleetDraft>> {
    const EXAMPLE: &str = "{capacity: 5000 in flight, reserve: {critical: 20%}}";
    let (mut capacity, mut reserve, mut ttl) = (None, [0; 4], None);
    let mut is_given = false;
    for (key, node) in reader.mapping(node, "fleet", EXAMPLE)? {
        match scalar(key) {
            "capacity" => (capacity, is_given) = (self::capacity(reader, node), true),
            "ttl" => ttl = reader.duration(node, "ttl"),
            "reserve" => {
                for (key, node) in reader.mapping(node, "reserve", "{critical: 20%}")? {
                    match Priority::from_name(scalar(key)) {
                        Some(priority) if priority != Priority::Sheddable => {
                            reserve[priority.index()] = percent(reader, node, scalar(key))?;
                        }
                        _ => reader.unknown_key(key, "`reserve`", &["critical", "important", "normal"]),
                    }
                }
                if reserve.iter().sum::<u64>() >= 1000 {
                    reader.error_help(
                        node.at,
                        "everything is reserved, so that sheddable requests could never pass",
                        "reserve less than 100% together",
                    );
                }
            }
            _ => reader.unknown_key(key, "`fleet`", &["capacity", "reserve", "ttl"]),
        }
    }
    if !is_given {
        reader.error_help(node.at, "`fleet` has no `capacity`", format!("write `fleet: {EXAMPLE}`"));
    }
    let capacity = match (capacity?, ttl) {
        (Capacity::InFlight(limit, _), Some(ttl)) => Capacity::InFlight(limit, ttl.value),
        (Capacity::Rate(..), Some(ttl)) => {
            reader.error_help(
                ttl.at,
                "`ttl` is for requests in flight; a rate has none",
                "leave it out, or write the capacity as `5000 in flight`",
            );
            return None;
        }
        (capacity, None) => capacity,
    };
    Some(Spanned { at: node.at, value: FleetDraft { capacity, reserve } })
}

fn capacity(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Capacity> {
    const TTL: TimeDelta = TimeDelta::from_secs(60);
    let Spanned { at, value } = reader.text(node, "capacity", "5000 in flight")?;
    let in_range =
        |count: i128| u64::try_from(count).ok().filter(|count| (1..=Rate::MAX_COUNT).contains(count));
    let is_too_large =
        |capacity: &Capacity| matches!(capacity, Capacity::InFlight(count, _) if *count > MAX_IN_FLIGHT);
    let read = match value.trim().strip_suffix("in flight") {
        Some(count) => period::parse_multiple(count.trim())
            .ok()
            .and_then(in_range)
            .map(|count| Capacity::InFlight(count, TTL)),
        None => value.split_once('/').and_then(|(count, per)| {
            let count = period::parse_multiple(count.trim()).ok().and_then(in_range)?;
            let span = period::parse_duration(per.trim()).ok().filter(|span| *span > TimeDelta::ZERO)?;
            Some(Capacity::Rate(count, Period::Rolling(span)))
        }),
    };
    if read.as_ref().is_some_and(is_too_large) {
        reader.error_help(
            at,
            format!(
                "`capacity: {}`: at most {MAX_IN_FLIGHT} requests in flight are counted",
                shorten(&value)
            ),
            "write fewer, or a rate, as in `20000/second`",
        );
        return None;
    }
    if read.is_none() {
        reader.error_help(
            at,
            format!("`capacity: {}` is neither a number of requests in flight nor a rate", shorten(&value)),
            "write it as in `5000 in flight` or `20000/second`",
        );
    }
    read
}

fn workers(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Workers> {
    let mut workers = Workers { rule: 0, limit: None, floor: 16, target: 2.0 };
    let mut floor_at = None;
    for (key, node) in reader.mapping(node, "workers", "{limit: adaptive, floor: 16, target: 2x}")? {
        let count = |reader: &mut Reader<'_>, name| {
            let count = reader.number(node, name, (1, MAX_IN_FLIGHT.cast_signed()), "16")?.value;
            u32::try_from(count).ok()
        };
        match scalar(key) {
            "limit" if scalar(node) == "adaptive" => workers.limit = None,
            "limit" if period::parse_multiple(scalar(node)).is_err() => {
                let written = shorten(scalar(node));
                reader.error_help(
                    node.at,
                    format!("`limit: {written}` is neither `adaptive` nor a number of requests in flight"),
                    format!("write `limit: adaptive`, or 1 to {MAX_IN_FLIGHT}"),
                );
                return None;
            }
            "limit" => workers.limit = Some(count(reader, "limit")?),
            "floor" => (workers.floor, floor_at) = (count(reader, "floor")?, Some(node.at)),
            "target" => workers.target = factor(reader, node)?,
            _ => reader.unknown_key(key, "`workers`", &["limit", "floor", "target"]),
        }
    }
    if let (Some(_), Some(at)) = (workers.limit, floor_at) {
        reader.error_help(
            at,
            "`floor` is for the adaptive limit; a fixed one does not fall",
            "leave it out, or write `limit: adaptive`",
        );
    }
    Some(workers)
}

/// Decodes `2x` or `1.5x`.
fn factor(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<f64> {
    let Spanned { at, value } = reader.text(node, "target", "2x")?;
    let factor = value.strip_suffix('x').and_then(|number| number.parse::<f64>().ok());
    let factor = factor.filter(|factor| (1.1..=100.0).contains(factor));
    if factor.is_none() {
        reader.error_help(
            at,
            format!("`target: {}` is no multiple of the latency without queueing", shorten(&value)),
            "write 1.1x to 100x, as in `target: 2x`",
        );
    }
    factor
}

fn fairness(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Fairness> {
    const EXAMPLE: &str = "{by: tenant, guarantees: {enterprise: 5% each, free: 10% together}}";
    let mut fairness = Fairness { by: String::new(), tiers: Vec::new() };
    for (key, node) in reader.mapping(node, "fairness", EXAMPLE)? {
        match scalar(key) {
            "by" => fairness.by = reader.text(node, "by", "tenant")?.value,
            "guarantees" => {
                for (key, node) in reader.mapping(node, "guarantees", "{enterprise: 5% each}")? {
                    let (guarantee, is_each) = guarantee(reader, node, scalar(key))?;
                    let share = tier(&mut fairness, scalar(key));
                    (share.guarantee, share.is_each) = (guarantee, is_each);
                }
            }
            "weights" => {
                for (key, node) in reader.mapping(node, "weights", "{enterprise: 4, free: 1}")? {
                    let weight = reader.number(node, scalar(key), (1, 1_000), "4")?.value;
                    tier(&mut fairness, scalar(key)).weight = weight.unsigned_abs() * 1000;
                }
            }
            _ => reader.unknown_key(key, "`fairness`", &["by", "guarantees", "weights"]),
        }
    }
    if fairness.by.is_empty() {
        reader.error_help(node.at, "`fairness` needs `by`", format!("write `fairness: {EXAMPLE}`"));
        return None;
    }
    let least: u64 = fairness.tiers.iter().map(|tier| tier.guarantee).sum();
    if least > 1000 || fairness.tiers.len() > MOST {
        reader.error_help(
            node.at,
            "the guarantees of one tenant of each tier are more than the whole capacity",
            "guarantee less: the sum over all tenants should stay below 100%",
        );
    }
    Some(fairness)
}

fn tier<'f>(fairness: &'f mut Fairness, name: &str) -> &'f mut TierFairness {
    let at = fairness.tiers.iter().position(|share| share.tier == name).unwrap_or_else(|| {
        let share = TierFairness { tier: name.to_owned(), guarantee: 0, is_each: true, weight: 1000 };
        fairness.tiers.push(share);
        fairness.tiers.len() - 1
    });
    &mut fairness.tiers[at]
}

/// Decodes `5% each` or `10% together`.
fn guarantee(reader: &mut Reader<'_>, node: &YamlNode<'_>, name: &str) -> Option<(u64, bool)> {
    let Spanned { at, value } = reader.text(node, name, "5% each")?;
    let (share, scope) = value.trim().split_once(' ').unwrap_or((value.trim(), ""));
    let is_each = match scope.trim() {
        "each" => Some(true),
        "together" => Some(false),
        _ => None,
    };
    let read = parse_percent(share).zip(is_each);
    if read.is_none() && is_each.is_some() && is_percent(share) {
        reader.error_help(
            at,
            format!("`{name}: {}` is no share in steps of 0.1%", shorten(&value)),
            "write 0.1% to 100%; for less, guarantee something to all of them `together`",
        );
    } else if read.is_none() {
        reader.error_help(
            at,
            format!("`{name}: {}` does not say what is guaranteed to whom", shorten(&value)),
            "write `5% each` for every tenant of the tier, or `10% together` for all of them",
        );
    }
    read
}

/// Decodes `20%` into thousandths.
pub(super) fn percent(reader: &mut Reader<'_>, node: &YamlNode<'_>, name: &str) -> Option<u64> {
    let Spanned { at, value } = reader.text(node, name, "20%")?;
    let share = parse_percent(&value);
    if share.is_none() {
        reader.error_help(
            at,
            format!("`{name}: {}` is no share", shorten(&value)),
            "write 0% to 100%, as in `20%` or `0.5%`",
        );
    }
    share
}

/// Returns whether this is a number of percent, of whatever size.
fn is_percent(text: &str) -> bool {
    text.trim().strip_suffix('%').is_some_and(|number| number.trim().parse::<f64>().is_ok())
}

fn parse_percent(text: &str) -> Option<u64> {
    let number = text.trim().strip_suffix('%')?.trim();
    let share = number.parse::<f64>().ok().filter(|share| (0.0..=100.0).contains(share))?;
    // A tenth of a percent is the smallest share.
    let thousandths = (share * 10.0).round();
    ((share * 10.0 - thousandths).abs() < 1e-9).then_some(thousandths as u64)
}
