//! What HTTP says of a decision and of a caller, and how it is read: shared by every front, layer and gateway that speaks
//! HTTP; and, with the feature `server`, the one HTTP/1 server that they stand on. No handlers, no store.
//!
//! | module | answers |
//! |---|---|
//! | [`response`] | what is a caller told: status, `RateLimit` fields, `Retry-After`, body? |
//! | [`body`], [`problem`] | how is a JSON body decoded, and what is a client told of a mistake? |
//! | [`identity`] | who is asking for what: address, key, user, endpoint? |
//! | [`headers`] | how are header fields looked up, wherever they lie? |
//! | [`h1`] | what has a stranger sent: how are heads and chunks read? |
//! | [`date`] | what day is it, as HTTP writes it? |
//! | [`traceparent`] | which trace is a request part of? |
//! | `server` | how is a connection accepted, read, answered and drained? (feature `server`) |
//! | `tls` | which certificate is active, and whose are trusted? (feature `tls`) |
//! | [`proxy_protocol`] | whom does a load balancer's first line name? |

pub mod body;
pub mod date;
pub mod h1;
pub mod headers;
mod hex;
pub mod identity;
pub mod problem;
pub mod proxy_protocol;
pub mod response;
#[cfg(feature = "server")]
pub mod server;
#[cfg(feature = "tls")]
pub mod tls;
pub mod traceparent;
