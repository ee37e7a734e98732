//! The Rust layer asking a real server over TLS, by a proxy that nobody here wrote.

mod harness;

use harness::Server;
use std::net::SocketAddr;
use tollgate_sdk::{CheckRequest, Decider, FailPolicy, Remote, RemoteConfig, RemoteTls};

const RULES: &str = "
domain: shop
descriptors:
  - {key: user, name: per-user, limit: [3/hour, 100/day]}
";

fn settings(address: SocketAddr) -> RemoteConfig {
    // A busy machine may take its time; only the tests of time set it shorter.
    RemoteConfig { deadline: harness::LONG, ..RemoteConfig::new(format!("http://{address}"), "shop") }
}

fn user(name: &str) -> CheckRequest {
    CheckRequest::attributes([("user", name.to_owned())])
}

/// Across a network that others share, decisions come by TLS, from whom a known authority vouches for and no other.
#[tokio::test]
async fn a_server_behind_tls_is_asked_by_tls() {
    let folder = harness::Folder::new();
    harness::certificate(&folder, "tollgate");
    harness::certificate(&folder, "stranger");
    let both = ["tollgate.crt", "tollgate.key"].map(|name| std::fs::read(folder.join(name)).expect("a file"));
    let pair = folder.write("pair.pem", both.concat());
    let server = Server::with_rules(RULES);
    let proxy = harness::Haproxy::with_tls(server.grpc, &pair);
    let by_tls = |ca: &str, name: Option<&str>| {
        let tls = RemoteTls { ca: Some(folder.join(ca)), server_name: name.map(str::to_owned) };
        let address = format!("https://{}", proxy.address);
        let on_failure = FailPolicy::Closed;
        Remote::new(RemoteConfig { address, tls, fail_policy: on_failure, ..settings(server.grpc) })
    };
    let remote = by_tls("tollgate.crt", None).expect("settings");
    for passes in [true, true, true, false] {
        assert_eq!(remote.decide(user("by-tls")).await.is_allowed, passes);
    }
    let named = by_tls("tollgate.crt", Some("localhost")).expect("settings");
    assert!(named.decide(user("named")).await.is_allowed);
    for (ca, name) in [("stranger.crt", None), ("tollgate.crt", Some("other.example"))] {
        let decided = by_tls(ca, name).expect("settings").decide(user("forged")).await;
        assert_eq!((decided.is_allowed, decided.response.status().as_u16()), (false, 503), "{ca} {name:?}");
    }
    let plain = Remote::new(RemoteConfig { fail_policy: FailPolicy::Closed, ..settings(proxy.address) });
    assert!(!plain.expect("settings").decide(user("plain")).await.is_allowed, "TLS alone is spoken there");
    let missing = by_tls("none.crt", None).expect_err("no file").to_string();
    assert!(missing.contains("none.crt"), "{missing}");
    let empty = by_tls("tollgate.key", None).expect_err("no certificate").to_string();
    assert!(empty.contains("no PEM certificate found"), "{empty}");
}
