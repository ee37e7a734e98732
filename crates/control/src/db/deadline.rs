//! Deadlines for work on the database.

use crate::error::ControlError;
use std::time::Duration;

/// How long one read may take.
const READ_TIMEOUT: Duration = Duration::from_secs(15);

/// Whatever the network does, a reader does not wait for ever: others wait for it.
pub(crate) async fn with_read_timeout<T>(
    reading: impl Future<Output = Result<T, ControlError>>,
) -> Result<T, ControlError> {
    with_timeout(READ_TIMEOUT, reading).await
}

/// The same for what may take longer than a read.
pub(crate) async fn with_timeout<T>(
    longest: Duration,
    doing: impl Future<Output = Result<T, ControlError>>,
) -> Result<T, ControlError> {
    match tokio::time::timeout(longest, doing).await {
        Ok(done) => done,
        Err(_) => Err(ControlError::Unavailable(sqlx::Error::PoolTimedOut)),
    }
}
