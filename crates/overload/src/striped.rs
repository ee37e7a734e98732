//! Counters that many threads write and one reads: each thread has its own cache lines.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

const STRIPES: usize = 8;

/// Returns the stripe of the current thread.
fn stripe() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static OWN: Cell<usize> = const { Cell::new(usize::MAX) };
    }
    OWN.with(|own| {
        if own.get() == usize::MAX {
            own.set(NEXT.fetch_add(1, Ordering::Relaxed) % STRIPES);
        }
        own.get()
    })
}

/// A value with cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Padded<T>(pub(crate) T);

/// `N` counters, and a sum beside each.
#[derive(Debug)]
pub(crate) struct Striped<const N: usize> {
    stripes: Box<[Padded<Stripe<N>>]>,
}

#[derive(Debug)]
struct Stripe<const N: usize> {
    counts: [AtomicU32; N],
    sums: [AtomicU64; N],
}

impl<const N: usize> Striped<N> {
    pub(crate) fn new() -> Self {
        let stripe = |_| {
            Padded(Stripe {
                counts: std::array::from_fn(|_| AtomicU32::new(0)),
                sums: std::array::from_fn(|_| AtomicU64::new(0)),
            })
        };
        Self { stripes: (0..STRIPES).map(stripe).collect() }
    }

    /// Counts one event at `at`.
    #[inline]
    pub(crate) fn count(&self, at: usize) {
        self.stripes[stripe()].0.counts[at].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts one event of this size at `at`.
    #[inline]
    pub(crate) fn add(&self, at: usize, amount: u64) {
        let Padded(stripe) = &self.stripes[stripe()];
        stripe.counts[at].fetch_add(1, Ordering::Relaxed);
        stripe.sums[at].fetch_add(amount, Ordering::Relaxed);
    }

    /// Takes what was counted at `at` since the last call: the number of events, and the sum of their sizes.
    pub(crate) fn take(&self, at: usize) -> (u32, u64) {
        self.stripes.iter().fold((0, 0), |(count, sum), Padded(stripe)| {
            let own = stripe.counts[at].swap(0, Ordering::Relaxed);
            let own_sum = if own == 0 { 0 } else { stripe.sums[at].swap(0, Ordering::Relaxed) };
            (count + own, sum + own_sum)
        })
    }
}
