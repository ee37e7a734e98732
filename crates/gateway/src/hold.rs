//! What a request holds while it is under way, given back by being dropped: whether it was answered, has failed, or its
//! caller has left. Requests that outlive their permits have them renewed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::{CounterStore, Span};
use tollgate_engine::{Ending, Held, Limiter};

/// How often permits are looked through for those to renew.
const ROUND: Duration = Duration::from_millis(500);

/// All that is held at this moment.
pub(crate) struct Holds<S> {
    limiter: Arc<Limiter<S>>,
    waiting: AtomicUsize,
    most_waiting: AtomicUsize,
    /// Permits that will have to be renewed.
    permits: Mutex<HashMap<u64, Lasting>>,
    next: std::sync::atomic::AtomicU64,
}

/// A permit, when it is renewed next, and how often.
type Lasting = (Arc<Held>, Instant, Duration);

/// What one request holds.
pub(crate) struct Hold<S: CounterStore + 'static> {
    holds: Arc<Holds<S>>,
    held: Arc<Held>,
    permit: Option<u64>,
    /// Its turn has not come.
    waits: bool,
}

impl<S: CounterStore + 'static> Holds<S> {
    pub(crate) fn new(limiter: Arc<Limiter<S>>, most_waiting: usize) -> Arc<Self> {
        Arc::new(Self {
            limiter,
            waiting: AtomicUsize::new(0),
            most_waiting: AtomicUsize::new(most_waiting),
            permits: Mutex::default(),
            next: Default::default(),
        })
    }

    fn permits(&self) -> MutexGuard<'_, HashMap<u64, Lasting>> {
        self.permits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn hold(self: &Arc<Self>, held: Held) -> Hold<S> {
        let held = Arc::new(held);
        let permit = held.lapses_after().map(|after| {
            let every = Duration::from_micros(after.as_micros()) / 3;
            let name = self.next.fetch_add(1, Ordering::Relaxed);
            self.permits().insert(name, (Arc::clone(&held), Instant::now() + every, every));
            name
        });
        Hold { holds: Arc::clone(self), held, permit, waits: false }
    }

    /// From now on so many may wait.
    pub(crate) fn bound(&self, most_waiting: usize) {
        self.most_waiting.store(most_waiting, Ordering::Relaxed);
    }

    /// Requests that wait for their turn.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Renews permits for as long as it is polled.
    pub(crate) async fn renew(&self) {
        loop {
            tokio::time::sleep(ROUND).await;
            let now = Instant::now();
            let mut due = Vec::new();
            for (held, at, every) in self.permits().values_mut().filter(|(_, at, _)| *at <= now) {
                *at = now + *every;
                due.push(Arc::clone(held));
            }
            for held in due {
                if let Err(error) = self.limiter.renew(&held).await {
                    tracing::warn!(%error, "a permit could not be renewed");
                }
            }
        }
    }
}

impl<S: CounterStore + 'static> Hold<S> {
    /// Waits for the request's turn. Dropped before that, everything that it took is given back. An error where too many
    /// wait already.
    pub(crate) async fn wait(&mut self, delay: Span) -> Result<(), ()> {
        self.waits = true;
        let holds = Arc::clone(&self.holds);
        if holds.waiting.fetch_add(1, Ordering::Relaxed) >= holds.most_waiting.load(Ordering::Relaxed) {
            holds.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(());
        }
        let _place = Place(&holds.waiting);
        tokio::time::sleep(Duration::from_micros(delay.as_micros())).await;
        self.waits = false;
        Ok(())
    }
}

struct Place<'a>(&'a AtomicUsize);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl<S: CounterStore + 'static> Drop for Hold<S> {
    fn drop(&mut self) {
        if let Some(permit) = self.permit {
            self.holds.permits().remove(&permit);
        }
        let ending = if self.waits { Ending::Withdrawn } else { Ending::Over };
        if let Some(giving) = self.holds.limiter.let_go(&self.held, ending)
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                if let Err(error) = giving.await {
                    tracing::warn!(%error, "what a request held could not be given back; it lapses by itself");
                }
            });
        }
    }
}
