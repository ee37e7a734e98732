//! The HTTP/1 server. The HTTP protocol server and the gateway implement its [`Service`] trait, and every listener uses
//! its accept loop.
//!
//! It rejects whatever two parsers could read in two ways, lends its buffers to services instead of building maps and
//! frames, responds to pipelined requests with one write, and has no channel between a connection and its service.
//! Rejected: a general HTTP library, because none has these properties.
//!
//! | file | contents |
//! |---|---|
//! | [`accept`] | the accept loop: back-off, drain |
//! | [`connections`] | how many connections there may be, and which one ends when there is no room |
//! | `serve` | a connection, request after request |
//! | `connection` | byte-level I/O: heads, responses, a close that loses no response |
//! | `service` | the [`Service`] trait |
//! | `body` | reading of bodies |
//! | [`write`] | writing of heads and bodies |
//! | `io` | TCP and TLS connections, split into halves |
//! | `drain`, `lazy_timeout` | graceful shutdown; a timeout that is nearly free to set |

pub mod accept;
mod body;
mod connection;
pub mod connections;
mod drain;
mod io;
mod lazy_timeout;
mod serve;
mod service;
pub mod write;

pub use body::{BodyError, BodyReader, BufferedRead, RequestBody};
pub use connection::Settings;
pub use drain::{Drain, DrainGuard, GRACE_PERIOD};
pub use io::{Io, PrefixedStream, ReadHalf, WriteHalf};
pub use lazy_timeout::LazyTimeout;
pub use serve::serve;
pub use service::{
    BodyMode, NoStream, Payload, Rejection, Request, Response, ResponseBody, Scope, Service, Streamed,
    Upgrade, UpgradeFuture,
};
