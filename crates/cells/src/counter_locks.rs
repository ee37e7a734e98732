//! Locks of counters whose states and what is kept beside them change together.
//!
//! What a counter can be debited is read before a report is applied, and a store may wait in between. Reports of two cells
//! that arrive together would both be given the same room: the store cuts off what the second one has too much, and nothing
//! records it. So of one counter, one change is made at a time. Locks are shared by counters, and taken in order.

use futures_util::lock::{Mutex, MutexGuard};
use smallvec::SmallVec;
use tollgate_core::CounterId;

const LOCKS: usize = u64::BITS as usize;

/// Locks that are held.
pub(crate) type Locked<'a> = SmallVec<[MutexGuard<'a, ()>; 1]>;

pub(crate) struct CounterLocks([Mutex<()>; LOCKS]);

impl Default for CounterLocks {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Mutex::new(())))
    }
}

impl CounterLocks {
    /// Waits until these counters are not being changed.
    pub(crate) async fn lock(&self, ids: impl Iterator<Item = CounterId>) -> Locked<'_> {
        let mut wanted = ids.fold(0_u64, |wanted, id| wanted | 1 << (id.0 % LOCKS as u64));
        let mut locked = SmallVec::new();
        while wanted != 0 {
            locked.push(self.0[wanted.trailing_zeros() as usize].lock().await);
            wanted &= wanted - 1;
        }
        locked
    }
}
