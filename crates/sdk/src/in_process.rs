//! Deciding here, by an engine of this process. Its counters may be its own, or shared by all through Redis.

use crate::check_request::{CheckRequest, descriptors};
use crate::decider::{Decider, HeldResource, LayerDecision};
use std::fmt;
use std::sync::Arc;
use tollgate_core::{Clock, CounterStore, SystemClock};
use tollgate_engine::{Check, Limiter, PermitGuard};
use tollgate_http::response::{DecisionSummary, ResponseConfig};
use tollgate_http::traceparent;
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

/// Decides by an engine in this process.
pub struct InProcess<S> {
    pub(crate) limiter: Arc<Limiter<S>>,
    pub(crate) domain: String,
    responses: ResponseConfig,
}

impl<S> fmt::Debug for InProcess<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcess").field("domain", &self.domain).finish_non_exhaustive()
    }
}

impl<S> Clone for InProcess<S> {
    fn clone(&self) -> Self {
        let (limiter, answers) = (Arc::clone(&self.limiter), self.responses.clone());
        Self { limiter, domain: self.domain.clone(), responses: answers }
    }
}

/// Why rules cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct RulesError(String);

/// What counters in memory may take where nothing else is said.
const MEMORY: usize = 64 << 20;

impl InProcess<MemoryStore<SystemClock>> {
    /// Rules in a text, counters in at most 64 MiB of this process's memory.
    ///
    /// # Errors
    /// What is wrong with the rules, with line and column.
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
            return Err(RulesError(format!("the rules have no domain `{domain}`")));
        }
        let clock = SystemClock::new();
        let store = MemoryStore::new(&MemoryConfig::with_bytes(MEMORY), clock)
            .map_err(|error| RulesError(error.to_string()))?;
        let time: Arc<dyn Clock> = Arc::new(clock);
        Ok(Self::new(Arc::new(Limiter::new(Arc::new(rules), store, time)), domain))
    }
}

impl<S: CounterStore + 'static> InProcess<S> {
    /// By an engine that the program has put together, and the rules of one of its domains.
    #[must_use]
    pub fn new(limiter: Arc<Limiter<S>>, domain: &str) -> Self {
        Self { limiter, domain: domain.to_owned(), responses: ResponseConfig::default() }
    }

    /// With other answers than the usual ones.
    #[must_use]
    pub fn with_responses(mut self, answers: ResponseConfig) -> Self {
        self.responses = answers;
        self
    }

    /// The engine: to replace its rules, or to look at its counters.
    #[must_use]
    pub fn limiter(&self) -> &Arc<Limiter<S>> {
        &self.limiter
    }
}

impl<S: CounterStore + 'static> Decider for InProcess<S> {
    async fn decide(&self, ask: CheckRequest) -> LayerDecision {
        let (cost, limiter) = (ask.engine_cost(), &self.limiter);
        let began = limiter.clock().now();
        let parent = ask.traceparent.as_ref().filter(|_| limiter.is_traced());
        let trace = parent.and_then(|parent| traceparent::sampled(parent.as_bytes(), || began));
        let entries = ask.entries();
        let descriptors = descriptors(&entries);
        let request = ask.engine_request(&entries, &descriptors);
        let check = Check {
            domain: &self.domain,
            input: request,
            cost,
            protocol: "sdk",
            trace: trace.as_ref(),
            address: None,
        };
        let (decision, held) = limiter.admit(&check).await;
        let now = limiter.clock().now();
        limiter.record_latency("sdk", 1, now.since(began));
        let scope = self.responses.scope(&decision, check.input);
        let facts = DecisionSummary::from_decision(&decision).with_scope(scope.as_deref());
        let answer = self.responses.respond(&facts, now);
        let mut decided = LayerDecision::from_response(answer);
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
