//! HTTP/1.1 on both sides of the gateway. The client side is [`tollgate_http::server`] with `session` as its service; the
//! upstream side is `exchange`. Heads are copied from the bytes of one connection into those of the other.
//!
//! | module | contents |
//! |---|---|
//! | `session` | a client connection: passes its requests to the proxy |
//! | `exchange` | one exchange on an upstream connection |
//! | `tunnel` | a connection after a protocol switch |

pub(crate) mod exchange;
mod session;
pub(crate) mod tunnel;

pub(crate) use session::Session;
