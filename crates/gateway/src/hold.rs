//! What a request holds while it is under way, given back by being dropped: whether it was answered, has failed, or its
//! caller has left. Requests that outlive their permits have them renewed.

use futures_util::StreamExt;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::{CounterStore, Span, StoreError};
use tollgate_engine::{Ending, Held, Limiter};

/// How often permits are looked through for those to renew.
const ROUND: Duration = Duration::from_millis(500);

/// How many are renewed at once.
const AT_ONCE: usize = 256;

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
            if let Err(Unrenewed { failed, of, error }) = self.renew_due().await {
                tracing::warn!(%error, failed, of, "permits could not be renewed");
            }
        }
    }

    /// Renews those whose time has come, side by side: one after another, many permits over a slow store would lapse before
    /// their turn came.
    async fn renew_due(&self) -> Result<(), Unrenewed> {
        let now = Instant::now();
        let mut due = Vec::new();
        for (held, at, every) in self.permits().values_mut().filter(|(_, at, _)| *at <= now) {
            *at = now + *every;
            due.push(Arc::clone(held));
        }
        let of = due.len();
        let renewing = due.into_iter().map(|held| async move { self.limiter.renew(&held).await });
        let mut renewing = futures_util::stream::iter(renewing).buffer_unordered(AT_ONCE);
        let (mut failed, mut last) = (0, None);
        while let Some(renewed) = renewing.next().await {
            if let Err(error) = renewed {
                (failed, last) = (failed + 1, Some(error));
            }
        }
        last.map_or(Ok(()), |error| Err(Unrenewed { failed, of, error }))
    }
}

/// Permits of one round that lapse unless the next round has more luck.
#[derive(Debug)]
struct Unrenewed {
    failed: usize,
    of: usize,
    error: StoreError,
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;
    use tokio::sync::Barrier;
    use tollgate_core::{Charge, Outcomes, Permit, SystemClock};
    use tollgate_engine::Check;
    use tollgate_rules::{Options, Ruleset, Source};
    use tollgate_store::{MemoryConfig, MemoryStore};

    const PERMITS: usize = 20;

    /// A store that, once it is slow, answers nobody before all have asked; and, once it is away, nobody at all.
    struct Moody {
        counters: MemoryStore<SystemClock>,
        is_slow: AtomicBool,
        is_away: AtomicBool,
        all: Barrier,
    }

    impl CounterStore for Moody {
        async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
            if self.is_away.load(Ordering::Relaxed) {
                return Err(StoreError::Timeout);
            }
            if self.is_slow.load(Ordering::Relaxed) {
                self.all.wait().await;
            }
            self.counters.charge(charges).await
        }
        async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
            self.counters.debit(charges).await
        }
        async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
            self.counters.release(permits).await
        }
    }

    /// Many requests under way over a store that is slow must not lose their permits; and that it is away is told once.
    #[tokio::test(start_paused = true)]
    async fn permits_are_renewed_together() {
        let text =
            "domain: d\ndescriptors:\n  - {key: user, name: slots, concurrency: {limit: 100, ttl: 2s}}\n";
        let source = Source { name: "test.yaml".to_owned(), text: text.to_owned() };
        let rules = Ruleset::load(&[source], &Options::default()).unwrap_or_else(|errors| panic!("{errors}"));
        let clock = SystemClock::new();
        let counters = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("a small store");
        let store = Moody {
            counters,
            is_slow: AtomicBool::new(false),
            is_away: AtomicBool::new(false),
            all: Barrier::new(PERMITS),
        };
        let limiter = Arc::new(Limiter::new(Arc::new(rules), store, Arc::new(clock)));
        let holds = Holds::new(Arc::clone(&limiter), 0);
        let mut held = Vec::new();
        for _ in 0..PERMITS {
            let admitted = limiter.admit(&Check::attributes("d", &[("user", "u")])).await;
            held.push(holds.hold(admitted.1.expect("a permit")));
        }
        limiter.store().is_slow.store(true, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let renewed = tokio::time::timeout(Duration::from_secs(60), holds.renew_due()).await;
        renewed.expect("they do not wait for each other").expect("they are renewed");
        limiter.store().is_away.store(true, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let told = holds.renew_due().await.expect_err("the store is away");
        assert_eq!((told.failed, told.of), (PERMITS, PERMITS));
        drop(held);
    }
}
