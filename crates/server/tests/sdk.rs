//! The Rust layer asking a server over gRPC: the answers are the server's own, no request waits for a server that does
//! not answer, and what it did not decide is answered by policy.

mod harness;

use harness::{Server, eventually};
use http::{Request, Response};
use serde_json::json;
use std::net::{SocketAddr, TcpListener};
use std::time::Duration;
use tollgate_sdk::{CheckRequest, Decider, FailPolicy, Remote, RemoteConfig};

const RULES: &str = "
domain: shop
descriptors:
  - {key: user, name: per-user, limit: [3/hour, 100/day]}
  - {key: global, name: total, limit: 1000/hour}
  - {key: queue, name: queue, limit: 1/hour, burst: 2, algorithm: leaky_bucket, action: delay}
  - {key: lesser, name: lesser, limit: 1/hour, action: degrade}
";

fn settings(address: SocketAddr) -> RemoteConfig {
    // A busy machine may take its time; only the tests of time set it shorter.
    RemoteConfig { deadline: harness::LONG, ..RemoteConfig::new(format!("http://{address}"), "shop") }
}

fn user(name: &str) -> CheckRequest {
    CheckRequest::attributes([("user", name.to_owned())])
}

/// A caller must not be able to tell by the answer where it was decided.
#[tokio::test]
async fn a_remote_decision_is_answered_as_the_server_answers() {
    let server = Server::with_rules(RULES);
    let remote = Remote::new(RemoteConfig { connections: 2, ..settings(server.grpc) }).expect("an address");
    for left in [2, 1, 0] {
        let decided = remote.decide(user("a")).await;
        assert!(decided.is_allowed);
        // The same key over HTTP, without taking anything, tells the same.
        let look =
            server.post("/v1/check", &json!({"domain": "shop", "attributes": {"user": "a"}, "cost": 0}));
        let headers = decided.response.headers();
        assert!(
            headers["ratelimit"].to_str().expect("ASCII").starts_with(&format!("\"per-user/1h\";r={left};"))
        );
        assert_eq!(headers["ratelimit-policy"].to_str().ok(), look.header("ratelimit-policy"));
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
    assert!(!remote.decide(user("b")).await.is_allowed, "the cost was taken");
    assert!(remote.decide(user("b").with_cost(0)).await.is_allowed, "a look");

    let by_descriptors = |name: &str| CheckRequest::descriptors([[("user", name.to_owned())]]);
    for passes in [true, true, true, false] {
        let decided = remote.decide(by_descriptors("c")).await;
        assert_eq!(decided.is_allowed, passes, "{:?}", decided.response);
        let policies = decided.response.headers()["ratelimit-policy"].to_str().expect("ASCII");
        assert!(!policies.contains("total"), "a descriptor meets its own rule alone: {policies}");
    }
    let queue = || CheckRequest::attributes([("queue", "q")]);
    remote.decide(queue()).await;
    let held = remote.decide(queue()).await;
    assert!(held.is_allowed && held.delay > Duration::from_secs(60), "{:?}", held.delay);
    let lesser = || CheckRequest::attributes([("lesser", "q")]);
    remote.decide(lesser()).await;
    assert_eq!(remote.decide(lesser()).await.markers["x-ratelimit-degraded"], "lesser");
}

/// The layer itself over the wire, around a service.
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
        let answer = service.clone().oneshot(Request::new(())).await.expect("an answer");
        assert_eq!(answer.status().as_u16(), status);
        assert!(answer.headers().contains_key("ratelimit"));
    }
}

/// An outage of the limiter must not become one of the service, nor hold its requests up.
#[tokio::test]
async fn without_an_answer_the_policy_decides() {
    let free = TcpListener::bind("127.0.0.1:0").expect("a port");
    let dead = free.local_addr().expect("an address");
    drop(free);
    // It takes connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    for address in [dead, silent.local_addr().expect("an address")] {
        for (on_failure, passes, status) in [(FailPolicy::Open, true, 200), (FailPolicy::Closed, false, 503)]
        {
            let quick = RemoteConfig {
                fail_policy: on_failure,
                deadline: Duration::from_millis(50),
                ..settings(address)
            };
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

/// A server that comes back is asked again, without anything being restarted here.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_comes_back_is_asked_again() {
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
        eventually("the server that came back", || {
            runtime.block_on(remote.decide(user("a"))).is_allowed.then_some(())
        });
    });
}
