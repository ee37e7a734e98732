//! Whatever message a gRPC client sends, its descriptors are bounded, and encoding is the inverse of decoding.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tollgate_server::properties::rls_request(bytes));
