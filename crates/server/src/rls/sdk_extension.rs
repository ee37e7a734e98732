//! Extension of Envoy's protocol for the Rust SDK, selected by the gRPC metadata `tollgate-ask`:
//!
//! | value | meaning |
//! |---|---|
//! | `attributes` | one descriptor, whose entries are attributes: every rule whose keys are among them matches |
//! | `descriptors` | descriptors as in Envoy's protocol |
//! | `settle` | corrects the reservation `tollgate-reservation` to the cost `tollgate-cost` |
//! | `cancel` | refunds the reservation `tollgate-reservation` |
//!
//! With the metadata `tollgate-reserve: MILLISECONDS` the first two make a reservation for that long; with the same
//! `tollgate-idempotency-key`, also at another node of a shared store, it is made once.
//!
//! Their response contains the complete HTTP response, as the HTTP server writes it: its fields in
//! `response_headers_to_add`, its body in `raw_body`, its status, delay and reservation in the fields `tollgate-status`,
//! `tollgate-delay-ms` and `tollgate-reservation`, which the SDK does not forward. With the metadata `tollgate-decision:
//! json` the field `tollgate-decision` has the decision as `/v1/check` writes it. Envoy sends no such metadata.

use super::proto::envoy::config::core::v3::HeaderValue;
use super::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use super::{BadRequest, decode, encode};
use crate::http::{DecisionBody, MAX_RESERVATION_MILLIS};
use http::StatusCode;
use tollgate_core::{CounterStore, TimeDelta};
use tollgate_engine::{
    Check, ClosedReservation, Decision, Limiter, ReservationId, ReserveError, SettleError, TraceContext,
};
use tollgate_http::response::{DecisionSummary, ResponseConfig};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, Status};

/// The metadata key.
pub(crate) const METADATA_KEY: &str = "tollgate-ask";
const RESERVE: &str = "tollgate-reserve";
const RESERVATION: &str = "tollgate-reservation";
const COST: &str = "tollgate-cost";
const DECISION: &str = "tollgate-decision";
const IDEMPOTENCY_KEY: &str = "tollgate-idempotency-key";
const MAX_KEY: usize = 256;
/// All keys that are read.
pub(crate) const KEYS: &[&str] = &[METADATA_KEY, RESERVE, RESERVATION, COST, DECISION, IDEMPOTENCY_KEY];

pub(crate) async fn handle<S: CounterStore>(
    limiter: &Limiter<S>,
    responses: &ResponseConfig,
    request: &RateLimitRequest,
    metadata: &MetadataMap,
    trace: Option<&TraceContext>,
) -> Result<RateLimitResponse, Status> {
    let form = metadata.get(METADATA_KEY).map(MetadataValue::as_bytes).unwrap_or_default();
    match form {
        b"attributes" if request.descriptors.len() != 1 => {
            return Err(BadRequest("attributes must be sent as exactly one descriptor".to_owned()).into());
        }
        b"attributes" | b"descriptors" => {}
        b"settle" => return closed(limiter.settle(reservation(metadata)?, cost(metadata)?).await),
        b"cancel" => return closed(limiter.cancel(reservation(metadata)?).await),
        _ => {
            let expected = "send attributes, descriptors, settle or cancel";
            return Err(BadRequest(format!("invalid {METADATA_KEY}; {expected}")).into());
        }
    }
    let request = &*decode::bounded(request);
    let entries = decode::entries(request)?;
    let descriptors = decode::descriptors(request, &entries)?;
    let total = decode::hits(request);
    let check = match &descriptors[..] {
        [one] if form == b"attributes" => {
            Check::attributes(&request.domain, &entries).with_cost(one.hits.unwrap_or(total))
        }
        all => Check::descriptors(&request.domain, all).with_cost(total),
    };
    let check = check.with_protocol("rls").with_trace(trace);
    let (decision, reservation) = match lifetime(metadata)? {
        None => (limiter.check(&check).await, None),
        Some(ttl) => {
            let key = idempotency_key(metadata)?;
            let made = limiter.reserve(&check, ttl, key).await.map_err(|error| not_reserved(&error))?;
            (made.decision, made.id)
        }
    };
    let scope = responses.scope(&decision, check.input);
    let facts = DecisionSummary::from_decision(&decision).with_scope(scope.as_deref());
    let response = responses.respond(&facts, limiter.clock().now());
    let mut reply = encoded(&decision, reservation, &response);
    if metadata.get(DECISION).is_some_and(|form| form == "json") {
        // These types always serialize.
        let value = serde_json::to_string(&DecisionBody::new(&decision)).unwrap_or_default();
        reply.response_headers_to_add.push(field(DECISION, value));
    }
    Ok(reply)
}

fn field(key: &str, value: String) -> HeaderValue {
    HeaderValue { key: key.to_owned(), value, raw_value: Vec::new() }
}

/// Encodes the decision with its HTTP response.
fn encoded(
    decision: &Decision,
    reservation: Option<ReservationId>,
    response: &http::Response<bytes::Bytes>,
) -> RateLimitResponse {
    let status = match decision.malformed_cost {
        Some(_) => StatusCode::BAD_REQUEST,
        None => response.status(),
    };
    let mut fields = vec![field("tollgate-status", status.as_u16().to_string())];
    if decision.delay() > TimeDelta::ZERO {
        fields.push(field("tollgate-delay-ms", decision.delay().ceil_millis().to_string()));
    }
    fields.extend(reservation.map(|id| field(RESERVATION, id.to_string())));
    for (key, value) in response.headers() {
        fields.push(field(key.as_str(), String::from_utf8_lossy(value.as_bytes()).into_owned()));
    }
    RateLimitResponse {
        response_headers_to_add: fields,
        raw_body: response.body().to_vec(),
        ..encode::response(decision)
    }
}

/// Reads a number; `None` without the metadata.
fn number(metadata: &MetadataMap, key: &str) -> Option<Result<u64, BadRequest>> {
    let read = metadata.get(key)?.to_str().ok().and_then(|text| text.parse().ok());
    Some(read.ok_or_else(|| BadRequest(format!("invalid {key}; send a whole number"))))
}

/// Returns how long the request wants a reservation to live; `None` for a check.
fn lifetime(metadata: &MetadataMap) -> Result<Option<TimeDelta>, BadRequest> {
    match number(metadata, RESERVE).transpose()? {
        None => Ok(None),
        Some(millis @ 1..=MAX_RESERVATION_MILLIS) => Ok(Some(TimeDelta::from_millis(millis))),
        Some(_) => Err(BadRequest(format!("{RESERVE}: send 1 to {MAX_RESERVATION_MILLIS} milliseconds"))),
    }
}

fn idempotency_key(metadata: &MetadataMap) -> Result<Option<&str>, BadRequest> {
    let Some(key) = metadata.get(IDEMPOTENCY_KEY) else { return Ok(None) };
    let key = key.to_str().ok().filter(|key| (1..=MAX_KEY).contains(&key.len()));
    key.map(Some)
        .ok_or_else(|| BadRequest(format!("{IDEMPOTENCY_KEY}: send 1 to {MAX_KEY} ASCII characters")))
}

fn reservation(metadata: &MetadataMap) -> Result<ReservationId, BadRequest> {
    let id = metadata.get(RESERVATION).and_then(|id| id.to_str().ok()?.parse().ok());
    id.ok_or_else(|| BadRequest(format!("invalid {RESERVATION}; send the one that the reservation returned")))
}

fn cost(metadata: &MetadataMap) -> Result<u64, BadRequest> {
    number(metadata, COST)
        .unwrap_or_else(|| Err(BadRequest(format!("{COST} is missing; send the real cost"))))
}

fn closed(result: Result<ClosedReservation, SettleError>) -> Result<RateLimitResponse, Status> {
    match result {
        Ok(_) => Ok(RateLimitResponse::default()),
        Err(error) => {
            let code = match error {
                SettleError::Unknown => Code::NotFound,
                SettleError::Ended(_) => Code::FailedPrecondition,
                SettleError::InProgress => Code::Aborted,
                _ => Code::Unavailable,
            };
            Err(Status::new(code, error.to_string()))
        }
    }
}

fn not_reserved(error: &ReserveError) -> Status {
    let code = match error {
        ReserveError::TooMany => Code::ResourceExhausted,
        ReserveError::OtherContents => Code::InvalidArgument,
        ReserveError::Ended(_) => Code::FailedPrecondition,
        _ => Code::Unavailable,
    };
    Status::new(code, error.to_string())
}
