//! What every counter store must do. If this fails, memory and the other stores no longer answer alike.

use std::sync::Arc;
use tollgate_core::ManualClock;
use tollgate_core::conformance::{block_on, run};
use tollgate_store::{MemoryConfig, MemoryStore};

#[test]
fn the_memory_store_passes_the_conformance_suite() {
    let make = async |clock: Arc<ManualClock>| {
        MemoryStore::new(&MemoryConfig::with_bytes(64 << 20), clock).expect("a store")
    };
    if let Err(broken) = block_on(run(make)) {
        panic!("{broken:?}");
    }
}
