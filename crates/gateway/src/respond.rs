//! Responses of the proxy: an upstream's response, a denial or an error. The record of a request (access log line, span,
//! permits) ends with the response, or with the request's future.

use crate::access_log::{AccessLogGuard, AccessRecord};
use crate::body::{ProxiedBody, ResponseSource, StreamBody};
use crate::completion::{Completion, DropAction};
use crate::h1::exchange::UpstreamBody;
use crate::h1::tunnel::Tunnel;
use crate::headers::{self, OwnHeaders, Peer};
use crate::message::{Proxied, ResponseSink};
use crate::place::UpstreamPlace;
use crate::problem;
use crate::proxy_state::ProxyState;
use crate::request_span::RequestSpan;
use crate::route::Route;
use crate::upstream::{Failure, Received};
use bytes::Bytes;
use http::StatusCode;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, DATE, RETRY_AFTER, UPGRADE, WWW_AUTHENTICATE};
use http_body::Body;
use std::net::IpAddr;
use std::sync::Arc;
use tollgate_core::{Clock, CounterStore, SystemClock, Timestamp, secret_prefix};
use tollgate_engine::Decision;
use tollgate_http::date;
use tollgate_http::headers::{HeaderLookup, HeaderSink};
use tollgate_http::identity::RequestView;
use tollgate_http::response::DecisionSummary;

/// What a request holds until its response ends: access log line, span, permits.
pub(crate) struct Record<S: CounterStore + 'static> {
    clock: SystemClock,
    pub(crate) line: Option<AccessLogGuard>,
    pub(crate) span: Option<Box<RequestSpan<S>>>,
    pub(crate) held: Option<Box<dyn DropAction>>,
    pub(crate) place: Option<UpstreamPlace>,
}

impl<S: CounterStore + 'static> Record<S> {
    /// Creates the record of a new request.
    pub(crate) fn new(
        state: &ProxyState,
        asked: &RequestView<'_, impl HeaderLookup>,
        peer: &Peer,
        clock: SystemClock,
        now: Timestamp,
    ) -> Self {
        let line = state
            .log
            .as_ref()
            .map(|log| AccessLogGuard::new(Arc::clone(log), entry(state, asked, peer, now)));
        Self { clock, line, span: None, held: None, place: None }
    }

    /// Adds the route and the decision.
    pub(crate) fn add_decision(&mut self, route: &Route, decision: Option<&Decision>, remote: IpAddr) {
        let Some(AccessLogGuard { entry, .. }) = &mut self.line else { return };
        entry.remote = remote;
        entry.route = Some(route.name.clone());
        if let Some(decision) = decision {
            let name = |by: Option<_>| by.map(|by| decision.name(by).to_owned());
            entry.decision = Some(decision.id().to_string());
            entry.denied_by = name(decision.denied_by);
            entry.degraded_by = name(decision.degraded_by);
        }
    }

    /// Attaches what ends with the response.
    fn finish(self, status: StatusCode, is_complete: bool) -> Option<Box<Completion>> {
        let Self { mut line, mut span, held, place, .. } = self;
        if line.is_none() && span.is_none() && held.is_none() && place.is_none() {
            return None;
        }
        if let Some(span) = &mut span {
            span.status = Some(status.as_u16());
        }
        if let Some(line) = &mut line {
            line.entry.status = status.as_u16();
            line.is_complete = is_complete;
        }
        Some(Box::new(Completion {
            line,
            _permits: held,
            place,
            _span: span.map(|span| span as Box<dyn DropAction>),
        }))
    }

    /// Writes an upstream's response.
    #[allow(clippy::too_many_arguments, reason = "called once, with the whole context of a request")]
    pub(crate) fn send_response<A: ResponseSink>(
        mut self,
        state: &ProxyState,
        route: &Route,
        received: Received,
        facts: Option<&DecisionSummary<'_>>,
        now: Timestamp,
        out: &mut A,
    ) -> Proxied {
        let status = received.status();
        if let Some(line) = &mut self.line {
            line.entry.upstream = Some(received.address().to_owned());
        }
        out.begin(status);
        let mut own = OwnHeaders::new(out);
        if let Some(facts) = facts {
            state.responses.write(facts, now, &mut own);
        }
        let idle = route.config.idle_timeout.0;
        let (stated_length, source) = match received {
            Received::H1 { connection, in_flight, pumping, head, end } => {
                let fields = head.fields(&connection.received()[..end]);
                headers::write_client_headers(&fields, &mut own);
                if status == StatusCode::SWITCHING_PROTOCOLS {
                    own.out.add(b"connection", b"upgrade");
                    own.out.add(b"upgrade", fields.first(&UPGRADE).unwrap_or_default());
                    // The upstream's work on the request is done; how long the tunnel lives says nothing about it.
                    self.place = None;
                    if let Some((source, write, permit)) = connection.into_tunnel(end) {
                        let tunnel = Tunnel { source, write, in_flight, permit, idle };
                        return Proxied::Tunnel(Box::new(tunnel), self.finish(status, true));
                    }
                    // Unreachable: an exchange that switched protocols has both halves.
                    return Proxied::Response {
                        status,
                        stated_length: None,
                        body: ProxiedBody::local(Bytes::new()),
                    };
                }
                let length = stated_length(status, &fields);
                let body = UpstreamBody::new(connection, in_flight, (end, &head), pumping, idle);
                (length, ResponseSource::H1(body))
            }
            Received::H2 { response, in_flight } => {
                headers::write_client_headers(response.headers(), &mut own);
                let length = stated_length(status, response.headers());
                let body = StreamBody::new(response.into_body(), idle);
                (length, ResponseSource::H2 { body, _in_flight: in_flight })
            }
        };
        let mut body = ProxiedBody { source, completion: None };
        match &mut self.place {
            // A stream may go on for as long as its reader likes.
            place if stated_length.is_none() || body.is_end_stream() => *place = None,
            // The client is to take the head; the place is held again when more is awaited from the upstream.
            Some(place) => place.pause(),
            None => {}
        }
        body.completion = self.finish(status, body.is_end_stream());
        Proxied::Response { status, stated_length, body }
    }

    /// Writes a denial.
    pub(crate) fn denied<A: ResponseSink>(
        self,
        state: &ProxyState,
        facts: &DecisionSummary<'_>,
        now: Timestamp,
        out: &mut A,
    ) -> Proxied {
        let status = state.responses.status(facts);
        out.begin(status);
        let mut own = OwnHeaders::new(out);
        let (media_type, body) = state.responses.body(facts).unzip();
        self.put_own(&mut own, media_type);
        state.responses.write(facts, now, &mut own);
        self.own_response(status, body.unwrap_or_default())
    }

    /// Writes an error response; `facts` describe a decision whose rate limit headers are still sent.
    pub(crate) fn problem<A: ResponseSink>(
        mut self,
        failure: &Failure,
        facts: Option<(&ProxyState, &DecisionSummary<'_>, Timestamp)>,
        out: &mut A,
    ) -> Proxied {
        let Failure { status, detail, backend, .. } = failure;
        if let Some(line) = &mut self.line {
            // A line without a route says so itself.
            line.entry.error = (*status != StatusCode::NOT_FOUND).then(|| failure.logged().to_owned());
            line.entry.upstream.clone_from(backend);
        }
        out.begin(*status);
        let mut own = OwnHeaders::new(out);
        self.put_own(&mut own, Some(problem::MEDIA_TYPE));
        if *status == StatusCode::UNAUTHORIZED {
            own.put(&WWW_AUTHENTICATE, b"Bearer");
        }
        // What is missing here is capacity, for a moment.
        if *status == StatusCode::SERVICE_UNAVAILABLE {
            own.put(&RETRY_AFTER, b"1");
        }
        if let Some((state, facts, now)) = facts {
            state.responses.write(facts, now, &mut own);
        }
        self.own_response(*status, problem::body(*status, detail).into())
    }

    /// Writes the headers common to the gateway's own responses.
    fn put_own(&self, own: &mut impl HeaderSink, media_type: Option<&'static str>) {
        if let Some(media_type) = media_type {
            own.put(&CONTENT_TYPE, media_type.as_bytes());
        }
        own.put(&DATE, date::now(self.clock.now()).as_bytes());
    }

    fn own_response(self, status: StatusCode, body: Bytes) -> Proxied {
        let mut body = ProxiedBody::local(body);
        body.completion = self.finish(status, body.is_end_stream());
        Proxied::Response { status, stated_length: None, body }
    }
}

/// Returns the length that an upstream states of a body; the parser admits only numbers. A 204 has none, and clients may take a
/// stated one for an error.
fn stated_length(status: StatusCode, fields: &impl HeaderLookup) -> Option<u64> {
    if status == StatusCode::NO_CONTENT {
        return None;
    }
    std::str::from_utf8(fields.first(&CONTENT_LENGTH)?).ok()?.parse().ok()
}

/// Returns the access record of a request before its check.
fn entry(
    state: &ProxyState,
    asked: &RequestView<'_, impl HeaderLookup>,
    peer: &Peer,
    began: Timestamp,
) -> AccessRecord {
    let is_secret = state.routes.fallback_site().contains_secret(asked.headers, asked.path);
    AccessRecord {
        method: Some(asked.method.to_owned()),
        host: Some(asked.host().unwrap_or_default().to_owned()),
        // The query may contain secrets and is never logged; a path with a secret is masked.
        path: Some(match is_secret {
            true => format!("{}…", secret_prefix(asked.path)),
            false => asked.path.to_owned(),
        }),
        ..AccessRecord::new(began, peer.address)
    }
}
