//! Whatever another node sends as its sample, what is kept of it is bounded.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tollgate_control::properties::peer_sample(bytes));
