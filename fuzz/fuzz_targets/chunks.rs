//! Whatever bytes come and however they are cut, the reader of chunks says the same.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tollgate_http::h1::properties::chunks(bytes));
