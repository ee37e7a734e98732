//! Agreements that were ended stay as rows, so that other nodes learn of it; a week later they go. A node that has been cut
//! off for longer than half of that does not trust what it has missed to still be there, and reads all anew.

use crate::control_plane::ControlPlane;
use crate::db::on;
use crate::error::ControlError;

/// For how long a deleted row stays, in milliseconds.
const RETENTION_MS: i64 = 7 * 86_400_000;
/// The longest that a node may have been cut off to still read what is new alone.
pub(crate) const MAX_STALENESS_MS: i64 = RETENTION_MS / 2;
/// At most so many at once: a change must not wait long for its turn.
const BATCH: i64 = 10_000;

const PURGE: &str = "DELETE FROM quotas WHERE key_hash IN
     (SELECT key_hash FROM quotas WHERE deleted = 1 AND updated_at < $1 LIMIT $2)";

impl ControlPlane {
    /// Removes what was deleted long ago, and says how many rows that were.
    ///
    /// # Errors
    /// [`ControlError`] if the database does not do it.
    pub async fn purge(&self) -> Result<u64, ControlError> {
        let before = self.now_millis() - RETENTION_MS;
        let done = on!(&self.db, write pool => {
            sqlx::query(PURGE).bind(before).bind(BATCH).execute(pool).await?.rows_affected()
        });
        self.delete_old_nodes().await?;
        self.delete_old_samples().await?;
        Ok(done)
    }
}
