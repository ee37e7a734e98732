//! Messages about what goes on for long: a cell that is away for a day must not fill the log with an attempt a second.

use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{TimeDelta, Timestamp};

/// Interval at which a message that does not change is repeated, and the least between two that differ.
const REPEATED: TimeDelta = TimeDelta::from_secs(60);
const APART: TimeDelta = TimeDelta::from_secs(1);

/// A message, and when it was written last.
#[derive(Debug, Default)]
pub(super) struct Repeated(Mutex<Option<(String, Timestamp)>>);

impl Repeated {
    fn lock(&self) -> MutexGuard<'_, Option<(String, Timestamp)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether this message is to be written.
    pub(super) fn is_due(&self, message: &str, now: Timestamp) -> bool {
        let mut written = self.lock();
        let is_due = written
            .as_ref()
            .is_none_or(|(known, at)| now.since(*at) >= if known == message { REPEATED } else { APART });
        if is_due {
            *written = Some((message.to_owned(), now));
        }
        is_due
    }

    /// Returns whether anything was written since the last call: that it is over is to be written too.
    pub(super) fn end(&self) -> bool {
        self.lock().take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Otherwise the log of a day in which a region is away has one message, 86,400 times, or hides the one that explains it.
    #[test]
    fn a_message_is_repeated_each_minute_and_another_one_is_written_at_once() {
        let (log, at) = (Repeated::default(), |seconds| Timestamp::from_secs(1_000 + seconds));
        assert!(!log.end(), "nothing was written");
        let written: Vec<u64> = (0..150).filter(|second| log.is_due("refused", at(*second))).collect();
        assert_eq!(written, [0, 60, 120]);
        assert!(log.is_due("another secret", at(150)));
        assert!(!log.is_due("refused", at(150)), "two in a second");
        assert!(log.end());
        assert!(log.is_due("refused", at(151)), "a new outage");
    }
}
