//! A call of a tonic service: a request and a response whose bodies are streams.
//!
//! The body of the request goes through an inbox, whose length the window of the stream bounds: a service that reads slowly
//! slows its client down. The body of the response is polled while the client reads it.

use super::message::{self, MessageEnds};
use bytes::{Buf, Bytes, BytesMut};
use http_body::{Body as _, Frame};
use std::convert::Infallible;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use tollgate_http::h2::{Connection, Head, Reason};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::http::uri::{Authority, PathAndQuery};
use tonic::codegen::http::{Method, Request, Response, Uri, Version};

/// How many bytes of a response may wait for the client.
const MAX_QUEUED: usize = 64 << 10;
/// How many bytes of a request are read before the client may send more.
const RELEASE: usize = 16 << 10;

/// What tonic's services read of a head.
const FIELDS: &[&str] = &["content-type", "te", "grpc-encoding", "grpc-accept-encoding", "grpc-timeout"];

/// A service's future of a response.
pub(super) type ResponseFuture = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

/// A call in progress.
pub(super) struct Exchange {
    state: State,
    inbox: Inbox,
    /// It is among those that wait for the client.
    pub(super) is_blocked: bool,
}

enum State {
    Calling(ResponseFuture),
    Sending(Body),
}

/// What an exchange waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The service, which wakes it.
    Service,
    /// The client, which must read what is queued.
    Client,
    /// Nothing: it is over.
    Done,
}

impl Exchange {
    pub(super) const fn new(response: ResponseFuture, inbox: Inbox) -> Self {
        Self { state: State::Calling(response), inbox, is_blocked: false }
    }

    /// Returns whether the service has not begun its response.
    pub(super) const fn is_calling(&self) -> bool {
        matches!(self.state, State::Calling(_))
    }

    /// Returns whether all of the request has arrived.
    pub(super) fn has_request(&self) -> bool {
        self.inbox.is_complete()
    }

    /// Sends what there is of the response, and lets the client send what was read of the request.
    pub(super) fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        http2: &mut Connection<T>,
        stream: u32,
    ) -> Progress {
        let progress = self.poll_response(cx, http2, stream);
        http2.release(stream, std::mem::take(&mut self.inbox.lock().read));
        progress.unwrap_or(Progress::Service)
    }

    fn poll_response<T>(
        &mut self,
        cx: &mut Context<'_>,
        http2: &mut Connection<T>,
        stream: u32,
    ) -> Option<Progress> {
        if let State::Calling(response) = &mut self.state {
            let Some(polled) = catch_panic(|| response.as_mut().poll(cx)) else {
                drop(http2.reset(stream, Reason::Internal));
                return Some(Progress::Done);
            };
            let Poll::Ready(Ok(response)) = polled else { return None };
            let head = message::head(&response);
            let body = response.into_body();
            if body.is_end_stream() {
                http2.send_only_head(stream, &head);
                return Some(Progress::Done);
            }
            http2.send_head(stream, &head);
            self.state = State::Sending(body);
        }
        let State::Sending(body) = &mut self.state else { return None };
        loop {
            match http2.queued(stream) {
                None => return Some(Progress::Done),
                Some(queued)
                    if queued >= MAX_QUEUED
                        || http2.is_queue_full()
                        || http2.unsent().len() >= MAX_QUEUED =>
                {
                    return Some(Progress::Client);
                }
                Some(_) => {}
            }
            let Some(polled) = catch_panic(|| Pin::new(&mut *body).poll_frame(cx)) else {
                drop(http2.reset(stream, Reason::Internal));
                return Some(Progress::Done);
            };
            let Poll::Ready(frame) = polled else { return None };
            match frame.map(|frame| frame.map(Frame::into_data)) {
                None => http2.send_end(stream, None),
                Some(Ok(Ok(mut data))) => {
                    let bytes = data.copy_to_bytes(data.remaining());
                    http2.send_data(stream, &bytes);
                    continue;
                }
                Some(Ok(Err(other))) => {
                    let Ok(fields) = other.into_trailers() else { continue };
                    http2.send_end(stream, Some(&message::trailers(&fields)));
                }
                Some(Err(_)) => drop(http2.reset(stream, Reason::Internal)),
            }
            return Some(Progress::Done);
        }
    }
}

/// Calls a service; `None` if it panics. The other calls of the connection go on.
pub(super) fn catch_panic<T>(call: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(call)).ok()
}

/// A service that still reads learns that no more comes.
impl Drop for Exchange {
    fn drop(&mut self) {
        self.inbox.end(Ending::Reset);
    }
}

/// Returns the request that a head describes; `None` if its target is not one.
pub(super) fn request(head: &Head, body: RequestBody) -> Option<Request<Body>> {
    let path = PathAndQuery::try_from(head.path()).ok()?;
    let mut uri = Uri::builder().path_and_query(path);
    // No service reads it, and some clients send what is none: the path of a Unix socket, or the name of a cluster.
    if let Ok(authority) = Authority::try_from(head.authority()) {
        uri = uri.scheme("http").authority(authority);
    }
    let mut request = Request::new(Body::new(body));
    *request.method_mut() = Method::from_bytes(head.method()).ok()?;
    *request.uri_mut() = uri.build().ok()?;
    *request.version_mut() = Version::HTTP_2;
    *request.headers_mut() = head.to_map_of(FIELDS);
    Some(request)
}

/// The part of a request's body that has arrived and was not read.
#[derive(Clone)]
pub(super) struct Inbox(Arc<Mutex<Arrived>>);

struct Arrived {
    /// One buffer: a client may cut a body into single bytes.
    unread: BytesMut,
    ends: MessageEnds,
    /// A whole message has arrived.
    has_message: bool,
    ending: Option<Ending>,
    reader: Option<Waker>,
    /// Bytes that were read and that the client may send again.
    read: usize,
    /// Wakes the exchange.
    exchange: Waker,
}

/// How a body ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// All of it has arrived.
    Complete,
    /// No more comes.
    Reset,
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(Arrived {
            unread: BytesMut::new(),
            ends: MessageEnds::default(),
            has_message: false,
            ending: None,
            reader: None,
            read: 0,
            exchange: Waker::noop().clone(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Arrived> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the body that reads from it.
    pub(super) fn body(&self) -> RequestBody {
        RequestBody(self.clone())
    }

    /// Sets what wakes the exchange.
    pub(super) fn set_exchange(&self, waker: &Waker) {
        self.lock().exchange = waker.clone();
    }

    /// Adds a part. Returns whether a message ends in it.
    pub(super) fn push(&self, bytes: &[u8]) -> bool {
        let mut arrived = self.lock();
        if !bytes.is_empty() {
            arrived.unread.extend_from_slice(bytes);
            arrived.wake_reader();
        }
        let has_ended = arrived.ends.push(bytes);
        arrived.has_message |= has_ended;
        has_ended
    }

    /// Returns whether a whole message has arrived.
    pub(super) fn has_message(&self) -> bool {
        self.lock().has_message
    }

    /// Returns whether all of the request has arrived.
    pub(super) fn is_complete(&self) -> bool {
        self.lock().ending == Some(Ending::Complete)
    }

    /// Ends the body, if it has not ended.
    pub(super) fn end(&self, ending: Ending) {
        let mut arrived = self.lock();
        arrived.ending.get_or_insert(ending);
        arrived.wake_reader();
    }
}

impl Arrived {
    fn wake_reader(&mut self) {
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }
}

/// The body of a request, as a service reads it.
pub(super) struct RequestBody(Inbox);

impl http_body::Body for RequestBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let mut arrived = self.0.lock();
        let part = std::mem::take(&mut arrived.unread).freeze();
        if part.is_empty() {
            return match arrived.ending {
                Some(Ending::Complete) => Poll::Ready(None),
                Some(Ending::Reset) => {
                    Poll::Ready(Some(Err(Status::cancelled("the client has ended the call"))))
                }
                None => {
                    arrived.reader = Some(cx.waker().clone());
                    Poll::Pending
                }
            };
        }
        arrived.read += part.len();
        // It may be read by another task than the exchange's.
        if arrived.read >= RELEASE {
            arrived.exchange.wake_by_ref();
        }
        Poll::Ready(Some(Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        let arrived = self.0.lock();
        arrived.unread.is_empty() && arrived.ending == Some(Ending::Complete)
    }
}
