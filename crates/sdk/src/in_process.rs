//! In-process limiter: decides with an engine in this process. Its counters are in memory, or shared through Redis.

use crate::check_request::{CheckForm, CheckRequest};
use crate::decider::{Decider, HeldResource, LayerDecision};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;
use tollgate_core::{Clock, CounterStore, SystemClock};
use tollgate_engine::{Check, Limiter, PermitGuard, Request};
use tollgate_http::response::{DecisionSummary, ResponseConfig};
use tollgate_http::traceparent;
use tollgate_rules::{Descriptor, Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

/// Decides with an engine in this process.
pub struct InProcess<S> {
    limiter: Arc<Limiter<S>>,
    domain: String,
    responses: ResponseConfig,
}

impl<S> fmt::Debug for InProcess<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcess").field("domain", &self.domain).finish_non_exhaustive()
    }
}

impl<S> Clone for InProcess<S> {
    fn clone(&self) -> Self {
        let (limiter, responses) = (Arc::clone(&self.limiter), self.responses.clone());
        Self { limiter, domain: self.domain.clone(), responses }
    }
}

/// The reason rules are invalid.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct RulesError(String);

/// Maximum memory for counters of [`InProcess::from_rules`], in bytes.
const MEMORY: usize = 64 << 20;

impl InProcess<MemoryStore<SystemClock>> {
    /// Creates a limiter from the text of a rule file, with at most 64 MiB of memory for counters.
    ///
    /// # Errors
    /// The rules are invalid; the message has the line and column.
    ///
    /// ```
    /// use tollgate_sdk::InProcess;
    /// assert!(InProcess::from_rules("{domain: api, descriptors: [{key: user, limit: 5/second}]}", "api").is_ok());
    /// let error = InProcess::from_rules("{domain: api, descriptors: [{key: user, limit: 5/fortnight}]}", "api");
    /// assert!(error.unwrap_err().to_string().contains("fortnight"));
    /// ```
    pub fn from_rules(rules: &str, domain: &str) -> Result<Self, RulesError> {
        let source = Source::new("rules", rules);
        let rules =
            Ruleset::load(&[source], &Options::default()).map_err(|errors| RulesError(errors.to_string()))?;
        if rules.domain(domain).is_none() {
            return Err(RulesError(format!(
                "no domain `{domain}` in the rules; use the `domain` of the rule file"
            )));
        }
        let clock = SystemClock::new();
        let store = MemoryStore::new(&MemoryConfig::with_bytes(MEMORY), clock)
            .map_err(|error| RulesError(error.to_string()))?;
        let time: Arc<dyn Clock> = Arc::new(clock);
        Ok(Self::new(Arc::new(Limiter::new(Arc::new(rules), store, time)), domain))
    }
}

impl<S: CounterStore + 'static> InProcess<S> {
    /// Creates a decider from an engine, for the rules of one domain.
    #[must_use]
    pub fn new(limiter: Arc<Limiter<S>>, domain: &str) -> Self {
        Self { limiter, domain: domain.to_owned(), responses: ResponseConfig::default() }
    }

    /// Sets the response settings.
    #[must_use]
    pub fn with_responses(mut self, responses: ResponseConfig) -> Self {
        self.responses = responses;
        self
    }

    /// Returns the engine, to replace its rules or read its counters.
    #[must_use]
    pub fn limiter(&self) -> &Arc<Limiter<S>> {
        &self.limiter
    }
}

impl<S: CounterStore + 'static> Decider for InProcess<S> {
    async fn decide(&self, request: CheckRequest) -> LayerDecision {
        let (cost, limiter) = (request.engine_cost(), &self.limiter);
        let began = limiter.clock().now();
        let parent = request.traceparent.as_ref().filter(|_| limiter.is_traced());
        let trace = parent.and_then(|parent| traceparent::sampled(parent.as_bytes(), || began));
        let trace = trace.as_ref();
        let (decision, held) = match &request.form {
            CheckForm::Attributes(pairs) => {
                let attributes: SmallVec<[(&str, &str); 8]> =
                    pairs.iter().map(|(k, v)| (&**k, v.as_str())).collect();
                let request = Request::Attributes(&attributes);
                let check = Check { domain: &self.domain, request, cost, front: "sdk", trace, address: None };
                self.limiter.admit(&check).await
            }
            CheckForm::Descriptors(all) => {
                let entries: Vec<Vec<(&str, &str)>> =
                    all.iter().map(|one| one.iter().map(|(k, v)| (&**k, v.as_str())).collect()).collect();
                let descriptors: Vec<Descriptor<'_>> =
                    entries.iter().map(|entries| Descriptor { entries, hits: None, limit: None }).collect();
                let request = Request::Descriptors(&descriptors);
                let check = Check { domain: &self.domain, request, cost, front: "sdk", trace, address: None };
                self.limiter.admit(&check).await
            }
        };
        let now = limiter.clock().now();
        limiter.took("sdk", 1, now.since(began));
        let facts = DecisionSummary::from_decision(&decision);
        let response = self.responses.respond(&facts, now);
        let mut decided = LayerDecision::from_summary(response);
        decided.is_allowed = decision.is_allowed();
        decided.delay = decision.delay().into();
        decided.hold =
            held.map(|held| Box::new(self.limiter.guard(held, decision.delay())) as Box<dyn HeldResource>);
        decided
    }
}

impl<S: CounterStore + 'static> HeldResource for PermitGuard<S> {
    fn begin(&mut self) {
        self.proceed();
    }
}
