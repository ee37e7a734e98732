//! Reservations: `POST /v1/reserve` charges an estimate, `/v1/settle` corrects it to the actual cost, `/v1/cancel`
//! refunds it.

use super::check::{CheckRequest, reject_malformed};
use super::problem::Problem;
use super::{App, body, decision};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use tollgate_core::{CounterStore, TimeDelta, Timestamp};
use tollgate_engine::{
    ClosedReservation, Limiter, ReservationId, ReserveError, SettleError, Settlement, TraceContext, Window,
};
use tollgate_http::h1::RawResponse;

const DEFAULT_TTL: u64 = 60_000;
/// Longest life of a reservation, in milliseconds.
pub(crate) const MAX_RESERVATION_MILLIS: u64 = 24 * 3_600_000;
const MAX_KEY: usize = 256;

#[derive(Serialize)]
struct ReserveBody<'a> {
    reservation: Option<String>,
    #[serde(flatten)]
    decision: decision::DecisionBody<'a>,
}

pub(crate) async fn reserve<S: CounterStore>(
    app: &App<S>,
    body: &[u8],
    now: Timestamp,
    trace: Option<&TraceContext>,
) -> Result<RawResponse, Problem> {
    let request: CheckRequest<'_> = body::decode(body)?;
    let ttl = request.deadline_ms.unwrap_or(DEFAULT_TTL);
    if ttl == 0 || ttl > MAX_RESERVATION_MILLIS {
        return Err(
            Problem::bad(format!("write 1 to {MAX_RESERVATION_MILLIS} milliseconds")).in_field("deadline_ms")
        );
    }
    if request.idempotency_key.as_ref().is_some_and(|key| key.is_empty() || key.len() > MAX_KEY) {
        return Err(Problem::bad(format!("write 1 to {MAX_KEY} bytes")).in_field("idempotency_key"));
    }
    let caller = request.caller(app, now)?;
    let normalized = request.normalize(caller.as_deref())?;
    let descriptors = normalized.descriptors();
    let check = normalized.check(&descriptors).with_trace(trace);
    let made =
        app.limiter.reserve(&check, TimeDelta::from_millis(ttl), request.idempotency_key.as_deref()).await;
    let made = made.map_err(|error| match error {
        ReserveError::InProgress => {
            Problem::new(StatusCode::CONFLICT, "Reservation in progress", error.to_string())
        }
        ReserveError::OtherContents => {
            Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "Idempotency key reused", error.to_string())
                .in_field("idempotency_key")
        }
        ReserveError::Ended(_) => {
            Problem::new(StatusCode::CONFLICT, "Reservation already ended", error.to_string())
        }
        ReserveError::Store(_) => {
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Store unavailable", error.to_string())
        }
        _ => Problem::new(StatusCode::SERVICE_UNAVAILABLE, "Too many reservations", error.to_string()),
    })?;
    reject_malformed(&made.decision)?;
    let reserved = ReserveBody {
        reservation: made.id.map(|id| id.to_string()),
        decision: decision::DecisionBody::new(&made.decision),
    };
    Ok(decision::response(app, check.input, &made.decision, &reserved))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SettleRequest {
    reservation: String,
    cost: u64,
}

pub(crate) async fn settle<S: CounterStore>(
    limiter: &Limiter<S>,
    body: &[u8],
) -> Result<RawResponse, Problem> {
    let request: SettleRequest = body::decode(body)?;
    ended(limiter.settle(reservation_id(&request.reservation)?, request.cost).await)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CancelRequest {
    reservation: String,
}

pub(crate) async fn cancel<S: CounterStore>(
    limiter: &Limiter<S>,
    body: &[u8],
) -> Result<RawResponse, Problem> {
    let request: CancelRequest = body::decode(body)?;
    ended(limiter.cancel(reservation_id(&request.reservation)?).await)
}

fn reservation_id(text: &str) -> Result<ReservationId, Problem> {
    text.parse().map_err(|_| {
        Problem::bad("invalid reservation ID; send the `reservation` that /v1/reserve returned")
            .in_field("reservation")
    })
}

#[derive(Default, Serialize)]
struct EndedBody {
    #[serde(skip_serializing_if = "Option::is_none")]
    settled: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cancelled: Option<bool>,
    /// Fewest units that remain of a limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    remaining: Option<u64>,
    limits: Vec<EndedLimit>,
}

#[derive(Serialize)]
struct EndedLimit {
    rule: String,
    limit: u64,
    window: String,
    remaining: u64,
    reset_ms: u64,
}

fn ended(result: Result<ClosedReservation, SettleError>) -> Result<RawResponse, Problem> {
    let body = match result {
        Ok(ClosedReservation { settlement, limits }) => {
            let remaining = limits.iter().map(|limit| limit.remaining).min();
            let limits = limits.into_iter().map(|limit| EndedLimit {
                rule: limit.rule,
                limit: limit.limit.rate().count,
                window: Window::from_limit(&limit.limit).to_string(),
                remaining: limit.remaining,
                reset_ms: limit.reset_after.ceil_millis(),
            });
            let body = EndedBody { remaining, limits: limits.collect(), ..EndedBody::default() };
            match settlement {
                Settlement::Settled(cost) => EndedBody { settled: Some(true), cost: Some(cost), ..body },
                _ => EndedBody { cancelled: Some(true), ..body },
            }
        }
        Err(error) => {
            let (status, title) = match error {
                SettleError::Unknown => (StatusCode::NOT_FOUND, "No such reservation"),
                SettleError::Ended(Settlement::Expired) => (StatusCode::NOT_FOUND, "Reservation expired"),
                SettleError::Ended(_) => (StatusCode::CONFLICT, "Reservation already ended"),
                SettleError::InProgress => (StatusCode::CONFLICT, "Reservation in progress"),
                _ => (StatusCode::SERVICE_UNAVAILABLE, "Store unavailable"),
            };
            return Err(Problem::new(status, title, error.to_string()));
        }
    };
    Ok(RawResponse::json(StatusCode::OK, serde_json::to_vec(&body).unwrap_or_default()))
}

/// Part of [`crate::properties::json_bodies`].
pub(super) fn properties(bytes: &[u8]) {
    let ids = [
        body::decode::<SettleRequest>(bytes).ok().map(|request| request.reservation),
        body::decode::<CancelRequest>(bytes).ok().map(|request| request.reservation),
    ];
    for id in ids.into_iter().flatten() {
        if let Ok(read) = reservation_id(&id) {
            assert_eq!(read.to_string().parse(), Ok(read), "what is written is read as the same");
        }
    }
}
