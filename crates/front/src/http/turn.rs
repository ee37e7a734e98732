//! Waiting for one's turn: a request that `action: delay` holds back. Who leaves before it comes gives it back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tollgate_core::{CounterStore, Span};
use tollgate_engine::{Ending, Held, Limiter};

/// Those who wait.
#[derive(Debug)]
pub(crate) struct Turns {
    waiting: AtomicUsize,
    most: usize,
}

impl Turns {
    pub(crate) const fn new(most: usize) -> Self {
        Self { waiting: AtomicUsize::new(0), most }
    }

    fn take(&self) -> Option<Place<'_>> {
        let place = Place(self);
        (self.waiting.fetch_add(1, Ordering::Relaxed) < self.most).then_some(place)
    }
}

struct Place<'a>(&'a Turns);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A turn that has not come. Dropped, it is given back.
pub(crate) struct Turn<S: CounterStore + 'static> {
    limiter: Arc<Limiter<S>>,
    held: Option<Arc<Held>>,
}

/// As many wait as may.
pub(crate) struct Crowded;

impl<S: CounterStore + 'static> Turn<S> {
    pub(crate) fn new(limiter: &Arc<Limiter<S>>, held: Held) -> Self {
        Self { limiter: Arc::clone(limiter), held: Some(Arc::new(held)) }
    }

    pub(crate) async fn wait(mut self, turns: &Turns, delay: Span) -> Result<(), Crowded> {
        let _place = turns.take().ok_or(Crowded)?;
        tokio::time::sleep(delay.into()).await;
        self.held = None;
        Ok(())
    }
}

impl<S: CounterStore + 'static> Drop for Turn<S> {
    fn drop(&mut self) {
        if let Some(giving) = self.held.take().and_then(|held| self.limiter.let_go(&held, Ending::Withdrawn))
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                if let Err(error) = giving.await {
                    tracing::warn!(%error, "a turn could not be given back; it passes by itself");
                }
            });
        }
    }
}
