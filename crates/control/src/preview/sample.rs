//! Bounded sample of this node's recent traffic, for impact previews.
//!
//! The sample selects callers, not requests: every request of a selected caller is sampled, so that a limit with a
//! counter per caller sees its real rates. (One request in a thousand, each weighted by a thousand, would charge a
//! thousand units to callers that sent one request.) A caller is selected by a hash of its name, so that all threads
//! agree without communication; when there is too much traffic, half of the callers are dropped and the weight of the
//! others doubles. Two corrections: a caller with very many requests is thinned, and each kept request represents
//! several of its own; and callers that make up a large share of the traffic are always selected, since a sample
//! without them would not represent it.
//!
//! All nodes of a database select the same callers: the hash is keyed with the installation's secret. So the samples
//! of several nodes can be merged (`merge`).
//!
//! A request that is not sampled costs a hash, three loads and a countdown: no lock, no allocation.

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

/// Length of a time slice, in microseconds; each slice is bounded on its own, so that a burst does not evict earlier
/// traffic.
pub(crate) const SLICE: u64 = 10_000_000;
/// Number of slices kept: five minutes.
pub(crate) const SLICES: usize = 30;
/// Maximum number of requests per slice.
pub(crate) const MAX_REQUESTS: usize = 2_048;
/// Maximum size of a slice, in bytes.
const MAX_BYTES: usize = 512 << 10;
/// Number of requests of one caller per slice before it is thinned.
const MAX_PER_CALLER: u32 = 64;
/// Number of buckets for thinning; callers that share one are thinned together.
const BUCKETS: usize = 1_024;
/// One request in this many is probed, to find the callers with the most traffic.
const PROBE_ONE_IN: u32 = 64;
/// Number of recent probes kept; the next one is how many of them make a caller large.
const PROBES: usize = 256;
const LARGE: usize = 8;
/// Flag of a bucket that contains a large caller.
const LARGE_FLAG: u32 = 1 << 31;

#[derive(Default)]
struct SliceBuffer {
    number: u64,
    mask: u64,
    requests: Vec<SampledRequest>,
    bytes: usize,
    per_bucket: Vec<u32>,
}

/// Traffic sample of this node.
pub struct TrafficSample {
    clock: Arc<dyn Clock>,
    /// Keyed the same on all nodes, so that they select the same callers.
    hasher: foldhash::fast::FixedState,
    /// Selects the callers whose number has none of these bits.
    mask: AtomicU64,
    /// By bucket: one request in this many is kept; flagged if it contains a large caller.
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
    /// Creates an empty sample. Nodes with the same seed select the same callers.
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

    /// Returns the slices of the last five minutes.
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

    /// Returns the sampled requests, in time order.
    #[must_use]
    pub fn requests(&self) -> Vec<SampledRequest> {
        merge([self.slices()], SliceBudget { requests: usize::MAX, bytes: usize::MAX })
    }

    /// Reads the latest sampled request to a domain with this caller, that is, with the value of an attribute.
    pub fn last_request<T>(
        &self,
        domain: &str,
        caller: (&str, &str),
        read: impl FnOnce(&SampledRequest) -> T,
    ) -> Option<T> {
        let slices = self.slices.lock().unwrap_or_else(PoisonError::into_inner);
        let mut latest = slices.iter().rev().flat_map(|slice| slice.requests.iter().rev());
        latest.find(|one| &*one.domain == domain && one.entries().any(|entry| entry == caller)).map(read)
    }

    fn is_large(&self, caller: u64) -> bool {
        self.large.iter().any(|large| large.load(Ordering::Relaxed) == caller)
    }

    /// Records a probed caller; periodically finds the callers with the most traffic.
    #[cold]
    fn probe(&self, caller: u64) {
        let at = self.next_probe.fetch_add(1, Ordering::Relaxed) % PROBES;
        self.probes[at].store(caller, Ordering::Relaxed);
        if at != PROBES - 1 {
            return;
        }
        let mut seen: Vec<u64> = self.probes.iter().map(|probe| probe.load(Ordering::Relaxed)).collect();
        seen.sort_unstable();
        let mut large: Vec<(usize, u64)> = seen
            .chunk_by(|a, b| a == b)
            .filter(|same| same.len() >= LARGE && same[0] != 0)
            .map(|same| (same.len(), same[0]))
            .collect();
        large.sort_unstable_by(|a, b| b.cmp(a));
        for bucket in &self.thin {
            bucket.fetch_and(!LARGE_FLAG, Ordering::Relaxed);
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
        let Some(mut sampled) = SampledRequest::new(check, at, caller, own.into()) else { return };
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
            sampled.callers = mask + 1;
        }
        let bucket = caller as usize % BUCKETS;
        slice.bytes += sampled.bytes;
        slice.requests.push(sampled);
        slice.per_bucket[bucket] += 1;
        if slice.per_bucket[bucket] > MAX_PER_CALLER {
            self.thin_out(slice, bucket);
        }
        if slice.requests.len() > MAX_REQUESTS || slice.bytes > MAX_BYTES {
            self.narrow(slice, mask << 1 | 1);
        }
    }

    /// Widens the selection for a new slice, which may hold more than the last one could.
    fn relax(&self) {
        self.mask.store(self.mask.load(Ordering::Relaxed) >> 1, Ordering::Relaxed);
        for bucket in &self.thin {
            let state = bucket.load(Ordering::Relaxed);
            bucket.store(state & LARGE_FLAG | ((state & !LARGE_FLAG) / 2).max(1), Ordering::Relaxed);
        }
    }

    /// Drops half of the requests of one bucket and doubles the weight of the others.
    fn thin_out(&self, slice: &mut SliceBuffer, bucket: usize) {
        let state = self.thin[bucket].load(Ordering::Relaxed);
        let doubled = (state & !LARGE_FLAG).saturating_mul(2).min(1 << 30);
        self.thin[bucket].store(state & LARGE_FLAG | doubled, Ordering::Relaxed);
        slice.requests.retain_mut(|one| {
            if one.caller as usize % BUCKETS != bucket {
                return true;
            }
            one.own *= 2;
            keep_one_in(2)
        });
        Self::recount(slice);
    }

    /// Drops half of the callers and doubles the weight of the others; if only large callers are left, drops half of
    /// the requests.
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
        let state = self.thin[caller as usize % BUCKETS].load(Ordering::Relaxed);
        let within = is_in(caller, self.mask.load(Ordering::Relaxed));
        if !within && (state & LARGE_FLAG == 0 || !self.is_large(caller)) {
            return;
        }
        let one_in = state & !LARGE_FLAG;
        if one_in == 1 || keep_one_in(one_in) {
            self.store(check, caller, one_in);
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
