//! Deadlines for work on the database.

use crate::error::ControlError;
use std::time::Duration;

/// How long one read may take.
const PATIENCE: Duration = Duration::from_secs(15);

/// Whatever the network does, a reader does not wait for ever: others wait for it.
pub(crate) async fn timely<T>(
    reading: impl Future<Output = Result<T, ControlError>>,
) -> Result<T, ControlError> {
    within(PATIENCE, reading).await
}

/// The same for what may take longer than a read.
pub(crate) async fn within<T>(
    longest: Duration,
    doing: impl Future<Output = Result<T, ControlError>>,
) -> Result<T, ControlError> {
    match tokio::time::timeout(longest, doing).await {
        Ok(done) => done,
        Err(_) => Err(ControlError::Away(sqlx::Error::PoolTimedOut)),
    }
}
