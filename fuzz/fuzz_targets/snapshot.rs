//! Whatever a snapshot file contains, what is read of it is the same after it is written.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tollgate_control::properties::snapshot(bytes));
