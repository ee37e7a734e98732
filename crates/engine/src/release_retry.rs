//! Releases that failed: kept and tried again until the permits have expired, so that a store that stalls for a moment does
//! not count ended requests as in flight for the rest of their `ttl`.
//!
//! Releasing a permit twice has no further effect, so a release whose answer was lost may be repeated. One task serves all
//! of a limiter's releases and runs only while there are any. It tries one release before all others, with growing pauses:
//! a store that is unavailable gets one request in a round.

use crate::limiter::Limiter;
use crate::permits::HeldPermits;
use crate::task_guard::TaskGuard;
use futures_util::StreamExt;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::CounterStore;

/// Most releases that are kept. Beyond them, permits are left to their deadline.
const MAX_PENDING: usize = 65_536;
/// Pauses between two rounds while the store fails.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(2);
/// Maximum number of concurrent releases.
const MAX_AT_ONCE: usize = 64;

/// Releases to try again.
#[derive(Default)]
pub(crate) struct PendingReleases {
    table: Mutex<Table>,
    retried: AtomicU64,
    lost: AtomicU64,
}

#[derive(Default)]
struct Table {
    entries: VecDeque<PendingRelease>,
    /// True while a task processes the entries.
    is_running: bool,
}

struct PendingRelease {
    held: Arc<HeldPermits>,
    /// When the permits have expired.
    until: Instant,
}

/// Figures about releases that failed at first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReleaseStats {
    /// Releases that are to be tried again.
    pub pending: u64,
    /// Releases that succeeded later.
    pub retried: u64,
    /// Releases that never succeeded: their permits were left to their deadline.
    pub lost: u64,
}

impl PendingReleases {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the oldest release that is still of use.
    fn take(&self, now: Instant) -> Option<PendingRelease> {
        let mut table = self.table();
        while let Some(next) = table.entries.pop_front() {
            if next.until > now {
                return Some(next);
            }
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
        None
    }

    /// Puts a release back that failed again.
    fn put_back(&self, release: PendingRelease) {
        self.table().entries.push_back(release);
    }

    fn stats(&self) -> ReleaseStats {
        ReleaseStats {
            pending: self.table().entries.len() as u64,
            retried: self.retried.load(Ordering::Relaxed),
            lost: self.lost.load(Ordering::Relaxed),
        }
    }
}

impl<S> Limiter<S> {
    /// Returns figures about releases of permits that failed at first.
    #[must_use]
    pub fn release_stats(&self) -> ReleaseStats {
        self.pending_releases.stats()
    }
}

impl<S: CounterStore + 'static> Limiter<S> {
    /// Keeps a release that failed, and tries it again in the background.
    #[cold]
    pub(crate) fn retry_release(self: &Arc<Self>, held: Arc<HeldPermits>) {
        let Some(lasts) = held.expires_after() else { return };
        let until = Instant::now() + Duration::from(lasts);
        let mut table = self.pending_releases.table();
        if table.entries.len() >= MAX_PENDING {
            self.pending_releases.lost.fetch_add(1, Ordering::Relaxed);
            return;
        }
        table.entries.push_back(PendingRelease { held, until });
        if !table.is_running
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            table.is_running = true;
            let task = TaskGuard::new(self, |limiter| limiter.pending_releases.table().is_running = false);
            runtime.spawn(async move {
                let mut pause = FIRST_PAUSE;
                loop {
                    tokio::time::sleep(pause).await;
                    let Some(limiter) = task.limiter() else { return };
                    match limiter.retry_round().await {
                        Round::Failed => pause = (pause * 2).min(LAST_PAUSE),
                        Round::Succeeded => pause = FIRST_PAUSE,
                        Round::Empty => {
                            let mut table = limiter.pending_releases.table();
                            // Another release may have failed meanwhile.
                            if table.entries.is_empty() {
                                table.is_running = false;
                                return task.end();
                            }
                        }
                    }
                }
            });
        }
    }

    /// Tries one release, and if it succeeds all others of now.
    async fn retry_round(&self) -> Round {
        let Some(first) = self.pending_releases.take(Instant::now()) else { return Round::Empty };
        if !self.try_again(first).await {
            return Round::Failed;
        }
        let now = Instant::now();
        let mut others = Vec::new();
        while let Some(next) = self.pending_releases.take(now) {
            others.push(next);
        }
        let releasing = others.into_iter().map(|release| self.try_again(release));
        let mut releasing = futures_util::stream::iter(releasing).buffer_unordered(MAX_AT_ONCE);
        let mut round = Round::Succeeded;
        while let Some(is_released) = releasing.next().await {
            if !is_released {
                round = Round::Failed;
            }
        }
        round
    }

    /// Returns whether the store has released the permits; otherwise they are tried again in the next round.
    async fn try_again(&self, release: PendingRelease) -> bool {
        match self.release(&release.held).await {
            Ok(()) => {
                self.pending_releases.retried.fetch_add(1, Ordering::Relaxed);
                true
            }
            Err(_) => {
                self.pending_releases.put_back(release);
                false
            }
        }
    }
}

/// Result of a round.
enum Round {
    Empty,
    Succeeded,
    Failed,
}

#[cfg(test)]
mod tests;
