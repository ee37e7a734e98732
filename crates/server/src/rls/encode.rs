//! Encodes a decision as a rate limit response: with the fields and the body of the HTTP response, which Envoy hands on to the
//! caller, or without them under `profile: envoy`, whose service sends none.
//!
//! `X-RateLimit-Limit`, `-Remaining` and `-Reset` are not among the fields: Envoy writes them itself, by
//! `enable_x_ratelimit_headers`, and would append its own to ours. Envoy also chooses the status, 429 for every denial, so a
//! field and the metadata say which denials are a 503 everywhere else.

use super::proto::envoy::config::core::v3::HeaderValue;
use super::proto::envoy::service::ratelimit::v3::RateLimitResponse;
use super::proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit as WireUnit;
use super::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit};
use http::header::{CONTENT_TYPE, HeaderName};
use prost_types::value::Kind;
use prost_types::{Duration, ListValue, Struct, Value};
use tollgate_core::{TimeDelta, Verdict};
use tollgate_engine::{DecidedBy, Decision, LimitStatus, Origin};
use tollgate_http::headers::HeaderSink;
use tollgate_http::response::{
    DecisionSummary, Disposition, LegacyHeaders, RequestScope, ResponseConfig, write_markers,
};
use tollgate_rules::{MatchKind, MetadataValue, RuleLimit, Unit};

/// Returns the rate limit response with what an HTTP response of the same decision contains.
#[must_use]
pub fn full_response(
    decision: &Decision,
    responses: &ResponseConfig,
    scope: Option<&RequestScope>,
) -> RateLimitResponse {
    let facts = DecisionSummary::from_decision(decision).with_scope(scope);
    let mut fields = Fields(Vec::new());
    let mut raw_body = Vec::new();
    if let Some(media_type) = responses.write_body(&facts, &mut raw_body) {
        fields.put(&CONTENT_TYPE, media_type.as_bytes());
    }
    let responses = ResponseConfig { legacy: LegacyHeaders::None, ..responses.clone() };
    responses.write(&facts, decision.at, &mut fields);
    if facts.disposition == Disposition::Unavailable {
        fields.put(&ORIGIN, decision.origin.name().as_bytes());
    }
    let mut dynamic_metadata = metadata(decision);
    if let Some(metadata) = dynamic_metadata.as_mut().filter(|_| !decision.is_allowed()) {
        let status = Kind::StringValue(responses.status(&facts).as_str().to_owned());
        metadata.fields.insert("status".to_owned(), Value { kind: Some(status) });
    }
    // The service behind Envoy serves a degraded response.
    let mut markers = Fields(Vec::new());
    write_markers(&facts, &mut markers);
    RateLimitResponse {
        response_headers_to_add: fields.0,
        request_headers_to_add: markers.0,
        raw_body,
        dynamic_metadata,
        ..plain_response(decision)
    }
}

static ORIGIN: HeaderName = HeaderName::from_static("x-ratelimit-origin");

/// Header fields of the protocol.
struct Fields(Vec<HeaderValue>);

impl HeaderSink for Fields {
    fn put(&mut self, name: &HeaderName, value: &[u8]) {
        let value = String::from_utf8_lossy(value).into_owned();
        self.0.push(HeaderValue { key: name.as_str().to_owned(), value, raw_value: Vec::new() });
    }
}

/// Returns the rate limit response for a decision, without what HTTP responses contain.
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
    let Some(limit) = decision.tightest(at).or(failed).or_else(|| counted(decision, at)) else {
        // No limit denied: a measure, which ends.
        wire.duration_until_reset = decision.retry_after().map(whole_seconds);
        return wire;
    };
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

/// Returns the limit of a descriptor that matched only one in shadow mode, if it counts as envoyproxy/ratelimit does: that
/// service reports it.
fn counted(decision: &Decision, descriptor: usize) -> Option<&LimitStatus> {
    let own = |status: &&LimitStatus| usize::from(status.descriptor) == descriptor;
    let mut all = decision.limits.iter().filter(own);
    all.find(|status| decision.limit(status).is_some_and(|limit| limit.limit.counts_denied()))
}

/// Returns the time until a denied request would pass, else the reset as every response reports it.
fn until(limit: &LimitStatus) -> TimeDelta {
    match limit.outcome.verdict {
        Verdict::Denied { retry_after: Some(wait) } => wait,
        _ => limit.outcome.reported_reset(),
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
    let warned = decision.warned_by.map(|by| ("x-ratelimit-warning", decision.name(by)));
    let named = denied.into_iter().chain(degraded).chain(warned);
    let mut all: Vec<_> = named.map(|(key, value)| header(key, value)).collect();
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
