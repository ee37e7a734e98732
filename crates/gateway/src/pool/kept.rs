//! Connections of one endpoint between two requests, and how many of them may be open.
//!
//! Where their number is bounded, a place belongs to a request, not to a connection: one that waits has given its place back,
//! so that whoever is next in line for a place finds the connection as well. That a connection kept its place while it
//! waited was rejected: those in line would wait for a place while a connection lies idle.

use crate::config::PoolConfig;
use crate::h1::client::Connection;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

/// Waiting connections are kept in several heaps, one for every few threads, so that threads rarely meet.
const HEAPS: usize = 8;

/// What a request needs to have a connection open, where that is bounded.
pub(crate) type Place = Option<OwnedSemaphorePermit>;

pub(super) struct Kept {
    /// In boxes: they change hands many times a request. Where places are bounded all are in the first heap, since whoever
    /// finds none opens another: it must not look past one that is put where it has looked already.
    #[allow(clippy::vec_box, reason = "a box is what is handed around")]
    heaps: [Mutex<Vec<Box<Connection>>>; HEAPS],
    /// For each heap.
    most: usize,
    keep: Duration,
    places: Option<Arc<Semaphore>>,
}

impl Kept {
    pub(super) fn new(config: &PoolConfig) -> Self {
        let places = |most: usize| Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)));
        Self {
            heaps: Default::default(),
            most: config.idle_connections,
            keep: config.keep_alive.0,
            places: config.max_connections.map(places),
        }
    }

    /// A connection that waits, if one is still good and there is a place.
    pub(super) fn take(&self) -> Option<Box<Connection>> {
        let place = match &self.places {
            None => None,
            Some(places) => Some(Arc::clone(places).try_acquire_owned().ok()?),
        };
        let mut connection = self.pop()?;
        connection.place = place;
        Some(connection)
    }

    /// A place, in the order of asking. None if there is none in time.
    pub(super) async fn place(&self, within: Duration) -> Option<Place> {
        let Some(places) = &self.places else { return Some(None) };
        let place = tokio::time::timeout(within, Arc::clone(places).acquire_owned()).await;
        Some(Some(place.ok()?.ok()?))
    }

    /// A connection that waits, for whoever has a place already. Whoever has waited for one asks here before it opens
    /// another: only so are there never more open than places.
    pub(super) fn take_with(&self, place: &mut Place) -> Option<Box<Connection>> {
        place.as_ref()?;
        let mut connection = self.pop()?;
        connection.place = place.take();
        Some(connection)
    }

    /// Keeps a connection for the next request.
    pub(super) fn put(&self, mut connection: Box<Connection>) {
        connection.idle_since = Instant::now();
        connection.has_waited = true;
        let place = connection.place.take();
        let mut heap = self.own().lock().unwrap_or_else(PoisonError::into_inner);
        if heap.len() < self.most {
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
            heap.retain_mut(|connection| self.is_good(connection));
        }
    }

    fn is_good(&self, connection: &mut Connection) -> bool {
        connection.is_quiet() && connection.idle_since.elapsed() < self.keep
    }

    fn pop(&self) -> Option<Box<Connection>> {
        let (own, heaps) = if self.places.is_some() { (0, 1) } else { (heap(), HEAPS) };
        for step in 0..heaps {
            let heap = &self.heaps[(own + step) % HEAPS];
            loop {
                let Some(mut connection) = heap.lock().unwrap_or_else(PoisonError::into_inner).pop() else {
                    break;
                };
                if self.is_good(&mut connection) {
                    return Some(connection);
                }
            }
        }
        None
    }

    #[allow(clippy::vec_box, reason = "a box is what is handed around")]
    fn own(&self) -> &Mutex<Vec<Box<Connection>>> {
        &self.heaps[if self.places.is_some() { 0 } else { heap() }]
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
