//! HTTP/1.1, both sides of it, made for passing messages on: heads are read strictly, bodies are never gathered.
//!
//! Our own rather than a general library's: what counts here is what is refused, and a proxy that reads a request and
//! writes it on within one task needs no channel between a connection and its user. Heads and chunks are read by
//! [`tollgate_edge::h1`].
//!
//! | file | does |
//! |---|---|
//! | `body` | bodies as they come from a connection |
//! | `write` | heads and bodies as they go into one |
//! | `line` | a caller's connection, as bytes: a head that comes, an answer that goes |
//! | `server` | what is done there, request after request |
//! | `straight` | the usual request's way to the upstream and back |
//! | `client` | one exchange on an upstream's connection |
//! | `tunnel` | a connection that has stopped speaking HTTP |

pub(crate) mod body;
pub(crate) mod client;
mod line;
mod server;
mod straight;
pub(crate) mod tunnel;
pub(crate) mod write;

pub(crate) use line::Settings;
pub(crate) use server::serve;
