//! Request and response bodies, read from a connection frame by frame: the sender is read no faster than the receiver
//! reads.

use super::connections::Activity;
use super::io::ReadHalf;
use super::lazy_timeout::LazyTimeout;
use crate::h1::chunked::{Chunk, Chunks};
use crate::h1::head::Framing;
use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

/// Bytes that are read at a time.
const ROOM: usize = 16 * 1024;

/// The reason a body is incomplete.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BodyError {
    /// The connection failed.
    #[error("the connection failed: {0}")]
    Io(#[from] std::io::Error),
    /// The connection ended too early.
    #[error("the connection was closed before the end of the body")]
    Cut,
    /// Malformed chunks.
    #[error("malformed chunked body")]
    Malformed,
    /// More bytes than are accepted.
    #[error("the body is too large")]
    TooLarge,
    /// The sender stalled.
    #[error("timed out while reading the body")]
    TooSlow,
}

/// The position in a body.
#[derive(Debug)]
pub enum BodyReader {
    /// After the end.
    Done,
    /// The number of bytes left.
    Length(u64),
    /// Within a chunked body.
    Chunked(Chunks),
    /// The body ends with its connection.
    UntilClose,
}

impl BodyReader {
    /// Creates a reader at the start of a body.
    #[must_use]
    pub fn new(framing: Framing) -> Self {
        match framing {
            Framing::None | Framing::Length(0) => Self::Done,
            Framing::Length(length) => Self::Length(length),
            Framing::Chunked => Self::Chunked(Chunks::default()),
            Framing::UntilClose => Self::UntilClose,
        }
    }

    /// Returns whether the whole body was read.
    #[must_use]
    pub const fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    /// Returns the number of bytes left, if known.
    #[must_use]
    pub fn length(&self) -> Option<usize> {
        match self {
            Self::Done => Some(0),
            Self::Length(left) => usize::try_from(*left).ok(),
            Self::Chunked(_) | Self::UntilClose => None,
        }
    }

    /// Returns the number of bytes left as a [`SizeHint`].
    #[must_use]
    pub fn size_hint(&self) -> SizeHint {
        match self {
            Self::Done => SizeHint::with_exact(0),
            Self::Length(left) => SizeHint::with_exact(*left),
            Self::Chunked(_) | Self::UntilClose => SizeHint::default(),
        }
    }

    /// Polls for the next frame.
    pub fn poll(
        &mut self,
        cx: &mut Context<'_>,
        read: &mut ReadHalf,
        buffer: &mut BytesMut,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        loop {
            match self {
                Self::Done => return Poll::Ready(None),
                Self::Length(left) if !buffer.is_empty() => {
                    let take = usize::try_from(*left).unwrap_or(usize::MAX).min(buffer.len());
                    *left -= take as u64;
                    if *left == 0 {
                        *self = Self::Done;
                    }
                    return Poll::Ready(Some(Ok(Frame::data(buffer.split_to(take).freeze()))));
                }
                Self::UntilClose if !buffer.is_empty() => {
                    return Poll::Ready(Some(Ok(Frame::data(buffer.split().freeze()))));
                }
                Self::Length(_) | Self::UntilClose => {}
                Self::Chunked(chunks) => match chunks.read(buffer) {
                    Err(_) => return Poll::Ready(Some(Err(BodyError::Malformed))),
                    Ok(Chunk::Data(data)) => return Poll::Ready(Some(Ok(Frame::data(data)))),
                    Ok(Chunk::End(trailers)) => {
                        *self = Self::Done;
                        return Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))));
                    }
                    Ok(Chunk::Incomplete) => {}
                },
            }
            buffer.reserve(ROOM);
            if ready!(read.poll_fill(cx, buffer))? == 0 {
                if matches!(self, Self::UntilClose) {
                    *self = Self::Done;
                    return Poll::Ready(None);
                }
                return Poll::Ready(Some(Err(BodyError::Cut)));
            }
        }
    }
}

/// The read half of a connection, with its buffer.
#[derive(Debug)]
pub struct BufferedRead {
    /// The read half.
    pub read: ReadHalf,
    /// Bytes that were read and not consumed.
    pub buffer: BytesMut,
}

/// Receives the read half of a connection when the request's body is dropped.
#[derive(Debug, Default)]
pub(super) struct ReadReturn {
    returned: Mutex<Option<(BufferedRead, BodyReader)>>,
    /// The body has been polled: a client that expects `100 Continue` may send it.
    is_wanted: AtomicBool,
    /// The response has begun: the client may wait for it before it sends more.
    is_answered: AtomicBool,
    /// The connection's task while it waits for `is_wanted`; another task (of an HTTP/2 upstream) may poll the body.
    waiting: Mutex<Option<Waker>>,
}

impl ReadReturn {
    pub(super) fn take(&self) -> Option<(BufferedRead, BodyReader)> {
        self.returned.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Returns whether the body is wanted. If not yet, the task is woken when it is.
    pub(super) fn poll_wanted(&self, cx: &mut Context<'_>) -> bool {
        if !self.is_wanted.load(Ordering::Acquire) {
            *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(cx.waker().clone());
        }
        // Checked again: it may have been set before the waker was stored.
        self.is_wanted.load(Ordering::Acquire)
    }

    pub(super) fn set_answered(&self) {
        self.is_answered.store(true, Ordering::Release);
    }

    fn set_wanted(&self) {
        self.is_wanted.store(true, Ordering::Release);
        if let Some(waker) = self.waiting.lock().unwrap_or_else(PoisonError::into_inner).take() {
            waker.wake();
        }
    }
}

/// The body of a request, as a stream. Dropping it returns the connection's read half.
#[derive(Debug)]
pub struct RequestBody {
    source: Option<BufferedRead>,
    reader: BodyReader,
    read_return: Arc<ReadReturn>,
    /// Number of bytes that are still accepted.
    room: u64,
    idle: Duration,
    timeout: LazyTimeout,
    is_polled: bool,
    activity: Arc<Activity>,
    /// Whether the connection counts as waiting for the client.
    is_awaited: bool,
}

impl RequestBody {
    pub(super) fn new(
        source: BufferedRead,
        framing: Framing,
        read_return: Arc<ReadReturn>,
        idle: Duration,
        activity: Arc<Activity>,
    ) -> Self {
        let timeout = LazyTimeout::new(idle);
        Self {
            source: Some(source),
            reader: BodyReader::new(framing),
            read_return,
            room: u64::MAX,
            idle,
            timeout,
            is_polled: false,
            activity,
            is_awaited: false,
        }
    }

    /// Limits the body to `bytes` bytes; reading more fails.
    pub fn limit(&mut self, bytes: u64) {
        self.room = bytes;
    }
}

impl Body for RequestBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let this = self.get_mut();
        let Some(source) = &mut this.source else { return Poll::Ready(None) };
        if !this.is_polled {
            this.is_polled = true;
            this.read_return.set_wanted();
            this.timeout.set(this.idle);
        }
        let polled = this.reader.poll(cx, &mut source.read, &mut source.buffer);
        let is_awaited = polled.is_pending() && !this.read_return.is_answered.load(Ordering::Acquire);
        if is_awaited != this.is_awaited {
            this.is_awaited = is_awaited;
            if this.is_awaited { this.activity.waiting() } else { this.activity.busy() }
        }
        match polled {
            Poll::Ready(Some(Ok(frame))) => {
                let length = frame.data_ref().map_or(0, |data| data.len() as u64);
                let Some(room) = this.room.checked_sub(length) else {
                    return Poll::Ready(Some(Err(BodyError::TooLarge)));
                };
                this.room = room;
                this.timeout.set(this.idle);
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Pending if this.timeout.poll(cx).is_ready() => Poll::Ready(Some(Err(BodyError::TooSlow))),
            other => other,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.reader.is_done()
    }

    fn size_hint(&self) -> SizeHint {
        self.reader.size_hint()
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        if let Some(source) = self.source.take() {
            let reader = std::mem::replace(&mut self.reader, BodyReader::Done);
            *self.read_return.returned.lock().unwrap_or_else(PoisonError::into_inner) =
                Some((source, reader));
        }
    }
}
