//! Request coalescing: requests within a second share one result, so that data polled by many pages is read once,
//! however long that takes.

use std::future::Future;
use std::sync::Arc;
use tokio::sync::Mutex;
use tollgate_core::{TimeDelta, Timestamp};

/// Time for which a result is reused.
const MAX_AGE: TimeDelta = TimeDelta::from_secs(1);

pub(crate) struct Coalesced<T>(Mutex<Option<(Timestamp, Arc<T>)>>);

impl<T> Default for Coalesced<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Coalesced<T> {
    /// Returns the last result and its time while it is fresh; otherwise reads a new one. Concurrent requests wait
    /// for the same result; if the reading request is canceled, the next waiting one reads.
    pub(crate) async fn get(
        &self,
        now: impl Fn() -> Timestamp,
        read: impl Future<Output = T>,
    ) -> (Timestamp, Arc<T>) {
        let mut last = self.0.lock().await;
        // If the clock was set back, the last result is not fresh.
        let is_fresh = |at: Timestamp| now() >= at && now().since(at) < MAX_AGE;
        if let Some((at, read)) = last.as_ref().filter(|(at, _)| is_fresh(*at)) {
            return (*at, Arc::clone(read));
        }
        let read = Arc::new(read.await);
        // Freshness starts when the read completes: a slow read is not already stale.
        let at = now();
        *last = Some((at, Arc::clone(&read)));
        (at, read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[tokio::test]
    async fn requests_within_a_second_share_a_response() {
        let (shared, clock, reads) = (Coalesced::default(), Cell::new(100), Cell::new(0));
        let get = || {
            shared.get(|| Timestamp::from_secs(clock.get()), async {
                reads.set(reads.get() + 1);
                // Reading takes five seconds, in which other requests arrive.
                tokio::task::yield_now().await;
                clock.set(clock.get() + 5);
                reads.get()
            })
        };
        let (first, second, third) = tokio::join!(get(), get(), get());
        assert_eq!([first, second, third].map(|(at, read)| (at.as_secs(), *read)), [(105, 1); 3]);
        clock.set(106);
        assert_eq!(*get().await.1, 2, "read again after a second");
        clock.set(50);
        assert_eq!(*get().await.1, 3, "the clock was set back");
        // A canceled read does not block the next one.
        clock.set(200);
        let canceled = tokio::time::timeout(
            std::time::Duration::ZERO,
            shared.get(|| Timestamp::from_secs(200), std::future::pending()),
        );
        assert!(canceled.await.is_err());
        assert_eq!(*get().await.1, 4);
    }
}
