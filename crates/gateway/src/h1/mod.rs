//! HTTP/1.1 on both sides of the gateway. The client's side is [`tollgate_http::server`], on which `session` is the service;
//! the upstream's side is `exchange`. Heads are copied from the bytes of one connection into those of the other.
//!
//! | file | contains |
//! |---|---|
//! | `session` | a client's connection: requests for the proxy |
//! | `exchange` | one exchange on an upstream's connection |
//! | `tunnel` | a connection that has stopped speaking HTTP |

pub(crate) mod exchange;
mod session;
pub(crate) mod tunnel;

pub(crate) use session::Session;
