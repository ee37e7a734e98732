//! Whatever path comes, it becomes one canonical form, which stays as it is, or is refused.
#![no_main]

use http::HeaderMap;
use std::net::IpAddr;
use std::sync::LazyLock;
use tollgate_core::Timestamp;
use tollgate_http::identity::{IdentityConfig, IdentityResolver, RequestView};

static RESOLVER: LazyLock<IdentityResolver> =
    LazyLock::new(|| IdentityResolver::new(&IdentityConfig::default()).expect("a resolver"));

fn canonical(path: &str) -> Option<String> {
    let (peer, headers) = (IpAddr::from([203, 0, 113, 9]), HeaderMap::new());
    let view = RequestView { peer, method: "GET", path, authority: None, headers: &headers };
    let caller = RESOLVER.resolve_direct(&view, Timestamp::from_secs(1)).ok()?;
    caller.get("path").map(str::to_owned)
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Ok(path) = std::str::from_utf8(bytes) else { return };
    // Only what the parser of heads lets through becomes a path.
    if !path.starts_with('/') || tollgate_http::h1::head::check_path(path).is_err() {
        return;
    }
    let Some(once) = canonical(path) else { return };
    // A long path is counted by its hash.
    if !once.starts_with("sha256:") {
        assert_eq!(canonical(&once).as_ref(), Some(&once), "{path:?}");
        assert!(once.starts_with('/') && !once.contains("//"), "{path:?} became {once:?}");
        assert!(!once.split('/').any(|segment| segment == "." || segment == ".."), "{path:?} became {once:?}");
    }
});
