//! Log throttle: at most one message a second about something that may happen at every request.

use crate::time::{TimeDelta, Timestamp};
use std::sync::atomic::{AtomicU64, Ordering};

/// Decides whether a message is due. One for each kind of message.
///
/// ```
/// use tollgate_core::{LogThrottle, TimeDelta, Timestamp};
/// let (throttle, now) = (LogThrottle::default(), Timestamp::from_secs(1_000));
/// assert_eq!(throttle.due(now), Some(1));
/// assert_eq!([throttle.due(now), throttle.due(now)], [None, None]);
/// assert_eq!(throttle.due(now + TimeDelta::from_secs(1)), Some(3));
/// ```
#[derive(Debug, Default)]
pub struct LogThrottle {
    last: AtomicU64,
    count: AtomicU64,
}

impl LogThrottle {
    /// Counts an event. Returns the number of events since the last message if one is due at `now`.
    pub fn due(&self, now: Timestamp) -> Option<u64> {
        self.count.fetch_add(1, Ordering::Relaxed);
        let last = self.last.load(Ordering::Relaxed);
        let is_due = last == 0 || now.since(Timestamp::from_micros(last)) >= TimeDelta::from_secs(1);
        let claimed = is_due
            && self
                .last
                .compare_exchange(last, now.as_micros(), Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        claimed.then(|| self.count.swap(0, Ordering::Relaxed))
    }
}
