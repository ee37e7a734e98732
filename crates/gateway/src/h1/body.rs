//! Bodies as they come from a connection: pulled frame by frame, so that nobody is read faster than the other reads.

use crate::io::ReadHalf;
use bytes::{Bytes, BytesMut};
use http_body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::Notify;
use tollgate_edge::h1::chunked::{Chunk, Chunks};
use tollgate_edge::h1::head::Framing;
use tollgate_front::serving::alarm::Alarm;

/// How much is read at once.
const ROOM: usize = 16 * 1024;

/// Why a body did not come to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BodyError {
    #[error("the connection failed: {0}")]
    Io(#[from] std::io::Error),
    #[error("the connection ended in the middle of the body")]
    Cut,
    #[error("the chunks of the body are malformed")]
    Malformed,
    #[error("the body is larger than is passed on here")]
    TooLarge,
    #[error("no byte of the body came for too long")]
    TooSlow,
    #[error("the HTTP/2 stream failed: {0}")]
    Stream(#[from] hyper::Error),
}

/// Where in a body the reader stands.
pub(crate) enum Reader {
    Done,
    Length(u64),
    Chunked(Chunks),
    UntilClose,
}

impl Reader {
    pub(crate) fn new(framing: Framing) -> Self {
        match framing {
            Framing::None | Framing::Length(0) => Self::Done,
            Framing::Length(length) => Self::Length(length),
            Framing::Chunked => Self::Chunked(Chunks::default()),
            Framing::UntilClose => Self::UntilClose,
        }
    }

    pub(crate) const fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    /// Bytes that are left, where that is known.
    pub(crate) fn length(&self) -> Option<usize> {
        match self {
            Self::Done => Some(0),
            Self::Length(left) => usize::try_from(*left).ok(),
            Self::Chunked(_) | Self::UntilClose => None,
        }
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        match self {
            Self::Done => SizeHint::with_exact(0),
            Self::Length(left) => SizeHint::with_exact(*left),
            Self::Chunked(_) | Self::UntilClose => SizeHint::default(),
        }
    }

    /// The next frame.
    pub(crate) fn poll(
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

/// What a connection is read from, with what has been read already.
pub(crate) struct Source {
    pub(crate) read: ReadHalf,
    pub(crate) buffer: BytesMut,
}

/// Where a request's body leaves its source when it is done with it.
#[derive(Default)]
pub(crate) struct Home {
    returned: Mutex<Option<(Source, Reader)>>,
    /// The body is wanted: a caller that waits to be told may send it.
    pub(crate) wanted: Notify,
}

impl Home {
    pub(crate) fn take(&self) -> Option<(Source, Reader)> {
        self.returned.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The body of a request that came by HTTP/1.
pub(crate) struct RequestBody {
    source: Option<Source>,
    reader: Reader,
    home: Arc<Home>,
    /// Bytes that may still come.
    room: u64,
    idle: Duration,
    alarm: Alarm,
    touched: bool,
}

impl RequestBody {
    pub(crate) fn new(source: Source, framing: Framing, home: Arc<Home>, idle: Duration) -> Self {
        let alarm = Alarm::after(idle);
        Self {
            source: Some(source),
            reader: Reader::new(framing),
            home,
            room: u64::MAX,
            idle,
            alarm,
            touched: false,
        }
    }

    /// Passes on at most so many bytes.
    pub(crate) fn limit(&mut self, bytes: u64) {
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
        if !this.touched {
            this.touched = true;
            this.home.wanted.notify_one();
            this.alarm.set(this.idle);
        }
        match this.reader.poll(cx, &mut source.read, &mut source.buffer) {
            Poll::Ready(Some(Ok(frame))) => {
                let length = frame.data_ref().map_or(0, |data| data.len() as u64);
                let Some(room) = this.room.checked_sub(length) else {
                    return Poll::Ready(Some(Err(BodyError::TooLarge)));
                };
                this.room = room;
                this.alarm.set(this.idle);
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Pending if this.alarm.poll(cx).is_ready() => Poll::Ready(Some(Err(BodyError::TooSlow))),
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
            let reader = std::mem::replace(&mut self.reader, Reader::Done);
            *self.home.returned.lock().unwrap_or_else(PoisonError::into_inner) = Some((source, reader));
        }
    }
}
