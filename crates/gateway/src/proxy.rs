//! The life of a request: who asks, which route, may it pass, is it its turn, then on to the upstream and back.
//!
//! Deciding comes before a byte of the body is read and before any connection to an upstream: a denial costs neither.

use crate::access_log::{AccessLog, Entry};
use crate::body::{Incoming, Outgoing, Source};
use crate::config::GatewayConfig;
use crate::finish::{Ends, Finish};
use crate::headers::{self, Peer};
use crate::hold::Holds;
use crate::pool::Pool;
use crate::problem;
use crate::route::{Route, Routes, host};
use crate::upstream::{self, Failure};
use http::header::{CONNECTION, HOST, HeaderName, HeaderValue, UPGRADE};
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body::Body;
use std::borrow::Cow;
use std::sync::Arc;
use tollgate_core::{Clock, CounterStore, Span, SystemClock, Timestamp};
use tollgate_edge::answer::{self, AnswerSettings, Facts};
use tollgate_edge::fields::Fields;
use tollgate_edge::h1::Answer;
use tollgate_edge::who::Asked;
use tollgate_engine::{Check, Decision, Limiter};

/// Everything that requests share.
pub(crate) struct Proxy<S: CounterStore + 'static> {
    limiter: Arc<Limiter<S>>,
    routes: Routes,
    pub(crate) pools: Vec<Arc<Pool>>,
    pub(crate) holds: Arc<Holds<S>>,
    answers: AnswerSettings,
    forward: crate::config::Forward,
    /// Fields that count of trusted peers alone, and that upstreams therefore get of no others.
    trusted_only: Vec<HeaderName>,
    pub(crate) log: Option<Arc<AccessLog>>,
    clock: SystemClock,
}

/// What is known of a request by the time that it is decided.
pub(crate) struct Ruled<'p> {
    route: &'p Arc<Route>,
    decision: Option<Decision>,
    held: Option<tollgate_engine::Held>,
    remote: std::net::IpAddr,
}

/// What is known of a request before anything of it is kept.
#[allow(clippy::large_enum_variant, reason = "the large one is the usual one, and lives for a moment")]
pub(crate) enum Judged<'p> {
    /// It is turned away.
    Denied(Answer),
    Ruled(Ruled<'p>),
    /// It will have to be looked at again: it leads nowhere, or the store has to be waited for.
    Open,
}

/// Why a request is not decided yet.
enum Unruled {
    Nowhere,
    Waits,
}

/// Whether a decision says more than yes or no.
fn is_marked(decision: &Decision) -> bool {
    decision.degraded_by.is_some() || decision.warned_by.is_some()
}

impl<S: CounterStore + 'static> Proxy<S> {
    pub(crate) fn new(config: &GatewayConfig, limiter: Arc<Limiter<S>>) -> Result<Self, String> {
        let pools = config.upstreams.iter().map(|(name, pool)| {
            if pool.addresses.is_empty() {
                return Err(format!("upstream `{name}`: `addresses` is empty; write at least one host:port"));
            }
            Pool::new(name, pool).map(Arc::new).map_err(|error| format!("upstream `{name}`: {error}"))
        });
        let log = config.access_log.as_deref().map(|path| {
            AccessLog::open(path)
                .map(Arc::new)
                .map_err(|error| format!("access_log {}: {error}", path.display()))
        });
        Ok(Self {
            routes: Routes::new(config)?,
            pools: pools.collect::<Result<_, _>>()?,
            holds: Holds::new(Arc::clone(&limiter), config.callers.held),
            limiter,
            answers: config.answers.clone(),
            forward: config.forward,
            trusted_only: config
                .who
                .trusted_headers
                .values()
                .filter_map(|name| HeaderName::from_bytes(name.as_bytes()).ok())
                .collect(),
            log: log.transpose()?,
            clock: SystemClock::new(),
        })
    }

    pub(crate) fn trusts(&self, peer: std::net::IpAddr) -> bool {
        self.routes.nobody().trusts(peer)
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Decides on a request where nothing has to be waited for. Who is turned away by the million should cost little: no
    /// map of fields is made, and no task's room taken.
    pub(crate) fn judge(&self, asked: &Asked<'_, impl Fields>, now: Timestamp) -> Judged<'_> {
        let Ok(ruled) = self.rule(asked, now) else { return Judged::Open };
        match &ruled.decision {
            // Its line in the log needs more of the request.
            Some(decision) if !decision.is_allowed() && self.log.is_none() => {
                Judged::Denied(Answer::ruled(&self.answers, &Facts::of(decision), now))
            }
            _ => Judged::Ruled(ruled),
        }
    }

    /// One request, start to end; `ruled` is what [`Self::judge`] has said of it, where it was asked.
    pub(crate) async fn handle<'p>(
        &'p self,
        peer: &Peer,
        request: Request<Option<Incoming>>,
        ruled: Option<Ruled<'p>>,
    ) -> Response<Outgoing> {
        let (mut parts, body) = request.into_parts();
        let now = self.clock.now();
        let asked = Asked::new(peer.address, &parts.method, &parts.uri, &parts.headers);
        let ruled = match ruled.map_or_else(|| self.rule(&asked, now), Ok) {
            Err(Unruled::Waits) => Box::pin(self.rule_later(&asked, now)).await,
            ruled => ruled,
        };
        let Ok(Ruled { route, decision, held, remote }) = ruled else {
            let detail = "no route leads there; see `routes` of the gateway";
            return problem::answer(StatusCode::NOT_FOUND, detail);
        };
        let entry = self.entry(&parts, route, decision.as_ref(), remote, now);
        if let Some(decision) = decision.as_ref().filter(|decision| !decision.is_allowed()) {
            let answer = self.answers.respond(&Facts::of(decision), now).map(Outgoing::here);
            return self.finish(answer, entry, None);
        }
        let mut hold = held.map(|held| self.holds.hold(held));
        if let (Some(hold), Some(decision)) = (&mut hold, &decision)
            && decision.delay() > Span::ZERO
            && Box::pin(hold.wait(decision.delay())).await.is_err()
        {
            let detail = "too many requests wait for their turn already";
            return self.finish(problem::answer(StatusCode::SERVICE_UNAVAILABLE, detail), entry, None);
        }
        let held = hold.map(|hold| Box::new(hold) as Box<dyn Ends>);
        let (mut answer, upstream) =
            match self.pass_on(&mut parts, body, route, decision.as_ref(), peer).await {
                Ok((answer, upstream)) => (answer, Some(upstream)),
                Err(failure) => (problem::answer(failure.status, &failure.detail), None),
            };
        if let Some(decision) = &decision {
            let facts = Facts::of(decision);
            self.answers.write(&facts, now, answer.headers_mut());
            if is_marked(decision) {
                answer::mark(&facts, answer.headers_mut());
            }
        }
        let entry = entry.map(|entry| Entry { upstream, ..entry });
        self.finish(answer, entry, held)
    }

    /// Who asks for what, and whether they may have it. Where the store has to be waited for, `Wait` tells how.
    fn rule(&self, asked: &Asked<'_, impl Fields>, now: Timestamp) -> Result<Ruled<'_>, Unruled> {
        let site = self.routes.site(asked.host()).ok_or(Unruled::Nowhere)?;
        let caller = site.who.direct(asked, now);
        let route = site.route(&caller).ok_or(Unruled::Nowhere)?;
        let remote = caller.address;
        let (decision, held) = match &route.config.domain {
            None => (None, None),
            Some(domain) => {
                let attributes = caller.attributes();
                let check = Check::attributes(domain, &attributes).asked_by("gateway");
                let (decision, held) = self.limiter.admit_now(&check).ok_or(Unruled::Waits)?;
                self.limiter.took("gateway", 1, self.clock.now().since(now));
                (Some(decision), held)
            }
        };
        Ok(Ruled { route, decision, held, remote })
    }

    /// The same over a store that has to be waited for. In a box of its own: such a wait takes room that most requests do
    /// not need.
    async fn rule_later(&self, asked: &Asked<'_>, now: Timestamp) -> Result<Ruled<'_>, Unruled> {
        let site = self.routes.site(asked.host()).ok_or(Unruled::Nowhere)?;
        let caller = site.who.direct(asked, now);
        let route = site.route(&caller).ok_or(Unruled::Nowhere)?;
        let remote = caller.address;
        let attributes = caller.attributes();
        let domain = route.config.domain.as_deref().unwrap_or_default();
        let (decision, held) =
            self.limiter.admit(&Check::attributes(domain, &attributes).asked_by("gateway")).await;
        self.limiter.took("gateway", 1, self.clock.now().since(now));
        Ok(Ruled { route, decision: Some(decision), held, remote })
    }

    /// The way to the upstream and back.
    async fn pass_on(
        &self,
        parts: &mut Parts,
        mut body: Option<Incoming>,
        route: &Route,
        decision: Option<&Decision>,
        peer: &Peer,
    ) -> Result<(Response<Outgoing>, String), Failure> {
        if let Some(body) = &mut body {
            let most = route.config.max_body.0;
            if body.size_hint().lower() > most {
                return Err(Failure::too_large());
            }
            body.limit(most);
        }
        let upgrade = headers::upgrade(&parts.headers, &route.config.upgrades).filter(|_| body.is_none());
        headers::towards_upstream(&mut parts.headers, peer, self.forward, &self.trusted_only);
        if let Some(host) = &route.host_header {
            parts.headers.insert(HOST, host.clone());
        } else if let (Some(authority), false) = (parts.uri.authority(), parts.headers.contains_key(HOST))
            && let Ok(host) = HeaderValue::from_str(authority.as_str())
        {
            parts.headers.insert(HOST, host);
        }
        if let Some(decision) = decision.filter(|decision| is_marked(decision)) {
            answer::mark(&Facts::of(decision), &mut parts.headers);
        }
        let upgrades = upgrade.is_some();
        if let Some(upgrade) = upgrade {
            parts.headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
            parts.headers.insert(UPGRADE, upgrade);
        }
        let whole = parts.uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
        let target = match route.config.strip_prefix.as_deref().and_then(|prefix| whole.strip_prefix(prefix))
        {
            None => Cow::Borrowed(whole),
            Some(rest) if rest.starts_with('/') => Cow::Borrowed(rest),
            Some(rest) => Cow::Owned(format!("/{rest}")),
        };
        let pool = &self.pools[route.pool];
        let sent = upstream::Sent {
            method: &parts.method,
            target: &target,
            headers: &parts.headers,
            upgrades,
            route: &route.config,
        };
        upstream::send(pool, &sent, body).await
    }

    fn entry(
        &self,
        parts: &Parts,
        route: &Route,
        decision: Option<&Decision>,
        remote: std::net::IpAddr,
        began: Timestamp,
    ) -> Option<Entry> {
        self.log.as_ref()?;
        let name = |by: Option<_>| Some(decision?.name(by?).to_owned());
        Some(Entry {
            began,
            method: parts.method.to_string(),
            host: host(&parts.uri, &parts.headers).unwrap_or_default().to_owned(),
            // The query may hold secrets.
            path: parts.uri.path().to_owned(),
            remote,
            status: 0,
            route: route.name.clone(),
            upstream: None,
            decision: decision.map(|decision| decision.id.to_string()),
            denied_by: name(decision.and_then(|decision| decision.denied_by)),
            degraded_by: name(decision.and_then(|decision| decision.degraded_by)),
        })
    }

    /// Hangs on the answer what ends with it.
    fn finish(
        &self,
        mut answer: Response<Outgoing>,
        entry: Option<Entry>,
        held: Option<Box<dyn Ends>>,
    ) -> Response<Outgoing> {
        if entry.is_some() || held.is_some() {
            let status = answer.status().as_u16();
            let log =
                self.log.as_ref().zip(entry).map(|(log, entry)| (Arc::clone(log), Entry { status, ..entry }));
            let finish = Finish { bytes: 0, failed: None, log, _held: held };
            answer.body_mut().finish = Some(Box::new(finish));
        }
        if let Source::Here(_) = answer.body().source {
            answer.headers_mut().insert(http::header::DATE, tollgate_edge::date::now(self.clock.now()));
        }
        answer
    }
}
