//! Allocation counting. A test program declares the allocator, and counts on its own thread:
//!
//! ```
//! use tollgate_testing::allocations::{CountingAllocator, allocations, bytes_kept};
//!
//! #[global_allocator]
//! static ALLOCATOR: CountingAllocator = CountingAllocator;
//!
//! assert_eq!(allocations(|| Box::new(1)), 1);
//! assert_eq!(allocations(|| 1), 0);
//! assert_eq!(bytes_kept(|| Box::new([0_u8; 100])), 100);
//! ```

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system allocator with a counter.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    static BYTES: Cell<i64> = const { Cell::new(0) };
}

#[allow(unsafe_code, reason = "a counting allocator wraps the system's; it adds no memory access")]
// SAFETY: every call is passed unchanged to the system allocator, which upholds the contract.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        BYTES.with(|bytes| bytes.set(bytes.get().wrapping_add_unsigned(layout.size() as u64)));
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.with(|bytes| bytes.set(bytes.get().wrapping_sub_unsigned(layout.size() as u64)));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Returns how often `work` allocates on this thread; its result is dropped afterwards.
pub fn allocations<T>(work: impl FnOnce() -> T) -> u64 {
    let before = ALLOCATIONS.with(Cell::get);
    let result = work();
    let made = ALLOCATIONS.with(Cell::get) - before;
    drop(result);
    made
}

/// Returns how many bytes the result of `work` takes, if all of them are allocated on this thread; it is dropped afterwards.
pub fn bytes_kept<T>(work: impl FnOnce() -> T) -> i64 {
    let before = BYTES.with(Cell::get);
    let result = work();
    let kept = BYTES.with(Cell::get) - before;
    drop(result);
    kept
}
