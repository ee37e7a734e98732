//! One answer for all who ask within a second: what many pages ask for again and again is read once, however long that takes.

use std::future::Future;
use std::sync::Arc;
use tokio::sync::Mutex;
use tollgate_core::{TimeDelta, Timestamp};

/// How long an answer is told again.
const MAX_AGE: TimeDelta = TimeDelta::from_secs(1);

pub(crate) struct Coalesced<T>(Mutex<Option<(Timestamp, Arc<T>)>>);

impl<T> Default for Coalesced<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> Coalesced<T> {
    /// What was read last, and when, if that is fresh; else what is read now. Those who ask meanwhile wait for the same
    /// answer; if whoever reads gives up, the next of them reads.
    pub(crate) async fn get(
        &self,
        now: impl Fn() -> Timestamp,
        read: impl Future<Output = T>,
    ) -> (Timestamp, Arc<T>) {
        let mut last = self.0.lock().await;
        // A clock that was set back makes nothing fresh.
        let is_fresh = |at: Timestamp| now() >= at && now().since(at) < MAX_AGE;
        if let Some((at, read)) = last.as_ref().filter(|(at, _)| is_fresh(*at)) {
            return (*at, Arc::clone(read));
        }
        let read = Arc::new(read.await);
        // From when it was known: one that took long is not old already.
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
        let ask = || {
            shared.get(|| Timestamp::from_secs(clock.get()), async {
                reads.set(reads.get() + 1);
                // Reading takes five seconds, in which others come.
                tokio::task::yield_now().await;
                clock.set(clock.get() + 5);
                reads.get()
            })
        };
        let (first, second, third) = tokio::join!(ask(), ask(), ask());
        assert_eq!([first, second, third].map(|(at, read)| (at.as_secs(), *read)), [(105, 1); 3]);
        clock.set(106);
        assert_eq!(*ask().await.1, 2, "a second later it is read again");
        clock.set(50);
        assert_eq!(*ask().await.1, 3, "the clock was set back");
        // Who gives up is not waited for.
        clock.set(200);
        let gone = tokio::time::timeout(
            std::time::Duration::ZERO,
            shared.get(|| Timestamp::from_secs(200), std::future::pending()),
        );
        assert!(gone.await.is_err());
        assert_eq!(*ask().await.1, 4);
    }
}
