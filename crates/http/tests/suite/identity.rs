//! Identity: headers of untrusted clients have no effect, those of trusted proxies do, and all values are bounded.

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

fn resolver(text: &str) -> IdentityResolver {
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

/// Returns all attributes of a request, as the engine receives them.
fn read(
    resolver: &IdentityResolver,
    peer: &str,
    method: &str,
    uri: &str,
    lines: &[(&str, &str)],
) -> Vec<(String, String)> {
    let headers = headers(lines);
    let (method, uri): (Method, Uri) = (method.parse().expect("a method"), uri.parse().expect("a target"));
    let request = RequestView::new(peer.parse().expect("an address"), &method, &uri, &headers);
    let caller = resolver.resolve_direct(&request, Timestamp::from_secs(1_001_000)).expect("one caller");
    caller.attributes().iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

fn one(
    resolver: &IdentityResolver,
    peer: &str,
    uri: &str,
    lines: &[(&str, &str)],
    name: &str,
) -> Option<String> {
    let all = read(resolver, peer, "GET", uri, lines);
    all.into_iter().find(|(key, _)| key == name).map(|(_, value)| value)
}

const TRUST: &str = "{trusted: [127.0.0.1, 10.0.0.0/8, '2001:db8:aa::/48'], trusted_headers: {tier: x-tier},
    jwt: {verified_by_proxy: true}, routes: ['GET /users/{id}']}";

/// Every header that only a trusted proxy may set.
const PROXY_HEADERS: [&str; 10] = [
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
    /// Otherwise any client could get a fresh limit for each request, or use up another caller's.
    #[test]
    fn headers_of_untrusted_clients_have_no_effect(
        peer in any::<u32>().prop_map(|bits| IpAddr::from(bits.to_be_bytes())),
        lines in proptest::collection::vec((proptest::sample::select(PROXY_HEADERS.to_vec()), "[ -~]{0,40}|127\\.0\\.0\\.1|10\\.1\\.1\\.1, 8\\.8\\.8\\.8|for=8\\.8\\.8\\.8"), 0..8),
    ) {
        let resolver = resolver(TRUST);
        prop_assume!(!resolver.trusts(peer));
        let token = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJyb290In0.";
        let bearer = format!("Bearer {token}");
        let mut lines: Vec<(&str, &str)> = lines.iter().map(|(name, value)| (*name, value.as_str())).collect();
        lines.push(("authorization", &bearer));
        let plain = read(&resolver, &peer.to_string(), "GET", "/users/1", &[]);
        prop_assert_eq!(&read(&resolver, &peer.to_string(), "GET", "/users/1", &lines), &plain);
        let (all, uri) = (headers(&lines), Uri::from_static("/check/users/1"));
        let request = RequestView::new(peer, &Method::GET, &uri, &all);
        let caller = resolver.resolve_forwarded(&request, "/check", Timestamp::ZERO).expect("untrusted headers are not compared");
        let found: Vec<_> = caller.attributes().iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        prop_assert_eq!(&found, &plain);
    }

    /// The oracle walks the chain from the right, hop by hop, and stops at the first untrusted address.
    #[test]
    fn the_client_is_the_rightmost_untrusted_address(
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
        prop_assert_eq!(one(&resolver(&text), peer, "/", &lines, "remote_address"), Some(client));
    }

    /// A million paths must not become a million counter keys.
    #[test]
    fn the_number_of_endpoints_is_bounded(path in "/[a-z0-9/._~%-]{0,40}", method in "[A-Z]{1,8}") {
        let resolver = resolver(TRUST);
        if tollgate_http::identity::PathRules::default().canonical(&path).is_err() {
            return Ok(());
        }
        let found = read(&resolver, "192.0.2.1", &method, &path, &[]);
        let endpoint = &found.iter().find(|(key, _)| key == "endpoint").expect("always there").1;
        let known = ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"];
        let method = match method.as_str() {
            "HEAD" => "GET",
            method if known.contains(&method) => method,
            _ => "OTHER",
        };
        prop_assert!(endpoint == "GET /users/{id}" || *endpoint == format!("{method} other"), "{endpoint}");
    }
}

/// An IPv4-mapped address is the same client; a client with an IPv6 /64 has 2^64 addresses.
#[test]
fn addresses_are_reduced_to_the_network_of_a_caller() {
    let plain = resolver("{}");
    for (peer, is) in [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::", "2001:db8:1:2::"),
    ] {
        assert_eq!(one(&plain, peer, "/", &[], "remote_address").as_deref(), Some(is), "{peer}");
    }
    let whole = resolver("{ipv6_prefix: 128}");
    assert_eq!(one(&whole, "2001:db8::6", "/", &[], "remote_address").as_deref(), Some("2001:db8::6"));
    let ported = [("x-forwarded-for", "[2001:db8:1:2::9]:443")];
    assert_eq!(one(&plain, "127.0.0.1", "/", &ported, "remote_address").as_deref(), Some("2001:db8:1:2::"));
    let off = resolver("{forwarded: none}");
    let forwarded = [("x-forwarded-for", "8.8.8.8")];
    assert_eq!(one(&off, "127.0.0.1", "/", &forwarded, "remote_address").as_deref(), Some("127.0.0.1"));
}

/// A quota is looked up by the key, so every protocol must report it as it was sent.
#[test]
fn api_keys_are_read_from_each_configured_header_unchanged() {
    let plain = resolver("{}");
    for line in
        [("x-api-key", "secret"), ("authorization", "Bearer secret"), ("authorization", "bearer \t secret ")]
    {
        assert_eq!(one(&plain, "192.0.2.1", "/", &[line], "api_key").as_deref(), Some("secret"), "{line:?}");
    }
    assert_eq!(one(&plain, "192.0.2.1", "/", &[("authorization", "Basic YTpzZWNyZXQ=")], "api_key"), None);
    assert_eq!(one(&plain, "192.0.2.1", "/", &[("x-api-key", "")], "api_key"), None);
    let elsewhere = resolver("{api_key: {header: x-token, bearer: false}}");
    assert_eq!(one(&elsewhere, "192.0.2.1", "/", &[("authorization", "Bearer secret")], "api_key"), None);
    let found = one(&elsewhere, "192.0.2.1", "/", &[("x-token", "secret")], "api_key");
    assert_eq!(found.as_deref(), Some("secret"));
    // Unchanged up to the maximum length of a key in a quota; longer keys are replaced by distinct hashes.
    let (longest, longer) = ("k".repeat(512), "k".repeat(513));
    let found = |key: &str| one(&plain, "192.0.2.1", "/", &[("x-api-key", key)], "api_key");
    assert_eq!(found(&longest).as_deref(), Some(longest.as_str()));
    assert!(found(&longer).is_some_and(|key| key.starts_with("sha256:") && key.len() == 39));
    assert_ne!(found(&longer), found(&"k".repeat(514)));
    let uri = Uri::from_static("/");
    let lines = headers(&[("x-api-key", "sk_live_42424242")]);
    let request = RequestView::new("192.0.2.1".parse().expect("an address"), &Method::GET, &uri, &lines);
    let shown = format!("{:?}", plain.resolve_direct(&request, Timestamp::ZERO));
    assert!(shown.contains("sk_l…") && !shown.contains("sk_live"), "{shown}");
}

/// Otherwise a made-up key next to the real one would get a fresh limit for each request.
#[test]
fn a_request_has_one_api_key() {
    let api_key = |settings: &str, lines: &[(&str, &str)]| {
        let (resolver, headers, uri) = (resolver(settings), headers(lines), Uri::from_static("/check/a"));
        let request =
            RequestView::new("192.0.2.1".parse().expect("an address"), &Method::GET, &uri, &headers);
        let direct = resolver.resolve_direct(&request, Timestamp::ZERO);
        let forwarded = resolver.resolve_forwarded(&request, "/check", Timestamp::ZERO);
        let key = |caller: Result<ResolvedCaller<'_>, AmbiguousIdentity>| {
            caller.map(|caller| caller.get("api_key").map(str::to_owned)).map_err(|error| error.to_string())
        };
        let (direct, forwarded) = (key(direct), key(forwarded));
        assert_eq!(direct, forwarded, "{lines:?}");
        direct
    };
    let (own, bearer) = (("x-api-key", "real"), ("authorization", "Bearer real"));
    let (other, made_up) = (("x-api-key", "x1"), ("authorization", "Bearer x1"));
    for (settings, lines, message) in [
        ("{}", [bearer, other], "identity.api_key.bearer"),
        ("{}", [own, made_up], "identity.api_key.header"),
        ("{}", [own, other], "`x-api-key`"),
        ("{}", [bearer, made_up], "`authorization`"),
        ("{api_key: {bearer: false}}", [other, own], "`x-api-key`"),
        ("{api_key: {header: x-token}}", [made_up, bearer], "`authorization`"),
        // Without `jwt` settings, a bearer value is a key even if it looks like a token.
        ("{}", [own, ("authorization", "Bearer eyJhbGciOiJub25lIn0.e30.")], "identity.api_key.bearer"),
    ] {
        let error = api_key(settings, &lines).expect_err("two keys");
        assert!(
            error.contains(message) && !error.contains("real") && !error.contains("x1"),
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
        ("{}", [own, ("authorization", "Basic YTp4MQ==")]),
        ("{}", [("authorization", "Basic YTp4MQ=="), bearer]),
        ("{api_key: {bearer: false}}", [own, made_up]),
        ("{api_key: {header: x-token}}", [other, bearer]),
        ("{api_key: {header: null}}", [other, bearer]),
        ("{jwt: {verified_by_proxy: true}}", [own, token]),
    ] {
        assert_eq!(api_key(settings, &lines), Ok(Some("real".to_owned())), "{settings} {lines:?}");
    }
}

/// If a route does not match, limits on its endpoint are not enforced.
#[test]
fn paths_are_mapped_to_their_templates() {
    let routes = "{routes: ['GET /users/{id}', '/users/{id}/posts', 'GET /users/me', 'DELETE /users/{id}/posts', '/', '/files/{*rest}', 'PURGE /cache']}";
    let resolver = resolver(routes);
    for (method, path, endpoint) in [
        ("GET", "/users/17", "GET /users/{id}"),
        ("GET", "/users/17/", "GET /users/{id}"),
        ("GET", "/users//%31%37?x=/users/me", "GET /users/{id}"),
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
        let found = read(&resolver, "192.0.2.1", method, path, &[]);
        let found = found.iter().find(|(key, _)| key == "endpoint").map(|(_, value)| value.as_str());
        assert_eq!(found, Some(endpoint), "{method} {path}");
    }
    let by_path = self::resolver("{unmatched: path}");
    for path in ["/login/", "/login;jsessionid=1", "/;a/login;b=c;d/"] {
        assert_eq!(
            one(&by_path, "192.0.2.1", path, &[], "endpoint").as_deref(),
            Some("GET /login"),
            "{path}"
        );
    }
}

/// A rule on an endpoint without a route would never match, without any warning.
#[test]
fn endpoints_that_rules_name_are_routes_too() {
    let settings = settings("{routes: ['/users/{id}', 'GET /same/{id}', '/{*rest}']}");
    let named = [
        "GET /api/*",
        "GET /a*b/*",
        "POST /login",
        "GET /users/me",
        "GET /same/{name}",
        "login",
        "/bare",
        "GET nothing",
        "GET /a{b}",
        "POST /login",
    ];
    let resolver = IdentityResolver::with_endpoints(&settings, named).expect("settings");
    for (path, endpoint) in [
        ("/users/7", "GET /users/{id}"),
        ("/users/me", "GET /users/me"),
        ("/same/7", "GET /same/{name}"),
        ("/login", "GET /{*rest}"),
        ("/bare", "GET /{*rest}"),
        ("/api/7/8", "GET /api/{*rest}"),
        ("/api", "GET /{*rest}"),
    ] {
        assert_eq!(one(&resolver, "192.0.2.1", path, &[], "endpoint").as_deref(), Some(endpoint), "{path}");
    }
    let posted = read(&resolver, "192.0.2.1", "POST", "/login/", &[]);
    assert!(posted.contains(&("endpoint".to_owned(), "POST /login".to_owned())), "{posted:?}");
}

/// Mapped headers become attributes, trusted headers only from a trusted proxy, and long values are bounded.
#[test]
fn headers_become_attributes_as_mapped() {
    let resolver = resolver("{headers: {agent: user-agent}, trusted_headers: {tier: x-tier}}");
    let lines = [("user-agent", "curl"), ("x-tier", "gold"), ("host", "API.example.com:8443")];
    let untrusted = read(&resolver, "192.0.2.1", "GET", "/a", &lines);
    let has =
        |all: &[(String, String)], key: &str, value: &str| all.iter().any(|(k, v)| k == key && v == value);
    assert!(has(&untrusted, "agent", "curl") && has(&untrusted, "host", "api.example.com"), "{untrusted:?}");
    assert!(has(&untrusted, "path", "/a"), "{untrusted:?}");
    assert!(!untrusted.iter().any(|(key, _)| key == "tier"), "{untrusted:?}");
    assert!(has(&read(&resolver, "127.0.0.1", "GET", "/", &lines), "tier", "gold"));
    let long = "x".repeat(10_000);
    let found = one(&resolver, "192.0.2.1", "/", &[("user-agent", &long)], "agent").expect("still there");
    assert!(found.len() <= 8_192 && found.starts_with("xxx") && found.ends_with("xxx"), "{found}");
    // A rule with a pattern (`*bot*`) must match whatever else a client writes around it.
    let around = format!("{0}bot{0}", "x".repeat(400));
    assert_eq!(
        one(&resolver, "192.0.2.1", "/", &[("user-agent", &around)], "agent").as_deref(),
        Some(&*around)
    );
    // HTTP/2 carries spaces that HTTP/1 removes, and an upstream reads both alike.
    for spaced in [" curl", "curl \t", "\t curl  "] {
        let found = one(&resolver, "192.0.2.1", "/", &[("user-agent", spaced)], "agent");
        assert_eq!(found.as_deref(), Some("curl"), "{spaced:?}");
    }
    let twice = [("user-agent", "curl"), ("user-agent", "curl ")];
    assert_eq!(one(&resolver, "192.0.2.1", "/", &twice, "agent").as_deref(), Some("curl"));
}

/// A client opens a quote, and its proxy appends the client's address to the same line: the address would end in the quote.
#[test]
fn what_a_proxy_appends_to_a_malformed_forwarded_field_is_not_hidden() {
    let resolver = resolver("{trusted: [127.0.0.1], forwarded: forwarded}");
    let address = |line: &str| one(&resolver, "127.0.0.1", "/", &[("forwarded", line)], "remote_address");
    let appended = [
        "for=203.0.113.9",
        "for=\"203.0.113.9\"",
        "for=203.0.113.9;host=\"a.example\";proto=http",
        "for=203.0.113.9;host=\"\"",
    ];
    let forged = [
        "for=6.6.6.1;x=\"",
        "for=6.6.6.1;x=\"a\\",
        "for=6.6.6.1, for=\"",
        "for=6.6.6.1;\"",
        "for=\"6.6.6.1\"x=\"",
        "for=6.6.6.1;x=a\"",
    ];
    for line in forged.iter().flat_map(|forged| appended.iter().map(move |more| format!("{forged}, {more}")))
    {
        assert_eq!(address(&line).as_deref(), Some("127.0.0.1"), "the proxy's own address: {line}");
    }
    for line in appended {
        assert_eq!(address(line).as_deref(), Some("203.0.113.9"), "{line}");
        let before = format!("for=6.6.6.1;x=\"a, \\\"b;\" ; y=, {line}");
        assert_eq!(address(&before).as_deref(), Some("203.0.113.9"), "{before}");
    }
}

/// A proxy checks a request other than its own; if its headers describe two, one of them is forged.
#[test]
fn a_proxy_describes_the_original_request() {
    let resolver = resolver("{routes: ['GET /users/{id}', 'POST /login']}");
    let resolve = |peer: &str, uri: &str, lines: &[(&str, &str)]| {
        let (headers, uri): (_, Uri) = (headers(lines), uri.parse().expect("a target"));
        let request = RequestView::new(peer.parse().expect("an address"), &Method::GET, &uri, &headers);
        let caller = resolver.resolve_forwarded(&request, "/check", Timestamp::ZERO);
        caller
            .map(|caller| [caller.get("endpoint"), caller.get("host")].map(|found| found.map(str::to_owned)))
    };
    let is = |endpoint: &str, host: Option<&str>| Ok([Some(endpoint.to_owned()), host.map(str::to_owned)]);
    let traefik = [
        ("x-forwarded-method", "POST"),
        ("x-forwarded-uri", "/login?deny_status=200"),
        ("x-forwarded-host", "a.b"),
    ];
    assert_eq!(resolve("127.0.0.1", "/check", &traefik), is("POST /login", Some("a.b")));
    assert_eq!(
        resolve("192.0.2.1", "/check", &traefik),
        is("GET other", None),
        "headers of an untrusted peer are ignored"
    );
    let nginx = [("x-original-uri", "/users/1"), ("x-original-method", "GET")];
    assert_eq!(resolve("127.0.0.1", "/check", &nginx), is("GET /users/{id}", None));
    assert_eq!(
        resolve("127.0.0.1", "/check/users/7?a", &[("host", "h:1")]),
        is("GET /users/{id}", Some("h"))
    );
    let mixed = [
        ("x-original-uri", "/users/1"),
        ("x-forwarded-method", "POST"),
        ("x-forwarded-host", "forged"),
        ("host", "h"),
    ];
    assert_eq!(
        resolve("127.0.0.1", "/check", &mixed),
        is("GET /users/{id}", Some("h")),
        "headers of the other set are the client's"
    );
    let both = [("x-original-uri", "/users/1"), ("x-forwarded-uri", "/other")];
    let error = resolve("127.0.0.1", "/check", &both).expect_err("one is forged");
    assert!(error.to_string().contains("x-forwarded-uri"), "{error}");
    let doubled = [
        ("x-original-uri", "/a"),
        ("x-forwarded-uri", "/a"),
        ("x-original-method", "GET"),
        ("x-forwarded-method", "PUT"),
    ];
    assert!(resolve("127.0.0.1", "/check", &doubled).is_err());
    let same = [("x-original-uri", "/users/1"), ("x-forwarded-uri", "/users/1")];
    assert_eq!(resolve("127.0.0.1", "/check", &same), is("GET /users/{id}", None));
    // ingress-nginx sends the whole URL.
    let url = [("x-original-url", "https://a.b/login?x"), ("x-original-method", "POST")];
    assert_eq!(resolve("127.0.0.1", "/check", &url), is("POST /login", None));
    // Raw UTF-8 is what curl sends, and what an upstream reads.
    let raw = [("x-original-uri", "/users/caf\u{e9}")];
    assert_eq!(resolve("127.0.0.1", "/check", &raw), is("GET /users/{id}", None));
}

/// Envoy and HAProxy append the path to the check's: headers that describe another request are then the client's.
#[test]
fn headers_cannot_replace_an_appended_path() {
    let resolver = resolver("{routes: ['POST /login', 'GET /users/{id}']}");
    let resolve = |lines: &[(&str, &str)]| {
        let (headers, uri) = (headers(lines), Uri::from_static("/check/login"));
        let request =
            RequestView::new("127.0.0.1".parse().expect("an address"), &Method::POST, &uri, &headers);
        let caller = resolver.resolve_forwarded(&request, "/check", Timestamp::ZERO);
        caller.map(|caller| caller.get("endpoint").map(str::to_owned))
    };
    let login = Ok(Some("POST /login".to_owned()));
    assert_eq!(resolve(&[]), login);
    assert_eq!(resolve(&[("x-forwarded-uri", "/login/?a"), ("x-forwarded-method", "POST")]), login);
    for forged in [
        ("x-forwarded-uri", "/users/1"),
        ("x-original-uri", "/"),
        ("x-original-url", "/users/1"),
        ("x-forwarded-method", "GET"),
        ("x-rewrite-url", "/users/1"),
        ("x-http-method-override", "DELETE"),
    ] {
        let error = resolve(&[forged]).expect_err(forged.0);
        assert_eq!(error.status(), 400, "{forged:?}");
    }
}

/// A framework that follows these headers would run another endpoint than the one that was counted.
#[test]
fn a_request_that_names_another_method_or_path_is_refused() {
    let ask = |settings: &str, peer: &str, line: (&str, &str)| {
        let (resolver, headers, uri) = (resolver(settings), headers(&[line]), Uri::from_static("/a/b"));
        let request = RequestView::new(peer.parse().expect("an address"), &Method::GET, &uri, &headers);
        let status = |caller: Result<ResolvedCaller<'_>, AmbiguousIdentity>| {
            caller.map_or_else(|error| error.status().as_u16(), |_| 200)
        };
        let direct = resolver.resolve_direct(&request, Timestamp::ZERO);
        (status(direct), status(resolver.resolve_in_place(&request, Timestamp::ZERO)))
    };
    for line in [
        ("x-http-method-override", "DELETE"),
        ("x-http-method", "post"),
        ("x-method-override", "PUT"),
        ("x-method-override", "\u{e9}"),
        ("x-original-url", "/admin"),
        ("x-rewrite-url", "/admin"),
        ("x-rewrite-url", "/a%2Fb"),
    ] {
        assert_eq!(ask("{}", "127.0.0.1", line), (400, 400), "{line:?}");
        assert_eq!(ask("{}", "192.0.2.1", line), (200, 400), "the gateway removes it: {line:?}");
        assert_eq!(ask("{overrides: ignore}", "127.0.0.1", line), (200, 200), "{line:?}");
    }
    for line in [
        ("x-http-method-override", "get"),
        ("x-http-method", "HEAD"),
        ("x-original-url", "https://h/a/b/?x"),
        ("x-rewrite-url", "/a//%62"),
    ] {
        assert_eq!(ask("{}", "127.0.0.1", line), (200, 200), "{line:?}");
    }
}

/// Otherwise a caller with limits would become one without, or a new one each time, by a spelling that its upstream
/// still accepts.
#[test]
fn an_unreadable_credential_is_refused_or_anonymous() {
    for line in [
        ("authorization", "Bearer"),
        ("authorization", "Bearer key x"),
        ("authorization", "Bearer key,"),
        ("authorization", "key"),
        ("authorization", "Basic x, Bearer key"),
        ("authorization", "Bearer eyJhbGciOiJub25lIn0.e30.="),
        ("x-api-key", "key x"),
        ("x-api-key", "key, key"),
        ("x-api-key", "caf\u{e9}"),
    ] {
        let ask = |settings: &str| {
            let (resolver, headers, uri) = (resolver(settings), headers(&[line]), Uri::from_static("/check"));
            let request =
                RequestView::new("192.0.2.1".parse().expect("an address"), &Method::GET, &uri, &headers);
            let all = [
                resolver.resolve_direct(&request, Timestamp::ZERO),
                resolver.resolve_in_place(&request, Timestamp::ZERO),
                resolver.resolve_forwarded(&request, "/check", Timestamp::ZERO),
            ];
            all.map(|caller| match caller {
                Ok(caller) => Ok(caller.get("api_key").map(str::to_owned)),
                Err(error) => {
                    assert!(error.to_string().contains(line.0) && !error.to_string().contains("key x"));
                    Err(error.status().as_u16())
                }
            })
        };
        assert_eq!(ask("{}"), [Err(401), Err(401), Err(401)], "{line:?}");
        assert_eq!(ask("{unreadable: anonymous}"), [Ok(None), Ok(None), Ok(None)], "{line:?}");
    }
}

/// Each pair is one handler in servers, so it is one endpoint: otherwise the second spelling would be a fresh limit.
#[test]
fn methods_and_templates_have_one_spelling() {
    let resolver = resolver("{routes: ['GET /users/{id}', 'POST /caf\u{e9}'], path_case: ignore}");
    for (method, path, endpoint) in [
        ("HEAD", "/users/1", "GET /users/{id}"),
        ("head", "/USERS/1/", "GET /users/{id}"),
        ("get", "/Users/1", "GET /users/{id}"),
        ("POST", "/caf%C3%A9", "POST /caf\u{e9}"),
        ("post", "/CAF%c3%89", "POST /caf\u{e9}"),
        ("HEAD", "/x", "GET other"),
    ] {
        let found = read(&resolver, "192.0.2.1", method, path, &[]);
        let found = found.iter().find(|(key, _)| key == "endpoint").map(|(_, value)| value.as_str());
        assert_eq!(found, Some(endpoint), "{method} {path}");
    }
}

/// An invalid setting that was ignored would leave the API unprotected.
#[test]
fn invalid_settings_are_rejected_with_a_fix() {
    for (text, message) in [
        ("{trusted: [10.0.0.0/99]}", "10.0.0.0/8"),
        ("{trust: []}", "trust"),
        ("{forwarded: x-real-ip}", "x-forwarded-for"),
        ("{api_key: {heder: x}}", "heder"),
        ("{ipv6_prefix: 0}", "1 to 128"),
        ("{ipv6_prefix: 129}", "1 to 128"),
        ("{headers: {a: 'b c'}}", "not a valid header name"),
        ("{headers: {remote_address: x-client}}", "another name"),
        ("{routes: [users]}", "GET /path"),
        ("{routes: ['get /users']}", "capitals"),
        ("{routes: ['HEAD /users']}", "GET /users"),
        ("{routes: ['/a/../b']}", "invalid segment `..`"),
        ("{escapes: maybe}", "decode"),
        ("{path_case: lower}", "ignore"),
        ("{unreadable: allow}", "anonymous"),
        ("{overrides: follow}", "ignore"),
        ("{routes: ['/a{b}']}", "{id}"),
        ("{routes: ['/a;b']}", "invalid segment `a;b`"),
        ("{routes: ['/{*rest}/a']}", "must be the last segment"),
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
        assert!(error.contains(message), "{text}: {error}");
    }
}

/// A missing or short secret must be an error; hashes without a secret can be guessed.
#[test]
fn a_secret_is_read_or_rejected() {
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

/// A client that could add a second value would choose which budget is used.
#[test]
fn a_mapped_header_with_two_values_is_refused() {
    let resolver =
        resolver("{trusted: [127.0.0.1], headers: {tenant: x-tenant}, trusted_headers: {tier: x-tier}}");
    let ask = |peer: &str, lines: &[(&str, &str)]| {
        let (headers, uri) = (headers(lines), Uri::from_static("/a"));
        let request = RequestView::new(peer.parse().expect("an address"), &Method::GET, &uri, &headers);
        let ways = [
            resolver.resolve_direct(&request, Timestamp::ZERO),
            resolver.resolve_in_place(&request, Timestamp::ZERO),
            resolver.resolve_forwarded(&request, "/check", Timestamp::ZERO),
        ];
        ways.map(|caller| {
            let read = caller.map(|caller| caller.get("tenant").or(caller.get("tier")).map(str::to_owned));
            read.map_err(|error| error.status().as_u16())
        })
    };
    let is = |value: Option<&str>| [0; 3].map(|_| Ok::<_, u16>(value.map(str::to_owned)));
    assert_eq!(ask("192.0.2.1", &[("x-tenant", "a"), ("X-Tenant", "b")]), [Err(400), Err(400), Err(400)]);
    assert_eq!(ask("192.0.2.1", &[("x-tenant", "a"), ("x-tenant", "")]), [Err(400), Err(400), Err(400)]);
    assert_eq!(ask("192.0.2.1", &[("x-tenant", "a"), ("x-tenant", "a")]), is(Some("a")), "it says the same");
    assert_eq!(ask("127.0.0.1", &[("x-tier", "gold"), ("x-tier", "free")]), [Err(400), Err(400), Err(400)]);
    assert_eq!(
        ask("192.0.2.1", &[("x-tier", "gold"), ("x-tier", "free")]),
        is(None),
        "not read from untrusted peers"
    );
}

/// What describes no request would be counted as a request of its own: a fresh budget for each spelling.
#[test]
fn descriptions_of_no_request_are_refused() {
    let resolver = resolver("{routes: ['POST /login']}");
    let ask = |uri: &'static str, lines: &[(&str, &str)]| {
        let (headers, uri) = (headers(lines), Uri::from_static(uri));
        let request =
            RequestView::new("127.0.0.1".parse().expect("an address"), &Method::POST, &uri, &headers);
        let caller = resolver.resolve_forwarded(&request, "/check", Timestamp::ZERO);
        let read = caller.map(|caller| ["endpoint", "host"].map(|name| caller.get(name).map(str::to_owned)));
        read.map_err(|error| error.status().as_u16())
    };
    let login = |host: Option<&str>| Ok([Some("POST /login".to_owned()), host.map(str::to_owned)]);
    for target in ["/login", "/login?a=/b", "http://h/login", "HTTPS://h:1/login#x"] {
        assert_eq!(ask("/check", &[("x-forwarded-uri", target)]), login(None), "{target}");
    }
    for target in
        ["", " ", "login", "http:/login", "http:login", "://h/login", "ftp://h/login", "http:///login", "*"]
    {
        for name in ["x-forwarded-uri", "x-original-uri", "x-original-url"] {
            assert_eq!(ask("/check", &[(name, target)]), Err(400), "{name}: {target:?}");
        }
    }
    let with = |name, value| ask("/check", &[("x-forwarded-uri", "/login"), (name, value)]);
    for method in ["", "PO ST", "POST,GET", "(POST)"] {
        assert_eq!(with("x-forwarded-method", method), Err(400), "{method:?}");
    }
    for host in ["", "a b", "a/b", "u@h", "a.b,"] {
        assert_eq!(with("x-forwarded-host", host), Err(400), "{host:?}");
    }
    assert_eq!(with("x-forwarded-host", "first.example, A.B:443"), login(Some("a.b")), "the nearest proxy's");
    for (name, one, other) in [
        ("x-forwarded-uri", "/login", "/other"),
        ("x-forwarded-method", "POST", "GET"),
        ("x-forwarded-host", "a.b", "c.d"),
    ] {
        assert_eq!(
            ask("/check", &[("x-forwarded-uri", "/login"), (name, one), (name, other)]),
            Err(400),
            "{name}"
        );
    }
    // Where the proxy appends the path, the host is that of the check, as at the gateway.
    let forged = [("x-forwarded-host", "forged"), ("host", "a.b")];
    assert_eq!(ask("/check/login", &forged), login(Some("a.b")));
    assert_eq!(ask("/check/", &[("x-forwarded-uri", "/login")]), Err(400), "`/` is a path like any other");
}

proptest! {
    /// For any description: it is refused, or counted as the gateway would count a request with that target.
    #[test]
    fn a_described_target_is_read_as_the_gateway_reads_one(
        target in prop_oneof![
            "[a-z/.:%?#*]{0,12}",
            "(http|https|ftp|HTTP)?:?/{0,3}[a-z.]{0,4}(:[0-9]{0,2})?(/[a-z%2F.]{0,6}){0,2}(\\?[a-z/]{0,4})?",
        ],
    ) {
        use tollgate_http::h1::ScannedHead;
        use tollgate_http::h1::head::HeadLimits;
        let resolver = resolver("{unmatched: path}");
        let peer: IpAddr = "127.0.0.1".parse().expect("an address");
        let (lines, check) = (headers(&[("x-forwarded-uri", &target), ("host", "h")]), Uri::from_static("/check"));
        let request = RequestView::new(peer, &Method::GET, &check, &lines);
        let described = resolver.resolve_forwarded(&request, "/check", Timestamp::ZERO).ok();
        let described = described.and_then(|caller| caller.get("path").map(str::to_owned));
        let host = target.split("://").nth(1).map_or("h", |rest| rest.split(['/', '?', '#']).next().unwrap_or(""));
        let head = format!("GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let Ok(_) = ScannedHead::new(head.as_bytes(), &HeadLimits::default()) else {
            // The gateway refuses more: fragments, paths with dots. What it cannot read as a target at all has no path here.
            let is_target = target.starts_with('/') || target.to_ascii_lowercase().starts_with("http");
            prop_assert!(is_target || described.is_none(), "{target:?} is {described:?}");
            return Ok(());
        };
        let Ok(uri) = target.parse::<Uri>() else { return Ok(()) };
        let direct = RequestView::new(peer, &Method::GET, &uri, &lines);
        let direct = resolver.resolve_direct(&direct, Timestamp::ZERO).ok();
        let direct = direct.and_then(|caller| caller.get("path").map(str::to_owned));
        prop_assert!(described.is_none() || described == direct, "{target:?}: {described:?}, {direct:?}");
    }
}
