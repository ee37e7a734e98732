//! Rate limiter: the parts that a decision needs, and their settings. `decide` has the decision path.

use crate::adapt::Adaptations;
use crate::check_shedding::CheckShedding;
use crate::consumption::Meter;
use crate::decision::UnknownDomain;
use crate::decision_body::Generation;
use crate::emergency::ActiveMeasures;
use crate::fallback::TryCharge;
use crate::fallback_counts::FallbackCounts;
use crate::fallback_start::FallbackStarts;
use crate::fleet_fairness::FleetShares;
use crate::fleet_shed::FleetSheds;
use crate::in_flight::InFlight;
use crate::observer::Observer;
use crate::panic::Panics;
use crate::permit_guard::Renewals;
use crate::quota_provider::QuotaProvider;
use crate::reconcile::PendingCharges;
use crate::reconsider::FullCounters;
use crate::release_retry::PendingReleases;
use crate::reservation::Reservations;
use crate::upstream_meters::UpstreamMeters;
use crate::workers::WorkerGates;
use arc_swap::ArcSwap;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use tollgate_core::{Algorithm, Charge, Clock, CounterStore, LogThrottle, RegionMode};
use tollgate_rules::Ruleset;

/// Rate limiter: decides requests with a rule set and a store. Shared by all protocol servers.
pub struct Limiter<S> {
    pub(crate) rules: ArcSwap<Ruleset>,
    pub(crate) generation: Generation,
    pub(crate) store: S,
    /// Global shadow mode: every denial becomes an allowance, and the outcomes are still reported.
    pub(crate) shadow: AtomicBool,
    /// Whether requests of domains without rules are denied.
    pub(crate) denies_unknown: AtomicBool,
    pub(crate) reservations: Reservations,
    pub(crate) clock: Arc<dyn Clock>,
    /// Local counters for rules with `on_error: local`.
    pub(crate) fallback: Option<Box<dyn TryCharge>>,
    pub(crate) fallback_starts: FallbackStarts,
    /// Number of nodes that share the store, as far as known; 0 if not.
    pub(crate) live_nodes: AtomicU32,
    /// Number of cells that a counter with an owner is divided among while the owner is away.
    cells: AtomicU32,
    pub(crate) pending: Arc<PendingCharges>,
    pub(crate) fallback_counts: FallbackCounts,
    pub(crate) in_flight: InFlight,
    pub(crate) fleet_sheds: FleetSheds,
    pub(crate) fleet_shares: FleetShares,
    pub(crate) release_failures: LogThrottle,
    /// Releases that failed and are tried again.
    pub(crate) pending_releases: PendingReleases,
    pub(crate) panics: Panics,
    /// Permits of requests in flight.
    pub(crate) renewals: Renewals,
    /// Split counters without room in any shard.
    pub(crate) full_counters: FullCounters,
    /// Lookup of callers' quotas.
    pub(crate) quotas: Option<Arc<dyn QuotaProvider>>,
    /// Limits that follow signals.
    pub(crate) adaptations: Adaptations,
    /// Gates of upstreams.
    pub(crate) workers: WorkerGates,
    /// Meters of upstreams.
    pub(crate) meters: UpstreamMeters,
    /// Shedding of checks while the process is overloaded.
    pub(crate) check_shedding: CheckShedding,
    /// Active emergency measures.
    pub(crate) measures: Arc<ActiveMeasures>,
    pub(crate) observers: SmallVec<[Arc<dyn Observer>; 2]>,
    /// True if an observer records traces.
    pub(crate) is_traced: bool,
    /// Recipient of the consumption of billed rules.
    pub(crate) meter: Option<Arc<dyn Meter>>,
}

impl<S: CounterStore> Limiter<S> {
    /// Creates a limiter that decides by `rules` with counters in `store`. The clock is for reservation deadlines;
    /// counters use the store's own time.
    #[must_use]
    pub fn new(rules: Arc<Ruleset>, store: S, clock: Arc<dyn Clock>) -> Self {
        Self {
            adaptations: Adaptations::new(&rules),
            workers: WorkerGates::new(&rules),
            meters: UpstreamMeters::new(&rules),
            fleet_shares: FleetShares::new(&rules),
            check_shedding: CheckShedding::default(),
            rules: ArcSwap::new(rules),
            generation: Generation::new(),
            store,
            shadow: AtomicBool::new(false),
            denies_unknown: AtomicBool::new(false),
            reservations: Reservations::new(Arc::clone(&clock)),
            clock,
            fallback: None,
            fallback_starts: FallbackStarts::default(),
            live_nodes: AtomicU32::new(0),
            cells: AtomicU32::new(1),
            pending: Arc::default(),
            fallback_counts: FallbackCounts::default(),
            in_flight: InFlight::default(),
            fleet_sheds: FleetSheds::default(),
            release_failures: LogThrottle::default(),
            pending_releases: PendingReleases::default(),
            panics: Panics::default(),
            renewals: Renewals::default(),
            full_counters: FullCounters::default(),
            quotas: None,
            measures: Arc::default(),
            observers: SmallVec::new(),
            is_traced: false,
            meter: None,
        }
    }

    /// Sets what happens to requests whose domain has no rules.
    #[must_use]
    pub fn with_unknown_domain(self, policy: UnknownDomain) -> Self {
        self.denies_unknown.store(policy == UnknownDomain::Deny, Ordering::Relaxed);
        self
    }

    /// Turns global shadow mode on or off.
    #[must_use]
    pub fn with_global_shadow(self, shadow: bool) -> Self {
        self.shadow.store(shadow, Ordering::Relaxed);
        self
    }

    /// Sets the fallback counters for rules with `on_error: local` while the store is unavailable: any store that
    /// charges without waiting. A store that declines ([`CounterStore::try_charge`]) has no effect.
    #[must_use]
    pub fn with_fallback(mut self, counters: impl CounterStore + 'static) -> Self {
        self.fallback = Some(Box::new(counters));
        self
    }

    /// Sets the number of nodes that share the store now: without it each uses its share of a limit. Rules compiled for a
    /// fixed number of nodes keep that.
    pub fn set_live_nodes(&self, nodes: u32) {
        self.live_nodes.store(nodes, Ordering::Relaxed);
    }

    /// Returns the number of nodes that share the store; 0 if unknown.
    #[must_use]
    pub fn live_nodes(&self) -> u32 {
        self.live_nodes.load(Ordering::Relaxed)
    }

    /// Sets the number of cells, each with live nodes of its own: without the store that decides it, a counter that cells
    /// share is divided among them first.
    pub fn set_cells(&self, cells: u32) {
        self.cells.store(cells.max(1), Ordering::Relaxed);
    }

    /// Returns the number of nodes that a charge's limit is divided among while its counter cannot be asked; 0 if unknown.
    pub(crate) fn nodes_of(&self, charge: &Charge<'_>) -> u32 {
        let (nodes, cells) = (self.live_nodes(), self.cells.load(Ordering::Relaxed));
        // A split limit is this cell's part already, and so are permits without an owner.
        let is_part = match charge.key.scope.region_mode() {
            RegionMode::Split => true,
            RegionMode::Shared => charge.limit.algorithm() == Algorithm::Concurrency,
            RegionMode::Owner | RegionMode::Leased => false,
        };
        if cells > 1 && !is_part { nodes.max(1).saturating_mul(cells) } else { nodes }
    }

    /// Returns the number of decisions made without the store, as (rule, origin, count).
    #[must_use]
    pub fn fallback_counts(&self) -> Vec<(String, &'static str, u64)> {
        self.fallback_counts.all()
    }

    /// Returns the number of permits held now, by rule, as far as their holders release them.
    #[must_use]
    pub fn in_flight(&self) -> Vec<(String, u64)> {
        self.in_flight.all()
    }

    /// Replaces the active rules. Counters of unchanged rules keep their state.
    pub fn replace_rules(&self, rules: Arc<Ruleset>) {
        self.observers.iter().for_each(|observer| observer.on_rules_changed(&rules));
        self.workers.on_rules_changed(&rules);
        self.meters.on_rules_changed(&rules);
        self.fleet_shares.on_rules_changed(&rules);
        self.adaptations.on_rules_changed(&rules);
        self.rules.store(rules);
        self.generation.advance();
    }

    /// Returns the active rules.
    #[must_use]
    pub fn rules(&self) -> Arc<Ruleset> {
        self.rules.load_full()
    }

    /// Returns whether `rules` is the active rule set.
    #[must_use]
    pub fn is_active(&self, rules: &Arc<Ruleset>) -> bool {
        std::ptr::eq(Arc::as_ptr(&self.rules.load()), Arc::as_ptr(rules))
    }

    /// Returns the counter store.
    #[must_use]
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// Returns the clock used for reservation deadlines and for times in responses.
    #[must_use]
    pub fn clock(&self) -> &dyn Clock {
        &*self.clock
    }
}
