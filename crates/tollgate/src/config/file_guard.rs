//! Guard of changing rule files (`--guard-files`): they pass the guardrails of publishing, on the recent traffic of this
//! node. What needs confirmation is not applied until an operator confirms it, also after a restart (`last_good.rs`).
//!
//! A changed file has no client to ask for confirmation; it keeps the active rules and says why.
//! Rejected: a file that holds the confirmation, because it would be copied along with the next change.

use crate::config::{Config, StoreChoice};
use crate::server::admin::AdminServer;
use crate::server::store::Store;
use std::sync::Arc;
use tollgate_control::{Guardrails, QuotaTable, TrafficSample, replay};
use tollgate_core::{Clock, SystemClock};
use tollgate_engine::{CounterSharing, Limiter};
use tollgate_rules::Ruleset;

/// Seed by which callers are sampled without a database; with one, all nodes sample the same callers.
const SEED: u64 = 0x746f_6c6c_6761_7465;

pub(crate) struct FileGuard {
    sample: Arc<TrafficSample>,
    quotas: Option<Arc<QuotaTable>>,
    counters: CounterSharing,
    guardrails: Guardrails,
}

impl FileGuard {
    /// Returns the guard, if it is on, and the limiter, whose traffic it samples.
    pub(crate) fn new(
        config: &Config,
        admin: &AdminServer,
        limiter: Limiter<Store>,
    ) -> (Option<Self>, Limiter<Store>) {
        if !config.guard_files {
            return (None, limiter);
        }
        // The rule manager samples traffic already.
        let (sample, limiter) = match &admin.rule_manager {
            Some(manager) => (manager.sample(), limiter),
            None => {
                let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
                let sample = Arc::new(TrafficSample::new(clock, SEED));
                let limiter = limiter.with_observer(Arc::clone(&sample) as _);
                (sample, limiter)
            }
        };
        let guard = Self {
            sample,
            quotas: admin.control.as_ref().map(|control| control.quota_table()),
            counters: match config.store {
                StoreChoice::Memory => CounterSharing::PerNode,
                StoreChoice::Redis(_) => CounterSharing::Shared,
            },
            guardrails: config.guardrails,
        };
        (Some(guard), limiter)
    }

    /// Returns why new rules may not replace the active ones by themselves.
    pub(crate) fn reasons(
        &self,
        active: &Arc<Ruleset>,
        baseline: &Ruleset,
        candidate: &Arc<Ruleset>,
    ) -> Vec<String> {
        let mut sample = self.sample.requests();
        sample.retain(|one| !one.is_peek());
        let impact = replay(&sample, active, candidate, self.quotas.as_ref(), self.counters);
        let reasons = self.guardrails.confirm_reasons(active, baseline, candidate, &impact);
        reasons.into_iter().map(|reason| reason.detail).collect()
    }
}
