//! Replication: how this node learns of changes. It applies its own immediately, those of other nodes on a
//! notification, and reads everything newer than its last revision at intervals. A lost notification costs time,
//! never a change.
//!
//! Published rules, which `rules/publish.rs` stores, are read by `catch_up_rules` (`rules/revision_store.rs`) and
//! activated by the rule manager (`run_published` in `rules/manager.rs`).
//!
//! PostgreSQL notifies by NOTIFY (`db/transaction.rs`). A SQLite file cannot notify, so it is polled twice a second,
//! which costs one read of one row.

use crate::control_plane::{ChangeEvent, ControlPlane};
use crate::db::deadline::with_read_timeout;
use crate::db::transaction::CHANNEL;
use crate::db::{Db, on};
use crate::error::ControlError;
use crate::preview::collect;
use futures_util::future::BoxFuture;
use sqlx::postgres::PgListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tollgate_replica::MAX_STALENESS_MS;

/// Interval between purges.
const PURGE_INTERVAL: Duration = Duration::from_secs(3_600);

/// Intervals of replication.
#[derive(Clone, Copy, Debug)]
pub struct SyncConfig {
    /// Poll interval of a SQLite file.
    pub file: Duration,
    /// Poll interval of a server, whose notifications may be lost.
    pub server: Duration,
    /// Delay before a retry after a failure.
    pub retry: Duration,
}

impl Default for SyncConfig {
    fn default() -> Self {
        Self {
            file: Duration::from_millis(500),
            server: Duration::from_secs(10),
            retry: Duration::from_millis(500),
        }
    }
}

impl ControlPlane {
    /// Applies changes that are newer than this node's state. Returns whether there were any. Changes already applied
    /// stay if the rest cannot be read.
    ///
    /// # Errors
    /// [`ControlError`] if the database is unavailable; the last known state stays active.
    pub async fn catch_up(&self) -> Result<bool, ControlError> {
        let _one = self.sync_lock.lock().await;
        self.prepare().await?;
        let read_at = self.now_millis();
        let newest = with_read_timeout(async {
            let (newest,): (i64,) = on!(&self.db, pool => {
                sqlx::query_as("SELECT revision FROM head WHERE id = 1").fetch_one(pool).await?
            });
            Ok(newest)
        })
        .await?;
        let mut seen = self.quota_revision.load(Ordering::Relaxed);
        let disconnected =
            self.is_loaded() && read_at - self.current_at.load(Ordering::Relaxed) > MAX_STALENESS_MS;
        if newest < seen || disconnected {
            tracing::warn!(
                "the database went from revision {seen} to {newest} while disconnected; reading everything again"
            );
            // Nobody may take the incomplete table for a complete one, also if this attempt fails.
            self.reloads.fetch_or(1, Ordering::AcqRel);
            self.quota_table.clear();
            self.quota_revision.store(0, Ordering::Relaxed);
            self.measures_revision.store(-1, Ordering::Relaxed);
            seen = 0;
        }
        let anything = seen < newest;
        // Urgent state first. The head was read before, so nothing up to it is missed.
        let measures_seen = self.measures_revision.load(Ordering::Relaxed);
        if measures_seen < newest {
            with_read_timeout(self.read_emergencies()).await?;
            with_read_timeout(self.catch_up_rules()).await?;
            if with_read_timeout(self.read_grants(measures_seen)).await? {
                self.notify(ChangeEvent::Quotas);
            }
            self.measures_revision.store(newest, Ordering::Relaxed);
        }
        self.measures.remove_expired(self.clock.now());
        if seen == 0 && newest > 0 {
            self.quota_table.reserve(with_read_timeout(self.estimate_count()).await?);
        }
        let mut quotas = false;
        while seen < newest {
            let changes = with_read_timeout(self.changes(seen)).await?;
            // Revisions that changed no quota, or whose quota changed again later, have no row.
            let Some(last) = changes.last().map(|change| change.revision) else {
                seen = newest;
                break;
            };
            quotas = true;
            let mut made = None;
            for change in changes {
                // Rows that were written together count once.
                if made != Some(change.updated_at) && self.is_loaded() {
                    made = Some(change.updated_at);
                    self.lag.observe(self.now_millis() - change.updated_at);
                }
                self.quota_table.apply(change);
            }
            seen = last;
            self.quota_revision.store(seen, Ordering::Relaxed);
        }
        self.quota_revision.store(seen, Ordering::Relaxed);
        if quotas {
            self.notify(ChangeEvent::Quotas);
        }
        self.current_at.store(read_at, Ordering::Relaxed);
        self.unavailable.store(false, Ordering::Relaxed);
        self.loaded.store(true, Ordering::Relaxed);
        if !self.reloads.load(Ordering::Relaxed).is_multiple_of(2) {
            self.reloads.fetch_add(1, Ordering::AcqRel);
        }
        Ok(anything)
    }

    /// Applies this node's own change immediately. Its future is boxed: that of each change contains it, and the compiler
    /// would examine all of it again for each handler of the admin API.
    pub(crate) fn apply(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            if let Err(error) = self.catch_up().await {
                tracing::warn!(%error, "change stored but not yet active on this node; retrying");
            }
        })
    }

    /// Replicates the changes of other nodes and purges old rows; never returns.
    pub async fn run_sync(self: Arc<Self>, times: SyncConfig) {
        tokio::join!(self.sync_until_error(times), self.purge_periodically());
    }

    async fn sync_until_error(&self, times: SyncConfig) {
        loop {
            let failure = match &self.db {
                Db::Sqlite { .. } => self.poll_file(times).await,
                Db::Postgres(pool) => self.listen_to_server(pool, times).await,
            };
            if let Err(error) = failure {
                self.unavailable.store(true, Ordering::Relaxed);
                tracing::warn!(%error, "database unavailable; using last known state");
            }
            tokio::time::sleep(times.retry).await;
        }
    }

    async fn poll_file(&self, times: SyncConfig) -> Result<(), ControlError> {
        loop {
            self.catch_up().await?;
            tokio::time::sleep(times.file).await;
        }
    }

    /// Every node purges; that is harmless.
    async fn purge_periodically(&self) {
        loop {
            match self.purge().await {
                Ok(0) => tokio::time::sleep(PURGE_INTERVAL).await,
                Ok(rows) => {
                    tracing::info!(rows, "old rows purged");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                Err(error) => {
                    tracing::debug!(%error, "purging old rows failed");
                    tokio::time::sleep(PURGE_INTERVAL).await;
                }
            }
        }
    }

    async fn listen_to_server(&self, pool: &sqlx::PgPool, times: SyncConfig) -> Result<(), ControlError> {
        let mut listener = PgListener::connect_with(pool).await?;
        listener.listen_all([CHANNEL, collect::CHANNEL]).await?;
        // First apply changes made before this node listened, or while the connection was lost.
        self.sample_requested.notify_one();
        self.catch_up().await?;
        loop {
            match tokio::time::timeout(times.server, listener.try_recv()).await {
                Ok(notification) => {
                    if notification?.is_some_and(|one| one.channel() == collect::CHANNEL) {
                        self.sample_requested.notify_one();
                        continue;
                    }
                    self.catch_up().await?;
                }
                // A change arrived without a notification: the connection may be dead without an error. Reconnect.
                Err(_) if self.catch_up().await? => return Ok(()),
                Err(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::{ManualClock, Timestamp};

    /// A follower would otherwise replace a complete table by a part of it.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_table_that_is_read_again_is_incomplete_until_the_end() {
        let file = std::env::temp_dir().join(format!("tollgate-reload-{}.db", std::process::id()));
        let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_767_225_600)));
        let address = format!("sqlite:{}", file.display());
        let control = ControlPlane::open(&address, clock).await.expect("a database");
        assert_eq!(control.table_generation(), Some(0));
        let Db::Sqlite { write, .. } = &control.db else { panic!("a file") };
        let run =
            async |statement: &'static str| sqlx::raw_sql(statement).execute(write).await.expect("done");

        // The database was replaced by an older one, and cannot be read to the end.
        control.quota_revision.store(1_000, Ordering::Relaxed);
        run("UPDATE head SET revision = 5").await;
        run("ALTER TABLE quotas RENAME TO gone").await;
        for _ in 0..2 {
            assert!(control.catch_up().await.is_err());
            assert_eq!(control.table_generation(), None);
        }
        let path = file.with_extension("quotas");
        assert!(control.write_quotas(&path).is_err() && !path.exists());
        // Meanwhile it has become newer than what this node had known.
        run("UPDATE head SET revision = 2000").await;
        run("ALTER TABLE gone RENAME TO quotas").await;
        control.catch_up().await.expect("everything");
        assert_eq!((control.table_generation(), control.revision()), (Some(2), 2_000));
        control.close().await;
        for end in ["", "-wal", "-shm"] {
            let _ = std::fs::remove_file(format!("{}{end}", file.display()));
        }
    }
}
