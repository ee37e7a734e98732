//! Thread index: a small number that one running thread has alone, so that it can write to memory of its own without a lock.
//!
//! A thread takes the smallest free number when it needs one for the first time, and returns it when it ends. The next new
//! thread takes it over, with what was written under it: what the one before has done happened before.
//!
//! Memory in each thread's own storage was rejected: a thread works for several cells, gates and meters (in tests and
//! simulations for thousands), and the thread that adds up would have to find memory that comes and goes.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Indexes that are taken, one bit each.
static TAKEN: Mutex<u64> = Mutex::new(0);
/// One more than the highest index that was ever taken.
static USED: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The thread's index once it is known: [`NONE`] if it has none.
    static KNOWN: Cell<usize> = const { Cell::new(UNKNOWN) };
    static OWNED: Owned = Owned::take();
}

const UNKNOWN: usize = usize::MAX;
const NONE: usize = usize::MAX - 1;

/// The index of a thread until it ends; `None` if all were taken when it began.
struct Owned(Option<usize>);

/// Index of the current thread among those that run.
#[derive(Debug)]
pub struct ThreadIndex;

impl ThreadIndex {
    /// Maximum number of threads that have an index at the same time.
    pub const MAX: usize = u64::BITS as usize;

    /// Returns the index of this thread: less than [`Self::MAX`], and of no other thread that is running. `None` if it has
    /// none, or is ending.
    #[must_use]
    #[inline]
    pub fn current() -> Option<usize> {
        let known = KNOWN.get();
        if known < Self::MAX { Some(known) } else { Self::find(known) }
    }

    /// Returns one more than the highest index that any thread has had.
    #[must_use]
    pub fn used() -> usize {
        USED.load(Ordering::SeqCst)
    }

    #[cold]
    fn find(known: usize) -> Option<usize> {
        if known == NONE {
            return None;
        }
        let index = OWNED.try_with(|owned| owned.0).ok().flatten();
        KNOWN.set(index.unwrap_or(NONE));
        index
    }
}

fn taken() -> MutexGuard<'static, u64> {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Owned {
    fn take() -> Self {
        let mut taken = taken();
        let free = taken.trailing_ones() as usize;
        let index = (free < ThreadIndex::MAX).then_some(free);
        *taken |= taken.wrapping_add(1);
        if let Some(index) = index {
            USED.fetch_max(index + 1, Ordering::SeqCst);
        }
        Self(index)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // What the ending thread still does is no longer alone at its index.
        KNOWN.set(NONE);
        if let Some(index) = self.0 {
            *taken() &= !(1 << index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;
    use std::sync::Barrier;

    /// Returns the indexes of threads that run at the same time.
    fn indexes(threads: usize) -> Vec<usize> {
        let all_there = Barrier::new(threads);
        let one = || {
            let index = ThreadIndex::current();
            all_there.wait();
            assert_eq!(ThreadIndex::current(), index, "it stays");
            index
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
            threads.into_iter().filter_map(|thread| thread.join().expect("no panic")).collect()
        })
    }

    /// Two threads of one index would lose each other's units; if ended threads kept theirs, later ones would have none.
    #[test]
    fn running_threads_have_different_indexes_and_ended_ones_return_theirs() {
        for threads in [8, 8, 8, 8, 8, 8, 8, 8, 8, ThreadIndex::MAX + 8, 8] {
            let all = indexes(threads);
            let distinct: HashSet<usize> = all.iter().copied().collect();
            assert_eq!(distinct.len(), all.len(), "{all:?}");
            assert!(all.iter().all(|index| *index < ThreadIndex::MAX), "{all:?}");
            assert!(all.iter().all(|index| *index < ThreadIndex::used()), "{all:?}");
            // Other tests have some.
            assert!(all.len() >= threads.min(ThreadIndex::MAX / 2), "{}", all.len());
        }
    }
}
