//! Cells of the server process: the regional store, its links and listener, stats and metrics.

use crate::config::cells::Cells;
use crate::server::learn::Learner;
use crate::server::open_files;
use crate::server::store::{KeptStore, Store};
use anyhow::Context;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tollgate_cells::net::{
    CellTls, LinkedStore, Links, PeerUrl, port_limits, run_links, run_tenure, run_ticks, serve,
};
use tollgate_cells::{Members, Pseudonyms};
use tollgate_control::ControlPlane;
use tollgate_core::{Clock, PermitId, SystemClock};
use tollgate_engine::{DecisionId, Limiter};
use tollgate_observe::MetricsWriter;
use tollgate_store::LeaseConfig;

/// Interval between two searches for idle leases.
const TASK_INTERVAL: Duration = Duration::from_millis(250);
/// Maximum time that shutdown waits for leases to be returned.
const RETURN_TIMEOUT: Duration = Duration::from_secs(2);
/// Number of cells that leases are divided among while the others are learned.
const LEARNED_CELLS: u32 = 4;
/// Key of the hashes of API keys between cells on loopback, where none is configured.
const LOOPBACK_KEY: &[u8] = b"tollgate cells on loopback";

/// The store of a cell.
pub(crate) type CellStore = LinkedStore<KeptStore, SystemClock>;

/// What runs between cells.
pub(crate) struct CellLinks {
    store: Arc<CellStore>,
    links: Arc<Links>,
    urls: Vec<PeerUrl>,
    tls: Option<Arc<CellTls>>,
    listener: std::net::TcpListener,
    cells: Cells,
}

/// Puts the limits of other cells in front of a cell's own store. Opens the listener, so that an address in use is an error
/// of the start.
pub(crate) fn assemble(
    own: KeptStore,
    cells: &Cells,
    secret: Option<&[u8]>,
    leases: &LeaseConfig,
    clock: SystemClock,
) -> anyhow::Result<(Store, CellLinks)> {
    let tls = match &cells.tls {
        None => None,
        Some([certificate, key, authority]) => {
            let tls = CellTls::load(certificate, key, authority).map_err(anyhow::Error::msg);
            Some(Arc::new(tls.context("--cell-cert")?))
        }
    };
    let listener = std::net::TcpListener::bind(cells.listen)
        .with_context(|| format!("--cell: cannot listen on {}", cells.listen))?;
    listener.set_nonblocking(true).context("--cell")?;
    let incarnation = DecisionId::generate().0 as u64;
    let members = Arc::new(Members::new(cells.config.clone(), incarnation, clock.now()));
    let deadline = Duration::from_micros(cells.config.deadline.as_micros());
    let links = Arc::new(Links::new(members.slots(), deadline));
    let names = Pseudonyms::new(secret.unwrap_or(LOOPBACK_KEY));
    // Each cell but the owner may lease a part of a limit.
    let nodes = match cells.config.learns_peers {
        true => LEARNED_CELLS,
        false => u32::try_from(cells.urls.len()).unwrap_or(u32::MAX).max(1),
    };
    let leases = LeaseConfig { nodes, ..leases.clone() };
    let store = CellStore::new(own, members, Arc::clone(&links), names, clock, leases);
    let store = Arc::new(store);
    let (urls, cells) = (cells.urls.clone(), cells.clone());
    let linked = CellLinks { store: Arc::clone(&store), links, urls, tls, listener, cells };
    Ok((Store::Cells(store), linked))
}

impl CellLinks {
    /// Starts the listener, the links, the exchange and the leases. Cells without configured peers learn them from the
    /// database.
    pub(crate) async fn start(
        self,
        limiter: &Arc<Limiter<Store>>,
        control: Option<&Arc<ControlPlane>>,
    ) -> anyhow::Result<CellTasks> {
        let Self { store, links, urls, tls, listener, cells } = self;
        let mut tasks = JoinSet::new();
        let listener = TcpListener::from_std(listener).context("--cell")?;
        let slots = open_files::budget().port(port_limits(open_files::guaranteed()));
        tasks.spawn(serve(Arc::clone(&store), listener, slots, tls.clone()));
        let (tick, ticks) = watch::channel(0);
        tasks.spawn(run_ticks(Arc::clone(&store), tick));
        if let Some(records) = limiter.shared_records() {
            tasks.spawn(run_tenure(Arc::clone(&store), records));
        }
        for (peer, url) in urls.into_iter().enumerate() {
            tasks.spawn(run_links(
                Arc::clone(&store),
                Arc::clone(&links),
                peer,
                url,
                tls.clone(),
                ticks.clone(),
            ));
        }
        if let Some(control) = control.filter(|_| cells.config.learns_peers) {
            let (here, links) = ((Arc::clone(control), Arc::clone(limiter)), (Arc::clone(&store), links));
            let mut learner = Learner::new(here, links, tls, ticks, cells);
            learner.learn_first().await;
            tasks.spawn(learner.run());
        }
        tasks.spawn(run_lease_tasks(Arc::clone(&store)));
        Ok(CellTasks { tasks, store })
    }
}

/// The running tasks.
pub(crate) struct CellTasks {
    tasks: JoinSet<()>,
    store: Arc<CellStore>,
}

impl CellTasks {
    /// Returns leases to their owners, and ends.
    pub(crate) async fn shutdown(mut self) {
        // What was admitted since the last tick is sent with the next batch.
        let tick = Duration::from_micros(self.store.members().config().tick.as_micros());
        let mut returns = JoinSet::new();
        for task in self.store.leases().shutdown_tasks() {
            let store = Arc::clone(&self.store);
            returns.spawn(async move { store.leases().run_task(task, new_id()).await });
        }
        let returned = async { while returns.join_next().await.is_some() {} };
        if tokio::time::timeout(RETURN_TIMEOUT, returned).await.is_err() {
            tracing::warn!("some leases of other cells were not returned; they will expire");
        }
        let delivered = async {
            loop {
                tokio::time::sleep(tick).await;
                let waits = |peer: &tollgate_cells::PeerStats| !peer.status.silent && peer.waiting > 0;
                if !self.store.stats().peers.iter().any(waits) {
                    return;
                }
            }
        };
        let _ = tokio::time::timeout(RETURN_TIMEOUT, delivered).await;
        self.tasks.shutdown().await;
    }
}

fn new_id() -> PermitId {
    PermitId(DecisionId::generate().0)
}

async fn run_lease_tasks(store: Arc<CellStore>) {
    loop {
        tokio::select! {
            () = store.leases().task_ready() => {}
            () = tokio::time::sleep(TASK_INTERVAL) => {}
        }
        for task in store.leases().due_tasks() {
            let store = Arc::clone(&store);
            tokio::spawn(async move { store.leases().run_task(task, new_id()).await });
        }
    }
}

/// Returns the cells as JSON, for `/readyz?verbose` and node details.
pub(crate) fn details(store: &CellStore) -> Value {
    let (stats, config) = (store.stats(), store.members().config());
    let peers: Vec<Value> = stats
        .peers
        .iter()
        .map(|peer| {
            json!({
                "region": peer.status.region, "address": peer.status.address, "cell": peer.status.cell,
                "silent": peer.status.silent, "lag_ms": peer.lag.as_micros() / 1_000, "waiting": peer.waiting,
            })
        })
        .collect();
    json!({
        "cell": config.cell, "region": config.region, "peers": peers,
        "share": stats.share_millionths as f64 / 1e6, "regional_only": stats.share_millionths < 1_000_000,
        "displaced": stats.is_displaced,
        "overshoot_units": stats.overshoot,
    })
}

/// Writes the metrics of cells.
pub(crate) fn metrics(store: &CellStore, page: &mut MetricsWriter) {
    let stats = store.stats();
    let labels = |peer: &tollgate_cells::PeerStats| (peer.status.region.clone(), peer.status.address.clone());
    let help = "Seconds since which another cell does not know all consumption of this one.";
    let mut family = page.gauges("ratelimit_region_lag_seconds", help);
    for peer in &stats.peers {
        let (region, address) = labels(peer);
        family.add(&[("peer", &address), ("region", &region)], peer.lag.as_micros() as f64 / 1e6);
    }
    let mut family = page.gauges("ratelimit_region_peer_up", "1 if another cell answers, 0 if it is silent.");
    for peer in &stats.peers {
        let (region, address) = labels(peer);
        family.add(&[("peer", &address), ("region", &region)], u64::from(!peer.status.silent));
    }
    let help = "Number of counters whose consumption another cell has not acknowledged.";
    let mut family = page.gauges("ratelimit_region_pending_counters", help);
    for peer in &stats.peers {
        let (region, address) = labels(peer);
        family.add(&[("peer", &address), ("region", &region)], peer.waiting);
    }
    let help = "Number of units not reported to another cell because too many counters were pending.";
    let mut family = page.counters("ratelimit_region_dropped_units_total", help);
    for peer in &stats.peers {
        let (region, address) = labels(peer);
        family.add(&[("peer", &address), ("region", &region)], peer.dropped);
    }
    let help =
        "Number of batches of consumption that another cell did not apply, each time that they were sent.";
    let mut family = page.counters("ratelimit_region_batches_refused_total", help);
    for peer in &stats.peers {
        let (region, address) = labels(peer);
        family.add(&[("peer", &address), ("region", &region)], peer.refused);
    }
    let help = "Part of shared limits by which this cell decides; less than 1 while other cells are silent.";
    page.gauge("ratelimit_region_share", help, stats.share_millionths as f64 / 1e6);
    let help = "1 if another process has this cell's name: this one decides nothing that cells share, and is not ready.";
    page.gauge("ratelimit_region_displaced", help, u64::from(stats.is_displaced));
    let help = "1 if a majority of the cells answers this one; without it, it decides nothing by hash.";
    page.gauge("ratelimit_region_majority", help, u64::from(stats.has_majority));
    let help = "1 if this cell decides what a hash gives it: a majority has answered it for the silence time, and its store is not down.";
    page.gauge("ratelimit_region_joined", help, u64::from(stats.has_joined));
    let help = "Number of nodes of other cells whose reports of consumption are late.";
    page.gauge("ratelimit_region_late_peers", help, stats.late_peers);
    let help = "Number of units that other cells admitted beyond what was left here.";
    page.counter("ratelimit_region_overshoot_units", help, stats.overshoot);
    let counters = [
        (
            "batches_sent",
            "Number of batches of consumption that other cells have acknowledged.",
            stats.batches_sent,
        ),
        ("batches_received", "Number of batches of consumption applied.", stats.batches_received),
        (
            "batches_repeated",
            "Number of batches that arrived again, and were not applied.",
            stats.batches_repeated,
        ),
        ("counters_received", "Number of counters in applied batches.", stats.counters_received),
        ("charges_received", "Number of requests charged for other cells.", stats.charges_received),
        ("forwarded", "Number of requests that other cells decided in part.", stats.forwarded),
        (
            "forward_failures",
            "Number of requests that another cell should have decided and did not.",
            stats.forward_failures,
        ),
        (
            "regional_only",
            "Number of requests decided by this cell's part of a shared limit.",
            stats.regional_only,
        ),
        (
            "late_assumed",
            "Number of requests decided with the consumption of a late cell assumed.",
            stats.late_assumed,
        ),
        (
            "unknown_messages",
            "Number of messages of unknown kinds, as of a later version.",
            stats.unknown_messages,
        ),
        (
            "assumed_lost",
            "Number of counters that counted as used up, because another cell may have their state.",
            stats.assumed_lost,
        ),
        (
            "dropped_overdrafts",
            "Number of debts beyond a bucket's state that were dropped, because there were too many.",
            stats.dropped_overdrafts,
        ),
        (
            "dropped_debit_units",
            "Number of units that the store refused to debit after its deadline and that were dropped, because there were too many.",
            stats.dropped_debits,
        ),
        (
            "unreported_units",
            "Number of units not reported to any other cell because too many counters were active.",
            stats.unreported,
        ),
    ];
    for (name, help, value) in counters {
        page.counter(&format!("ratelimit_region_{name}_total"), help, value);
    }
}
