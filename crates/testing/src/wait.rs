//! Waiting for observable conditions: a test polls often and gives up late.

use std::time::{Duration, Instant};

/// A timeout that only a hang reaches.
pub const LONG: Duration = Duration::from_secs(60);

/// Shortest and longest pause between two polls.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(25));

/// A stopwatch.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    /// Starts a stopwatch.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "the clock of the tests")]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Returns the time since the start.
    pub fn elapsed(self) -> Duration {
        self.0.elapsed()
    }

    /// Returns how long to pause before the next poll: an eighth of the time waited so far, within bounds. A short wait is
    /// polled often, and a long one does not take the processor from the servers that it waits for.
    #[must_use]
    pub fn pause(self) -> Duration {
        (self.elapsed() / 8).clamp(PAUSES.0, PAUSES.1)
    }
}

/// Polls until `poll` returns a value; panics with `what` on timeout.
pub fn eventually<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let watch = Stopwatch::start();
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(watch.elapsed() < LONG, "timed out after {} s waiting for {what}", LONG.as_secs());
        std::thread::sleep(watch.pause());
    }
}

/// Prints a measurement, visible with `--nocapture`.
#[allow(clippy::print_stdout, reason = "printing is its purpose")]
pub fn note(text: &str) {
    println!("{text}");
}
