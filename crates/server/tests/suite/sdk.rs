//! The Rust SDK with a server over gRPC: responses are the server's own, no request waits for an unavailable server,
//! and the fail policy decides instead.

use crate::harness::{self, Server, eventually};
use http::{Request, Response};
use serde_json::json;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use tollgate_sdk::{
    CheckRequest, Decider, FailPolicy, Remote, RemoteConfig, RemoteReservationError, ResultSource,
};

const RULES: &str = "
domain: shop
descriptors:
  - {key: user, name: per-user, limit: [3/hour, 100/day]}
  - {key: global, name: total, limit: 1000/hour}
  - {key: queue, name: queue, limit: 1/hour, burst: 2, algorithm: leaky_bucket, action: delay}
  - {key: lesser, name: lesser, limit: 1/hour, action: degrade}
";

fn settings(address: SocketAddr) -> RemoteConfig {
    // Long enough for a busy machine; only the tests of timeouts set a shorter one.
    RemoteConfig { deadline: harness::LONG, ..RemoteConfig::new(format!("http://{address}"), "shop") }
}

fn user(name: &str) -> CheckRequest {
    CheckRequest::attributes([("user", name.to_owned())])
}

/// The response must be the same whether the decision is local or remote.
#[tokio::test]
async fn a_remote_decision_has_the_response_of_the_server() {
    let server = Server::with_rules(RULES);
    let remote = Remote::new(RemoteConfig { connections: 2, ..settings(server.grpc) }).expect("an address");
    for left in [2, 1, 0] {
        let decided = remote.decide(user("a")).await;
        assert!(decided.is_allowed);
        // A peek at the same key over HTTP returns the same.
        let peek =
            server.post("/v1/check", &json!({"domain": "shop", "attributes": {"user": "a"}, "cost": 0}));
        let headers = decided.response.headers();
        assert!(
            headers["ratelimit"].to_str().expect("ASCII").starts_with(&format!("\"per-user/1h\";r={left};"))
        );
        assert_eq!(headers["ratelimit-policy"].to_str().ok(), peek.header("ratelimit-policy"));
        assert!(!headers.keys().any(|key| key.as_str().starts_with("tollgate-")), "{headers:?}");
    }
    let denied = remote.decide(user("a")).await;
    assert!(!denied.is_allowed);
    assert_eq!(
        (denied.response.status().as_u16(), &denied.response.headers()["x-ratelimit-denied-by"]),
        (429, &"per-user".parse().expect("a value"))
    );
    assert!(denied.response.headers().contains_key("retry-after"));
    assert!(
        String::from_utf8_lossy(denied.response.body()).contains("\"violated-policies\":[\"per-user/1h\"]")
    );

    assert!(remote.decide(user("b").with_cost(3)).await.is_allowed);
    assert!(!remote.decide(user("b")).await.is_allowed, "the cost was charged");
    assert!(remote.decide(user("b").with_cost(0)).await.is_allowed, "a peek");

    let by_descriptors = |name: &str| CheckRequest::descriptors([[("user", name.to_owned())]]);
    for passes in [true, true, true, false] {
        let decided = remote.decide(by_descriptors("c")).await;
        assert_eq!(decided.is_allowed, passes, "{:?}", decided.response);
        let policies = decided.response.headers()["ratelimit-policy"].to_str().expect("ASCII");
        assert!(!policies.contains("total"), "a descriptor matches only its own rule: {policies}");
    }
    let queue = || CheckRequest::attributes([("queue", "q")]);
    remote.decide(queue()).await;
    let delayed = remote.decide(queue()).await;
    assert!(delayed.is_allowed && delayed.delay > Duration::from_secs(60), "{:?}", delayed.delay);
    let lesser = || CheckRequest::attributes([("lesser", "q")]);
    remote.decide(lesser()).await;
    assert_eq!(remote.decide(lesser()).await.markers["x-ratelimit-degraded"], "lesser");
}

/// A program that asks by itself gets what the HTTP API says, and asks once for a denial.
/// More attributes than a check may have.
fn too_many() -> CheckRequest {
    CheckRequest::attributes((0..65).map(|number| (format!("key{number}"), "x")))
}

#[tokio::test]
async fn a_remote_check_has_the_reason_and_is_repeated() {
    let server = Server::with_rules(RULES);
    let remote = Remote::new(settings(server.grpc)).expect("an address");
    for left in [2, 1, 0] {
        let result = remote.check(&user("a")).await;
        assert_eq!((result.is_allowed, result.remaining), (true, Some(left)), "{result:?}");
        assert_eq!((result.reason.as_str(), result.origin.as_deref()), ("allowed", Some("store")));
        assert!(result.decision_id.is_some(), "{result:?}");
    }
    let denied = remote.check(&user("a")).await;
    assert_eq!((denied.is_allowed, denied.rule.as_deref(), denied.limit), (false, Some("per-user"), Some(3)));
    assert_eq!(denied.source, ResultSource::Server);
    let repeated = remote.check(&user("a")).await;
    assert_eq!(
        (repeated.source, repeated.reason, repeated.is_shed),
        (ResultSource::Cache, denied.reason, false)
    );
    assert!(repeated.retry_after.is_some() && repeated.retry_after <= denied.retry_after);
    assert_eq!(remote.decide(user("a")).await.response.status(), 429);
    // A limit that was raised is noticed at once if the program knows of it.
    remote.clear_deny_cache();
    assert_eq!(remote.check(&user("a")).await.source, ResultSource::Server);
    assert_eq!(
        remote.check(&CheckRequest::attributes([("other", "a")])).await.rule.as_deref(),
        Some("total")
    );
    // No fail policy lets a check through that the server calls invalid.
    let invalid = remote.check(&too_many()).await;
    assert_eq!((invalid.is_allowed, invalid.reason.as_str()), (false, "rejected"));
    let decided = remote.decide(too_many()).await;
    assert_eq!((decided.is_allowed, decided.response.status().as_u16()), (false, 400));
}

/// The layer itself, around a service, with a remote server.
#[tokio::test]
async fn a_service_is_limited_by_a_server() {
    use tower::{Layer, ServiceExt};
    let server = Server::with_rules(RULES);
    let remote = Remote::new(settings(server.grpc)).expect("an address");
    let layer = tollgate_sdk::TollgateLayer::new(remote, |_: &http::request::Parts| Some(user("layer")));
    let service = layer.layer(tower::service_fn(|_: Request<()>| async {
        Ok::<_, std::convert::Infallible>(Response::new(String::from("hello")))
    }));
    for status in [200, 200, 200, 429] {
        let response = service.clone().oneshot(Request::new(())).await.expect("a response");
        assert_eq!(response.status().as_u16(), status);
        assert!(response.headers().contains_key("ratelimit"));
    }
}

/// An outage of the limiter must not cause an outage of the service, nor delay its requests.
#[tokio::test]
async fn the_fail_policy_decides_while_the_server_is_unavailable() {
    let dead = tollgate_testing::ports::free_address();
    // Accepts connections and never responds.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    for address in [dead, silent.local_addr().expect("an address")] {
        for (fail_policy, passes, status) in [(FailPolicy::Open, true, 200), (FailPolicy::Closed, false, 503)]
        {
            let quick =
                RemoteConfig { fail_policy, deadline: Duration::from_millis(50), ..settings(address) };
            let decided = Remote::new(quick).expect("an address").decide(user("a")).await;
            assert_eq!(
                (decided.is_allowed, decided.response.status().as_u16()),
                (passes, status),
                "{address}"
            );
            assert_eq!(decided.response.headers().contains_key("retry-after"), !passes);
        }
    }
    for address in ["not an address", "127.0.0.1:8081", "ftp://127.0.0.1:8081", "http://", "/path", ""] {
        let error = Remote::new(RemoteConfig::new(address, "shop")).expect_err(address);
        assert!(error.to_string().contains("http://127.0.0.1:8081"), "{error}");
    }
}

/// The client reconnects to a restarted server without a restart of its own process.
#[tokio::test(flavor = "multi_thread")]
async fn a_restarted_server_is_used_again() {
    let server = Server::with_rules(RULES);
    let address = server.grpc;
    let remote = Remote::new(RemoteConfig { fail_policy: FailPolicy::Closed, ..settings(address) })
        .expect("an address");
    assert!(remote.decide(user("a")).await.is_allowed);
    tokio::task::block_in_place(|| server.kill());
    let decided = remote.decide(user("a")).await;
    assert_eq!(decided.response.status(), 503);
    let _again = Server::start_at(&[RULES], "", address);
    let runtime = tokio::runtime::Handle::current();
    tokio::task::block_in_place(|| {
        eventually("the restarted server", || {
            runtime.block_on(remote.decide(user("a"))).is_allowed.then_some(())
        });
    });
}

fn remaining(server: &Server, name: &str) -> u64 {
    let body = json!({"domain": "shop", "attributes": {"user": name}, "cost": 0});
    server.post("/v1/check", &body).json()["limits"][0]["remaining"].as_u64().expect("a number")
}

/// An estimate is charged at once, and only the real cost stands.
#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_is_settled_or_canceled_at_its_server() {
    let server = Server::with_rules(RULES);
    let remote = Remote::new(settings(server.grpc)).expect("an address");
    let hour = Duration::from_secs(3_600);
    let reserved = remote.reserve(user("a").with_cost(3), hour).await.expect("a reservation");
    assert_eq!(remaining(&server, "a"), 0);
    let never = remote.reserve(user("a").with_cost(4), hour).await.expect_err("more than the limit");
    assert_eq!(never, RemoteReservationError::Denied { retry_after: None });
    let denied = remote.reserve(user("a").with_cost(2), hour).await.expect_err("over the limit");
    assert!(matches!(denied, RemoteReservationError::Denied { retry_after: Some(_) }), "{denied:?}");
    reserved.settle(1).await.expect("settled");
    assert_eq!(remaining(&server, "a"), 2);

    let by_descriptors = CheckRequest::descriptors([[("user", "a")]]).with_cost(2);
    let reserved = remote.reserve(by_descriptors, hour).await.expect("a reservation");
    assert_eq!(remaining(&server, "a"), 0);
    reserved.cancel().await.expect("canceled");
    assert_eq!(remaining(&server, "a"), 2);

    let unmatched = CheckRequest::attributes([("other", "a")]);
    remote
        .reserve(unmatched, hour)
        .await
        .expect("nothing to hold")
        .settle(5)
        .await
        .expect("nothing to settle");
    let error = remote.reserve(user("a"), Duration::from_secs(86_401)).await.expect_err("too long");
    assert!(matches!(&error, RemoteReservationError::Refused(text) if text.contains("86400000")), "{error}");
}

/// A server that does not answer costs its share of the deadline once; then the next one is asked first.
#[tokio::test]
async fn the_next_server_answers_for_a_silent_one() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let server = Server::with_rules(RULES);
    let config = RemoteConfig {
        other_addresses: vec![format!("http://{}", server.grpc)],
        fail_policy: FailPolicy::Closed,
        deadline: Duration::from_secs(4),
        ..settings(silent.local_addr().expect("an address"))
    };
    let remote = Remote::new(config).expect("addresses");
    for left in [2, 1, 0] {
        let decided = remote.decide(user("a")).await;
        assert!(decided.is_allowed, "{:?}", decided.response);
        assert_eq!(remaining(&server, "a"), left);
    }
    assert_eq!(remote.decide(user("a")).await.response.status(), 429, "a denial is an answer");
}

/// A relay that passes on what the client sends, and what the server sends only while it is open.
struct Relay {
    address: SocketAddr,
    is_open: Arc<(Mutex<bool>, Condvar)>,
}

impl Relay {
    fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let is_open = Arc::new((Mutex::new(true), Condvar::new()));
        let gate = Arc::clone(&is_open);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let upstream = TcpStream::connect(server).expect("the server");
                let (mut from, mut to) =
                    (client.try_clone().expect("a stream"), upstream.try_clone().expect("a stream"));
                std::thread::spawn(move || std::io::copy(&mut from, &mut to));
                let gate = Arc::clone(&gate);
                std::thread::spawn(move || held(&upstream, &client, &gate));
            }
        });
        Self { address, is_open }
    }

    fn set_open(&self, open: bool) {
        *self.is_open.0.lock().expect("a lock") = open;
        self.is_open.1.notify_all();
    }
}

fn held(mut from: &TcpStream, mut to: &TcpStream, gate: &(Mutex<bool>, Condvar)) {
    let mut buffer = [0; 4_096];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let open = gate.0.lock().expect("a lock");
        drop(gate.1.wait_while(open, |open| !*open).expect("a lock"));
        if to.write_all(&buffer[..count]).is_err() {
            return;
        }
    }
}

/// A slow server delays no check, and the caller pays once: what the slower one charged is given back when it answers.
#[tokio::test(flavor = "multi_thread")]
async fn a_hedged_request_is_charged_once() {
    let (slow, quick) = (Server::with_rules(RULES), Server::with_rules(RULES));
    let relay = Relay::to(slow.grpc);
    let config = RemoteConfig {
        other_addresses: vec![format!("http://{}", quick.grpc)],
        hedge_after: Some(Duration::from_millis(3).into()),
        fail_policy: FailPolicy::Closed,
        ..settings(relay.address)
    };
    let remote = Remote::new(config).expect("addresses");
    assert!(remote.decide(user("peek").with_cost(0)).await.is_allowed);
    relay.set_open(false);
    for left in [2, 1] {
        assert!(remote.decide(user("a")).await.is_allowed);
        assert_eq!(remaining(&quick, "a"), left);
    }
    tokio::task::block_in_place(|| {
        eventually("the charges at the slow server", || (remaining(&slow, "a") == 1).then_some(()));
        relay.set_open(true);
        eventually("the slow server's refunds", || (remaining(&slow, "a") == 3).then_some(()));
    });
    assert_eq!(remaining(&quick, "a"), 1);
}
