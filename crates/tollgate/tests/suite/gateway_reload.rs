//! The gateway's settings, changed while it serves: no connection is dropped, unchanged upstreams keep their state, and what cannot
//! be used changes nothing.

use crate::harness::{self, Gateway, Origin, WebConnection, eventually, foreign, plain, request};
use std::net::TcpListener;
use tollgate_testing::ports::free_address;

const RULES: &str = "
domain: d
descriptors:
  - {key: api_key, name: per-key, limit: 2 per 3650d, algorithm: fixed_window}
";

fn ask(open: &mut WebConnection, path: &str, more: &str) -> harness::WebResponse {
    open.send(format!("GET {path} HTTP/1.1\r\nhost: t\r\n{more}\r\n").as_bytes()).expect("sent");
    open.response().expect("an answer")
}

/// A route that moves to another upstream is a daily thing: it must cost no request and no connection.
#[test]
fn routes_change_under_traffic_without_dropping_requests() {
    let (first, second) = (Origin::start(), Origin::start());
    let gateway = Gateway::start(RULES, &plain(first.address, ", timeout: 1h"));
    let mut kept = gateway.open();
    assert_eq!(ask(&mut kept, "/a", "").status, 200);
    let mut held = gateway.open();
    held.send(b"GET /hold HTTP/1.1\r\nhost: t\r\n\r\n").expect("sent");
    eventually("it at the first upstream", || (first.requests() == 2).then_some(()));
    gateway.change("", &plain(second.address, ", timeout: 1h"));
    eventually("the second upstream to be asked", || {
        assert_eq!(ask(&mut kept, "/a", "").status, 200, "on the connection that was there");
        (second.requests() > 0).then_some(())
    });
    let before = first.requests();
    for _ in 0..5 {
        assert_eq!(ask(&mut kept, "/a", "").status, 200);
    }
    assert_eq!(first.requests(), before);
    first.release(1);
    assert_eq!(held.response().expect("an answer").status, 200, "what was under way ends as it began");
    // What takes a restart is named, and the rest acts.
    gateway.change("nodes: 3", &plain(first.address, ""));
    eventually("the first upstream again", || {
        assert_eq!(ask(&mut kept, "/a", "").status, 200);
        (first.requests() > before).then_some(())
    });
    eventually("the warning", || gateway.log().contains("`nodes` changed").then_some(()));
}

/// A slip in the file must not take the API down, and must be seen.
#[test]
fn an_invalid_file_changes_nothing_and_is_reported() {
    let origin = Origin::start();
    let good = plain(origin.address, "");
    let gateway = Gateway::start(RULES, &good);
    assert!(gateway.details()["settings"]["error"].is_null());
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address");
    let wrong = [
        (good.replace("upstream: api", "upstream: apo"), "unknown upstream `apo`"),
        (good.replace("domain: d", "domain: other"), "unknown domain `other`"),
        (good.replace("listeners", "lusteners"), "lusteners"),
        (good.replace("address: \"127.0.0.1:0\"", &format!("address: \"{address}\"")), "cannot listen"),
        (String::from("  : ["), "gateway.yaml"),
    ];
    for (section, says) in wrong {
        gateway.change("", &section);
        let error = eventually("the error", || {
            let error = gateway.details()["settings"]["error"].as_str()?.to_owned();
            error.contains(says).then_some(error)
        });
        assert!(error.contains("gateway.yaml"), "{error}");
        assert_eq!(gateway.get("/a").status, 200, "the last good settings stay");
    }
    eventually("it to be logged", || gateway.log().contains("keeping previous settings").then_some(()));
    gateway.change("", &good);
    eventually("the error to be gone", || gateway.details()["settings"]["error"].is_null().then_some(()));
    assert_eq!(gateway.get("/a").status, 200);
}

/// An upstream that was found sick must not get requests because a route was edited.
#[test]
fn a_reload_keeps_the_health_of_upstreams() {
    let (well, unwell) = (Origin::start(), Origin::start());
    well.release(1_000_000);
    let section = |health: &str, more: &str| {
        format!(
            "  listeners: [{{address: \"127.0.0.1:0\"}}]\n  upstreams:\n    api: {{addresses: [\"{}\", \"{}\"], health: {{path: /hold, timeout: 2s, {health}}}}}\n  routes:\n    - {{path: \"/{{*rest}}\", upstream: api}}\n{more}",
            well.address, unwell.address
        )
    };
    let gateway = Gateway::start(RULES, &section("every: 100ms", ""));
    let usable = |origin: &Origin| {
        gateway.figure(&format!("gateway_endpoint_usable{{upstream=\"api\",address=\"{}\"}}", origin.address))
    };
    eventually("the sick one to be found", || (usable(&unwell) == 0).then_some(()));
    let takes_effect = |times: usize| {
        eventually("the settings to act", || {
            (gateway.log().matches("configuration reloaded").count() >= times).then_some(())
        });
        assert_eq!((usable(&well), usable(&unwell)), (1, 0));
    };
    // The upstream's own settings are the same.
    gateway.change("", &section("every: 100ms", "    - {path: /more, upstream: api}\n"));
    takes_effect(1);
    // They are others: by these alone it would be found sick after a thousand hours.
    gateway.change("", &section("every: 1h, unhealthy_after: 1000", ""));
    takes_effect(2);
    let asked = |origin: &Origin| origin.heads().iter().filter(|head| head.starts_with("GET /a ")).count();
    for _ in 0..10 {
        assert_eq!(gateway.get("/a").status, 200);
    }
    assert_eq!((asked(&well), asked(&unwell)), (10, 0));
}

/// Addresses come and go, certificates and limits too, and open connections stay.
#[test]
#[cfg_attr(not(feature = "external-tests"), ignore = "needs openssl and curl: make test")]
fn listeners_and_limits_change() {
    let (origin, second) = (Origin::start(), free_address());
    let one = plain(origin.address, "");
    let gateway = Gateway::start(RULES, &one);
    let both = one.replace("[{address", &format!("[{{address: \"{second}\"}}, {{address"));
    gateway.change("", &both);
    let mut there = eventually("the second address", || WebConnection::to(second).ok());
    assert_eq!(ask(&mut there, "/a", "").status, 200);
    harness::certificate(&gateway.folder, "gateway");
    let tls =
        format!("[{{address: \"{second}\", tls: {{certificate: gateway.crt, key: gateway.key}}}}, {{address");
    gateway.change("", &one.replace("[{address", &tls));
    let target = format!("https://{second}/a");
    let ca = gateway.folder.join("gateway.crt").to_str().expect("a plain path").to_owned();
    eventually("TLS there", || {
        let seen = std::process::Command::new("curl").args(["-s", "--cacert", &ca, &target]).output();
        seen.expect("curl: run `make setup`").stdout.starts_with(b"hello").then_some(())
    });
    assert!(foreign("curl", &["-s", "--cacert", &ca, &target]).starts_with("hello"));
    assert_eq!(ask(&mut there, "/a", "").status, 200, "connections from before TLS stay");
    gateway.change("", &(one + "  clients: {header_fields: 3}\n"));
    eventually("the second address to be closed", || WebConnection::to(second).is_err().then_some(()));
    assert_eq!(ask(&mut there, "/a", "").status, 200, "open connections stay");
    let many = b"GET /a HTTP/1.1\r\nhost: t\r\na: 1\r\nb: 2\r\nc: 3\r\nconnection: close\r\n\r\n";
    assert_eq!(gateway.exchange(many).status, 431);
    assert_eq!(gateway.exchange(&request("GET", "/a", b"")).status, 200);
}

/// A proxy that is not trusted any more is not believed, though its connection is an old one.
#[test]
fn trust_is_that_of_the_moment() {
    let origin = Origin::start();
    let section = plain(origin.address, "");
    let gateway = Gateway::start(RULES, &section);
    let mut old = gateway.open();
    let forwarded_head =
        |open: &mut WebConnection| ask(open, "/head", "x-forwarded-for: 198.51.100.7\r\n").text();
    assert!(forwarded_head(&mut old).contains("x-forwarded-for: 198.51.100.7, 127.0.0.1\r\n"));
    gateway.change("identity: {trusted: [\"10.0.0.0/8\"]}", &section);
    let head = eventually("the change", || {
        Some(forwarded_head(&mut old)).filter(|head| !head.contains("198.51.100.7"))
    });
    assert!(head.contains("x-forwarded-for: 127.0.0.1\r\n"), "{head}");
    // By SIGHUP as well, though nothing has changed.
    let before = gateway.log().matches("configuration reloaded").count();
    gateway.signal("HUP");
    eventually("a reload", || {
        (gateway.log().matches("configuration reloaded").count() > before).then_some(())
    });
    // As many connections as the system gives at all.
    let files = gateway.details()["open_files"].clone();
    let hard = std::fs::read_to_string(format!("/proc/{}/limits", gateway.id())).expect("limits");
    let line = hard.lines().find(|line| line.starts_with("Max open files")).expect("a line");
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words[3], words[4], "{line}");
    assert_eq!(files["allowed"].to_string(), words[3], "{files}");
}
