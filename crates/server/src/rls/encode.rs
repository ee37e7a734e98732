//! Encodes a decision as a rate limit response. A denial has the rule, the rules hash and the decision ID; the response
//! for an allowed request stays small.

use super::proto::envoy::config::core::v3::HeaderValue;
use super::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use super::proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit as WireUnit;
use super::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit};
use prost_types::value::Kind;
use prost_types::{Duration, ListValue, Struct, Value};
use tollgate_core::{TimeDelta, Verdict};
use tollgate_engine::{DecidedBy, Decision, LimitStatus, Origin};
use tollgate_rules::{MatchKind, MetadataValue, RuleLimit, Unit};

/// Returns the rate limit response for a decision.
pub fn response(decision: &Decision) -> RateLimitResponse {
    RateLimitResponse {
        response_headers_to_add: headers(decision),
        dynamic_metadata: metadata(decision),
        ..plain_response(decision)
    }
}

/// Returns the response without headers and metadata.
pub(crate) fn plain_response(decision: &Decision) -> RateLimitResponse {
    let code = if decision.is_allowed() { Code::Ok } else { Code::OverLimit };
    RateLimitResponse {
        overall_code: code.into(),
        statuses: (0..)
            .zip(&decision.descriptors)
            .map(|(at, status)| descriptor(decision, at, status))
            .collect(),
        response_headers_to_add: Vec::new(),
        request_headers_to_add: Vec::new(),
        raw_body: Vec::new(),
        dynamic_metadata: None,
    }
}

fn descriptor(
    decision: &Decision,
    at: usize,
    status: &tollgate_engine::DescriptorStatus,
) -> DescriptorStatus {
    let mut wire = DescriptorStatus { code: Code::Ok.into(), ..DescriptorStatus::default() };
    if status.matched == MatchKind::Unlimited {
        wire.limit_remaining = u32::MAX;
    }
    if matches!(
        decision.denied_by,
        Some(DecidedBy::UnknownDomain | DecidedBy::MalformedCost | DecidedBy::Emergency)
    ) {
        wire.code = Code::OverLimit.into();
    }
    // Where the store failed, the limit that could not be decided.
    let failed = decision.denying_limit().filter(|denying| usize::from(denying.descriptor) == at);
    let Some(limit) = decision.tightest(at).or(failed) else { return wire };
    let Some(RuleLimit { limit: facts, unit, .. }) = decision.limit(limit) else { return wire };
    let is_failed = limit.outcome.verdict == Verdict::Unknown;
    if is_failed || decision.is_over(limit) {
        wire.code = Code::OverLimit.into();
    }
    wire.current_limit = Some(RateLimit {
        requests_per_unit: u32::try_from(facts.rate().count).unwrap_or(u32::MAX),
        unit: unit.map_or(WireUnit::Unknown, wire_unit).into(),
        name: name(decision, limit),
    });
    wire.limit_remaining = u32::try_from(limit.outcome.remaining).unwrap_or(u32::MAX);
    let wait = if is_failed { decision.retry_after().unwrap_or_default() } else { until(limit) };
    wire.duration_until_reset = Some(whole_seconds(wait));
    wire
}

/// Returns the time until a denied request would pass, or until the limit is fully available again.
fn until(limit: &LimitStatus) -> TimeDelta {
    match limit.outcome.verdict {
        Verdict::Denied { retry_after: Some(wait) } => wait,
        _ => limit.outcome.reset_after,
    }
}

/// Rounds up to seconds, because Envoy truncates fractions.
fn whole_seconds(span: TimeDelta) -> Duration {
    Duration { seconds: i64::try_from(span.ceil_secs()).unwrap_or(i64::MAX), nanos: 0 }
}

fn name(decision: &Decision, limit: &LimitStatus) -> String {
    let rule = limit.rule.and_then(|id| decision.rules().rule(id));
    rule.filter(|rule| rule.has_explicit_name).map_or_else(String::new, |rule| rule.name.clone())
}

const fn wire_unit(unit: Unit) -> WireUnit {
    match unit {
        Unit::Second => WireUnit::Second,
        Unit::Minute => WireUnit::Minute,
        Unit::Hour => WireUnit::Hour,
        Unit::Day => WireUnit::Day,
        Unit::Week => WireUnit::Week,
        Unit::Month => WireUnit::Month,
        Unit::Year => WireUnit::Year,
    }
}

fn headers(decision: &Decision) -> Vec<HeaderValue> {
    let denied = decision.denied_by_name().map(|name| ("x-ratelimit-denied-by", name));
    let degraded = decision.degraded_by.map(|by| ("x-ratelimit-degraded", decision.name(by)));
    let mut all: Vec<_> = denied.into_iter().chain(degraded).map(|(key, value)| header(key, value)).collect();
    if !decision.is_allowed() {
        all.push(header("x-ratelimit-decision-id", &decision.id().to_string()));
    }
    all
}

pub(super) fn header(key: &str, value: &str) -> HeaderValue {
    // A rule name may contain characters that are invalid in a header value.
    let value = value.chars().map(|c| if c.is_ascii_graphic() || c == ' ' { c } else { '?' }).collect();
    HeaderValue { key: key.to_owned(), value, raw_value: Vec::new() }
}

/// Returns a rule's metadata as the wire's own value.
pub(super) fn struct_value(value: &MetadataValue) -> Value {
    let kind = match value {
        MetadataValue::Null => Kind::NullValue(0),
        MetadataValue::Bool(value) => Kind::BoolValue(*value),
        MetadataValue::Number(value) => Kind::NumberValue(*value),
        MetadataValue::Text(text) => Kind::StringValue(text.clone()),
        MetadataValue::List(items) => {
            Kind::ListValue(ListValue { values: items.iter().map(struct_value).collect() })
        }
        MetadataValue::Map(values) => {
            let fields = values.iter().map(|(key, value)| (key.clone(), struct_value(value))).collect();
            Kind::StructValue(Struct { fields })
        }
    };
    Value { kind: Some(kind) }
}

fn metadata(decision: &Decision) -> Option<Struct> {
    let mut fields = std::collections::BTreeMap::new();
    for status in &decision.descriptors {
        let rule = status.rule.and_then(|id| decision.rules().rule(id));
        for (key, value) in rule.into_iter().flat_map(|rule| rule.metadata.iter()) {
            fields.insert(key.to_owned(), struct_value(value));
        }
    }
    let mut text = |key: &str, value: String| {
        fields.insert(key.to_owned(), Value { kind: Some(Kind::StringValue(value)) });
    };
    if decision.delay() > TimeDelta::ZERO {
        text("delay_ms", decision.delay().ceil_millis().to_string());
    }
    let policy =
        matches!(decision.origin, Origin::Local | Origin::FailOpen | Origin::FailClosed | Origin::Shed)
            || decision.emergency().is_some();
    if policy || !decision.is_allowed() || decision.degraded_by.is_some() || decision.warned_by.is_some() {
        text("decision_id", decision.id().to_string());
        text("revision", decision.revision().to_owned());
        text("origin", decision.origin.name().to_owned());
    }
    if let Some(name) = decision.emergency() {
        text("emergency", name.to_owned());
    }
    if let Some(class) = decision.shed_class {
        text("shed", class.name().to_owned());
    }
    if let Some(reason) = decision.reason.as_deref()
        && (decision.shed_class.is_some() || !decision.is_allowed() || decision.origin == Origin::Unmatched)
    {
        text("reason", reason.to_owned());
    }
    let rules = [
        ("denied_by", decision.denied_by),
        ("degraded_by", decision.degraded_by),
        ("warned_by", decision.warned_by),
    ];
    for (key, by) in rules {
        if let Some(by) = by {
            text(key, decision.name(by).to_owned());
        }
    }
    (!fields.is_empty()).then_some(Struct { fields })
}
