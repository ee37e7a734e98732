//! `ANY /check` and `/check/*`: may the request pass that a proxy tells about? For nginx, Traefik, Caddy, HAProxy and
//! Envoy's ext_authz, which all ask before they pass a request on: 200 lets it pass, anything else is the answer.
//!
//! The method, the path and who asks come from headers, of trusted peers alone ([`tollgate_http::identity`]). Nothing that
//! decides comes from the query: some proxies let their callers write it. `?deny_status=403` may only turn one denial into
//! another, for nginx, which passes no 429 on.
//!
//! What `action: delay` holds back is answered when its turn comes: all these proxies wait for an answer, and
//! telling them how long to wait instead is nothing that they would act upon. Who would wait for too long is denied.

use super::App;
use super::problem::Problem;
use super::request::Request;
use arc_swap::ArcSwapOption;
use http::StatusCode;
use http::header::{HeaderName, HeaderValue};
use serde::Deserialize;
use std::sync::Arc;
use tollgate_core::{CounterStore, TimeDelta, Timestamp, Verdict};
use tollgate_engine::{Check, Decision, DelayQueue, Limiter, TraceContext};
use tollgate_http::h1::{HeadHeaders, RawResponse};
use tollgate_http::headers::HeaderSink;
use tollgate_http::identity::{
    IdentityConfig, IdentityConfigError, IdentityResolver, JwtVerifier, RequestView, ResolvedCaller,
};
use tollgate_http::response::{DecisionSummary, Disposition};
use tollgate_rules::Ruleset;

/// Where proxies ask.
pub(crate) const PATH: &str = "/check";
static X_ACCEL_REDIRECT: HeaderName = HeaderName::from_static("x-accel-redirect");

/// The longest that an answer can be set to be held: what nginx waits for one.
const MAX_DELAY: u64 = 60_000;

/// What an operator can say about proxies that ask.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ForwardAuthConfig {
    /// The domain whose rules decide; the only one that is loaded, where none is set.
    pub domain: Option<String>,
    /// The location that nginx goes on with, as `X-Accel-Redirect` on what may pass: `@app`.
    pub accel_redirect: Option<String>,
    /// The longest, in milliseconds, that an answer is held for `action: delay`; less than the proxy waits for one. Who
    /// would wait for longer is denied; 0 holds nobody.
    #[serde(rename = "max_delay_ms", alias = "hold_ms")]
    pub hold_ms: u64,
    /// Answers that are held at once; more are turned away with 503.
    #[serde(rename = "max_delayed", alias = "held")]
    pub held: usize,
}

impl Default for ForwardAuthConfig {
    fn default() -> Self {
        Self { domain: None, accel_redirect: None, hold_ms: 5_000, held: 10_000 }
    }
}

/// Answers proxies that ask.
#[derive(Debug)]
pub struct ForwardAuth {
    settings: IdentityConfig,
    identity: ArcSwapOption<IdentityReader>,
    tokens: Option<Arc<JwtVerifier>>,
    domain: Option<String>,
    accel_redirect: Option<HeaderValue>,
    max_delay: TimeDelta,
    delayed: DelayQueue,
}

/// Reads callers by the settings and by the endpoints that one set of rules names.
#[derive(Debug)]
struct IdentityReader {
    rules: Arc<Ruleset>,
    identity: IdentityResolver,
}

/// Settings that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardAuthError {
    /// How callers are read.
    #[error("who: {0}")]
    Identity(#[from] IdentityConfigError),
    /// No header can have this value.
    #[error("forward_auth: `accel_redirect: {0}` is no location; write `@app` or `/internal`")]
    Location(String),
    /// No proxy waits for as long.
    #[error("forward_auth: `max_delay_ms: {0}` is longer than proxies wait; must be at most {MAX_DELAY}")]
    MaxDelay(u64),
}

impl ForwardAuth {
    /// Reads the settings, and the files that they name.
    pub fn new(settings: &ForwardAuthConfig, who: &IdentityConfig) -> Result<Self, ForwardAuthError> {
        let location = settings.accel_redirect.as_ref().map(|location| {
            let value = HeaderValue::from_str(location).ok().filter(|_| location.starts_with(['@', '/']));
            value.ok_or_else(|| ForwardAuthError::Location(location.clone()))
        });
        if settings.hold_ms > MAX_DELAY {
            return Err(ForwardAuthError::MaxDelay(settings.hold_ms));
        }
        // What cannot be used is said at the start, and not when the first proxy asks.
        let tokens = JwtVerifier::new(who)?;
        IdentityResolver::sharing(who, [], tokens.clone())?;
        Ok(Self {
            settings: who.clone(),
            identity: ArcSwapOption::empty(),
            tokens,
            domain: settings.domain.clone(),
            accel_redirect: location.transpose()?,
            max_delay: TimeDelta::from_micros(settings.hold_ms * 1_000),
            delayed: DelayQueue::new(settings.held),
        })
    }

    /// What reads tokens here, for whoever looks after its keys.
    #[must_use]
    pub fn tokens(&self) -> Option<Arc<JwtVerifier>> {
        self.tokens.clone()
    }
}

impl ForwardAuth {
    /// The domain whose rules decide.
    fn domain<'r>(&'r self, rules: &'r Ruleset) -> Result<&'r str, Problem> {
        let mut all = rules.domains().map(tollgate_rules::Domain::name);
        match (&self.domain, all.next(), all.next()) {
            (Some(domain), ..) => Ok(domain),
            (None, Some(domain), None) => Ok(domain),
            _ => Err(Problem::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "No domain",
                "several domains are loaded; say which one decides with `forward_auth: {domain: NAME}`",
            )),
        }
    }

    /// Who reads callers by these rules: made anew when the rules have changed.
    fn reader<S: CounterStore>(&self, limiter: &Limiter<S>) -> Result<Arc<IdentityReader>, Problem> {
        let former = match self.identity.load_full() {
            Some(known) if limiter.is_active(&known.rules) => return Ok(known),
            former => former,
        };
        let rules = limiter.rules();
        let domain = rules.domain(self.domain(&rules)?);
        let named = domain.into_iter().flat_map(|domain| domain.named_values("endpoint"));
        match IdentityResolver::sharing(&self.settings, named, self.tokens.clone()) {
            Ok(who) => {
                let reader = Arc::new(IdentityReader { rules, identity: who });
                self.identity.store(Some(Arc::clone(&reader)));
                Ok(reader)
            }
            Err(error) => {
                tracing::warn!(%error, "callers are still read by the former rules");
                former.ok_or_else(|| {
                    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "Bad settings", error.to_string())
                })
            }
        }
    }
}

impl Default for ForwardAuth {
    /// For proxies on this machine, by the rules of the only domain.
    fn default() -> Self {
        Self::new(&ForwardAuthConfig::default(), &IdentityConfig::default())
            .expect("the defaults can be used")
    }
}

/// Whether a path is one of ours.
pub(crate) fn is_at(path: &str) -> bool {
    path.strip_prefix(PATH).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

impl IdentityReader {
    fn caller<'r>(
        &'r self,
        asked: &RequestView<'r, HeadHeaders<'r>>,
        now: Timestamp,
    ) -> Result<ResolvedCaller<'r>, Problem> {
        self.identity.resolve_forwarded(asked, PATH, now).map_err(|error| Problem::bad(error.to_string()))
    }
}

fn request_view<'r>(request: &'r Request<'r>) -> RequestView<'r, HeadHeaders<'r>> {
    RequestView {
        peer: request.peer,
        method: request.method,
        path: request.path,
        authority: request.authority,
        headers: &request.fields,
    }
}

/// Identifies the caller and decides, once.
pub(crate) async fn handle<S: CounterStore + 'static>(
    app: &App<S>,
    request: &Request<'_>,
    now: Timestamp,
    trace: Option<&TraceContext>,
) -> Result<RawResponse, Problem> {
    let reader = app.forward_auth.reader(&app.limiter)?;
    let asked = request_view(request);
    let caller = reader.caller(&asked, now)?;
    let domain = app.forward_auth.domain(&reader.rules)?;
    let attributes = caller.attributes();
    let check = Check::attributes(domain, &attributes)
        .with_protocol("http")
        .with_trace(trace)
        .with_client_address(caller.address);
    match app.limiter.admit(&check).await {
        (decision, Some(held)) if decision.delay() > TimeDelta::ZERO => {
            Ok(Box::pin(after_delay(app, request, &decision, held, now)).await)
        }
        // Permits are left to their deadline: nobody says when the request ends.
        (decision, _) => Ok(response(app, request, &DecisionSummary::from_decision(&decision), now)),
    }
}

/// Answers when the request's turn has come.
async fn after_delay<S: CounterStore + 'static>(
    app: &App<S>,
    request: &Request<'_>,
    decision: &Decision,
    held: tollgate_engine::HeldPermits,
    now: Timestamp,
) -> RawResponse {
    let mut facts = DecisionSummary::from_decision(decision);
    let delay = decision.delay();
    let mut guard = app.limiter.guard(held, delay);
    let over =
        TimeDelta::from_micros(delay.as_micros().saturating_sub(app.forward_auth.max_delay.as_micros()));
    if over > TimeDelta::ZERO {
        facts.disposition = Disposition::Denied;
        facts.retry_after = over.ceil_secs().max(1);
        facts.denied_by = delaying(decision);
    } else if guard.wait(&app.forward_auth.delayed, delay).await.is_err() {
        facts.disposition = Disposition::Unavailable;
        facts.retry_after = delay.ceil_secs().max(1);
    } else {
        // Nobody says when the request ends.
        guard.leave_to_deadline();
    }
    response(app, request, &facts, now)
}

fn response<S: CounterStore>(
    app: &App<S>,
    request: &Request<'_>,
    facts: &DecisionSummary<'_>,
    now: Timestamp,
) -> RawResponse {
    let mut answer = RawResponse::decision(&app.responses, facts, now);
    match facts.disposition {
        Disposition::Allowed => {
            if let Some(location) = &app.forward_auth.accel_redirect {
                answer.put(&X_ACCEL_REDIRECT, location.as_bytes());
            }
        }
        Disposition::Denied => {
            if let Some(status) = denial_status(request.query) {
                answer.status = status;
            }
        }
        Disposition::Unavailable => {}
    }
    answer
}

/// The rule that holds a request back.
fn delaying(decision: &Decision) -> Option<&str> {
    let delays = |verdict| matches!(verdict, Verdict::Allowed { delay } if delay == decision.delay());
    let status = decision.limits.iter().find(|status| delays(status.outcome.verdict))?;
    Some(decision.limit_name(status))
}

/// Another status for a denial: a client's error, so that no query can turn a denial into anything else.
fn denial_status(query: &str) -> Option<StatusCode> {
    let code = query.split('&').find_map(|pair| pair.strip_prefix("deny_status="))?;
    StatusCode::from_bytes(code.as_bytes()).ok().filter(StatusCode::is_client_error)
}
