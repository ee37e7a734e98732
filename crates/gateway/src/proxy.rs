//! The life of a request: who asks, which route, may it pass, is it its turn, then on to the upstream and back.
//!
//! Deciding comes before a byte of the body is read and before any connection to an upstream: a denial costs neither.

use crate::access_log::{Entry, Line};
use crate::body::{Incoming, Outgoing, Source, StreamBody};
use crate::config::GatewayConfig;
use crate::finish::{Ends, Finish};
use crate::follow::Followed;
use crate::h1::client::UpstreamBody;
use crate::h1::tunnel::Tunnel;
use crate::headers::{self, Own, Passing, Peer};
use crate::problem;
use crate::route::Route;
use crate::state::State;
use crate::upstream::{self, Failure, Received, Sent, WriteFields};
use arc_swap::ArcSwap;
use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, DATE, UPGRADE};
use http::{HeaderMap, Method, StatusCode};
use http_body::Body;
use std::net::IpAddr;
use std::sync::Arc;
use tollgate_core::{Clock, CounterStore, Span, SystemClock, Timestamp, beginning};
use tollgate_edge::answer::{self, Facts};
use tollgate_edge::fields::{AddFields, Fields, PutFields};
use tollgate_edge::h1::FieldsOf;
use tollgate_edge::server::LazyTimeout;
use tollgate_edge::server::write::{self, Frames};
use tollgate_edge::who::{Ambiguous, Asked};
use tollgate_edge::{date, trace};
use tollgate_engine::{Check, Decision, DelayQueue, Held, Limiter, Trace};

/// Everything that requests share.
pub(crate) struct Proxy<S: CounterStore + 'static> {
    limiter: Arc<Limiter<S>>,
    state: ArcSwap<State>,
    /// Requests that `action: delay` holds back.
    pub(crate) delayed: DelayQueue,
    clock: SystemClock,
}

/// A request's head, wherever it lies: in the bytes of HTTP/1, or in a map of HTTP/2.
pub(crate) struct Forwarded<'r, F> {
    pub(crate) asked: Asked<'r, F>,
    pub(crate) method: &'r Method,
    /// Path and query.
    pub(crate) target: &'r str,
}

/// Whether a map of fields was built of a request's head.
pub(crate) trait HeadForm: Fields + Sync {
    /// It lies in the bytes that came.
    const ARE_BYTES: bool;
}

impl HeadForm for FieldsOf<'_> {
    const ARE_BYTES: bool = true;
}

impl HeadForm for HeaderMap {
    const ARE_BYTES: bool = false;
}

/// What a response's head is written to.
pub(crate) trait ResponseSink: AddFields + Send {
    /// Whether its connection can switch protocols.
    const CAN_SWITCH: bool;

    fn begin(&mut self, status: StatusCode);
}

impl ResponseSink for BytesMut {
    const CAN_SWITCH: bool = true;

    fn begin(&mut self, status: StatusCode) {
        write::status_line(self, status);
    }
}

impl ResponseSink for HeaderMap {
    const CAN_SWITCH: bool = false;

    fn begin(&mut self, _: StatusCode) {}
}

/// What became of a request; the fields of its response were written where they go.
pub(crate) enum Proxied {
    Response {
        status: StatusCode,
        /// The length that the upstream stated.
        stated_length: Option<u64>,
        body: Outgoing,
    },
    /// No more HTTP follows.
    Tunnel(Box<Tunnel>, Option<Box<Finish>>),
}

/// What is known of a request by the time that it is decided.
struct Checked<'p> {
    route: &'p Arc<Route>,
    decision: Option<Decision>,
    held: Option<Held>,
    remote: IpAddr,
    is_trusted: bool,
    /// Its own span, where it is part of a trace that is followed.
    trace: Option<Trace>,
}

/// Why a request is not decided.
enum CheckFailure {
    NoRoute,
    /// Its head has two values of who asks.
    Ambiguous(Ambiguous),
}

/// What a request has until its response ends: its line in the log, its span, its permits.
struct Record<S: CounterStore + 'static> {
    line: Option<Line>,
    span: Option<Box<Followed<S>>>,
    held: Option<Box<dyn Ends>>,
}

impl<S: CounterStore + 'static> Record<S> {
    /// Hangs on a response what ends with it.
    fn finish(self, status: StatusCode, is_whole: bool) -> Option<Box<Finish>> {
        let Self { mut line, mut span, held } = self;
        if line.is_none() && span.is_none() && held.is_none() {
            return None;
        }
        if let Some(span) = &mut span {
            span.status = Some(status.as_u16());
        }
        if let Some(line) = &mut line {
            line.entry.status = status.as_u16();
            line.is_whole = is_whole;
        }
        Some(Box::new(Finish { line, _held: held, _span: span.map(|span| span as Box<dyn Ends>) }))
    }
}

/// The fields of a request on their way to its upstream.
struct UpstreamFields<'a, F> {
    fields: &'a F,
    passing: &'a Passing<'a>,
    decision: Option<&'a Decision>,
    upgrade: Option<&'a [u8]>,
}

impl<F: HeadForm> WriteFields for UpstreamFields<'_, F> {
    const ARE_BYTES: bool = F::ARE_BYTES;

    fn write(&self, out: &mut impl AddFields) {
        headers::towards_upstream(self.fields, self.passing, out);
        if let Some(decision) = self.decision.filter(|decision| is_marked(decision)) {
            answer::mark(&Facts::of(decision), &mut Own::new(out));
        }
        if let Some(upgrade) = self.upgrade {
            out.add(b"connection", b"upgrade");
            out.add(b"upgrade", upgrade);
        }
    }
}

/// Whether a decision says more than yes or no.
fn is_marked(decision: &Decision) -> bool {
    decision.degraded_by.is_some() || decision.warned_by.is_some()
}

impl<S: CounterStore + 'static> Proxy<S> {
    pub(crate) fn new(config: &GatewayConfig, limiter: Arc<Limiter<S>>) -> Result<Self, String> {
        let state = State::new(config, &limiter.rules(), None)?;
        let delayed = DelayQueue::new(config.callers.held);
        Ok(Self { limiter, state: ArcSwap::from_pointee(state), delayed, clock: SystemClock::new() })
    }

    /// What acts now.
    pub(crate) fn state(&self) -> Arc<State> {
        self.state.load_full()
    }

    /// Reads other settings, of which nothing acts yet.
    pub(crate) fn read(&self, config: &GatewayConfig) -> Result<State, String> {
        State::new(config, &self.limiter.rules(), Some(&self.state.load()))
    }

    /// From now on requests go by these.
    pub(crate) fn change(&self, state: State, most_waiting: usize) {
        self.state.store(Arc::new(state));
        self.delayed.set_max(most_waiting);
    }

    /// One request, start to end, by the settings that are active when it comes. The status and the fields of its response
    /// are written to `out`; `timeout` is of the request's own task.
    pub(crate) async fn handle<F: HeadForm, A: ResponseSink>(
        &self,
        peer: &Peer,
        request: &Forwarded<'_, F>,
        body: Option<Incoming>,
        out: &mut A,
        timeout: &mut LazyTimeout,
    ) -> Proxied {
        let state = &*self.state();
        let (now, asked) = (self.clock.now(), &request.asked);
        let line = state.log.as_ref().map(|log| Line::new(Arc::clone(log), entry(state, asked, peer, now)));
        let mut record = Record::<S> { line, span: None, held: None };
        let Checked { route, decision, held, remote, is_trusted, trace } =
            match self.check(state, asked, now).await {
                Ok(checked) => checked,
                Err(failure) => {
                    if let Some(line) = &mut record.line {
                        line.entry.remote = state.routes.nobody().address(peer.address, asked.headers);
                    }
                    return self.problem(record, &failure.into(), None, out);
                }
            };
        record.span = trace.map(|trace| Followed::new(&self.limiter, trace, request.method, route));
        if let Some(line) = &mut record.line {
            tell(&mut line.entry, route, decision.as_ref(), remote);
        }
        let facts = decision.as_ref().map(Facts::of);
        if let (Some(decision), Some(facts)) = (&decision, &facts)
            && !decision.is_allowed()
        {
            return self.denied(state, record, facts, now, out);
        }
        if let (Some(held), Some(decision)) = (held, &decision) {
            let delay = decision.delay();
            let mut guard = self.limiter.guard(held, delay);
            if delay > Span::ZERO && Box::pin(guard.wait(&self.delayed, delay)).await.is_err() {
                let detail = "too many requests wait for their turn already";
                let failure = Failure::new(StatusCode::SERVICE_UNAVAILABLE, detail);
                return self.problem(record, &failure, None, out);
            }
            record.held = Some(Box::new(guard));
        }
        let mut passing = state.passing(peer, is_trusted, route, asked.authority);
        passing.traceparent = trace.as_ref().map(trace::traceparent);
        let received =
            pass_on::<_, A>(state, request, body, route, decision.as_ref(), &passing, timeout).await;
        match received {
            Ok(received) => self.pass_back(state, record, route, received, facts.as_ref(), now, out),
            Err(failure) => {
                self.problem(record, &failure, facts.as_ref().map(|facts| (state, facts, now)), out)
            }
        }
    }

    /// Writes an upstream's response.
    #[allow(clippy::too_many_arguments, reason = "all that is known of the request, once")]
    fn pass_back<A: ResponseSink>(
        &self,
        state: &State,
        mut record: Record<S>,
        route: &Route,
        received: Received,
        facts: Option<&Facts<'_>>,
        now: Timestamp,
        out: &mut A,
    ) -> Proxied {
        let status = received.status();
        if let Some(line) = &mut record.line {
            line.entry.upstream = Some(received.address().to_owned());
        }
        out.begin(status);
        let mut own = Own::new(out);
        if let Some(facts) = facts {
            state.answers.write(facts, now, &mut own);
        }
        let idle = route.config.idle_timeout.0;
        let (stated_length, source) = match received {
            Received::H1 { connection, in_flight, pumping, head, end } => {
                let fields = head.fields(&connection.received()[..end]);
                headers::towards_caller(&fields, &mut own);
                if status == StatusCode::SWITCHING_PROTOCOLS {
                    own.out.add(b"connection", b"upgrade");
                    own.out.add(b"upgrade", fields.first(&UPGRADE).unwrap_or_default());
                    if let Some((source, write, place)) = connection.into_tunnel(end) {
                        let tunnel = Tunnel { source, write, in_flight, place, idle };
                        return Proxied::Tunnel(Box::new(tunnel), record.finish(status, true));
                    }
                    // An exchange that was answered so has both halves.
                    return Proxied::Response {
                        status,
                        stated_length: None,
                        body: Outgoing::here(Bytes::new()),
                    };
                }
                let length = stated_length(&fields);
                let body = UpstreamBody::new(connection, in_flight, (end, &head), pumping, idle);
                (length, Source::H1(body))
            }
            Received::H2 { response, in_flight } => {
                headers::towards_caller(response.headers(), &mut own);
                let length = stated_length(response.headers());
                let body = StreamBody::new(response.into_body(), idle);
                (length, Source::H2 { body, _in_flight: in_flight })
            }
        };
        let mut body = Outgoing { source, finish: None };
        body.finish = record.finish(status, body.is_end_stream());
        Proxied::Response { status, stated_length, body }
    }

    /// Writes a denial.
    fn denied<A: ResponseSink>(
        &self,
        state: &State,
        record: Record<S>,
        facts: &Facts<'_>,
        now: Timestamp,
        out: &mut A,
    ) -> Proxied {
        let status = state.answers.status(facts.ruled);
        out.begin(status);
        let mut own = Own::new(out);
        let (media_type, body) = state.answers.body(facts).unzip();
        self.put_own(&mut own, media_type);
        state.answers.write(facts, now, &mut own);
        own_response(record, status, body.unwrap_or_default())
    }

    /// Writes what went wrong; `facts` are of a decision that the caller is still told of.
    fn problem<A: ResponseSink>(
        &self,
        record: Record<S>,
        failure: &Failure,
        facts: Option<(&State, &Facts<'_>, Timestamp)>,
        out: &mut A,
    ) -> Proxied {
        let Failure { status, detail } = failure;
        out.begin(*status);
        let mut own = Own::new(out);
        self.put_own(&mut own, Some(problem::MEDIA_TYPE));
        if let Some((state, facts, now)) = facts {
            state.answers.write(facts, now, &mut own);
        }
        own_response(record, *status, problem::body(*status, detail).into())
    }

    /// The fields that all responses of the gateway's own have.
    fn put_own(&self, own: &mut impl PutFields, media_type: Option<&'static str>) {
        if let Some(media_type) = media_type {
            own.put(&CONTENT_TYPE, media_type.as_bytes());
        }
        own.put(&DATE, date::now(self.clock.now()).as_bytes());
    }

    /// What came was no request that could be handled.
    pub(crate) fn refused(&self, peer: &Peer, status: StatusCode, detail: &str) {
        if let Some(log) = &self.state.load().log {
            let mut entry = Entry::new(self.clock.now(), peer.address);
            entry.status = status.as_u16();
            entry.error = Some(detail.to_owned());
            drop(Line::new(Arc::clone(log), entry));
        }
    }

    /// Identifies the caller, finds the route and decides, once.
    async fn check<'s>(
        &self,
        state: &'s State,
        asked: &Asked<'_, impl HeadForm>,
        now: Timestamp,
    ) -> Result<Checked<'s>, CheckFailure> {
        let site = state.routes.site(asked.host()).ok_or(CheckFailure::NoRoute)?;
        let caller = site.who.direct(asked, now).map_err(CheckFailure::Ambiguous)?;
        let route = site.route(&caller).ok_or(CheckFailure::NoRoute)?;
        let (remote, is_trusted) = (caller.address, caller.is_trusted);
        let trace = trace::of(&self.limiter, asked.headers, || now);
        let (decision, held) = match &route.config.domain {
            None => (None, None),
            Some(domain) => {
                let attributes = caller.attributes();
                let within = trace.map(|trace| trace.within(now));
                let check = Check::attributes(domain, &attributes)
                    .asked_by("gateway")
                    .traced(within.as_ref())
                    .from_address(remote);
                let (decision, held) = self.limiter.admit(&check).await;
                self.limiter.took("gateway", 1, self.clock.now().since(now));
                (Some(decision), held)
            }
        };
        Ok(Checked { route, decision, held, remote, is_trusted, trace })
    }
}

impl From<CheckFailure> for Failure {
    fn from(failure: CheckFailure) -> Self {
        match failure {
            CheckFailure::Ambiguous(error) => Self::new(StatusCode::BAD_REQUEST, &error),
            CheckFailure::NoRoute => {
                Self::new(StatusCode::NOT_FOUND, "no route leads there; see `routes` of the gateway")
            }
        }
    }
}

/// A response of the gateway's own.
fn own_response<S: CounterStore>(record: Record<S>, status: StatusCode, body: Bytes) -> Proxied {
    let mut body = Outgoing::here(body);
    body.finish = record.finish(status, body.is_end_stream());
    Proxied::Response { status, stated_length: None, body }
}

/// The length that a head states: the parser lets only numbers pass.
fn stated_length(fields: &impl Fields) -> Option<u64> {
    std::str::from_utf8(fields.first(&CONTENT_LENGTH)?).ok()?.parse().ok()
}

/// The way to the upstream.
async fn pass_on<F: HeadForm, A: ResponseSink>(
    state: &State,
    request: &Forwarded<'_, F>,
    mut body: Option<Incoming>,
    route: &Route,
    decision: Option<&Decision>,
    passing: &Passing<'_>,
    timeout: &mut LazyTimeout,
) -> Result<Received, Failure> {
    if let Some(body) = &mut body {
        let max = route.config.max_body.0;
        if body.size_hint().lower() > max {
            return Err(Failure::too_large());
        }
        body.limit(max, Arc::clone(passing.guard));
    }
    let fields = request.asked.headers;
    let can_switch = A::CAN_SWITCH && body.is_none();
    let upgrade = headers::upgrade(fields, &route.config.upgrades).filter(|_| can_switch);
    let target = route.target(request.target);
    let sent = Sent {
        method: request.method,
        target: &target,
        head: &UpstreamFields { fields, passing, decision, upgrade },
        frames: Frames::of_request(request.method, body.as_ref()),
        upgrades: upgrade.is_some(),
        route: &route.config,
    };
    upstream::send(&state.pools[route.pool], &sent, body, timeout).await
}

/// What is known of a request before anything is decided.
fn entry(state: &State, asked: &Asked<'_, impl Fields>, peer: &Peer, began: Timestamp) -> Entry {
    let is_secret = state.routes.nobody().tells_secret(asked.headers, asked.path);
    Entry {
        method: Some(asked.method.to_owned()),
        host: Some(asked.host().unwrap_or_default().to_owned()),
        // The query may hold secrets, and is never told; a path that does is shown as all secrets are.
        path: Some(match is_secret {
            true => format!("{}…", beginning(asked.path)),
            false => asked.path.to_owned(),
        }),
        ..Entry::new(began, peer.address)
    }
}

/// Adds where it goes, and what was decided.
fn tell(entry: &mut Entry, route: &Route, decision: Option<&Decision>, remote: IpAddr) {
    entry.remote = remote;
    entry.route = Some(route.name.clone());
    if let Some(decision) = decision {
        let name = |by: Option<_>| by.map(|by| decision.name(by).to_owned());
        entry.decision = Some(decision.id.to_string());
        entry.denied_by = name(decision.denied_by);
        entry.degraded_by = name(decision.degraded_by);
    }
}
