//! The fronts: one module a protocol. Each decodes a request, asks the engine, and encodes the decision; none knows how
//! counters are kept, and wire types stop here.
//!
//! | module | protocol |
//! |---|---|
//! | [`rls`] | Envoy's rate limit service over gRPC, with health and reflection |
//! | [`http`] | JSON over HTTP: checks, reservations, the Envoy service's `/json`, health |
//! | [`resp`] | the Redis protocol: `CL.THROTTLE`, and checks by the rules |

pub mod http;
pub mod resp;
pub mod rls;
