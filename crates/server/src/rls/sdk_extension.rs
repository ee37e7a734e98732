//! What the Rust layer asks beyond Envoy's protocol, by the gRPC metadata `tollgate-ask`:
//!
//! | value | the descriptors are |
//! |---|---|
//! | `attributes` | one, whose entries are a bag of attributes: every rule whose keys it has applies |
//! | `descriptors` | as in Envoy's protocol |
//!
//! Either way the response carries the whole HTTP answer, as every other front writes it: its fields in
//! `response_headers_to_add`, its body in `raw_body`, its status and the time to hold a request back in the fields
//! `tollgate-status` and `tollgate-delay-ms`, which the layer keeps to itself. Envoy sends no such metadata.

use super::proto::envoy::config::core::v3::HeaderValue;
use super::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use super::{BadRequest, decide, decode, encode};
use tollgate_core::{Cost, CounterStore, TimeDelta};
use tollgate_engine::{Check, Limiter, TraceContext};
use tollgate_http::response::{DecisionSummary, ResponseConfig};

/// The metadata's name.
pub(crate) const METADATA_KEY: &str = "tollgate-ask";

pub(crate) async fn handle<S: CounterStore>(
    limiter: &Limiter<S>,
    answers: &ResponseConfig,
    request: &RateLimitRequest,
    form: &[u8],
    trace: Option<&TraceContext>,
) -> Result<RateLimitResponse, BadRequest> {
    let decision = match form {
        b"attributes" => {
            if request.descriptors.len() != 1 {
                return Err(BadRequest("a bag of attributes is one descriptor".to_owned()));
            }
            let entries = decode::entries(request)?;
            let own = request.descriptors[0].hits_addend.map(Cost::new);
            let cost = own.unwrap_or_else(|| decode::hits(request));
            let check = Check::attributes(&request.domain, &entries).with_cost(cost);
            limiter.check(&check.with_protocol("rls").with_trace(trace)).await
        }
        b"descriptors" => decide(limiter, "rls", request, trace).await?,
        _ => return Err(BadRequest(format!("{METADATA_KEY}: write attributes or descriptors"))),
    };
    let answer = answers.respond(&DecisionSummary::from_decision(&decision), limiter.clock().now());
    let field = |key: &str, value: String| HeaderValue { key: key.to_owned(), value, raw_value: Vec::new() };
    let mut fields = vec![field("tollgate-status", answer.status().as_u16().to_string())];
    if decision.delay() > TimeDelta::ZERO {
        fields.push(field("tollgate-delay-ms", decision.delay().ceil_millis().to_string()));
    }
    for (key, value) in answer.headers() {
        fields.push(field(key.as_str(), String::from_utf8_lossy(value.as_bytes()).into_owned()));
    }
    Ok(RateLimitResponse {
        response_headers_to_add: fields,
        raw_body: answer.body().to_vec(),
        ..encode::response(&decision)
    })
}
