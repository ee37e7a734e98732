//! The life of a request: who asks, which route, may it pass, is it its turn, then on to the upstream and back.
//!
//! Deciding comes before a byte of the body is read and before any connection to an upstream: a denial costs neither.

use crate::access_log::{Entry, Line};
use crate::body::{Incoming, Outgoing, Source};
use crate::config::GatewayConfig;
use crate::finish::{Ends, Finish};
use crate::follow::Followed;
use crate::h1::write::Frames;
use crate::headers::{self, Own, Passing, Peer};
use crate::hold::Holds;
use crate::pool::Pool;
use crate::problem;
use crate::route::Route;
use crate::state::State;
use crate::upstream::{self, Failure, Head};
use arc_swap::ArcSwap;
use http::request::Parts;
use http::uri::Authority;
use http::{Request, Response, StatusCode};
use http_body::Body;
use std::net::IpAddr;
use std::sync::Arc;
use tollgate_core::{Clock, CounterStore, Span, SystemClock, Timestamp, beginning};
use tollgate_edge::answer::{self, Facts};
use tollgate_edge::fields::Fields;
use tollgate_edge::h1::Answer;
use tollgate_edge::trace;
use tollgate_edge::who::{Ambiguous, Asked};
use tollgate_engine::{Check, Decision, Limiter, Trace};

/// Everything that requests share.
pub(crate) struct Proxy<S: CounterStore + 'static> {
    limiter: Arc<Limiter<S>>,
    state: ArcSwap<State>,
    pub(crate) holds: Arc<Holds<S>>,
    clock: SystemClock,
}

/// What is known of a request by the time that it is decided.
pub(crate) struct Ruled<'p> {
    pub(crate) route: &'p Arc<Route>,
    pub(crate) decision: Option<Decision>,
    pub(crate) held: Option<tollgate_engine::Held>,
    remote: IpAddr,
    pub(crate) is_trusted: bool,
    /// Its own span, where it is part of a trace that is followed.
    pub(crate) trace: Option<Trace>,
    /// When it came.
    pub(crate) began: Timestamp,
    /// Whether it was sent on a connection that had waited and turned out to be closed: the next must be a new one.
    pub(crate) is_stale: bool,
}

/// What is known of a request before anything of it is kept.
pub(crate) enum Judged {
    /// It is turned away.
    Denied(Answer),
    /// It is decided, and told where it was asked to be.
    Ruled,
    /// It will have to be looked at again: it leads nowhere, is ambiguous, or the store has to be waited for.
    Open,
}

/// Why a request is not decided yet, or never will be.
enum Unruled {
    Nowhere,
    Waits,
    /// It says two things of who asks.
    Ambiguous(Ambiguous),
}

impl Unruled {
    /// What its caller is told.
    fn problem(&self) -> Response<Outgoing> {
        match self {
            Self::Ambiguous(error) => problem::answer(StatusCode::BAD_REQUEST, &error.to_string()),
            Self::Nowhere | Self::Waits => {
                let detail = "no route leads there; see `routes` of the gateway";
                problem::answer(StatusCode::NOT_FOUND, detail)
            }
        }
    }
}

/// Whether a decision says more than yes or no.
pub(crate) fn is_marked(decision: &Decision) -> bool {
    decision.degraded_by.is_some() || decision.warned_by.is_some()
}

impl<S: CounterStore + 'static> Proxy<S> {
    pub(crate) fn new(config: &GatewayConfig, limiter: Arc<Limiter<S>>) -> Result<Self, String> {
        let state = State::new(config, &limiter.rules(), None)?;
        let holds = Holds::new(Arc::clone(&limiter), config.callers.held);
        Ok(Self { limiter, state: ArcSwap::from_pointee(state), holds, clock: SystemClock::new() })
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
        self.holds.bound(most_waiting);
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Decides on a request where nothing has to be waited for. Who is turned away by the million should cost little: no
    /// map of fields is made, and no task's room taken.
    pub(crate) fn judge<'s>(
        &self,
        state: &'s State,
        asked: &Asked<'_, impl Fields>,
        now: Timestamp,
        ruled: &mut Option<Ruled<'s>>,
    ) -> Judged {
        *ruled = self.rule(state, asked, now).ok();
        match ruled {
            None => Judged::Open,
            // Its line in the log needs more of the request, and so does its span.
            Some(Ruled { decision: Some(decision), trace: None, .. })
                if !decision.is_allowed() && state.log.is_none() =>
            {
                Judged::Denied(Answer::ruled(&state.answers, &Facts::of(decision), now))
            }
            Some(_) => Judged::Ruled,
        }
    }

    /// One request, start to end, by what acted when it came; `ruled` is what [`Self::judge`] has said of it, where it was
    /// asked.
    pub(crate) async fn handle<'s>(
        &self,
        state: &'s State,
        peer: &Peer,
        request: Request<Option<Incoming>>,
        ruled: Option<Ruled<'s>>,
    ) -> Response<Outgoing> {
        let (parts, body) = request.into_parts();
        let now = self.clock.now();
        let asked = Asked::new(peer.address, &parts.method, &parts.uri, &parts.headers);
        let mut line =
            state.log.as_ref().map(|log| Line::new(Arc::clone(log), entry(state, &asked, peer, now)));
        let ruled = match ruled.map_or_else(|| self.rule(state, &asked, now), Ok) {
            Err(Unruled::Waits) => Box::pin(self.rule_later(state, &asked, now)).await,
            ruled => ruled,
        };
        let Ruled { route, decision, held, remote, is_trusted, trace, is_stale, .. } = match ruled {
            Ok(ruled) => ruled,
            Err(unruled) => {
                if let Some(line) = &mut line {
                    line.entry.remote = state.routes.nobody().address(peer.address, &parts.headers);
                }
                return self.finish(unruled.problem(), line, None, None);
            }
        };
        let span = trace.map(|trace| Followed::new(&self.limiter, trace, &parts.method, route));
        if let Some(line) = &mut line {
            tell(&mut line.entry, route, decision.as_ref(), remote);
        }
        if let Some(decision) = decision.as_ref().filter(|decision| !decision.is_allowed()) {
            let answer = state.answers.respond(&Facts::of(decision), now).map(Outgoing::here);
            return self.finish(answer, line, span, None);
        }
        let mut hold = held.map(|held| self.holds.hold(held));
        if let (Some(hold), Some(decision)) = (&mut hold, &decision)
            && decision.delay() > Span::ZERO
            && Box::pin(hold.wait(decision.delay())).await.is_err()
        {
            let detail = "too many requests wait for their turn already";
            let answer = problem::answer(StatusCode::SERVICE_UNAVAILABLE, detail);
            return self.finish(answer, line, span, None);
        }
        let held = hold.map(|hold| Box::new(hold) as Box<dyn Ends>);
        let mut passing =
            state.passing(peer, is_trusted, route, parts.uri.authority().map(Authority::as_str));
        passing.traceparent = trace.as_ref().map(trace::traceparent);
        let pool = &state.pools[route.pool];
        let (mut answer, upstream) =
            match pass_on(pool, &parts, body, route, decision.as_ref(), &passing, is_stale).await {
                Ok((answer, upstream)) => (answer, Some(upstream)),
                Err(failure) => (problem::answer(failure.status, &failure.detail), None),
            };
        if let Some(decision) = &decision {
            let facts = Facts::of(decision);
            state.answers.write(&facts, now, answer.headers_mut());
            if is_marked(decision) {
                answer::mark(&facts, answer.headers_mut());
            }
        }
        if let Some(line) = &mut line {
            line.entry.upstream = upstream;
        }
        self.finish(answer, line, span, held)
    }

    /// The line in the log of a request that was decided.
    pub(crate) fn line_of(
        &self,
        state: &State,
        asked: &Asked<'_, impl Fields>,
        peer: &Peer,
        ruled: &Ruled<'_>,
    ) -> Option<Line> {
        let log = state.log.as_ref()?;
        let mut entry = entry(state, asked, peer, ruled.began);
        tell(&mut entry, ruled.route, ruled.decision.as_ref(), ruled.remote);
        Some(Line::new(Arc::clone(log), entry))
    }

    /// What a caller is told whose request no upstream has answered.
    pub(crate) fn unanswered(
        &self,
        state: &State,
        asked: &Asked<'_, impl Fields>,
        peer: &Peer,
        ruled: &Ruled<'_>,
        failure: &Failure,
    ) -> Response<Outgoing> {
        let mut answer = problem::answer(failure.status, &failure.detail);
        if let Some(decision) = &ruled.decision {
            state.answers.write(&Facts::of(decision), ruled.began, answer.headers_mut());
        }
        self.finish(answer, self.line_of(state, asked, peer, ruled), None, None)
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

    /// Who asks for what, and whether they may have it. Where the store has to be waited for, `Waits` tells so.
    fn rule<'s>(
        &self,
        state: &'s State,
        asked: &Asked<'_, impl Fields>,
        now: Timestamp,
    ) -> Result<Ruled<'s>, Unruled> {
        let site = state.routes.site(asked.host()).ok_or(Unruled::Nowhere)?;
        let caller = site.who.direct(asked, now).map_err(Unruled::Ambiguous)?;
        let route = site.route(&caller).ok_or(Unruled::Nowhere)?;
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
                let _ = check;
                return Err(Unruled::Waits);
            }
        };
        Ok(Ruled { route, decision, held, remote, is_trusted, trace, began: now, is_stale: false })
    }

    /// The same over a store that has to be waited for. In a box of its own: such a wait takes room that most requests do
    /// not need.
    async fn rule_later<'s>(
        &self,
        state: &'s State,
        asked: &Asked<'_>,
        now: Timestamp,
    ) -> Result<Ruled<'s>, Unruled> {
        let site = state.routes.site(asked.host()).ok_or(Unruled::Nowhere)?;
        let caller = site.who.direct(asked, now).map_err(Unruled::Ambiguous)?;
        let route = site.route(&caller).ok_or(Unruled::Nowhere)?;
        let (remote, is_trusted) = (caller.address, caller.is_trusted);
        let attributes = caller.attributes();
        let domain = route.config.domain.as_deref().unwrap_or_default();
        let trace = trace::of(&self.limiter, asked.headers, || now);
        let within = trace.map(|trace| trace.within(now));
        let check = Check::attributes(domain, &attributes)
            .asked_by("gateway")
            .traced(within.as_ref())
            .from_address(remote);
        let (decision, held) = self.limiter.admit(&check).await;
        self.limiter.took("gateway", 1, self.clock.now().since(now));
        Ok(Ruled {
            route,
            decision: Some(decision),
            held,
            remote,
            is_trusted,
            trace,
            began: now,
            is_stale: false,
        })
    }

    /// Hangs on the answer what ends with it.
    fn finish(
        &self,
        mut answer: Response<Outgoing>,
        mut line: Option<Line>,
        mut span: Option<Box<Followed<S>>>,
        held: Option<Box<dyn Ends>>,
    ) -> Response<Outgoing> {
        if line.is_some() || span.is_some() || held.is_some() {
            if let Some(span) = &mut span {
                span.status = Some(answer.status().as_u16());
            }
            if let Some(line) = &mut line {
                line.entry.status = answer.status().as_u16();
                line.is_whole = answer.body().is_end_stream();
            }
            answer.body_mut().finish =
                Some(Box::new(Finish { line, _held: held, _span: span.map(|span| span as Box<dyn Ends>) }));
        }
        if let Source::Here(_) = answer.body().source {
            answer.headers_mut().insert(http::header::DATE, tollgate_edge::date::now(self.clock.now()));
        }
        answer
    }
}

/// The way to the upstream and back.
async fn pass_on(
    pool: &Pool,
    parts: &Parts,
    mut body: Option<Incoming>,
    route: &Route,
    decision: Option<&Decision>,
    passing: &Passing<'_>,
    is_stale: bool,
) -> Result<(Response<Outgoing>, String), Failure> {
    if let Some(body) = &mut body {
        let most = route.config.max_body.0;
        if body.size_hint().lower() > most {
            return Err(Failure::too_large());
        }
        body.limit(most, Arc::clone(passing.guard));
    }
    let upgrade = headers::upgrade(&parts.headers, &route.config.upgrades).filter(|_| body.is_none());
    let target = route.target(parts.uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str));
    let frames = Frames::of_request(&parts.method, body.as_ref());
    let head = Head::new(pool.protocol(), &parts.method, &target, frames, |out| {
        headers::towards_upstream(&parts.headers, passing, out);
        if let Some(decision) = decision.filter(|decision| is_marked(decision)) {
            answer::mark(&Facts::of(decision), &mut Own::new(out));
        }
        if let Some(upgrade) = upgrade {
            out.add(b"connection", b"upgrade");
            out.add(b"upgrade", upgrade);
        }
    });
    let sent = upstream::Sent {
        method: &parts.method,
        target: &target,
        head,
        upgrades: upgrade.is_some(),
        is_stale,
        route: &route.config,
    };
    upstream::send(pool, &sent, body).await
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
