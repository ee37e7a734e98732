//! Users from JSON Web Tokens that another program signed (`jwt/pyjwt.json`: keys, and a token by each of them).

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::{HeaderMap, Method, Uri};
use serde_json::Value;
use std::path::PathBuf;
use tollgate_core::Timestamp;
use tollgate_http::identity::{
    AmbiguousIdentity, ApiKeyConfig, CredentialVerifier, IdentityConfig, IdentityResolver, JwtConfig,
    RequestView, Unreadable,
};

/// Within the validity period of the tokens.
const NOW: u64 = 1_001_000;

fn fixture() -> Value {
    serde_json::from_str(include_str!("../jwt/pyjwt.json")).expect("JSON")
}

fn token(algorithm: &str) -> String {
    fixture()["tokens"][algorithm].as_str().expect("a token").to_owned()
}

fn jwt(text: &str) -> JwtConfig {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

/// Returns a resolver with the keys of the fixture, which has a `keys` member like any JWKS file.
fn verifying(text: &str) -> IdentityResolver {
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/jwt/pyjwt.json");
    IdentityResolver::new(&IdentityConfig {
        jwt: Some(JwtConfig { jwks: Some(file), ..jwt(text) }),
        ..IdentityConfig::default()
    })
    .expect("settings")
}

fn user(resolver: &IdentityResolver, peer: &str, token: &str, now: u64) -> [Option<String>; 3] {
    let mut headers = HeaderMap::new();
    headers.insert("authorization", format!("Bearer {token}").parse().expect("a value"));
    let (uri, peer) = (Uri::from_static("/"), peer.parse().expect("an address"));
    let request = RequestView::new(peer, &Method::GET, &uri, &headers);
    match resolver.resolve_direct(&request, Timestamp::from_secs(now)) {
        Ok(caller) => ["user_id", "tier", "api_key"].map(|name| caller.get(name).map(str::to_owned)),
        Err(AmbiguousIdentity::Token(_)) => ANONYMOUS,
        Err(error) => panic!("{error}"),
    }
}

const ANONYMOUS: [Option<String>; 3] = [None, None, None];

fn alice() -> [Option<String>; 3] {
    [Some("alice".to_owned()), Some("pro".to_owned()), None]
}

/// Users with a valid token have their own limits; otherwise they would share those of an address.
#[test]
fn a_token_of_each_algorithm_is_accepted() {
    let resolver = verifying("{claims: {tier: plan}, issuer: 'https://issuer.test', audience: api}");
    for algorithm in ["RS256", "ES256", "EdDSA", "HS256"] {
        assert_eq!(user(&resolver, "192.0.2.1", &token(algorithm), NOW), alice(), "{algorithm}");
    }
}

/// An upstream whose library is more lenient would serve such a token as a user whose limits do not apply.
#[test]
fn a_token_that_is_not_accepted_is_refused_or_anonymous() {
    let good = token("HS256");
    for value in [
        format!("Bearer {good}x"),
        format!("Bearer {good}="),
        format!("Bearer {good}.x"),
        format!("Bearer {good} x"),
        format!("Bearer {}", &good[..good.len() - 1]),
        good.replace('.', ","),
    ] {
        let ask = |settings: &IdentityConfig| {
            let resolver = IdentityResolver::new(settings).expect("settings");
            let mut headers = HeaderMap::new();
            headers.insert("authorization", value.parse().expect("a value"));
            let uri = Uri::from_static("/");
            let request =
                RequestView::new("192.0.2.1".parse().expect("an address"), &Method::GET, &uri, &headers);
            let caller = resolver.resolve_direct(&request, Timestamp::from_secs(NOW));
            caller
                .map(|caller| ["user_id", "api_key"].map(|name| caller.get(name).map(str::to_owned)))
                .map_err(|error| error.status().as_u16())
        };
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/jwt/pyjwt.json");
        let refusing = IdentityConfig {
            jwt: Some(JwtConfig { jwks: Some(path), ..jwt("{}") }),
            ..IdentityConfig::default()
        };
        assert_eq!(ask(&refusing), Err(401), "{value}");
        let without_keys = ApiKeyConfig { header: None, bearer: false, ..ApiKeyConfig::default() };
        assert_eq!(ask(&IdentityConfig { api_key: without_keys, ..refusing.clone() }), Err(401), "{value}");
        let anonymous = IdentityConfig { unreadable: Unreadable::Anonymous, ..refusing };
        assert_eq!(ask(&anonymous), Ok([None, None]), "{value}");
    }
}

/// With a made-up token before the real one, a user would be anonymous here and authenticated at an upstream that reads
/// the last one.
#[test]
fn a_request_has_one_token() {
    let resolver = verifying("{}");
    let good = format!("Bearer {}", token("HS256"));
    let uri = Uri::from_static("/");
    let user_id = |lines: &[&str]| {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append("authorization", line.parse().expect("a value"));
        }
        let request =
            RequestView::new("192.0.2.1".parse().expect("an address"), &Method::GET, &uri, &headers);
        let caller = resolver.resolve_direct(&request, Timestamp::from_secs(NOW));
        caller.map(|caller| caller.get("user_id").map(str::to_owned)).map_err(|error| error.to_string())
    };
    assert_eq!(user_id(&[&good, &good]), Ok(Some("alice".to_owned())));
    for other in ["Bearer eyJh.e30.", "Basic x", "Bearer key"] {
        for lines in [[other, &good], [&good, other]] {
            let error = user_id(&lines).expect_err("two tokens");
            assert!(error.contains("`authorization`"), "{error}");
        }
    }
}

/// An accepted forgery would use up another caller's limit, or get a fresh one each time.
#[test]
fn a_modified_token_is_not_accepted() {
    let resolver = verifying("{claims: {tier: plan}}");
    for algorithm in ["RS256", "ES256", "EdDSA", "HS256"] {
        let good = token(algorithm);
        // Every character of the payload and the signature matters, except for the unused last bits of base64.
        let parts: Vec<&str> = good.split('.').collect();
        for at in (0..good.len() - 2).step_by(7) {
            let mut bytes = good.clone().into_bytes();
            bytes[at] = if bytes[at] == b'A' { b'B' } else { b'A' };
            let changed = String::from_utf8(bytes).expect("ASCII");
            let [user_id, ..] = user(&resolver, "192.0.2.1", &changed, NOW);
            assert_eq!(user_id, None, "{algorithm} at {at}");
        }
        let claims = URL_SAFE_NO_PAD.encode(r#"{"sub":"root"}"#);
        assert_eq!(
            user(&resolver, "192.0.2.1", &format!("{}.{claims}.{}", parts[0], parts[2]), NOW)[0],
            None
        );
    }
    let claims = URL_SAFE_NO_PAD.encode(r#"{"sub":"root"}"#);
    for head in [r#"{"alg":"none"}"#, r#"{"alg":"HS256","kid":"r1"}"#, r#"{"alg":"RS256","crit":["x"]}"#] {
        let head = URL_SAFE_NO_PAD.encode(head);
        assert_eq!(user(&resolver, "127.0.0.1", &format!("{head}.{claims}."), NOW)[0], None, "{head}");
        assert_eq!(user(&resolver, "127.0.0.1", &format!("{head}.{claims}.AAAA"), NOW)[0], None, "{head}");
    }
}

/// The classic algorithm confusion: a public key must never be accepted as the secret of an HMAC.
#[test]
fn a_public_key_is_not_an_hmac_secret() {
    let resolver = verifying("{}");
    let keys = fixture();
    for member in ["n", "x"] {
        for key in keys["keys"].as_array().expect("keys") {
            let Some(public) = key[member].as_str() else { continue };
            for secret in [public.as_bytes().to_vec(), URL_SAFE_NO_PAD.decode(public).expect("base64url")] {
                let head = format!(r#"{{"alg":"HS256","kid":{}}}"#, key["kid"]);
                let message = format!(
                    "{}.{}",
                    URL_SAFE_NO_PAD.encode(head),
                    URL_SAFE_NO_PAD.encode(r#"{"sub":"root"}"#)
                );
                let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &secret);
                let signature = ring::hmac::sign(&key, message.as_bytes());
                let forged = format!("{message}.{}", URL_SAFE_NO_PAD.encode(signature));
                assert_eq!(user(&resolver, "192.0.2.1", &forged, NOW)[0], None);
            }
        }
    }
}

/// An expired token, one of another issuer or one for another service does not identify the caller.
#[test]
fn times_issuer_and_audience_are_checked() {
    let accepted =
        |text: &str, now: u64| user(&verifying(text), "192.0.2.1", &token("EdDSA"), now)[0].is_some();
    assert!(accepted("{}", 1_003_659), "within the leeway");
    assert!(!accepted("{}", 1_003_660), "expired");
    assert!(!accepted("{leeway: 0}", 1_003_600));
    assert!(accepted("{}", 999_940));
    assert!(!accepted("{}", 999_939), "not valid yet");
    assert!(!accepted("{issuer: 'https://other.test'}", NOW));
    assert!(!accepted("{audience: admin}", NOW));
    assert!(accepted("{audience: other}", NOW));
}

/// With `verified_by_proxy`, tokens are accepted from trusted proxies only.
#[test]
fn an_unverified_token_is_accepted_only_from_a_trusted_peer() {
    let settings = IdentityConfig {
        jwt: Some(jwt("{verified_by_proxy: true, claims: {tier: plan, level: level}}")),
        ..IdentityConfig::default()
    };
    let resolver = IdentityResolver::new(&settings).expect("settings");
    assert_eq!(user(&resolver, "127.0.0.1", &token("RS256"), NOW), alice());
    assert_eq!(user(&resolver, "192.0.2.1", &token("RS256"), NOW), ANONYMOUS);
}

/// An invalid file must be an error at startup, never an empty key set.
#[test]
fn invalid_key_files_are_rejected() {
    for (text, message) in [
        ("", "invalid JWKS"),
        ("{}", "keys"),
        (r#"{"keys": []}"#, "no key"),
        (r#"{"keys": [{"kty": "RSA", "n": "AQAB"}]}"#, "`e` is missing"),
        (r#"{"keys": [{"kty": "EC", "crv": "P-256", "x": "AAAA", "y": "AAAA"}]}"#, "32 bytes"),
        (r#"{"keys": [{"kty": "oct", "k": "c2hvcnQ"}]}"#, "at least 32"),
        (r#"{"keys": [{"kty": "EC", "crv": "P-521"}, {"kty": "RSA", "use": "enc"}]}"#, "no key"),
        (r#"{"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "!"}]}"#, "base64url"),
    ] {
        let path = std::env::temp_dir().join(format!("tollgate-http-jwks-{}", std::process::id()));
        std::fs::write(&path, text).expect("a file");
        let settings = IdentityConfig {
            jwt: Some(JwtConfig { jwks: Some(path.clone()), ..jwt("{}") }),
            ..IdentityConfig::default()
        };
        let error = IdentityResolver::new(&settings).expect_err(text).to_string();
        std::fs::remove_file(&path).expect("removed");
        assert!(error.contains(message) && error.contains("tollgate-http-jwks"), "{text}: {error}");
    }
}

/// Keys are rotated by changing a file. A token of a removed key must become invalid even if it was verified before,
/// and a partially written file must not invalidate any token.
#[test]
fn removed_keys_no_longer_verify_tokens() {
    let path = std::env::temp_dir().join(format!("tollgate-http-rotated-{}", std::process::id()));
    let with = |ids: &[&str]| {
        let all = fixture();
        let is_listed = |key: &&Value| ids.iter().any(|id| key["kid"] == **id);
        let keys: Vec<&Value> = all["keys"].as_array().expect("keys").iter().filter(is_listed).collect();
        std::fs::write(&path, serde_json::json!({ "keys": keys }).to_string()).expect("a file");
    };
    with(&["r1", "e1"]);
    let settings = IdentityConfig {
        jwt: Some(JwtConfig { jwks: Some(path.clone()), ..jwt("{}") }),
        ..IdentityConfig::default()
    };
    let tokens = CredentialVerifier::new(&settings).expect("settings");
    let both = [(); 2].map(|()| IdentityResolver::sharing(&settings, [], tokens.clone()).expect("settings"));
    let accepted = |algorithm: &str| {
        let each =
            both.each_ref().map(|resolver| user(resolver, "192.0.2.1", &token(algorithm), NOW)[0].is_some());
        assert_eq!(each[0], each[1], "they share their keys");
        each[0]
    };
    assert!(accepted("RS256") && accepted("RS256") && accepted("ES256") && !accepted("EdDSA"));
    assert!(!tokens.reload_if_changed().expect("a file"), "nothing has changed");
    with(&["e1", "d1"]);
    assert!(tokens.reload_if_changed().expect("a file"));
    assert!(!accepted("RS256"), "its key was removed");
    assert!(accepted("ES256") && accepted("EdDSA"));
    std::fs::write(&path, "{\"keys\": [").expect("a file");
    let error = tokens.reload_if_changed().expect_err("half a file").to_string();
    assert!(error.contains("tollgate-http-rotated"), "{error}");
    assert!(!tokens.reload_if_changed().expect("reported once"));
    assert!(accepted("ES256"), "the previous keys stay active");
    with(&["r1"]);
    assert!(tokens.reload_if_changed().expect("a file"));
    assert!(accepted("RS256") && !accepted("ES256"));
    std::fs::remove_file(&path).expect("removed");
}
