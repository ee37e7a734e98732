//! Extension of Envoy's protocol for the Rust SDK, selected by the gRPC metadata `tollgate-ask`:
//!
//! | value | meaning of the descriptors |
//! |---|---|
//! | `attributes` | one descriptor, whose entries are attributes: every rule whose keys are among them matches |
//! | `descriptors` | as in Envoy's protocol |
//!
//! Either way the response contains the complete HTTP response, as the HTTP server writes it: its fields in
//! `response_headers_to_add`, its body in `raw_body`, its status and delay in the fields `tollgate-status` and
//! `tollgate-delay-ms`, which the SDK does not forward. Envoy sends no such metadata.

use super::proto::envoy::config::core::v3::HeaderValue;
use super::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use super::{BadRequest, decide, decode, encode, scope};
use http::StatusCode;
use tollgate_core::{Cost, CounterStore, TimeDelta};
use tollgate_engine::{Check, Limiter, TraceContext};
use tollgate_http::response::{DecisionSummary, ResponseConfig};

/// The metadata key.
pub(crate) const METADATA_KEY: &str = "tollgate-ask";

pub(crate) async fn handle<S: CounterStore>(
    limiter: &Limiter<S>,
    responses: &ResponseConfig,
    request: &RateLimitRequest,
    form: &[u8],
    trace: Option<&TraceContext>,
) -> Result<RateLimitResponse, BadRequest> {
    let (decision, scope) = match form {
        b"attributes" => {
            if request.descriptors.len() != 1 {
                return Err(BadRequest("attributes must be sent as exactly one descriptor".to_owned()));
            }
            let entries = decode::entries(request)?;
            let hits = request.descriptors[0].hits_addend.map(Cost::new);
            let cost = hits.unwrap_or_else(|| decode::hits(request));
            let check = Check::attributes(&request.domain, &entries).with_cost(cost);
            let check = check.with_protocol("rls").with_trace(trace);
            let decision = limiter.check(&check).await;
            let scope = responses.scope(&decision, check.input);
            (decision, scope)
        }
        b"descriptors" => {
            let decision = decide(limiter, "rls", request, trace).await?;
            let scope = scope(responses, request, &decision);
            (decision, scope)
        }
        _ => return Err(BadRequest(format!("invalid {METADATA_KEY}; send attributes or descriptors"))),
    };
    let facts = DecisionSummary::from_decision(&decision).with_scope(scope.as_deref());
    let response = responses.respond(&facts, limiter.clock().now());
    let field = |key: &str, value: String| HeaderValue { key: key.to_owned(), value, raw_value: Vec::new() };
    let status = match decision.malformed_cost {
        Some(_) => StatusCode::BAD_REQUEST,
        None => response.status(),
    };
    let mut fields = vec![field("tollgate-status", status.as_u16().to_string())];
    if decision.delay() > TimeDelta::ZERO {
        fields.push(field("tollgate-delay-ms", decision.delay().ceil_millis().to_string()));
    }
    for (key, value) in response.headers() {
        fields.push(field(key.as_str(), String::from_utf8_lossy(value.as_bytes()).into_owned()));
    }
    Ok(RateLimitResponse {
        response_headers_to_add: fields,
        raw_body: response.body().to_vec(),
        ..encode::response(&decision)
    })
}
