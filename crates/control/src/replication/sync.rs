//! How this node learns of changes: those it makes itself at once, those of others by a push, and all of them by asking for
//! what is newer than the last revision it knows. A push that is lost costs time, never a change.
//!
//! PostgreSQL pushes by NOTIFY. A file has nobody to push, so it is asked twice a second, which costs one read of one row.

use crate::control_plane::{ChangeEvent, ControlPlane};
use crate::db::deadline::with_read_timeout;
use crate::db::transaction::CHANNEL;
use crate::db::{Db, on};
use crate::error::ControlError;
use crate::preview::collect;
use crate::quota::purge::MAX_STALENESS_MS;
use sqlx::postgres::PgListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How often a node looks for what was deleted long ago.
const PURGE_INTERVAL: Duration = Duration::from_secs(3_600);

/// How often a node asks.
#[derive(Clone, Copy, Debug)]
pub struct SyncConfig {
    /// A file on this machine.
    pub file: Duration,
    /// A server, whose pushes may be lost.
    pub server: Duration,
    /// Before it tries again after a failure.
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
    /// Takes in what is newer than what this node knows, and says whether there was anything. What is taken in stays if the
    /// rest cannot be read.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer; what is known goes on acting.
    pub async fn catch_up(&self) -> Result<bool, ControlError> {
        let _one = self.sync_lock.lock().await;
        self.prepare().await?;
        let asked_at = self.now_millis();
        let newest = with_read_timeout(async {
            let (newest,): (i64,) = on!(&self.db, pool => {
                sqlx::query_as("SELECT revision FROM head WHERE id = 1").fetch_one(pool).await?
            });
            Ok(newest)
        })
        .await?;
        let mut seen = self.quota_revision.load(Ordering::Relaxed);
        let cut_off =
            self.is_loaded() && asked_at - self.current_at.load(Ordering::Relaxed) > MAX_STALENESS_MS;
        if newest < seen || cut_off {
            tracing::warn!(
                "the database has gone from revision {seen} to {newest} unseen: reading all of it again"
            );
            self.quota_table.clear();
            self.measures_revision.store(-1, Ordering::Relaxed);
            seen = 0;
        }
        let anything = seen < newest;
        // First what cannot wait. The head was read before, so nothing up to it is missed.
        let acts_seen = self.measures_revision.load(Ordering::Relaxed);
        if acts_seen < newest {
            with_read_timeout(self.read_emergencies()).await?;
            with_read_timeout(self.catch_up_rules()).await?;
            if with_read_timeout(self.read_grants(acts_seen)).await? {
                self.notify(ChangeEvent::Quotas);
            }
            self.measures_revision.store(newest, Ordering::Relaxed);
        }
        self.measures.tidy(self.clock.now());
        if seen == 0 && newest > 0 {
            self.quota_table.reserve(with_read_timeout(self.estimate_count()).await?);
        }
        let mut quotas = false;
        while seen < newest {
            let changes = with_read_timeout(self.changes(seen)).await?;
            // Revisions that changed no agreement, or that a later one has changed again, have no row.
            let Some(last) = changes.last().map(|kept| kept.revision) else {
                seen = newest;
                break;
            };
            quotas = true;
            let mut made = None;
            for kept in changes {
                self.quota_table.set(&kept.hash, kept.terms);
                // Rows that were written together count once.
                if made != Some(kept.updated_at) && self.is_loaded() {
                    made = Some(kept.updated_at);
                    self.lag.observe(self.now_millis() - kept.updated_at);
                }
            }
            seen = last;
            self.quota_revision.store(seen, Ordering::Relaxed);
        }
        self.quota_revision.store(seen, Ordering::Relaxed);
        if quotas {
            self.notify(ChangeEvent::Quotas);
        }
        self.current_at.store(asked_at, Ordering::Relaxed);
        self.unavailable.store(false, Ordering::Relaxed);
        self.loaded.store(true, Ordering::Relaxed);
        Ok(anything)
    }

    /// Lets a change of this node's own act here at once.
    pub(crate) async fn apply(&self) {
        if let Err(error) = self.catch_up().await {
            tracing::warn!(%error, "a change was made, but is not yet known here; trying again");
        }
    }

    /// Follows the changes of others for as long as it is asked to, and tidies up behind all nodes.
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

    /// It does no harm that each node does this.
    async fn purge_periodically(&self) {
        loop {
            match self.purge().await {
                Ok(0) => tokio::time::sleep(PURGE_INTERVAL).await,
                Ok(rows) => {
                    tracing::info!(rows, "removed what was deleted long ago");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                Err(error) => {
                    tracing::debug!(%error, "could not remove what was deleted long ago");
                    tokio::time::sleep(PURGE_INTERVAL).await;
                }
            }
        }
    }

    async fn listen_to_server(&self, pool: &sqlx::PgPool, times: SyncConfig) -> Result<(), ControlError> {
        let mut listener = PgListener::connect_with(pool).await?;
        listener.listen_all([CHANNEL, collect::CHANNEL]).await?;
        // First what came before anybody listened, or while the connection was lost.
        self.sample_requested.notify_one();
        self.catch_up().await?;
        loop {
            match tokio::time::timeout(times.server, listener.try_recv()).await {
                Ok(told) => {
                    if told?.is_some_and(|told| told.channel() == collect::CHANNEL) {
                        self.sample_requested.notify_one();
                        continue;
                    }
                    self.catch_up().await?;
                }
                // Something is new and nobody told: the connection may be dead without knowing. A new one is made.
                Err(_) if self.catch_up().await? => return Ok(()),
                Err(_) => {}
            }
        }
    }
}
