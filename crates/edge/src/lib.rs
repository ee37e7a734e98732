//! What HTTP says of a decision and of a caller: shared by every front, layer and gateway that speaks HTTP. Types of the
//! `http` crate in and out; no server, no store.
//!
//! | module | answers |
//! |---|---|
//! | [`answer`] | what is a caller told: status, `RateLimit` fields, `Retry-After`, body? |
//! | [`who`] | who is asking for what: address, key, user, endpoint? |
//! | [`proxy_protocol`] | whom does a load balancer's first line name? |

pub mod answer;
mod hex;
pub mod proxy_protocol;
pub mod who;
