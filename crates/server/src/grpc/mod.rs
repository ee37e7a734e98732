//! The gRPC server, on Tollgate's own HTTP/2 ([`tollgate_http::h2`]): a connection is one task, which reads what has arrived,
//! begins all calls in it, and writes all responses at once. A call that is decided without waiting needs no task, no
//! channel and no memory of its own.
//!
//! One method is called for nearly every request, and is served from the bytes of the connection ([`Unary`]). All others
//! (health, reflection, quota streams) are tonic's services, each an [`Exchange`](exchange) of a request and a response whose
//! bodies are streams.
//!
//! Rejected: tonic's server, for the method that counts. hyper, h2 and tonic each put a request into a box, a task or a
//! channel; together they cost several times the decision.
//!
//! | file | contents |
//! |---|---|
//! | `connection` | a connection: reads, calls (`requests`, `incomplete` messages, `responses`), writes, time (`timers`) |
//! | `calls` | the calls in progress, and which of them can go on |
//! | [`exchange`] | a call of a tonic service |
//! | `message` | messages with their length; `grpc-timeout`; statuses as header blocks |

mod calls;
mod connection;
mod exchange;
mod message;

pub(crate) use connection::{Settings, serve};

use std::future::Future;
use tollgate_http::h2::Head;
use tonic::Status;

/// A method with one message each way, which is called for nearly every request.
pub(crate) trait Unary: Send + Sync + 'static {
    /// Its path.
    const PATH: &'static str;
    /// What is kept of a request's head until its message has arrived.
    type Opening: Send;
    /// A decoded request.
    type Request: Send;
    /// The response.
    type Response: prost::Message;

    /// Reads the head of a request.
    fn open(&self, head: &Head) -> Self::Opening;

    /// Returns how many bytes an opening keeps of its head.
    fn kept(opening: &Self::Opening) -> usize;

    /// Decodes a message.
    ///
    /// # Errors
    /// The message is malformed.
    fn decode(&self, opening: Self::Opening, message: &[u8]) -> Result<Self::Request, Status>;

    /// Answers a request. Dropping the future means that its client has left.
    fn call(&self, request: Self::Request) -> impl Future<Output = Result<Self::Response, Status>> + Send;
}
