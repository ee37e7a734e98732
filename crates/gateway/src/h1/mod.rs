//! HTTP/1.1 on both sides of the gateway. The client's side is [`tollgate_http::server`], on which `session` is the service;
//! the upstream's side is `client`. Heads are copied from the bytes of one connection into those of the other.
//!
//! | file | contains |
//! |---|---|
//! | `session` | a client's connection: requests for the proxy |
//! | `client` | one exchange on an upstream's connection |
//! | `tunnel` | a connection that has stopped speaking HTTP |

pub(crate) mod client;
mod session;
pub(crate) mod tunnel;

pub(crate) use session::Session;
