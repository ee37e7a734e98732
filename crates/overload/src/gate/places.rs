//! The places in flight to an upstream, the room of the requests that wait for one, and what is counted of both. The gates
//! that an upstream has one after the other, as its settings change, share them: the upstream is the same.
//!
//! A request that ends leaves its place to the next one on its thread, so that threads do not meet at one counter as long as
//! there are free places. A place that a thread keeps is counted as taken, so the limit is exact: never are more requests
//! in flight than places taken. A request that finds all taken collects what the threads keep before it waits.

use super::control::{first_bounds, room_size, unknown_latency};
use super::lock;
use crate::room::Room;
use crate::samples::BUCKETS;
use crate::striped::{Counts, Own, Padded, PerThread, Read};
use crate::threshold::DEMAND_BUCKETS;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Places beyond the limit for requests within a guarantee and critical ones, as a part of it.
const RESERVE: f64 = 0.5;
/// A thread keeps at most this part of the limit, and one place at least.
const KEPT_PART: u32 = 16;

pub(super) const GUARANTEED: usize = DEMAND_BUCKETS;
pub(super) const DENIED: usize = DEMAND_BUCKETS + 1;
pub(super) const LATE: usize = DEMAND_BUCKETS + 2;
const ARRIVALS: usize = DEMAND_BUCKETS + 3;

/// What a thread counts, and the free places that it keeps.
#[derive(Debug, Default)]
pub(super) struct ThreadPlaces {
    kept: AtomicU32,
    /// Requests until the next one whose latency is measured, and the state of the random numbers for it.
    pub(super) until_sample: AtomicU32,
    pub(super) random: AtomicU64,
    pub(super) admitted: [AtomicU64; 4],
    pub(super) completed: AtomicU32,
    pub(super) completions: Counts<BUCKETS>,
    /// The last three count requests within a guarantee, those that a limit denied or that failed, and those that had no
    /// result after more than the base latency, with the time they took.
    pub(super) arrivals: Counts<ARRIVALS>,
}

/// What the control step has read of the threads' counts.
#[derive(Debug)]
pub(super) struct CountsRead {
    completed: u32,
    completions: Read<BUCKETS>,
    arrivals: Read<ARRIVALS>,
}

#[derive(Debug)]
pub(super) struct Places<W> {
    /// Requests in flight, and free places that threads keep.
    taken: Padded<AtomicU32>,
    pub(super) bounds: Padded<Bounds>,
    pub(super) threads: PerThread<ThreadPlaces>,
    /// Held while places that threads keep are collected: until they are free, none seem to be.
    collecting: Mutex<()>,
    pub(super) read: Mutex<CountsRead>,
    /// Requests in flight that would have been shed but for the shadow mode.
    shadowed_in_flight: AtomicU32,
    pub(super) shed: [Padded<AtomicU64>; 4],
    pub(super) shadowed: [Padded<AtomicU64>; 4],
    pub(super) room: Mutex<Room<W>>,
}

/// What requests read and few write.
#[derive(Debug)]
pub(super) struct Bounds {
    pub(super) limit: AtomicU32,
    limit_with_reserve: AtomicU32,
    /// Places that a thread keeps at most.
    kept: AtomicU32,
    pub(super) waiting: AtomicU32,
    /// Requests that could wait for a place and get one in time, for the shadow mode.
    could_wait: AtomicU32,
    /// The latency of one request in so many is measured.
    pub(super) sample_period: AtomicU32,
    /// Base latency in microseconds.
    pub(super) base: AtomicU64,
}

impl<W> Places<W> {
    /// Creates the places of an upstream, as many as `limit`; `steady` is the limit that the room is made for.
    pub(super) fn new(limit: u32, steady: f64) -> Self {
        let bounds = Bounds {
            limit: AtomicU32::new(0),
            limit_with_reserve: AtomicU32::new(0),
            kept: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            could_wait: AtomicU32::new(room_size(steady) as u32),
            sample_period: AtomicU32::new(1),
            base: AtomicU64::new(unknown_latency().as_micros()),
        };
        let places = Self {
            taken: Padded(AtomicU32::new(0)),
            bounds: Padded(bounds),
            threads: PerThread::new(),
            collecting: Mutex::new(()),
            read: Mutex::new(CountsRead { completed: 0, completions: Read::new(), arrivals: Read::new() }),
            shadowed_in_flight: AtomicU32::new(0),
            shed: Default::default(),
            shadowed: Default::default(),
            room: Mutex::new(Room::new(first_bounds(steady))),
        };
        places.set_limit(limit);
        places
    }

    pub(super) fn set_limit(&self, limit: u32) {
        let Padded(bounds) = &self.bounds;
        bounds.limit.store(limit, Ordering::Relaxed);
        bounds.limit_with_reserve.store(with_reserve(limit), Ordering::Relaxed);
        bounds.kept.store((limit / KEPT_PART).max(1), Ordering::Relaxed);
    }

    /// Returns the limit for requests that may use the reserve, or may not.
    #[inline]
    fn limit_for(&self, is_patient: bool) -> u32 {
        match is_patient {
            true => self.bounds.0.limit_with_reserve.load(Ordering::Relaxed),
            false => self.bounds.0.limit.load(Ordering::Relaxed),
        }
    }

    /// Returns the number of requests that wait.
    #[inline]
    pub(super) fn waiting(&self) -> u32 {
        // In one order with places that become free: either the request that waits finds the place, or the one that frees it
        // finds the request.
        self.bounds.0.waiting.load(Ordering::SeqCst)
    }

    /// Sets the number of requests that wait.
    pub(super) fn set_waiting(&self, room: &Room<W>) {
        self.bounds.0.waiting.store(u32::try_from(room.waiting()).unwrap_or(u32::MAX), Ordering::SeqCst);
    }

    /// Returns the number of requests in flight.
    #[inline]
    pub(super) fn in_flight(&self) -> u32 {
        let kept = self.threads.sum(|own| own.kept.load(Ordering::Relaxed));
        self.taken.0.load(Ordering::Relaxed).saturating_sub(kept)
    }

    /// Takes a place in flight, if one is free.
    #[inline]
    pub(super) fn take(&self, own: &Own<'_, ThreadPlaces>, is_patient: bool) -> bool {
        let limit = self.limit_for(is_patient);
        // More are taken than the limit allows after it has fallen.
        (self.taken.0.load(Ordering::Relaxed) <= limit && own.value.take_kept()) || self.take_free(limit)
    }

    #[inline(never)]
    fn take_free(&self, limit: u32) -> bool {
        let next = |taken: u32| (taken < limit).then_some(taken + 1);
        let take = || self.taken.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).is_ok();
        take() || {
            self.collect_kept();
            take()
        }
    }

    /// Frees the places that threads keep.
    #[cold]
    fn collect_kept(&self) {
        let _alone = lock(&self.collecting);
        let kept = |own: &ThreadPlaces| match own.kept.load(Ordering::SeqCst) {
            0 => 0,
            _ => own.kept.swap(0, Ordering::SeqCst),
        };
        let kept: u32 = self.threads.all().map(kept).sum();
        if kept > 0 {
            self.taken.0.fetch_sub(kept, Ordering::SeqCst);
        }
    }

    /// Takes a place in flight whether or not one is free.
    pub(super) fn take_any(&self, own: &Own<'_, ThreadPlaces>) {
        if !own.value.take_kept() {
            self.taken.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    pub(super) fn set_could_wait(&self, count: u32) {
        self.bounds.0.could_wait.store(count, Ordering::Relaxed);
    }

    /// Takes a place in flight whether or not one is free. Returns whether there was one, or one to wait for, not counting
    /// requests that would have been shed.
    pub(super) fn take_beyond(&self, own: &Own<'_, ThreadPlaces>, is_patient: bool) -> bool {
        self.take_any(own);
        let counted = self.in_flight().saturating_sub(self.shadowed_in_flight.load(Ordering::Relaxed));
        let most =
            self.limit_for(is_patient).saturating_add(self.bounds.0.could_wait.load(Ordering::Relaxed));
        counted <= most
    }

    /// Counts a request that took a place as one that would have been shed.
    pub(super) fn count_shadowed(&self) {
        self.shadowed_in_flight.fetch_add(1, Ordering::Relaxed);
    }

    /// Frees the place of a request.
    #[inline]
    pub(super) fn free(&self, own: &Own<'_, ThreadPlaces>, is_shadowed: bool) {
        if is_shadowed {
            self.shadowed_in_flight.fetch_sub(1, Ordering::Relaxed);
        }
        let Padded(bounds) = &self.bounds;
        let keeps = own.value.kept.load(Ordering::Relaxed) < bounds.kept.load(Ordering::Relaxed)
            && self.taken.0.load(Ordering::Relaxed) <= bounds.limit.load(Ordering::Relaxed)
            && bounds.waiting.load(Ordering::Relaxed) == 0;
        match keeps {
            true => own.value.kept.fetch_add(1, Ordering::SeqCst),
            false => self.taken.0.fetch_sub(1, Ordering::SeqCst),
        };
    }

    /// Frees a place that no request took after all.
    pub(super) fn free_unused(&self) {
        self.taken.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ThreadPlaces {
    /// Takes a place that the thread keeps.
    #[inline]
    fn take_kept(&self) -> bool {
        let next = |kept: u32| kept.checked_sub(1);
        self.kept.fetch_update(Ordering::SeqCst, Ordering::Relaxed, next).is_ok()
    }
}

impl CountsRead {
    /// Takes the number of completions since the last call.
    pub(super) fn completed(&mut self, threads: &PerThread<ThreadPlaces>) -> u32 {
        let counts = threads.all().map(|own| own.completed.load(Ordering::Relaxed));
        let completed = counts.fold(0, u32::wrapping_add);
        completed.wrapping_sub(std::mem::replace(&mut self.completed, completed))
    }

    /// Takes the measured completions with this bucket's number in flight, and the microseconds they took.
    pub(super) fn completions(&mut self, threads: &PerThread<ThreadPlaces>, at: usize) -> (u32, u64) {
        self.completions.take(threads.all().map(|own| &own.completions), at)
    }

    /// Takes the arrivals at a place in the order of shedding, or of another kind.
    pub(super) fn arrivals(&mut self, threads: &PerThread<ThreadPlaces>, at: usize) -> (u32, u64) {
        self.arrivals.take(threads.all().map(|own| &own.arrivals), at)
    }
}

fn with_reserve(limit: u32) -> u32 {
    (f64::from(limit) * (1.0 + RESERVE)).ceil() as u32
}
