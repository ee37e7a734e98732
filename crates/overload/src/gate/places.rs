//! The places in flight to an upstream, the room of the requests that wait for one, and what is counted of both. The gates
//! that an upstream has one after the other, as its settings change, share them: the upstream is the same.

use super::control::{first_bounds, room_size, unknown_latency};
use super::entry::Ticket;
use crate::room::{Rank, Room};
use crate::samples::BUCKETS;
use crate::striped::{Padded, Striped};
use crate::threshold::DEMAND_BUCKETS;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Places beyond the limit for requests within a guarantee and critical ones, as a part of it.
const RESERVE: f64 = 0.5;

pub(super) const GUARANTEED: usize = DEMAND_BUCKETS;
pub(super) const DENIED: usize = DEMAND_BUCKETS + 1;
pub(super) const LATE: usize = DEMAND_BUCKETS + 2;

#[derive(Debug)]
pub(super) struct Places<W> {
    pub(super) in_flight: Padded<AtomicU32>,
    /// Of these, requests that would have been shed but for the shadow mode.
    shadowed_in_flight: AtomicU32,
    /// Requests that could wait for a place and get one in time, for the shadow mode.
    could_wait: AtomicU32,
    pub(super) limit: AtomicU32,
    limit_with_reserve: AtomicU32,
    pub(super) waiting: AtomicU32,
    pub(super) completions: Striped<BUCKETS>,
    /// The last three count requests within a guarantee, those that a limit denied or that failed, and those that had no
    /// result after more than the base latency, with the time they took.
    pub(super) arrivals: Striped<{ DEMAND_BUCKETS + 3 }>,
    /// Base latency in microseconds.
    pub(super) base: AtomicU64,
    pub(super) shed: [Padded<AtomicU64>; 4],
    pub(super) shadowed: [Padded<AtomicU64>; 4],
    pub(super) admitted: [Padded<AtomicU64>; 4],
    pub(super) room: Mutex<Room<W>>,
}

impl<W> Places<W> {
    /// Creates the places of an upstream, as many as `limit`; `steady` is the limit that the room is made for.
    pub(super) fn new(limit: u32, steady: f64) -> Self {
        Self {
            in_flight: Padded(AtomicU32::new(0)),
            shadowed_in_flight: AtomicU32::new(0),
            could_wait: AtomicU32::new(room_size(steady) as u32),
            limit: AtomicU32::new(limit),
            limit_with_reserve: AtomicU32::new(with_reserve(limit)),
            waiting: AtomicU32::new(0),
            completions: Striped::new(),
            arrivals: Striped::new(),
            base: AtomicU64::new(unknown_latency().as_micros()),
            shed: Default::default(),
            shadowed: Default::default(),
            admitted: Default::default(),
            room: Mutex::new(Room::new(first_bounds(steady))),
        }
    }

    pub(super) fn set_limit(&self, limit: u32) {
        self.limit.store(limit, Ordering::Relaxed);
        self.limit_with_reserve.store(with_reserve(limit), Ordering::Relaxed);
    }

    /// Returns the limit for requests of this rank.
    pub(super) fn limit_for(&self, rank: Rank) -> u32 {
        match rank.is_patient() {
            true => self.limit_with_reserve.load(Ordering::Relaxed),
            false => self.limit.load(Ordering::Relaxed),
        }
    }

    /// Takes a place in flight, if one is free. Returns how many are in flight then.
    pub(super) fn take(&self, rank: Rank) -> Option<u32> {
        let limit = self.limit_for(rank);
        let next = |in_flight: u32| (in_flight < limit).then_some(in_flight + 1);
        self.in_flight.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, next).ok().map(|before| before + 1)
    }

    pub(super) fn set_could_wait(&self, count: u32) {
        self.could_wait.store(count, Ordering::Relaxed);
    }

    /// Takes a place in flight whether or not one is free. Returns whether there was one, or one to wait for, not counting
    /// requests that would have been shed; and how many are in flight then.
    pub(super) fn take_beyond(&self, rank: Rank) -> (bool, u32) {
        let in_flight = self.in_flight.0.fetch_add(1, Ordering::AcqRel) + 1;
        let counted = in_flight.saturating_sub(self.shadowed_in_flight.load(Ordering::Relaxed));
        let most = self.limit_for(rank).saturating_add(self.could_wait.load(Ordering::Relaxed));
        (counted <= most, in_flight)
    }

    /// Counts a request that took a place as one that would have been shed.
    pub(super) fn count_shadowed(&self) {
        self.shadowed_in_flight.fetch_add(1, Ordering::Relaxed);
    }

    /// Frees the place of a request.
    pub(super) fn free(&self, ticket: &Ticket) {
        if ticket.is_shadowed {
            self.shadowed_in_flight.fetch_sub(1, Ordering::Relaxed);
        }
        self.in_flight.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn with_reserve(limit: u32) -> u32 {
    (f64::from(limit) * (1.0 + RESERVE)).ceil() as u32
}
