//! Deciding here, by an engine of this process. Its counters may be its own, or shared by all through Redis.

use crate::check_request::{CheckRequest, descriptors};
use crate::decider::{Decider, Entering, HeldResource, LayerDecision};
use http::StatusCode;
use std::fmt;
use std::sync::Arc;
use tollgate_core::{Clock, CounterStore, SystemClock, TimeDelta, Timestamp};
use tollgate_engine::{Check, Decision, Ended, Limiter, PermitGuard, WorkerPermit};
use tollgate_http::identity::DomainEndpoints;
use tollgate_http::response::{DecisionSummary, ResponseConfig};
use tollgate_http::traceparent;
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

/// Decides by an engine in this process.
pub struct InProcess<S> {
    pub(crate) limiter: Arc<Limiter<S>>,
    pub(crate) domain: String,
    responses: ResponseConfig,
    /// Name of the service among those that shed load.
    upstream: String,
    endpoints: Arc<DomainEndpoints>,
}

impl<S> fmt::Debug for InProcess<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InProcess").field("domain", &self.domain).finish_non_exhaustive()
    }
}

impl<S> Clone for InProcess<S> {
    fn clone(&self) -> Self {
        Self {
            limiter: Arc::clone(&self.limiter),
            domain: self.domain.clone(),
            responses: self.responses.clone(),
            upstream: self.upstream.clone(),
            endpoints: Arc::clone(&self.endpoints),
        }
    }
}

/// Why rules cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct RulesError(String);

/// What counters in memory may take where nothing else is said.
pub(crate) const MEMORY: usize = 64 << 20;

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
        let (domain, upstream) = (domain.to_owned(), "service".to_owned());
        Self { limiter, domain, responses: ResponseConfig::default(), upstream, endpoints: Arc::default() }
    }

    /// Resolves the endpoint of an identified request by the active rules.
    pub(crate) fn with_endpoint(&self, ask: CheckRequest) -> CheckRequest {
        ask.with_endpoint(|target, path| self.endpoints.resolve(&self.limiter, &self.domain, target, path))
    }

    /// With other answers than the usual ones.
    #[must_use]
    pub fn with_responses(mut self, answers: ResponseConfig) -> Self {
        self.responses = answers;
        self
    }

    /// With this name for the service behind the layer, in reports on overload. Services of one name share the limit of
    /// requests in flight that the rules' `overload` section sets; the default name is `service`.
    #[must_use]
    pub fn with_upstream(mut self, name: &str) -> Self {
        name.clone_into(&mut self.upstream);
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
        let ask = self.with_endpoint(ask);
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
            reason: None,
        };
        let mut is_delayed = false;
        let (decision, held, place) = match limiter.enter_upstream(&check, &self.upstream, began).await {
            Err(shed) => (shed, None, None),
            Ok(mut place) => {
                let reason = place.as_ref().and_then(WorkerPermit::would_be_shed);
                let (decision, held) = limiter.admit(&check.with_reason(reason)).await;
                let is_held = decision.is_allowed() && decision.delay() == TimeDelta::ZERO;
                if let Some(entered) = place.as_mut().filter(|_| !is_held) {
                    entered.ended(Ended::Denied);
                    place = None;
                    is_delayed = decision.is_allowed();
                }
                (decision, held, place)
            }
        };
        let now = limiter.clock().now();
        limiter.record_latency("sdk", 1, now.since(began));
        let mut decided = self.layer_decision(&decision, &check, now);
        if decided.is_allowed && (held.is_some() || place.is_some() || is_delayed) {
            let permits = held.map(|held| self.limiter.guard(held, decision.delay()));
            let delayed = is_delayed.then(|| Box::new((self.clone(), ask.clone())));
            decided.hold = Some(Box::new(InFlight { permits, place, delayed }));
        }
        decided
    }
}

impl<S: CounterStore + 'static> InProcess<S> {
    fn layer_decision(&self, decision: &Decision, check: &Check<'_>, now: Timestamp) -> LayerDecision {
        let scope = self.responses.scope(decision, check.input);
        let facts = DecisionSummary::from_decision(decision).with_scope(scope.as_deref());
        let mut answer = self.responses.respond(&facts, now);
        if decision.malformed_cost.is_some() {
            *answer.status_mut() = StatusCode::BAD_REQUEST;
        }
        let mut decided = LayerDecision::from_response(answer);
        decided.is_allowed = decision.is_allowed();
        decided.delay = decision.delay().into();
        decided
    }

    /// Takes a place in flight for a request whose delay is over.
    async fn enter_after_delay(
        &self,
        ask: &CheckRequest,
    ) -> Result<Option<WorkerPermit>, Box<LayerDecision>> {
        let entries = ask.entries();
        let descriptors = descriptors(&entries);
        let check = Check {
            domain: &self.domain,
            input: ask.engine_request(&entries, &descriptors),
            cost: ask.engine_cost(),
            protocol: "sdk",
            trace: None,
            address: None,
            reason: None,
        };
        let entered = self.limiter.enter_upstream_after_delay(&check, &self.upstream).await;
        entered.map_err(|shed| Box::new(self.layer_decision(&shed, &check, self.limiter.clock().now())))
    }
}

/// What a request holds while the service works on it.
struct InFlight<S: CounterStore + 'static> {
    permits: Option<PermitGuard<S>>,
    place: Option<WorkerPermit>,
    /// Set if the request is delayed and takes its place afterwards.
    delayed: Option<Box<(InProcess<S>, CheckRequest)>>,
}

impl<S: CounterStore + 'static> fmt::Debug for InFlight<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("permits", &self.permits).field("place", &self.place).finish()
    }
}

impl<S: CounterStore + 'static> HeldResource for InFlight<S> {
    fn begin(&mut self) {
        if let Some(permits) = &mut self.permits {
            permits.proceed();
        }
    }

    fn enter(&mut self) -> Entering<'_> {
        Box::pin(async move {
            if let Some(delayed) = self.delayed.take() {
                let (decider, ask) = &*delayed;
                self.place = decider.enter_after_delay(ask).await?;
            }
            Ok(())
        })
    }

    fn answered(&mut self, status: StatusCode, is_stream: bool) {
        if let Some(place) = &mut self.place {
            place.ended(if status.is_server_error() { Ended::Failed } else { Ended::Completed });
        }
        if is_stream {
            self.place = None;
        }
    }
}
