//! The calls of a connection that are in progress. Each has a place with a waker of its own, which notes the place and wakes
//! the connection; so that only those calls are polled that can go on, and a call that begins needs no memory but that of an
//! earlier one.

use futures_util::task::AtomicWaker;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Wake, Waker};
use tokio::time::Instant;

/// Calls in places.
#[derive(Debug)]
pub(super) struct Calls<F> {
    places: Vec<Place<F>>,
    free: Vec<u32>,
    woken: Arc<Woken>,
    capacity: usize,
}

/// A place of a call, which is used again by later ones.
#[derive(Debug)]
struct Place<F> {
    call: Pin<Box<Option<F>>>,
    waker: Waker,
    stream: u32,
    deadline: Option<Instant>,
}

/// The places that were woken, a bit for each.
#[derive(Debug)]
struct Woken {
    connection: AtomicWaker,
    places: Box<[AtomicU64]>,
}

struct PlaceWaker {
    woken: Arc<Woken>,
    place: u32,
}

impl Wake for PlaceWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let (word, bit) = (self.place as usize / 64, self.place % 64);
        self.woken.places[word].fetch_or(1 << bit, Ordering::Release);
        self.woken.connection.wake();
    }
}

impl<F> Calls<F> {
    /// Creates places for so many calls. They take memory when they are used.
    pub(super) fn new(capacity: usize) -> Self {
        let places = (0..capacity.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let woken = Arc::new(Woken { connection: AtomicWaker::new(), places });
        Self { places: Vec::new(), free: Vec::new(), woken, capacity }
    }

    /// Registers the task of the connection.
    pub(super) fn register(&self, cx: &Context<'_>) {
        self.woken.connection.register(cx.waker());
    }

    /// Returns the number of calls in progress.
    pub(super) const fn running(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Puts a call in a place; `None` if all are taken.
    pub(super) fn insert(&mut self, stream: u32, call: F) -> Option<u32> {
        let place = match self.free.pop() {
            Some(place) => place,
            None if self.places.len() == self.capacity => return None,
            None => {
                let place = self.places.len() as u32;
                let waker = Waker::from(Arc::new(PlaceWaker { woken: Arc::clone(&self.woken), place }));
                self.places.push(Place { call: Box::pin(None), waker, stream, deadline: None });
                place
            }
        };
        let one = &mut self.places[place as usize];
        one.call.as_mut().set(Some(call));
        (one.stream, one.deadline) = (stream, None);
        Some(place)
    }

    /// Returns the call at a place, its waker and its stream.
    pub(super) fn get(&mut self, place: u32) -> Option<(Pin<&mut F>, &Waker, u32)> {
        let one = self.places.get_mut(place as usize)?;
        Some((one.call.as_mut().as_pin_mut()?, &one.waker, one.stream))
    }

    /// Drops the call at a place.
    pub(super) fn remove(&mut self, place: u32) {
        let one = &mut self.places[place as usize];
        if one.call.is_some() {
            one.call.as_mut().set(None);
            self.free.push(place);
        }
    }

    /// Gives the call at a place a deadline.
    pub(super) fn set_deadline(&mut self, place: u32, deadline: Instant) {
        self.places[place as usize].deadline = Some(deadline);
    }

    /// Returns whether `is` any call in progress.
    pub(super) fn any(&mut self, mut is: impl FnMut(Pin<&mut F>) -> bool) -> bool {
        self.running() > 0
            && self.places.iter_mut().any(|place| place.call.as_mut().as_pin_mut().is_some_and(&mut is))
    }

    /// Returns the places and streams of the calls whose deadline has passed, which have none any more, and when the next one
    /// passes.
    pub(super) fn take_overdue(&mut self, now: Instant) -> (Vec<(u32, u32)>, Option<Instant>) {
        let (mut overdue, mut next) = (Vec::new(), None);
        for (at, place) in self.places.iter_mut().enumerate() {
            match place.deadline.filter(|_| place.call.is_some()) {
                Some(deadline) if deadline <= now => {
                    place.deadline = None;
                    overdue.push((at as u32, place.stream));
                }
                Some(deadline) => next = Some(next.map_or(deadline, |next: Instant| deadline.min(next))),
                None => {}
            }
        }
        (overdue, next)
    }

    /// Takes the places that were woken from one word of 64.
    pub(super) fn take_woken(&self, word: usize) -> u64 {
        // Most words are never used.
        if word * 64 >= self.places.len() { 0 } else { self.woken.places[word].swap(0, Ordering::Acquire) }
    }

    /// Returns the number of words of [`Self::take_woken`].
    pub(super) fn words(&self) -> usize {
        self.places.len().div_ceil(64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::{Future, pending};
    use std::sync::atomic::AtomicUsize;

    #[derive(Default)]
    struct Counter(AtomicUsize);

    impl Wake for Counter {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn woken<F>(calls: &Calls<F>) -> Vec<u32> {
        let bits = |word: usize| {
            let taken = calls.take_woken(word);
            (0..64).filter(move |bit| taken >> bit & 1 == 1).map(move |bit| word as u32 * 64 + bit)
        };
        (0..calls.words()).flat_map(bits).collect()
    }

    /// A call that is not polled when it can go on is never answered.
    #[test]
    fn calls_that_are_woken_are_found_once() {
        let counter = Arc::new(Counter::default());
        let waker = Waker::from(Arc::clone(&counter));
        let mut calls = Calls::new(130);
        calls.register(&Context::from_waker(&waker));
        let places: Vec<_> = (0..130).map(|at| calls.insert(at, pending::<()>()).expect("room")).collect();
        assert_eq!((calls.insert(7, pending()), calls.running()), (None, 130));
        for at in [0, 63, 64, 129] {
            let (_, waker, stream) = calls.get(places[at]).expect("a call");
            assert_eq!(stream, at as u32);
            waker.wake_by_ref();
        }
        assert!(counter.0.load(Ordering::Relaxed) > 0, "the connection is woken");
        assert_eq!(woken(&calls), [0, 63, 64, 129]);
        assert!(woken(&calls).is_empty());
    }

    /// A client that leaves must not keep its call, and the place is used again.
    #[test]
    fn removed_calls_are_dropped_and_their_places_used_again() {
        let alive = Arc::new(());
        let call = |alive: &Arc<()>| {
            let alive = Arc::clone(alive);
            async move {
                let _alive = alive;
                pending::<()>().await;
            }
        };
        let mut calls = Calls::new(2);
        let first = calls.insert(1, call(&alive)).expect("room");
        let (future, waker, _) = calls.get(first).expect("a call");
        assert!(future.poll(&mut Context::from_waker(waker)).is_pending());
        assert_eq!(Arc::strong_count(&alive), 2);
        calls.remove(first);
        calls.remove(first);
        assert_eq!((Arc::strong_count(&alive), calls.running()), (1, 0));
        assert_eq!(calls.insert(3, call(&alive)), Some(first));
        assert!(calls.insert(5, call(&alive)).is_some() && calls.insert(7, call(&alive)).is_none());
    }

    #[tokio::test]
    async fn deadlines_are_found_in_any_order() {
        let now = Instant::now();
        let at = |millis| now + std::time::Duration::from_millis(millis);
        let mut calls = Calls::new(3);
        let places: Vec<_> =
            [1, 3, 5].map(|stream| calls.insert(stream, pending::<()>()).expect("room")).into();
        calls.set_deadline(places[0], at(30));
        calls.set_deadline(places[2], at(10));
        assert_eq!(calls.take_overdue(now), (vec![], Some(at(10))));
        assert_eq!(calls.take_overdue(at(10)), (vec![(places[2], 5)], Some(at(30))));
        assert_eq!(calls.take_overdue(at(10)), (vec![], Some(at(30))));
        calls.remove(places[0]);
        assert_eq!(calls.take_overdue(at(60)), (vec![], None));
    }
}
