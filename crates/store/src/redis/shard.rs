//! One server: its lanes, its breaker, and how it is doing.

use super::config::{Kind, RedisConfig};
use super::pipeline::{Connect, Job, Lane};
use super::script::Scripts;
use crate::breaker::{Breaker, BreakerState, Ticket, Turned};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, ConnectionInfo, RedisResult};
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::mpsc;
use tollgate_core::{Clock, Timestamp};

/// Jobs that wait for one lane; beyond it a check fails at once rather than queue for nothing.
const WAITING: usize = 4_096;

/// A lane has as many jobs waiting as it takes.
pub(super) struct TooMany;

/// What all nodes of a store share.
pub(super) struct Shared {
    pub(super) config: RedisConfig,
    pub(super) scripts: Arc<Scripts>,
    pub(super) told: Option<Arc<dyn Clock>>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) disagreements: Arc<AtomicUsize>,
}

impl Shared {
    /// The time that counters go by, as far as we know it without asking.
    pub(super) fn now(&self) -> Timestamp {
        self.told.as_ref().map_or_else(|| self.clock.now(), Clock::now)
    }
}

/// One server.
pub(super) struct Node {
    pub(super) address: String,
    pub(super) breaker: Arc<Breaker>,
    lanes: Vec<mpsc::Sender<Job>>,
    connected: Arc<AtomicUsize>,
    memory: Arc<Memory>,
    pub(super) errors: Errors,
    ahead: AtomicI64,
}

/// Which process answered last, and since when another may have forgotten something. Zero is never.
#[derive(Default)]
pub(super) struct Memory {
    process: Mutex<Option<String>>,
    lost_at: AtomicU64,
}

impl Memory {
    pub(super) fn lost_at(&self) -> Option<Timestamp> {
        let lost_at = self.lost_at.load(Ordering::Acquire);
        (lost_at > 0).then(|| Timestamp::from_micros(lost_at))
    }

    fn lose(&self, now: Timestamp) {
        self.lost_at.fetch_max(now.as_micros(), Ordering::AcqRel);
    }
}

/// Why an ask came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// No answer within the deadline.
    Timeout,
    /// No connection, or one that broke.
    Connection,
    /// The server said no.
    Refused,
    /// The breaker is open: it was not asked.
    Open,
    /// Too many asks wait for it.
    Busy,
}

impl Trouble {
    /// The words in logs and metrics, in the order above.
    const NAMES: [&'static str; 5] = ["timeout", "connection", "refused", "breaker_open", "busy"];
}

/// How often each has happened.
#[derive(Debug, Default)]
pub(super) struct Errors([AtomicU64; 5]);

impl Errors {
    pub(super) fn count(&self, trouble: Trouble) {
        self.0[trouble as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn told(&self) -> Vec<(&'static str, u64)> {
        Trouble::NAMES
            .into_iter()
            .zip(&self.0)
            .map(|(name, count)| (name, count.load(Ordering::Relaxed)))
            .collect()
    }
}

/// How one server is doing.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ShardStatus {
    /// Where it is.
    pub address: String,
    /// Connections that stand.
    pub connections: usize,
    /// Whether it is asked.
    pub breaker: BreakerState,
    /// When another process took its place, which may not know all that was written: a restart, a failover.
    pub lost_writes_at: Option<Timestamp>,
    /// By how many microseconds its clock is ahead of ours, as far as the last answer showed; the way of the answer is in it.
    pub clock_ahead: i64,
    /// Asks that came to nothing, by why.
    pub errors: Vec<(&'static str, u64)>,
}

impl Node {
    /// A server at this address; sentinels say where, for a store of that kind.
    pub(super) fn new(address: String, shared: &Arc<Shared>) -> Self {
        let connected = Arc::new(AtomicUsize::new(0));
        let memory = Arc::new(Memory::default());
        let connect = connect(address.clone(), Arc::clone(shared), Arc::clone(&memory));
        let breaker = Arc::new(Breaker::new(shared.config.breaker));
        let lanes = (0..shared.config.connections.max(1)).map(|_| {
            let (sender, jobs) = mpsc::channel(WAITING);
            let lane = Lane {
                connect: Arc::clone(&connect),
                scripts: Arc::clone(&shared.scripts),
                told: shared.told.clone(),
                clock: Arc::clone(&shared.clock),
                memory: Arc::clone(&memory),
                breaker: Arc::clone(&breaker),
                caution: shared.config.caution,
                merges: shared.config.kind != Kind::Cluster,
                patience: shared.config.deadline * 10,
                connect_timeout: shared.config.connect_timeout,
                connected: Arc::clone(&connected),
                disagreements: Arc::clone(&shared.disagreements),
            };
            tokio::spawn(lane.run(jobs));
            sender
        });
        let lanes = lanes.collect();
        Self {
            address,
            breaker,
            lanes,
            connected,
            memory,
            errors: Errors::default(),
            ahead: AtomicI64::new(0),
        }
    }

    /// Hands a job to the lane that has its key: checks of one key meet in one batch.
    pub(super) fn send(&self, job: Job) -> Result<(), TooMany> {
        let key =
            job.request.bundles.first().map_or(0, |bundle| usize::from(super::key_encoding::slot(bundle)));
        self.lanes[key % self.lanes.len()].try_send(job).map_err(|_| TooMany)
    }

    /// It answered, whatever it said.
    pub(super) fn answered(&self, ticket: Ticket<'_>) {
        if ticket.succeeded() == Turned::Closed {
            tracing::info!(shard = self.address, "Redis answers again: the breaker is closed");
        }
    }

    /// An ask came to nothing, and counts against it.
    pub(super) fn failed(&self, ticket: Ticket<'_>, trouble: Trouble, now: Timestamp) {
        if ticket.failed(now) == Turned::Open {
            tracing::warn!(
                shard = self.address,
                error = Trouble::NAMES[trouble as usize],
                "too many failures: the breaker is open, and until Redis answers again rules decide by their `on_error`"
            );
        }
    }

    pub(super) fn status(&self, now: Timestamp) -> ShardStatus {
        ShardStatus {
            address: self.address.clone(),
            connections: self.connected.load(Ordering::Relaxed),
            breaker: self.breaker.state(now),
            lost_writes_at: self.memory.lost_at(),
            clock_ahead: self.ahead.load(Ordering::Relaxed),
            errors: self.errors.told(),
        }
    }

    /// What its clock shows, when ours shows this.
    pub(super) fn shows(&self, its: Timestamp, ours: Timestamp) {
        let micros = |at: Timestamp| i64::try_from(at.as_micros()).unwrap_or(i64::MAX);
        self.ahead.store(micros(its) - micros(ours), Ordering::Relaxed);
    }

    /// Another server has taken this one's slots: what it did not pass on is lost.
    pub(super) fn took_over(&self, now: Timestamp) {
        self.memory.lose(now);
    }

    /// Slots of another server have come here: what that one had lost is not known here either.
    pub(super) fn takes_slots_of(&self, other: &Self) {
        if let Some(lost_at) = other.memory.lost_at() {
            self.memory.lose(lost_at);
        }
    }
}

/// How a lane of this address connects.
fn connect(address: String, shared: Arc<Shared>, memory: Arc<Memory>) -> Connect {
    Arc::new(move || {
        let (address, shared, memory) = (address.clone(), Arc::clone(&shared), Arc::clone(&memory));
        Box::pin(async move {
            let (host, port) = match shared.config.kind {
                Kind::Sentinel => primary(&shared.config).await?,
                _ => split(&address)?,
            };
            let mut connection = open(shared.config.at(&host, port)?).await?;
            let server: String = redis::cmd("INFO").arg("server").query_async(&mut connection).await?;
            let process = server.lines().find_map(|line| line.strip_prefix("run_id:")).map(str::to_owned);
            let mut known = memory.process.lock().unwrap_or_else(PoisonError::into_inner);
            if known.is_some() && *known != process {
                memory.lose(shared.now());
                tracing::warn!(address, "another Redis process answers: writes may have been lost");
            }
            *known = process;
            drop(known);
            Ok(connection)
        })
    })
}

/// A connection without a time limit of its own: lanes have theirs.
pub(super) async fn open(info: ConnectionInfo) -> RedisResult<MultiplexedConnection> {
    let config = AsyncConnectionConfig::new().set_response_timeout(None).set_connection_timeout(None);
    Client::open(info)?.get_multiplexed_async_connection_with_config(&config).await
}

/// Asks the sentinels where the primary is; the first that knows is believed.
async fn primary(config: &RedisConfig) -> RedisResult<(String, u16)> {
    let each = config.connect_timeout / u32::try_from(config.hosts.len() + 1).unwrap_or(1);
    for (host, port) in &config.hosts {
        let ask = async {
            let mut sentinel = open(config.sentinel_at(host, *port)?).await?;
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

/// `host:port`, where the host may be an IPv6 address.
pub(super) fn split(address: &str) -> RedisResult<(String, u16)> {
    let wrong = || redis::RedisError::from((redis::ErrorKind::InvalidClientConfig, "not an address"));
    let (host, port) = address.rsplit_once(':').ok_or_else(wrong)?;
    Ok((host.trim_matches(['[', ']']).to_owned(), port.parse().map_err(|_| wrong())?))
}
