//! `POST /json`: the messages of Envoy's rate limit service as protobuf JSON, like envoyproxy/ratelimit. Responds 200
//! or 429, and 503 where that service has no such case: load is shed, or a rule fails closed.
//!
//! Protobuf JSON allows names in camel case and snake case, numbers as text or with a fraction of zero, and `null` for
//! the default. All are accepted; unknown names are rejected.

use super::body::Object;
use super::check::reject_malformed;
use super::problem::Problem;
use super::{App, body};
use crate::rls;
use crate::rls::proto::envoy::extensions::common::ratelimit::v3::{
    RateLimitDescriptor, rate_limit_descriptor,
};
use crate::rls::proto::envoy::service::ratelimit::v3::rate_limit_response::{Code, RateLimit, rate_limit};
use crate::rls::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use prost_types::Struct;
use prost_types::value::Kind;
use serde::Deserialize;
use serde::de::{Deserializer, Error};
use serde_json::{Map, Value, json};
use tollgate_core::CounterStore;
use tollgate_engine::{Decision, TraceContext};
use tollgate_http::h1::RawResponse;
use tollgate_http::response::DecisionSummary;

pub(crate) async fn handle<S: CounterStore>(
    app: &App<S>,
    body: &[u8],
    trace: Option<&TraceContext>,
) -> Result<RawResponse, Problem> {
    let (request, decision, message) = decide(app, body, trace).await?;
    let scope = app.responses.bucket.then(|| rls::scope(&app.responses, &request, &decision)).flatten();
    let facts = DecisionSummary::from_decision(&decision).with_scope(scope.as_deref());
    let mut response = RawResponse::json(facts.disposition.status(), message);
    app.responses.write(&facts, app.limiter.clock().now(), &mut response);
    Ok(response)
}

/// Decides a request, and returns it with the decision and the body of the response.
pub(super) async fn decide<S: CounterStore>(
    app: &App<S>,
    body: &[u8],
    trace: Option<&TraceContext>,
) -> Result<(RateLimitRequest, Decision, Vec<u8>), Problem> {
    let request = RateLimitRequest::from(body::decode::<Request>(body)?);
    let decision = app.style.decide(&app.limiter, "http", &request, trace).await;
    let decision = decision.map_err(|error| Problem::bad(error.to_string()))?;
    reject_malformed(&decision)?;
    let message = encode(&app.style.response(&request, &decision)).to_string().into_bytes();
    Ok((request, decision, message))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    #[serde(default, deserialize_with = "or_default")]
    domain: String,
    #[serde(default, deserialize_with = "or_default")]
    descriptors: Vec<Object<Descriptor>>,
    #[serde(default, alias = "hitsAddend", deserialize_with = "or_default")]
    hits_addend: Number<u32>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Descriptor {
    #[serde(default, deserialize_with = "or_default")]
    entries: Vec<Object<Entry>>,
    #[serde(default)]
    limit: Option<Object<Limit>>,
    #[serde(default, alias = "hitsAddend")]
    hits_addend: Option<Number<u64>>,
    #[serde(default, alias = "isNegativeHits", deserialize_with = "or_default")]
    is_negative_hits: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    #[serde(default, deserialize_with = "or_default")]
    key: String,
    #[serde(default, deserialize_with = "or_default")]
    value: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Limit {
    #[serde(default, alias = "requestsPerUnit", deserialize_with = "or_default")]
    requests_per_unit: Number<u32>,
    #[serde(default, deserialize_with = "or_default")]
    unit: UnitNumber,
}

/// Reads a field whose default may be written as `null`.
fn or_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(decoder: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(decoder)?.unwrap_or_default())
}

/// A number, or a number as text.
#[derive(Clone, Copy, Default)]
struct Number<T>(T);

impl<'de, T: TryFrom<u64>> Deserialize<'de> for Number<T> {
    fn deserialize<D: Deserializer<'de>>(decoder: D) -> Result<Self, D::Error> {
        let number = match Value::deserialize(decoder)? {
            Value::Number(number) => whole(&number),
            // As a number: without spaces and signs.
            Value::String(text) if text.starts_with(|first: char| first.is_ascii_digit()) => {
                text.parse().ok().as_ref().and_then(whole)
            }
            _ => None,
        };
        let number = number.and_then(|number| T::try_from(number).ok());
        let most = 8 * std::mem::size_of::<T>();
        number
            .map(Self)
            .ok_or_else(|| D::Error::custom(format!("expected a whole number of 0 or more, below 2^{most}")))
    }
}

/// Returns a number that is whole, however it is written.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a whole number in range")]
fn whole(number: &serde_json::Number) -> Option<u64> {
    const END: f64 = 18_446_744_073_709_551_616.0;
    let fraction = || number.as_f64().filter(|float| float.fract() == 0.0 && (0.0..END).contains(float));
    number.as_u64().or_else(|| fraction().map(|float| float as u64))
}

#[derive(Clone, Copy, Default)]
struct UnitNumber(i32);

impl<'de> Deserialize<'de> for UnitNumber {
    fn deserialize<D: Deserializer<'de>>(decoder: D) -> Result<Self, D::Error> {
        const NAMES: [&str; 7] = ["UNKNOWN", "SECOND", "MINUTE", "HOUR", "DAY", "MONTH", "YEAR"];
        let number = match Value::deserialize(decoder)? {
            Value::Number(number) => number.as_u64(),
            Value::String(text) => NAMES.iter().position(|name| *name == text).map(|at| at as u64),
            _ => None,
        };
        let number = number.and_then(|number| i32::try_from(number).ok());
        number.map(Self).ok_or_else(|| D::Error::custom(format!("expected one of {}", NAMES.join(", "))))
    }
}

impl From<Request> for RateLimitRequest {
    fn from(request: Request) -> Self {
        Self {
            domain: request.domain,
            descriptors: request
                .descriptors
                .into_iter()
                .map(|Object(descriptor)| descriptor.into())
                .collect(),
            hits_addend: request.hits_addend.0,
        }
    }
}

impl From<Descriptor> for RateLimitDescriptor {
    fn from(descriptor: Descriptor) -> Self {
        let entry = |Object(entry): Object<Entry>| rate_limit_descriptor::Entry {
            key: entry.key,
            value: entry.value,
        };
        Self {
            entries: descriptor.entries.into_iter().map(entry).collect(),
            limit: descriptor.limit.map(|Object(limit)| rate_limit_descriptor::RateLimitOverride {
                requests_per_unit: limit.requests_per_unit.0,
                unit: limit.unit.0,
            }),
            hits_addend: descriptor.hits_addend.map(|number| number.0),
            is_negative_hits: descriptor.is_negative_hits,
        }
    }
}

fn code(number: i32) -> &'static str {
    match Code::try_from(number) {
        Ok(Code::Ok) => "OK",
        Ok(Code::OverLimit) => "OVER_LIMIT",
        _ => "UNKNOWN",
    }
}

/// Encodes a response as protobuf JSON, which omits fields with their default value.
fn encode(response: &RateLimitResponse) -> Value {
    let mut body = Map::new();
    body.insert("overallCode".into(), code(response.overall_code).into());
    let statuses = response.statuses.iter().map(|status| {
        let mut one = Map::new();
        one.insert("code".into(), code(status.code).into());
        if let Some(limit) = &status.current_limit {
            one.insert("currentLimit".into(), current_limit(limit));
        }
        if status.limit_remaining > 0 {
            one.insert("limitRemaining".into(), status.limit_remaining.into());
        }
        if let Some(reset) = &status.duration_until_reset {
            one.insert("durationUntilReset".into(), format!("{}s", reset.seconds).into());
        }
        Value::Object(one)
    });
    body.insert("statuses".into(), statuses.collect());
    if !response.response_headers_to_add.is_empty() {
        let headers = response.response_headers_to_add.iter();
        let headers = headers.map(|header| json!({"key": header.key, "value": header.value}));
        body.insert("responseHeadersToAdd".into(), headers.collect());
    }
    if let Some(metadata) = &response.dynamic_metadata {
        body.insert("dynamicMetadata".into(), struct_json(metadata));
    }
    Value::Object(body)
}

/// Returns a struct in protobuf's JSON mapping.
fn struct_json(object: &Struct) -> Value {
    Value::Object(object.fields.iter().map(|(key, value)| (key.clone(), value_json(value))).collect())
}

fn value_json(value: &prost_types::Value) -> Value {
    match &value.kind {
        None | Some(Kind::NullValue(_)) => Value::Null,
        Some(Kind::BoolValue(value)) => Value::from(*value),
        Some(Kind::NumberValue(value)) => number_json(*value),
        Some(Kind::StringValue(text)) => Value::from(text.clone()),
        Some(Kind::ListValue(list)) => list.values.iter().map(value_json).collect(),
        Some(Kind::StructValue(object)) => struct_json(object),
    }
}

/// Writes whole numbers without a fraction, as protobuf's JSON does.
fn number_json(value: f64) -> Value {
    const MAX_EXACT: f64 = 9_007_199_254_740_992.0;
    if value.fract() == 0.0 && value.abs() <= MAX_EXACT {
        #[expect(clippy::cast_possible_truncation, reason = "a whole number below 2^53")]
        return Value::from(value as i64);
    }
    Value::from(value)
}

fn current_limit(limit: &RateLimit) -> Value {
    let mut one = Map::new();
    if !limit.name.is_empty() {
        one.insert("name".into(), limit.name.clone().into());
    }
    one.insert("requestsPerUnit".into(), limit.requests_per_unit.into());
    let unit = rate_limit::Unit::try_from(limit.unit).unwrap_or_default();
    one.insert("unit".into(), unit.as_str_name().into());
    Value::Object(one)
}

/// Part of [`crate::properties::json_bodies`].
pub(super) fn properties(bytes: &[u8]) {
    type Message = rls::proto::envoy::service::ratelimit::v3::RateLimitRequest;
    let read = |body: &[u8]| body::decode::<Request>(body).ok().map(Message::from);
    let Some(request) = read(bytes) else { return };
    crate::rls::properties(&request);
    let value: serde_json::Value = serde_json::from_slice(bytes).expect("it was decoded");
    assert_eq!(read(value.to_string().as_bytes()), Some(request));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As protobuf's own reader, which the service that this stands in for uses.
    #[test]
    fn numbers_and_nulls_are_read_as_protobuf_json() {
        let read = |hits: &str, own: &str| {
            let body = format!(
                r#"{{"domain":"d","descriptors":[{{"entries":[{{"key":"k","value":null}}],"limit":null,
                "isNegativeHits":null,"hitsAddend":{own}}}],"hitsAddend":{hits}}}"#
            );
            let request = RateLimitRequest::from(body::decode::<Request>(body.as_bytes()).ok()?);
            Some((request.hits_addend, request.descriptors[0].hits_addend))
        };
        for (hits, own, expected) in [
            ("null", "null", (0, None)),
            ("1.0", "2.0", (1, Some(2))),
            ("1e2", "\"3\"", (100, Some(3))),
            ("4294967295", "18446744073709551615", (u32::MAX, Some(u64::MAX))),
        ] {
            assert_eq!(read(hits, own), Some(expected), "{hits} {own}");
        }
        for wrong in ["4294967296", "1.5", "-1", "true", "\" 1\"", "\"+1\"", "\"\"", "1e300"] {
            assert_eq!(read(wrong, "1"), None, "{wrong}");
        }
        for wrong in ["18446744073709551616", "1e20", "-1.0", "0.5"] {
            assert_eq!(read("1", wrong), None, "{wrong}");
        }
    }
}
