//! Shard: one Redis server with its pipelines, its breaker and its status.

use super::config::{Kind, RedisConfig};
use super::damaged_keys::DamagedKeys;
use super::health::Health;
use super::last_replies::LastReplies;
use super::late_replies::LateReplies;
use super::pipeline::{Connect, Job, Pipeline};
use super::script::Scripts;
use super::server_error::ServerError;
use crate::breaker::BreakerState;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ConnectionInfo, RedisResult};
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;
use tollgate_core::{Clock, LogThrottle, Timestamp};

/// Maximum jobs queued per pipeline; beyond it a check fails immediately instead of queueing in vain.
const MAX_QUEUED: usize = 4_096;

/// The queue of a pipeline is full.
pub(super) struct QueueFull;

/// State shared by all shards of a store.
pub(super) struct Shared {
    pub(super) config: RedisConfig,
    pub(super) scripts: Arc<Scripts>,
    pub(super) manual_clock: Option<Arc<dyn Clock>>,
    pub(super) clock: Arc<dyn Clock>,
    /// Decisions on which the script and `Limit::step` differ; not zero only through a bug.
    pub(super) mismatches: AtomicUsize,
    pub(super) late: LateReplies,
    pub(super) last_replies: LastReplies,
    pub(super) damaged_keys: DamagedKeys,
    pub(super) undo_failures: LogThrottle,
}

impl Shared {
    /// Returns the time of the counters, as far as this node knows it without a query.
    pub(super) fn now(&self) -> Timestamp {
        self.manual_clock.as_ref().map_or_else(|| self.clock.now(), Clock::now)
    }
}

/// One server.
pub(super) struct Shard {
    pub(super) address: String,
    pub(super) health: Arc<Health>,
    pipelines: Vec<mpsc::Sender<Job>>,
    connected: Arc<AtomicUsize>,
    run_id: Arc<RunIdTracker>,
    ahead: AtomicI64,
}

/// The process that responded last, and since when a replacement may have lost state. Zero means never.
#[derive(Default)]
pub(super) struct RunIdTracker {
    run_id: Mutex<Option<String>>,
    lost_at: AtomicU64,
}

impl RunIdTracker {
    pub(super) fn lost_at(&self) -> Option<Timestamp> {
        let lost_at = self.lost_at.load(Ordering::Acquire);
        (lost_at > 0).then(|| Timestamp::from_micros(lost_at))
    }

    fn record_loss(&self, now: Timestamp) {
        self.lost_at.fetch_max(now.as_micros(), Ordering::AcqRel);
    }
}

/// Status of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShardStatus {
    /// Name of its store; `None` for the default store.
    pub store: Option<String>,
    /// Address of the server.
    pub address: String,
    /// Number of open connections.
    pub connections: usize,
    /// State of its circuit breaker.
    pub breaker: BreakerState,
    /// When another process replaced it, which may lack recent writes: a restart or a failover.
    pub lost_writes_at: Option<Timestamp>,
    /// Microseconds by which its clock was ahead of this node's at the last reply, including the reply's travel time.
    pub clock_ahead: i64,
    /// Number of failed calls, by kind.
    pub errors: Vec<(&'static str, u64)>,
    /// Number of calls that the server refused, by the code of its error.
    pub refusals: Vec<(&'static str, u64)>,
    /// What is wrong with the server: while its breaker is open, or within the last seconds.
    pub error: Option<String>,
}

impl Shard {
    /// Creates the shard at this address; for a Sentinel store the sentinels resolve the actual address.
    pub(super) fn new(address: String, shared: &Arc<Shared>) -> Self {
        let connected = Arc::new(AtomicUsize::new(0));
        let memory = Arc::new(RunIdTracker::default());
        let connect = connect(address.clone(), Arc::clone(shared), Arc::clone(&memory));
        let config = &shared.config;
        let clock = Arc::clone(&shared.clock);
        let health =
            Arc::new(Health::new(address.clone(), config.breaker, config.deadline, clock, config.names));
        let pipelines = (0..config.connections.max(1)).map(|_| {
            let (sender, jobs) = mpsc::channel(MAX_QUEUED);
            let pipeline = Pipeline {
                connect: Arc::clone(&connect),
                shared: Arc::clone(shared),
                health: Arc::clone(&health),
                run_id: Arc::clone(&memory),
                merges: config.kind != Kind::Cluster,
                connected: Arc::clone(&connected),
            };
            tokio::spawn(pipeline.run(jobs));
            sender
        });
        let pipelines = pipelines.collect();
        Self { address, health, pipelines, connected, run_id: memory, ahead: AtomicI64::new(0) }
    }

    /// Sends a job to the pipeline of its key, so that checks of one key share a batch.
    pub(super) fn send(&self, job: Job) -> Result<(), QueueFull> {
        let key =
            job.request.bundles.first().map_or(0, |bundle| usize::from(super::key_encoding::slot(bundle)));
        self.pipelines[key % self.pipelines.len()].try_send(job).map_err(|_| QueueFull)
    }

    pub(super) fn status(&self) -> ShardStatus {
        ShardStatus {
            store: None,
            address: self.address.clone(),
            connections: self.connected.load(Ordering::Relaxed),
            breaker: self.health.state(),
            lost_writes_at: self.run_id.lost_at(),
            clock_ahead: self.ahead.load(Ordering::Relaxed),
            errors: self.health.error_counts(),
            refusals: self.health.refusal_counts(),
            error: self.health.error(),
        }
    }

    /// Records the server's clock reading and this node's at the same moment.
    pub(super) fn record_clock(&self, its: Timestamp, ours: Timestamp) {
        let micros = |at: Timestamp| i64::try_from(at.as_micros()).unwrap_or(i64::MAX);
        self.ahead.store(micros(its) - micros(ours), Ordering::Relaxed);
    }

    /// Records that this server took over from a failed one: writes that were not replicated are lost.
    pub(super) fn record_failover(&self, now: Timestamp) {
        self.run_id.record_loss(now);
    }

    /// Inherits the losses of a server whose slots have moved here: the lost state is missing here too.
    pub(super) fn inherit_losses(&self, other: &Self) {
        if let Some(lost_at) = other.run_id.lost_at() {
            self.run_id.record_loss(lost_at);
        }
    }
}

/// Returns the function with which a pipeline connects to this address.
fn connect(address: String, shared: Arc<Shared>, memory: Arc<RunIdTracker>) -> Connect {
    Arc::new(move || {
        let (address, shared, memory) = (address.clone(), Arc::clone(&shared), Arc::clone(&memory));
        Box::pin(async move {
            let (host, port) = match shared.config.kind {
                Kind::Sentinel => primary(&shared.config).await?,
                _ => split(&address)?,
            };
            let mut connection = connect_to(&shared.config, &host, port).await?;
            let server: String = redis::cmd("INFO").arg("server").query_async(&mut connection).await?;
            let process = server.lines().find_map(|line| line.strip_prefix("run_id:")).map(str::to_owned);
            let mut known = memory.run_id.lock().unwrap_or_else(PoisonError::into_inner);
            if known.is_some() && *known != process {
                memory.record_loss(shared.now());
                tracing::warn!(address, "shard changed process; recent writes may be lost");
            }
            *known = process;
            drop(known);
            Ok(connection)
        })
    })
}

/// Connects to a server of the store. If it refuses the password, the password file is read again, and tried if it has
/// changed: passwords are changed without restarting nodes.
pub(super) async fn connect_to(
    config: &RedisConfig,
    host: &str,
    port: u16,
) -> RedisResult<MultiplexedConnection> {
    let refused = match open(config.connection_info(host, port)?).await {
        Err(error) if ServerError::from_client(&error).is_some_and(|refusal| refusal.is_auth()) => error,
        other => return other,
    };
    let shared = config.clone();
    let changed = tokio::task::spawn_blocking(move || shared.reread_password()).await.unwrap_or(false);
    if changed { open(config.connection_info(host, port)?).await } else { Err(refused) }
}

/// Opens a connection without a timeout of its own: pipelines have theirs.
pub(super) async fn open(info: ConnectionInfo) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
    Client::open(info)?.get_multiplexed_async_connection_with_config(&config).await
}

/// Queries the sentinels for the primary's address; the first known address is used.
pub(super) async fn primary(config: &RedisConfig) -> RedisResult<(String, u16)> {
    let each = config.connect_timeout() / u32::try_from(config.hosts.len() + 1).unwrap_or(1);
    for (host, port) in &config.hosts {
        let ask = async {
            let mut sentinel = open(config.sentinel_info(host, *port)?).await?;
            let mut command = redis::cmd("SENTINEL");
            command.arg("get-master-addr-by-name").arg(&config.primary);
            let found: Option<(String, u16)> = command.query_async(&mut sentinel).await?;
            RedisResult::Ok(found)
        };
        if let Ok(Ok(Some(found))) = tokio::time::timeout(each, ask).await {
            return Ok(found);
        }
    }
    Err((redis::ErrorKind::Io, "no sentinel knows the primary").into())
}

/// Splits `host:port`, where the host may be an IPv6 address.
pub(super) fn split(address: &str) -> RedisResult<(String, u16)> {
    let wrong = || redis::RedisError::from((redis::ErrorKind::InvalidClientConfig, "not an address"));
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    Ok((host.trim_matches(['[', ']']).to_owned(), port.parse().map_err(|_| wrong())?))
}
