//! Whatever bytes come, the filter of request heads neither panics nor lets through what could be read in two ways.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tollgate_http::h1::properties::request_head(bytes));
