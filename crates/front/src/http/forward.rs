//! `ANY /check` and `/check/*`: may the request pass that a proxy tells about? For nginx, Traefik, Caddy, HAProxy and
//! Envoy's ext_authz, which all ask before they pass a request on: 200 lets it pass, anything else is the answer.
//!
//! The method, the path and who asks come from headers, of trusted peers alone ([`tollgate_edge::who`]). Nothing that
//! decides comes from the query: some proxies let their callers write it. `?deny_status=403` may only turn one denial into
//! another, for nginx, which passes no 429 on.

use super::problem::Problem;
use super::{Answer, App};
use arc_swap::ArcSwapOption;
use http_body_util::Full;
use hyper::header::{HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Response, StatusCode};
use serde::Deserialize;
use std::net::IpAddr;
use std::sync::Arc;
use tollgate_core::CounterStore;
use tollgate_edge::answer::{Facts, Ruled};
use tollgate_edge::who::{Asked, Who, WhoError, WhoSettings};
use tollgate_engine::Check;
use tollgate_rules::Ruleset;

/// Where proxies ask.
pub(crate) const PATH: &str = "/check";
const X_ACCEL_REDIRECT: HeaderName = HeaderName::from_static("x-accel-redirect");

/// What an operator can say about proxies that ask.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ForwardSettings {
    /// The domain whose rules decide; the only one that is loaded, where none is set.
    pub domain: Option<String>,
    /// The location that nginx goes on with, as `X-Accel-Redirect` on what may pass: `@app`.
    pub accel_redirect: Option<String>,
}

/// Answers proxies that ask.
#[derive(Debug)]
pub struct Forward {
    settings: WhoSettings,
    reader: ArcSwapOption<Reader>,
    domain: Option<String>,
    accel_redirect: Option<HeaderValue>,
}

/// Reads callers by the settings and by the endpoints that one set of rules names.
#[derive(Debug)]
struct Reader {
    rules: Arc<Ruleset>,
    who: Who,
}

/// Settings that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// How callers are read.
    #[error("who: {0}")]
    Who(#[from] WhoError),
    /// No header can have this value.
    #[error("forward_auth: `accel_redirect: {0}` is no location; write `@app` or `/internal`")]
    Location(String),
}

impl Forward {
    /// Reads the settings, and the files that they name.
    pub fn new(settings: &ForwardSettings, who: &WhoSettings) -> Result<Self, ForwardError> {
        let location = settings.accel_redirect.as_ref().map(|location| {
            let value = HeaderValue::from_str(location).ok().filter(|_| location.starts_with(['@', '/']));
            value.ok_or_else(|| ForwardError::Location(location.clone()))
        });
        // What cannot be used is said at the start, and not when the first proxy asks.
        Who::new(who)?;
        Ok(Self {
            settings: who.clone(),
            reader: ArcSwapOption::empty(),
            domain: settings.domain.clone(),
            accel_redirect: location.transpose()?,
        })
    }
}

impl Forward {
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
    fn reader(&self, rules: Arc<Ruleset>) -> Result<Arc<Reader>, Problem> {
        let known = self.reader.load_full();
        if let Some(known) = known.as_ref().filter(|known| Arc::ptr_eq(&known.rules, &rules)) {
            return Ok(Arc::clone(known));
        }
        let domain = rules.domain(self.domain(&rules)?);
        let named = domain.into_iter().flat_map(|domain| domain.named_values("endpoint"));
        match Who::with_endpoints(&self.settings, named) {
            Ok(who) => {
                let reader = Arc::new(Reader { rules, who });
                self.reader.store(Some(Arc::clone(&reader)));
                Ok(reader)
            }
            // A key file that has gone since: callers are still read by what it held.
            Err(error) => {
                tracing::warn!(%error, "callers are still read by the former rules");
                known.ok_or_else(|| {
                    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "Bad settings", error.to_string())
                })
            }
        }
    }
}

impl Default for Forward {
    /// For proxies on this machine, by the rules of the only domain.
    fn default() -> Self {
        Self::new(&ForwardSettings::default(), &WhoSettings::default()).expect("the defaults can be used")
    }
}

/// Whether a path is one of ours.
pub(crate) fn is_at(path: &str) -> bool {
    path.strip_prefix(PATH).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

pub(crate) async fn answer<S: CounterStore>(
    app: &App<S>,
    peer: IpAddr,
    head: &Parts,
) -> Result<Answer, Problem> {
    let asked = Asked { peer, method: &head.method, uri: &head.uri, headers: &head.headers };
    let now = app.limiter.clock().now();
    let reader = app.forward.reader(app.limiter.rules())?;
    let caller = reader.who.forwarded(&asked, PATH, now);
    let caller = caller.map_err(|error| Problem::bad(error.to_string()))?;
    let domain = app.forward.domain(&reader.rules)?;
    let decision = app.limiter.check(&Check::attributes(domain, &caller.attributes())).await;
    let facts = Facts::of(&decision);
    let mut answer: Response<Full<_>> = app.answers.respond(&facts, now).map(Full::new);
    match facts.ruled {
        Ruled::Allowed => {
            if let Some(location) = &app.forward.accel_redirect {
                answer.headers_mut().insert(X_ACCEL_REDIRECT, location.clone());
            }
        }
        Ruled::Over => {
            if let Some(status) = denial_status(head.uri.query().unwrap_or("")) {
                *answer.status_mut() = status;
            }
        }
        Ruled::Unavailable => {}
    }
    Ok(answer)
}

/// Another status for a denial: a client's error, so that no query can turn a denial into anything else.
fn denial_status(query: &str) -> Option<StatusCode> {
    let code = query.split('&').find_map(|pair| pair.strip_prefix("deny_status="))?;
    StatusCode::from_bytes(code.as_bytes()).ok().filter(StatusCode::is_client_error)
}
