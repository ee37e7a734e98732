//! How this node learns of changes: those it makes itself at once, those of others by a push, and all of them by asking for
//! what is newer than the last revision it knows. A push that is lost costs time, never a change.
//!
//! PostgreSQL pushes by NOTIFY. A file has nobody to push, so it is asked twice a second, which costs one read of one row.

use crate::control_plane::{Control, Heard};
use crate::db::deadline::timely;
use crate::db::transaction::CHANNEL;
use crate::db::{Db, on};
use crate::error::ControlError;
use crate::preview::collect;
use crate::quota::purge::TRUSTED;
use sqlx::postgres::PgListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How often a node looks for what was deleted long ago.
const PURGES: Duration = Duration::from_secs(3_600);

/// How often a node asks.
#[derive(Clone, Copy, Debug)]
pub struct Following {
    /// A file on this machine.
    pub file: Duration,
    /// A server, whose pushes may be lost.
    pub server: Duration,
    /// Before it tries again after a failure.
    pub retry: Duration,
}

impl Default for Following {
    fn default() -> Self {
        Self {
            file: Duration::from_millis(500),
            server: Duration::from_secs(10),
            retry: Duration::from_millis(500),
        }
    }
}

impl Control {
    /// Takes in what is newer than what this node knows, and says whether there was anything. What is taken in stays if the
    /// rest cannot be read.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer; what is known goes on acting.
    pub async fn catch_up(&self) -> Result<bool, ControlError> {
        let _one = self.reading.lock().await;
        self.prepare().await?;
        let asked_at = self.now_millis();
        let newest = timely(async {
            let (newest,): (i64,) = on!(&self.db, pool => {
                sqlx::query_as("SELECT revision FROM head WHERE id = 1").fetch_one(pool).await?
            });
            Ok(newest)
        })
        .await?;
        let mut seen = self.seen.load(Ordering::Relaxed);
        let cut_off = self.is_loaded() && asked_at - self.current_at.load(Ordering::Relaxed) > TRUSTED;
        if newest < seen || cut_off {
            tracing::warn!(
                "the database has gone from revision {seen} to {newest} unseen: reading all of it again"
            );
            self.book.clear();
            self.acts_seen.store(-1, Ordering::Relaxed);
            seen = 0;
        }
        let anything = seen < newest;
        // First what cannot wait. The head was read before, so nothing up to it is missed.
        let acts_seen = self.acts_seen.load(Ordering::Relaxed);
        if acts_seen < newest {
            timely(self.read_emergencies()).await?;
            timely(self.catch_up_rules()).await?;
            if timely(self.read_grants(acts_seen)).await? {
                self.say(Heard::Quotas);
            }
            self.acts_seen.store(newest, Ordering::Relaxed);
        }
        self.emergencies.tidy(self.clock.now());
        if seen == 0 && newest > 0 {
            self.book.reserve(timely(self.about_how_many()).await?);
        }
        let mut quotas = false;
        while seen < newest {
            let changes = timely(self.changes(seen)).await?;
            // Revisions that changed no agreement, or that a later one has changed again, have no row.
            let Some(last) = changes.last().map(|kept| kept.revision) else {
                seen = newest;
                break;
            };
            quotas = true;
            let mut made = None;
            for kept in changes {
                self.book.set(&kept.hash, kept.terms);
                // Rows that were written together count once.
                if made != Some(kept.updated_at) && self.is_loaded() {
                    made = Some(kept.updated_at);
                    self.lag.observe(self.now_millis() - kept.updated_at);
                }
            }
            seen = last;
            self.seen.store(seen, Ordering::Relaxed);
        }
        self.seen.store(seen, Ordering::Relaxed);
        if quotas {
            self.say(Heard::Quotas);
        }
        self.current_at.store(asked_at, Ordering::Relaxed);
        self.away.store(false, Ordering::Relaxed);
        self.loaded.store(true, Ordering::Relaxed);
        Ok(anything)
    }

    /// Lets a change of this node's own act here at once.
    pub(crate) async fn act(&self) {
        if let Err(error) = self.catch_up().await {
            tracing::warn!(%error, "a change was made, but is not yet known here; trying again");
        }
    }

    /// Follows the changes of others for as long as it is asked to, and tidies up behind all nodes.
    pub async fn follow(self: Arc<Self>, times: Following) {
        tokio::join!(self.keep_up(times), self.purge_now_and_then());
    }

    async fn keep_up(&self, times: Following) {
        loop {
            let failure = match &self.db {
                Db::Sqlite { .. } => self.follow_file(times).await,
                Db::Postgres(pool) => self.follow_server(pool, times).await,
            };
            if let Err(error) = failure {
                self.away.store(true, Ordering::Relaxed);
                tracing::warn!(%error, "quotas and rules act as last known: the database does not answer");
            }
            tokio::time::sleep(times.retry).await;
        }
    }

    async fn follow_file(&self, times: Following) -> Result<(), ControlError> {
        loop {
            self.catch_up().await?;
            tokio::time::sleep(times.file).await;
        }
    }

    /// It does no harm that each node does this.
    async fn purge_now_and_then(&self) {
        loop {
            match self.purge().await {
                Ok(0) => tokio::time::sleep(PURGES).await,
                Ok(rows) => {
                    tracing::info!(rows, "removed what was deleted long ago");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                }
                Err(error) => {
                    tracing::debug!(%error, "could not remove what was deleted long ago");
                    tokio::time::sleep(PURGES).await;
                }
            }
        }
    }

    async fn follow_server(&self, pool: &sqlx::PgPool, times: Following) -> Result<(), ControlError> {
        let mut listener = PgListener::connect_with(pool).await?;
        listener.listen_all([CHANNEL, collect::CHANNEL]).await?;
        // First what came before anybody listened, or while the connection was lost.
        self.traffic_asked.notify_one();
        self.catch_up().await?;
        loop {
            match tokio::time::timeout(times.server, listener.try_recv()).await {
                Ok(told) => {
                    if told?.is_some_and(|told| told.channel() == collect::CHANNEL) {
                        self.traffic_asked.notify_one();
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
