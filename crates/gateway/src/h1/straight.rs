//! The straight way, which most requests take: without a body, decided at once, and a connection to the upstream waits. The
//! head goes from one connection's bytes into the other's, and so does the answer's: no map of fields, no future of its own.
//!
//! Whatever is out of the ordinary takes the long way ([`Proxy::handle`]), which can do everything. Until a byte of an answer
//! has come nothing is lost by that, so even a waiting connection that turns out to be closed is left to it.

use super::client::{Connection, ExchangeError, UpstreamBody};
use super::line::Line;
use super::server::asked;
use super::write::{self, COPIED, Frames};
use crate::body::{Outgoing, Source};
use crate::config::UpstreamProtocol;
use crate::finish::Finish;
use crate::headers::{self, AddFields, Own, Peer};
use crate::pool::InFlight;
use crate::proxy::{Proxy, Ruled, is_marked};
use crate::state::State;
use crate::upstream::{Attempt, is_idempotent, unanswered};
use bytes::{Buf, Bytes};
use http::header::{CONTENT_LENGTH, UPGRADE};
use http::{StatusCode, Version};
use std::future::poll_fn;
use std::task::Poll;
use tollgate_core::{CounterStore, Span};
use tollgate_edge::answer::{self, Facts};
use tollgate_edge::fields::Fields;
use tollgate_edge::h1::head::{RequestHead, ResponseHead};

/// What became of a request.
pub(super) enum Went {
    /// It was answered; whether another may follow.
    Through(bool),
    /// Nothing that counts has happened: the long way is open.
    Nowhere,
}

/// What comes of sending a request.
#[allow(clippy::large_enum_variant, reason = "the large one is the usual one, and lives for a moment")]
enum Came {
    /// An answer's head, and where it ends.
    Answer(usize, ResponseHead),
    Failure(ExchangeError),
    /// The caller has left.
    Gone,
}

/// A request on its way.
struct Course {
    connection: Box<Connection>,
    in_flight: InFlight,
}

impl Course {
    /// Writes the request for an upstream's connection that waits, if one does and the request is as usual.
    fn begin(
        state: &State,
        peer: &Peer,
        head: &RequestHead,
        bytes: &[u8],
        ruled: &Ruled<'_>,
    ) -> Option<Self> {
        let (route, fields) = (ruled.route, head.fields(bytes));
        let pool = &state.pools[route.pool];
        let is_stopped = ruled
            .decision
            .as_ref()
            .is_some_and(|decision| !decision.is_allowed() || decision.delay() > Span::ZERO);
        let is_usual = pool.protocol() == UpstreamProtocol::Http1
            && head.scan.version == Version::HTTP_11
            && fields.first(&UPGRADE).is_none();
        // What a request holds is renewed while it waits, and its span ends with it: both are the long way's.
        if is_stopped || !is_usual || ruled.trace.is_some() || ruled.held.is_some() {
            return None;
        }
        let (_, in_flight) = pool.pick(&[])?;
        let mut connection = in_flight.endpoint().take_waiting()?;
        let out = connection.out();
        write::request_line(out, &head.method, &route.target(head.path_and_query(bytes)));
        let passing = state.passing(peer, ruled.is_trusted, route, head.authority());
        headers::towards_upstream(&fields, &passing, out);
        if let Some(decision) = ruled.decision.as_ref().filter(|decision| is_marked(decision)) {
            answer::mark(&Facts::of(decision), &mut Own::new(out));
        }
        write::end_of_fields(out, Frames::of_request(&head.method, None::<&Outgoing>));
        Some(Self { connection, in_flight })
    }
}

impl Line<'_> {
    /// Passes a request on and its answer back, if that can be done in the usual way. `ruled` is taken where it was.
    pub(super) async fn go_straight<S: CounterStore + 'static>(
        &mut self,
        proxy: &Proxy<S>,
        state: &State,
        peer: &Peer,
        head: &RequestHead,
        ruled: &mut Option<Ruled<'_>>,
    ) -> Went {
        let course = ruled.as_ref().and_then(|ruled| Course::begin(state, peer, head, &self.head, ruled));
        let (Some(mut course), Some(route)) = (course, ruled.as_ref().map(|ruled| ruled.route)) else {
            return Went::Nowhere;
        };
        self.alarm.set(route.config.timeout.0);
        let mut has_waited = false;
        let came = poll_fn(|cx| {
            if let Poll::Ready(sent) = course.connection.poll_sent(cx) {
                let came = match sent {
                    Ok(()) => course.connection.poll_head(cx, &head.method),
                    Err(error) => Poll::Ready(Err(error)),
                };
                match came {
                    Poll::Ready(Ok((end, head))) => return Poll::Ready(Came::Answer(end, head)),
                    Poll::Ready(Err(error)) => return Poll::Ready(Came::Failure(error)),
                    Poll::Pending => {}
                }
            }
            // Denials that were kept for those behind them do not wait for an upstream.
            let written = self.write.poll_write_both(cx, &mut self.out, &mut Bytes::new());
            if matches!(written, Poll::Ready(Err(_))) || self.watch(cx).is_ready() {
                return Poll::Ready(Came::Gone);
            }
            let late = if has_waited { self.alarm.poll(cx) } else { self.alarm.watch(cx) };
            has_waited = true;
            late.map(|()| Came::Failure(ExchangeError::Timeout))
        })
        .await;
        let failure = match came {
            Came::Answer(end, answer) if answer.status != StatusCode::SWITCHING_PROTOCOLS => {
                let Some(ruled) = ruled.take() else { return Went::Nowhere };
                return Went::Through(
                    self.bring_back(proxy, state, peer, head, ruled, course, (end, answer)).await,
                );
            }
            Came::Answer(..) => ExchangeError::Unasked,
            Came::Failure(failure) => failure,
            Came::Gone => {
                // Its line in the log is written for it.
                let fields = head.fields(&self.head);
                let asked = asked(peer, head, &self.head, &fields);
                drop(ruled.as_ref().and_then(|ruled| proxy.line_of(state, &asked, peer, ruled)));
                return Went::Through(false);
            }
        };
        let endpoint = course.in_flight.endpoint();
        let failure = match unanswered(failure, true, &endpoint.address) {
            Attempt::Stale(_) if is_idempotent(&head.method) => {
                if let Some(ruled) = ruled {
                    ruled.is_stale = true;
                }
                return Went::Nowhere;
            }
            Attempt::Stale(failure) | Attempt::Full(failure) => failure,
            Attempt::Nothing(failure) | Attempt::Failed(failure) => {
                endpoint.failed();
                failure
            }
            Attempt::Answered(_) => return Went::Nowhere,
        };
        let Some(ruled) = ruled.take() else { return Went::Nowhere };
        let fields = head.fields(&self.head);
        let asked = asked(peer, head, &self.head, &fields);
        let answer = proxy.unanswered(state, &asked, peer, &ruled, &failure);
        let (asks_head, version) = (head.scan.asks_head, head.scan.version);
        let (whole, close) = Box::pin(self.answer(answer, asks_head, version, !head.keep_alive)).await;
        if whole && close {
            Box::pin(self.close()).await;
        }
        Went::Through(whole && !close)
    }

    /// Writes an upstream's answer. Whether another request may follow.
    #[allow(clippy::too_many_arguments, reason = "all that is known of the request, once")]
    async fn bring_back<S: CounterStore + 'static>(
        &mut self,
        proxy: &Proxy<S>,
        state: &State,
        peer: &Peer,
        head: &RequestHead,
        ruled: Ruled<'_>,
        course: Course,
        (end, answer): (usize, ResponseHead),
    ) -> bool {
        let Course { mut connection, in_flight } = course;
        in_flight.endpoint().succeeded();
        let idle = ruled.route.config.idle_timeout.0;
        let close = !head.keep_alive || self.drain.has_begun();
        let frames =
            Frames::of_answer(answer.status, head.scan.asks_head, head.scan.version, answer.framing.length());
        write::status_line(&mut self.out, answer.status, close);
        let came = connection.came();
        let fields = answer.fields(&came[..end]);
        let mut own = Own::new(&mut self.out);
        if let Some(decision) = &ruled.decision {
            state.answers.write(&Facts::of(decision), ruled.began, &mut own);
        }
        headers::towards_caller(&fields, &mut own);
        // An answer without a body may still tell the length of the one that it stands for.
        if let (Frames::None, Some(length)) = (frames, fields.first(&CONTENT_LENGTH)) {
            own.out.add(b"content-length", length);
        }
        write::end_of_fields(&mut self.out, frames);
        came.advance(end);
        let mut finish = None;
        if state.log.is_some() {
            let fields = head.fields(&self.head);
            let line = proxy.line_of(state, &asked(peer, head, &self.head, &fields), peer, &ruled);
            let mut ends = Box::new(Finish { line, _held: None, _span: None });
            ends.answered(answer.status, &in_flight.endpoint().address);
            finish = Some(ends);
        }
        let mut body = UpstreamBody::new(connection, in_flight, &answer, None, idle);
        let out = &mut self.out;
        let whole = if body.take_short(COPIED, |bytes| {
            out.extend_from_slice(bytes);
            if let Some(finish) = &mut finish {
                finish.count(bytes.len());
                finish.whole();
            }
        }) {
            drop(finish);
            self.flush(Bytes::new()).await
        } else {
            Box::pin(self.write_body(Outgoing { source: Source::H1(body), finish }, frames)).await
        };
        if whole && close {
            Box::pin(self.close()).await;
        }
        whole && !close
    }
}
