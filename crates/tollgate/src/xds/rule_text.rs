//! Rule text of resources: each becomes a rule file, which the loader of rule files reads. So errors, lint, revisions and
//! the rule tree are the same for every source.
//!
//! Nothing is validated here: an empty key or an unknown unit is written as it came, and the loader refuses it with the
//! line of the text. Rejected: building the compiler's drafts directly, because diagnostics, `tollgate rules show` and
//! impact previews would have no text to point at.

use super::proto::ratelimit::config::ratelimit::v3::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
};
use prost_types::value::Kind;
use prost_types::{Struct, Value};
use std::fmt::Write as _;
use tollgate_rules::Source;

/// Returns the rule files of these resources, sorted: management servers send the same set in any order.
pub(super) fn sources(resources: &[RateLimitConfig]) -> Vec<Source> {
    let mut files: Vec<(&str, Source)> =
        resources.iter().map(|resource| (resource.domain.as_str(), file(resource))).collect();
    files.sort_by(|(a, of_a), (b, of_b)| (a, &of_a.name, &of_a.text).cmp(&(b, &of_b.name, &of_b.text)));
    files.into_iter().map(|(_, file)| file).collect()
}

fn file(resource: &RateLimitConfig) -> Source {
    let name = if resource.name.is_empty() { &resource.domain } else { &resource.name };
    let mut text = format!("domain: {}\nprofile: envoy\n", quoted(&resource.domain));
    text.push_str(if resource.descriptors.is_empty() { "descriptors: []\n" } else { "descriptors:\n" });
    text.push_str(&descriptors(&resource.descriptors, 1));
    Source::new(format!("xds/{}", printable(name)), text)
}

/// Returns descriptors as the items of a block sequence.
fn descriptors(all: &[RateLimitDescriptor], depth: usize) -> String {
    let mut text = String::new();
    for descriptor in all {
        let indent = "  ".repeat(2 * depth - 1);
        let mut first = Some("- ");
        let mut line = |key: &str, value: &str| {
            let lead = first.take().unwrap_or("  ");
            let _ = writeln!(text, "{indent}{lead}{key}:{value}");
        };
        line("key", &format!(" {}", quoted(&descriptor.key)));
        if !descriptor.value.is_empty() {
            line("value", &format!(" {}", quoted(&descriptor.value)));
        }
        if let Some(limit) = &descriptor.rate_limit {
            line("rate_limit", &format!(" {}", rate_limit(limit)));
        }
        for (name, is_on) in [
            ("shadow_mode", descriptor.shadow_mode),
            ("quota_mode", descriptor.quota_mode),
            ("detailed_metric", descriptor.detailed_metric),
        ] {
            if is_on {
                line(name, " true");
            }
        }
        if let Some(metadata) = descriptor.metadata.as_ref().filter(|metadata| !metadata.fields.is_empty()) {
            line("metadata", &format!(" {}", mapping(metadata)));
        }
        if !descriptor.descriptors.is_empty() {
            line("descriptors", "");
            text.push_str(&descriptors(&descriptor.descriptors, depth + 1));
        }
    }
    text
}

fn rate_limit(limit: &RateLimitPolicy) -> String {
    let mut parts = Vec::new();
    let unit = RateLimitUnit::try_from(limit.unit);
    if !limit.unlimited || unit != Ok(RateLimitUnit::Unknown) {
        let unit =
            unit.map_or_else(|_| limit.unit.to_string(), |unit| unit.as_str_name().to_ascii_lowercase());
        parts.push(format!("unit: {}", quoted(&unit)));
    }
    if !limit.unlimited {
        parts.push(format!("requests_per_unit: {}", limit.requests_per_unit));
    }
    if limit.unlimited {
        parts.push("unlimited: true".to_owned());
    }
    if !limit.name.is_empty() {
        parts.push(format!("name: {}", quoted(&limit.name)));
    }
    if !limit.replaces.is_empty() {
        let names = limit.replaces.iter().map(|other| format!("{{name: {}}}", quoted(&other.name)));
        parts.push(format!("replaces: [{}]", names.collect::<Vec<_>>().join(", ")));
    }
    format!("{{{}}}", parts.join(", "))
}

fn mapping(fields: &Struct) -> String {
    let pairs = fields.fields.iter().map(|(name, value)| format!("{}: {}", quoted(name), metadata(value)));
    format!("{{{}}}", pairs.collect::<Vec<_>>().join(", "))
}

fn metadata(value: &Value) -> String {
    match &value.kind {
        None | Some(Kind::NullValue(_)) => "null".to_owned(),
        Some(Kind::BoolValue(value)) => value.to_string(),
        // The loader reads what is no number of YAML as text.
        Some(Kind::NumberValue(value)) if !value.is_finite() => quoted(&value.to_string()),
        // With an exponent: the loader reads longer whole numbers as text, because not all of their digits would be kept.
        Some(Kind::NumberValue(value)) if value.abs() >= 1e15 => format!("{value:e}"),
        Some(Kind::NumberValue(value)) => value.to_string(),
        Some(Kind::StringValue(text)) => quoted(text),
        Some(Kind::StructValue(fields)) => mapping(fields),
        Some(Kind::ListValue(list)) => {
            format!("[{}]", list.values.iter().map(metadata).collect::<Vec<_>>().join(", "))
        }
    }
}

/// Returns text as a double-quoted scalar of YAML, with everything escaped that a file may not contain.
fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            c if is_printable(c) => out.push(c),
            c if u32::from(c) <= 0xffff => drop(write!(out, "\\u{:04x}", u32::from(c))),
            c => drop(write!(out, "\\U{:08x}", u32::from(c))),
        }
    }
    out.push('"');
    out
}

/// Returns whether a character may stand in a file as it is: no control, no line break, no mark of byte order.
fn is_printable(c: char) -> bool {
    !c.is_control() && !matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

fn printable(name: &str) -> String {
    name.chars().map(|c| if is_printable(c) { c } else { '?' }).collect()
}

#[cfg(test)]
mod tests;
