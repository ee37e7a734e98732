//! Whatever body comes, what is accepted of it is bounded and has one meaning.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tollgate_server::properties::json_bodies(bytes));
