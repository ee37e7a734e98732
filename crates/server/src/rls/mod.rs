//! Envoy's rate limit service (RLS).
//!
//! [`handle`] implements the protocol without a transport (messages in, messages out). `service` runs it on the gRPC server
//! (`crate::grpc`); `sdk_extension` is the extension for the Rust SDK. A malformed request is
//! always reported as the client's error.

mod bounds;
pub(crate) mod codec;
mod decode;
mod encode;
mod health;
mod lenient;
mod listener;
mod sdk_extension;
mod service;
mod service_metadata;
mod style;

pub use decode::BadRequest;
pub use health::HealthNames;
pub use listener::{GrpcListener, UnixSocket};
pub(crate) use service::MAX_MESSAGE;
pub use service::{ALPN, RlsConfig, serve};
pub use style::{LimitHeaders, ResponseStyle, RlsError};

/// The protobuf messages, as `make protos` writes them.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod proto {
    include!("../../proto/generated/envoy.rs");
    /// The file descriptor set of all messages, for reflection.
    pub const DESCRIPTORS: &[u8] = include_bytes!("../../proto/generated/rls.fds");
}

use proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate_core::CounterStore;
use tollgate_engine::{Check, CheckInput, Decision, Limiter, TraceContext};
use tollgate_http::response::{RequestScope, ResponseConfig};
use tollgate_http::value::MAX_VALUE;
use tollgate_rules::Profile;

/// Handles one request, which may be part of a trace.
///
/// # Errors
/// [`RlsError`] if the request is invalid, or there are no rules yet.
pub async fn handle<S: CounterStore>(
    limiter: &Limiter<S>,
    request: &RateLimitRequest,
    trace: Option<&TraceContext>,
    (style, responses): (&ResponseStyle, &ResponseConfig),
) -> Result<RateLimitResponse, RlsError> {
    let decision = style.decide(limiter, "rls", request, trace).await?;
    let is_own = || {
        let domain = decision.rules().domain(&request.domain);
        domain.is_none_or(|domain| domain.profile() != Profile::Envoy)
    };
    Ok(match style {
        ResponseStyle::Own if is_own() => {
            let is_reported = !decision.is_allowed() || responses.bucket;
            let scope = is_reported.then(|| scope(responses, request, &decision)).flatten();
            full_response(&decision, responses, scope.as_deref())
        }
        ResponseStyle::Own | ResponseStyle::Service { .. } => style.response(request, &decision),
    })
}

/// Decides one request that was received via the protocol `protocol`, without encoding the response.
///
/// # Errors
/// [`BadRequest`] if the request is invalid.
pub async fn decide<S: CounterStore>(
    limiter: &Limiter<S>,
    protocol: &'static str,
    request: &RateLimitRequest,
    trace: Option<&TraceContext>,
) -> Result<Decision, BadRequest> {
    let request = &*decode::bounded(request);
    let entries = decode::entries(request)?;
    let descriptors = decode::descriptors(request, &entries)?;
    let check = Check::descriptors(&request.domain, &descriptors).with_cost(decode::hits(request));
    Ok(limiter.check(&check.with_protocol(protocol).with_trace(trace)).await)
}

pub use encode::{full_response, response};

/// Returns what to report about the request of a decision; see [`ResponseConfig::scope`].
pub(crate) fn scope(
    responses: &ResponseConfig,
    request: &RateLimitRequest,
    decision: &Decision,
) -> Option<Box<RequestScope>> {
    // Decoded again, because few responses have it, and the decision must not borrow the request.
    let request = &*decode::bounded(request);
    let entries = decode::entries(request).ok()?;
    let descriptors = decode::descriptors(request, &entries).ok()?;
    responses.scope(decision, CheckInput::Descriptors(&descriptors))
}

/// Part of [`crate::properties::rls_request`].
pub(crate) fn properties(request: &RateLimitRequest) {
    let bounded = &*decode::bounded(request);
    let Ok(entries) = decode::entries(bounded) else { return };
    assert!(request.descriptors.len() <= 1024 && entries.len() <= 1024 * 64);
    assert!(entries.iter().all(|(key, value)| key.len().max(value.len()) <= MAX_VALUE));
    if let Ok(descriptors) = decode::descriptors(bounded, &entries) {
        let count: usize = descriptors.iter().map(|descriptor| descriptor.entries.len()).sum();
        assert_eq!((descriptors.len(), count), (request.descriptors.len(), entries.len()));
    }
}

#[cfg(test)]
mod tests {
    use super::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
    use super::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
        Entry, RateLimitOverride,
    };
    use super::*;
    use std::sync::Arc;
    use tollgate_core::{ManualClock, Timestamp};
    use tollgate_rules::{Options, Ruleset, Source};
    use tollgate_store::{MemoryConfig, MemoryStore};

    const RULES: &str = "
domain: d
profile: envoy
descriptors:
  - {key: all, value: one, rate_limit: {unit: hour, requests_per_unit: 3}}
  - {key: tenant, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: path, value: /api/*, rate_limit: {unit: hour, requests_per_unit: 1}}
";

    /// Proxies that fail open would let every such request pass.
    #[test]
    fn a_long_value_is_counted_and_so_are_the_others() {
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000)));
        let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("memory");
        let rules = Ruleset::load(&[Source::new("d.yaml", RULES)], &Options::default()).expect("rules");
        let limiter = Limiter::new(Arc::new(rules), store, clock);
        let denied_by = |entries: &[(&str, &str)]| {
            let entry = |key: &str, value: &str| Entry { key: key.to_owned(), value: value.to_owned() };
            let descriptor = |(key, value): &(&str, &str)| RateLimitDescriptor {
                entries: vec![entry(key, value)],
                ..RateLimitDescriptor::default()
            };
            let descriptors = entries.iter().map(descriptor).collect();
            let request = RateLimitRequest { domain: "d".to_owned(), descriptors, hits_addend: 0 };
            properties(&request);
            let response = pollster::block_on(handle(
                &limiter,
                &request,
                None,
                (&ResponseStyle::Own, &ResponseConfig::default()),
            ))
            .expect("a response");
            response.statuses.iter().map(|status| status.code == 2).collect::<Vec<_>>()
        };
        let [long, other] = ["a", "b"].map(|last| format!("{}{last}", "v".repeat(50_000)));
        for expected in [[false, false], [false, false], [false, true], [true, true]] {
            assert_eq!(denied_by(&[("all", "one"), ("tenant", &long)]), expected);
        }
        assert_eq!(denied_by(&[("tenant", &other)]), [false], "another caller");
        let path = |last: char| format!("/api/{}{last}", "x".repeat(9_000));
        assert_eq!(denied_by(&[("path", &path('a'))]), [false]);
        assert_eq!(denied_by(&[("path", &path('a'))]), [true], "wildcards match its beginning");
        assert_eq!(denied_by(&[(&long, "v"), ("all", "one")]), [false, true], "nor for a long key");
    }

    /// An error would let the request pass at proxies that fail open.
    #[test]
    fn an_inline_limit_may_be_per_week() {
        const WEEK: i32 = 7;
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(7 * 86_400 + 100)));
        let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("memory");
        let rules = Ruleset::load(&[Source::new("d.yaml", RULES)], &Options::default()).expect("rules");
        let limiter = Limiter::new(Arc::new(rules), store, clock);
        let request = |unit| {
            let entries = vec![Entry { key: "tenant".to_owned(), value: "a".to_owned() }];
            let limit = Some(RateLimitOverride { requests_per_unit: 1, unit });
            let descriptors = vec![RateLimitDescriptor { entries, limit, ..RateLimitDescriptor::default() }];
            let request = RateLimitRequest { domain: "d".to_owned(), descriptors, hits_addend: 0 };
            pollster::block_on(handle(
                &limiter,
                &request,
                None,
                (&ResponseStyle::Own, &ResponseConfig::default()),
            ))
        };
        for code in [1, 2] {
            let status = request(WEEK).expect("a response").statuses.remove(0);
            let unit = status.current_limit.map(|limit| limit.unit);
            let reset = status.duration_until_reset.map(|reset| reset.seconds);
            assert_eq!((status.code, unit, reset), (code, Some(WEEK), Some(7 * 86_400 - 100)));
        }
        request(8).expect_err("no unit");
        request(0).expect_err("no unit");
    }
}
