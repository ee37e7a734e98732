//! Proxy state: what one configuration compiles to, looked up by every request. A reload builds a new state beside the
//! traffic and swaps one pointer; requests in flight complete with the state that they started with.
//!
//! Unchanged parts are kept across reloads: an upstream with the same settings keeps its connections and health, the access
//! log its file, and verified JWTs stay verified.

use crate::access_log::AccessLog;
use crate::config::{ForwardedHeader, GatewayConfig};
use crate::headers::{ForwardRules, Peer, ProtectedHeaders};
use crate::overload_lint;
use crate::pool::Pool;
use crate::route::{Route, Routes};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use tollgate_http::identity::CredentialVerifier;
use tollgate_http::response::ResponseConfig;
use tollgate_rules::Ruleset;

#[derive(Clone)]
pub(crate) struct ProxyState {
    config: Arc<GatewayConfig>,
    /// The rules whose endpoints the routes have.
    pub(crate) rules: Arc<Ruleset>,
    pub(crate) routes: Arc<Routes>,
    pub(crate) pools: Vec<Arc<Pool>>,
    pub(crate) responses: ResponseConfig,
    pub(crate) forward: ForwardedHeader,
    /// Headers that clients may not set freely.
    pub(crate) protected: Arc<ProtectedHeaders>,
    pub(crate) log: Option<Arc<AccessLog>>,
    pub(crate) verifier: Arc<CredentialVerifier>,
    /// Number of requests on the fast path since startup.
    pub(crate) fast_path: Arc<AtomicU64>,
}

impl ProxyState {
    /// Compiles a configuration and reads the files that it names; `former` is the state to take unchanged parts from.
    pub(crate) fn new(
        config: &GatewayConfig,
        rules: Arc<Ruleset>,
        former: Option<&Self>,
    ) -> Result<Self, String> {
        for route in &config.routes {
            let known = |domain: &str| rules.domain(domain).is_some();
            if let Some(domain) = route.domain.as_deref().filter(|domain| !known(domain)) {
                return Err(format!(
                    "route `{}`: unknown domain `{domain}`; add a rule file for it",
                    route.path
                ));
            }
        }
        let fast_path = former.map_or_else(Arc::default, |former| Arc::clone(&former.fast_path));
        let known = former.map(|former| &former.verifier);
        let verifier = match known.filter(|known| known.matches_config(&config.identity)) {
            Some(known) => Arc::clone(known),
            None => {
                CredentialVerifier::new(&config.identity).map_err(|error| format!("identity: {error}"))?
            }
        };
        let routes = Routes::new(config, &rules, &verifier)?;
        for warning in overload_lint::warnings(config, &rules, &routes) {
            tracing::warn!("{warning}");
        }
        Ok(Self {
            routes: Arc::new(routes),
            pools: pools(config, former, &fast_path)?,
            responses: config.responses.clone(),
            forward: config.forward,
            protected: Arc::new(ProtectedHeaders::new(&config.identity)),
            log: log(config, former)?,
            verifier,
            fast_path,
            config: Arc::new(config.clone()),
            rules,
        })
    }

    /// Compiles the same configuration for other rules. If that is not possible, the routes stay as they are.
    pub(crate) fn with_rules(&self, rules: Arc<Ruleset>) -> Self {
        Self::new(&self.config, Arc::clone(&rules), Some(self)).unwrap_or_else(|error| {
            tracing::warn!(%error, "routes keep the endpoints of the previous rules");
            Self { rules, ..self.clone() }
        })
    }

    /// Returns the rules by which a client's headers are forwarded to the route's upstream.
    pub(crate) fn forward_rules<'a>(
        &'a self,
        peer: &'a Peer,
        is_trusted: bool,
        route: &'a Route,
        authority: Option<&'a str>,
    ) -> ForwardRules<'a> {
        ForwardRules {
            peer,
            is_trusted,
            forward: self.forward,
            protected: &self.protected,
            authority,
            host: route.host_header.as_ref(),
            traceparent: None,
        }
    }
}

fn pools(
    config: &GatewayConfig,
    former: Option<&ProxyState>,
    fast_path: &Arc<AtomicU64>,
) -> Result<Vec<Arc<Pool>>, String> {
    let pools = config.upstreams.iter().map(|(name, settings)| {
        let known = former.and_then(|former| former.pools.iter().find(|pool| pool.name == *name));
        if let Some(same) = known.filter(|known| known.matches_config(name, settings)) {
            return Ok(Arc::clone(same));
        }
        let pool = Pool::new(name, settings, fast_path);
        let pool = pool.map_err(|error| format!("upstream `{name}`: {error}"))?;
        if let Some(known) = known {
            pool.inherit(known);
        }
        Ok(Arc::new(pool))
    });
    pools.collect()
}

fn log(config: &GatewayConfig, former: Option<&ProxyState>) -> Result<Option<Arc<AccessLog>>, String> {
    let Some(path) = config.access_log.as_deref() else { return Ok(None) };
    let known = former.and_then(|former| former.log.as_ref()).filter(|log| log.path() == path);
    if let Some(known) = known {
        return Ok(Some(Arc::clone(known)));
    }
    let opened = AccessLog::open(path).map_err(|error| format!("access_log {}: {error}", path.display()))?;
    Ok(Some(Arc::new(opened)))
}
