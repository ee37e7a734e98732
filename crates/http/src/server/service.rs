//! What a server does with its requests: the trait between the connection and the HTTP front or the gateway.
//!
//! A service sees a head where it lies in the connection's buffer. It returns either a whole response, which the
//! connection writes, or the fields of one whose body the connection streams. The connection polls the one future of
//! [`Service::handle`]; if it is pending, the responses before it are sent, and a client that leaves drops it. Separate
//! functions for requests that need not wait were rejected: two ways to a response drift apart.

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
    /// A response body that is streamed; [`NoStream`] where there is none.
    type Body: ResponseBody;

    /// Parses a whole head.
    ///
    /// # Errors
    /// [`HeadError`] for a head that is not served.
    fn parse(&self, head: &[u8], limits: &HeadLimits) -> Result<Self::Head, HeadError>;

    /// Returns what to do with the body of a request that has one.
    fn body_mode(&self, head: &Self::Head, bytes: &[u8]) -> BodyMode;

    /// Serves a request.
    fn handle<'r>(
        &'r self,
        request: Request<'r, Self::Head>,
        scope: Scope<'r>,
    ) -> impl Future<Output = Response<Self::Body>> + Send;

    /// The response to a client whose request cannot be served.
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

/// What a service gets of a request's body.
#[derive(Debug)]
pub enum Payload<'r> {
    /// There is none, or the service skips it.
    None,
    /// All of it.
    Whole(&'r [u8]),
    /// A stream.
    Stream(RequestBody),
}

impl<'r> Payload<'r> {
    /// The bytes of a body that was read whole; none otherwise.
    #[must_use]
    pub const fn whole(&self) -> &'r [u8] {
        match self {
            Self::Whole(bytes) => bytes,
            Self::None | Self::Stream(_) => &[],
        }
    }
}

/// What to do with a request's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyMode {
    /// Read all of it first, up to `max` bytes.
    Whole {
        /// The largest body that is read.
        max: usize,
    },
    /// Pass it to the service as a stream.
    Stream,
    /// Respond first, then discard it.
    Skip,
}

/// What a connection lends to a service for the time of one request.
#[derive(Debug)]
pub struct Scope<'r> {
    /// Where the status line and the fields of a streamed response are written. How its body is delimited, and whether the
    /// connection ends, are the connection's to write.
    pub out: &'r mut BytesMut,
    /// The timeout of the connection's task.
    pub timeout: &'r mut LazyTimeout,
}

/// A response.
#[derive(Debug)]
pub enum Response<B> {
    /// All of it.
    Whole(RawResponse),
    /// The status line and the fields were written to [`Scope::out`]; the body follows.
    Stream(Streamed<B>),
    /// The same, but the connection stops speaking HTTP.
    Upgrade(Upgrade),
}

/// A response whose body is streamed.
#[derive(Debug)]
pub struct Streamed<B> {
    /// Its status.
    pub status: StatusCode,
    /// The length that the head of a response without a body states (`HEAD`, 304).
    pub stated_length: Option<u64>,
    /// Its body.
    pub body: B,
}

/// Takes over a connection that has stopped speaking HTTP.
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
    /// Appends the whole body to `out` if its length is known, at most `max`, and all of it is here; otherwise returns false
    /// and appends nothing. Called once, before the body is polled.
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

/// Why a request is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejection {
    /// Its head is ambiguous, malformed or too large.
    Head(HeadError),
    /// Its head did not arrive in time.
    SlowHead,
    /// Its body did not arrive in time.
    SlowBody,
    /// Its chunks are malformed.
    Chunks,
    /// Its body has more than `max` bytes.
    TooLarge {
        /// The largest body that is read.
        max: usize,
    },
}
