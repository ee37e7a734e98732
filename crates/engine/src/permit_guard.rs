//! Permit guard: releases what a request in flight holds when it is dropped, whether the request completed, failed, or
//! its client disconnected. Permits of requests that outlive them are renewed.
//!
//! The gateway, the HTTP server and the SDK use the same guard. One renewal task serves all permits of a limiter and
//! runs only while there are any. Rejected: a task for each permit, because most requests end long before the first
//! renewal.

use crate::delay_queue::{DelayQueue, QueueFull};
use crate::fallback::TryCharge;
use crate::limiter::Limiter;
use crate::permits::{HeldPermits, ReleaseReason};
use crate::task_guard::TaskGuard;
use futures_util::StreamExt;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::{Charge, CounterId, CounterStore, StoreError, TimeDelta};

/// Maximum pause between two rounds of renewals.
const ROUND: Duration = Duration::from_millis(500);

/// Minimum pause between two rounds, which bounds renewals of permits with a very short lifetime.
const MIN_ROUND: Duration = Duration::from_millis(10);

/// Maximum number of concurrent renewals.
const MAX_AT_ONCE: usize = 256;

/// Maximum number of fallback counters whose permits are known. Beyond that the table starts over, which adds permits again.
const MAX_COPIED: usize = 65_536;

/// Permits to renew.
#[derive(Default)]
pub(crate) struct Renewals(Mutex<RenewalTable>);

#[derive(Default)]
struct RenewalTable {
    entries: HashMap<u64, RenewalEntry>,
    next: u64,
    /// Up to which entry each fallback counter has the permits of this node.
    copied: HashMap<CounterId, u64>,
    /// True while a task processes the entries.
    is_running: bool,
}

struct RenewalEntry {
    held: Arc<HeldPermits>,
    due: Instant,
    every: Duration,
}

impl Renewals {
    fn table(&self) -> MutexGuard<'_, RenewalTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the permits of a counter that this node's requests hold to the fallback counter, which has not granted them itself. Each is
    /// added once: renewals keep it there, and its release frees it.
    pub(crate) fn copy_permits(&self, fallback: &dyn TryCharge, charge: &Charge<'_>) {
        // Under the lock, so that no permit is added after its release.
        let mut table = self.table();
        let RenewalTable { entries, next, copied, .. } = &mut *table;
        if copied.len() >= MAX_COPIED {
            copied.clear();
        }
        let from = copied.insert(charge.key.id(), *next).unwrap_or(0);
        if from < *next {
            let new = entries.iter().filter(|(id, _)| **id >= from);
            new.for_each(|(_, entry)| entry.held.copy_permits(fallback, &charge.key));
        }
    }
}

/// Permits, or a delay-queue entry, that one request holds. Dropping the guard releases them.
pub struct PermitGuard<S: CounterStore + 'static> {
    limiter: Arc<Limiter<S>>,
    /// `None` once the permits are left to their deadline.
    held: Option<Arc<HeldPermits>>,
    /// Key of the entry in the renewal table.
    renewal: Option<u64>,
    /// True while the request is in the delay queue: a release then refunds everything.
    is_waiting: bool,
}

impl<S: CounterStore + 'static> fmt::Debug for PermitGuard<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitGuard").field("held", &self.held).finish_non_exhaustive()
    }
}

impl<S: CounterStore + 'static> PermitGuard<S> {
    /// Waits in `queue` until the request may proceed. If the guard is dropped before that, all its charges are
    /// refunded.
    ///
    /// # Errors
    /// [`QueueFull`] if too many requests are already waiting.
    pub async fn wait(&mut self, queue: &DelayQueue, delay: TimeDelta) -> Result<(), QueueFull> {
        queue.wait(delay).await?;
        self.proceed();
        Ok(())
    }

    /// Marks the request as proceeding: from now on, a release frees only the permits.
    pub fn proceed(&mut self) {
        self.is_waiting = false;
    }

    /// Releases nothing: permits are left to their deadline, because the end of the request will not be reported.
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
            let limiter = Arc::clone(&self.limiter);
            runtime.spawn(async move {
                let Err(error) = releasing.await else { return };
                limiter.retry_release(held);
                if let Some(count) = limiter.release_failures.due(limiter.clock.now()) {
                    tracing::warn!(%error, count, "permit releases failed; they are tried again");
                }
            });
        }
    }
}

impl<S: CounterStore + 'static> Limiter<S> {
    /// Guards what an admitted request holds. A delayed request holds its delay-queue entry until [`PermitGuard::wait`]
    /// or [`PermitGuard::proceed`]. Permits are renewed while the guard is alive and a tokio runtime is running.
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
                let task = TaskGuard::new(self, |limiter| limiter.renewals.table().is_running = false);
                runtime.spawn(async move {
                    while let Some(pause) = task.limiter().and_then(|limiter| limiter.next_round()) {
                        tokio::time::sleep(pause).await;
                        let Some(limiter) = task.limiter() else { return };
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

    /// Returns the pause before the next round; `None` if there is nothing to renew and the task must end.
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

    /// Renews the permits that are due, concurrently: in sequence, many permits on a slow store would expire before
    /// their renewal.
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
            // If the permit was released during its renewal, the renewal acquired it again.
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

/// Failed renewals of one round; these permits expire unless the next round succeeds.
#[derive(Debug)]
struct RenewalFailures {
    failed: usize,
    of: usize,
    error: StoreError,
}

#[cfg(test)]
mod tests;
