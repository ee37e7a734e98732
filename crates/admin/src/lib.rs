//! Admin API over HTTP/1.1 on its own listener, and the embedded dashboard.
//!
//! | module | contents |
//! |---|---|
//! | `router` | every route, and what applies to all of them: cross-site rejection, time limits, security headers |
//! | [`state`](AdminState) | state shared by the handlers |
//! | `auth` | authentication and authorization: tokens, sessions, certificates, wrong-token throttling |
//! | `api` | the handlers, one file per resource, and the OpenAPI document that is generated from them |
//! | `conn` | accepting connections, plain or over TLS, up to a limit and with eviction |
//! | `dashboard` | the embedded page, public |
//! | `body`, `query`, `path`, `caller_path` | strict extractors: JSON bodies, query parameters, path segments, the caller in a path |
//! | `error`, `response`, `ndjson`, `coalesce` | problem+json, JSON and NDJSON responses, request coalescing |
//!
//! Handlers are axum's, and their annotations are utoipa's: a route exists in the document because it exists in the router.

mod api;
mod auth;
mod body;
mod caller_path;
mod coalesce;
mod conn;
mod dashboard;
mod error;
mod last_tier;
mod ndjson;
mod path;
mod query;
mod quota_guard;
mod response;
mod router;
mod state;

pub use api::explain::{ExplainDescriptor, ExplainFuture, ExplainQuery, Explainer};
pub use api::explained::{ExplainedOverload, ExplainedRule};
pub use api::log_level::{LogLevels, LogSettings};
#[doc(hidden)]
pub use api::openapi::CLOSED_SCHEMAS;
pub use api::overload::OverloadReport;
pub use api::replica::DumpSlots;
pub use api::rule_files::{ConfirmFilesError, PendingFiles, RuleDrift, RuleFilesControl};
pub use api::stats::NodeCache;
pub use api::usage::{UsageFuture, UsageQuery, UsageReader};
pub use auth::AuthMode;
pub use auth::sessions::Sessions;
pub use auth::throttle::FailedAuthThrottle;
pub use auth::tls::ALPN;
pub use conn::limiter::port_limits;
pub use dashboard::is_built as has_dashboard;
#[doc(hidden)]
pub use router::router_for;
pub use router::serve;
pub use state::AdminState;
