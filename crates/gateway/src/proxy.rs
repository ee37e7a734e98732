//! The life of a request: identity, route, decision, delay queue, then the upstream and back.
//!
//! The decision comes before the body is read and before a connection to an upstream is used: a denial costs neither.

use crate::access_log::{AccessLogGuard, AccessRecord};
use crate::body::ClientBody;
use crate::config::GatewayConfig;
use crate::headers::{self, ForwardRules, Peer};
use crate::message::{Forwarded, HeadForm, Proxied, ResponseSink, UpstreamFields};
use crate::place::UpstreamPlace;
use crate::proxy_state::ProxyState;
use crate::request_span::RequestSpan;
use crate::respond::Record;
use crate::route::Route;
use crate::upstream::{self, Failure, Received, UpstreamRequest};
use arc_swap::ArcSwap;
use http::StatusCode;
use http_body::Body;
use std::net::IpAddr;
use std::sync::Arc;
use tollgate_core::{Clock, CounterStore, SystemClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Decision, DelayQueue, Ended, HeldPermits, Limiter, TraceContext, WorkerPermit};
use tollgate_http::identity::{AmbiguousIdentity, RequestView, ResolvedCaller};
use tollgate_http::response::{DecisionSummary, RequestScope};
use tollgate_http::server::LazyTimeout;
use tollgate_http::server::write::Frames;
use tollgate_http::traceparent;

/// State shared by all requests.
pub(crate) struct Proxy<S: CounterStore + 'static> {
    limiter: Arc<Limiter<S>>,
    state: ArcSwap<ProxyState>,
    /// Delay queue for `action: delay`.
    pub(crate) delayed: DelayQueue,
    clock: SystemClock,
}

/// A request after its check.
struct CheckedRequest<'p> {
    route: &'p Arc<Route>,
    decision: Option<Decision>,
    /// What a response reports about the request.
    scope: Option<Box<RequestScope>>,
    held: Option<HeldPermits>,
    /// Its place among the requests in flight to the upstream.
    place: Option<WorkerPermit>,
    /// Who is delayed, and takes a place after the delay.
    delayed: Option<Box<ResolvedCaller<'p>>>,
    remote: IpAddr,
    is_trusted: bool,
    /// The request's own span, if it is part of a sampled trace.
    trace: Option<TraceContext>,
}

/// Why a request could not be checked.
enum CheckFailure {
    NoRoute,
    /// Servers would read the head differently.
    Ambiguous(AmbiguousIdentity),
    /// A rule takes its cost from an attribute that is not a whole number.
    MalformedCost(String),
}

impl<S: CounterStore + 'static> Proxy<S> {
    pub(crate) fn new(config: &GatewayConfig, limiter: Arc<Limiter<S>>) -> Result<Self, String> {
        let state = ProxyState::new(config, limiter.rules(), None)?;
        let delayed = DelayQueue::new(config.callers.held);
        Ok(Self { limiter, state: ArcSwap::from_pointee(state), delayed, clock: SystemClock::new() })
    }

    /// Returns the active state.
    pub(crate) fn state(&self) -> Arc<ProxyState> {
        let state = self.state.load_full();
        if self.limiter.is_active(&state.rules) { state } else { self.follow_rules(&state) }
    }

    /// Activates a state for the active rules, because rules name endpoints.
    #[cold]
    fn follow_rules(&self, former: &Arc<ProxyState>) -> Arc<ProxyState> {
        let next = Arc::new(former.with_rules(self.limiter.rules()));
        // Another request, or a reload, may have been faster.
        let found = self.state.compare_and_swap(former, Arc::clone(&next));
        if Arc::ptr_eq(&found, former) { next } else { self.state.load_full() }
    }

    /// Builds the state of another configuration without activating it.
    pub(crate) fn read(&self, config: &GatewayConfig) -> Result<ProxyState, String> {
        ProxyState::new(config, self.limiter.rules(), Some(&self.state.load()))
    }

    /// Activates a state for new requests.
    pub(crate) fn change(&self, state: ProxyState, max_delayed: usize) {
        self.state.store(Arc::new(state));
        self.delayed.set_max(max_delayed);
    }

    /// Handles one request from start to end with the configuration that is active when it arrives. Writes the status and
    /// headers of the response to `out`; `timeout` belongs to the request's task.
    pub(crate) async fn handle<F: HeadForm, A: ResponseSink>(
        &self,
        peer: &Peer,
        request: &Forwarded<'_, F>,
        mut body: Option<ClientBody>,
        out: &mut A,
        timeout: &mut LazyTimeout,
    ) -> Proxied {
        let state = &*self.state();
        // The place at the upstream is measured from here, by the limiter's clock.
        let (now, asked) = (self.limiter.clock().now(), &request.asked);
        let mut record = Record::<S>::new(state, asked, peer, self.clock, now);
        let CheckedRequest { route, decision, scope, held, place, delayed, remote, is_trusted, trace } =
            match self.check(state, asked, now).await {
                Ok(checked) => checked,
                Err(failure) => {
                    if let Some(line) = &mut record.line {
                        line.entry.remote = state.routes.fallback_site().address(peer.address, asked.headers);
                    }
                    return record.problem(&failure.into(), None, out);
                }
            };
        record.span = trace.map(|trace| RequestSpan::new(&self.limiter, trace, request.method, route));
        record.add_decision(route, decision.as_ref(), remote);
        let facts = decision.as_ref();
        let facts =
            facts.map(|decision| DecisionSummary::from_decision(decision).with_scope(scope.as_deref()));
        if let (Some(decision), Some(facts)) = (&decision, &facts)
            && !decision.is_allowed()
        {
            return record.denied(state, facts, now, out);
        }
        let mut place = place;
        if let (Some(held), Some(decision)) = (held, &decision) {
            let delay = decision.delay();
            let mut guard = self.limiter.guard(held, delay);
            if delay > TimeDelta::ZERO {
                if Box::pin(self.delayed.wait(delay)).await.is_err() {
                    let detail = "the delay queue is full";
                    let failure = Failure::new(StatusCode::SERVICE_UNAVAILABLE, detail);
                    return record.problem(&failure, facts.as_ref().map(|facts| (state, facts, now)), out);
                }
                // Dropping the guard of a request that is shed now refunds its charges.
                if let Some(caller) = delayed {
                    match Box::pin(self.enter_after_delay(state, route, &caller)).await {
                        Ok(entered) => place = entered,
                        Err(shed) => {
                            record.add_decision(route, Some(&shed), remote);
                            let facts = DecisionSummary::from_decision(&shed).with_scope(scope.as_deref());
                            return record.denied(state, &facts, self.limiter.clock().now(), out);
                        }
                    }
                }
                guard.proceed();
            }
            record.held = Some(Box::new(guard));
        }
        record.place = place.map(|permit| match &mut body {
            None => UpstreamPlace::Own(permit),
            Some(body) => {
                let (place, shared) = UpstreamPlace::shared(permit);
                body.hold(shared, route.config.timeout.0, state.pools[route.pool].protocol());
                place
            }
        });
        let mut passing = state.forward_rules(peer, is_trusted, route, asked.authority);
        passing.traceparent = trace.as_ref().map(traceparent::format);
        let received =
            forward::<_, A>(state, request, body, route, decision.as_ref(), &passing, timeout).await;
        // A backend that could not be reached, or a body that was refused, says nothing about the upstream's latency.
        let is_measured = received.as_ref().map_or_else(Failure::is_timeout, |_| true);
        if let Some(place) = record.place.as_mut().filter(|_| is_measured) {
            let is_good = received.as_ref().is_ok_and(|received| !received.status().is_server_error());
            place.ended(if is_good { Ended::Completed } else { Ended::Failed });
        }
        match received {
            Ok(received) => record.send_response(state, route, received, facts.as_ref(), now, out),
            Err(failure) => record.problem(&failure, facts.as_ref().map(|facts| (state, facts, now)), out),
        }
    }

    /// Logs a message that was rejected with a problem response before it became a request.
    pub(crate) fn rejected(&self, peer: &Peer, status: StatusCode, detail: &str) {
        if let Some(log) = &self.state.load().log {
            let mut entry = AccessRecord::new(self.clock.now(), peer.address);
            entry.status = status.as_u16();
            entry.error = Some(detail.to_owned());
            entry.bytes = crate::problem::body(status, detail).len() as u64;
            drop(AccessLogGuard::new(Arc::clone(log), entry));
        }
    }

    /// Identifies the caller, finds the route and makes the decision, once.
    async fn check<'s>(
        &self,
        state: &'s ProxyState,
        asked: &'s RequestView<'_, impl HeadForm>,
        now: Timestamp,
    ) -> Result<CheckedRequest<'s>, CheckFailure> {
        let site = state.routes.site(asked.host()).ok_or(CheckFailure::NoRoute)?;
        let (caller, route) = site.resolve(asked, now).map_err(CheckFailure::Ambiguous)?;
        let route = route.ok_or(CheckFailure::NoRoute)?;
        let (remote, is_trusted) = (caller.address, caller.is_trusted);
        let trace = traceparent::from_headers(&self.limiter, asked.headers, || now);
        let mut delayed = None;
        let (decision, scope, held, place) = match &route.config.domain {
            None => (None, None, None, None),
            Some(domain) => {
                let attributes = caller.attributes();
                let within = trace.map(|trace| trace.child(now));
                let check = Check::attributes(domain, &attributes)
                    .with_protocol("gateway")
                    .with_trace(within.as_ref())
                    .with_client_address(remote);
                let (decision, held, place) = self.decide(&check, &state.pools[route.pool].name, now).await;
                if let Some(message) = decision.malformed_cost_message() {
                    return Err(CheckFailure::MalformedCost(message));
                }
                self.limiter.record_latency("gateway", 1, self.limiter.clock().now().since(now));
                let scope = state.responses.scope(&decision, check.input);
                if decision.delay() > TimeDelta::ZERO && self.limiter.tracks_upstreams() {
                    drop(attributes);
                    delayed = Some(Box::new(caller));
                }
                (Some(decision), scope, held, place)
            }
        };
        Ok(CheckedRequest { route, decision, scope, held, place, delayed, remote, is_trusted, trace })
    }

    /// Takes a place in flight for a request whose delay is over.
    async fn enter_after_delay(
        &self,
        state: &ProxyState,
        route: &Route,
        caller: &ResolvedCaller<'_>,
    ) -> Result<Option<WorkerPermit>, Decision> {
        let Some(domain) = &route.config.domain else { return Ok(None) };
        let attributes = caller.attributes();
        let check = Check::attributes(domain, &attributes)
            .with_protocol("gateway")
            .with_client_address(caller.address);
        self.limiter.enter_upstream_after_delay(&check, &state.pools[route.pool].name).await
    }

    /// Takes a place in flight to the upstream, then decides: a request that is shed is charged nothing. One that is to be
    /// delayed holds no place meanwhile, and takes one afterwards.
    async fn decide(
        &self,
        check: &Check<'_>,
        upstream: &str,
        now: Timestamp,
    ) -> (Decision, Option<HeldPermits>, Option<WorkerPermit>) {
        let mut place = match self.limiter.enter_upstream(check, upstream, now).await {
            Ok(place) => place,
            Err(shed) => return (shed, None, None),
        };
        let reason = place.as_ref().and_then(WorkerPermit::would_be_shed);
        let (decision, held) = self.limiter.admit(&check.with_reason(reason)).await;
        if let Some(entered) =
            place.as_mut().filter(|_| !decision.is_allowed() || decision.delay() > TimeDelta::ZERO)
        {
            entered.ended(Ended::Denied);
            place = None;
        }
        (decision, held, place)
    }
}

impl From<CheckFailure> for Failure {
    fn from(failure: CheckFailure) -> Self {
        match failure {
            CheckFailure::Ambiguous(error) => Self::new(error.status(), &error),
            CheckFailure::MalformedCost(message) => Self::new(StatusCode::BAD_REQUEST, &message),
            CheckFailure::NoRoute => {
                Self::new(StatusCode::NOT_FOUND, "no route matches this host, method and path")
            }
        }
    }
}

/// Forwards a request to the route's upstream.
async fn forward<F: HeadForm, A: ResponseSink>(
    state: &ProxyState,
    request: &Forwarded<'_, F>,
    mut body: Option<ClientBody>,
    route: &Route,
    decision: Option<&Decision>,
    passing: &ForwardRules<'_>,
    timeout: &mut LazyTimeout,
) -> Result<Received, Failure> {
    if let Some(body) = &mut body {
        let max = route.config.max_body.0;
        if body.size_hint().lower() > max {
            return Err(Failure::too_large());
        }
        body.limit(max, Arc::clone(passing.protected));
    }
    let fields = request.asked.headers;
    let can_switch = A::CAN_SWITCH && body.is_none();
    let upgrade = headers::upgrade(fields, &route.config.upgrades).filter(|_| can_switch);
    let target = route.target(request.target);
    let sent = UpstreamRequest {
        method: request.method,
        target: &target,
        head: &UpstreamFields { fields, passing, decision, upgrade },
        frames: Frames::for_request(request.method, body.as_ref()),
        upgrades: upgrade.is_some(),
        route: &route.config,
    };
    upstream::send(&state.pools[route.pool], &sent, body, timeout).await
}
