//! Thread index: a small number that one running thread has alone, so that it can write to memory of its own without a lock.
//!
//! A thread takes the smallest free number when it needs one for the first time, and returns it when it ends. The next new
//! thread takes it over, with what was written under it: what the one before has done happened before.
//!
//! A table in each thread's own storage was rejected: a thread works for several cells (in tests and simulations for
//! thousands), and whoever adds up would have to learn of tables that come and go.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum number of threads that have an index at the same time.
pub(crate) const MAX_THREADS: usize = 64;

/// Indexes that are taken, one bit each.
static TAKEN: Mutex<u64> = Mutex::new(0);

fn taken() -> MutexGuard<'static, u64> {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The index of a thread until it ends; `None` if all were taken when it began.
struct Index(Option<usize>);

impl Index {
    fn take() -> Self {
        let mut taken = taken();
        let free = taken.trailing_ones();
        let index = (free < u64::BITS).then_some(free as usize);
        *taken |= taken.wrapping_add(1);
        Self(index)
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        if let Some(index) = self.0 {
            *taken() &= !(1 << index);
        }
    }
}

thread_local! {
    static INDEX: Index = Index::take();
}

/// Returns the index of this thread: less than [`MAX_THREADS`], and of no other thread that is running.
#[inline]
pub(crate) fn current() -> Option<usize> {
    INDEX.try_with(|index| index.0).ok().flatten()
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
            let index = current();
            all_there.wait();
            assert_eq!(current(), index, "it stays");
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
        for threads in [8, 8, 8, 8, 8, 8, 8, 8, 8, MAX_THREADS + 8, 8] {
            let all = indexes(threads);
            let distinct: HashSet<usize> = all.iter().copied().collect();
            assert_eq!(distinct.len(), all.len(), "{all:?}");
            assert!(all.iter().all(|index| *index < MAX_THREADS), "{all:?}");
            // Other tests have some.
            assert!(all.len() >= threads.min(MAX_THREADS / 2), "{}", all.len());
        }
    }
}
