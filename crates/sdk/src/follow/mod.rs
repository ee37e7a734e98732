//! Following a control plane: a program that decides in its own process, by the rules, quotas, grants and emergency
//! measures of a Tollgate server.
//!
//! The follower pulls everything when it starts, then asks the server every two seconds whether anything has changed, and
//! compares everything every five minutes. The last good state is in memory and, if a file is configured, in a snapshot, so
//! that decisions go on while the server is unavailable, and a restart does not need it. Of several servers, one is followed
//! for as long as it responds, then the next. Whatever cannot be read or compiled changes nothing. Requests never wait for
//! any of this.
//!
//! | file | contents |
//! |---|---|
//! | `config` | [`FollowConfig`], [`FollowError`], [`FollowStatus`] |
//! | `client` | the HTTP requests to the server |
//! | `replica` | the state in memory, and what applies a new one |
//! | `hot` | which counters are hot in the fleet |
//! | `snapshot` | the files for a start without the server |
//! | `task` | what happens in which order, at the start and afterwards |

mod client;
mod config;
mod hot;
mod replica;
mod snapshot;
mod task;

pub use config::{FollowConfig, FollowError, FollowStatus};

use crate::in_process::{InProcess, MEMORY};
use replica::{FollowedQuotas, Replica};
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tollgate_core::{Clock, CounterStore, SystemClock};
use tollgate_engine::Limiter;
use tollgate_http::identity::QuotaKeys;
use tollgate_rules::Ruleset;
use tollgate_store::{LeasedStore, MemoryConfig, MemoryStore};

/// Follows the control plane of a Tollgate server.
///
/// Limiters that it has made keep it running; otherwise it ends when the last clone is dropped.
///
/// ```no_run
/// use tollgate_sdk::{FollowConfig, Follower};
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let config = FollowConfig {
///     token: std::env::var("TOLLGATE_TOKEN").ok(),
///     snapshot: Some("/var/lib/shop/tollgate.json".into()),
///     ..FollowConfig::new("https://tollgate.internal:8082")
/// };
/// let follower = Follower::start(config).await?;
/// let limits = follower.limits("shop")?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Follower {
    replica: Arc<Replica>,
    task: Arc<FollowTask>,
}

/// The task that follows; it ends with the last of those who need it.
#[derive(Debug)]
struct FollowTask(AbortHandle);

impl Drop for FollowTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl std::fmt::Debug for Follower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Follower").field("status", &self.status()).finish()
    }
}

impl Follower {
    /// Pulls the state of the server, or reads the snapshot if that fails, and follows the server from then on, on the
    /// current tokio runtime.
    ///
    /// # Errors
    /// [`FollowError`] if the settings are wrong, or there is neither a server nor a usable snapshot.
    pub async fn start(config: FollowConfig) -> Result<Self, FollowError> {
        let (replica, following) = task::start(config).await?;
        let task = Arc::new(FollowTask(tokio::spawn(following).abort_handle()));
        Ok(Self { replica, task })
    }

    /// Returns limits by the rules of a domain, with counters in at most 64 MiB of this process's memory. Each process
    /// then counts for itself; [`Follower::limits_over`] takes a store that processes share.
    ///
    /// # Errors
    /// [`FollowError::UnknownDomain`] if the server's rules have no such domain.
    pub fn limits(&self, domain: &str) -> Result<InProcess<MemoryStore<SystemClock>>, FollowError> {
        let clock = SystemClock::new();
        let store = MemoryStore::new(&MemoryConfig::with_bytes(MEMORY), clock)
            .map_err(|error| FollowError::Config(error.to_string()))?;
        self.limits_over(store, Arc::new(clock), domain)
    }

    /// Returns limits by the rules of a domain, with counters in any store.
    ///
    /// # Errors
    /// [`FollowError::UnknownDomain`] if the server's rules have no such domain.
    pub fn limits_over<S: CounterStore + 'static>(
        &self,
        store: S,
        clock: Arc<dyn Clock>,
        domain: &str,
    ) -> Result<InProcess<S>, FollowError> {
        self.limits_by(domain, |rules| Limiter::new(rules, store, clock))
    }

    /// Returns limits by an engine that the program puts together for these rules; the follower adds quotas and measures.
    ///
    /// # Errors
    /// [`FollowError::UnknownDomain`] if the server's rules have no such domain.
    pub fn limits_by<S: CounterStore + 'static>(
        &self,
        domain: &str,
        engine: impl FnOnce(Arc<Ruleset>) -> Limiter<S>,
    ) -> Result<InProcess<S>, FollowError> {
        let rules = self.replica.rules();
        if rules.domain(domain).is_none() {
            return Err(FollowError::UnknownDomain(domain.to_owned()));
        }
        let quotas = FollowedQuotas::new(Arc::clone(&self.replica), Arc::clone(&self.task));
        let limiter = engine(rules).with_quotas(Arc::new(quotas)).with_measures(self.replica.measures());
        let limiter = Arc::new(limiter);
        // The last rules with the domain stay active rather than none.
        self.replica.required.add("this program", domain);
        self.replica.add_limiter(&limiter);
        Ok(InProcess::new(limiter, domain))
    }

    /// Returns limits by the rules of a domain, with counters in Redis, which all processes share: decided from leased
    /// units, without a network call on the usual path. Set [`FollowConfig::options`] to `lease_shared: true`, so that
    /// limits which all callers share are leased too. The servers' secret for names in Redis, if they have one, belongs
    /// into `redis` ([`RedisConfig::with_key_secret`](tollgate_store::RedisConfig::with_key_secret)).
    ///
    /// # Errors
    /// [`FollowError::UnknownDomain`] if the server's rules have no such domain.
    #[cfg(feature = "redis")]
    pub fn limits_by_leases(
        &self,
        redis: tollgate_store::RedisConfig,
        leases: tollgate_store::LeaseConfig,
        domain: &str,
    ) -> Result<InProcess<crate::LeasedRedis>, FollowError> {
        let engine = |rules| crate::leased::engine(rules, redis, leases);
        let engine = engine(self.replica.rules()).map_err(|error| FollowError::Config(error.to_string()))?;
        let limits = self.limits_by(domain, |_| engine)?;
        self.share_hot_keys(&limits);
        crate::leased::spawn_tasks(limits.limiter());
        Ok(limits)
    }

    /// Exchanges with the server which counters are hot: these limits report theirs, and lease those that other processes
    /// have found hot from the first request on. [`Follower::limits_by_leases`] does so by itself; this is for leases over
    /// another store. Call it once, before the first request.
    pub fn share_hot_keys<S, A, C>(&self, limits: &InProcess<LeasedStore<S, A, C>>)
    where
        S: CounterStore + 'static,
        A: CounterStore + 'static,
        C: Clock + Clone + 'static,
    {
        self.replica.add_leases(limits.limiter());
    }

    /// Returns the lookup of API keys that have a quota, for [`ApiKeyConfig::quota_keys`](crate::ApiKeyConfig::quota_keys) of
    /// a program that identifies its callers by `known: {quotas: true}`.
    #[must_use]
    pub fn quota_keys(&self) -> QuotaKeys {
        let quotas = FollowedQuotas::new(Arc::clone(&self.replica), Arc::clone(&self.task));
        QuotaKeys::new(move |key| Some(quotas.has_key(key)))
    }

    /// Returns what the follower knows, and how well it follows.
    #[must_use]
    pub fn status(&self) -> FollowStatus {
        self.replica.status.borrow().clone()
    }

    /// Returns a receiver of the status, which changes with everything that arrives.
    #[must_use]
    pub fn subscribe(&self) -> watch::Receiver<FollowStatus> {
        self.replica.status.subscribe()
    }
}
