//! Decodes limits in all their forms: Envoy's `rate_limit`, a string, a mapping, a list of these.

use super::{algorithm, descriptor};
use crate::draft::{LimitDraft, RuleDraft, ShapeDraft};
use crate::period;
use crate::reader::{Reader, Spanned, scalar};
use crate::unit::Unit;
use crate::yaml::{Position, YamlNode, YamlValue, shorten};
use tollgate_core::{Period, Rate};

const RATE_LIMIT_KEYS: [&str; 10] = [
    "unit",
    "requests_per_unit",
    "unlimited",
    "name",
    "replaces",
    "algorithm",
    "burst",
    "slots",
    "jitter",
    "refill_interval",
];
const LIMIT_KEYS: [&str; 11] = [
    "count",
    "period",
    "unit",
    "calendar",
    "zone",
    "cost",
    "burst",
    "algorithm",
    "slots",
    "jitter",
    "refill_interval",
];
const EXAMPLE: &str = "100/minute";
/// The maximum number of limits in one list.
const MAX_LIMITS: usize = 16;

/// Decodes Envoy's form. Its `name` and `replaces` belong to the rule.
pub(super) fn rate_limit(reader: &mut Reader<'_>, at: Position, node: &YamlNode<'_>, draft: &mut RuleDraft) {
    draft.limits = Some(Vec::new());
    let example = "{unit: minute, requests_per_unit: 100}";
    let Some(pairs) = reader.mapping(node, "rate_limit", example) else { return };
    let (mut unit, mut count, mut counted, mut unlimited) = (None, Some(0), false, false);
    let mut shape = ShapeDraft::default();
    for (key, node) in pairs {
        match scalar(key) {
            "unit" => unit = reader.text(node, "unit", "minute").filter(|unit| !unit.value.is_empty()),
            "requests_per_unit" => {
                counted = true;
                count = reader.count(node, "requests_per_unit", u64::from(u32::MAX)).map(|count| count.value);
            }
            // An unreadable value counts as present, so that a missing `unit` is not reported as well.
            "unlimited" => unlimited = reader.boolean(node, "unlimited").is_none_or(|on| on.value),
            "name" => {
                let name = reader.text(node, "name", "per_user").filter(|name| !name.value.is_empty());
                if let (Some(_), Some(second)) = (&draft.name, &name) {
                    reader.error_help(second.at, "the rule has two names", "keep one of them");
                }
                draft.name = name.or(draft.name.take());
            }
            "replaces" => draft.replaces.extend(descriptor::replaces(reader, node)),
            name if shape_key(reader, name, node, &mut shape) => {}
            _ => reader.unknown_key(key, "`rate_limit`", &RATE_LIMIT_KEYS),
        }
    }
    draft.unlimited = unlimited;
    match (unlimited, unit) {
        (true, Some(unit)) if reader.is_ratelimit_file && Unit::from_name(&unit.value).is_none() => {
            let message = format!("`unlimited` with the unknown unit `{}`", shorten(&unit.value));
            reader.warning(unit.at, message, "leave `unit` out");
        }
        (true, Some(unit)) => {
            reader.error_help(
                unit.at,
                "`unlimited` with a unit: there is nothing to count",
                "leave `unit` out",
            );
            reader.errors.envoy_reason("should not specify rate limit unit when unlimited".to_owned());
        }
        (true, None) => {}
        (false, None) => {
            reader.error_help(at, "`rate_limit` has no unit", format!("write `rate_limit: {example}`"));
            reader.errors.envoy_reason("invalid rate limit unit ''".to_owned());
        }
        (false, Some(Spanned { at: unit_at, value })) => match Unit::from_name(&value) {
            Some(unit) => {
                let Some(count) = count else { return };
                if !counted {
                    let message =
                        "`rate_limit` has no `requests_per_unit`: it is 0, which denies every request";
                    reader.warning(at, message, "write `requests_per_unit: 0` if that is meant");
                }
                let period = Period::Rolling(unit.length());
                draft.limits = Some(vec![LimitDraft { at, count, period, shape, cost: None }]);
            }
            None => unknown_unit(reader, unit_at, &value),
        },
    }
}

fn unknown_unit(reader: &mut Reader<'_>, at: Position, unit: &str) {
    let names = ["second", "minute", "hour", "day", "week", "month", "year"];
    reader.unknown_value(at, "unit", unit, &names);
    reader.errors.envoy_reason(format!("invalid rate limit unit '{}'", crate::yaml::shorten(unit)));
}

/// Returns whether a limit is written as `unlimited`.
fn is_unlimited(node: &YamlNode<'_>) -> bool {
    matches!(&node.value, YamlValue::Scalar { .. }) && scalar(node) == "unlimited"
}

/// Decodes a limit, a list of limits, or `unlimited`, which is a list of none.
pub(super) fn list_or_unlimited(reader: &mut Reader<'_>, node: &YamlNode<'_>, name: &str) -> Vec<LimitDraft> {
    if is_unlimited(node) { Vec::new() } else { list(reader, node, name) }
}

/// Decodes a limit or a list of limits.
pub(super) fn list(reader: &mut Reader<'_>, node: &YamlNode<'_>, name: &str) -> Vec<LimitDraft> {
    match &node.value {
        YamlValue::Sequence(items) => {
            if items.is_empty() || items.len() > MAX_LIMITS {
                reader.error(
                    node.at,
                    format!("`{name}` must have from 1 to {MAX_LIMITS} limits, not {}", items.len()),
                );
            }
            items.iter().take(MAX_LIMITS).filter_map(|item| one(reader, item, name)).collect()
        }
        _ => one(reader, node, name).into_iter().collect(),
    }
}

fn one(reader: &mut Reader<'_>, node: &YamlNode<'_>, name: &str) -> Option<LimitDraft> {
    match &node.value {
        YamlValue::Scalar { text, .. } => match period::parse_rate(text) {
            Ok((count, period)) => {
                Some(LimitDraft { at: node.at, count, period, shape: ShapeDraft::default(), cost: None })
            }
            Err(why) => {
                let message = format!("`{}` is not a limit: {why}", shorten(text));
                let help = format!(
                    "write it as in `{name}: {EXAMPLE}`, `100 per 30s` or `1000/day in Europe/Zurich`"
                );
                reader.error_help(node.at, message, help);
                None
            }
        },
        YamlValue::Mapping(_) => mapping(reader, node, name),
        YamlValue::Sequence(_) => {
            reader.error_help(
                node.at,
                "a list inside a list of limits",
                format!("write `{name}: [{EXAMPLE}]`"),
            );
            None
        }
    }
}

fn mapping(reader: &mut Reader<'_>, node: &YamlNode<'_>, name: &str) -> Option<LimitDraft> {
    let (mut count, mut periods, mut zone) = (None, Vec::new(), None);
    let (mut calendar, mut cost) = (None, None);
    let mut shape = ShapeDraft::default();
    let mut complete = true;
    for (key, node) in reader.mapping(node, name, EXAMPLE)? {
        match scalar(key) {
            "count" => {
                count = reader.count(node, "count", Rate::MAX_COUNT);
                complete &= count.is_some();
            }
            "period" => {
                let span = reader.duration(node, "period");
                complete &= span.is_some();
                periods.push((key.at, span.map(|span| Period::Rolling(span.value))));
            }
            "unit" => {
                let Spanned { at, value } = reader.text(node, "unit", "minute")?;
                let unit = Unit::from_name(&value);
                if unit.is_none() {
                    unknown_unit(reader, at, &value);
                    complete = false;
                }
                periods.push((key.at, unit.map(|unit| Period::Rolling(unit.length()))));
            }
            "calendar" => {
                calendar = reader.text(node, "calendar", "month");
                complete &= calendar.is_some();
                periods.push((key.at, None));
            }
            "cost" => {
                cost = descriptor::cost(reader, node);
                complete &= cost.is_some();
            }
            "zone" => zone = reader.text(node, "zone", "Europe/Zurich"),
            name if shape_key(reader, name, node, &mut shape) => {}
            _ => reader.unknown_key(key, "a limit", &LIMIT_KEYS),
        }
    }
    if let Some((second, _)) = periods.get(1) {
        reader.error_help(*second, "a limit has one period", "keep one of `period`, `unit` and `calendar`");
        return None;
    }
    let period = match (calendar, zone) {
        (Some(unit), zone) => {
            let zone = zone.map_or_else(|| "UTC".to_owned(), |zone| zone.value);
            match period::calendar(&unit.value, &zone) {
                Ok(period) => Some(period),
                Err(why) => {
                    reader.error_help(
                        unit.at,
                        why,
                        "write it as in `{count: 1000, calendar: month, zone: Europe/Zurich}`",
                    );
                    return None;
                }
            }
        }
        (None, Some(zone)) => {
            reader.error_help(
                zone.at,
                "a zone without a calendar period",
                "write `calendar: day` or `calendar: month` with it",
            );
            return None;
        }
        (None, None) => periods.pop().and_then(|(_, period)| period),
    };
    if !complete {
        return None;
    }
    match (count, period) {
        (Some(count), Some(period)) => {
            Some(LimitDraft { at: node.at, count: count.value, period, shape, cost })
        }
        (None, _) => {
            reader.error_help(node.at, "a limit needs a `count`", "write `{count: 100, period: 30s}`");
            None
        }
        (_, None) => {
            reader.error_help(node.at, "a limit needs a `period`", "write `{count: 100, period: 30s}`");
            None
        }
    }
}

/// Decodes a key that `rate_limit` and `limit` share. Returns `false` for any other key.
fn shape_key(reader: &mut Reader<'_>, name: &str, node: &YamlNode<'_>, shape: &mut ShapeDraft) -> bool {
    match name {
        "burst" => shape.burst = reader.count(node, "burst", Rate::MAX_COUNT),
        "algorithm" => shape.algorithm = algorithm(reader, node),
        "slots" => shape.slots = reader.count(node, "slots", u64::from(u32::MAX)),
        "jitter" => shape.jitter = reader.boolean(node, "jitter"),
        "refill_interval" => shape.refill_interval = reader.duration(node, "refill_interval"),
        _ => return false,
    }
    true
}
