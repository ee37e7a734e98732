//! Tests of header rewriting, field by field.

use super::*;
use http::HeaderMap;
use tollgate_http::identity::IdentityConfig;

fn map(fields: &[(&str, &str)]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in fields {
        map.add(name.as_bytes(), value.as_bytes());
    }
    map
}

fn forwarded(fields: &[(&str, &str)], is_trusted: bool, forward: ForwardedHeader) -> HeaderMap {
    let peer = Peer::new("::ffff:10.0.0.9".parse().expect("an address"), false);
    let identity = IdentityConfig {
        trusted_headers: [("tenant".to_owned(), "X-Tenant".to_owned())].into(),
        headers: [("app".to_owned(), "x_app".to_owned())].into(),
        ..IdentityConfig::default()
    };
    let passing = ForwardRules {
        peer: &peer,
        is_trusted,
        forward,
        protected: &Arc::new(ProtectedHeaders::new(&identity)),
        authority: None,
        host: None,
        traceparent: None,
    };
    let mut out = HeaderMap::new();
    write_upstream_headers(&map(fields), &passing, &mut out);
    out
}

const REQUEST: [(&str, &str); 11] = [
    ("Host", "a.b"),
    ("Connection", "close, X-Private"),
    ("X-Private", "p"),
    ("X-Tenant", "t"),
    ("X-Forwarded-For", "1.1.1.1"),
    ("X-Forwarded-For", "2.2.2.2"),
    ("X-Forwarded-Proto", "gopher"),
    ("X-Forwarded-Port", "70"),
    ("X_Forwarded_For", "3.3.3.3"),
    ("Content-Length", "3"),
    ("X-RateLimit-Degraded", "no"),
];

/// Claims of an untrusted client must not reach an upstream that trusts its proxy.
#[test]
fn headers_of_untrusted_clients_are_dropped() {
    let out = forwarded(&REQUEST, false, ForwardedHeader::XForwarded);
    let wanted = map(&[
        ("host", "a.b"),
        ("x-forwarded-for", "10.0.0.9"),
        ("x-forwarded-proto", "http"),
        ("x-forwarded-host", "a.b"),
    ]);
    assert_eq!(out, wanted);
}

#[test]
fn headers_of_trusted_peers_are_kept() {
    let out = forwarded(&REQUEST, true, ForwardedHeader::Both);
    let wanted = map(&[
        ("host", "a.b"),
        ("x-tenant", "t"),
        ("x-forwarded-for", "1.1.1.1, 2.2.2.2, 10.0.0.9"),
        ("x-forwarded-proto", "gopher"),
        ("x-forwarded-port", "70"),
        ("x-forwarded-host", "a.b"),
        ("forwarded", "for=10.0.0.9;host=\"a.b\";proto=http"),
    ]);
    assert_eq!(out, wanted);
}

/// An upstream that trusts an untrusted client's claims would log, limit or serve another caller.
#[test]
fn claims_of_untrusted_clients_are_dropped() {
    let claims = [
        "X-Real-IP",
        "true-client-ip",
        "CF-Connecting-IP",
        "X-Client-IP",
        "Client-IP",
        "x-cluster-client-ip",
        "x-forwarded-prefix",
        "x-forwarded-uri",
        "X-Original-URL",
        "x-original-uri",
        "X-Rewrite-URL",
        "X-HTTP-Method-Override",
        "x-http-method",
        "x-method-override",
        "x-host",
    ];
    for name in claims {
        let sent = [("host", "a.b"), (name, "claimed")];
        let out = forwarded(&sent, false, ForwardedHeader::XForwarded);
        assert!(out.values().all(|value| value != "claimed"), "{name}: {out:?}");
        let out = forwarded(&sent, true, ForwardedHeader::XForwarded);
        assert_eq!(out.get(name).map(HeaderValue::as_bytes), Some(&b"claimed"[..]), "{name}");
        let alias = name.replace('-', "_");
        let out = forwarded(&[("host", "a.b"), (&alias, "claimed")], true, ForwardedHeader::XForwarded);
        assert!(out.values().all(|value| value != "claimed"), "{alias}: {out:?}");
    }
}

/// A program that reads headers as variables would mistake these for protected ones.
#[test]
fn aliases_of_protected_headers_are_dropped() {
    let forged = [
        "x_forwarded_for",
        "X-Forwarded_Proto",
        "x.forwarded.for",
        "x_forwarded_port",
        "X_RateLimit_Degraded",
        "content_length",
        "proxy_authorization",
        "x_tenant",
        "x_api_key",
        "x-app",
        "x.app",
    ];
    for name in forged {
        for is_trusted in [false, true] {
            let out =
                forwarded(&[("host", "a.b"), (name, "forged")], is_trusted, ForwardedHeader::XForwarded);
            assert!(out.values().all(|value| value != "forged"), "{name}: {out:?}");
        }
    }
    for name in ["x_own", "x-own", "x_app", "x-api-key", "x_forward", "cookie2"] {
        let out = forwarded(&[("host", "a.b"), (name, "own")], false, ForwardedHeader::XForwarded);
        assert_eq!(out.get(name).map(HeaderValue::as_bytes), Some(&b"own"[..]), "{name}");
    }
}

/// The upstream must see the identity that the rules used.
#[test]
fn connection_cannot_remove_identity_headers() {
    let sent = [
        ("host", "a.b"),
        ("connection", "X-API-Key, cookie, authorization, x_app, x-own, x-tenant, x-forwarded-for"),
        ("x-api-key", "k"),
        ("cookie", "c=1"),
        ("authorization", "Bearer t"),
        ("x_app", "a"),
        ("x-own", "o"),
        ("x-tenant", "t"),
        ("x-forwarded-for", "1.1.1.1"),
    ];
    let out = forwarded(&sent, true, ForwardedHeader::XForwarded);
    let mut wanted = map(&sent);
    for gone in ["connection", "x-own"] {
        wanted.remove(gone);
    }
    wanted.insert("x-forwarded-for", HeaderValue::from_static("1.1.1.1, 10.0.0.9"));
    wanted.add(b"x-forwarded-proto", b"http");
    wanted.add(b"x-forwarded-host", b"a.b");
    assert_eq!(out, wanted);
}

/// Headers without effect in a head have none in trailers either.
#[test]
fn trailers_carry_no_identity() {
    let mut trailers = map(&[
        ("x-sum", "42"),
        ("grpc-status", "0"),
        ("x-forwarded-for", "6.6.6.6"),
        ("x-forwarded-port", "1"),
        ("forwarded", "for=6.6.6.6"),
        ("x_forwarded_for", "6.6.6.6"),
        ("x-ratelimit-degraded", "r"),
        ("x-ratelimit-limit", "9"),
        ("x-tenant", "t"),
        ("x-api-key", "k"),
        ("cookie", "c=1"),
        ("authorization", "b"),
        ("content-length", "7"),
    ]);
    let identity = IdentityConfig {
        trusted_headers: [("tenant".to_owned(), "x-tenant".to_owned())].into(),
        ..IdentityConfig::default()
    };
    ProtectedHeaders::new(&identity).clean(&mut trailers);
    assert_eq!(trailers, map(&[("x-sum", "42"), ("grpc-status", "0")]));
}

/// Responses drop hop-by-hop headers and those that the gateway sets itself.
#[test]
fn responses_lose_hop_by_hop_headers() {
    let received = map(&[
        ("connection", "keep-alive, x-private"),
        ("keep-alive", "timeout=5"),
        ("x-private", "p"),
        ("proxy-authenticate", "Basic"),
        ("ratelimit", "theirs"),
        ("server", "s"),
    ]);
    let mut out = HeaderMap::new();
    let mut own = OwnHeaders::new(&mut out);
    own.put(&HeaderName::from_static("ratelimit"), b"ours");
    write_client_headers(&received, &mut own);
    assert_eq!(out, map(&[("ratelimit", "ours"), ("server", "s")]));
}
