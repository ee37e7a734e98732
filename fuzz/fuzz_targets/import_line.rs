//! Whatever a line of an import contains, it has one meaning.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tollgate_control::properties::import_line(bytes));
