//! The fronts: one module a protocol. Each decodes a request, asks the engine, and encodes the decision; none knows how
//! counters are kept, and wire types stop here.
//!
//! | module | protocol |
//! |---|---|
//! | [`rls`] | Envoy's rate limit service over gRPC, with health and reflection |
//! | [`http`] | JSON over HTTP: checks, reservations, the Envoy service's `/json`, health |
//! | [`resp`] | the Redis protocol: `CL.THROTTLE`, and checks by the rules |
//! | [`admin`] | what operators decide: quotas of single callers, the audit log; on an address of its own |
//! | `dashboard` | the page for people, embedded, at the admin address |
//! | [`Status`] | what the fronts may ask of the process they run in |

pub mod admin;
mod dashboard;
pub mod http;
pub mod resp;
pub mod rls;
mod status;

pub use status::Status;
