//! The one HTTP/1 server: the HTTP front and the gateway are [`Service`]s on it, and every listener accepts by it.
//!
//! Our own rather than a general library's: it rejects whatever two readers could read in two ways, lends its buffers to
//! services instead of building maps and frames, answers pipelined requests with one write, and has no channel between a
//! connection and its user.
//!
//! | file | contains |
//! |---|---|
//! | [`accept`] | the accept loop: connection slots, back-off, drain |
//! | `serve` | a connection, request after request |
//! | `connection` | its bytes: heads that come, responses that go, a close that loses none of them |
//! | `service` | what a server does with its requests |
//! | `body` | bodies as they are read |
//! | [`write`] | heads and bodies as they are written |
//! | `io` | TCP and TLS, in halves |
//! | `drain`, `lazy_timeout` | shutting down; a timeout that costs next to nothing |

pub mod accept;
mod body;
mod connection;
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
