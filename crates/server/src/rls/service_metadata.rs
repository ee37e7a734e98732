//! The dynamic metadata of envoyproxy/ratelimit: the request, which quota limits are exceeded, and the metadata of the
//! rules that passed.

use super::encode::struct_value;
use super::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use super::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use super::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use super::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use prost_types::value::Kind;
use prost_types::{ListValue, Struct, Value};
use tollgate_engine::Decision;
use tollgate_rules::Role;

/// Returns the metadata of a decision on this request.
pub(super) fn metadata(
    request: &RateLimitRequest,
    decision: &Decision,
    response: &RateLimitResponse,
) -> Struct {
    let mut all = Struct::default();
    let mut set = |name: &str, value: Value| all.fields.insert(name.to_owned(), value);
    set("domain", text(request.domain.clone()));
    set("descriptors", list(request.descriptors.iter().map(descriptor)));
    if request.hits_addend != 0 {
        set("hitsAddend", number(f64::from(request.hits_addend)));
    }
    let quota = || decision.limits.iter().filter(|limit| limit.role == Role::Quota);
    let over: Vec<u16> =
        quota().filter(|limit| limit.outcome.verdict.is_denied()).map(|limit| limit.descriptor).collect();
    if !over.is_empty() {
        set("quotaModeViolations", list(over.into_iter().map(|at| number(f64::from(at)))));
    }
    set("quotaModeEnabled", Value { kind: Some(Kind::BoolValue(quota().next().is_some())) });
    let mut rules = Struct::default();
    for (status, wire) in decision.descriptors.iter().zip(&response.statuses) {
        let passed = wire.code == i32::from(Code::Ok);
        let rule = status.rule.filter(|_| passed).and_then(|id| decision.rules().rule(id));
        for (key, value) in rule.into_iter().flat_map(|rule| rule.metadata.iter()) {
            unite(&mut rules, key, struct_value(value));
        }
    }
    if !rules.fields.is_empty() {
        set("metadata", Value { kind: Some(Kind::StructValue(rules)) });
    }
    all
}

/// Adds a value to a struct. Of two values the first stays, and of two structs the union.
fn unite(into: &mut Struct, key: &str, value: Value) {
    match (into.fields.get_mut(key), value) {
        (None, value) => {
            into.fields.insert(key.to_owned(), value);
        }
        (
            Some(Value { kind: Some(Kind::StructValue(first)) }),
            Value { kind: Some(Kind::StructValue(second)) },
        ) => {
            for (key, value) in second.fields {
                unite(first, &key, value);
            }
        }
        (Some(_), _) => {}
    }
}

fn descriptor(descriptor: &RateLimitDescriptor) -> Value {
    let mut fields = Struct::default();
    let entries = descriptor.entries.iter().map(|entry| text(format!("{}={}", entry.key, entry.value)));
    fields.fields.insert("entries".to_owned(), list(entries));
    if let Some(limit) = &descriptor.limit {
        fields.fields.insert("limit".to_owned(), text(shown(limit)));
    }
    if let Some(hits) = descriptor.hits_addend {
        fields.fields.insert("hitsAddend".to_owned(), number(hits as f64));
    }
    Value { kind: Some(Kind::StructValue(fields)) }
}

/// Returns an inline limit as Go prints the message: without fields that are 0, and with the number of a unit that Envoy's
/// enumeration does not have.
fn shown(limit: &RateLimitOverride) -> String {
    const UNITS: [&str; 7] = ["UNKNOWN", "SECOND", "MINUTE", "HOUR", "DAY", "MONTH", "YEAR"];
    let count =
        (limit.requests_per_unit != 0).then(|| format!("requests_per_unit:{}", limit.requests_per_unit));
    let unit = usize::try_from(limit.unit).ok().and_then(|unit| UNITS.get(unit));
    let unit = unit.map_or_else(|| limit.unit.to_string(), |name| (*name).to_owned());
    let unit = (limit.unit != 0).then(|| format!("unit:{unit}"));
    count.into_iter().chain(unit).collect::<Vec<_>>().join(" ")
}

fn text(text: String) -> Value {
    Value { kind: Some(Kind::StringValue(text)) }
}

fn number(number: f64) -> Value {
    Value { kind: Some(Kind::NumberValue(number)) }
}

fn list(values: impl Iterator<Item = Value>) -> Value {
    Value { kind: Some(Kind::ListValue(ListValue { values: values.collect() })) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs that read the metadata compare this text.
    #[test]
    fn inline_limits_are_printed_as_that_service_prints_them() {
        for (requests_per_unit, unit, expected) in [
            (2, 3, "requests_per_unit:2 unit:HOUR"),
            (0, 3, "unit:HOUR"),
            (5, 7, "requests_per_unit:5 unit:7"),
            (0, 7, "unit:7"),
            (1, 0, "requests_per_unit:1"),
        ] {
            assert_eq!(shown(&RateLimitOverride { requests_per_unit, unit }), expected);
        }
    }
}
