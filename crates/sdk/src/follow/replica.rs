//! The state of the server in this process: what limiters read, and what replaces it.

use super::FollowTask;
use super::config::FollowStatus;
use super::hot::LeasedLimiters;
use arc_swap::ArcSwap;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;
use tollgate_core::{Clock, CounterStore, SystemClock, Timestamp};
use tollgate_engine::{ActiveMeasures, CallerQuota, Check, Limiter, QuotaProvider};
use tollgate_replica::{CounterHasher, KeyHasher, QuotaTable, ReplicaState, ReplicatedRules};
use tollgate_rules::{Options, RequiredDomains, Ruleset};
use tollgate_store::LeasedStore;

/// Replaces the rules of a limiter; returns whether it still exists.
type Target = Box<dyn Fn(&Arc<Ruleset>) -> bool + Send + Sync>;

/// The state in this process.
pub(super) struct Replica {
    pub(super) installation: String,
    /// Domains that limits of this process decide by.
    pub(super) required: RequiredDomains,
    hasher: KeyHasher,
    clock: SystemClock,
    quotas: ArcSwap<QuotaTable>,
    measures: Arc<ActiveMeasures>,
    rules: ArcSwap<Ruleset>,
    targets: Mutex<Vec<Target>>,
    /// Limiters that lease counters.
    pub(super) leased: LeasedLimiters,
    /// The last state that was applied.
    state: ArcSwap<ReplicaState>,
    /// Control revision up to which quotas are known.
    revision: AtomicI64,
    /// Time at which the quotas were last known to be current, in milliseconds.
    current_at: AtomicI64,
    pub(super) status: watch::Sender<FollowStatus>,
}

impl Replica {
    /// Creates the replica of a state, without quotas.
    pub(super) fn new(state: ReplicaState, options: &Options) -> Result<Arc<Self>, String> {
        let hasher = KeyHasher::new(&state.secret().unwrap_or_default());
        let rules = Arc::new(compile(&state.rules, options)?);
        let key_hash = {
            let hasher = hasher.clone();
            move |api_key: &str| hasher.hash(api_key).table_hash()
        };
        let replica = Self {
            required: options.required_domains.clone(),
            installation: state.installation.clone(),
            quotas: ArcSwap::from_pointee(QuotaTable::new(hasher.clone())),
            hasher,
            clock: SystemClock::new(),
            measures: Arc::new(ActiveMeasures::new(key_hash)),
            rules: ArcSwap::new(rules),
            targets: Mutex::default(),
            leased: LeasedLimiters::default(),
            state: ArcSwap::from_pointee(state),
            revision: AtomicI64::new(0),
            current_at: AtomicI64::new(0),
            status: watch::Sender::default(),
        };
        let state = replica.state();
        replica.apply_measures_and_grants(&state);
        replica.report(|status| status.rev = state.rules.rev);
        Ok(Arc::new(replica))
    }

    pub(super) fn rules(&self) -> Arc<Ruleset> {
        self.rules.load_full()
    }

    pub(super) fn measures(&self) -> Arc<ActiveMeasures> {
        Arc::clone(&self.measures)
    }

    pub(super) fn quotas(&self) -> Arc<QuotaTable> {
        self.quotas.load_full()
    }

    pub(super) fn state(&self) -> Arc<ReplicaState> {
        self.state.load_full()
    }

    pub(super) fn revision(&self) -> i64 {
        self.revision.load(Ordering::Relaxed)
    }

    pub(super) fn set_revision(&self, revision: i64) {
        self.revision.store(revision, Ordering::Relaxed);
    }

    pub(super) fn current_at(&self) -> i64 {
        self.current_at.load(Ordering::Relaxed)
    }

    pub(super) fn set_current_at(&self, millis: i64) {
        self.current_at.store(millis, Ordering::Relaxed);
    }

    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    pub(super) fn now_millis(&self) -> i64 {
        i64::try_from(self.now().as_micros() / 1_000).unwrap_or(i64::MAX)
    }

    /// Returns an empty table for the quotas of this installation.
    pub(super) fn empty_table(&self) -> Arc<QuotaTable> {
        Arc::new(QuotaTable::new(self.hasher.clone()))
    }

    /// Adds a limiter whose rules follow the server's from now on.
    pub(super) fn add_limiter<S: CounterStore + 'static>(&self, limiter: &Arc<Limiter<S>>) {
        let weak = Arc::downgrade(limiter);
        let target: Target = Box::new(move |rules| {
            let Some(limiter) = weak.upgrade() else { return false };
            if !limiter.is_active(rules) {
                limiter.replace_rules(Arc::clone(rules));
            }
            true
        });
        let mut targets = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        // Rules may have arrived since the limiter was built.
        target(&self.rules.load());
        targets.push(target);
    }

    /// Adds a limiter that exchanges with the server which of its counters are hot.
    pub(super) fn add_leases<S, A, C>(&self, limiter: &Arc<Limiter<LeasedStore<S, A, C>>>)
    where
        S: CounterStore + 'static,
        A: CounterStore + 'static,
        C: Clock + Clone + 'static,
    {
        self.leased.add(limiter, CounterHasher::new(&self.hasher));
    }

    /// Makes rules active in all limiters.
    fn replace_rules(&self, rules: &Arc<Ruleset>) {
        let mut targets = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        self.rules.store(Arc::clone(rules));
        targets.retain(|target| target(rules));
    }

    /// Replaces all quotas; the caller reports it.
    pub(super) fn replace_quotas(&self, table: Arc<QuotaTable>, revision: i64) {
        table.replace_grants(self.state().grants.clone(), self.now_millis());
        // The snapshot, which is written meanwhile, must not have a revision that its quotas are older than.
        self.set_revision(0);
        self.quotas.store(table);
        self.set_revision(revision);
    }

    fn apply_measures_and_grants(&self, state: &ReplicaState) {
        // A measure that cannot be read, perhaps of a newer version, must not prevent the others from taking effect.
        let measures = state.measures.iter().filter_map(|measure| {
            measure
                .to_measure()
                .inspect_err(|error| tracing::error!(%error, "skipping invalid emergency measure"))
                .ok()
        });
        self.measures.replace(measures.collect::<Vec<_>>());
        self.quotas.load().replace_grants(state.grants.clone(), self.now_millis());
    }

    /// Applies everything of a state but its quotas. Rules that cannot be compiled leave the last good ones active.
    pub(super) async fn apply(self: &Arc<Self>, state: ReplicaState, options: &Options) {
        // Urgent state first.
        self.apply_measures_and_grants(&state);
        let before = self.state();
        let is_failed = self.status.borrow().rules_error.is_some();
        let mut state = state;
        if state.rules != before.rules || is_failed {
            let (rules, options) = (state.rules.clone(), options.clone());
            let compiled = tokio::task::spawn_blocking(move || compile(&rules, &options)).await;
            match compiled.unwrap_or_else(|error| Err(error.to_string())) {
                Ok(rules) => {
                    tracing::info!(
                        rules = rules.revision(),
                        rev = state.rules.rev,
                        "rules of the server active"
                    );
                    self.replace_rules(&Arc::new(rules));
                    let rev = state.rules.rev;
                    self.report(|status| (status.rev, status.rules_error) = (rev, None));
                }
                Err(error) => {
                    let revision = state.rules.revision.clone();
                    tracing::error!(
                        rules = revision,
                        "rules of the server cannot be used; keeping the last ones\n{error}"
                    );
                    self.report(|status| status.rules_error = Some(format!("rules {revision}: {error}")));
                    // The snapshot has what is active.
                    state.rules = before.rules.clone();
                }
            }
        }
        self.state.store(Arc::new(state));
        self.report(|_| ());
    }

    /// Clears the flag of measures that have all expired.
    pub(super) fn remove_expired(&self) {
        self.measures.remove_expired(self.now());
    }

    /// Changes the status, and fills in what is known.
    pub(super) fn report(&self, change: impl FnOnce(&mut FollowStatus)) {
        let state = self.state.load();
        self.status.send_modify(|status| {
            status.revision = self.revision();
            self.rules.load().revision().clone_into(&mut status.rules);
            status.quotas = self.quotas.load().len();
            (status.measures, status.grants) = (state.measures.len(), state.grants.len());
            change(status);
        });
    }
}

fn compile(rules: &ReplicatedRules, own: &Options) -> Result<Ruleset, String> {
    Ruleset::load(&rules.sources(), &rules.options(own.clone())).map_err(|errors| errors.to_string())
}

/// The quotas for a limiter or an identity resolver, which keeps the follower running.
pub(super) struct FollowedQuotas {
    replica: Arc<Replica>,
    _task: Arc<FollowTask>,
}

impl FollowedQuotas {
    pub(super) fn new(replica: Arc<Replica>, task: Arc<FollowTask>) -> Self {
        Self { replica, _task: task }
    }

    pub(super) fn has_key(&self, api_key: &str) -> bool {
        self.replica.quotas.load().has_key(api_key)
    }
}

impl QuotaProvider for FollowedQuotas {
    #[inline]
    fn lookup(&self, check: &Check<'_>, rules: &Ruleset, clock: &dyn Clock) -> CallerQuota {
        self.replica.quotas.load().lookup(check, rules, clock)
    }
}
