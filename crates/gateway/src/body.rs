//! Bodies: a request body from either protocol, and a response body together with what must end when it does.

use crate::completion::Completion;
use crate::config::UpstreamProtocol;
use crate::h1::exchange::UpstreamBody;
use crate::h2::RequestProgress;
use crate::headers::ProtectedHeaders;
use crate::place::SharedPlace;
use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tollgate_http::h1::chunked::drop_forbidden;
use tollgate_http::server::{self, LazyTimeout, RequestBody, ResponseBody};

/// Why a body is incomplete.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BodyError {
    #[error(transparent)]
    Message(#[from] server::BodyError),
    #[error("HTTP/2 stream failed: {0}")]
    Stream(#[from] hyper::Error),
    #[error("the upstream is overloaded: no place in flight became free for the end of the body")]
    NoPlace,
}

/// A request body.
pub(crate) struct ClientBody {
    source: ClientBodySource,
    /// Headers that are removed from its trailers.
    guard: Option<Arc<ProtectedHeaders>>,
    /// The request's place in flight, given back while the client's bytes are awaited.
    place: Option<Arc<SharedPlace>>,
    /// How long its end waits for the place, and the end that waits.
    wait: Duration,
    waiting: Option<(Box<NextFrame>, LazyTimeout)>,
    /// Whether the upstream has the whole request with the last byte of the stated length, before the client ends its stream.
    ends_by_length: bool,
}

type NextFrame = Option<Result<Frame<Bytes>, BodyError>>;

enum ClientBodySource {
    H1(RequestBody),
    H2(StreamBody),
}

/// Body of a request or a response over HTTP/2.
pub(crate) struct StreamBody {
    body: hyper::body::Incoming,
    room: u64,
    idle: Duration,
    timeout: LazyTimeout,
    /// Of a client's request.
    progress: Option<Arc<RequestProgress>>,
}

impl StreamBody {
    pub(crate) fn new(body: hyper::body::Incoming, idle: Duration) -> Self {
        Self { body, room: u64::MAX, idle, timeout: LazyTimeout::new(idle), progress: None }
    }

    /// Reports when the body waits for its sender.
    pub(crate) fn with_progress(self, progress: Arc<RequestProgress>) -> Self {
        Self { progress: Some(progress), ..self }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let polled = Pin::new(&mut self.body).poll_frame(cx);
        if let Some(progress) = &self.progress {
            if polled.is_pending() { progress.awaited() } else { progress.arrived() }
        }
        match polled {
            Poll::Ready(Some(Ok(frame))) => {
                let length = frame.data_ref().map_or(0, |data| data.len() as u64);
                let Some(room) = self.room.checked_sub(length) else {
                    return Poll::Ready(Some(Err(server::BodyError::TooLarge.into())));
                };
                self.room = room;
                self.timeout.set(self.idle);
                Poll::Ready(Some(Ok(with_trailers(frame, drop_forbidden))))
            }
            Poll::Ready(other) => Poll::Ready(other.map(|result| result.map_err(BodyError::Stream))),
            Poll::Pending if self.timeout.poll(cx).is_ready() => {
                // While the response goes on, a client may have nothing to send, as on a stream in both directions.
                if self.progress.as_ref().is_some_and(|progress| progress.is_answered()) {
                    self.timeout.set(self.idle);
                    if self.timeout.poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                }
                Poll::Ready(Some(Err(server::BodyError::TooSlow.into())))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

/// Applies a change to the trailers of a frame, if it has any.
fn with_trailers(frame: Frame<Bytes>, change: impl FnOnce(&mut HeaderMap)) -> Frame<Bytes> {
    match frame.into_trailers() {
        Ok(mut trailers) => {
            change(&mut trailers);
            Frame::trailers(trailers)
        }
        Err(frame) => frame,
    }
}

impl ClientBody {
    pub(crate) fn h1(body: RequestBody) -> Self {
        Self::new(ClientBodySource::H1(body))
    }

    pub(crate) fn h2(body: StreamBody) -> Self {
        Self::new(ClientBodySource::H2(body))
    }

    fn new(source: ClientBodySource) -> Self {
        Self { source, guard: None, place: None, wait: Duration::ZERO, waiting: None, ends_by_length: false }
    }

    /// Gives this place back while the body waits for its client. The end of the body then waits for it, at most this long.
    pub(crate) fn hold(&mut self, place: Arc<SharedPlace>, wait: Duration, upstream: UpstreamProtocol) {
        (self.place, self.wait) = (Some(place), wait);
        self.ends_by_length = upstream == UpstreamProtocol::Http1;
    }

    fn poll_source(&mut self, cx: &mut Context<'_>) -> Poll<NextFrame> {
        match &mut self.source {
            ClientBodySource::H1(body) => Pin::new(body)
                .poll_frame(cx)
                .map(|frame| frame.map(|frame| frame.map_err(BodyError::Message))),
            ClientBodySource::H2(body) => body.poll(cx),
        }
    }

    fn is_at_end(&self) -> bool {
        match &self.source {
            ClientBodySource::H1(body) => body.is_end_stream(),
            ClientBodySource::H2(body) => body.body.is_end_stream(),
        }
    }

    /// Returns whether the upstream needs nothing more to work on the request. A client over HTTP/2 may leave its stream open
    /// after the last byte.
    fn is_whole(&self) -> bool {
        match &self.source {
            ClientBodySource::H2(body) if self.ends_by_length && body.body.size_hint().exact() == Some(0) => {
                true
            }
            _ => self.is_at_end(),
        }
    }

    /// Returns the next frame as it arrives, and the last when the request has its place again.
    fn poll_with_place(&mut self, cx: &mut Context<'_>) -> Poll<NextFrame> {
        let (next, mut timeout) = match self.waiting.take() {
            Some((next, timeout)) => (*next, Some(timeout)),
            None => match self.poll_source(cx) {
                Poll::Ready(next) => (next, None),
                Poll::Pending => {
                    if let Some(place) = self.place.as_ref().filter(|_| !self.is_whole()) {
                        place.pause();
                    }
                    return Poll::Pending;
                }
            },
        };
        let Some(place) = &self.place else { return Poll::Ready(next) };
        if matches!(next, Some(Err(_))) {
            return Poll::Ready(next);
        }
        if next.is_some() && !self.is_whole() {
            place.try_resume();
            return Poll::Ready(next);
        }
        if place.poll_resume(cx).is_ready() {
            return Poll::Ready(next);
        }
        let wait = timeout.get_or_insert_with(|| LazyTimeout::new(self.wait));
        if wait.poll(cx).is_ready() {
            return Poll::Ready(Some(Err(BodyError::NoPlace)));
        }
        self.waiting = timeout.map(|timeout| (Box::new(next), timeout));
        Poll::Pending
    }

    /// Limits the body to `bytes`, and removes protected headers from its trailers.
    pub(crate) fn limit(&mut self, bytes: u64, guard: Arc<ProtectedHeaders>) {
        self.guard = Some(guard);
        match &mut self.source {
            ClientBodySource::H1(body) => body.limit(bytes),
            ClientBodySource::H2(body) => body.room = bytes,
        }
    }
}

impl Body for ClientBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let body = self.get_mut();
        let polled = body.poll_with_place(cx);
        let guarded = |frame| match &body.guard {
            Some(guard) => with_trailers(frame, |trailers| guard.clean(trailers)),
            None => frame,
        };
        polled.map(|frame| frame.map(|frame| frame.map(guarded)))
    }

    fn is_end_stream(&self) -> bool {
        self.waiting.is_none() && self.is_at_end()
    }

    fn size_hint(&self) -> SizeHint {
        if self.waiting.is_some() {
            return SizeHint::default();
        }
        match &self.source {
            ClientBodySource::H1(body) => body.size_hint(),
            ClientBodySource::H2(body) => body.body.size_hint(),
        }
    }
}

/// Source of a response body.
pub(crate) enum ResponseSource {
    Local(Bytes),
    H1(UpstreamBody),
    H2 { body: StreamBody, _in_flight: crate::pool::InFlight },
}

/// A response body.
pub(crate) struct ProxiedBody {
    pub(crate) source: ResponseSource,
    /// What ends with the body.
    pub(crate) completion: Option<Box<Completion>>,
}

impl ProxiedBody {
    pub(crate) fn local(bytes: Bytes) -> Self {
        Self { source: ResponseSource::Local(bytes), completion: None }
    }

    /// Starts the idle timeout, for a reader that polls frame by frame.
    pub(crate) fn start(&mut self) {
        if let ResponseSource::H1(body) = &mut self.source {
            body.start();
        }
    }
}

impl ResponseBody for ProxiedBody {
    fn take_short(&mut self, max: usize, out: &mut BytesMut) -> bool {
        let before = out.len();
        let is_taken = match &mut self.source {
            ResponseSource::Local(bytes) if bytes.len() <= max => {
                out.extend_from_slice(bytes);
                true
            }
            ResponseSource::H1(body) => body.take_short(max, out),
            ResponseSource::Local(_) | ResponseSource::H2 { .. } => false,
        };
        if let Some(finish) = self.completion.as_mut().filter(|_| is_taken) {
            finish.received(out.len() - before);
            finish.completed();
        }
        is_taken
    }

    fn skip(mut self) {
        if let Some(finish) = &mut self.completion {
            finish.completed();
        }
    }
}

impl Body for ProxiedBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        let polled = match &mut this.source {
            ResponseSource::Local(bytes) if bytes.is_empty() => Poll::Ready(None),
            ResponseSource::Local(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            ResponseSource::H1(body) => body.poll(cx),
            ResponseSource::H2 { body, .. } => body.poll(cx),
        };
        if this.completion.is_none() {
            return polled;
        }
        let ends = matches!(polled, Poll::Ready(None)) || this.is_end_stream();
        let Some(finish) = &mut this.completion else { return polled };
        match &polled {
            Poll::Pending => finish.awaits_upstream(),
            Poll::Ready(frame) => {
                match frame {
                    Some(Ok(frame)) => finish.received(frame.data_ref().map_or(0, Bytes::len)),
                    Some(Err(error)) => finish.failed(error),
                    None => {}
                }
                if ends {
                    finish.completed();
                }
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        match &self.source {
            ResponseSource::Local(bytes) => bytes.is_empty(),
            ResponseSource::H1(body) => body.is_end_stream(),
            ResponseSource::H2 { body, .. } => body.body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.source {
            ResponseSource::Local(bytes) => SizeHint::with_exact(bytes.len() as u64),
            ResponseSource::H1(body) => body.size_hint(),
            ResponseSource::H2 { body, .. } => body.body.size_hint(),
        }
    }
}
