//! Who is asking: what a stranger can write changes nothing, what a trusted proxy says counts, and no value is unbounded.

use http::{HeaderMap, HeaderName, HeaderValue, Method, Uri};
use proptest::prelude::*;
use std::net::IpAddr;
use tollgate_core::Timestamp;
use tollgate_http::identity::{
    AmbiguousIdentity, ApiKeyConfig, IdentityConfig, IdentityResolver, RequestView, ResolvedCaller,
};

fn settings(text: &str) -> IdentityConfig {
    serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

fn who(text: &str) -> IdentityResolver {
    IdentityResolver::new(&settings(text)).unwrap_or_else(|error| panic!("{error} in {text}"))
}

fn headers(lines: &[(&str, &str)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in lines {
        let name = HeaderName::from_bytes(name.as_bytes()).expect("a name");
        headers.append(name, HeaderValue::from_bytes(value.as_bytes()).expect("a value"));
    }
    headers
}

/// All attributes of a request, as the engine gets them.
fn read(
    who: &IdentityResolver,
    peer: &str,
    method: &str,
    uri: &str,
    lines: &[(&str, &str)],
) -> Vec<(String, String)> {
    let headers = headers(lines);
    let (method, uri): (Method, Uri) = (method.parse().expect("a method"), uri.parse().expect("a target"));
    let asked = RequestView::new(peer.parse().expect("an address"), &method, &uri, &headers);
    let caller = who.resolve_direct(&asked, Timestamp::from_secs(1_001_000)).expect("one caller");
    caller.attributes().iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn one(who: &IdentityResolver, peer: &str, uri: &str, lines: &[(&str, &str)], name: &str) -> Option<String> {
    let all = read(who, peer, "GET", uri, lines);
    all.into_iter().find(|(key, _)| key == name).map(|(_, value)| value)
}

const TRUST: &str = "{trusted: [127.0.0.1, 10.0.0.0/8, '2001:db8:aa::/48'], trusted_headers: {tier: x-tier},
    jwt: {verified_by_proxy: true}, routes: ['GET /users/{id}']}";

/// Every header by which a proxy speaks for others.
const SPOKEN: [&str; 10] = [
    "x-forwarded-for",
    "forwarded",
    "x-real-ip",
    "x-forwarded-method",
    "x-forwarded-uri",
    "x-forwarded-host",
    "x-original-uri",
    "x-original-method",
    "x-original-host",
    "x-tier",
];

proptest! {
    /// Otherwise anyone is anyone: a fresh limit for each request, or somebody else's used up.
    #[test]
    fn what_a_stranger_writes_changes_nothing(
        peer in any::<u32>().prop_map(|bits| IpAddr::from(bits.to_be_bytes())),
        lines in proptest::collection::vec((proptest::sample::select(SPOKEN.to_vec()), "[ -~]{0,40}|127\\.0\\.0\\.1|10\\.1\\.1\\.1, 8\\.8\\.8\\.8|for=8\\.8\\.8\\.8"), 0..8),
    ) {
        let who = who(TRUST);
        prop_assume!(!who.trusts(peer));
        let token = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJyb290In0.";
        let bearer = format!("Bearer {token}");
        let mut lines: Vec<(&str, &str)> = lines.iter().map(|(name, value)| (*name, value.as_str())).collect();
        lines.push(("authorization", &bearer));
        let plain = read(&who, &peer.to_string(), "GET", "/users/1", &[]);
        prop_assert_eq!(&read(&who, &peer.to_string(), "GET", "/users/1", &lines), &plain);
        let (all, uri) = (headers(&lines), Uri::from_static("/check/users/1"));
        let asked = RequestView::new(peer, &Method::GET, &uri, &all);
        let caller = who.resolve_forwarded(&asked, "/check", Timestamp::ZERO).expect("nothing that counts can disagree");
        let found: Vec<_> = caller.attributes().iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        prop_assert_eq!(&found, &plain);
    }

    /// The oracle walks the whole chain from the right, hop by hop, and stops at the first it does not know.
    #[test]
    fn the_client_is_the_rightmost_that_is_no_proxy_of_ours(
        hops in proptest::collection::vec(proptest::sample::select(vec!["10.0.0.1", "10.9.9.9", "127.0.0.1", "8.8.8.8", "9.9.9.9", "::ffff:10.1.1.1", "::ffff:7.7.7.7", "unknown", "", "_hidden"]), 0..6),
        split in 0_usize..6,
        style in 0..2,
    ) {
        let peer = "10.0.0.250";
        let mut client = peer.to_owned();
        for hop in hops.iter().rev() {
            let Ok(address) = hop.parse::<IpAddr>() else { break };
            client = address.to_canonical().to_string();
            if !(client.starts_with("10.") || client == "127.0.0.1") {
                break;
            }
        }
        let (field, text, more) = if style == 0 {
            ("x-forwarded-for", TRUST.to_owned(), hops.iter().map(|hop| (*hop).to_owned()).collect::<Vec<_>>())
        } else {
            let quoted = |hop: &&str| if hop.contains(':') { format!("proto=http;For=\"[{hop}]:4711\";by=x") } else { format!("for={hop}") };
            ("forwarded", TRUST.replacen('{', "{forwarded: forwarded, ", 1), hops.iter().map(quoted).collect())
        };
        // A list may be spread over several lines.
        let split = split.min(more.len());
        let lines: Vec<String> = [&more[..split], &more[split..]].iter().filter(|part| !part.is_empty()).map(|part| part.join(", ")).collect();
        let lines: Vec<(&str, &str)> = lines.iter().map(|line| (field, line.as_str())).collect();
        prop_assert_eq!(one(&who(&text), peer, "/", &lines, "remote_address"), Some(client));
    }

    /// A million paths must not be a million keys.
    #[test]
    fn whatever_is_asked_for_there_are_few_endpoints(path in "/[a-z0-9/._~%-]{0,40}", method in "[A-Z]{1,8}") {
        let who = who(TRUST);
        let found = read(&who, "192.0.2.1", &method, &path, &[]);
        let endpoint = &found.iter().find(|(key, _)| key == "endpoint").expect("always there").1;
        let known = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"];
        let method = if known.contains(&method.as_str()) { method.as_str() } else { "OTHER" };
        prop_assert!(endpoint == "GET /users/{id}" || *endpoint == format!("{method} other"), "{endpoint}");
    }
}

/// A client behind one socket family or another is one client; who has a /64 has 2^64 addresses.
#[test]
fn addresses_are_folded_to_what_a_caller_owns() {
    let plain = who("{}");
    for (peer, is) in [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::", "2001:db8:1:2::"),
    ] {
        assert_eq!(one(&plain, peer, "/", &[], "remote_address").as_deref(), Some(is), "{peer}");
    }
    let whole = who("{ipv6_prefix: 128}");
    assert_eq!(one(&whole, "2001:db8::6", "/", &[], "remote_address").as_deref(), Some("2001:db8::6"));
    let ported = [("x-forwarded-for", "[2001:db8:1:2::9]:443")];
    assert_eq!(one(&plain, "127.0.0.1", "/", &ported, "remote_address").as_deref(), Some("2001:db8:1:2::"));
    let off = who("{forwarded: none}");
    let spoken = [("x-forwarded-for", "8.8.8.8")];
    assert_eq!(one(&off, "127.0.0.1", "/", &spoken, "remote_address").as_deref(), Some("127.0.0.1"));
}

/// What is agreed with a key is found by the key: every front must call its owner the same.
#[test]
fn api_keys_are_told_as_they_are_sent_and_found_where_they_may_be() {
    let plain = who("{}");
    for line in
        [("x-api-key", "secret"), ("authorization", "Bearer secret"), ("authorization", "bearer  secret ")]
    {
        assert_eq!(one(&plain, "192.0.2.1", "/", &[line], "api_key").as_deref(), Some("secret"), "{line:?}");
    }
    assert_eq!(one(&plain, "192.0.2.1", "/", &[("authorization", "Basic secret")], "api_key"), None);
    assert_eq!(one(&plain, "192.0.2.1", "/", &[("x-api-key", "")], "api_key"), None);
    let elsewhere = who("{api_key: {header: x-token, bearer: false}}");
    assert_eq!(one(&elsewhere, "192.0.2.1", "/", &[("authorization", "Bearer secret")], "api_key"), None);
    let found = one(&elsewhere, "192.0.2.1", "/", &[("x-token", "secret")], "api_key");
    assert_eq!(found.as_deref(), Some("secret"));
    // As long as an operator can name one; beyond that told apart all the same.
    let (longest, longer) = ("k".repeat(512), "k".repeat(513));
    let found = |key: &str| one(&plain, "192.0.2.1", "/", &[("x-api-key", key)], "api_key");
    assert_eq!(found(&longest).as_deref(), Some(longest.as_str()));
    assert!(found(&longer).is_some_and(|key| key.starts_with("sha256:") && key.len() == 39));
    assert_ne!(found(&longer), found(&"k".repeat(514)));
    let mut odd = HeaderMap::new();
    odd.insert("x-api-key", HeaderValue::from_bytes(b"caf\xe9").expect("a value"));
    let uri = Uri::from_static("/");
    let asked = RequestView::new("192.0.2.1".parse().expect("an address"), &Method::GET, &uri, &odd);
    let caller = plain.resolve_direct(&asked, Timestamp::ZERO).expect("one caller");
    assert!(caller.get("api_key").is_some_and(|key| key.starts_with("sha256:")), "{caller:?}");
    let lines = headers(&[("x-api-key", "sk_live_42424242")]);
    let asked = RequestView::new("192.0.2.1".parse().expect("an address"), &Method::GET, &uri, &lines);
    let shown = format!("{:?}", plain.resolve_direct(&asked, Timestamp::ZERO));
    assert!(shown.contains("sk_l…") && !shown.contains("sk_live"), "{shown}");
}

/// Otherwise a made-up key beside the real one is a fresh limit for each request.
#[test]
fn a_request_has_one_api_key() {
    let ask = |settings: &str, lines: &[(&str, &str)]| {
        let (who, headers, uri) = (who(settings), headers(lines), Uri::from_static("/check/a"));
        let asked = RequestView::new("192.0.2.1".parse().expect("an address"), &Method::GET, &uri, &headers);
        let direct = who.resolve_direct(&asked, Timestamp::ZERO);
        let forwarded = who.resolve_forwarded(&asked, "/check", Timestamp::ZERO);
        let told = |caller: Result<ResolvedCaller<'_>, AmbiguousIdentity>| {
            caller.map(|caller| caller.get("api_key").map(str::to_owned)).map_err(|error| error.to_string())
        };
        let (direct, forwarded) = (told(direct), told(forwarded));
        assert_eq!(direct, forwarded, "{lines:?}");
        direct
    };
    let (own, bearer) = (("x-api-key", "real"), ("authorization", "Bearer real"));
    let (other, made_up) = (("x-api-key", "x1"), ("authorization", "Bearer x1"));
    for (settings, lines, says) in [
        ("{}", [bearer, other], "who.api_key.bearer"),
        ("{}", [own, made_up], "who.api_key.header"),
        ("{}", [own, other], "`x-api-key`"),
        ("{}", [bearer, made_up], "`authorization`"),
        ("{api_key: {bearer: false}}", [other, own], "`x-api-key`"),
        ("{api_key: {header: x-token}}", [made_up, bearer], "`authorization`"),
        // What is no token that is read is a key, whatever it looks like.
        ("{}", [own, ("authorization", "Bearer eyJhbGciOiJub25lIn0.e30.")], "who.api_key.bearer"),
    ] {
        let error = ask(settings, &lines).expect_err("two keys");
        assert!(
            error.contains(says) && !error.contains("real") && !error.contains("x1"),
            "{lines:?}: {error}"
        );
    }
    let token = ("authorization", "Bearer eyJhbGciOiJub25lIn0.e30.");
    for (settings, lines) in [
        ("{}", [own, bearer]),
        ("{}", [own, own]),
        ("{}", [bearer, bearer]),
        ("{}", [own, ("x-api-key", "")]),
        ("{}", [bearer, ("x-api-key", " ")]),
        ("{}", [own, ("authorization", "Basic x1")]),
        ("{}", [("authorization", "Basic x1"), bearer]),
        ("{api_key: {bearer: false}}", [own, made_up]),
        ("{api_key: {header: x-token}}", [other, bearer]),
        ("{api_key: {header: null}}", [other, bearer]),
        ("{jwt: {verified_by_proxy: true}}", [own, token]),
    ] {
        assert_eq!(ask(settings, &lines), Ok(Some("real".to_owned())), "{settings} {lines:?}");
    }
}

/// A route that does not match is a limit that does not bite.
#[test]
fn paths_are_told_by_their_templates() {
    let routes = "{routes: ['GET /users/{id}', '/users/{id}/posts', 'GET /users/me', 'DELETE /users/{id}/posts', '/', '/files/{*rest}', 'PURGE /cache']}";
    let who = who(routes);
    for (method, path, endpoint) in [
        ("GET", "/users/17", "GET /users/{id}"),
        ("GET", "/users/17/", "GET /users/{id}"),
        ("GET", "//users/%31%37?x=/users/me", "GET /users/{id}"),
        ("GET", "/users;v=1/17;x=/users/me", "GET other"),
        ("GET", "/users;v=1/17;x=2", "GET /users/{id}"),
        ("POST", "/users/9;a/posts;b=c", "POST /users/{id}/posts"),
        ("GET", "/users/me", "GET /users/me"),
        ("GET", "/users/me/posts", "GET /users/{id}/posts"),
        ("POST", "/users/9/posts", "POST /users/{id}/posts"),
        ("DELETE", "/users/9/posts", "DELETE /users/{id}/posts"),
        ("POST", "/users/17", "POST other"),
        ("GET", "/", "GET /"),
        ("GET", "/files", "GET other"),
        ("PUT", "/files/a/b/c", "PUT /files/{*rest}"),
        ("PURGE", "/cache", "PURGE /cache"),
        ("BREW", "/cache", "OTHER other"),
        ("BREW", "/files/x", "OTHER /files/{*rest}"),
        ("GET", "/users", "GET other"),
        ("GET", "/users/1/2/3", "GET other"),
    ] {
        let found = read(&who, "192.0.2.1", method, path, &[]);
        let found = found.iter().find(|(key, _)| key == "endpoint").map(|(_, value)| value.as_str());
        assert_eq!(found, Some(endpoint), "{method} {path}");
    }
    let by_path = self::who("{unmatched: path}");
    for path in ["/login/", "/login;jsessionid=1", "/;a/login;b=c;d/"] {
        assert_eq!(
            one(&by_path, "192.0.2.1", path, &[], "endpoint").as_deref(),
            Some("GET /login"),
            "{path}"
        );
    }
}

/// A rule on an endpoint that no route tells would never bite, and nobody would know.
#[test]
fn endpoints_that_rules_name_are_routes_too() {
    let settings = settings("{routes: ['/users/{id}', 'GET /same/{id}']}");
    let named = [
        "POST /login",
        "GET /users/me",
        "GET /same/{name}",
        "login",
        "/bare",
        "GET nothing",
        "GET /a{b}",
        "POST /login",
    ];
    let who = IdentityResolver::with_endpoints(&settings, named).expect("settings");
    for (path, endpoint) in [
        ("/users/7", "GET /users/{id}"),
        ("/users/me", "GET /users/me"),
        ("/same/7", "GET /same/{id}"),
        ("/login", "GET other"),
        ("/bare", "GET other"),
    ] {
        assert_eq!(one(&who, "192.0.2.1", path, &[], "endpoint").as_deref(), Some(endpoint), "{path}");
    }
    let posted = read(&who, "192.0.2.1", "POST", "/login/", &[]);
    assert!(posted.contains(&("endpoint".to_owned(), "POST /login".to_owned())), "{posted:?}");
}

/// What is mapped is there; what only a proxy may say is there only from one; what is long is bounded.
#[test]
fn headers_become_attributes_as_mapped() {
    let who = who("{headers: {agent: user-agent}, trusted_headers: {tier: x-tier}}");
    let lines = [("user-agent", "curl"), ("x-tier", "gold"), ("host", "API.example.com:8443")];
    let stranger = read(&who, "192.0.2.1", "GET", "/a", &lines);
    let has =
        |all: &[(String, String)], key: &str, value: &str| all.iter().any(|(k, v)| k == key && v == value);
    assert!(has(&stranger, "agent", "curl") && has(&stranger, "host", "api.example.com"), "{stranger:?}");
    assert!(has(&stranger, "path", "/a"), "{stranger:?}");
    assert!(!stranger.iter().any(|(key, _)| key == "tier"), "{stranger:?}");
    assert!(has(&read(&who, "127.0.0.1", "GET", "/", &lines), "tier", "gold"));
    let long = "x".repeat(10_000);
    let found = one(&who, "192.0.2.1", "/", &[("user-agent", &long)], "agent").expect("still there");
    assert!(found.len() < 64 && found.starts_with("sha256:"), "{found}");
}

/// A proxy asks about another request than its own; where it was told two, one was forged.
#[test]
fn a_proxy_says_which_request_it_asks_about() {
    let who = who("{routes: ['GET /users/{id}', 'POST /login']}");
    let ask = |peer: &str, uri: &str, lines: &[(&str, &str)]| {
        let (headers, uri): (_, Uri) = (headers(lines), uri.parse().expect("a target"));
        let asked = RequestView::new(peer.parse().expect("an address"), &Method::GET, &uri, &headers);
        let caller = who.resolve_forwarded(&asked, "/check", Timestamp::ZERO);
        caller
            .map(|caller| [caller.get("endpoint"), caller.get("host")].map(|found| found.map(str::to_owned)))
    };
    let is = |endpoint: &str, host: Option<&str>| Ok([Some(endpoint.to_owned()), host.map(str::to_owned)]);
    let traefik = [
        ("x-forwarded-method", "POST"),
        ("x-forwarded-uri", "/login?deny_status=200"),
        ("x-forwarded-host", "a.b"),
    ];
    assert_eq!(ask("127.0.0.1", "/check", &traefik), is("POST /login", Some("a.b")));
    assert_eq!(ask("192.0.2.1", "/check", &traefik), is("GET other", None), "a stranger asks for itself");
    let nginx = [("x-original-uri", "/users/1"), ("x-original-method", "GET")];
    assert_eq!(ask("127.0.0.1", "/check", &nginx), is("GET /users/{id}", None));
    assert_eq!(ask("127.0.0.1", "/check/users/7?a", &[("host", "h:1")]), is("GET /users/{id}", Some("h")));
    let mixed = [
        ("x-original-uri", "/users/1"),
        ("x-forwarded-method", "POST"),
        ("x-forwarded-host", "forged"),
        ("host", "h"),
    ];
    assert_eq!(
        ask("127.0.0.1", "/check", &mixed),
        is("GET /users/{id}", Some("h")),
        "the other spelling is a caller's"
    );
    let both = [("x-original-uri", "/users/1"), ("x-forwarded-uri", "/other")];
    let error = ask("127.0.0.1", "/check", &both).expect_err("one is forged");
    assert!(error.to_string().contains("x-forwarded-uri"), "{error}");
    let doubled = [
        ("x-original-uri", "/a"),
        ("x-forwarded-uri", "/a"),
        ("x-original-method", "GET"),
        ("x-forwarded-method", "PUT"),
    ];
    assert!(ask("127.0.0.1", "/check", &doubled).is_err());
    let same = [("x-original-uri", "/users/1"), ("x-forwarded-uri", "/users/1")];
    assert_eq!(ask("127.0.0.1", "/check", &same), is("GET /users/{id}", None));
}

/// A setting that is passed over does not protect.
#[test]
fn settings_that_cannot_be_are_refused_with_what_to_write() {
    for (text, says) in [
        ("{trusted: [10.0.0.0/99]}", "10.0.0.0/8"),
        ("{trust: []}", "trust"),
        ("{forwarded: x-real-ip}", "x-forwarded-for"),
        ("{api_key: {heder: x}}", "heder"),
        ("{ipv6_prefix: 0}", "1 to 128"),
        ("{ipv6_prefix: 129}", "1 to 128"),
        ("{headers: {a: 'b c'}}", "no name of a header"),
        ("{headers: {remote_address: x-client}}", "another name"),
        ("{routes: [users]}", "GET /path"),
        ("{routes: ['get /users']}", "capitals"),
        ("{routes: ['/a{b}']}", "{id}"),
        ("{routes: ['/a;b']}", "`a;b` is no segment"),
        ("{routes: ['/{*rest}/a']}", "stands last"),
        ("{routes: ['/users/{id}', '/users/{name}']}", "same requests"),
        ("{routes: ['GET /a', 'POST /a', 'GET /a']}", "same requests"),
        ("{jwt: {}}", "verified_by_proxy"),
        ("{jwt: {jwks: /no/such/file}}", "/no/such/file"),
        ("{jwt: {jwks: /no/such/file, verified_by_proxy: true}}", "either"),
    ] {
        let error = match serde_saphyr::from_str::<IdentityConfig>(text) {
            Ok(settings) => IdentityResolver::new(&settings).expect_err(text).to_string(),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(says), "{text}: {error}");
    }
}

/// Hashing by a secret that is not there is hashing by none.
#[test]
fn a_secret_is_read_or_refused() {
    let path = std::env::temp_dir().join(format!("tollgate-http-secret-{}", std::process::id()));
    let settings = ApiKeyConfig { secret_file: Some(path.clone()), ..ApiKeyConfig::default() };
    let missing = settings.secret().expect_err("no file").to_string();
    std::fs::write(&path, "0123456789abcde\n").expect("a file");
    let short = settings.secret().expect_err("too short").to_string();
    std::fs::write(&path, "0123456789abcdef\n").expect("a file");
    let read = settings.secret();
    std::fs::remove_file(&path).expect("removed");
    assert!(
        missing.contains(path.to_str().expect("text")) && short.contains("16 bytes"),
        "{missing} {short}"
    );
    assert_eq!(read.expect("a secret").as_deref(), Some(b"0123456789abcdef".as_slice()));
    assert_eq!(ApiKeyConfig::default().secret().expect("none"), None);
}
