//! The endpoints of a domain's active rules, for those who identify requests before they know the rules: programs that embed
//! the limiter. Built again when other rules become active.

use super::endpoints::{EndpointMatcher, EndpointSettings};
use arc_swap::ArcSwapOption;
use http::Method;
use std::sync::Arc;
use tollgate_core::CounterStore;
use tollgate_engine::Limiter;
use tollgate_rules::{Domain, Ruleset};

/// What the endpoint of an identified request depends on, besides its path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointTarget {
    /// The settings by which the request was identified.
    pub settings: Arc<EndpointSettings>,
    /// The method as the request has it.
    pub method: Method,
}

/// The endpoints of one domain.
#[derive(Debug, Default)]
pub struct DomainEndpoints {
    active: ArcSwapOption<Built>,
}

#[derive(Debug)]
struct Built {
    rules: Arc<Ruleset>,
    settings: Arc<EndpointSettings>,
    /// `None` for settings that no resolver has.
    matcher: Option<EndpointMatcher>,
}

impl DomainEndpoints {
    /// Returns the method and the endpoint of a request to a canonical path; `None` if the rules say nothing of it.
    pub fn resolve<S: CounterStore>(
        &self,
        limiter: &Limiter<S>,
        domain: &str,
        target: &EndpointTarget,
        path: &str,
    ) -> Option<(String, String)> {
        let known = self.active.load_full().filter(|known| {
            limiter.is_active(&known.rules) && Arc::ptr_eq(&known.settings, &target.settings)
        });
        let built = known.unwrap_or_else(|| self.rebuild(limiter.rules(), domain, &target.settings));
        let matcher = built.matcher.as_ref()?;
        let method = matcher.method(target.method.as_str());
        Some((method.to_owned(), matcher.endpoint(method, path)?.to_owned()))
    }

    #[cold]
    fn rebuild(&self, rules: Arc<Ruleset>, domain: &str, settings: &Arc<EndpointSettings>) -> Arc<Built> {
        let named = rules.domain(domain).into_iter().flat_map(Domain::endpoints);
        let matcher = EndpointMatcher::new(settings, named, &[], []).ok();
        let built = Arc::new(Built { matcher, settings: Arc::clone(settings), rules });
        self.active.store(Some(Arc::clone(&built)));
        built
    }
}
