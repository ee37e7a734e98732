//! Delay queue: where `action: delay` parks requests until they may proceed, bounded in number. The limiter decides how
//! long each request waits; the queue only counts the waiting requests.

use std::sync::atomic::{AtomicUsize, Ordering};
use tollgate_core::TimeDelta;

/// Requests that wait until they may proceed.
#[derive(Debug)]
pub struct DelayQueue {
    waiting: AtomicUsize,
    max: AtomicUsize,
}

/// The maximum number of requests is already waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many requests are waiting already")]
pub struct QueueFull;

impl DelayQueue {
    /// Creates a queue for at most `max` requests.
    #[must_use]
    pub const fn new(max: usize) -> Self {
        Self { waiting: AtomicUsize::new(0), max: AtomicUsize::new(max) }
    }

    /// Changes how many requests may wait. Requests that are already waiting stay.
    pub fn set_max(&self, max: usize) {
        self.max.store(max, Ordering::Relaxed);
    }

    /// Returns the number of waiting requests.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Waits for `delay`. Dropping the future leaves the queue.
    ///
    /// # Errors
    /// [`QueueFull`], immediately, if the maximum number of requests is already waiting.
    ///
    /// ```
    /// use tollgate_core::TimeDelta;
    /// use tollgate_engine::{DelayQueue, QueueFull};
    /// # tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(async {
    /// assert_eq!(DelayQueue::new(1).wait(TimeDelta::from_millis(1)).await, Ok(()));
    /// assert_eq!(DelayQueue::new(0).wait(TimeDelta::from_millis(1)).await, Err(QueueFull));
    /// # });
    /// ```
    pub async fn wait(&self, delay: TimeDelta) -> Result<(), QueueFull> {
        let slot = QueueSlot(&self.waiting);
        if self.waiting.fetch_add(1, Ordering::Relaxed) >= self.max.load(Ordering::Relaxed) {
            return Err(QueueFull);
        }
        tokio::time::sleep(delay.into()).await;
        drop(slot);
        Ok(())
    }
}

/// Leaves the queue when dropped.
struct QueueSlot<'a>(&'a AtomicUsize);

impl Drop for QueueSlot<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
