//! Background tasks of the limiter: reconciliation, leases, heartbeats, signals and links to other cells, and the order in which
//! they end.

use crate::server::cells::CellTasks;
use crate::server::leases;
use crate::server::nodes::{Heartbeats, RunningHeartbeats};
use crate::server::signals::SignalTasks;
use crate::server::store::Store;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tollgate_engine::Limiter;

/// The running tasks.
pub(crate) struct LimiterTasks {
    limiter: Arc<Limiter<Store>>,
    reconciliation: JoinHandle<()>,
    leases: JoinHandle<()>,
    heartbeats: RunningHeartbeats,
    cells: Option<CellTasks>,
    signals: SignalTasks,
}

impl LimiterTasks {
    /// Starts the tasks. The links to other cells and the tasks of signals run already; they only end here.
    pub(crate) fn start(
        limiter: Arc<Limiter<Store>>,
        heartbeats: Heartbeats,
        cells: Option<CellTasks>,
        signals: SignalTasks,
    ) -> Self {
        Self {
            reconciliation: tokio::spawn(run_reconciliation(Arc::clone(&limiter))),
            leases: tokio::spawn(leases::run_lease_tasks(Arc::clone(&limiter))),
            heartbeats: heartbeats.start(),
            cells,
            signals,
            limiter,
        }
    }

    /// Ends the tasks after the last request: charges what is pending, and returns leased units.
    pub(crate) async fn shutdown(self) {
        self.signals.shutdown();
        self.reconciliation.abort();
        reconcile_before_exit(&self.limiter).await;
        self.leases.abort();
        self.heartbeats.end().await;
        leases::return_leases(&self.limiter).await;
        if let Some(cells) = self.cells {
            cells.shutdown().await;
        }
    }
}

/// Charges the shared counters for requests allowed in fallback while the store was unavailable. The pause grows while
/// it remains unavailable: each attempt counts as a store error, and a check reconciles the pending charges of its
/// counters first anyway.
async fn run_reconciliation(limiter: Arc<Limiter<Store>>) {
    const SOON: Duration = Duration::from_millis(100);
    const LATE: Duration = Duration::from_secs(5);
    let mut pause = SOON;
    loop {
        tokio::time::sleep(pause).await;
        pause = if limiter.reconcile().await { LATE.min(pause * 2) } else { SOON };
    }
}

/// Charges the shared counters before the process ends: what it has admitted without them is known to no other node.
/// Logs how much is lost if the store does not answer in time.
async fn reconcile_before_exit(limiter: &Limiter<Store>) {
    /// Longer than a node takes to find a store that answers again, and less than a drain may take.
    const TIMEOUT: Duration = Duration::from_secs(5);
    const PAUSE: Duration = Duration::from_millis(50);
    let reconciled = async {
        while limiter.reconcile().await || limiter.unreconciled().0 > 0 {
            tokio::time::sleep(PAUSE).await;
        }
    };
    if tokio::time::timeout(TIMEOUT, reconciled).await.is_err() {
        let (counters, units) = limiter.unreconciled();
        tracing::warn!(
            counters,
            units,
            "the store does not answer; what was admitted without it is not counted in the shared limits"
        );
    }
}
