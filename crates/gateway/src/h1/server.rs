//! A caller's connection, request after request, within one task.
//!
//! While a request is being worked on, the connection is watched: a caller who leaves takes its request along, which
//! frees what the request holds (a place in a queue, a permit, an upstream's connection).

use super::body::{Home, Reader, RequestBody, Source};
use super::straight::Went;
use super::tunnel;
use super::write::{self, Frames};
use crate::body::{Incoming, Outgoing, Source as BodySource};
use crate::headers::Peer;
use crate::io::{Io, WriteHalf};
use crate::problem;
use crate::proxy::{Judged, Proxy, Ruled};
use crate::state::State;
use bytes::{Buf, Bytes, BytesMut};
use http::{Request, Response, StatusCode, Version};
use http_body::{Body, Frame};
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tollgate_core::{CounterStore, Timestamp};
use tollgate_edge::h1::head::{self, Framing, HeadError, HeadLimits, RequestHead};
use tollgate_edge::h1::{After, Answer, FieldsOf, Wants};
use tollgate_edge::who::Asked;
use tollgate_front::serving::alarm::Alarm;
use tollgate_front::serving::drain::Drain;

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
const AHEAD: usize = 16 * 1024;
/// How much of a body that nobody wants is read before the connection is closed, so that its sender sees the answer.
const UNWANTED: usize = 256 * 1024;
const LINGER: Duration = Duration::from_secs(2);

/// Serves one connection to its end.
pub(crate) async fn serve<S: CounterStore + 'static>(
    io: Io,
    first: BytesMut,
    settings: &Settings,
    drain: &Drain,
    proxy: &Proxy<S>,
    peer: &Peer,
) {
    let (read, write) = io.split();
    let mut begun = pin!(drain.begin().notified());
    // Once is enough: the task is woken, and asks.
    poll_fn(|cx| {
        let _ = begun.as_mut().poll(cx);
        Poll::Ready(())
    })
    .await;
    let mut line = Line {
        source: Some(Source { read, buffer: first }),
        leftover: None,
        head: Vec::new(),
        write,
        out: BytesMut::new(),
        alarm: Alarm::after(settings.header_timeout),
        settings,
        drain,
    };
    line.serve_all(proxy, peer).await;
}

/// A connection and where it stands.
pub(super) struct Line<'a> {
    /// What is read from, unless a request's body has it.
    source: Option<Source>,
    /// A body that was given back before its end.
    leftover: Option<Reader>,
    /// The head of the request that is being worked on.
    pub(super) head: Vec<u8>,
    pub(super) write: WriteHalf,
    pub(super) out: BytesMut,
    pub(super) alarm: Alarm,
    settings: &'a Settings,
    pub(super) drain: &'a Drain,
}

/// What comes next on a connection.
enum Next {
    /// A head, in its place.
    Head,
    Refuse(HeadError),
    Slow,
    End,
}

impl Line<'_> {
    /// Request after request. In one future: one for each request would be moved about with all that it may ever need.
    async fn serve_all<S: CounterStore + 'static>(&mut self, proxy: &Proxy<S>, peer: &Peer) {
        let mut fresh = true;
        loop {
            let head = match self.next_head(fresh).await {
                Next::Head => head::request(&self.head, &self.settings.head),
                Next::End => return,
                Next::Refuse(error) => Err(error),
                Next::Slow => {
                    let detail = "the header section did not come in time";
                    return Box::pin(self.refuse(proxy, peer, StatusCode::REQUEST_TIMEOUT, detail)).await;
                }
            };
            let head = match head {
                Ok(head) => head,
                Err(error) => {
                    return Box::pin(self.refuse(proxy, peer, error.status(), &error.to_string())).await;
                }
            };
            fresh = false;
            let state = proxy.state();
            let mut ruled = None;
            let mut more = None;
            if head.scan.framing == Framing::None {
                let fields = head.fields(&self.head);
                let asked = asked(peer, &head, &self.head, &fields);
                let now = proxy.now();
                match proxy.judge(&state, &asked, now, &mut ruled) {
                    Judged::Denied(answer) => {
                        let kept = self.put_denial(&answer, &head, now);
                        more = Some(self.is_kept_for_later(kept) || self.send_denial(kept).await);
                    }
                    Judged::Ruled => {
                        if let Went::Through(open) =
                            self.go_straight(proxy, &state, peer, &head, &mut ruled).await
                        {
                            more = Some(open);
                        }
                    }
                    Judged::Open => {}
                }
            }
            let more = match more {
                Some(more) => more,
                None => Box::pin(self.go_the_long_way(proxy, &state, peer, head, ruled)).await,
            };
            if !more {
                return;
            }
        }
    }

    /// Whatever has to wait, has a body, or is not as usual. Whether another request may follow.
    async fn go_the_long_way<'s, S: CounterStore + 'static>(
        &mut self,
        proxy: &Proxy<S>,
        state: &'s State,
        peer: &Peer,
        head: RequestHead,
        ruled: Option<Ruled<'s>>,
    ) -> bool {
        let (asked_head, version, keep_alive) = (head.scan.asks_head, head.scan.version, head.keep_alive);
        let (framing, mut expects) = (head.scan.framing, head.scan.expects_continue);
        let Ok((method, uri, headers)) = head.into_parts(&self.head) else { return false };
        let home = (framing != Framing::None).then(|| Arc::new(Home::default()));
        let body = home.as_ref().and_then(|home| {
            let source = self.source.take()?;
            let idle = self.settings.body_timeout;
            Some(Incoming::H1(RequestBody::new(source, framing, Arc::clone(home), idle)))
        });
        let mut request = Request::new(body);
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        *request.version_mut() = version;
        *request.headers_mut() = headers;
        let response = {
            let mut handling = pin!(proxy.handle(state, peer, request, ruled));
            let wanted = home.as_ref().map(|home| home.wanted.notified());
            let mut wanted = pin!(wanted);
            poll_fn(|cx| {
                if let Poll::Ready(response) = handling.as_mut().poll(cx) {
                    return Poll::Ready(Some(response));
                }
                if expects
                    && let Some(wanted) = wanted.as_mut().as_pin_mut()
                    && wanted.poll(cx).is_ready()
                {
                    expects = false;
                    self.out.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
                }
                if !self.out.is_empty() {
                    let written = self.write.poll_write_both(cx, &mut self.out, &mut Bytes::new());
                    if let Poll::Ready(Err(_)) = written {
                        return Poll::Ready(None);
                    }
                }
                self.bring_home(home.as_deref());
                self.watch(cx).map(|()| None)
            })
            .await
        };
        let Some(response) = response else { return false };
        if let BodySource::Tunnel(_) = response.body().source {
            self.tunnel(response).await;
            return false;
        }
        self.bring_home(home.as_deref());
        // Whoever still waits to be told, or has a body under way that nobody reads, cannot go on.
        let unread = home.is_some() && self.leftover.is_some();
        let (whole, close) = self.answer(response, asked_head, version, !keep_alive || unread).await;
        // An answer may have come before its request's body was read: what is left of that is read before the end.
        self.bring_home(home.as_deref());
        let more = whole && !close && self.source.is_some() && self.leftover.is_none();
        if whole && !more {
            self.close().await;
        }
        more
    }

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

    /// Nothing more is said here by HTTP.
    async fn tunnel(&mut self, response: Response<Outgoing>) {
        let (parts, body) = response.into_parts();
        write::response_head(&mut self.out, parts.status, &parts.headers, Frames::None, false);
        if let (true, Some(source), BodySource::Tunnel(tunnel)) =
            (self.flush(Bytes::new()).await, self.source.take(), body.source)
        {
            // The halves move into the tunnel, which ends the connection.
            let write = std::mem::replace(&mut self.write, WriteHalf::Closed);
            tunnel::run(source, write, *tunnel).await;
        }
        drop(body.finish);
    }

    /// Writes a denial of a request without a body; whether another may follow.
    fn put_denial(&mut self, answer: &Answer, head: &RequestHead, now: Timestamp) -> bool {
        let keep = head.keep_alive && !self.drain.has_begun();
        let wants = if head.scan.asks_head { Wants::Head } else { Wants::All };
        self.out.reserve(AHEAD / 16);
        answer.write(&mut self.out, wants, if keep { After::Keep } else { After::Close }, now);
        keep
    }

    /// Whether a denial is sent with those of other requests that are here already.
    fn is_kept_for_later(&self, keep: bool) -> bool {
        let more = self.source.as_ref().is_some_and(|source| !source.buffer.is_empty());
        keep && more && self.out.len() < AHEAD
    }

    async fn send_denial(&mut self, keep: bool) -> bool {
        let sent = self.flush(Bytes::new()).await;
        if sent && !keep {
            self.close().await;
        }
        sent && keep
    }

    /// Takes the source back from a request's body that is done with it.
    fn bring_home(&mut self, home: Option<&Home>) {
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

    async fn next_head(&mut self, fresh: bool) -> Next {
        let Self { source: Some(source), head: bytes, write, out, alarm, settings, drain, .. } = self else {
            return Next::End;
        };
        let (mut seen, mut has_waited) = (0, false);
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
                if waiting && drain.has_begun() {
                    return Poll::Ready(Next::End);
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

    /// Says what is wrong and ends the connection.
    async fn refuse<S: CounterStore + 'static>(
        &mut self,
        proxy: &Proxy<S>,
        peer: &Peer,
        status: StatusCode,
        detail: &str,
    ) {
        proxy.refused(peer, status, detail);
        let (parts, body) = problem::answer(status, detail).into_parts();
        let length = body.size_hint().exact().unwrap_or(0);
        write::response_head(&mut self.out, parts.status, &parts.headers, Frames::Length(length), true);
        if self.write_body(body, Frames::Length(length)).await {
            self.leftover = Some(Reader::UntilClose);
            self.close().await;
        }
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

/// What an answer's body does next.
enum Step {
    Frame(Option<Result<Frame<Bytes>, super::body::BodyError>>),
    Flush,
    Gone,
}

/// What a head asks, and who sent it.
pub(super) fn asked<'r>(
    peer: &Peer,
    head: &'r RequestHead,
    bytes: &'r [u8],
    fields: &'r FieldsOf<'r>,
) -> Asked<'r, FieldsOf<'r>> {
    Asked {
        peer: peer.address,
        method: head.method.as_str(),
        path: head.path(bytes),
        authority: head.authority(),
        headers: fields,
    }
}
