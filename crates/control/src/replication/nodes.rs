//! Node list: each node writes a heartbeat to its own row, and reads the other rows on request. A row without new
//! heartbeats becomes stale, and is deleted an hour later.
//!
//! Ages use only the database's clock: a node whose own clock is wrong is still alive. A row belongs to a process,
//! not to a name, since two nodes may have the same name.

use crate::control_plane::ControlPlane;
use crate::db::{at_now, on};
use crate::error::ControlError;
use crate::replication::node_record::{NodeRecord, STALE, latest};
use futures_util::FutureExt;
use futures_util::future::FusedFuture;
use serde_json::{Map, Value};
use std::pin::pin;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// Interval between heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// Number of heartbeats between reads of the other rows, so that they are known when the database becomes
/// unavailable.
const READS: u64 = 12;
/// Timeout of a heartbeat.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of each database operation at shutdown.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(1);
/// Age at which a row is deleted, in milliseconds.
const NODE_TTL_MS: i64 = 3_600_000;
/// Maximum number of rows read.
const MAX_NODES: i64 = 1_000;

const UPSERT: [&str; 2] = at_now!(
    "INSERT INTO nodes (instance, told, seen_at) VALUES ($1, $2, ",
    ") ON CONFLICT (instance) DO UPDATE SET seen_at = excluded.seen_at, told = excluded.told"
);
const SELECT_ALL: [&str; 2] =
    at_now!("SELECT instance, ", " - seen_at AS age, told FROM nodes ORDER BY seen_at DESC LIMIT $1");
const DELETE_OLD: [&str; 2] = at_now!("DELETE FROM nodes WHERE seen_at < ", " - $1");

impl ControlPlane {
    /// Writes one heartbeat.
    ///
    /// # Errors
    /// [`ControlError`] if the database fails.
    pub async fn heartbeat(&self, report: &Value) -> Result<(), ControlError> {
        let (sql, text) = (self.db.dialect(UPSERT), report.to_string());
        on!(&self.db, write pool => {
            sqlx::query(sql).bind(self.instance.clone()).bind(text).execute(pool).await?;
        });
        Ok(())
    }

    /// Writes heartbeats until `end` completes, and then deregisters the node.
    ///
    /// Must not be stopped by dropping it: the server could still execute a pending write after the deregistration,
    /// and other nodes would list a node that no longer exists.
    pub async fn run_heartbeat(
        self: Arc<Self>,
        report: impl Fn() -> Value + Send,
        end: impl Future<Output = ()> + Send,
    ) {
        let mut end = pin!(end.fuse());
        for beat in 0_u64.. {
            if end.is_terminated() {
                break;
            }
            let mut report = report();
            self.hot.add_to(&mut report, self.clock.now());
            let beating = async {
                self.heartbeat(&report).await?;
                if beat.is_multiple_of(READS) {
                    self.nodes().await?;
                }
                Ok::<_, ControlError>(())
            };
            let mut beating = pin!(tokio::time::timeout(HEARTBEAT_TIMEOUT, beating));
            let outcome = tokio::select! {
                outcome = &mut beating => outcome,
                () = &mut end => tokio::time::timeout(DEREGISTER_TIMEOUT, beating).await.and_then(|outcome| outcome),
            };
            match outcome {
                Ok(Ok(())) => {}
                // Replication already logs that the database is unavailable.
                Ok(Err(error)) => tracing::debug!(%error, "heartbeat failed"),
                Err(_) => tracing::debug!("heartbeat timed out"),
            }
            if !end.is_terminated() {
                tokio::select! {
                    () = &mut end => {}
                    () = self.hot.changed.notified() => {}
                    () = tokio::time::sleep(HEARTBEAT_INTERVAL) => {}
                }
            }
        }
        self.deregister().await;
    }

    /// Deletes this node's row at shutdown, so that it is not listed as stale.
    pub async fn deregister(&self) {
        let deleting = async {
            on!(&self.db, write pool => {
                sqlx::query("DELETE FROM nodes WHERE instance = $1").bind(self.instance.clone()).execute(pool).await?;
            });
            Ok::<_, ControlError>(())
        };
        let _ = tokio::time::timeout(DEREGISTER_TIMEOUT, deleting).await;
    }

    /// Returns the nodes with a heartbeat in the last hour, by name. A stale node is left out if a live one has its
    /// name: it was restarted.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable.
    pub async fn nodes(&self) -> Result<Vec<NodeRecord>, ControlError> {
        let sql = self.db.dialect(SELECT_ALL);
        let rows: Vec<(String, i64, String)> =
            on!(&self.db, pool => sqlx::query_as(sql).bind(MAX_NODES).fetch_all(pool).await?);
        let rows =
            rows.into_iter().filter(|(_, age, _)| *age < NODE_TTL_MS).map(|(instance, age, report)| {
                let mut report: Map<String, Value> = serde_json::from_str(&report).unwrap_or_default();
                // For nodes, not for operators.
                report.remove("hot");
                NodeRecord {
                    is_self: instance == self.instance,
                    instance,
                    age_millis: age.max(0),
                    stale: age > STALE,
                    report,
                }
            });
        let seen = latest(rows.collect());
        let mut read = self.node_cache.lock().unwrap_or_else(PoisonError::into_inner);
        *read = Some((self.now_millis(), seen.clone()));
        Ok(seen)
    }

    /// Returns the last result of [`ControlPlane::nodes`] and its age in milliseconds; `None` if there is none.
    #[must_use]
    pub fn cached_nodes(&self) -> Option<(i64, Vec<NodeRecord>)> {
        let read = self.node_cache.lock().unwrap_or_else(PoisonError::into_inner);
        read.as_ref().map(|(at, seen)| ((self.now_millis() - at).max(0), seen.clone()))
    }

    pub(crate) async fn delete_old_nodes(&self) -> Result<u64, ControlError> {
        let sql = self.db.dialect(DELETE_OLD);
        Ok(
            on!(&self.db, write pool => sqlx::query(sql).bind(NODE_TTL_MS).execute(pool).await?.rows_affected()),
        )
    }
}
