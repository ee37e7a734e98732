//! The traffic of the scenario: three times the limit evenly, and the limit at each node at once.

use super::nodes::Nodes;
use super::{LIMIT, NODES, WINDOW_MS};
use crate::process::median;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tollgate_core::{Clock, SystemClock};
use tollgate_testing::wait::Stopwatch;

/// Connections that a burst to one node is spread over.
const CONNECTIONS: usize = 100;
/// Connections to one node that take turns in steady traffic.
const SENDERS: u32 = 25;

impl Nodes {
    /// Sends three times the limit, evenly. Returns what the worst window admits, and the median time at the last node.
    pub(super) fn steady(&self, windows: u64) -> Result<(f64, f64), String> {
        let key = self.far_key("steady")?;
        let clock = SystemClock::new();
        wait_for_window(&clock);
        let begin = window(&clock);
        let (admitted, times) = (Mutex::new(vec![0_u64; windows as usize]), Mutex::new(Vec::new()));
        // Each node gets the limit in a window, from several senders that take turns.
        let pause = Duration::from_micros(1_000 * WINDOW_MS * u64::from(SENDERS) / LIMIT);
        self.on_threads(SENDERS as usize, |node, sender| {
            let mut connection = self.connect(node)?;
            std::thread::sleep(pause * sender as u32 / SENDERS);
            loop {
                let turn = Stopwatch::start();
                let is_admitted = self.check(&mut connection, &key)?;
                let (took, window) = (turn.elapsed(), window(&clock) - begin);
                if window >= windows {
                    return Ok(());
                }
                lock(&admitted)[window as usize] += u64::from(is_admitted);
                if node == NODES - 1 {
                    lock(&times).push(took.as_secs_f64() * 1e3);
                }
                std::thread::sleep(pause.saturating_sub(turn.elapsed()));
            }
        })?;
        let most = lock(&admitted).iter().max().copied().unwrap_or(0);
        let times = std::mem::take(&mut *lock(&times));
        Ok((most as f64 / LIMIT as f64, if times.is_empty() { 0.0 } else { median(times) }))
    }

    /// Sends the limit to each node at once. Returns what all admit.
    pub(super) fn burst(&self) -> Result<f64, String> {
        let key = self.far_key("burst")?;
        wait_for_window(&SystemClock::new());
        let admitted = Mutex::new(0_u64);
        self.on_threads(CONNECTIONS, |node, _| {
            let mut connection = self.connect(node)?;
            for _ in 0..LIMIT as usize / CONNECTIONS {
                let is_admitted = self.check(&mut connection, &key)?;
                *lock(&admitted) += u64::from(is_admitted);
            }
            Ok(())
        })?;
        let admitted = *lock(&admitted);
        Ok(admitted as f64 / LIMIT as f64)
    }

    /// Runs `work` on this many threads for each node, with the numbers of the node and of the thread.
    pub(super) fn on_threads(
        &self,
        threads: usize,
        work: impl Fn(usize, usize) -> Result<(), String> + Sync,
    ) -> Result<(), String> {
        let failed = Mutex::new(None);
        std::thread::scope(|scope| {
            for node in 0..self.servers.len() {
                for thread in 0..threads {
                    let (work, failed) = (&work, &failed);
                    scope.spawn(move || {
                        if let Err(error) = work(node, thread) {
                            *lock(failed) = Some(error);
                        }
                    });
                }
            }
        });
        let failed = lock(&failed).take();
        failed.map_or(Ok(()), Err)
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the number of the window.
fn window(clock: &SystemClock) -> u64 {
    clock.now().as_micros() / 1_000 / WINDOW_MS
}

/// Waits until a window begins.
fn wait_for_window(clock: &SystemClock) {
    let into = clock.now().as_micros() / 1_000 % WINDOW_MS;
    std::thread::sleep(Duration::from_millis(WINDOW_MS - into + 20));
}
