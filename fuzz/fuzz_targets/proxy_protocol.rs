//! Whatever bytes a connection begins with and however they are cut, a PROXY header is read in one way, and no byte of the
//! client's is taken for its.
#![no_main]

use tollgate_http::proxy_protocol::{MAX_HEADER, read};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let whole = read(bytes);
    if let Ok(Some(proxied)) = whole {
        assert!(proxied.length <= bytes.len().min(MAX_HEADER));
        assert_eq!(read(&bytes[..proxied.length]), whole, "what follows changes it");
        assert_eq!(read(&bytes[..proxied.length - 1]), Ok(None), "it ends before its end");
    }
    if bytes.len() >= MAX_HEADER {
        assert_ne!(whole, Ok(None), "a listener would wait for ever");
    }
    // Once something is certain, more bytes do not change it.
    for cut in (0..bytes.len()).step_by(bytes.len() / 64 + 1) {
        let part = read(&bytes[..cut]);
        assert!(part == Ok(None) || part == whole, "at {cut}: {part:?}, then {whole:?}");
    }
});
