//! Waiting for what can be observed: a test looks again and again, and gives up late.

use std::time::{Duration, Instant};

/// What no test should ever need; only a hang takes as long.
pub const LONG: Duration = Duration::from_secs(30);

/// Time from a moment on.
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    /// From now on.
    #[must_use]
    #[allow(clippy::disallowed_methods, reason = "the one clock of these tests")]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// How long ago it was started.
    pub fn elapsed(self) -> Duration {
        self.0.elapsed()
    }
}

/// Looks until something is seen; says what was waited for if it never is.
pub fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let watch = Stopwatch::start();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(watch.elapsed() < LONG, "waited {} s in vain: {what}", LONG.as_secs());
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Says what was measured, to those who run the tests with `--nocapture`.
#[allow(clippy::print_stdout, reason = "this is what it is for")]
pub fn note(text: &str) {
    println!("{text}");
}
