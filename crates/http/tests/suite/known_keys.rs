//! Known API keys: an invented key is no caller, whatever it looks like and however it is sent.

use http::{HeaderMap, HeaderValue, Method, Uri};
use ring::hmac;
use std::path::PathBuf;
use tollgate_core::Timestamp;
use tollgate_http::identity::{
    AmbiguousIdentity, CredentialVerifier, IdentityConfig, IdentityResolver, QuotaKeys, RequestView,
};

const SECRET: &str = "a secret of the issuer";

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tollgate-known-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        Self(path)
    }

    fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("a file");
        path
    }

    fn settings(&self, api_key: &str) -> IdentityConfig {
        let text = format!("{{trusted: [10.0.0.0/8], api_key: {api_key}}}");
        let mut settings: IdentityConfig =
            serde_saphyr::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"));
        settings.resolve(&self.0);
        settings
    }

    fn resolver(&self, api_key: &str) -> IdentityResolver {
        IdentityResolver::new(&self.settings(api_key)).unwrap_or_else(|error| panic!("{error} in {api_key}"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

type Resolved = Result<(Option<String>, Option<String>), AmbiguousIdentity>;

/// Returns the attributes `api_key` and `unverified` of a request.
fn resolve(resolver: &IdentityResolver, peer: &str, fields: &[(&'static str, &str)]) -> Resolved {
    let mut headers = HeaderMap::new();
    for (name, value) in fields {
        headers.append(*name, HeaderValue::from_str(value).expect("a value"));
    }
    let uri = Uri::from_static("/orders");
    let view = RequestView::new(peer.parse().expect("an address"), &Method::GET, &uri, &headers);
    let caller = resolver.resolve_direct(&view, Timestamp::ZERO)?;
    assert!(caller.get("remote_address").is_some());
    let get = |name: &str| caller.get(name).map(ToOwned::to_owned);
    Ok((get("api_key"), get("unverified")))
}

fn is_known(resolver: &IdentityResolver, key: &str) -> bool {
    let bearer = format!("Bearer {key}");
    let all = [("x-api-key", key), ("authorization", &*bearer)]
        .map(|field| resolve(resolver, "192.0.2.1", &[field]).expect("one caller"));
    assert_eq!(all[0], all[1], "wherever it is sent");
    match &all[0] {
        (Some(attribute), None) => *attribute == key,
        (None, Some(unverified)) if unverified == "api_key" => false,
        other => panic!("{key}: {other:?}"),
    }
}

fn with_hmac(body: &str, digits: usize) -> String {
    let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, SECRET.as_bytes()), body.as_bytes());
    let hex: String = tag.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{body}{}", &hex[..digits])
}

#[test]
fn a_format_admits_keys_with_its_checksum_alone() {
    let folder = Folder::new("formats");
    folder.write("secret", format!("{SECRET}\n"));
    let resolver = folder.resolver(
        "{known: {formats: [{prefix: tg_live_, checksum: hmac-sha256, secret_file: secret},
            {prefix: tg_live_long_, checksum: hmac-sha256, secret_file: secret, digits: 64},
            {prefix: old_, checksum: crc32}]}}",
    );
    let good = with_hmac("tg_live_7Kq2", 16);
    assert!(is_known(&resolver, &good));
    assert!(is_known(&resolver, &with_hmac("tg_live_long_7Kq2", 64)));
    // The checksum of everything before it, as zlib and gzip compute it.
    assert!(is_known(&resolver, "old_12345640bd00e6"));
    for invented in [
        "tg_live_invented".to_owned(),
        format!("{good}0"),
        good.to_uppercase(),
        good.replace("7Kq2", "7Kq3"),
        format!("tg_live_7Kq2{}", good["tg_live_7Kq2".len()..].to_uppercase()),
        with_hmac("tg_test_7Kq2", 16),
        with_hmac("xtg_live_7Kq2", 16),
        with_hmac("tg_live_7Kq2", 15),
        with_hmac("tg_live_", 16)[8..].to_owned(),
        "tg_live_".to_owned(),
        "old_".to_owned(),
        "old_00000000".to_owned(),
        with_hmac(&format!("tg_live_{}", "x".repeat(600)), 16),
    ] {
        assert!(!is_known(&resolver, &invented), "{invented}");
    }
}

#[test]
fn a_list_admits_its_keys_and_hashes_and_is_read_again() {
    let folder = Folder::new("list");
    let (long, hash) = ("k".repeat(600), "2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683");
    let path = folder.write("keys.txt", format!("# issued\none\n  two\r\nsha256:{hash}\n{long}\n"));
    let settings = folder.settings("{known: {file: keys.txt}}");
    let verifier = CredentialVerifier::new(&settings).expect("settings");
    let resolver = IdentityResolver::sharing(&settings, [], verifier.clone()).expect("settings");
    for (key, known) in [
        ("one", true),
        ("two", true),
        ("key", true),
        ("three", false),
        ("#", false),
        ("sha256:2c70e12b7a0646f92279f427c7b38e7334d8e5389cff167a1dc30e73f826b683", false),
    ] {
        assert_eq!(is_known(&resolver, key), known, "{key}");
    }
    let sent = resolve(&resolver, "192.0.2.1", &[("x-api-key", &long)]).expect("a caller").0;
    assert!(sent.is_some_and(|key| key.starts_with("sha256:")), "the attribute is its hash");
    assert_eq!(verifier.unknown_keys(), Some(6), "three keys, sent twice");

    let poll = || [(); 2].map(|()| verifier.reload_if_changed());
    assert_eq!(poll(), [Ok(false), Ok(false)]);
    std::fs::write(&path, "three\n").expect("a file");
    assert_eq!(poll(), [Ok(false), Ok(true)], "not while it may still be written");
    assert!(is_known(&resolver, "three") && !is_known(&resolver, "one"));
    for broken in ["", "four\nfive six\n", "sha256:12\n"] {
        std::fs::write(&path, broken).expect("a file");
        let error = poll()[1].clone().expect_err(broken);
        assert!(error.contains("keys.txt") && !error.contains("five"), "{error}");
        assert_eq!(verifier.reload_if_changed(), Ok(false), "reported once");
        assert!(is_known(&resolver, "three") && !is_known(&resolver, "four"), "the previous list stays");
    }
    std::fs::remove_file(&path).expect("removed");
    assert!(poll()[1].is_err() && is_known(&resolver, "three"), "also without the file");
    std::fs::write(&path, "one\n").expect("a file");
    assert_eq!(poll()[1], Ok(true));
    assert!(is_known(&resolver, "one"));
}

#[test]
fn quotas_and_proxies_say_which_keys_are_known() {
    let folder = Folder::new("quotas");
    let error = IdentityResolver::new(&folder.settings("{known: {quotas: true}}")).expect_err("no quotas");
    assert!(error.to_string().contains("--db"), "{error}");
    for (loaded, unknown_counts) in [(true, false), (false, true)] {
        let mut settings = folder.settings("{known: {quotas: true}}");
        let lookup = move |key: &str| if key == "paid" { Some(true) } else { loaded.then_some(false) };
        settings.api_key.quota_keys = Some(QuotaKeys::new(lookup));
        let resolver = IdentityResolver::new(&settings).expect("settings");
        assert!(is_known(&resolver, "paid"));
        assert_eq!(is_known(&resolver, "invented"), unknown_counts, "quotas loaded: {loaded}");
    }
    let resolver = folder.resolver("{known: {verified_by_proxy: true}}");
    let key = [("x-api-key", "any")];
    assert_eq!(resolve(&resolver, "10.0.0.1", &key), Ok((Some("any".to_owned()), None)));
    assert_eq!(resolve(&resolver, "192.0.2.1", &key), Ok((None, Some("api_key".to_owned()))));
}

#[test]
fn unknown_keys_count_as_configured() {
    let folder = Folder::new("unknown");
    folder.write("keys.txt", "known\n");
    let known = "known: {file: keys.txt}";
    let denying = folder.resolver(&format!("{{{known}, unknown: deny}}"));
    assert_eq!(
        resolve(&denying, "192.0.2.1", &[("x-api-key", "invented")]),
        Err(AmbiguousIdentity::UnknownKey)
    );
    assert_eq!(AmbiguousIdentity::UnknownKey.status(), 401);
    assert_eq!(resolve(&denying, "192.0.2.1", &[]), Ok((None, None)), "without a key");
    assert_eq!(
        resolve(&denying, "192.0.2.1", &[("x-api-key", "known")]),
        Ok((Some("known".to_owned()), None))
    );
    let counting = folder.resolver(&format!("{{{known}, unknown: key}}"));
    assert!(is_known(&counting, "invented"));
    // Two keys are still refused: the upstream might read the other one.
    let both = [("x-api-key", "known"), ("authorization", "Bearer invented")];
    for resolver in [&denying, &counting, &folder.resolver(&format!("{{{known}}}"))] {
        assert!(matches!(resolve(resolver, "192.0.2.1", &both), Err(AmbiguousIdentity::Keys(_))));
    }
}

#[test]
fn settings_that_say_nothing_are_refused() {
    let folder = Folder::new("settings");
    folder.write("short", "short");
    folder.write("secret", SECRET);
    folder.write("huge", vec![b'x'; (64 << 20) + 1]);
    for (settings, wrong) in [
        ("{known: {}}", "is empty"),
        ("{unknown: deny}", "nothing says which are known"),
        ("{known: {file: missing}}", "missing: cannot be read"),
        ("{known: {file: .}}", "is not a file"),
        ("{known: {file: huge}}", "huge: is larger than 64 MiB"),
        ("{known: {formats: [{prefix: '', checksum: crc32}]}}", "`prefix`"),
        ("{known: {formats: [{prefix: a b, checksum: crc32}]}}", "`prefix`"),
        (
            "{known: {formats: [{prefix: a, checksum: crc32, digits: 4}]}}",
            "neither `secret_file` nor `digits`",
        ),
        ("{known: {formats: [{prefix: a, checksum: hmac-sha256}]}}", "needs `secret_file`"),
        ("{known: {formats: [{prefix: a, checksum: hmac-sha256, secret_file: short}]}}", "too short"),
        (
            "{known: {formats: [{prefix: a, checksum: hmac-sha256, secret_file: secret, digits: 8}]}}",
            "16 to 64",
        ),
    ] {
        let error = IdentityResolver::new(&folder.settings(settings)).expect_err(settings).to_string();
        assert!(error.contains(wrong), "{settings}: {error}");
    }
}
