//! The gateway between third-party programs: curl, h2load, HAProxy, websockets before it; nginx and websockets behind it.

use crate::harness::{
    Folder, Gateway, Haproxy, Nginx, Origin, WebSockets, certificate, eventually, foreign, plain,
};

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, name: per-key, limit: 3 per 3650d, algorithm: fixed_window}
";

/// curl's own words on what it got: version, status, and where from.
fn curl(args: &[&str]) -> String {
    let common = ["-s", "-S", "-o", "/dev/null", "--max-time", "20", "-w", "%{http_version} %{http_code}"];
    foreign("curl", &[&common[..], args].concat())
}

/// What browsers and tools speak is found by itself: HTTP/1.1, HTTP/2 by ALPN, HTTP/2 by prior knowledge.
#[test]
fn curl_speaks_every_version() {
    let origin = Origin::start();
    let folder = Folder::new();
    certificate(&folder, "gateway");
    let section = plain(origin.address, "").replace(
        "[{address: \"127.0.0.1:0\"}]",
        "[{address: \"127.0.0.1:0\"}, {address: \"127.0.0.1:0\", tls: {certificate: gateway.crt, key: gateway.key}}]",
    );
    let gateway = Gateway::start_in(folder, RULES, "", &section);
    let (plain, tls) = (gateway.addresses[0], gateway.addresses[1]);
    let trust = gateway.folder.join("gateway.crt");
    let trust = ["--cacert", trust.to_str().expect("a plain path")];
    assert_eq!(curl(&[&format!("http://{plain}/a")]), "1.1 200");
    assert_eq!(curl(&["--http2-prior-knowledge", &format!("http://{plain}/a")]), "2 200");
    assert_eq!(curl(&[&trust[..], &["--http1.1", &format!("https://{tls}/a")]].concat()), "1.1 200");
    assert_eq!(curl(&[&trust[..], &["--http2", &format!("https://{tls}/a")]].concat()), "2 200");
    // Asked to switch to HTTP/2 in the clear, the gateway stays with what it has: a tunnel would pass by every rule.
    assert_eq!(curl(&["--http2", &format!("http://{plain}/a")]), "1.1 200");
    assert!(origin.heads().iter().all(|head| !head.contains("transfer-encoding")), "no body is made up");
    // A body up, over each; with `Expect` where curl likes it.
    let body = gateway.folder.write("body", vec![b'x'; 2_000_000]);
    let body = format!("@{}", body.to_str().expect("a plain path"));
    for version in ["--http1.1", "--http2"] {
        let url = format!("https://{tls}/upload");
        let sent = foreign("curl", &[&trust[..], &["-s", version, "--data-binary", &body, &url]].concat());
        assert_eq!(sent, "hello 2000000", "{version}");
    }
    // A denial is the same over HTTP/2.
    let url = format!("https://{tls}/a");
    let denied = [&trust[..], &["--http2", "-H", "x-api-key: k", &url]].concat();
    let statuses: Vec<String> = (0..4).map(|_| curl(&denied)).collect();
    assert_eq!(statuses, ["2 200", "2 200", "2 200", "2 429"]);
    assert!(origin.heads().iter().any(|head| head.contains("x-forwarded-proto: https")));
}

/// A certificate is renewed on disk and acts without a restart; half of a change is not taken.
#[test]
fn certificates_are_read_again() {
    let origin = Origin::start();
    let folder = Folder::new();
    certificate(&folder, "gateway");
    let section = plain(origin.address, "").replace(
        "[{address: \"127.0.0.1:0\"}]",
        "[{address: \"127.0.0.1:0\", tls: {certificate: gateway.crt, key: gateway.key}}]",
    );
    let gateway = Gateway::start_in(folder, RULES, "", &section);
    let url = format!("https://{}/a", gateway.address());
    certificate(&gateway.folder, "new");
    let path = |name: &str| gateway.folder.join(name).to_str().expect("a plain path").to_owned();
    let trusts = |authority: &str| {
        let run = std::process::Command::new("curl")
            .args(["-s", "-o", "/dev/null", "--max-time", "20", "--cacert", &path(authority), &url])
            .status();
        run.expect("curl").success()
    };
    assert!(trusts("gateway.crt") && !trusts("new.crt"));
    // The key alone: the pair does not fit, and the old one stays.
    std::fs::copy(path("gateway.crt"), path("old.crt")).expect("copied");
    std::fs::copy(path("new.key"), path("gateway.key")).expect("copied");
    eventually("the half change to be refused", || {
        gateway.log().contains("keeping the previous certificate").then_some(())
    });
    assert!(trusts("old.crt"));
    std::fs::copy(path("new.crt"), path("gateway.crt")).expect("copied");
    eventually("the new certificate", || trusts("new.crt").then_some(()));
    assert!(!trusts("old.crt"));
}

/// Behind a load balancer that passes bytes, callers are who it says they are; a peer that is not it may not say.
#[test]
fn the_proxy_protocol_names_the_caller() {
    let origin = Origin::start();
    let section =
        plain(origin.address, "").replace("\"127.0.0.1:0\"}", "\"127.0.0.1:0\", proxy_protocol: true}");
    let gateway = Gateway::start(RULES, &section);
    for version in ["send-proxy", "send-proxy-v2"] {
        let balancer = Haproxy::start(gateway.address(), version);
        let url = format!("http://{}/head", balancer.address);
        let head = foreign("curl", &["-s", "--interface", "127.0.0.7", &url]);
        assert!(head.contains("x-forwarded-for: 127.0.0.7\r\n"), "{version}: {head}");
    }
    let mut open = gateway.open();
    open.send(b"GET /a HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    assert!(open.response().is_err(), "without the header no request is served");
    let distrusting = Gateway::start_in(Folder::new(), RULES, "identity: {trusted: [10.0.0.0/8]}", &section);
    let mut open = distrusting.open();
    open.send(b"PROXY TCP4 198.51.100.7 127.0.0.1 1 2\r\nGET /a HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    assert!(open.response().is_err(), "a stranger may not say who it is");
}

/// nginx as the upstream, over HTTP/1.1, HTTP/2 and TLS, with h2load as the callers.
#[test]
fn nginx_is_served_by_every_version() {
    let folder = Folder::new();
    certificate(&folder, "upstream");
    let nginx = Nginx::start(folder);
    let authority = nginx.folder.join("upstream.crt");
    let section = format!(
        "  listeners: [{{address: \"127.0.0.1:0\"}}]\n  upstreams:\n    one: {{addresses: [\"{0}\"]}}\n    two: {{addresses: [\"{1}\"], protocol: http2}}\n    tls: {{addresses: [\"{2}\"], tls: {{ca: {3}, server_name: localhost}}}}\n    both: {{addresses: [\"{2}\"], protocol: http2, tls: {{ca: {3}, server_name: localhost}}}}\n    stranger: {{addresses: [\"{2}\"], tls: {{ca: {3}, server_name: other.test}}}}\n  routes:\n{4}",
        nginx.plain,
        nginx.http2,
        nginx.tls,
        authority.display(),
        ["one", "two", "tls", "both", "stranger"]
            .map(|name| format!(
                "    - {{path: \"/{name}/{{*rest}}\", upstream: {name}, strip_prefix: /{name}}}\n"
            ))
            .concat(),
    );
    let gateway = Gateway::start(RULES, &section);
    for (upstream, spoken) in
        [("one", "HTTP/1.1"), ("two", "HTTP/2.0"), ("tls", "HTTP/1.1"), ("both", "HTTP/2.0")]
    {
        for version in ["--http1.1", "--http2-prior-knowledge"] {
            let url = format!("http://{}/{upstream}/spoken", gateway.address());
            assert_eq!(foreign("curl", &["-s", version, &url]), spoken, "{upstream} {version}");
            let large = foreign("curl", &["-s", version, &url.replace("spoken", "large")]);
            assert_eq!(large.len(), 300_000, "{upstream} {version}");
        }
    }
    assert_eq!(curl(&[&format!("http://{}/stranger/spoken", gateway.address())]), "1.1 502");
    for (args, upstream) in [(["-c8", "-m16"], "one"), (["-c8", "-m16"], "two")] {
        let url = format!("http://{}/{upstream}/spoken", gateway.address());
        let report = foreign("h2load", &[args[0], args[1], "-n2000", &url]);
        assert!(report.contains("2000 succeeded"), "{report}\n{}", gateway.log());
    }
}

/// WebSockets are tunnelled, limited like requests, and hold their slot for as long as they last.
#[test]
fn websockets_pass_and_hold_their_slot() {
    let rules = "domain: d\ndescriptors:\n  - {key: api_key, name: sockets, concurrency: 1}\n";
    let sockets = WebSockets::serve();
    let gateway = Gateway::start(rules, &plain(sockets.address, ""));
    let transcript = WebSockets::talk(gateway.address());
    assert_eq!(
        transcript.lines().collect::<Vec<_>>(),
        ["echoed", "refused 429", "again"],
        "{}",
        gateway.log()
    );
}
