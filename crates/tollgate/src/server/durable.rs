//! Durable counters of the process: the tasks that write consumption to the database each second, notice that the store has
//! lost its counters, and read back what the database has.

use crate::config::{Config, StoreChoice};
use crate::server::store::{KeptStore, Store};
use crate::server::telemetry::node_name;
use anyhow::Context;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tollgate_cells::durable::{Durable, DurableRow, Peers, ReadBack, SavedSlot};
use tollgate_control::{ControlError, ControlPlane, DurableTotal, DurableUnits, NodeRecord};
use tollgate_core::{SystemClock, Timestamp};
use tollgate_engine::Limiter;
use tollgate_observe::MetricsWriter;

/// Interval between two collections, within which consumption is attributed to one instant.
const COLLECT: Duration = Duration::from_millis(250);
/// Interval between two writes, and between two looks at the store.
const INTERVAL: Duration = Duration::from_secs(1);
/// Rows per write.
const BATCH: usize = 2_000;
/// Maximum number of slots that are read back.
const MAX_SAVED: usize = 500_000;
/// Canaries in each store: enough that every shard of a cluster has some.
const REDIS_CANARIES: usize = 64;
/// Interval between renewals of canaries.
const RENEW: Duration = Duration::from_secs(6 * 3_600);
const PURGE: Duration = Duration::from_secs(3_600);
/// Rows that one statement deletes, and the pause before the next.
const PURGE_BATCH: u32 = 5_000;
const PURGE_PAUSE: Duration = Duration::from_millis(200);
/// Interval between looks for another node with the same record: longer than a node that has ended is listed as alive.
const SAME_RECORD: Duration = Duration::from_secs(30);
/// Interval between two looks whether counters have got another owner.
const LOOK_FOR_MOVES: Duration = Duration::from_millis(50);
/// Longest pause between two attempts to read back.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Maximum time that the start waits for what the database has.
const BEFORE_TRAFFIC: Duration = Duration::from_secs(5);
/// Maximum time that shutdown waits for the last write.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// What the record's name of a node with counters in memory begins with, if it is no cell.
const MEMORY: &str = "memory/";
/// Field of a heartbeat with the record's name.
pub(crate) const RECORD: &str = "durable_record";

/// Creates the record of durable counters; `None` without a database.
pub(crate) fn record(
    config: &Config,
    control: Option<&Arc<ControlPlane>>,
    clock: SystemClock,
) -> anyhow::Result<Option<Arc<Durable<SystemClock>>>> {
    let Some(control) = control else { return Ok(None) };
    let canaries = match config.store {
        StoreChoice::Memory => 1,
        StoreChoice::Redis(_) => REDIS_CANARIES,
    };
    let stores: Vec<String> = config.stores.iter().map(|(name, _)| name.clone()).collect();
    let peers = if config.cells.is_some() { Peers::Cells } else { Peers::None };
    let (key, process) = (control.counter_hash_key(), control.instance_id());
    let durable = Durable::new(&key, process, &stores, canaries, peers, clock).context("durable counters")?;
    Ok(Some(Arc::new(durable)))
}

/// Returns the name of the set of nodes that share this one's counters: the same after a restart.
pub(crate) fn cell_name(config: &Config) -> String {
    match (&config.cells, &config.store) {
        (Some(cells), _) => cells.config.cell.clone(),
        (None, StoreChoice::Redis(_)) => format!("redis/{}", config.region.as_deref().unwrap_or_default()),
        (None, StoreChoice::Memory) => format!("{MEMORY}{}", node_name(config)),
    }
}

/// Durable counters of a process with a database.
pub(crate) struct DurableServer {
    limiter: Arc<Limiter<Store>>,
    durable: Arc<Durable<SystemClock>>,
    control: Arc<ControlPlane>,
    cell: String,
    /// Why a new process reads back: counters in memory are always lost.
    at_start: ReadBack,
    failures: AtomicU64,
    losses: AtomicU64,
    written: AtomicU64,
    unread: AtomicU64,
    /// Number of other nodes with the same record.
    same_record: AtomicU64,
    /// Time at which everything was written last, in milliseconds.
    written_at: AtomicU64,
    is_failing: AtomicBool,
}

/// The running tasks.
pub(crate) struct DurableTasks {
    stop: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl DurableServer {
    /// Prepares the tasks; `None` without a database.
    pub(crate) fn new(
        limiter: &Arc<Limiter<Store>>,
        config: &Config,
        control: Option<&Arc<ControlPlane>>,
    ) -> Option<Arc<Self>> {
        let durable = Arc::clone(limiter.store().kept().durable()?);
        durable.expect_durable(limiter.rules().may_be_durable());
        if let Store::Cells(cells) = limiter.store() {
            durable.follow(cells.members());
        }
        Some(Arc::new(Self {
            limiter: Arc::clone(limiter),
            durable,
            control: Arc::clone(control?),
            cell: cell_name(config),
            at_start: match config.store {
                StoreChoice::Memory => ReadBack::Loss,
                StoreChoice::Redis(_) => ReadBack::Start,
            },
            failures: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            written: AtomicU64::new(0),
            unread: AtomicU64::new(0),
            same_record: AtomicU64::new(0),
            written_at: AtomicU64::new(millis(limiter.clock().now())),
            is_failing: AtomicBool::new(false),
        }))
    }

    fn store(&self) -> &KeptStore {
        self.limiter.store().kept()
    }

    /// Reads back what the database has, and starts the tasks. Traffic waits for the first read, for a short time.
    pub(crate) async fn start(self: Arc<Self>) -> DurableTasks {
        let (stop, stopped) = oneshot::channel();
        let (ready, is_ready) = oneshot::channel();
        let server = Arc::clone(&self);
        let task = tokio::spawn(async move {
            let running = async {
                let (collect, write, watch) = (server.collect(), server.write(), server.watch(ready));
                let others = (server.follow_moves(), server.purge(), server.look_for_same_record());
                tokio::join!(collect, write, watch, others.0, others.1, others.2)
            };
            tokio::select! {
                _ = running => {}
                _ = stopped => {}
            }
            server.durable.collect();
            if tokio::time::timeout(SHUTDOWN_TIMEOUT, server.flush_and_log()).await.is_err()
                || server.durable.stats().pending_rows > 0
            {
                tracing::warn!("the last consumption of durable limits could not be written in time");
            }
        });
        if tokio::time::timeout(BEFORE_TRAFFIC, is_ready).await.is_err() {
            tracing::warn!("durable limits are not read back yet; traffic is served meanwhile");
        }
        DurableTasks { stop, task }
    }

    /// Collects consumption, and follows the rules.
    async fn collect(&self) {
        let mut rules = self.limiter.rules();
        loop {
            tokio::time::sleep(COLLECT).await;
            let current = self.limiter.rules();
            if !Arc::ptr_eq(&rules, &current) {
                self.durable.expect_durable(current.may_be_durable());
                rules = current;
            }
            self.durable.collect();
        }
    }

    async fn write(&self) {
        loop {
            tokio::time::sleep(INTERVAL).await;
            self.flush_and_log().await;
        }
    }

    async fn flush(&self) -> Result<(), ControlError> {
        let counted_at = millis(self.limiter.clock().now());
        // What changes while it is written is for the next time.
        for _ in 0..self.durable.stats().pending_rows.div_ceil(BATCH) {
            let rows = self.durable.pending(BATCH);
            if rows.is_empty() {
                break;
            }
            let units: Vec<DurableUnits> = rows.iter().map(units).collect();
            if let Err(error) = self.control.write_durable(&self.cell, &units).await {
                self.failures.fetch_add(1, Ordering::Relaxed);
                return Err(error);
            }
            self.durable.record_written(&rows);
            self.written.fetch_add(rows.len() as u64, Ordering::Relaxed);
        }
        self.written_at.store(counted_at, Ordering::Relaxed);
        Ok(())
    }

    async fn flush_and_log(&self) {
        match self.flush().await {
            Ok(()) => {
                if self.is_failing.swap(false, Ordering::Relaxed) {
                    tracing::info!("consumption of durable limits is written again");
                }
            }
            Err(error) => {
                if !self.is_failing.swap(true, Ordering::Relaxed) {
                    tracing::warn!(%error, "cannot write consumption of durable limits; it is kept in memory");
                }
            }
        }
    }

    /// Looks whether the store has lost its counters, and reads back if so. A new process reads back first.
    async fn watch(&self, ready: oneshot::Sender<()>) {
        let (mut ready, mut is_first) = (Some(ready), true);
        let (mut has_warned, mut is_noticed) = (false, false);
        // When all canaries were last written.
        let (mut backoff, mut renewed) = (INTERVAL, None::<tokio::time::Instant>);
        loop {
            if !is_first && self.durable.is_idle() {
                tokio::time::sleep(INTERVAL).await;
                continue;
            }
            let is_lost = match self.store().is_lost().await {
                Ok(is_lost) => is_lost || is_first,
                // Nothing can be compared with a store that does not answer; what is read back waits for it.
                Err(_) => is_first && ready.is_some(),
            };
            if is_lost {
                if !is_first && !std::mem::replace(&mut is_noticed, true) {
                    tracing::warn!(
                        "the store has lost its counters; those of durable limits are restored from the database"
                    );
                }
                let after = if is_first { self.after_start().await } else { Some(ReadBack::Loss) };
                match self.read_back(after.unwrap_or(self.at_start)).await {
                    // Read back again once the store says whether it has lost counters that are in use since.
                    Ok(()) if after.is_none() => {
                        ready.take().map(|ready| ready.send(()));
                    }
                    Ok(()) => {
                        renewed = self.store().write_canaries().await.is_ok().then(tokio::time::Instant::now);
                        // Counted once what was lost is known again.
                        self.losses.fetch_add(u64::from(!is_first), Ordering::Relaxed);
                        (is_first, has_warned, is_noticed) = (false, false, false);
                        ready.take().map(|ready| ready.send(()));
                    }
                    Err(error) if !std::mem::replace(&mut has_warned, true) => {
                        tracing::warn!(%error, "cannot read consumption of durable limits; trying again");
                    }
                    Err(_) => {}
                }
                tokio::time::sleep(backoff).await;
                // A store that keeps no canary, because it refuses writes, must not be read back for each second.
                backoff = (2 * backoff).min(MAX_BACKOFF);
                continue;
            }
            backoff = INTERVAL;
            if renewed.is_none_or(|at| at.elapsed() >= RENEW) && self.store().renew_canaries().await.is_ok() {
                renewed = Some(tokio::time::Instant::now());
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Returns why a process that starts reads back: because the store has lost its counters while it was down, or not. `None` if
    /// the store does not answer.
    async fn after_start(&self) -> Option<ReadBack> {
        match self.at_start {
            ReadBack::Start if self.store().is_new().await.ok()? => Some(ReadBack::Loss),
            other => Some(other),
        }
    }

    /// Reads back what other cells have written when counters may have moved to this one: until then it decides none of
    /// them, for a bounded time.
    async fn follow_moves(&self) {
        let mut has_warned = false;
        loop {
            tokio::time::sleep(LOOK_FOR_MOVES).await;
            let Some(moves) = self.durable.unread_moves() else { continue };
            let read = match self.durable.is_idle() {
                true => Ok(()),
                false => self.read_back(ReadBack::Move).await,
            };
            match read {
                Ok(()) => {
                    self.durable.record_moves(moves);
                    has_warned = false;
                }
                Err(error) => {
                    if !std::mem::replace(&mut has_warned, true) {
                        tracing::warn!(
                            %error,
                            "cannot read what other cells have counted of durable limits whose owner has changed"
                        );
                    }
                    tokio::time::sleep(INTERVAL).await;
                }
            }
        }
    }

    async fn read_back(&self, after: ReadBack) -> Result<(), ControlError> {
        self.durable.collect();
        self.flush().await?;
        let totals = self.control.read_durable(&self.cell, MAX_SAVED).await?;
        if totals.len() >= MAX_SAVED {
            self.unread.fetch_add(1, Ordering::Relaxed);
            tracing::warn!(
                slots = MAX_SAVED,
                "too many durable counters to read back; the others start unused"
            );
        }
        self.durable.install(totals.iter().map(saved).collect(), after);
        Ok(())
    }

    async fn purge(&self) {
        loop {
            let pause = match self.control.purge_durable(PURGE_BATCH).await {
                Ok(rows) if rows >= u64::from(PURGE_BATCH) => PURGE_PAUSE,
                Ok(_) => PURGE,
                Err(error) => {
                    tracing::debug!(%error, "cannot purge consumption of durable limits");
                    PURGE
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Warns while another node with counters in memory has the same record: after a restart, each would be debited what
    /// both have used. A node that was killed is listed for some seconds, so it must be there in two looks.
    async fn look_for_same_record(&self) {
        if !self.cell.starts_with(MEMORY) {
            return;
        }
        let mut before: Vec<String> = Vec::new();
        loop {
            if let Ok(nodes) = self.control.nodes().await {
                let same = others_with_record(&nodes, &self.cell);
                let stayed = same.iter().filter(|instance| before.contains(instance)).count() as u64;
                if stayed > 0 && self.same_record.swap(stayed, Ordering::Relaxed) == 0 {
                    tracing::warn!(
                        record = self.cell,
                        nodes = stayed,
                        "another node on this database has the same name and counters in memory: a restarted one would be \
                         debited what both have used of durable limits; give each node its own --node"
                    );
                } else if stayed == 0 {
                    self.same_record.store(0, Ordering::Relaxed);
                }
                before = same;
            }
            tokio::time::sleep(SAME_RECORD).await;
        }
    }

    /// Writes the metrics.
    pub(crate) fn metrics(&self, page: &mut MetricsWriter) {
        let stats = self.durable.stats();
        let help = "Number of rows of durable limits that are not in the database yet.";
        page.gauge("ratelimit_durable_pending_rows", help, stats.pending_rows);
        let behind = match stats.pending_rows {
            0 => 0,
            _ => millis(self.limiter.clock().now()).saturating_sub(self.written_at.load(Ordering::Relaxed)),
        };
        let help = "Seconds since all consumption of durable limits was in the database; 0 if it is.";
        page.gauge("ratelimit_durable_behind_seconds", help, behind as f64 / 1_000.0);
        let help = "Number of other nodes with counters in memory that have the same name on this database.";
        page.gauge("ratelimit_durable_same_record_nodes", help, self.same_record.load(Ordering::Relaxed));
        let help = "Number of counters read back from the database that were not charged since.";
        page.gauge("ratelimit_durable_saved_counters", help, stats.saved_counters);
        let counters = [
            (
                "written_rows",
                "Number of rows of durable limits written to the database.",
                self.written.load(Ordering::Relaxed),
            ),
            (
                "write_failures",
                "Number of failed writes of consumption of durable limits; they are repeated.",
                self.failures.load(Ordering::Relaxed),
            ),
            (
                "dropped_units",
                "Number of units of durable limits that were not written, because too many counters were pending.",
                stats.dropped_units,
            ),
            (
                "store_losses",
                "Number of times that the store had lost its counters.",
                self.losses.load(Ordering::Relaxed),
            ),
            (
                "unread",
                "Number of times that the database had more durable counters than can be read back.",
                self.unread.load(Ordering::Relaxed),
            ),
            (
                "restored_counters",
                "Number of counters that were debited what the store had lost.",
                stats.restored_counters,
            ),
            ("restored_units", "Number of units debited to restore counters.", stats.restored_units),
            (
                "restore_failures",
                "Number of attempts to restore a counter that the store failed; they are repeated.",
                stats.restore_failures,
            ),
        ];
        for (name, help, value) in counters {
            page.counter(&format!("ratelimit_durable_{name}_total"), help, value);
        }
    }
}

impl DurableTasks {
    /// Writes what is left, and ends.
    pub(crate) async fn shutdown(self) {
        drop(self.stop);
        let _ = self.task.await;
    }
}

/// Returns the processes of other live nodes whose durable counters have this record.
fn others_with_record(nodes: &[NodeRecord], record: &str) -> Vec<String> {
    let is_same = |node: &&NodeRecord| {
        !node.is_self && !node.stale && node.report.get(RECORD).and_then(Value::as_str) == Some(record)
    };
    nodes.iter().filter(is_same).map(|node| node.instance.clone()).collect()
}

fn millis(at: Timestamp) -> u64 {
    at.as_micros() / 1_000
}

fn micros(at: Timestamp) -> i64 {
    i64::try_from(at.as_micros()).unwrap_or(i64::MAX)
}

fn timestamp(micros: i64) -> Timestamp {
    Timestamp::from_micros(u64::try_from(micros).unwrap_or(0))
}

fn units(row: &DurableRow) -> DurableUnits {
    DurableUnits {
        counter: row.counter,
        slot: micros(row.slot),
        part: row.part,
        units: row.units,
        reported: row.reported,
        last_at: micros(row.last_at),
        expires_at: i64::try_from(row.expires.as_secs()).unwrap_or(i64::MAX).saturating_add(1),
        seq: row.seq,
    }
}

fn saved(total: &DurableTotal) -> SavedSlot {
    SavedSlot {
        counter: total.counter,
        slot: timestamp(total.slot),
        last_at: timestamp(total.last_at),
        own: total.own,
        reported: total.reported,
        all: total.all,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Without it, two nodes of one name debit each other's consumption after a restart, and nobody is told.
    #[test]
    fn a_live_node_with_the_same_record_is_found() {
        let node = |instance: &str, record: &str, is_self: bool, stale: bool| NodeRecord {
            instance: instance.to_owned(),
            is_self,
            age_millis: 0,
            stale,
            report: json!({ (RECORD): record }).as_object().cloned().unwrap_or_default(),
        };
        let nodes = [
            node("own", "memory/web", true, false),
            node("twin", "memory/web", false, false),
            node("before a restart", "memory/web", false, true),
            node("another", "memory/api", false, false),
            node("redis", "redis/", false, false),
        ];
        assert_eq!(others_with_record(&nodes, "memory/web"), ["twin"]);
    }
}
