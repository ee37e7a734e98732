//! What a request holds while it is in progress, given back by being dropped: whether it was answered, has failed, or its
//! caller has left. Requests that outlive their permits have them renewed.
//!
//! One guard serves the gateway, the HTTP server and the SDK. Renewal is one task for all permits of a limiter, which runs
//! only while there are any; a task for each permit was rejected: most requests end long before the first renewal.

use crate::delay_queue::{DelayQueue, QueueFull};
use crate::limiter::Limiter;
use crate::permits::{HeldPermits, ReleaseReason};
use futures_util::StreamExt;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::{CounterStore, StoreError, TimeDelta};

/// The longest pause between two rounds of renewals.
const ROUND: Duration = Duration::from_millis(500);

/// Permits of a very short life are not renewed more often than this.
const MIN_ROUND: Duration = Duration::from_millis(10);

/// How many are renewed at once.
const MAX_AT_ONCE: usize = 256;

/// Permits that will have to be renewed.
#[derive(Default)]
pub(crate) struct Renewals(Mutex<RenewalTable>);

#[derive(Default)]
struct RenewalTable {
    entries: HashMap<u64, RenewalEntry>,
    next: u64,
    /// A task looks through the entries.
    is_running: bool,
}

struct RenewalEntry {
    held: Arc<HeldPermits>,
    due: Instant,
    every: Duration,
}

/// The task that renews; dropped with it, also when its runtime ends. The next guard starts another.
struct RenewalTask<S> {
    limiter: Weak<Limiter<S>>,
    /// It has not ended by itself.
    is_running: bool,
}

impl<S> RenewalTask<S> {
    /// There is nothing left to renew, and the table says so.
    fn end(mut self) {
        self.is_running = false;
    }
}

impl<S> Drop for RenewalTask<S> {
    fn drop(&mut self) {
        if let Some(limiter) = self.limiter.upgrade().filter(|_| self.is_running) {
            limiter.renewals.table().is_running = false;
        }
    }
}

impl Renewals {
    fn table(&self) -> MutexGuard<'_, RenewalTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Permits, or a place in a delay queue, that one request holds. Dropping it gives them back.
pub struct PermitGuard<S: CounterStore + 'static> {
    limiter: Arc<Limiter<S>>,
    /// Nothing once it is left to its deadline.
    held: Option<Arc<HeldPermits>>,
    /// Its entry among the renewals.
    renewal: Option<u64>,
    /// The request waits until it may proceed: given back now, everything is as if it had never been taken.
    is_waiting: bool,
}

impl<S: CounterStore + 'static> fmt::Debug for PermitGuard<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitGuard").field("held", &self.held).finish_non_exhaustive()
    }
}

impl<S: CounterStore + 'static> PermitGuard<S> {
    /// Waits in `queue` until the request may proceed. Dropped before that, everything that it took comes back.
    ///
    /// # Errors
    /// [`QueueFull`] if too many wait already.
    pub async fn wait(&mut self, queue: &DelayQueue, delay: TimeDelta) -> Result<(), QueueFull> {
        queue.wait(delay).await?;
        self.proceed();
        Ok(())
    }

    /// The request proceeds: from now on only what lasts as long as the request comes back.
    pub fn proceed(&mut self) {
        self.is_waiting = false;
    }

    /// Gives nothing back: permits are left to their deadline, for nobody will say when the request ends.
    pub fn leave_to_deadline(mut self) {
        self.stop_renewal();
        self.held = None;
    }

    fn stop_renewal(&mut self) {
        if let Some(renewal) = self.renewal.take() {
            self.limiter.renewals.table().entries.remove(&renewal);
        }
    }
}

impl<S: CounterStore + 'static> Drop for PermitGuard<S> {
    fn drop(&mut self) {
        self.stop_renewal();
        let ending = if self.is_waiting { ReleaseReason::Canceled } else { ReleaseReason::Completed };
        if let Some(held) = self.held.take()
            && let Some(releasing) = self.limiter.start_release(&held, ending)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                if let Err(error) = releasing.await {
                    tracing::warn!(%error, "permit release failed; it will expire");
                }
            });
        }
    }
}

impl<S: CounterStore + 'static> Limiter<S> {
    /// Guards what an admitted request holds. A request that is to be delayed holds its place in the queue until
    /// [`PermitGuard::wait`] or [`PermitGuard::proceed`]. Permits are renewed while the guard lives and a tokio runtime runs.
    pub fn guard(self: &Arc<Self>, held: HeldPermits, delay: TimeDelta) -> PermitGuard<S> {
        let held = Arc::new(held);
        let renewal = held.expires_after().map(|after| {
            let every = Duration::from(after) / 3;
            let mut table = self.renewals.table();
            let id = table.next;
            table.next += 1;
            let entry = RenewalEntry { held: Arc::clone(&held), due: Instant::now() + every, every };
            table.entries.insert(id, entry);
            if !table.is_running
                && let Ok(runtime) = tokio::runtime::Handle::try_current()
            {
                table.is_running = true;
                let task = RenewalTask { limiter: Arc::downgrade(self), is_running: true };
                runtime.spawn(async move {
                    while let Some(pause) = task.limiter.upgrade().and_then(|limiter| limiter.next_round()) {
                        tokio::time::sleep(pause).await;
                        let Some(limiter) = task.limiter.upgrade() else { return };
                        limiter.renew_round().await;
                    }
                    task.end();
                });
            }
            id
        });
        PermitGuard {
            limiter: Arc::clone(self),
            held: Some(held),
            renewal,
            is_waiting: delay > TimeDelta::ZERO,
        }
    }

    /// How long to pause before the next round; nothing where there is nothing to renew, and the task ends.
    fn next_round(&self) -> Option<Duration> {
        let mut table = self.renewals.table();
        let next = table.entries.values().map(|entry| entry.due).min();
        table.is_running = next.is_some();
        next.map(|due| due.saturating_duration_since(Instant::now()).clamp(MIN_ROUND, ROUND))
    }

    async fn renew_round(&self) {
        if let Err(RenewalFailures { failed, of, error }) = self.renew_due().await {
            tracing::warn!(%error, failed, of, "permit renewal failed");
        }
    }

    /// Renews the permits that are due, side by side: one after another, many permits over a slow store would expire before
    /// they were reached.
    async fn renew_due(&self) -> Result<(), RenewalFailures> {
        let now = Instant::now();
        let mut due = Vec::new();
        for (id, entry) in self.renewals.table().entries.iter_mut().filter(|(_, entry)| entry.due <= now) {
            entry.due = now + entry.every;
            due.push((*id, Arc::clone(&entry.held)));
        }
        let of = due.len();
        let renewing = due.into_iter().map(|(id, held)| async move {
            let is_held = || self.renewals.table().entries.contains_key(&id);
            if !is_held() {
                return Ok(());
            }
            self.renew(&held).await?;
            // Released while it was renewed: renewing has taken it again.
            if is_held() { Ok(()) } else { self.release(&held).await }
        });
        let mut renewing = futures_util::stream::iter(renewing).buffer_unordered(MAX_AT_ONCE);
        let (mut failed, mut last) = (0, None);
        while let Some(renewed) = renewing.next().await {
            if let Err(error) = renewed {
                (failed, last) = (failed + 1, Some(error));
            }
        }
        last.map_or(Ok(()), |error| Err(RenewalFailures { failed, of, error }))
    }
}

/// Permits of one round that expire unless the next round has more luck.
#[derive(Debug)]
struct RenewalFailures {
    failed: usize,
    of: usize,
    error: StoreError,
}

#[cfg(test)]
mod tests;
