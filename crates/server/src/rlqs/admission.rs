//! Which streams the service serves if more are opened than it may have.
//!
//! While there is room, any. Beyond that a new stream displaces one of the connection that has the most, the one that has been
//! silent for longest, as long as its own connection has fewer after that: so a client that opens streams without end, over however few
//! connections, leaves a place to everyone else, and a proxy that bundles the streams of many Envoys keeps all of them while
//! there is room. If no connection has more, it displaces any stream that has been silent for [`IDLE`].
//!
//! Rejected: a maximum for each connection, which would be too small for a proxy or too large for a node; and first come, first
//! served, by which four connections had all places for ever.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;

/// Silence after which any new stream may displace one: six reports of an Envoy.
pub(super) const IDLE: Duration = Duration::from_secs(30);

/// The streams that are served, each of a connection `C`.
#[derive(Debug)]
pub(super) struct Admission<C: Copy + Eq + Hash> {
    most: usize,
    open: Mutex<Open<C>>,
}

#[derive(Debug)]
struct Open<C> {
    next: u64,
    streams: HashMap<u64, Admitted<C>>,
    /// The number of streams of each connection.
    connections: HashMap<C, usize>,
}

#[derive(Debug)]
struct Admitted<C> {
    connection: C,
    /// Its last report, or when it was opened.
    last_report: Instant,
    /// Ends it when dropped.
    _displace: oneshot::Sender<()>,
}

impl<C: Copy + Eq + Hash> Admission<C> {
    /// Serves at most so many streams.
    pub(super) fn new(most: usize) -> Arc<Self> {
        let open = Open { next: 0, streams: HashMap::new(), connections: HashMap::new() };
        Arc::new(Self { most, open: Mutex::new(open) })
    }

    /// Admits a stream of a connection. `None` if there is neither room nor a stream that it may displace.
    pub(super) fn admit(self: &Arc<Self>, connection: C, now: Instant) -> Option<Admittance<C>> {
        let mut open = self.lock();
        if open.streams.len() >= self.most {
            let displaced = open.displaced_by(connection, now)?;
            open.remove(displaced);
        }
        let id = open.next;
        open.next += 1;
        let (_displace, displaced) = oneshot::channel();
        open.streams.insert(id, Admitted { connection, last_report: now, _displace });
        *open.connections.entry(connection).or_default() += 1;
        drop(open);
        Some(Admittance { all: Arc::clone(self), id, displaced })
    }

    fn lock(&self) -> MutexGuard<'_, Open<C>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<C: Copy + Eq + Hash> Open<C> {
    /// Returns the stream that a new one of a connection displaces.
    fn displaced_by(&self, connection: C, now: Instant) -> Option<u64> {
        let own = self.connections.get(&connection).copied().unwrap_or(0);
        let most = self.connections.values().copied().max().unwrap_or(0);
        let longest_silent = |may_go: &dyn Fn(&Admitted<C>) -> bool| {
            let silent = self.streams.iter().filter(|(_, stream)| may_go(stream));
            silent.min_by_key(|(id, stream)| (stream.last_report, **id)).map(|(id, _)| *id)
        };
        if most > own + 1 {
            return longest_silent(&|stream| self.connections.get(&stream.connection) == Some(&most));
        }
        longest_silent(&|stream| now.saturating_duration_since(stream.last_report) >= IDLE)
    }

    fn remove(&mut self, id: u64) {
        let Some(stream) = self.streams.remove(&id) else { return };
        if let Some(count) = self.connections.get_mut(&stream.connection) {
            *count -= 1;
            if *count == 0 {
                self.connections.remove(&stream.connection);
            }
        }
    }
}

/// The place of a stream, until it is dropped.
#[derive(Debug)]
pub(super) struct Admittance<C: Copy + Eq + Hash> {
    all: Arc<Admission<C>>,
    id: u64,
    displaced: oneshot::Receiver<()>,
}

impl<C: Copy + Eq + Hash> Admittance<C> {
    /// Notes that the stream has reported.
    pub(super) fn record_report(&self, now: Instant) {
        if let Some(stream) = self.all.lock().streams.get_mut(&self.id) {
            stream.last_report = now;
        }
    }

    /// Waits until another stream has its place.
    pub(super) async fn displaced(&mut self) {
        let _ = (&mut self.displaced).await;
    }
}

impl<C: Copy + Eq + Hash> Drop for Admittance<C> {
    fn drop(&mut self) {
        self.all.lock().remove(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Streams in the order in which they were opened.
    struct Service {
        all: Arc<Admission<&'static str>>,
        streams: Vec<(&'static str, Admittance<&'static str>)>,
        now: Instant,
    }

    impl Service {
        fn new(most: usize) -> Self {
            Self { all: Admission::new(most), streams: Vec::new(), now: Instant::now() }
        }

        fn open(&mut self, connection: &'static str) -> bool {
            self.now += Duration::from_millis(1);
            let admitted = self.all.admit(connection, self.now);
            let is_admitted = admitted.is_some();
            self.streams.extend(admitted.map(|place| (connection, place)));
            is_admitted
        }

        /// Returns how many streams of a connection go on, and forgets the others.
        fn count(&mut self, connection: &str) -> usize {
            self.streams.retain_mut(|(_, place)| {
                place.displaced.try_recv() == Err(oneshot::error::TryRecvError::Empty)
            });
            self.streams.iter().filter(|(of, _)| *of == connection).count()
        }
    }

    /// One client with all places would leave every Envoy without assignments, for as long as it likes.
    #[test]
    fn a_new_stream_has_a_place_however_many_another_connection_opens() {
        let mut service = Service::new(100);
        assert!((0..100).all(|_| service.open("greedy")), "all places, while nobody else wants one");
        assert!(!service.open("greedy"));
        assert!((0..3).all(|_| service.open("envoy")));
        assert!((0..200).all(|_| !service.open("greedy")), "nor does it take them back");
        assert_eq!((service.count("envoy"), service.count("greedy")), (3, 97));
        while service.open("other") {}
        assert_eq!((service.count("envoy"), service.count("greedy"), service.count("other")), (3, 49, 48));
    }

    /// What reports is worth more than what was opened and left.
    #[test]
    fn the_longest_silent_stream_of_the_connection_with_the_most_is_displaced() {
        let mut service = Service::new(4);
        for connection in ["alone", "bundle", "bundle", "bundle"] {
            assert!(service.open(connection));
        }
        service.streams[1].1.record_report(service.now + Duration::from_secs(1));
        assert!(service.open("new"));
        assert_eq!((service.count("alone"), service.count("bundle"), service.count("new")), (1, 2, 1));
        assert_eq!(service.streams[1].1.id, 1, "the one that reported");
    }

    /// Many connections with a stream each cannot be told from many Envoys, but Envoys report.
    #[test]
    fn among_equals_only_a_silent_stream_is_displaced() {
        let mut service = Service::new(2);
        assert!(service.open("a") && service.open("b") && !service.open("c"));
        service.now += IDLE;
        service.streams[0].1.record_report(service.now);
        assert!(service.open("c") && !service.open("d"));
        assert_eq!((service.count("a"), service.count("b"), service.count("c")), (1, 0, 1));
    }

    #[test]
    fn a_stream_that_ends_leaves_its_place_once() {
        let mut service = Service::new(2);
        assert!(service.open("a") && service.open("a"));
        assert!(service.open("b"));
        assert_eq!(service.count("a"), 1, "and the displaced one is dropped");
        service.streams.clear();
        let open = service.all.lock();
        assert!(open.streams.is_empty() && open.connections.is_empty(), "{open:?}");
    }
}
