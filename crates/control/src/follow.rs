//! How this node learns of changes: those it makes itself at once, those of others by a push, and all of them by asking for
//! what is newer than the last revision it knows. A push that is lost costs time, never a change.
//!
//! PostgreSQL pushes by NOTIFY. A file has nobody to push, so it is asked twice a second, which costs one read of one row.

use crate::control::Control;
use crate::db::{ControlError, Db, on};
use sqlx::postgres::PgListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The name that changes are told under.
pub(crate) const CHANNEL: &str = "tollgate_changes";

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
    /// Takes in what is newer than what this node knows.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not answer; what is known goes on acting.
    pub async fn catch_up(&self) -> Result<(), ControlError> {
        let _one = self.reading.lock().await;
        let asked_at = self.now_millis();
        let (newest,): (i64,) = on!(&self.db, pool => {
            sqlx::query_as("SELECT revision FROM head WHERE id = 1").fetch_one(pool).await?
        });
        let mut seen = self.seen.load(Ordering::Relaxed);
        if newest < seen {
            tracing::warn!(
                "the database has gone back from revision {seen} to {newest}: reading all of it again"
            );
            self.book.clear();
            seen = 0;
        }
        while seen < newest {
            let changes = self.changes(seen).await?;
            // Revisions that changed no agreement, or that a later one has changed again, have no row.
            let Some(last) = changes.last().map(|kept| kept.revision) else {
                seen = newest;
                break;
            };
            for kept in changes {
                self.book.set(&kept.hash, kept.terms);
            }
            seen = last;
        }
        self.seen.store(seen, Ordering::Relaxed);
        self.current_at.store(asked_at, Ordering::Relaxed);
        Ok(())
    }

    /// Lets a change of this node's own act here at once.
    pub(crate) async fn act(&self) {
        if let Err(error) = self.catch_up().await {
            tracing::warn!(%error, "a change was made, but is not yet known here; trying again");
        }
    }

    /// Follows the changes of others for as long as it is asked to.
    pub async fn follow(self: Arc<Self>, times: Following) {
        loop {
            let failure = match &self.db {
                Db::Sqlite(_) => self.follow_file(times).await,
                Db::Postgres(pool) => self.follow_server(pool, times).await,
            };
            if let Err(error) = failure {
                tracing::warn!(%error, "quotas act as last known: the database does not answer");
            }
            tokio::time::sleep(times.retry).await;
        }
    }

    async fn follow_file(&self, times: Following) -> Result<(), ControlError> {
        loop {
            tokio::time::sleep(times.file).await;
            self.catch_up().await?;
        }
    }

    async fn follow_server(&self, pool: &sqlx::PgPool, times: Following) -> Result<(), ControlError> {
        let mut listener = PgListener::connect_with(pool).await?;
        listener.listen(CHANNEL).await?;
        loop {
            // First what came before anybody listened, or while the connection was lost.
            self.catch_up().await?;
            match tokio::time::timeout(times.server, listener.try_recv()).await {
                Ok(told) => {
                    told?;
                }
                Err(_) => continue,
            }
        }
    }
}
