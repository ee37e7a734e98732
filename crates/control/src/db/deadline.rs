//! Timeouts for database operations.

use crate::error::ControlError;
use std::time::Duration;

/// Maximum duration of one read.
const READ_TIMEOUT: Duration = Duration::from_secs(15);

/// Runs a read with a timeout: whatever the network does, a reader must not wait forever, because others wait for it.
pub(crate) async fn with_read_timeout<T>(
    reading: impl Future<Output = Result<T, ControlError>>,
) -> Result<T, ControlError> {
    with_timeout(READ_TIMEOUT, reading).await
}

/// Runs an operation with a given timeout.
pub(crate) async fn with_timeout<T>(
    timeout: Duration,
    operation: impl Future<Output = Result<T, ControlError>>,
) -> Result<T, ControlError> {
    match tokio::time::timeout(timeout, operation).await {
        Ok(result) => result,
        Err(_) => Err(ControlError::Unavailable(sqlx::Error::PoolTimedOut)),
    }
}
