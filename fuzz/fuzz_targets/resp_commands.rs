//! Whatever bytes come and however they are cut, RESP commands are read in one way.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tollgate_server::properties::resp_commands(bytes));
