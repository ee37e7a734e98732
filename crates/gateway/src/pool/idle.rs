//! Connections of one endpoint between two requests, and how many of them may be open.
//!
//! Where their number is bounded, a place belongs to a request, not to a connection: one that waits has given its place back,
//! so that whoever is next in line for a place finds the connection as well. That a connection kept its place while it
//! waited was rejected: those in line would wait for a place while a connection lies idle.

use crate::config::PoolConfig;
use crate::h1::exchange::UpstreamConnection;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Waiting connections are kept in several heaps, one for every few threads, so that threads rarely meet.
const HEAPS: usize = 8;

/// What a request needs to have a connection open, where that is bounded.
pub(crate) type ConnectionPermit = Option<OwnedSemaphorePermit>;

pub(super) struct IdleConnections {
    /// In boxes: they change hands many times a request. Where places are bounded all are in the first heap, since whoever
    /// finds none opens another: it must not look past one that is put where it has looked already.
    #[allow(clippy::vec_box, reason = "a box is what is handed around")]
    heaps: [Mutex<Vec<Box<UpstreamConnection>>>; HEAPS],
    /// For each heap.
    max_idle: usize,
    keep_alive: Duration,
    permits: Option<Arc<Semaphore>>,
}

impl IdleConnections {
    pub(super) fn new(config: &PoolConfig) -> Self {
        let places = |most: usize| Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)));
        Self {
            heaps: Default::default(),
            max_idle: config.idle_connections,
            keep_alive: config.keep_alive.0,
            permits: config.max_connections.map(places),
        }
    }

    /// A connection that waits, if one is still good and there is a place.
    pub(super) fn take(&self) -> Option<Box<UpstreamConnection>> {
        let place = match &self.permits {
            None => None,
            Some(places) => Some(Arc::clone(places).try_acquire_owned().ok()?),
        };
        let mut connection = self.pop()?;
        connection.permit = place;
        Some(connection)
    }

    /// A place, in the order of asking. None if there is none in time.
    pub(super) async fn permit(&self, within: Duration) -> Option<ConnectionPermit> {
        let Some(places) = &self.permits else { return Some(None) };
        let place = tokio::time::timeout(within, Arc::clone(places).acquire_owned()).await;
        Some(Some(place.ok()?.ok()?))
    }

    /// A connection that waits, for whoever has a place already. Whoever has waited for one asks here before it opens
    /// another: only so are there never more open than places.
    pub(super) fn take_with(&self, place: &mut ConnectionPermit) -> Option<Box<UpstreamConnection>> {
        place.as_ref()?;
        let mut connection = self.pop()?;
        connection.permit = place.take();
        Some(connection)
    }

    /// Keeps a connection for the next request.
    pub(super) fn put(&self, mut connection: Box<UpstreamConnection>) {
        connection.idle_since = Instant::now();
        connection.is_reused = true;
        let place = connection.permit.take();
        let mut heap = self.own().lock().unwrap_or_else(PoisonError::into_inner);
        if heap.len() < self.max_idle {
            heap.push(connection);
        }
        drop(heap);
        // Now that it can be found.
        drop(place);
    }

    /// Closes what has waited for too long.
    pub(super) fn sweep(&self) {
        for heap in &self.heaps {
            let mut heap = heap.lock().unwrap_or_else(PoisonError::into_inner);
            heap.retain_mut(|connection| self.is_usable(connection));
        }
    }

    fn is_usable(&self, connection: &mut UpstreamConnection) -> bool {
        connection.is_quiet() && connection.idle_since.elapsed() < self.keep_alive
    }

    fn pop(&self) -> Option<Box<UpstreamConnection>> {
        let (own, heaps) = if self.permits.is_some() { (0, 1) } else { (heap(), HEAPS) };
        for step in 0..heaps {
            let heap = &self.heaps[(own + step) % HEAPS];
            loop {
                let Some(mut connection) = heap.lock().unwrap_or_else(PoisonError::into_inner).pop() else {
                    break;
                };
                if self.is_usable(&mut connection) {
                    return Some(connection);
                }
            }
        }
        None
    }

    #[allow(clippy::vec_box, reason = "a box is what is handed around")]
    fn own(&self) -> &Mutex<Vec<Box<UpstreamConnection>>> {
        &self.heaps[if self.permits.is_some() { 0 } else { heap() }]
    }
}

/// The heap of this thread.
fn heap() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: usize = NEXT.fetch_add(1, Ordering::Relaxed) % HEAPS;
    }
    OWN.with(|own| *own)
}
