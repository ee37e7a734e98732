//! What HTTP says of a decision and of a caller: shared by every front, layer and gateway that speaks HTTP. Types of the
//! `http` crate in and out; no server, no store.
//!
//! | module | answers |
//! |---|---|
//! | [`answer`] | what is a caller told: status, `RateLimit` fields, `Retry-After`, body? |
//! | [`who`] | who is asking for what: address, key, user, endpoint? |
//! | [`h1`] | what has a stranger sent: how are heads and chunks read? |
//! | [`date`] | what day is it, as HTTP writes it? |
//! | [`proxy_protocol`] | whom does a load balancer's first line name? |

pub mod answer;
pub mod date;
pub mod h1;
mod hex;
pub mod proxy_protocol;
pub mod who;
