//! The worker shedder: requests pass a gate before they are charged and forwarded, and are shed there if the upstream
//! cannot take them.
//!
//! The gate comes before the counters, so that a request that is shed costs its caller nothing. A gate belongs to a domain
//! and an upstream, and is kept while the settings that made it stay the same; new rules with other settings begin with a
//! new gate, which knows what the old one has learned about the upstream and has its places: requests in flight count on.

mod enter;
mod known;
mod permit;

pub use permit::WorkerPermit;

use arc_swap::ArcSwap;
use foldhash::fast::RandomState;
use std::collections::HashMap;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::oneshot;
use tollgate_core::Clock;
use tollgate_overload::{Gate, GateConfig, GateState, GuaranteeScope, LimitConfig, LimitKind, TierShare};
use tollgate_rules::{Domain, Overload, Ruleset, TierFairness};

/// The adaptive limit never rises above this.
const CEILING: u32 = 100_000;
/// Most gates: upstreams have names in configurations, not in requests.
const MAX_GATES: usize = 1_024;

/// Gate of one upstream.
struct WorkerGate {
    gate: Gate<oneshot::Sender<WorkerPermit>>,
    config: GateConfig,
    clock: Arc<dyn Clock>,
}

type Gates = HashMap<Box<str>, HashMap<Box<str>, Arc<WorkerGate>, RandomState>, RandomState>;

/// Gates of all upstreams.
pub(crate) struct WorkerGates {
    /// Whether the active rules limit workers at all.
    is_enabled: AtomicBool,
    gates: ArcSwap<Gates>,
    hasher: RandomState,
}

/// State of one upstream's gate.
#[derive(Clone, Debug)]
pub struct UpstreamState {
    /// Domain of the rules.
    pub domain: String,
    /// Name of the upstream.
    pub upstream: String,
    /// Shares of tiers as the rules have them, in the order of [`GateState::tiers`].
    pub shares: Vec<TierFairness>,
    /// State of the gate.
    pub gate: GateState,
}

impl WorkerGates {
    pub(crate) fn new(rules: &Ruleset) -> Self {
        let gates = Self {
            is_enabled: AtomicBool::new(false),
            gates: ArcSwap::default(),
            hasher: RandomState::default(),
        };
        gates.on_rules_changed(rules);
        gates
    }

    /// Adjusts to new rules: gates whose settings are gone are dropped, those with requests in flight at a later change of the rules.
    /// Rules that are rolled back find them, and what is in flight counts on.
    pub(crate) fn on_rules_changed(&self, rules: &Ruleset) {
        let limits = |domain: &Domain| domain.overload().is_some_and(|overload| overload.workers.is_some());
        self.is_enabled.store(rules.domains().any(limits), Ordering::Relaxed);
        self.gates.rcu(|gates| {
            let mut kept = Gates::clone(gates);
            kept.retain(|domain, own| {
                if !rules.domain(domain).is_some_and(limits) {
                    own.retain(|_, gate| gate.gate.in_flight() > 0);
                }
                !own.is_empty()
            });
            kept
        });
    }

    /// Returns the gate of an upstream, created if it is new or its settings have changed.
    fn gate(&self, domain: &Domain, upstream: &str, clock: &Arc<dyn Clock>) -> Option<Arc<WorkerGate>> {
        let overload = domain.overload()?;
        overload.workers?;
        let gates = self.gates.load();
        let known = gates.get(domain.name()).and_then(|own| own.get(upstream));
        if let Some(known) = known.filter(|known| matches_config(&known.config, overload)) {
            return Some(Arc::clone(known));
        }
        self.create(domain.name(), upstream, overload, clock)
    }

    /// Returns the number of requests that wait for a place in flight to an upstream, and its limit; `None` if it has none.
    pub(crate) fn occupancy(&self, domain: &str, upstream: &str) -> Option<(u32, u32)> {
        let gates = self.gates.load();
        let known = gates.get(domain)?.get(upstream)?;
        Some((known.gate.waiting(), known.gate.limit()))
    }

    #[cold]
    fn create(
        &self,
        domain: &str,
        upstream: &str,
        overload: &Overload,
        clock: &Arc<dyn Clock>,
    ) -> Option<Arc<WorkerGate>> {
        let config = GateConfig { key: self.hasher.hash_one((domain, upstream)), ..config(overload)? };
        let gates = self.gates.load();
        let known = gates.get(domain).and_then(|own| own.get(upstream));
        if known.is_none() && is_full(&gates) {
            return None;
        }
        // What has been learned about the upstream holds under other settings too.
        let gate = known.map_or_else(|| Gate::new(&config), |known| known.gate.with_config(&config));
        let new = Arc::new(WorkerGate { gate, config, clock: Arc::clone(clock) });
        self.gates.rcu(|gates| {
            let mut next = Gates::clone(gates);
            let own = next.entry(domain.into()).or_default();
            // Another thread may have been faster; requests must share one gate.
            let is_wanted = match own.get(upstream) {
                Some(known) => !matches_config(&known.config, overload),
                None => !is_full(gates),
            };
            if is_wanted {
                own.insert(upstream.into(), Arc::clone(&new));
            }
            next
        });
        self.gates.load().get(domain).and_then(|own| own.get(upstream)).cloned()
    }
}

fn is_full(gates: &Gates) -> bool {
    gates.values().map(HashMap::len).sum::<usize>() >= MAX_GATES
}

/// Returns whether a gate was made by these settings.
fn matches_config(known: &GateConfig, overload: &Overload) -> bool {
    let Some(workers) = &overload.workers else { return false };
    let tiers = overload.fairness.as_ref().map_or(&[][..], |fairness| &fairness.tiers);
    known.limit == limit_kind(workers)
        && known.target.total_cmp(&workers.target).is_eq()
        && known.shadow == overload.shadow
        && known.is_fair == overload.fairness.is_some()
        && known.tiers.len() == tiers.len()
        && known.tiers.iter().zip(tiers).all(|(known, tier)| *known == tier_share(tier))
}

const fn limit_kind(workers: &tollgate_rules::Workers) -> LimitKind {
    match workers.limit {
        Some(limit) => LimitKind::Fixed(limit),
        None => LimitKind::Adaptive(LimitConfig { floor: workers.floor, ceiling: CEILING }),
    }
}

pub(crate) fn tier_share(tier: &TierFairness) -> TierShare {
    TierShare {
        guarantee: tier.guarantee as f64 / 1000.0,
        scope: if tier.is_each { GuaranteeScope::Each } else { GuaranteeScope::Together },
        weight: tier.weight as f64 / 1000.0,
    }
}

fn config(overload: &Overload) -> Option<GateConfig> {
    let workers = overload.workers.as_ref()?;
    Some(GateConfig {
        limit: limit_kind(workers),
        target: workers.target,
        tiers: overload
            .fairness
            .as_ref()
            .map_or_else(Vec::new, |fairness| fairness.tiers.iter().map(tier_share).collect()),
        is_fair: overload.fairness.is_some(),
        shadow: overload.shadow,
        key: 0,
    })
}
