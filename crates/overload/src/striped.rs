//! Counters that many threads write and one reads: each thread has its own cache lines.
//!
//! A thread owns its stripe, so that counting is a load and a store and not a locked instruction, which costs five times as
//! much. A reader therefore must not write: counts only rise, and it keeps what it has read before. The stripe of a thread that
//! ends, and what was counted there, goes to the next new thread. Threads beyond [`OWNED`] count in one stripe together, by
//! locked instructions.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use tollgate_core::ThreadIndex;

/// Stripes with one writer.
const OWNED: usize = ThreadIndex::MAX;
/// The stripe of all other threads.
const SHARED: usize = OWNED;

/// The data under these locks is consistent whenever a panic could happen.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A value with cache lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Padded<T>(pub(crate) T);

/// One `T` for each thread that asks for it. The list is not behind a pointer: a request looks its thread's up three times, and
/// what follows waits for it.
#[derive(Debug)]
pub(crate) struct PerThread<T>([OnceLock<Box<Padded<T>>>; OWNED + 1]);

/// The current thread's `T`.
#[derive(Debug)]
pub(crate) struct Own<'a, T> {
    pub(crate) value: &'a T,
    writer: Writer,
}

/// How the current thread writes to its stripe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writer {
    Alone,
    Shared,
}

impl<T: Default> PerThread<T> {
    pub(crate) fn new() -> Self {
        Self([const { OnceLock::new() }; OWNED + 1])
    }

    /// Returns the current thread's.
    #[inline]
    pub(crate) fn own(&self) -> Own<'_, T> {
        let at = ThreadIndex::current().unwrap_or(SHARED);
        let Padded(value) = &**self.0[at].get_or_init(Box::default);
        Own { value, writer: if at < OWNED { Writer::Alone } else { Writer::Shared } }
    }

    /// Returns the sum of a number of all threads.
    #[inline]
    pub(crate) fn sum(&self, number: impl Fn(&T) -> u32) -> u32 {
        let mut sum = 0_u32;
        for stripe in &self.0[..ThreadIndex::used()] {
            sum = sum.wrapping_add(stripe.get().map_or(0, |own| number(&own.0)));
        }
        sum.wrapping_add(self.0[SHARED].get().map_or(0, |own| number(&own.0)))
    }

    /// Returns those of all threads.
    pub(crate) fn all(&self) -> impl Iterator<Item = &T> {
        let used = &self.0[..ThreadIndex::used()];
        used.iter().chain(&self.0[SHARED..]).filter_map(|stripe| stripe.get().map(|own| &own.0))
    }
}

impl<T> Own<'_, T> {
    /// Adds to a counter of this thread's `T`.
    #[inline]
    pub(crate) fn add(&self, counter: impl FnOnce(&T) -> &AtomicU32, units: u32) {
        let counter = counter(self.value);
        match self.writer {
            Writer::Alone => {
                counter.store(counter.load(Ordering::Relaxed).wrapping_add(units), Ordering::Relaxed);
            }
            Writer::Shared => {
                counter.fetch_add(units, Ordering::Relaxed);
            }
        }
    }

    /// Adds to a longer counter of this thread's `T`.
    #[inline]
    pub(crate) fn add_long(&self, counter: impl FnOnce(&T) -> &AtomicU64, units: u64) {
        let counter = counter(self.value);
        match self.writer {
            Writer::Alone => {
                counter.store(counter.load(Ordering::Relaxed).wrapping_add(units), Ordering::Relaxed);
            }
            Writer::Shared => {
                counter.fetch_add(units, Ordering::Relaxed);
            }
        }
    }
}

/// `N` counters of a thread, and a sum beside each.
#[derive(Debug)]
pub(crate) struct Counts<const N: usize> {
    pub(crate) counts: [AtomicU32; N],
    pub(crate) sums: [AtomicU64; N],
}

impl<const N: usize> Default for Counts<N> {
    fn default() -> Self {
        Self { counts: [const { AtomicU32::new(0) }; N], sums: [const { AtomicU64::new(0) }; N] }
    }
}

/// What a reader has read of the counters of all threads.
#[derive(Debug)]
pub(crate) struct Read<const N: usize> {
    counts: [u32; N],
    sums: [u64; N],
}

impl<const N: usize> Read<N> {
    pub(crate) const fn new() -> Self {
        Self { counts: [0; N], sums: [0; N] }
    }

    /// Takes what was counted at `at` since the last call: the number of events, and the sum of their sizes.
    pub(crate) fn take<'c>(&mut self, threads: impl Iterator<Item = &'c Counts<N>>, at: usize) -> (u32, u64) {
        let (count, sum) = threads.fold((0u32, 0u64), |(count, sum), own| {
            let (counts, sums) = (&own.counts[at], &own.sums[at]);
            let count = count.wrapping_add(counts.load(Ordering::Relaxed));
            (count, sum.wrapping_add(sums.load(Ordering::Relaxed)))
        });
        let before = (self.counts[at], self.sums[at]);
        if count == before.0 {
            // The size of an event that is about to be counted.
            return (0, 0);
        }
        (self.counts[at], self.sums[at]) = (count, sum);
        (count.wrapping_sub(before.0), sum.wrapping_sub(before.1))
    }
}

/// `N` counters, and a sum beside each.
#[derive(Debug)]
pub(crate) struct Striped<const N: usize> {
    threads: PerThread<Counts<N>>,
    read: Mutex<Read<N>>,
}

impl<const N: usize> Striped<N> {
    pub(crate) fn new() -> Self {
        Self { threads: PerThread::new(), read: Mutex::new(Read::new()) }
    }

    /// Counts one event at `at`.
    #[inline]
    pub(crate) fn count(&self, at: usize) {
        self.threads.own().add(|own| &own.counts[at], 1);
    }

    /// Counts one event of this size at `at`.
    #[inline]
    pub(crate) fn add(&self, at: usize, amount: u64) {
        let own = self.threads.own();
        own.add(|own| &own.counts[at], 1);
        own.add_long(|own| &own.sums[at], amount);
    }

    /// Takes what was counted at `at` since the last call: the number of events, and the sum of their sizes.
    pub(crate) fn take(&self, at: usize) -> (u32, u64) {
        lock(&self.read).take(self.threads.all(), at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More threads than stripes, and threads that begin when others end: nothing is lost, and nothing counts twice.
    #[test]
    fn what_threads_count_adds_up() {
        let counters = Striped::<2>::new();
        let mut taken = (0, 0);
        for _ in 0..3 {
            std::thread::scope(|scope| {
                for thread in 0..2 * OWNED {
                    let counters = &counters;
                    scope.spawn(move || {
                        for _ in 0..500 {
                            counters.add(thread % 2, 3);
                        }
                    });
                }
                let (count, sum) = counters.take(1);
                taken = (taken.0 + count, taken.1 + sum);
            });
        }
        let (count, sum) = counters.take(1);
        taken = (taken.0 + count, taken.1 + sum);
        let half = 3 * OWNED as u32 * 500;
        assert_eq!((taken, counters.take(0)), ((half, u64::from(half) * 3), (half, u64::from(half) * 3)));
        assert_eq!((counters.take(0), counters.take(1)), ((0, 0), (0, 0)));
    }
}
