//! Where counters live.
//!
//! | module | what |
//! |---|---|
//! | [`memory`](MemoryStore) | counters of this process, in a fixed amount of memory, without locks on the usual path |
//!
//! Every store is a [`tollgate_core::CounterStore`] and passes `tollgate_core::conformance`.

mod memory;

pub use memory::{HugePages, MemoryConfig, MemoryError, MemoryFigures, MemoryStore};
