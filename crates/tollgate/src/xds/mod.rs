//! xDS: rules from a management server such as Envoy Gateway, over the aggregated discovery stream (state of the world)
//! for `ratelimit.config.ratelimit.v3.RateLimitConfig`.
//!
//! | module | contents |
//! |---|---|
//! | `subscription` | the protocol as a pure state machine: a response in, an acknowledgment or a refusal out |
//! | `rule_text` | resources as rule files, so that one loader reads every source |
//! | `settings` | settings |
//! | `connection` | TCP or a Unix socket, TLS, HTTP/2 |
//! | `backoff` | pauses between streams |
//! | `client` | the task that opens streams, applies what arrives and answers |
//! | `status` | the stream's state for logs, metrics and `/readyz?verbose` |

mod backoff;
mod client;
mod connection;
mod rule_text;
mod settings;
mod status;
mod subscription;

pub(crate) use backoff::BackoffSettings;
pub(crate) use client::{RefusedRules, RuleSink, XdsClient, random};
pub(crate) use settings::{FirstConfig, ServerAddress, XdsSettings, XdsTls, header};
pub(crate) use status::XdsStatus;

/// The protobuf messages, as `make protos` writes them.
#[allow(missing_docs, unreachable_pub, dead_code, clippy::all)]
mod proto {
    include!("../../proto/generated/xds.rs");
}
