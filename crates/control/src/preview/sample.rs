//! The last traffic of this node, as much of it as fits: what published rules are rehearsed on.
//!
//! Callers are chosen, not requests: of a caller who is in the sample every request is, so that a limit with a counter for
//! each caller meets the rates that it met in truth. (One request in a thousand, each for a thousand, would charge a
//! thousand units to callers who asked once.) A caller is chosen by a hash of its name, so all threads agree without asking
//! each other; when there is too much, half of the callers go, and each that stays stands for twice as many. Two corrections:
//! a caller with very many requests is thinned, each that is kept standing for several of its own; and callers who make a
//! large part of the traffic are always in, since a sample without them would say nothing about it.
//!
//! All nodes of a database choose the same callers: their hash is keyed by the installation's secret. So what several nodes
//! remember can be put together (`merge`).
//!
//! A request that is not kept costs a hash, three loads and a countdown: no lock, no allocation.

use crate::preview::caller;
use crate::preview::merge::{SliceBudget, merge};
use crate::preview::sample_slice::{SampleSlice, is_in, keep_one_in};
use crate::preview::sampled_request::SampledRequest;
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tollgate_core::Clock;
use tollgate_engine::{Check, Decision, Observer};

/// A slice of time, in microseconds; each is bounded on its own, so that a rush does not push out what was before.
pub(crate) const SLICE: u64 = 10_000_000;
/// Slices that are remembered: five minutes.
pub(crate) const SLICES: usize = 30;
/// Requests of a slice.
pub(crate) const MAX_REQUESTS: usize = 2_048;
/// Bytes of a slice.
const MAX_BYTES: usize = 512 << 10;
/// Requests of one caller in a slice, before it is thinned.
const MAX_PER_CALLER: u32 = 64;
/// Places for thinning; callers who share one are thinned together.
const BUCKETS: usize = 1_024;
/// One request in so many is looked at for who makes most of the traffic.
const PROBE_ONE_IN: u32 = 64;
/// So many of these looks are remembered, and so many of them make a caller one of the large ones.
const PROBES: usize = 256;
const LARGE: usize = 8;
/// The mark of a place that a large caller has.
const LARGE_FLAG: u32 = 1 << 31;

#[derive(Default)]
struct SliceBuffer {
    number: u64,
    mask: u64,
    requests: Vec<SampledRequest>,
    bytes: usize,
    per_bucket: Vec<u32>,
}

/// The last traffic of this node.
pub struct TrafficSample {
    clock: Arc<dyn Clock>,
    /// The same on all nodes, so that they choose the same callers.
    hasher: foldhash::fast::FixedState,
    /// Callers are in whose number has none of these bits.
    mask: AtomicU64,
    /// By place: one request in how many is kept; marked where a large caller is.
    thin: Box<[AtomicU32]>,
    large: [AtomicU64; 16],
    probes: Box<[AtomicU64]>,
    next_probe: AtomicUsize,
    slices: Mutex<VecDeque<SliceBuffer>>,
}

thread_local! {
    static COUNTDOWN: Cell<u32> = const { Cell::new(0) };
}

impl TrafficSample {
    /// Nothing yet. Nodes with the same seed choose the same callers.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>, seed: u64) -> Self {
        Self {
            clock,
            hasher: foldhash::fast::FixedState::with_seed(seed),
            mask: AtomicU64::new(0),
            thin: (0..BUCKETS).map(|_| AtomicU32::new(1)).collect(),
            large: [const { AtomicU64::new(0) }; 16],
            probes: (0..PROBES).map(|_| AtomicU64::new(0)).collect(),
            next_probe: AtomicUsize::new(0),
            slices: Mutex::default(),
        }
    }

    /// What is remembered.
    #[must_use]
    pub fn slices(&self) -> Vec<SampleSlice> {
        let oldest = (self.clock.now().as_micros() / SLICE).saturating_sub(SLICES as u64);
        let slices = self.slices.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = slices.iter().filter(|slice| slice.number >= oldest);
        let one = |slice: &SliceBuffer| SampleSlice {
            number: slice.number,
            mask: slice.mask,
            requests: slice.requests.clone(),
        };
        recent.map(one).collect()
    }

    /// The same, in the order of time.
    #[must_use]
    pub fn requests(&self) -> Vec<SampledRequest> {
        merge([self.slices()], SliceBudget { requests: usize::MAX, bytes: usize::MAX })
    }

    fn is_large(&self, caller: u64) -> bool {
        self.large.iter().any(|large| large.load(Ordering::Relaxed) == caller)
    }

    /// Remembers who asked; now and then, finds out who asks most.
    #[cold]
    fn probe(&self, caller: u64) {
        let at = self.next_probe.fetch_add(1, Ordering::Relaxed) % PROBES;
        self.probes[at].store(caller, Ordering::Relaxed);
        if at != PROBES - 1 {
            return;
        }
        let mut seen: Vec<u64> = self.probes.iter().map(|look| look.load(Ordering::Relaxed)).collect();
        seen.sort_unstable();
        let mut large: Vec<(usize, u64)> = seen
            .chunk_by(|a, b| a == b)
            .filter(|same| same.len() >= LARGE && same[0] != 0)
            .map(|same| (same.len(), same[0]))
            .collect();
        large.sort_unstable_by(|a, b| b.cmp(a));
        for place in &self.thin {
            place.fetch_and(!LARGE_FLAG, Ordering::Relaxed);
        }
        for (at, slot) in self.large.iter().enumerate() {
            let caller = large.get(at).map_or(0, |(_, caller)| *caller);
            slot.store(caller, Ordering::Relaxed);
            if caller != 0 {
                self.thin[caller as usize % BUCKETS].fetch_or(LARGE_FLAG, Ordering::Relaxed);
            }
        }
    }

    #[cold]
    fn store(&self, check: &Check<'_>, caller: u64, own: u32) {
        let at = self.clock.now();
        let Some(mut kept) = SampledRequest::new(check, at, caller, own.into()) else { return };
        let number = at.as_micros() / SLICE;
        let mut slices = self.slices.lock().unwrap_or_else(PoisonError::into_inner);
        if slices.back().is_none_or(|last| last.number < number) {
            self.relax();
            slices.push_back(SliceBuffer { number, per_bucket: vec![0; BUCKETS], ..SliceBuffer::default() });
            while slices.len() > SLICES {
                slices.pop_front();
            }
        }
        let Some(slice) = slices.back_mut() else { return };
        let mask = self.mask.load(Ordering::Relaxed);
        slice.mask = mask;
        if !self.is_large(caller) {
            if !is_in(caller, mask) {
                return;
            }
            kept.callers = mask + 1;
        }
        let place = caller as usize % BUCKETS;
        slice.bytes += kept.bytes;
        slice.requests.push(kept);
        slice.per_bucket[place] += 1;
        if slice.per_bucket[place] > MAX_PER_CALLER {
            self.thin_out(slice, place);
        }
        if slice.requests.len() > MAX_REQUESTS || slice.bytes > MAX_BYTES {
            self.narrow(slice, mask << 1 | 1);
        }
    }

    /// A new slice may hold more than the last one could.
    fn relax(&self) {
        self.mask.store(self.mask.load(Ordering::Relaxed) >> 1, Ordering::Relaxed);
        for place in &self.thin {
            let word = place.load(Ordering::Relaxed);
            place.store(word & LARGE_FLAG | ((word & !LARGE_FLAG) / 2).max(1), Ordering::Relaxed);
        }
    }

    /// Keeps half of the requests of one place, each for twice as many.
    fn thin_out(&self, slice: &mut SliceBuffer, place: usize) {
        let word = self.thin[place].load(Ordering::Relaxed);
        let doubled = (word & !LARGE_FLAG).saturating_mul(2).min(1 << 30);
        self.thin[place].store(word & LARGE_FLAG | doubled, Ordering::Relaxed);
        slice.requests.retain_mut(|one| {
            if one.caller as usize % BUCKETS != place {
                return true;
            }
            one.own *= 2;
            keep_one_in(2)
        });
        Self::recount(slice);
    }

    /// Keeps half of the callers, each for twice as many; where all that is left are large ones, half of the requests.
    fn narrow(&self, slice: &mut SliceBuffer, mask: u64) {
        self.mask.store(mask, Ordering::Relaxed);
        slice.mask = mask;
        slice.requests.retain_mut(|one| {
            if self.is_large(one.caller) {
                return true;
            }
            one.callers = one.callers.max(mask + 1);
            is_in(one.caller, mask)
        });
        Self::recount(slice);
        if slice.requests.len() > MAX_REQUESTS || slice.bytes > MAX_BYTES {
            slice.requests.retain_mut(|one| {
                one.own *= 2;
                keep_one_in(2)
            });
            Self::recount(slice);
        }
    }

    fn recount(slice: &mut SliceBuffer) {
        slice.bytes = slice.requests.iter().map(|one| one.bytes).sum();
        slice.per_bucket.fill(0);
        for one in &slice.requests {
            slice.per_bucket[one.caller as usize % BUCKETS] += 1;
        }
    }
}

impl Observer for TrafficSample {
    #[inline]
    fn on_decision(&self, check: &Check<'_>, _: &Decision) {
        let Some(caller) = caller::number(&self.hasher, check) else { return };
        let left = COUNTDOWN.get();
        if left == 0 {
            COUNTDOWN.set(PROBE_ONE_IN);
            self.probe(caller);
        } else {
            COUNTDOWN.set(left - 1);
        }
        let word = self.thin[caller as usize % BUCKETS].load(Ordering::Relaxed);
        let within = is_in(caller, self.mask.load(Ordering::Relaxed));
        if !within && (word & LARGE_FLAG == 0 || !self.is_large(caller)) {
            return;
        }
        let many = word & !LARGE_FLAG;
        if many == 1 || keep_one_in(many) {
            self.store(check, caller, many);
        }
    }
}

impl std::fmt::Debug for TrafficSample {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrafficSample")
            .field("mask", &self.mask.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
