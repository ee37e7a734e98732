//! Rate limiting for Rust programs: a keyed limiter, tower layers for axum, tonic and hyper, and a client of a Tollgate
//! server.
//!
//! | item | purpose |
//! |---|---|
//! | [`KeyedLimiter`], [`RateLimitLayer`] | one rate per key, without rules (feature `in-process`, on by default) |
//! | [`CheckRequest`] | the attributes and the cost of a request |
//! | [`InProcess`] | decides with rules and counters of this process (feature `in-process`) |
//! | `Remote` | decides with a Tollgate server over gRPC (feature `remote`) |
//! | `HttpRemote` | decides with a Tollgate server over HTTP, as the clients in other languages do (feature `remote-http`) |
//! | `Follower` | [`InProcess`] by the rules and quotas of a server's control plane (feature `control`) |
//! | [`TollgateLayer`] | limits the callers of a service |
//! | [`PacedLayer`] | slows down before the limits of the services that a program calls, retries within a budget |
//! | [`RetryAfterLayer`] | only waits until those services may be called again |
//! | [`pace`] | the rules of both, as pure steps |
//!
//! A service behind the layer sends the same fields as every other Tollgate server ([`tollgate_http::response`]):
//! `RateLimit` and `RateLimit-Policy` on every response, `Retry-After` on denials.
//!
//! ```
//! use http::{Request, Response};
//! use http_body_util::Full;
//! use bytes::Bytes;
//! use tollgate_sdk::{CheckRequest, InProcess, TollgateLayer};
//! use tower::{Layer, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let rules = "{domain: api, descriptors: [{key: user, name: per-user, limit: 1/minute}]}";
//! let limits = InProcess::from_rules(rules, "api")?;
//! let layer = TollgateLayer::new(limits, |request| {
//!     let user = request.headers.get("x-user")?.to_str().ok()?;
//!     Some(CheckRequest::attributes([("user", user)]))
//! });
//! let hello = service_fn(|_: Request<Full<Bytes>>| async {
//!     Ok::<_, std::convert::Infallible>(Response::new(Full::new(Bytes::from("hello"))))
//! });
//! let service = layer.layer(hello);
//! let request = || Request::get("/").header("x-user", "ann").body(Full::default());
//! assert_eq!(service.clone().oneshot(request()?).await?.status(), 200);
//! let denied = service.oneshot(request()?).await?;
//! assert_eq!((denied.status().as_u16(), &denied.headers()["retry-after"]), (429, &"60".parse()?));
//! # Ok(())
//! # }
//! ```

#[cfg(feature = "tower")]
mod body;
mod check_request;
#[cfg(any(feature = "remote", feature = "remote-http"))]
mod checks;
#[cfg(all(test, any(feature = "remote", feature = "remote-http")))]
mod conformance_cases;
mod decider;
#[cfg(any(feature = "remote", feature = "remote-http"))]
mod fail_policy;
#[cfg(feature = "control")]
mod follow;
#[cfg(any(feature = "remote", feature = "remote-http"))]
mod hedge;
#[cfg(any(feature = "remote", feature = "remote-http"))]
mod hedge_after;
#[cfg(feature = "tower")]
mod host;
#[cfg(any(feature = "control", feature = "remote-http"))]
mod http1;
#[cfg(feature = "remote-http")]
mod http_remote;
#[cfg(feature = "in-process")]
mod in_process;
#[cfg(feature = "in-process")]
mod keyed;
#[cfg(feature = "tower")]
mod layer;
#[cfg(feature = "redis")]
mod leased;
pub mod pace;
#[cfg(feature = "tower")]
mod paced_layer;
#[cfg(all(feature = "in-process", feature = "tower"))]
mod rate_limit_layer;
#[cfg(feature = "remote")]
mod remote;
#[cfg(feature = "in-process")]
mod reservation;
#[cfg(feature = "tower")]
mod retry_after_layer;
#[cfg(feature = "remote")]
mod rls;
#[cfg(any(feature = "remote", feature = "remote-http"))]
mod servers;

#[cfg(feature = "tower")]
pub use body::LimitedBody;
pub use check_request::{CheckRequest, Extracted};
#[cfg(any(feature = "remote", feature = "remote-http"))]
pub use checks::{CallerProblem, CheckReason, CheckResult, Closed, Fault, ResultSource, RuleResponse};
pub use decider::{Decider, LayerDecision};
#[cfg(any(feature = "remote", feature = "remote-http"))]
pub use fail_policy::{FailPolicy, RemoteError};
#[cfg(feature = "control")]
pub use follow::{FollowConfig, FollowError, FollowStatus, Follower};
#[cfg(any(feature = "remote", feature = "remote-http"))]
pub use hedge_after::HedgeAfter;
#[cfg(feature = "remote-http")]
pub use http_remote::{HttpRemote, HttpRemoteConfig, HttpReservation, RequestHead};
#[cfg(feature = "in-process")]
pub use in_process::{InProcess, RulesError};
#[cfg(feature = "in-process")]
pub use keyed::{Allowed, Denied, Key, KeyedLimiter, KeyedLimiterError};
#[cfg(feature = "tower")]
pub use layer::{TollgateLayer, TollgateService};
#[cfg(feature = "redis")]
pub use leased::LeasedRedis;
#[cfg(feature = "tower")]
pub use paced_layer::{PacedError, PacedLayer, PacedService};
#[cfg(all(feature = "in-process", feature = "tower"))]
pub use rate_limit_layer::RateLimitLayer;
#[cfg(feature = "remote")]
pub use remote::{Remote, RemoteConfig, RemoteReservation, RemoteReservationError, RemoteTls};
#[cfg(feature = "in-process")]
pub use reservation::{Reservation, ReservationError};
#[cfg(feature = "tower")]
pub use retry_after_layer::{RetryAfterError, RetryAfterLayer, RetryAfterService};
#[cfg(feature = "in-process")]
pub use tollgate_core::nonzero;
pub use tollgate_http::identity::{
    AmbiguousIdentity, ApiKeyConfig, IdentityConfig, IdentityResolver, KnownKeysConfig, QuotaKeys,
    UnknownKeys,
};
pub use tollgate_http::response::ResponseConfig;

/// Compiles the examples of the README and the user guide.
#[cfg(all(doctest, feature = "in-process", feature = "tower"))]
mod documentation {
    #[doc = include_str!("../README.md")]
    struct Readme;
    #[doc = include_str!("../../../docs/sdk/rust.md")]
    struct Guide;
}
