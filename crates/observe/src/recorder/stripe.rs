//! Stripes: per-thread counters and capture buffers. Only one thread writes to a stripe, so counting is a load and a store
//! and no cache line moves between threads; readers sum over all stripes.
//!
//! A stripe outlives its thread, because its counts do; the next new thread takes it over.

use crate::metrics::labels::{LabelLayout, MAX_RULES, MAX_TIERS};
use crate::metrics::latency::Latencies;
use crate::recorder::capture::CaptureBuffer;
use crate::recorder::sampling::{FastRng, SampleRate, Sampling};
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Cells of one rule.
pub(crate) const CELLS: usize = 56;
/// Number of rules whose cells are allocated together.
const TOGETHER: usize = 16;
/// Protocols with separate latency histograms; all others count as `other`.
pub(crate) const PROTOCOLS: [&str; 6] = ["http", "rls", "resp", "gateway", "sdk", "other"];
/// Number of buckets for the remaining share of a limit; one more cell holds the sum in thousandths.
pub(crate) const TENTHS: usize = 10;

/// Adds to a cell that only this thread writes.
#[inline]
pub(crate) fn add(cell: &AtomicU64, units: u64) {
    cell.store(cell.load(Ordering::Relaxed).wrapping_add(units), Ordering::Relaxed);
}

/// Cells of some rules, on separate cache lines.
#[derive(Debug)]
#[repr(align(128))]
struct Chunk([AtomicU64; TOGETHER * CELLS]);

/// Counters and buffers of one thread.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Stripe {
    taken: AtomicBool,
    pub(crate) sample_rate: SampleRate,
    chunks: [OnceLock<Box<Chunk>>; MAX_RULES / TOGETHER],
    tiers: [[AtomicU64; TENTHS + 1]; MAX_TIERS],
    latencies: [Latencies; PROTOCOLS.len()],
    /// Capture buffers: the thread uses the one that the worker is not draining.
    pub(crate) buffers: [Mutex<CaptureBuffer>; 2],
    /// Decisions to be logged that did not fit.
    pub(crate) dropped: AtomicU64,
    /// Requests that a limit in shadow mode would have denied, regardless of the verdict.
    pub(crate) shadowed: AtomicU64,
}

impl Stripe {
    fn new() -> Self {
        Self {
            taken: AtomicBool::new(true),
            sample_rate: SampleRate::default(),
            chunks: [const { OnceLock::new() }; MAX_RULES / TOGETHER],
            tiers: [const { [const { AtomicU64::new(0) }; TENTHS + 1] }; MAX_TIERS],
            latencies: [const { Latencies::new() }; PROTOCOLS.len()],
            buffers: [Mutex::default(), Mutex::default()],
            dropped: AtomicU64::new(0),
            shadowed: AtomicU64::new(0),
        }
    }

    /// Returns the cells of a slot.
    #[inline]
    pub(crate) fn cells(&self, slot: u32) -> &[AtomicU64] {
        let (chunk, at) = (slot as usize / TOGETHER % self.chunks.len(), slot as usize % TOGETHER);
        let chunk = self.chunks[chunk]
            .get_or_init(|| Box::new(Chunk([const { AtomicU64::new(0) }; TOGETHER * CELLS])));
        &chunk.0[at * CELLS..][..CELLS]
    }

    /// Records the share of its limit that a caller of this tier has left, from 0 to 1.
    #[inline]
    pub(crate) fn remains(&self, tier: u16, share: f32) {
        // Rounded up by hand: without newer instructions `ceil` is a function call.
        let scaled = share * TENTHS as f32;
        let whole = scaled as i32;
        let tenth = if whole as f32 == scaled { whole - 1 } else { whole };
        let tenth = tenth.clamp(0, TENTHS as i32 - 1) as usize;
        let cells = &self.tiers[usize::from(tier) % MAX_TIERS];
        add(&cells[tenth], 1);
        add(&cells[TENTHS], u64::from((share * 1_000.0) as u16));
    }

    pub(crate) fn latencies(&self, protocol: usize) -> &Latencies {
        &self.latencies[protocol % PROTOCOLS.len()]
    }

    /// Adds the counts of one slot to `sums`.
    pub(crate) fn add_cells(&self, slot: usize, sums: &mut [u64; CELLS]) {
        let Some(chunk) = self.chunks.get(slot / TOGETHER).and_then(OnceLock::get) else { return };
        for (sum, cell) in sums.iter_mut().zip(&chunk.0[slot % TOGETHER * CELLS..]) {
            *sum += cell.load(Ordering::Relaxed);
        }
    }

    pub(crate) fn add_tier(&self, tier: usize, sums: &mut [u64; TENTHS + 1]) {
        for (sum, cell) in sums.iter_mut().zip(&self.tiers[tier]) {
            *sum += cell.load(Ordering::Relaxed);
        }
    }
}

/// Stripes of all threads that have made decisions.
#[derive(Debug)]
pub(crate) struct Stripes {
    /// Id of the telemetry instance: a thread may work for several.
    owner: u64,
    all: Mutex<Vec<Arc<Stripe>>>,
}

/// State that a thread keeps with its stripe; not shared.
pub(crate) struct ThreadState {
    owner: u64,
    pub(crate) stripe: Arc<Stripe>,
    pub(crate) layout: Option<Arc<LabelLayout>>,
    pub(crate) sampling: Sampling,
    /// Allowed decisions until the next logged one.
    pub(crate) until_log: u32,
    pub(crate) rng: FastRng,
}

impl Drop for ThreadState {
    fn drop(&mut self) {
        self.stripe.taken.store(false, Ordering::Release);
    }
}

thread_local! {
    static LOCALS: RefCell<Vec<ThreadState>> = const { RefCell::new(Vec::new()) };
}

impl Stripes {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { owner: NEXT.fetch_add(1, Ordering::Relaxed), all: Mutex::default() }
    }

    /// Runs a function with this thread's state.
    #[inline]
    pub(crate) fn with(&self, run: impl FnOnce(&mut ThreadState)) {
        LOCALS.with_borrow_mut(|locals| {
            let at = match locals.first() {
                Some(first) if first.owner == self.owner => 0,
                _ => self.find(locals),
            };
            run(&mut locals[at]);
        });
    }

    #[cold]
    fn find(&self, locals: &mut Vec<ThreadState>) -> usize {
        // A thread mostly stays with one instance, which is moved to the front.
        if let Some(at) = locals.iter().position(|local| local.owner == self.owner) {
            locals.swap(0, at);
            return 0;
        }
        // Drops the state of instances that no longer exist: nothing else refers to their stripes.
        locals.retain(|local| Arc::strong_count(&local.stripe) > 1);
        let mut all = self.all();
        let free = |stripe: &&Arc<Stripe>| {
            stripe.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
        };
        let stripe = match all.iter().find(free) {
            Some(stripe) => Arc::clone(stripe),
            None => {
                all.push(Arc::new(Stripe::new()));
                Arc::clone(&all[all.len() - 1])
            }
        };
        let rng = FastRng::new(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(all.len() as u64 + self.owner));
        locals.push(ThreadState {
            owner: self.owner,
            stripe,
            layout: None,
            sampling: Sampling::new(),
            until_log: 0,
            rng,
        });
        let last = locals.len() - 1;
        locals.swap(0, last);
        0
    }

    pub(crate) fn all(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Stripe>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Threads that start and stop must neither lose counts nor accumulate memory.
    #[test]
    fn a_stripe_is_reused_with_its_counts() {
        let stripes = Stripes::new();
        for _ in 0..10 {
            std::thread::scope(|scope| {
                // The stripe is released when the thread has ended, not when its closure returns.
                let thread = scope.spawn(|| stripes.with(|local| add(&local.stripe.cells(7)[3], 1)));
                thread.join().expect("no panic");
            });
        }
        let mut sums = [0; CELLS];
        stripes.all().iter().for_each(|stripe| stripe.add_cells(7, &mut sums));
        assert_eq!(sums[3], 10);
        assert_eq!(stripes.all().len(), 1, "sequential threads share one");
    }

    #[test]
    fn a_thread_that_records_for_two_has_a_stripe_for_each() {
        let (one, two) = (Stripes::new(), Stripes::new());
        for _ in 0..3 {
            one.with(|local| add(&local.stripe.cells(0)[0], 1));
            two.with(|local| add(&local.stripe.cells(0)[0], 10));
        }
        let sum = |stripes: &Stripes| {
            let mut sums = [0; CELLS];
            stripes.all().iter().for_each(|stripe| stripe.add_cells(0, &mut sums));
            sums[0]
        };
        assert_eq!((sum(&one), sum(&two)), (3, 30));
    }

    #[test]
    fn remaining_quota_is_counted_by_tenths() {
        let stripe = Stripe::new();
        for share in [0.0, 0.05, 0.1, 0.11, 0.95, 1.0] {
            stripe.remains(3, share);
        }
        let mut sums = [0; TENTHS + 1];
        stripe.add_tier(3, &mut sums);
        assert_eq!(sums, [3, 1, 0, 0, 0, 0, 0, 0, 0, 2, 2_210]);
    }
}
