//! The identity resolvers of the active rules, one for each domain: the endpoints that a domain's rules name are routes.
//!
//! They are built when a domain is first asked for, and again after a change of rules. If that fails, because a file
//! that the settings name can no longer be read, the resolver of the previous rules stays in use.

use super::problem::Problem;
use arc_swap::ArcSwapOption;
use http::StatusCode;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use tollgate_core::CounterStore;
use tollgate_engine::Limiter;
use tollgate_http::identity::{CredentialVerifier, IdentityConfig, IdentityConfigError, IdentityResolver};
use tollgate_rules::{Domain, Ruleset};

/// Identity settings, and the resolvers that they give with the active rules.
#[derive(Debug)]
pub(crate) struct Identities {
    settings: IdentityConfig,
    verifier: Arc<CredentialVerifier>,
    active: ArcSwapOption<DomainIdentities>,
}

/// The resolvers of one rule set.
#[derive(Debug)]
pub(crate) struct DomainIdentities {
    pub(crate) rules: Arc<Ruleset>,
    domains: HashMap<Box<str>, OnceLock<Arc<IdentityResolver>>>,
    /// For domains that the rules do not have: no endpoint is named.
    unknown: OnceLock<Arc<IdentityResolver>>,
}

impl Identities {
    /// Validates the settings and reads the files that they name.
    pub(crate) fn new(settings: &IdentityConfig) -> Result<Self, IdentityConfigError> {
        Self::sharing(settings, None)
    }

    /// Like [`Self::new`], with a verifier that was created from the same settings, if it was.
    pub(super) fn sharing(
        settings: &IdentityConfig,
        verifier: Option<&Arc<CredentialVerifier>>,
    ) -> Result<Self, IdentityConfigError> {
        let verifier = match verifier.filter(|verifier| verifier.matches_config(settings)) {
            Some(verifier) => Arc::clone(verifier),
            None => CredentialVerifier::new(settings)?,
        };
        // Invalid settings are reported at startup, not at the first request.
        IdentityResolver::sharing(settings, [], Arc::clone(&verifier))?;
        Ok(Self { settings: settings.clone(), verifier, active: ArcSwapOption::empty() })
    }

    /// Returns the verifier of credentials, for the task that reloads its keys.
    pub(crate) fn verifier(&self) -> Arc<CredentialVerifier> {
        Arc::clone(&self.verifier)
    }

    /// Returns the resolvers for the active rules.
    pub(crate) fn active<S: CounterStore>(&self, limiter: &Limiter<S>) -> Arc<DomainIdentities> {
        let previous = match self.active.load_full() {
            Some(known) if limiter.is_active(&known.rules) => return known,
            previous => previous,
        };
        let rules = limiter.rules();
        let domains = rules.domains().map(|domain| {
            let known = previous.as_ref().and_then(|previous| previous.domains.get(domain.name())?.get());
            (Box::from(domain.name()), known.map_or_else(OnceLock::new, |known| self.rebuilt(domain, known)))
        });
        let active = Arc::new(DomainIdentities {
            domains: domains.collect(),
            rules: Arc::clone(&rules),
            unknown: OnceLock::new(),
        });
        self.active.store(Some(Arc::clone(&active)));
        active
    }

    fn rebuilt(&self, domain: &Domain, previous: &Arc<IdentityResolver>) -> OnceLock<Arc<IdentityResolver>> {
        OnceLock::from(self.build(Some(domain)).unwrap_or_else(|error| {
            tracing::warn!(%error, "identity rebuild failed; keeping the endpoints of the previous rules");
            Arc::clone(previous)
        }))
    }

    pub(super) fn build(
        &self,
        domain: Option<&Domain>,
    ) -> Result<Arc<IdentityResolver>, IdentityConfigError> {
        let named = domain.into_iter().flat_map(Domain::endpoints);
        IdentityResolver::sharing(&self.settings, named, Arc::clone(&self.verifier)).map(Arc::new)
    }

    /// Returns the resolver of a domain.
    pub(crate) fn resolver<'d>(
        &self,
        active: &'d DomainIdentities,
        domain: &str,
    ) -> Result<&'d IdentityResolver, Problem> {
        let cell = active.domains.get(domain).unwrap_or(&active.unknown);
        if let Some(known) = cell.get() {
            return Ok(known);
        }
        let built = self.build(active.rules.domain(domain)).map_err(|error| {
            Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "Invalid settings", error.to_string())
        })?;
        Ok(cell.get_or_init(|| built))
    }
}
