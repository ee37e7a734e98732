//! Whatever is sent as a token, only the one that was signed names its user; a key is counted as it was sent.
#![no_main]

use http::{HeaderMap, HeaderValue};
use ring::hmac;
use std::net::IpAddr;
use std::sync::LazyLock;
use tollgate_core::Timestamp;
use tollgate_http::identity::{IdentityConfig, IdentityResolver, RequestView};

const SECRET: &[u8] = b"0123456789abcdef0123456789abcdef";

fn encode(bytes: &[u8]) -> String {
    use base64::Engine;
    base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes)
}

static TOKEN: LazyLock<String> = LazyLock::new(|| {
    let claims = r#"{"sub":"alice","exp":2000000000}"#;
    let signed = format!("{}.{}", encode(br#"{"alg":"HS256","kid":"k"}"#), encode(claims.as_bytes()));
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, SECRET), signed.as_bytes());
    format!("{signed}.{}", encode(tag.as_ref()))
});

static RESOLVER: LazyLock<IdentityResolver> = LazyLock::new(|| {
    let file = std::env::temp_dir().join(format!("tollgate-fuzz-{}.json", std::process::id()));
    let key = encode(SECRET);
    std::fs::write(&file, format!(r#"{{"keys":[{{"kty":"oct","alg":"HS256","kid":"k","k":"{key}"}}]}}"#)).expect("a file");
    let settings: IdentityConfig =
        serde_json::from_value(serde_json::json!({"jwt": {"jwks": file}})).expect("settings");
    let resolver = IdentityResolver::new(&settings).expect("a resolver");
    let _ = std::fs::remove_file(file);
    resolver
});

/// Returns the user and the key of a request with these fields; `None` if it is refused.
fn caller(token: &[u8], key: Option<&[u8]>) -> Option<(Option<String>, Option<String>)> {
    let mut headers = HeaderMap::new();
    headers.insert("authorization", HeaderValue::from_bytes(&[b"Bearer ", token].concat()).ok()?);
    if let Some(key) = key {
        headers.insert("x-api-key", HeaderValue::from_bytes(key).ok()?);
    }
    let peer = IpAddr::from([203, 0, 113, 9]);
    let view = RequestView { peer, method: "GET", path: "/", authority: None, headers: &headers };
    let caller = RESOLVER.resolve_direct(&view, Timestamp::from_secs(1_700_000_000)).ok()?;
    Some((caller.get("user_id").map(str::to_owned), caller.get("api_key").map(str::to_owned)))
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    assert_eq!(caller(TOKEN.as_bytes(), None).expect("accepted").0.as_deref(), Some("alice"));
    // As it is, and as a change of the valid one: so many bytes are kept, then these follow.
    let kept = bytes.first().map_or(0, |first| usize::from(*first)).min(TOKEN.len());
    let changed = [&TOKEN.as_bytes()[..kept], bytes.get(1..).unwrap_or_default()].concat();
    for token in [bytes, &changed] {
        if token.trim_ascii() != TOKEN.as_bytes()
            && let Some((user, _)) = caller(token, None)
        {
            assert_eq!(user, None, "{:?}", String::from_utf8_lossy(token));
        }
    }
    if let Some((_, Some(key))) = caller(TOKEN.as_bytes(), Some(bytes)) {
        assert_eq!(key.as_bytes(), bytes.trim_ascii(), "a key is counted as it was sent");
    }
});
