//! Purges deleted quotas. Their rows stay for a week, so that other nodes learn of the deletion. A node that was
//! disconnected for more than half of that time cannot rely on these rows, and rereads everything.

use crate::control_plane::ControlPlane;
use crate::db::on;
use crate::error::ControlError;
use tollgate_replica::MAX_STALENESS_MS;

/// Retention of a deleted row, in milliseconds.
const RETENTION_MS: i64 = 2 * MAX_STALENESS_MS;
/// Maximum number of rows per purge: other changes must not wait long.
const BATCH: i64 = 10_000;

const PURGE: &str = "DELETE FROM quotas WHERE key_hash IN
     (SELECT key_hash FROM quotas WHERE deleted = 1 AND updated_at < $1 LIMIT $2)";

impl ControlPlane {
    /// Removes rows deleted long ago, and returns their number.
    ///
    /// # Errors
    /// [`ControlError`] if the database fails.
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
