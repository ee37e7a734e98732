//! Forward auth: `ANY /check` and `/check/*` decide the request that a proxy describes. nginx, Traefik, Caddy, HAProxy
//! and Envoy's ext_authz send such a check before they forward a request: on 200 they forward it, otherwise they return
//! the response of the check.
//!
//! Method, path and caller come from headers, of trusted peers only ([`tollgate_http::identity`]). The query has no
//! influence on the decision, because with some proxies it is the caller's. `?deny_status=403` only changes the status
//! of a denial, for nginx, which does not forward a 429.
//!
//! A request under `action: delay` gets its response after the delay, because all these proxies wait for the response
//! and would ignore a requested delay. A request whose delay is too long is denied.

use super::App;
use super::check::reject_malformed;
use super::forward_domain::ForwardDomain;
use super::identities::Identities;
use super::problem::Problem;
use super::request::Request;
use http::StatusCode;
use http::header::{HeaderName, HeaderValue};
use serde::Deserialize;
use std::sync::Arc;
use tollgate_core::{CounterStore, TimeDelta, Timestamp, Verdict};
use tollgate_engine::{Check, CheckInput, Decision, DelayQueue, TraceContext};
use tollgate_http::h1::{HeadHeaders, RawResponse};
use tollgate_http::headers::HeaderSink;
use tollgate_http::identity::{CredentialVerifier, IdentityConfig, IdentityConfigError, RequestView};
use tollgate_http::response::{DecisionSummary, Disposition};
use tollgate_rules::Ruleset;

/// The path of the check.
pub(crate) const PATH: &str = "/check";
static X_ACCEL_REDIRECT: HeaderName = HeaderName::from_static("x-accel-redirect");

/// Maximum of `max_delay_ms` in milliseconds: the default timeout of nginx.
const MAX_DELAY: u64 = 60_000;

/// The reason of a request that finds the delay queue full.
const TOO_MANY_DELAYED: &str = "too many requests are delayed already";

/// Forward auth settings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ForwardAuthConfig {
    /// The domain whose rules apply; by default the only one that is loaded.
    pub domain: Option<String>,
    /// The nginx location for allowed requests, such as `@app`, sent as `X-Accel-Redirect`.
    pub accel_redirect: Option<String>,
    /// Maximum delay of a response under `action: delay`, in milliseconds; must be below the proxy's timeout. Requests
    /// with a longer delay are denied; 0 disables delays.
    #[serde(alias = "hold_ms")]
    pub max_delay_ms: u64,
    /// Maximum number of delayed responses; further requests are shed with 503.
    #[serde(alias = "held")]
    pub max_delayed: usize,
}

impl Default for ForwardAuthConfig {
    fn default() -> Self {
        Self { domain: None, accel_redirect: None, max_delay_ms: 5_000, max_delayed: 10_000 }
    }
}

/// The forward auth handler's state.
#[derive(Debug)]
pub struct ForwardAuth {
    /// Also for the request heads of `/v1/check`.
    pub(crate) identities: Identities,
    domain: Arc<ForwardDomain>,
    accel_redirect: Option<HeaderValue>,
    max_delay: TimeDelta,
    delayed: DelayQueue,
}

/// Invalid forward auth settings.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardAuthError {
    /// Invalid identity settings.
    #[error("identity: {0}")]
    Identity(#[from] IdentityConfigError),
    /// Not a location of nginx.
    #[error("forward_auth: invalid location `accel_redirect: {0}`; write `@app` or `/internal`")]
    Location(String),
    /// A domain that no loaded rule file has.
    #[error("forward_auth: unknown domain `{domain}`; use one of those loaded: {loaded}")]
    UnknownDomain {
        /// The configured domain.
        domain: String,
        /// The loaded domains, separated by commas.
        loaded: String,
    },
    /// A delay that exceeds the timeouts of proxies.
    #[error("forward_auth: `max_delay_ms: {0}` exceeds the timeout of proxies; write at most {MAX_DELAY}")]
    MaxDelay(u64),
}

impl ForwardAuth {
    /// Validates the settings and reads the files that they name.
    pub fn new(settings: &ForwardAuthConfig, identity: &IdentityConfig) -> Result<Self, ForwardAuthError> {
        let location = settings.accel_redirect.as_ref().map(|location| {
            let value = HeaderValue::from_str(location).ok().filter(|_| location.starts_with(['@', '/']));
            value.ok_or_else(|| ForwardAuthError::Location(location.clone()))
        });
        if settings.max_delay_ms > MAX_DELAY {
            return Err(ForwardAuthError::MaxDelay(settings.max_delay_ms));
        }
        Ok(Self {
            identities: Identities::new(identity)?,
            domain: Arc::new(ForwardDomain::new(settings.domain.clone())),
            accel_redirect: location.transpose()?,
            max_delay: TimeDelta::from_micros(settings.max_delay_ms * 1_000),
            delayed: DelayQueue::new(settings.max_delayed),
        })
    }

    /// Checks that the configured domain is one of `rules`: requests to an unknown domain have no limits.
    ///
    /// # Errors
    /// Returns [`ForwardAuthError::UnknownDomain`] if it is not.
    pub fn check_domain(&self, rules: &Ruleset) -> Result<(), ForwardAuthError> {
        self.domain.follow(rules);
        match self.domain.configured() {
            Some(domain) if rules.domain(domain).is_none() => Err(ForwardAuthError::UnknownDomain {
                domain: domain.to_owned(),
                loaded: rules.domains().map(tollgate_rules::Domain::name).collect::<Vec<_>>().join(", "),
            }),
            _ => Ok(()),
        }
    }

    /// Returns the domain, to tell it of new rules and to show it.
    #[must_use]
    pub fn domain(&self) -> Arc<ForwardDomain> {
        Arc::clone(&self.domain)
    }

    /// Returns what the rules expect of requests to `/check` that these settings do not provide; nothing if no setting says
    /// that a proxy uses it.
    #[must_use]
    pub fn warnings(settings: &ForwardAuthConfig, identity: &IdentityConfig, rules: &Ruleset) -> Vec<String> {
        let mut domains = rules.domains();
        let domain = match &settings.domain {
            Some(domain) => rules.domain(domain),
            None => domains.next().filter(|_| domains.next().is_none()),
        };
        let is_used = *settings != ForwardAuthConfig::default();
        domain.filter(|_| is_used).map(|domain| identity.cost_warnings(domain, "/check")).unwrap_or_default()
    }

    /// Returns the verifier of credentials, for the task that reloads its keys.
    #[must_use]
    pub fn verifier(&self) -> Arc<CredentialVerifier> {
        self.identities.verifier()
    }
}

impl Default for ForwardAuth {
    /// Trusts proxies on loopback and applies the rules of the only domain.
    fn default() -> Self {
        Self::new(&ForwardAuthConfig::default(), &IdentityConfig::default()).expect("valid defaults")
    }
}

/// Returns whether a path is `/check` or below it.
pub(crate) fn is_at(path: &str) -> bool {
    path.strip_prefix(PATH).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
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

/// Resolves the caller and decides, each once.
pub(crate) async fn handle<S: CounterStore + 'static>(
    app: &App<S>,
    request: &Request<'_>,
    now: Timestamp,
    trace: Option<&TraceContext>,
) -> Result<RawResponse, Problem> {
    let identities = &app.forward_auth.identities;
    let active = identities.active(&app.limiter);
    let domain = app.forward_auth.domain.domain(&active.rules)?.name();
    let view = request_view(request);
    let resolver = identities.resolver(&active, domain)?;
    let caller = resolver.resolve_forwarded(&view, PATH, now).map_err(|error| Problem::identity(&error))?;
    let attributes = caller.attributes();
    let check = Check::attributes(domain, &attributes)
        .with_protocol("http")
        .with_trace(trace)
        .with_client_address(caller.address);
    let (decision, held) = app.limiter.admit(&check).await;
    reject_malformed(&decision)?;
    match (decision, held) {
        (decision, Some(held)) if decision.delay() > TimeDelta::ZERO => {
            Ok(Box::pin(after_delay(app, request, (&decision, check.input), held, now)).await)
        }
        // Permits expire at their deadline: the proxy does not report the end of the request.
        (decision, _) => {
            let scope = app.responses.scope(&decision, check.input);
            let facts = summary(&decision).with_scope(scope.as_deref());
            Ok(response(app, request, &facts, now))
        }
    }
}

/// The facts of a response to a proxy, which may drop the body: with the reason.
fn summary(decision: &Decision) -> DecisionSummary<'_> {
    DecisionSummary { reason: decision.reason.as_deref(), ..DecisionSummary::from_decision(decision) }
}

/// Responds after the request's delay.
async fn after_delay<S: CounterStore + 'static>(
    app: &App<S>,
    request: &Request<'_>,
    (decision, input): (&Decision, CheckInput<'_>),
    held: tollgate_engine::HeldPermits,
    now: Timestamp,
) -> RawResponse {
    let scope = app.responses.scope(decision, input);
    let mut facts = summary(decision).with_scope(scope.as_deref());
    let delay = decision.delay();
    let mut guard = app.limiter.guard(held, delay);
    let over =
        TimeDelta::from_micros(delay.as_micros().saturating_sub(app.forward_auth.max_delay.as_micros()));
    if over > TimeDelta::ZERO {
        facts.disposition = Disposition::Denied;
        facts.retry_after = Some(over.ceil_secs().max(1));
        facts.denied_by = delaying(decision);
    } else if guard.wait(&app.forward_auth.delayed, delay).await.is_err() {
        facts.disposition = Disposition::Unavailable;
        facts.retry_after = Some(delay.ceil_secs().max(1));
        facts.denied_by = delaying(decision);
        facts.is_shed = true;
        facts.reason = Some(TOO_MANY_DELAYED);
    } else {
        // The proxy does not report the end of the request.
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
    let mut response = RawResponse::decision(&app.responses, facts, now);
    match facts.disposition {
        Disposition::Allowed => {
            if let Some(location) = &app.forward_auth.accel_redirect {
                response.put(&X_ACCEL_REDIRECT, location.as_bytes());
            }
        }
        Disposition::Denied => {
            if let Some(status) = denial_status(request.query) {
                response.status = status;
            }
        }
        Disposition::Unavailable => {}
    }
    response
}

/// Returns the rule that delays a request.
fn delaying(decision: &Decision) -> Option<&str> {
    let delays = |verdict| matches!(verdict, Verdict::Allowed { delay } if delay == decision.delay());
    let status = decision.limits.iter().find(|status| delays(status.outcome.verdict))?;
    Some(decision.limit_name(status))
}

/// Returns the status that the query requests for a denial. Only a 4xx is accepted, so that a denial stays a denial.
fn denial_status(query: &str) -> Option<StatusCode> {
    let code = query.split('&').find_map(|pair| pair.strip_prefix("deny_status="))?;
    StatusCode::from_bytes(code.as_bytes()).ok().filter(StatusCode::is_client_error)
}
