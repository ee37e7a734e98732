//! The nodes that share a database: each tells now and then what it is at, in a row of its own, and reads the others' rows
//! when somebody asks. A row that is not written again goes stale, and is forgotten an hour later.
//!
//! Ages are by the database's clock alone: a node whose own clock is wrong is alive all the same. A row belongs to a process,
//! not to a name, since two nodes may be called alike.

use crate::control_plane::ControlPlane;
use crate::db::{at_now, on};
use crate::error::ControlError;
use crate::replication::node_record::{NodeRecord, STALE, latest};
use futures_util::FutureExt;
use futures_util::future::FusedFuture;
use serde_json::Value;
use std::pin::pin;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// How often a node tells.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(5);
/// Every how many times it reads what the others tell, too: so that they are known when the database goes away.
const READS: u64 = 12;
/// How long telling may take.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a node that ends waits for the database, each time.
const DEREGISTER_TIMEOUT: Duration = Duration::from_secs(1);
/// When it is forgotten.
const NODE_TTL_MS: i64 = 3_600_000;
/// The most rows that are read.
const MAX_NODES: i64 = 1_000;

const UPSERT: [&str; 2] = at_now!(
    "INSERT INTO nodes (instance, told, seen_at) VALUES ($1, $2, ",
    ") ON CONFLICT (instance) DO UPDATE SET seen_at = excluded.seen_at, told = excluded.told"
);
const SELECT_ALL: [&str; 2] =
    at_now!("SELECT instance, ", " - seen_at AS age, told FROM nodes ORDER BY seen_at DESC LIMIT $1");
const DELETE_OLD: [&str; 2] = at_now!("DELETE FROM nodes WHERE seen_at < ", " - $1");

impl ControlPlane {
    /// Tells what this node is at, once.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not take it.
    pub async fn heartbeat(&self, told: &Value) -> Result<(), ControlError> {
        let (sql, text) = (self.db.dialect(UPSERT), told.to_string());
        on!(&self.db, write pool => {
            sqlx::query(sql).bind(self.instance.clone()).bind(text).execute(pool).await?;
        });
        Ok(())
    }

    /// Tells it until `end` is ready, and takes its leave.
    ///
    /// Not to be ended by dropping it: a server may still write what is on its way, after the leave, and others would see a
    /// node that is gone.
    pub async fn run_heartbeat(
        self: Arc<Self>,
        told: impl Fn() -> Value + Send,
        end: impl Future<Output = ()> + Send,
    ) {
        let mut end = pin!(end.fuse());
        for beat in 0_u64.. {
            if end.is_terminated() {
                break;
            }
            let told = told();
            let telling = async {
                self.heartbeat(&told).await?;
                if beat.is_multiple_of(READS) {
                    self.nodes().await?;
                }
                Ok::<_, ControlError>(())
            };
            let mut telling = pin!(tokio::time::timeout(HEARTBEAT_TIMEOUT, telling));
            let outcome = tokio::select! {
                outcome = &mut telling => outcome,
                () = &mut end => tokio::time::timeout(DEREGISTER_TIMEOUT, telling).await.and_then(|outcome| outcome),
            };
            match outcome {
                Ok(Ok(())) => {}
                // That the database is away is told by whoever follows it.
                Ok(Err(error)) => tracing::debug!(%error, "heartbeat failed"),
                Err(_) => tracing::debug!("heartbeat timed out"),
            }
            if !end.is_terminated() {
                let _ = tokio::time::timeout(HEARTBEAT_INTERVAL, &mut end).await;
            }
        }
        self.deregister().await;
    }

    /// This node ends: nobody need wonder where it is.
    pub async fn deregister(&self) {
        let leaving = async {
            on!(&self.db, write pool => {
                sqlx::query("DELETE FROM nodes WHERE instance = $1").bind(self.instance.clone()).execute(pool).await?;
            });
            Ok::<_, ControlError>(())
        };
        let _ = tokio::time::timeout(DEREGISTER_TIMEOUT, leaving).await;
    }

    /// Nodes that told of themselves in the last hour, by name. One that is stale is left out where another of its name
    /// is not: it was started again.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer.
    pub async fn nodes(&self) -> Result<Vec<NodeRecord>, ControlError> {
        let sql = self.db.dialect(SELECT_ALL);
        let rows: Vec<(String, i64, String)> =
            on!(&self.db, pool => sqlx::query_as(sql).bind(MAX_NODES).fetch_all(pool).await?);
        let rows = rows.into_iter().filter(|(_, age, _)| *age < NODE_TTL_MS).map(|(instance, age, told)| {
            NodeRecord {
                is_self: instance == self.instance,
                instance,
                age_millis: age.max(0),
                stale: age > STALE,
                report: serde_json::from_str(&told).unwrap_or_default(),
            }
        });
        let seen = latest(rows.collect());
        let mut read = self.node_cache.lock().unwrap_or_else(PoisonError::into_inner);
        *read = Some((self.now_millis(), seen.clone()));
        Ok(seen)
    }

    /// What [`ControlPlane::nodes`] last told, and how long ago that was, in milliseconds; nothing, if it never did.
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
