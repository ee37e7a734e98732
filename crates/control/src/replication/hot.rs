//! The fleet's hot list: counters that this node, the programs that follow it, or the other nodes of the database have found
//! hot. A node's own findings, and those of its followers, are in its heartbeat, which is sent at once when they change;
//! what it has learned from other nodes is not, so that no counter stays hot because two nodes repeat it to each other.

use crate::control_plane::ControlPlane;
use crate::db::deadline::with_timeout;
use crate::db::{at_now, on};
use crate::error::ControlError;
use crate::replication::hot_counters::MAX_IN_HEARTBEAT;
use crate::replication::node_record::STALE;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use tollgate_core::TimeDelta;
use tollgate_replica::{CounterHasher, HOT_LIFETIME, HotNames, MAX_HOT};

/// Interval between two reports of this node's own counters.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);
/// Number of reports between two reads of what other nodes report.
const READS: u64 = 2;
/// Maximum duration of such a read; meanwhile this node's own counters are not reported.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of nodes whose reports are read.
const MAX_PEERS: i64 = 100;

/// Heartbeats without hot counters, which are nearly all, are not read.
const SELECT_HOT: [&str; 2] = at_now!(
    "SELECT told FROM nodes WHERE instance <> $1 AND told LIKE '%\"hot\":[[%' AND seen_at > ",
    " - $2 ORDER BY seen_at DESC LIMIT $3"
);

impl ControlPlane {
    /// Returns what names counters in the hot list of this installation.
    #[must_use]
    pub fn counter_hasher(&self) -> CounterHasher {
        CounterHasher::new(&self.hasher)
    }

    /// Records counters that a program which follows this node has found hot, each with its units per second. Returns
    /// those that are hot anywhere in the fleet.
    #[must_use]
    pub fn exchange_hot(&self, reported: impl IntoIterator<Item = (u64, u64)>) -> HotNames {
        let now = self.clock.now();
        self.hot.record_follower(reported, now);
        self.hot.names(now)
    }

    /// Exchanges hot counters with the other nodes of the database, as long as it runs. `own` returns this node's with their
    /// units per second, at most as many as it is given, or `None` if the node leases nothing; `apply` receives the names of
    /// all, and how long they are valid. Rests while neither this node nor a follower has use for them.
    pub async fn run_hot_exchange(
        self: Arc<Self>,
        own: impl Fn(usize) -> Option<Vec<(u64, u64)>> + Send,
        apply: impl Fn(Vec<u64>, TimeDelta) + Send,
    ) {
        let mut reported = HotNames::default();
        for turn in 0_u64.. {
            let own = own(MAX_HOT);
            if own.is_none() && !self.hot.has_followers(self.clock.now()) {
                tokio::time::sleep(REPORT_INTERVAL).await;
                continue;
            }
            self.hot.near.record(own.into_iter().flatten(), self.clock.now());
            let near = self.hot.near.names(self.clock.now());
            if near != reported {
                reported = near;
                self.hot.changed.notify_one();
            }
            if turn.is_multiple_of(READS)
                && let Err(error) = self.read_peers_hot().await
            {
                // Replication already logs that the database is unavailable.
                tracing::debug!(%error, "reading hot counters of other nodes failed");
            }
            apply(self.hot.names(self.clock.now()).hot, HOT_LIFETIME);
            tokio::time::sleep(REPORT_INTERVAL).await;
        }
    }

    /// Reads what other nodes report. What cannot be read, perhaps of a newer version, is left out.
    async fn read_peers_hot(&self) -> Result<(), ControlError> {
        let sql = self.db.dialect(SELECT_HOT);
        let read = async {
            let rows: Vec<(String,)> = on!(&self.db, pool => {
                sqlx::query_as(sql).bind(self.instance.clone()).bind(STALE).bind(MAX_PEERS).fetch_all(pool).await?
            });
            Ok(rows)
        };
        let rows = with_timeout(READ_TIMEOUT, read).await?;
        let pairs = |(text,): (String,)| {
            let mut report: Value = serde_json::from_str(&text).ok()?;
            serde_json::from_value::<Vec<(u64, u64)>>(report["hot"].take()).ok()
        };
        let mut hot: Vec<(u64, u64)> = rows
            .into_iter()
            .filter_map(pairs)
            .flat_map(|hot| hot.into_iter().take(MAX_IN_HEARTBEAT))
            .collect();
        hot.sort_unstable_by_key(|(name, rate)| (std::cmp::Reverse(*rate), *name));
        hot.truncate(MAX_HOT);
        let names = hot.into_iter().map(|(name, _)| name).collect();
        self.hot.replace_peers(names, self.clock.now());
        Ok(())
    }
}
