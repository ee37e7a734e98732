//! Progress bars of long commands, on standard error and only if it is a terminal.

use crate::cli::output;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::path::Path;
use std::time::Duration;

const TICK: Duration = Duration::from_millis(100);

/// Progress bar that disappears when it is dropped.
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Returns a bar that counts bytes; without a total it shows the count and the speed.
    pub(crate) fn bytes(what: &'static str, total: Option<u64>) -> Self {
        let template = match total {
            Some(_) => "{msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}, {eta} left",
            None => "{msg} {spinner} {bytes} {bytes_per_sec}",
        };
        Self::new(what, total, template)
    }

    /// Returns a bar that counts entries.
    pub(crate) fn entries(what: &'static str, total: Option<u64>) -> Self {
        let template = match total {
            Some(_) => "{msg} [{bar:30}] {human_pos}/{human_len} entries, {eta} left",
            None => "{msg} {spinner} {human_pos} entries",
        };
        Self::new(what, total, template)
    }

    fn new(what: &'static str, total: Option<u64>, template: &str) -> Self {
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
        if bar.is_hidden() {
            return Self(bar);
        }
        let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style.progress_chars("=> "));
        bar.set_message(what);
        bar.enable_steady_tick(TICK);
        Self(bar)
    }

    /// Hides the bar if the data itself goes to the terminal.
    pub(crate) fn unless_on_screen(self, file: Option<&Path>) -> Self {
        if file.is_none() && output::is_terminal() {
            self.0.set_draw_target(ProgressDrawTarget::hidden());
        }
        self
    }

    /// Returns another handle of the same bar, for the reading thread.
    pub(crate) fn counter(&self) -> impl Fn(u64) + Send + 'static {
        let bar = self.0.clone();
        move |more| bar.inc(more)
    }

    pub(crate) fn advance(&self, more: u64) {
        self.0.inc(more);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
