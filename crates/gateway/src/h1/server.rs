//! A caller's connection, request after request, within one task.
//!
//! While a request is being worked on, the connection is watched: a caller who leaves takes its request along, which
//! frees what the request holds (a place in a queue, a permit, an upstream's connection).

use super::body::{Home, Reader, RequestBody, Source};
use super::line::{AHEAD, Line, Next, Settings};
use super::straight::Went;
use super::tunnel;
use super::write::{self, Frames};
use crate::body::{Incoming, Outgoing, Source as BodySource};
use crate::headers::Peer;
use crate::io::{Io, WriteHalf};
use crate::problem;
use crate::proxy::{Judged, Proxy, Ruled};
use crate::state::State;
use bytes::{Bytes, BytesMut};
use http::{Request, Response, StatusCode};
use http_body::Body;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use tollgate_core::{CounterStore, Timestamp};
use tollgate_edge::h1::head::{self, Framing, RequestHead};
use tollgate_edge::h1::{After, Answer, FieldsOf, Wants};
use tollgate_edge::who::Asked;
use tollgate_front::serving::alarm::Alarm;
use tollgate_front::serving::drain::Drain;

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
            Some(Incoming::h1(RequestBody::new(source, framing, Arc::clone(home), idle)))
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
