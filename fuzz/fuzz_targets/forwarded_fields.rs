//! Whatever a client says of addresses, only trusted proxies are believed, and only what they have added.
#![no_main]

use http::{HeaderMap, HeaderName, HeaderValue};
use std::net::IpAddr;
use std::sync::LazyLock;
use tollgate_core::Timestamp;
use tollgate_http::identity::{IdentityConfig, IdentityResolver, RequestView};

const NAMES: [&str; 8] = [
    "x-forwarded-for",
    "forwarded",
    "x-real-ip",
    "x-forwarded-uri",
    "x-original-uri",
    "x-forwarded-method",
    "x-forwarded-host",
    "host",
];

static RESOLVER: LazyLock<IdentityResolver> = LazyLock::new(|| {
    let settings: IdentityConfig = serde_json::from_str(r#"{"trusted": ["127.0.0.0/8"]}"#).expect("settings");
    IdentityResolver::new(&settings).expect("a resolver")
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let mut headers = HeaderMap::new();
    for line in bytes.split(|byte| *byte == b'\n') {
        let Some((which, value)) = line.split_first() else { continue };
        let name = HeaderName::from_static(NAMES[*which as usize % NAMES.len()]);
        if let Ok(value) = HeaderValue::from_bytes(value) {
            headers.append(name, value);
        }
    }
    let (stranger, proxy): (IpAddr, IpAddr) = ([203, 0, 113, 9].into(), [127, 0, 0, 1].into());
    assert_eq!(RESOLVER.address(stranger, &headers), stranger, "a stranger is believed");
    for peer in [stranger, proxy] {
        let view = RequestView { peer, method: "GET", path: "/check", authority: None, headers: &headers };
        if let Ok(caller) = RESOLVER.resolve_forwarded(&view, "/check", Timestamp::from_secs(1)) {
            for (_, value) in caller.attributes() {
                assert!(value.len() <= 64 * 1024 && !value.contains('\0'));
            }
        }
    }
    // What the proxy adds at the end is what counts, whatever the client has sent before.
    headers.remove("forwarded");
    headers.remove("x-real-ip");
    headers.append("x-forwarded-for", HeaderValue::from_static("198.51.100.7"));
    assert_eq!(RESOLVER.address(proxy, &headers), IpAddr::from([198, 51, 100, 7]));
});
