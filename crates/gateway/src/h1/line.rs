//! A caller's connection as the bytes of it: waiting for a head, writing an answer, ending so that the answer is read.

use super::body::{Home, Reader, Source};
use super::write::{self, Frames};
use crate::body::Outgoing;
use crate::io::WriteHalf;
use bytes::{Buf, Bytes, BytesMut};
use http::{Response, Version};
use http_body::{Body, Frame};
use std::future::poll_fn;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tollgate_edge::h1::head::{self, HeadError, HeadLimits};
use tollgate_front::serving::alarm::Alarm;
use tollgate_front::serving::drain::{Drain, LAST_CHANCE};

/// What callers may do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) head: HeadLimits,
    /// From a head's first byte to its last.
    pub(crate) header_timeout: Duration,
    /// Between requests.
    pub(crate) idle_timeout: Duration,
    /// Between two pieces of a body, either way.
    pub(crate) body_timeout: Duration,
}

/// What is read ahead of a request that is being worked on.
pub(super) const AHEAD: usize = 16 * 1024;
/// How much of a body that nobody wants is read before the connection is closed, so that its sender sees the answer.
const UNWANTED: usize = 256 * 1024;
const LINGER: Duration = Duration::from_secs(2);

/// A connection and where it stands.
pub(super) struct Line<'a> {
    /// What is read from, unless a request's body has it.
    pub(super) source: Option<Source>,
    /// A body that was given back before its end.
    pub(super) leftover: Option<Reader>,
    /// The head of the request that is being worked on.
    pub(super) head: Vec<u8>,
    pub(super) write: WriteHalf,
    pub(super) out: BytesMut,
    pub(super) alarm: Alarm,
    pub(super) settings: &'a Settings,
    pub(super) drain: &'a Drain,
}

/// What comes next on a connection.
pub(super) enum Next {
    /// A head, in its place.
    Head,
    Refuse(HeadError),
    Slow,
    End,
}

/// What an answer's body does next.
enum Step {
    Frame(Option<Result<Frame<Bytes>, super::body::BodyError>>),
    Flush,
    Gone,
}

impl Line<'_> {
    /// Writes an answer. Whether all of it was, and whether the caller was told that the connection ends.
    pub(super) async fn answer(
        &mut self,
        response: Response<Outgoing>,
        asked_head: bool,
        version: Version,
        close: bool,
    ) -> (bool, bool) {
        let (mut parts, body) = response.into_parts();
        let frames = Frames::of_answer(parts.status, asked_head, version, body.size_hint().exact());
        let close = close || self.drain.has_begun() || frames == Frames::UntilClose;
        if matches!(frames, Frames::Chunked | Frames::UntilClose) {
            parts.headers.remove(http::header::CONTENT_LENGTH);
        }
        write::response_head(&mut self.out, parts.status, &parts.headers, frames, close);
        (self.write_body(body, frames).await, close)
    }

    /// Takes the source back from a request's body that is done with it.
    pub(super) fn bring_home(&mut self, home: Option<&Home>) {
        if self.source.is_none()
            && let Some((source, reader)) = home.and_then(Home::take)
        {
            self.source = Some(source);
            self.leftover = (!reader.is_done()).then_some(reader);
        }
    }

    /// Ready when the caller has gone.
    pub(super) fn watch(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Some(source) = self.source.as_mut().filter(|_| self.leftover.is_none()) else {
            return Poll::Pending;
        };
        while source.buffer.len() < AHEAD {
            if source.buffer.capacity() == source.buffer.len() {
                source.buffer.reserve(1024);
            }
            match ready!(source.read.poll_fill(cx, &mut source.buffer)) {
                Ok(0) | Err(_) => return Poll::Ready(()),
                Ok(_) => {}
            }
        }
        Poll::Pending
    }

    pub(super) async fn next_head(&mut self, fresh: bool) -> Next {
        let Self { source: Some(source), head: bytes, write, out, alarm, settings, drain, .. } = self else {
            return Next::End;
        };
        let (mut seen, mut has_waited, mut may_begin) = (0, false, fresh);
        let mut waiting = source.buffer.is_empty();
        alarm.set(if waiting && !fresh { settings.idle_timeout } else { settings.header_timeout });
        poll_fn(|cx| {
            loop {
                // Some old clients end a body with an empty line that belongs to nothing.
                if !fresh && seen == 0 && source.buffer.starts_with(b"\r\n") {
                    source.buffer.advance(2);
                }
                match head::end_of_head(&source.buffer, &mut seen, &settings.head) {
                    Err(error) => return Poll::Ready(Next::Refuse(error)),
                    Ok(Some(end)) => {
                        bytes.clear();
                        bytes.extend_from_slice(&source.buffer[..end]);
                        source.buffer.advance(end);
                        return Poll::Ready(Next::Head);
                    }
                    Ok(None) => {}
                }
                if waiting && !source.buffer.is_empty() {
                    waiting = false;
                    alarm.set(settings.header_timeout);
                }
                // Denials that were kept for those behind them.
                if !out.is_empty() {
                    match write.poll_write_both(cx, out, &mut Bytes::new()) {
                        Poll::Ready(Ok(())) => {}
                        Poll::Ready(Err(_)) => return Poll::Ready(Next::End),
                        Poll::Pending => return alarm.poll(cx).map(|()| Next::End),
                    }
                }
                if source.buffer.capacity() - source.buffer.len() < 1024 {
                    source.buffer.reserve(4096);
                }
                match source.read.poll_fill(cx, &mut source.buffer) {
                    Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(Next::End),
                    Poll::Ready(Ok(_)) => {}
                    Poll::Pending => break,
                }
            }
            if waiting && drain.has_begun() {
                if !std::mem::take(&mut may_begin) {
                    return Poll::Ready(Next::End);
                }
                alarm.set(LAST_CHANCE);
            }
            let alarm = if has_waited { alarm.poll(cx) } else { alarm.watch(cx) };
            has_waited = true;
            alarm.map(|()| if waiting { Next::End } else { Next::Slow })
        })
        .await
    }

    /// Whether everything was written.
    pub(super) async fn write_body(&mut self, mut body: Outgoing, frames: Frames) -> bool {
        if frames == Frames::None {
            body.end();
            return self.flush(Bytes::new()).await;
        }
        let mut trailers = false;
        loop {
            let next = poll_fn(|cx| match Pin::new(&mut body).poll_frame(cx) {
                Poll::Ready(frame) => Poll::Ready(Step::Frame(frame)),
                Poll::Pending if !self.out.is_empty() => Poll::Ready(Step::Flush),
                Poll::Pending => self.watch(cx).map(|()| Step::Gone),
            });
            match next.await {
                Step::Gone | Step::Frame(Some(Err(_))) => return false,
                Step::Flush => {
                    if !self.flush(Bytes::new()).await {
                        return false;
                    }
                }
                Step::Frame(Some(Ok(frame))) => {
                    trailers |= frame.is_trailers();
                    let large = write::frame(&mut self.out, frame, frames);
                    if body.is_end_stream() && frames != Frames::Chunked {
                        // Whoever has the last byte finds free what its request held.
                        drop(body);
                        return self.flush(large).await;
                    }
                    if (!large.is_empty() || self.out.len() > AHEAD) && !self.flush(large).await {
                        return false;
                    }
                }
                Step::Frame(None) => {
                    if frames == Frames::Chunked && !trailers {
                        write::last_chunk(&mut self.out);
                    }
                    drop(body);
                    return self.flush(Bytes::new()).await;
                }
            }
        }
    }

    /// Writes what is gathered, and `more` after it. Whether the caller took it in time.
    pub(super) async fn flush(&mut self, mut more: Bytes) -> bool {
        let Self { write, out, alarm, settings, .. } = self;
        let mut armed = false;
        poll_fn(|cx| match write.poll_write_both(cx, out, &mut more) {
            Poll::Ready(done) => Poll::Ready(done.is_ok()),
            Poll::Pending => {
                if !armed {
                    armed = true;
                    alarm.set(settings.body_timeout);
                }
                alarm.poll(cx).map(|()| false)
            }
        })
        .await
    }

    /// Ends the connection so that the other side can still read what was written: a connection that is closed with
    /// bytes unread is reset, and takes the answer along.
    pub(super) async fn close(&mut self) {
        if self.write.shutdown().await.is_err() {
            return;
        }
        let (Some(source), Some(_)) = (&mut self.source, &self.leftover) else { return };
        let mut left = UNWANTED;
        let alarm = &mut self.alarm;
        alarm.set(LINGER);
        poll_fn(|cx| {
            loop {
                source.buffer.clear();
                source.buffer.reserve(4096);
                match source.read.poll_fill(cx, &mut source.buffer) {
                    Poll::Ready(Ok(0) | Err(_)) => return Poll::Ready(()),
                    Poll::Ready(Ok(read)) if read >= left => return Poll::Ready(()),
                    Poll::Ready(Ok(read)) => left -= read,
                    Poll::Pending => return alarm.poll(cx),
                }
            }
        })
        .await;
    }
}
