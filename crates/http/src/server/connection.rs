//! Byte-level I/O of a client's connection: waits for a head, writes responses, closes without losing the last
//! response.
//!
//! Responses are gathered and sent in one write when no complete request is left to serve. Nothing is read while
//! responses are unsent, so a client that does not read delays only itself. An idle connection has no buffers.

use super::body::{BodyError, BodyReader, BufferedRead, ReadReturn};
use super::connections::Activity;
use super::drain::{Drain, GRACE_PERIOD};
use super::io::WriteHalf;
use super::lazy_timeout::LazyTimeout;
use super::service::ResponseBody;
use super::write::{self, Frames};
use crate::h1::head::{self, HeadError, HeadLimits};
use bytes::{Buf, Bytes, BytesMut};
use http_body::Frame;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::Sleep;
use tollgate_core::SystemClock;

/// Limits and timeouts of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Size limits of a head.
    pub head: HeadLimits,
    /// Maximum time from the first byte of a head to its last.
    pub header_timeout: Duration,
    /// Maximum time between requests; if absent, `header_timeout` includes the wait for a request's first byte.
    pub idle_timeout: Option<Duration>,
    /// Maximum time for a body that is read at once, or between two frames of one that is streamed, in either
    /// direction.
    pub body_timeout: Duration,
    /// Maximum bytes of an unread body that are discarded to keep the connection; with a larger body it is closed.
    pub max_discarded: usize,
    /// How long a request in progress is continued after its client has closed its direction of the connection. The
    /// client may only have finished sending and wait for the response, or be gone: that shows when something is sent.
    pub half_closed_timeout: Duration,
}

/// Bytes that are read ahead while a request is being served.
const MAX_AHEAD: usize = 16 * 1024;
/// Bytes that are read at a time: most requests are far smaller.
const READ_SIZE: usize = 8 * 1024;
/// Maximum bytes that are read from a connection after the last response, and for how long. Closing a connection while
/// the kernel has unread bytes resets it, and the client may never see that response.
const MAX_LINGER: usize = 1024 * 1024;
const LINGER: Duration = Duration::from_secs(2);

/// The client has left, or the connection has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Gone;

/// The next event on a connection.
pub(super) enum Next {
    /// A head, and its end in the buffer.
    Head(usize),
    Reject(HeadError),
    Slow,
    End,
}

/// The two directions of a connection. Separate from the rest, so that they can be used while a request borrows it.
pub(super) struct ConnectionIo {
    /// The read half, unless a request's body has it.
    pub(super) source: Option<BufferedRead>,
    /// A request's body that was not read to its end.
    pub(super) leftover: Option<BodyReader>,
    /// Receives the read half back from a request's body.
    pub(super) lent: Option<Arc<ReadReturn>>,
    /// The client waits for `100 Continue` before it sends its body.
    pub(super) expects_continue: bool,
    pub(super) write: WriteHalf,
    pub(super) out: BytesMut,
    /// Set once the client has closed its direction: when it counts as gone.
    pub(super) half_closed: Option<Pin<Box<Sleep>>>,
    /// See [`Settings::half_closed_timeout`].
    pub(super) half_closed_timeout: Duration,
}

pub(super) struct Connection<'a> {
    pub(super) io: ConnectionIo,
    pub(super) timeout: LazyTimeout,
    pub(super) settings: &'a Settings,
    pub(super) drain: &'a Drain,
    pub(super) activity: &'a Arc<Activity>,
    pub(super) clock: SystemClock,
}

/// The next step of sending a response's body.
enum Step<E> {
    Frame(Option<Result<Frame<Bytes>, E>>),
    Flush,
    Gone,
}

impl ConnectionIo {
    /// Takes back the read half from a request's body that was dropped.
    pub(super) fn reclaim(&mut self) {
        if let Some((source, reader)) = self.lent.as_ref().and_then(|lent| lent.take()) {
            self.lent = None;
            self.source = Some(source);
            self.leftover = (!reader.is_done()).then_some(reader);
        }
    }

    /// Puts back the unconsumed rest of `input`, before what was read since it was taken.
    pub(super) fn restore(&mut self, mut input: BytesMut, used: usize) {
        let Some(source) = &mut self.source else { return };
        input.advance(used);
        if source.buffer.is_empty() {
            source.buffer = input;
        } else if !input.is_empty() {
            input.extend_from_slice(&source.buffer);
            source.buffer = input;
        }
    }

    /// Polls a request's handler. While it is pending, earlier responses are sent and a disconnect is detected.
    pub(super) fn poll_handler<T>(
        &mut self,
        cx: &mut Context<'_>,
        handling: Pin<&mut impl Future<Output = T>>,
    ) -> Poll<Result<T, Gone>> {
        if let Poll::Ready(response) = handling.poll(cx) {
            return Poll::Ready(Ok(response));
        }
        if self.expects_continue && self.lent.as_ref().is_some_and(|lent| lent.poll_wanted(cx)) {
            self.put_continue();
        }
        if !self.out.is_empty()
            && let Poll::Ready(Err(_)) = self.write.poll_write_both(cx, &mut self.out, &mut Bytes::new())
        {
            return Poll::Ready(Err(Gone));
        }
        self.reclaim();
        self.poll_gone(cx).map(Err)
    }

    /// Ready when the client has disconnected. Until then, up to `MAX_AHEAD` bytes are read ahead.
    fn poll_gone(&mut self, cx: &mut Context<'_>) -> Poll<Gone> {
        if let Some(end) = &mut self.half_closed {
            return end.as_mut().poll(cx).map(|()| Gone);
        }
        let Some(source) = &mut self.source else { return Poll::Pending };
        while source.buffer.len() < MAX_AHEAD {
            if source.buffer.capacity() == source.buffer.len() {
                source.buffer.reserve(READ_SIZE / 8);
            }
            match ready!(source.read.poll_fill(cx, &mut source.buffer)) {
                Err(_) => return Poll::Ready(Gone),
                Ok(0) => {
                    let end = self.half_closed.insert(Box::pin(tokio::time::sleep(self.half_closed_timeout)));
                    return end.as_mut().poll(cx).map(|()| Gone);
                }
                Ok(_) => {}
            }
        }
        Poll::Pending
    }

    pub(super) fn put_continue(&mut self) {
        self.expects_continue = false;
        self.out.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
    }
}

impl Connection<'_> {
    /// Waits for a head. `is_new`: nothing has been received yet.
    pub(super) async fn next_head(&mut self, is_new: bool) -> Next {
        let Self {
            io: ConnectionIo { source: Some(source), write, out, .. },
            timeout,
            settings,
            drain,
            activity,
            ..
        } = self
        else {
            return Next::End;
        };
        let (mut seen, mut has_waited, mut is_armed, mut in_grace) = (0, false, false, false);
        let mut is_idle = source.buffer.is_empty();
        poll_fn(|cx| {
            loop {
                // Some old clients send an extra empty line after a body.
                while seen == 0 && source.buffer.starts_with(b"\r\n") {
                    source.buffer.advance(2);
                }
                // Half of such a line is ignored.
                let arrived = if source.buffer[..] == *b"\r" { &[][..] } else { &source.buffer };
                match head::end_of_head(arrived, &mut seen, &settings.head) {
                    Err(error) => return Poll::Ready(Next::Reject(error)),
                    Ok(Some(end)) => return Poll::Ready(Next::Head(end)),
                    Ok(None) => {}
                }
                if !is_armed {
                    is_armed = true;
                    let idle = settings.idle_timeout.filter(|_| is_idle && !is_new);
                    let now = timeout.set(idle.unwrap_or(settings.header_timeout));
                    activity.idle_unless_silent(now);
                }
                if is_idle && !source.buffer.is_empty() {
                    is_idle = false;
                    if settings.idle_timeout.is_some() {
                        timeout.set(settings.header_timeout);
                    }
                }
                if !out.is_empty() {
                    match write.poll_write_both(cx, out, &mut Bytes::new()) {
                        Poll::Ready(Ok(())) => {}
                        Poll::Ready(Err(_)) => return Poll::Ready(Next::End),
                        Poll::Pending => return timeout.poll(cx).map(|()| Next::End),
                    }
                }
                if source.buffer.capacity() - source.buffer.len() < READ_SIZE / 4 {
                    source.buffer.reserve(READ_SIZE);
                }
                match source.read.poll_fill(cx, &mut source.buffer) {
                    Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(Next::End),
                    Poll::Ready(Ok(_)) => {}
                    Poll::Pending => break,
                }
            }
            if is_idle {
                // A hundred thousand idle connections must not occupy buffers.
                (source.buffer, *out) = (BytesMut::new(), BytesMut::new());
                if drain.has_begun() && !is_new {
                    return Poll::Ready(Next::End);
                }
                // Once: a task may be woken for nothing in between.
                if drain.has_begun() && !in_grace {
                    in_grace = true;
                    timeout.set(GRACE_PERIOD);
                }
            }
            let late = if has_waited { timeout.poll(cx) } else { timeout.poll_registered(cx) };
            has_waited = true;
            late.map(|()| if is_idle { Next::End } else { Next::Slow })
        })
        .await
    }

    /// Sends what was gathered, then reads more. Returns false on a timeout, which the caller sets.
    pub(super) async fn fill(&mut self) -> Result<bool, Gone> {
        let Self { io: ConnectionIo { source: Some(source), write, out, .. }, timeout, .. } = self else {
            return Err(Gone);
        };
        poll_fn(|cx| {
            match write.poll_write_both(cx, out, &mut Bytes::new()) {
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(_)) => return Poll::Ready(Err(Gone)),
                Poll::Pending => return timeout.poll(cx).map(|()| Err(Gone)),
            }
            source.buffer.reserve(READ_SIZE / 4);
            match source.read.poll_fill(cx, &mut source.buffer) {
                Poll::Ready(Ok(0) | Err(_)) => Poll::Ready(Err(Gone)),
                Poll::Ready(Ok(_)) => Poll::Ready(Ok(true)),
                Poll::Pending => timeout.poll(cx).map(|()| Ok(false)),
            }
        })
        .await
    }

    /// Writes a response's body after its head. Returns an error if the body is incomplete.
    pub(super) async fn write_body<B: ResponseBody>(
        &mut self,
        mut body: B,
        frames: Frames,
    ) -> Result<(), Gone> {
        let mut has_trailers = false;
        loop {
            let io = &mut self.io;
            let next = poll_fn(|cx| match Pin::new(&mut body).poll_frame(cx) {
                Poll::Ready(frame) => Poll::Ready(Step::Frame(frame)),
                Poll::Pending if !io.out.is_empty() => Poll::Ready(Step::Flush),
                Poll::Pending => io.poll_gone(cx).map(|Gone| Step::Gone),
            });
            match next.await {
                Step::Gone => return Err(Gone),
                Step::Frame(Some(Err(_))) => {
                    // The client receives what there is, and detects that it is truncated.
                    self.flush(Bytes::new()).await?;
                    return Err(Gone);
                }
                Step::Flush => {
                    self.flush(Bytes::new()).await?;
                    // What was sent shows whether the client is gone.
                    self.io.half_closed = None;
                }
                Step::Frame(Some(Ok(frame))) => {
                    has_trailers |= frame.is_trailers();
                    let large = write::frame(&mut self.io.out, frame, frames);
                    if body.is_end_stream() && frames != Frames::Chunked {
                        // The permits of the request must be free before the client receives the last byte.
                        drop(body);
                        return self.flush(large).await;
                    }
                    if !large.is_empty() || self.io.out.len() > MAX_AHEAD {
                        self.flush(large).await?;
                    }
                }
                Step::Frame(None) => {
                    if frames == Frames::Chunked && !has_trailers {
                        write::last_chunk(&mut self.io.out);
                    }
                    drop(body);
                    return self.flush(Bytes::new()).await;
                }
            }
        }
    }

    /// Sends what was gathered, and `more` after it.
    pub(super) async fn flush(&mut self, mut more: Bytes) -> Result<(), Gone> {
        let Self { io: ConnectionIo { write, out, .. }, timeout, settings, activity, .. } = self;
        let mut is_armed = false;
        poll_fn(|cx| match write.poll_write_both(cx, out, &mut more) {
            Poll::Ready(done) => {
                if is_armed {
                    activity.busy();
                }
                Poll::Ready(done.map_err(|_| Gone))
            }
            Poll::Pending => {
                if !is_armed {
                    is_armed = true;
                    activity.idle(timeout.set(settings.body_timeout));
                }
                timeout.poll(cx).map(|()| Err(Gone))
            }
        })
        .await
    }

    /// Returns the next frame of a request's body. Gathered responses are sent while it waits; the caller sets the
    /// timeout.
    pub(super) async fn next_frame(
        &mut self,
        reader: &mut BodyReader,
    ) -> Result<Option<Frame<Bytes>>, BodyError> {
        let Self { io: ConnectionIo { source: Some(source), write, out, .. }, timeout, .. } = self else {
            return Err(BodyError::Cut);
        };
        let next = poll_fn(|cx| {
            let frame = reader.poll(cx, &mut source.read, &mut source.buffer);
            if frame.is_ready() {
                return frame;
            }
            match write.poll_write_both(cx, out, &mut Bytes::new()) {
                Poll::Ready(Err(error)) => Poll::Ready(Some(Err(error.into()))),
                _ => timeout.poll(cx).map(|()| Some(Err(BodyError::TooSlow))),
            }
        });
        next.await.transpose()
    }

    /// Reads and discards the rest of a body. Returns an error if it is too long, too slow or malformed.
    pub(super) async fn discard(&mut self, mut reader: BodyReader) -> Result<(), Gone> {
        let mut left = self.settings.max_discarded;
        self.activity.idle(self.timeout.set(self.settings.body_timeout));
        while let Some(frame) = self.next_frame(&mut reader).await.map_err(|_| Gone)? {
            left = left.checked_sub(frame.data_ref().map_or(0, Bytes::len)).ok_or(Gone)?;
        }
        Ok(())
    }

    /// Sends the last response and closes. If the client may still be sending, its bytes are read for a while.
    pub(super) async fn close(&mut self, is_sending: bool) {
        if self.flush(Bytes::new()).await.is_err() || self.io.write.shutdown().await.is_err() {
            return;
        }
        self.io.reclaim();
        let ConnectionIo { source: Some(source), leftover, .. } = &mut self.io else { return };
        if !is_sending && leftover.is_none() && source.buffer.is_empty() {
            return;
        }
        let mut left = MAX_LINGER;
        let timeout = &mut self.timeout;
        self.activity.idle(timeout.set(LINGER));
        poll_fn(|cx| {
            loop {
                source.buffer.clear();
                source.buffer.reserve(READ_SIZE);
                match source.read.poll_fill(cx, &mut source.buffer) {
                    Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(()),
                    Poll::Ready(Ok(read)) if read >= left => return Poll::Ready(()),
                    Poll::Ready(Ok(read)) => left -= read,
                    Poll::Pending => return timeout.poll(cx),
                }
            }
        })
        .await;
    }
}
