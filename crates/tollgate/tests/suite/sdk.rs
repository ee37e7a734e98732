//! The Rust clients asking a real server: over gRPC and HTTP, and over TLS by a third-party proxy.

use crate::harness::{self, Server};
use std::net::SocketAddr;
use std::time::Duration;
use tollgate_sdk::{
    CheckRequest, Closed, Decider, FailPolicy, HttpRemote, HttpRemoteConfig, Remote, RemoteConfig, RemoteTls,
    RequestHead, ResultSource,
};

const RULES: &str = "
domain: shop
descriptors:
  - {key: user, name: per-user, limit: [3/hour, 100/day]}
  - {key: api_key, name: per-key, limit: 2/hour}
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

fn over_http(address: impl std::fmt::Display) -> HttpRemoteConfig {
    HttpRemoteConfig { deadline: harness::LONG, ..HttpRemoteConfig::new(format!("http://{address}"), "shop") }
}

/// The shared cases are about responses; only a real server shows that these are the responses.
#[tokio::test]
async fn a_server_is_asked_over_http() {
    let server = Server::with_rules(RULES);
    let client = HttpRemote::new(over_http(server.http)).expect("settings");
    for left in [2, 1, 0] {
        let result = client.check(&user("ann")).await;
        assert_eq!(
            (result.is_allowed, result.remaining, result.reason.as_str()),
            (true, Some(left), "allowed")
        );
        assert!(result.decision_id.is_some() && result.source == ResultSource::Server, "{result:?}");
    }
    let denied = client.check(&user("ann")).await;
    assert_eq!((denied.is_allowed, denied.rule.as_deref(), denied.limit), (false, Some("per-user"), Some(3)));
    assert_eq!(denied.source, ResultSource::Server);
    let repeated = client.check(&user("ann")).await;
    assert_eq!((repeated.source, repeated.is_allowed), (ResultSource::Cache, false));
    assert!(repeated.retry_after <= denied.retry_after && repeated.retry_after.is_some());
    assert_eq!(client.decide(user("ann")).await.response.status().as_u16(), 429);

    // Reservations; what is given back is there again.
    assert_eq!(client.check(&user("ben").with_cost(0)).await.remaining, Some(3), "a peek");
    let reserved = client.reserve(&user("ben").with_cost(3), Duration::from_secs(600)).await;
    assert!(reserved.result().is_allowed && !client.check(&user("ben")).await.is_allowed);
    assert_eq!(reserved.settle(1).await, Closed::Settled(1));
    assert_eq!(client.check(&user("ben")).await.remaining, Some(1));
    assert_eq!(reserved.cancel().await, Closed::Conflict, "it was settled");
    let reserved = client.reserve(&user("eve"), Duration::from_secs(600)).await;
    assert_eq!(reserved.cancel().await, Closed::Canceled);
    assert_eq!(client.check(&user("eve").with_cost(0)).await.remaining, Some(3));

    // Heads of received requests: the server identifies the caller, or says what is wrong with it.
    let head = |keys: &[&str]| {
        let request = keys
            .iter()
            .fold(http::Request::get("/orders?page=2"), |request, key| request.header("x-api-key", *key));
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        RequestHead::new("192.0.2.7".parse().expect("an address"), &parts)
    };
    for passes in [true, true, false] {
        let result = client.check_head(&head(&["k-1"]), [], 1).await;
        assert_eq!((result.is_allowed, result.rule.as_deref()), (passes, Some("per-key")), "{result:?}");
    }
    let ambiguous = client.check_head(&head(&["k-2", "k-3"]), [], 1).await;
    assert_eq!((ambiguous.is_allowed, ambiguous.reason.as_str()), (false, "rejected"));
    assert_eq!(ambiguous.problem.map(|problem| problem.status), Some(400));
}

/// With several servers, one that is dead or slow costs no decision, and nobody is charged twice.
#[tokio::test]
async fn several_servers_are_asked_over_http() {
    let redis = harness::Redis::start();
    let flags = ["--store", &redis.url(), "--store-deadline-ms", "10000"];
    let [one, two, three] = [(); 3].map(|()| Server::start_with_rules(RULES, &flags));
    let addresses = |first: SocketAddr, next: &Server| HttpRemoteConfig {
        other_addresses: vec![format!("http://{}", next.http)],
        fail_policy: FailPolicy::Closed,
        ..over_http(first)
    };
    let dead = tollgate_testing::ports::free_address();
    let client = HttpRemote::new(addresses(dead, &three)).expect("settings");
    let result = client.check(&user("ann")).await;
    assert_eq!((result.is_allowed, result.source, result.remaining), (true, ResultSource::Server, Some(2)));
    let hedging = HttpRemoteConfig { hedge_after: Some(Duration::ZERO.into()), ..addresses(one.http, &two) };
    let hedging = HttpRemote::new(hedging).expect("settings");
    assert!(hedging.check(&user("ann")).await.is_allowed);
    // The slower one's charge is given back in the background, once it has been made.
    let has_decided = |server: &Server| {
        server
            .get("/metrics")
            .text()
            .contains("ratelimit_check_duration_seconds_count{protocol=\"http\"} 1\n")
    };
    let began = harness::Stopwatch::start();
    loop {
        let are_charged = has_decided(&one) && has_decided(&two);
        if client.check(&user("ann").with_cost(0)).await.remaining == Some(1) && are_charged {
            break;
        }
        assert!(began.elapsed() < harness::LONG, "a charge was not given back");
    }
    let reserved = client.reserve(&user("ann"), Duration::from_secs(600)).await;
    assert!(reserved.result().is_allowed && reserved.cancel().await == Closed::Canceled);
}

#[tokio::test]
async fn a_server_behind_tls_is_asked_over_https() {
    let folder = harness::Folder::new();
    harness::certificate(&folder, "tollgate");
    harness::certificate(&folder, "stranger");
    let both = ["tollgate.crt", "tollgate.key"].map(|name| std::fs::read(folder.join(name)).expect("a file"));
    let pair = folder.write("pair.pem", both.concat());
    let server = Server::with_rules(RULES);
    let proxy = harness::Haproxy::with_tls(server.http, &pair);
    let client = |ca: &str| {
        let address = format!("https://{}", proxy.address);
        let ca = Some(folder.join(ca));
        HttpRemote::new(HttpRemoteConfig {
            address,
            ca,
            fail_policy: FailPolicy::Closed,
            ..over_http(server.http)
        })
    };
    assert_eq!(client("tollgate.crt").expect("settings").check(&user("ann")).await.remaining, Some(2));
    let forged = client("stranger.crt").expect("settings").check(&user("ann")).await;
    assert_eq!((forged.is_allowed, forged.reason.as_str()), (false, "unreachable"));
    assert!(client("none.crt").is_err());
}
