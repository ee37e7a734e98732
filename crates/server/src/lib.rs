//! The protocol servers, one module per protocol. Each decodes a request, calls the engine and encodes the decision.
//! None depends on how counters are stored, and wire types are not used outside of them.
//!
//! | module | protocol |
//! |---|---|
//! | `grpc` | the gRPC server that the next two run on |
//! | [`rls`] | Envoy's rate limit service over gRPC, with health and reflection |
//! | [`rlqs`] | Envoy's rate limit quota service, on the same gRPC port |
//! | [`http`] | JSON over HTTP: checks, reservations, the Envoy service's `/json`, health |
//! | [`resp`] | the Redis protocol: `CL.THROTTLE`, and rule-based checks |

mod grpc;
pub mod http;
#[doc(hidden)]
pub mod properties;
pub mod resp;
pub mod rlqs;
pub mod rls;
