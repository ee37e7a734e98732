//! The service trait, which the HTTP protocol server and the gateway implement to handle requests of a connection.
//!
//! A service borrows the head from the connection's buffer. It returns either a complete response, which the connection
//! writes, or the fields of a response whose body the connection streams. The connection polls the future of
//! [`Service::handle`]; while it is pending, earlier responses are sent, and a disconnect of the client drops it.
//! Rejected: separate functions for requests that never wait, because two paths to a response drift apart.

use super::body::{BufferedRead, RequestBody};
use super::io::WriteHalf;
use super::lazy_timeout::LazyTimeout;
use crate::h1::head::{HeadError, HeadLimits};
use crate::h1::{RawResponse, ScannedHead};
use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http_body::{Body, Frame};
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Serves the requests of one connection.
pub trait Service: Send + Sync {
    /// A parsed head.
    type Head: AsRef<ScannedHead> + Send + Sync;
    /// A streamed response body; [`NoStream`] for services that never stream.
    type Body: ResponseBody;

    /// Parses a complete head.
    ///
    /// # Errors
    /// [`HeadError`] for a head that is rejected.
    fn parse(&self, head: &[u8], limits: &HeadLimits) -> Result<Self::Head, HeadError>;

    /// Returns what to do with the body of a request that has one.
    fn body_mode(&self, head: &Self::Head, bytes: &[u8]) -> BodyMode;

    /// Serves a request.
    fn handle<'r>(
        &'r self,
        request: Request<'r, Self::Head>,
        scope: Scope<'r>,
    ) -> impl Future<Output = Response<Self::Body>> + Send;

    /// Returns the response to a request that is rejected.
    fn reject(&self, rejection: Rejection) -> RawResponse;
}

/// A request.
#[derive(Debug)]
pub struct Request<'r, H> {
    /// Its parsed head.
    pub head: &'r H,
    /// The bytes of the head.
    pub bytes: &'r [u8],
    /// Its body.
    pub body: Payload<'r>,
}

/// A request's body, as the service receives it.
#[derive(Debug)]
pub enum Payload<'r> {
    /// No body, or one that the service skips.
    None,
    /// The complete body.
    Whole(&'r [u8]),
    /// The body as a stream.
    Stream(RequestBody),
}

impl<'r> Payload<'r> {
    /// Returns the bytes of a complete body; otherwise an empty slice.
    #[must_use]
    pub const fn whole(&self) -> &'r [u8] {
        match self {
            Self::Whole(bytes) => bytes,
            Self::None | Self::Stream(_) => &[],
        }
    }
}

/// How a request's body is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyMode {
    /// Read all of it first, up to `max` bytes.
    Whole {
        /// Maximum size in bytes.
        max: usize,
    },
    /// Pass it to the service as a stream.
    Stream,
    /// Respond first, then discard it.
    Skip,
}

/// The parts of a connection that a service may use while it handles one request.
#[derive(Debug)]
pub struct Scope<'r> {
    /// The buffer for the status line and the fields of a streamed response. The connection itself writes the framing
    /// and `connection` fields.
    pub out: &'r mut BytesMut,
    /// The timeout of the connection's task.
    pub timeout: &'r mut LazyTimeout,
}

/// A response.
#[derive(Debug)]
pub enum Response<B> {
    /// A complete response.
    Whole(RawResponse),
    /// The status line and the fields were written to [`Scope::out`]; the body follows.
    Stream(Streamed<B>),
    /// The head was written to [`Scope::out`]; after it the connection switches to another protocol.
    Upgrade(Upgrade),
}

/// A response whose body is streamed.
#[derive(Debug)]
pub struct Streamed<B> {
    /// The status.
    pub status: StatusCode,
    /// `Content-Length` of a response that is sent without its body (`HEAD`, 304).
    pub stated_length: Option<u64>,
    /// The body.
    pub body: B,
}

/// Takes over a connection after an upgrade.
pub struct Upgrade(pub Box<dyn FnOnce(BufferedRead, WriteHalf) -> UpgradeFuture + Send>);

/// Runs until the connection ends.
pub type UpgradeFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

impl std::fmt::Debug for Upgrade {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Upgrade")
    }
}

/// The body of a response.
pub trait ResponseBody: Body<Data = Bytes> + Unpin + Send {
    /// Appends the body to `out` if its length is known, at most `max`, and all of it is available; otherwise returns
    /// false and appends nothing. Called once, before the body is polled.
    fn take_short(&mut self, max: usize, out: &mut BytesMut) -> bool;

    /// Ends a body that is not sent (`HEAD`, 204, 304).
    fn skip(self);
}

/// The body of services that never stream.
#[derive(Clone, Copy, Debug)]
pub enum NoStream {}

impl Body for NoStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        match *self {}
    }
}

impl ResponseBody for NoStream {
    fn take_short(&mut self, _: usize, _: &mut BytesMut) -> bool {
        match *self {}
    }

    fn skip(self) {}
}

/// The reason a request is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejection {
    /// The head is ambiguous, malformed or too large.
    Head(HeadError),
    /// The head did not arrive in time.
    SlowHead,
    /// The body did not arrive in time.
    SlowBody,
    /// The chunked body is malformed.
    Chunks,
    /// The body has more than `max` bytes.
    TooLarge {
        /// Maximum size in bytes.
        max: usize,
    },
}
