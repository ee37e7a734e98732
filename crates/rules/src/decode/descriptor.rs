//! Decodes one descriptor, key by key.

use super::{algorithm, class, descriptors, limit};
use crate::denial_response::DenialResponse;
use crate::draft::{ConcurrencyDraft, CostDraft, OnErrorDraft, RuleDraft, SoftDraft, SoftThreshold};
use crate::metadata::Metadata;
use crate::period::parse_multiple;
use crate::reader::{Reader, Spanned, parse_number, scalar};
use crate::rule::{Action, Enforce, FailPolicy, SoftAction};
use crate::yaml::{YamlNode, YamlValue, shorten};
use std::collections::BTreeMap;
use tollgate_core::{Mode, Rate, TimeDelta};

const KEYS: [&str; 37] = [
    "key",
    "value",
    "rate_limit",
    "limit",
    "name",
    "descriptors",
    "shadow_mode",
    "quota_mode",
    "detailed_metric",
    "value_to_metric",
    "share_threshold",
    "metadata",
    "burst",
    "algorithm",
    "slots",
    "jitter",
    "refill_interval",
    "tiers",
    "concurrency",
    "class",
    "on_error",
    "mode",
    "store",
    "region",
    "fallback",
    "split",
    "action",
    "soft",
    "shadow",
    "enforce",
    "candidate",
    "priority",
    "cost",
    "billing",
    "durable",
    "replaces",
    "response",
];

pub(super) fn read(reader: &mut Reader<'_>, node: &YamlNode<'_>, depth: usize) -> Option<RuleDraft> {
    let pairs = reader.mapping(node, "a descriptor", "{key: user, limit: 100/minute}")?;
    let mut draft = RuleDraft { at: node.at, ..RuleDraft::default() };
    let (mut rate_limit, mut limit_at, mut shadow, mut shadow_mode) = (None, None, None, None);
    let mut misread = false;
    for (key, node) in pairs {
        match scalar(key) {
            "key" => {
                draft.key = reader.text(node, "key", "user");
                misread = draft.key.is_none();
            }
            "value" => {
                draft.value = reader.text(node, "value", "alice").filter(|value| !value.value.is_empty());
            }
            "rate_limit" => rate_limit = Some((key.at, node)),
            "limit" => {
                limit_at = Some(key.at);
                draft.unlimited = limit::is_unlimited(node);
                draft.limits = Some(limit::list_or_unlimited(reader, node, "limit"));
            }
            "name" => draft.name = reader.text(node, "name", "per_user"),
            "descriptors" => draft.rules = descriptors(reader, node, depth + 1),
            "shadow_mode" => shadow_mode = reader.boolean(node, "shadow_mode"),
            "shadow" => shadow = reader.boolean(node, "shadow"),
            "quota_mode" => draft.quota = reader.boolean(node, "quota_mode"),
            "detailed_metric" => {
                draft.detailed_metric = reader.boolean(node, "detailed_metric").is_some_and(|on| on.value);
            }
            "value_to_metric" => {
                draft.value_to_metric = reader.boolean(node, "value_to_metric").is_some_and(|on| on.value);
            }
            "share_threshold" => draft.share_threshold = reader.boolean(node, "share_threshold"),
            "metadata" => draft.metadata = Metadata::read(reader, node),
            "burst" => draft.shape.burst = reader.count(node, "burst", Rate::MAX_COUNT),
            "algorithm" => draft.shape.algorithm = algorithm(reader, node),
            "slots" => draft.shape.slots = reader.count(node, "slots", u64::from(u32::MAX)),
            "jitter" => draft.shape.jitter = reader.boolean(node, "jitter"),
            "refill_interval" => draft.shape.refill_interval = reader.duration(node, "refill_interval"),
            "tiers" => tiers(reader, node, &mut draft),
            "concurrency" => draft.concurrency = concurrency(reader, node),
            "class" => draft.class = class(reader, node),
            "on_error" => draft.on_error = on_error(reader, node),
            "mode" => draft.mode = mode(reader, node),
            "store" => draft.store = super::store(reader, node),
            "region" => draft.region = super::region::read(reader, node),
            "fallback" => draft.fallback = fallback(reader, node),
            "split" => draft.split = split_into(reader, node),
            "action" => draft.action = action(reader, node),
            "soft" => draft.soft = soft(reader, node),
            "enforce" => draft.enforce = enforce(reader, node),
            "candidate" => draft.candidate = limit::list(reader, node, "candidate"),
            "priority" => draft.priority = priority(reader, node),
            "cost" => draft.cost = cost(reader, node),
            "billing" => draft.billing = reader.boolean(node, "billing"),
            "durable" => draft.durable = reader.boolean(node, "durable"),
            "replaces" => draft.replaces = replaces(reader, node),
            "response" => draft.response = DenialResponse::read(reader, node),
            "requests_per_unit" | "unit" if !reader.is_ratelimit_file => {
                let message = format!("`{}` belongs inside `rate_limit`", scalar(key));
                reader.error_help(
                    key.at,
                    message,
                    "write `rate_limit: {unit: minute, requests_per_unit: 100}`",
                );
            }
            _ => reader.unknown_key(key, "a descriptor", &KEYS),
        }
    }
    if let Some((at, node)) = rate_limit {
        if let Some(limit_at) = limit_at {
            reader.error_help(
                limit_at,
                "a rule has `rate_limit` or `limit`, not both",
                "put both into `limit`, as a list",
            );
        }
        limit::rate_limit(reader, at, node, &mut draft);
    }
    if let (Some(_), Some(second)) = (shadow_mode, shadow) {
        reader.error_help(
            second.at,
            "`shadow` and `shadow_mode` are two words for one thing",
            "keep one of them",
        );
    }
    draft.shadow = shadow.or(shadow_mode);
    if !misread && draft.key.as_ref().is_none_or(|key| key.value.is_empty()) {
        let at = draft.key.as_ref().map_or(node.at, |key| key.at);
        reader.error_help(at, "empty key: a descriptor needs a `key`", "write `key: name_of_the_attribute`");
        reader.errors.envoy_reason("descriptor has empty key".to_owned());
        draft.key = None;
    }
    check_replaces(reader, &draft);
    check_billing(reader, &draft);
    check_durable(reader, &draft);
    Some(draft)
}

fn tiers(reader: &mut Reader<'_>, node: &YamlNode<'_>, draft: &mut RuleDraft) {
    let Some(pairs) = reader.mapping(node, "tiers", "{free: 100/minute, pro: 1000/minute}") else { return };
    for (key, value) in pairs {
        let name = scalar(key).to_owned();
        let limits = match tier_settings(reader, value, &name) {
            None => limit::list_or_unlimited(reader, value, &name),
            Some((limits, store)) => {
                draft.tier_stores.extend(store.map(|store| (name.clone(), store)));
                limits
            }
        };
        draft.tiers.push((name, limits));
    }
}

/// Decodes a tier that says more than its limits: `{limit: 1000/minute, store: eu}`; `None` if it is a limit.
fn tier_settings(
    reader: &mut Reader<'_>,
    node: &YamlNode<'_>,
    name: &str,
) -> Option<(Vec<crate::draft::LimitDraft>, Option<Spanned<String>>)> {
    let YamlValue::Mapping(pairs) = &node.value else { return None };
    if !pairs.iter().any(|(key, _)| matches!(scalar(key), "limit" | "store")) {
        return None;
    }
    let (mut limits, mut store) = (None, None);
    for (key, node) in reader.mapping(node, name, "{limit: 1000/minute, store: eu}")? {
        match scalar(key) {
            "limit" => limits = Some(limit::list_or_unlimited(reader, node, "limit")),
            "store" => store = super::store(reader, node),
            _ => reader.unknown_key(key, "a tier", &["limit", "store"]),
        }
    }
    if limits.is_none() {
        let help = format!("write `{name}: {{limit: 1000/minute, store: …}}`");
        reader.error_help(node.at, format!("the tier `{name}` has no `limit`"), help);
    }
    Some((limits.unwrap_or_default(), store))
}

fn concurrency(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<ConcurrencyDraft>> {
    const TTL: TimeDelta = TimeDelta::from_secs(60);
    if !matches!(node.value, YamlValue::Mapping(_)) {
        let Spanned { at, value } = reader.count(node, "concurrency", Rate::MAX_COUNT)?;
        return Some(Spanned { at, value: ConcurrencyDraft { limit: value, ttl: TTL, has_ttl: false } });
    }
    let (mut limit, mut ttl, mut has_ttl) = (None, Some(TTL), false);
    for (key, node) in reader.mapping(node, "concurrency", "{limit: 20, ttl: 60s}")? {
        match scalar(key) {
            "limit" => limit = Some(reader.count(node, "limit", Rate::MAX_COUNT)?.value),
            "ttl" => (ttl, has_ttl) = (reader.duration(node, "ttl").map(|ttl| ttl.value), true),
            _ => reader.unknown_key(key, "`concurrency`", &["limit", "ttl"]),
        }
    }
    if limit.is_none() {
        reader.error_help(
            node.at,
            "`concurrency` has no `limit`",
            "write `concurrency: {limit: 20, ttl: 60s}`",
        );
    }
    Some(Spanned { at: node.at, value: ConcurrencyDraft { limit: limit?, ttl: ttl?, has_ttl } })
}

fn on_error(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<OnErrorDraft> {
    if !matches!(node.value, YamlValue::Mapping(_)) {
        return policy(reader, node).map(OnErrorDraft::Always);
    }
    let (mut tiers, mut otherwise) = (BTreeMap::new(), None);
    for (key, node) in reader.mapping(node, "on_error", "{free: closed, default: open}")? {
        let Some(policy) = policy(reader, node) else { continue };
        match scalar(key) {
            "default" => otherwise = Some(policy),
            tier => {
                tiers.insert(tier.to_owned(), policy);
            }
        }
    }
    Some(OnErrorDraft::ByTier { tiers, otherwise })
}

fn policy(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<FailPolicy> {
    let Spanned { at, value } = reader.text(node, "on_error", "closed")?;
    match value.as_str() {
        "open" => Some(FailPolicy::Open),
        "closed" => Some(FailPolicy::Closed),
        "local" => Some(FailPolicy::Local),
        other => {
            reader.unknown_value(at, "policy for `on_error`", other, &["open", "closed", "local"]);
            None
        }
    }
}

fn mode(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<Mode>> {
    let Spanned { at, value } = reader.text(node, "mode", "central")?;
    let value = match value.as_str() {
        "central" => Mode::Central,
        "leased" => Mode::Leased,
        "local" => Mode::Local,
        other => {
            reader.unknown_value(at, "mode", other, &["central", "leased", "local"]);
            return None;
        }
    };
    Some(Spanned { at, value })
}

/// Parses a percentage with at most one decimal, such as `2.5%`, in thousandths.
fn percentage(text: &str) -> Option<u64> {
    let percent = text.trim().strip_suffix('%').map(str::trim)?;
    match percent.split_once('.') {
        Some((whole, tenth)) if tenth.len() == 1 => {
            whole.parse::<u64>().ok()?.checked_mul(10)?.checked_add(tenth.parse().ok()?)
        }
        Some(_) => None,
        None => percent.parse::<u64>().ok()?.checked_mul(10),
    }
}

/// Reads a share of the callers.
fn enforce(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<u64>> {
    let Spanned { at, value } = reader.text(node, "enforce", "10%")?;
    let help = match percentage(&value) {
        Some(value @ 1..=Enforce::ALL) => return Some(Spanned { at, value }),
        Some(0) => "write `shadow: true` to deny nobody",
        _ => "write a percentage from 0.1% to 100%: `enforce: 10%`",
    };
    reader.error_help(at, format!("`{}` is not a share of the callers", crate::yaml::shorten(&value)), help);
    None
}

/// Reads a fraction of the limit, such as `5%`, in thousandths.
fn fallback(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<u64>> {
    let Spanned { at, value } = reader.text(node, "fallback", "5%")?;
    match percentage(&value) {
        Some(value @ 1..=500) => Some(Spanned { at, value }),
        _ => {
            reader.error_help(
                at,
                format!("`{}` is not a share of a limit", crate::yaml::shorten(&value)),
                "write a percentage from 0.1% to 50%: `fallback: 5%`",
            );
            None
        }
    }
}

fn split_into(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<u64>> {
    let split = reader.count(node, "split", crate::counter_shards::MAX_SHARDS)?;
    if split.value < 2 {
        reader.error_help(split.at, "a counter is split into 2 to 256", "write `split: 8`, or leave it out");
        return None;
    }
    Some(split)
}

fn action(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<Action>> {
    let Spanned { at, value } = reader.text(node, "action", "delay")?;
    let value = match value.as_str() {
        "reject" => Action::Reject,
        "delay" | "throttle" => Action::Delay,
        "degrade" => Action::Degrade,
        other => {
            reader.unknown_value(at, "action", other, &["reject", "delay", "throttle", "degrade"]);
            return None;
        }
    };
    Some(Spanned { at, value })
}

fn soft(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<Spanned<SoftDraft>> {
    let (mut mark, mut action) = (None, SoftAction::Warn);
    if matches!(node.value, YamlValue::Mapping(_)) {
        for (key, node) in reader.mapping(node, "soft", "{at: 80%, action: warn}")? {
            match scalar(key) {
                "at" => mark = soft_mark(reader, node),
                "action" => match reader.text(node, "action", "warn")?.value.as_str() {
                    "warn" => action = SoftAction::Warn,
                    "degrade" => action = SoftAction::Degrade,
                    "delay" | "throttle" => action = SoftAction::Delay,
                    other => {
                        let known = ["warn", "degrade", "delay", "throttle"];
                        reader.unknown_value(node.at, "action of `soft`", other, &known);
                    }
                },
                _ => reader.unknown_key(key, "`soft`", &["at", "action"]),
            }
        }
        if mark.is_none() {
            reader.error_help(node.at, "`soft` has no mark", "write `soft: {at: 80%, action: warn}`");
        }
    } else {
        mark = soft_mark(reader, node);
    }
    mark.map(|mark| Spanned { at: node.at, value: SoftDraft { threshold: mark, action } })
}

fn soft_mark(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<SoftThreshold> {
    let percent = scalar(node).strip_suffix('%');
    let mark = match percent.map(|digits| parse_number(digits.trim())) {
        Some(Some(n @ 1..=1_000)) => SoftThreshold::Percent(u64::try_from(n).unwrap_or(100)),
        Some(_) => {
            reader.error_help(
                node.at,
                "a soft mark in percent is a whole number from 1% up",
                "write it as in `soft: 80%`",
            );
            return None;
        }
        None => {
            if let Some(part) = scalar(node).trim().parse::<f64>().ok().filter(|part| part.fract() != 0.0) {
                let percent = (part * 100.0).round();
                let example = if (1.0..=100.0).contains(&percent) { percent } else { 80.0 };
                reader.error_help(
                    node.at,
                    format!("`soft: {}` is neither a percentage nor units", shorten(scalar(node))),
                    format!(
                        "write the part of the limit as in `soft: {example}%`, or units as in `soft: 80`"
                    ),
                );
                return None;
            }
            SoftThreshold::Units(reader.count(node, "soft", Rate::MAX_COUNT)?.value)
        }
    };
    if matches!(mark, SoftThreshold::Units(0)) {
        reader.error_help(node.at, "a soft mark of 0 is always passed", "write it as in `soft: 80%`");
        return None;
    }
    Some(mark)
}

fn priority(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<i32> {
    let range = (i64::from(i32::MIN), i64::from(i32::MAX));
    let priority = reader.number(node, "priority", range, "10");
    priority.and_then(|priority| i32::try_from(priority.value).ok())
}

pub(super) fn cost(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Option<CostDraft> {
    let text = reader.text(node, "cost", "5")?.value;
    let number = matches!(node.value, YamlValue::Scalar { plain: true, .. }) && parse_multiple(&text).is_ok();
    if number {
        return reader.count(node, "cost", Rate::MAX_COUNT).map(|units| CostDraft::Fixed(units.value));
    }
    if text.is_empty() {
        reader.error_help(
            node.at,
            "`cost` is empty",
            "write a number, or the name of an attribute that has one",
        );
        return None;
    }
    Some(CostDraft::Attribute(text))
}

pub(super) fn replaces(reader: &mut Reader<'_>, node: &YamlNode<'_>) -> Vec<Spanned<String>> {
    let Some(items) = reader.sequence(node, "replaces", "[{name: other_rule}]") else { return Vec::new() };
    let mut names = Vec::new();
    for item in items {
        let Some(pairs) = reader.mapping(item, "an entry of `replaces`", "{name: other_rule}") else {
            continue;
        };
        let mut name = Spanned { at: item.at, value: String::new() };
        let mut wrong = false;
        for (key, node) in pairs {
            match (scalar(key), reader.text(node, "name", "other_rule")) {
                ("name", Some(text)) => name = text,
                ("name", None) => wrong = true,
                _ => reader.unknown_key(key, "an entry of `replaces`", &["name"]),
            }
        }
        if name.value.is_empty() && !wrong {
            reader.error_help(name.at, "empty `replaces` entry", "write `replaces: [{name: other_rule}]`");
            reader.errors.envoy_reason("should not have an empty replaces entry".to_owned());
        } else {
            names.push(name);
        }
    }
    names
}

fn check_replaces(reader: &mut Reader<'_>, draft: &RuleDraft) {
    let Some(name) = &draft.name else { return };
    for replaced in draft.replaces.iter().filter(|replaced| replaced.value == name.value) {
        reader.error_help(
            replaced.at,
            format!("the rule `{}` cannot replace itself", crate::yaml::shorten(&name.value)),
            "`replaces` names other rules; take this one out",
        );
        reader.errors.envoy_reason("replaces should not contain name of same descriptor".to_owned());
    }
}

/// Rejects `billing` on a rule without a rate: consumption is what its limits charge.
fn check_billing(reader: &mut Reader<'_>, draft: &RuleDraft) {
    let has_rate = draft.limits.as_ref().is_some_and(|limits| !limits.is_empty()) || !draft.tiers.is_empty();
    let is_group = !draft.rules.is_empty() && draft.limits.is_none() && draft.concurrency.is_none();
    if let Some(billing) = draft.billing.filter(|billing| billing.value && !has_rate && !is_group) {
        reader.error_help(
            billing.at,
            "`billing` on a rule without a rate has no effect: there is nothing that a request consumes",
            "write `limit` beside it, with `shadow: true` if it is to deny nothing",
        );
    }
}

/// Rejects `durable: true` where there is nothing to keep: on a rule without a rate, and on counters of one node alone.
fn check_durable(reader: &mut Reader<'_>, draft: &RuleDraft) {
    let Some(durable) = draft.durable.filter(|durable| durable.value) else { return };
    let has_rate = draft.limits.as_ref().is_some_and(|limits| !limits.is_empty()) || !draft.tiers.is_empty();
    let is_group = !draft.rules.is_empty() && draft.limits.is_none() && draft.concurrency.is_none();
    if !has_rate && !is_group {
        reader.error_help(
            durable.at,
            "`durable` on a rule without a rate has no effect: there is no consumption to keep",
            "write `limit` beside it, or leave it out; permits end by themselves",
        );
    }
    if draft.mode.is_some_and(|mode| mode.value == Mode::Local) {
        reader.error_help(
            durable.at,
            "`durable` with `mode: local`: each node counts for itself, and its counters end with it",
            "keep one of them",
        );
    }
}
