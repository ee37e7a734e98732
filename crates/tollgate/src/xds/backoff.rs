//! Backoff: pauses between streams. They double from the first to the longest, and are spread at random, so that many
//! nodes do not return to a restarted server in the same instant.

use std::time::Duration;

/// Settings of the pauses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct BackoffSettings {
    /// The first pause.
    pub(crate) initial: Duration,
    /// The longest pause.
    pub(crate) max: Duration,
    /// Fraction by which a pause is shortened or lengthened at random, from 0 to 1.
    pub(crate) jitter: f64,
    /// Pause after a failed dial, in place of the growing one.
    pub(crate) after_dial: Option<Duration>,
}

impl Default for BackoffSettings {
    /// Short: the common reason is a management server that restarts.
    fn default() -> Self {
        Self {
            initial: Duration::from_millis(500),
            max: Duration::from_secs(10),
            jitter: 0.5,
            after_dial: None,
        }
    }
}

/// How a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// No connection came about.
    Dial,
    /// Before any response.
    Silent,
    /// After a response.
    Served,
    /// By this side, to open another at once.
    Asked,
}

/// The next pause.
#[derive(Debug)]
pub(super) struct Backoff {
    settings: BackoffSettings,
    next: Duration,
}

impl Backoff {
    pub(super) fn new(settings: BackoffSettings) -> Self {
        Self { settings, next: settings.initial }
    }

    /// Returns whether a stream has served long enough for pauses to begin anew: longer than the longest of them. A server that
    /// answers and closes each stream at once would be asked twice a second otherwise.
    pub(super) fn has_served(&self, ended: Ended, lasted: Duration) -> bool {
        ended == Ended::Served && lasted >= self.settings.max
    }

    /// Returns the pause after a stream that lasted this long. `random` is from 0 to 1.
    pub(super) fn pause(&mut self, ended: Ended, lasted: Duration, random: f64) -> Duration {
        let BackoffSettings { initial, max, jitter, after_dial } = self.settings;
        if self.has_served(ended, lasted) {
            self.next = initial;
        }
        let base = match (ended, after_dial) {
            (Ended::Dial, Some(pause)) => pause,
            (Ended::Asked, _) => return Duration::ZERO,
            _ => self.grow(),
        };
        base.mul_f64(1.0 + jitter * (2.0 * random - 1.0)).min(max.max(base))
    }

    fn grow(&mut self) -> Duration {
        let base = self.next.min(self.settings.max);
        self.next = (base * 2).min(self.settings.max);
        base
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_and_begin_anew_after_a_stream_that_served() {
        let mut backoff = Backoff::new(BackoffSettings::default());
        let mut lasted = Duration::ZERO;
        let mut millis = |ended, random| {
            lasted += Duration::from_millis(1_500);
            backoff.pause(ended, lasted, random).as_millis()
        };
        assert_eq!(millis(Ended::Silent, 0.5), 500);
        assert_eq!(millis(Ended::Dial, 0.5), 1_000);
        assert_eq!([millis(Ended::Dial, 0.0), millis(Ended::Dial, 1.0)], [1_000, 6_000]);
        assert_eq!(
            [millis(Ended::Dial, 1.0), millis(Ended::Served, 0.5)],
            [10_000, 10_000],
            "served for 9 s"
        );
        assert_eq!(millis(Ended::Served, 0.5), 500, "for 10.5 s");
        assert_eq!(millis(Ended::Silent, 0.5), 1_000);
    }

    #[test]
    fn the_pause_after_a_dial_can_be_fixed() {
        let settings =
            BackoffSettings { after_dial: Some(Duration::from_secs(3)), jitter: 0.0, ..Default::default() };
        let mut backoff = Backoff::new(settings);
        let mut pause = |ended| backoff.pause(ended, Duration::ZERO, 0.9);
        assert_eq!([pause(Ended::Dial), pause(Ended::Dial)], [Duration::from_secs(3); 2]);
        assert_eq!(pause(Ended::Silent), Duration::from_millis(500));
    }
}
