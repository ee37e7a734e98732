//! The client against servers that do what the shared cases say, over real connections.

use super::*;
use crate::checks::{CheckReason, ResultSource};
use crate::conformance_cases::load_cases;
use serde_json::{Value, json};
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

/// Long enough for a busy machine; servers that never answer take all of it.
const DEADLINE: Duration = Duration::from_secs(3);

/// A server that does one thing with every request.
struct FaultyServer {
    address: String,
    asked: Arc<AtomicUsize>,
    /// Of one that refuses connections: a port that is bound and not listened at, so that no other test gets it.
    _refusing: Option<TcpSocket>,
}

impl FaultyServer {
    async fn start(behavior: Value) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(([127, 0, 0, 1], 0).into()).expect("a port");
        let address = format!("http://{}", socket.local_addr().expect("an address"));
        let asked = Arc::new(AtomicUsize::new(0));
        if behavior == "refused" {
            return Self { address, asked, _refusing: Some(socket) };
        }
        let (listener, counted) = (socket.listen(16).expect("a listener"), Arc::clone(&asked));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, behavior.clone(), Arc::clone(&counted)));
            }
        });
        Self { address, asked, _refusing: None }
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

/// Reads one request; `None` at the end of the connection.
async fn read_request(stream: &mut TcpStream) -> Option<String> {
    let mut read = Vec::new();
    loop {
        if stream.read_buf(&mut read).await.ok()? == 0 {
            return None;
        }
        let text = String::from_utf8_lossy(&read).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length =
            head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
        if body.len() >= length.unwrap_or(0) {
            return Some(text);
        }
    }
}

async fn serve(mut stream: TcpStream, behavior: Value, asked: Arc<AtomicUsize>) {
    while read_request(&mut stream).await.is_some() {
        asked.fetch_add(1, Ordering::SeqCst);
        let head = |status: u64, length: usize| {
            format!(
                "HTTP/1.1 {status} Status\r\ncontent-length: {length}\r\nratelimit: \"r\";r=0;t=1\r\n\r\n"
            )
        };
        match behavior.as_str() {
            Some("cut") => return,
            Some("hang") => std::future::pending().await,
            Some("cut_body" | "slow_body") => {
                let begun = head(200, 100) + "{\"allowed\":";
                let _ = stream.write_all(begun.as_bytes()).await;
                if behavior == "slow_body" {
                    std::future::pending::<()>().await;
                }
                return;
            }
            _ => {
                let body = behavior["body"].as_str().expect("a body");
                let response = head(behavior["status"].as_u64().expect("a status"), body.len()) + body;
                if stream.write_all(response.as_bytes()).await.is_err() {
                    return;
                }
            }
        }
    }
}

fn client_of(servers: &[FaultyServer], change: impl FnOnce(&mut HttpRemoteConfig)) -> HttpRemote {
    let mut config = HttpRemoteConfig::new(servers[0].address.clone(), "shop");
    config.deadline = DEADLINE;
    config.other_addresses = servers[1..].iter().map(|server| server.address.clone()).collect();
    change(&mut config);
    HttpRemote::new(config).expect("settings")
}

async fn fails_as(case: Value) {
    let mut servers = Vec::new();
    for behavior in case["servers"].as_array().expect("servers") {
        servers.push(FaultyServer::start(behavior.clone()).await);
    }
    let policy = if case["policy"] == "closed" { FailPolicy::Closed } else { FailPolicy::Open };
    let client = client_of(&servers, |config| config.fail_policy = policy);
    let result = client.check(&CheckRequest::attributes([("user", "ann")])).await;
    // Servers are asked in order: those that faulted, then the one that answered.
    let faults = client.client.order.faults();
    let mut asked: Vec<usize> = (0..servers.len()).filter(|at| faults[*at] > 0).collect();
    if result.source == ResultSource::Server {
        asked.push(asked.len());
    }
    for (at, server) in servers.iter().enumerate() {
        let is_counted = case["servers"][at] != "refused" && asked.contains(&at);
        assert_eq!(server.asked(), usize::from(is_counted), "{}: server {at}", case["name"]);
    }
    let got = json!({
        "allowed": result.is_allowed, "source": result.source.as_str(), "reason": result.reason.as_str(),
        "retry_after_ms": result.retry_after.map(|wait| u64::try_from(wait.as_millis()).expect("short")),
        "asked": asked,
    });
    assert_eq!(got, case["expect"], "{}", case["name"]);
}

/// What a client does while its servers fail must not depend on its language.
#[tokio::test]
async fn faults_end_as_in_the_other_clients() {
    let data = load_cases("faults");
    let usual = HttpRemoteConfig::new("http://127.0.0.1:1", "shop");
    assert_eq!(data["default_deadline_ms"], json!(u64::try_from(usual.deadline.as_millis()).expect("short")));
    let hedging = load_cases("hedging");
    let after = hedging["default_hedge_after_ms"].as_u64().map(Duration::from_millis).map(HedgeAfter::from);
    assert_eq!(after, Some(HttpRemoteConfig::HEDGE_AFTER));
    let mut running = tokio::task::JoinSet::new();
    for case in data["cases"].as_array().filter(|cases| !cases.is_empty()).expect("cases") {
        running.spawn(fails_as(case.clone()));
    }
    while let Some(done) = running.join_next().await {
        done.expect("as the case says");
    }
}

fn denial(retry_after_ms: u64) -> Value {
    let body = json!({
        "allowed": false, "denied_by": "r", "retry_after_ms": retry_after_ms, "decision_id": "d", "origin": "store",
        "limits": [{"rule": "r", "limit": 1, "remaining": 0, "reset_ms": retry_after_ms, "over": true}],
    });
    json!({"status": 429, "body": body.to_string()})
}

fn allowance(reservation: &str) -> Value {
    let body = json!({"allowed": true, "limits": [], "decision_id": "d", "origin": "store", "reservation": reservation});
    json!({"status": 200, "body": body.to_string()})
}

/// A caller over its limit would otherwise cost a request for each of its own.
#[tokio::test]
async fn a_denial_is_repeated_without_the_server() {
    let server = FaultyServer::start(denial(60_000)).await;
    let client = client_of(std::slice::from_ref(&server), |_| ());
    let request = CheckRequest::attributes([("user", "ann")]);
    assert_eq!(client.check(&request).await.source, ResultSource::Server);
    let again = client.check(&request).await;
    assert_eq!((again.source, again.reason, server.asked()), (ResultSource::Cache, CheckReason::Denied, 1));
    assert!(again.retry_after.is_some_and(|wait| wait <= Duration::from_secs(60)));
    // Other callers, peeks and reservations are asked for.
    client.check(&CheckRequest::attributes([("user", "ben")])).await;
    client.check(&request.clone().with_cost(0)).await;
    assert!(!client.reserve(&request, Duration::from_secs(1)).await.result().is_allowed);
    assert_eq!(server.asked(), 4);
    client.clear_deny_cache();
    client.check(&request).await;
    assert_eq!(server.asked(), 5);
    // Without it every check is.
    let without = client_of(std::slice::from_ref(&server), |config| config.deny_cache = 0);
    without.check(&request).await;
    without.check(&request).await;
    assert_eq!(server.asked(), 7);
}

/// A setting that nothing measures for would hedge after the default forever.
#[tokio::test]
async fn the_p95_is_measured_by_calls_that_may_be_hedged() {
    let servers = [FaultyServer::start(allowance("r")).await, FaultyServer::start(allowance("r")).await];
    let request = CheckRequest::attributes([("user", "ann")]);
    for (after, first, recorded) in
        [(HedgeAfter::P95, Duration::from_millis(3), 3), (HedgeAfter::Fixed(DEADLINE), DEADLINE, 0)]
    {
        let client = client_of(&servers, |config| config.hedge_after = Some(after));
        let hedging = &client.client.hedging;
        assert_eq!(hedging.after(), Some(first));
        for _ in 0..3 {
            assert!(client.check(&request).await.is_allowed);
            client.check(&request.clone().with_cost(0)).await;
        }
        // A first request that a hedge has overtaken is measured when it ends.
        let all = async {
            while hedging.latency.recorded() < recorded {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(DEADLINE, all).await.expect("measured");
        assert_eq!(hedging.latency.recorded(), recorded);
    }
}

/// Two servers share a store: the hedge is denied because of what the first one has charged. A caller would be denied
/// what it was given, until the denial ends.
#[tokio::test]
async fn a_hedged_denial_is_not_cached_while_the_other_request_may_be_its_reason() {
    let servers = [FaultyServer::start(json!("hang")).await, FaultyServer::start(denial(60_000)).await];
    let client = client_of(&servers, |config| config.hedge_after = Some(Duration::from_millis(1).into()));
    let request = CheckRequest::attributes([("user", "ann")]);
    let result = client.check(&request).await;
    assert_eq!((result.source, result.reason), (ResultSource::Server, CheckReason::Denied));
    assert_eq!(servers.each_ref().map(FaultyServer::asked), [1, 1]);
    let again = client.check_within(&request, Duration::from_millis(1)).await;
    assert_ne!(again.source, ResultSource::Cache);
}

/// Servers that are slow because of their load must not get two requests for each call.
#[tokio::test]
async fn calls_take_their_hedges_from_one_budget() {
    let servers = [FaultyServer::start(json!("hang")).await, FaultyServer::start(allowance("r")).await];
    let client = client_of(&servers, |config| config.hedge_after = Some(Duration::from_millis(1).into()));
    let request = CheckRequest::attributes([("user", "ann")]);
    for balance in [9_000, 8_100] {
        assert!(client.check(&request).await.is_allowed);
        assert_eq!(client.client.hedging.budget.balance(), balance);
    }
}

/// Calls without budget must not go on to wait for a server that hangs.
#[tokio::test]
async fn a_server_that_has_used_its_share_of_the_deadline_moves_back() {
    let servers = [FaultyServer::start(json!("hang")).await, FaultyServer::start(allowance("r")).await];
    let client = client_of(&servers, |config| config.hedge_after = Some(DEADLINE.into()));
    let request = CheckRequest::attributes([("user", "ann")]);
    assert_eq!(client.check(&request).await.source, ResultSource::Server);
    assert_eq!((client.client.order.faults()[0], client.client.hedging.budget.balance()), (1, 10_000));
}

/// A caller that has no time left must not wait for a server.
#[tokio::test]
async fn a_callers_own_deadline_goes_before() {
    let server = FaultyServer::start(json!("hang")).await;
    let client =
        client_of(std::slice::from_ref(&server), |config| config.deadline = Duration::from_secs(3_600));
    let request = CheckRequest::attributes([("user", "ann")]);
    let result = client.check_within(&request, Duration::from_millis(20)).await;
    assert_eq!((result.source, result.reason), (ResultSource::Policy, CheckReason::Fault(Fault::Timeout)));
    assert_eq!(client.check_within(&request, Duration::ZERO).await.source, ResultSource::Policy);
    assert_eq!(server.asked(), 1);
}

/// A caller behind a layer gets a response that says what to do.
#[tokio::test]
async fn a_layer_responds_with_what_the_server_says() {
    let decide = async |behavior: Value| {
        let server = FaultyServer::start(behavior).await;
        let client = client_of(&[server], |config| config.fail_policy = FailPolicy::Closed);
        client.decide(CheckRequest::attributes([("user", "ann")])).await
    };
    let denied = decide(denial(1_500)).await;
    let headers = denied.response.headers();
    assert_eq!((denied.is_allowed, denied.response.status().as_u16()), (false, 429));
    assert!(headers["retry-after"] == "2" && headers["ratelimit"] == "\"r\";r=0;t=1", "{headers:?}");
    let allowed = decide(allowance("")).await;
    assert!(allowed.is_allowed && allowed.response.headers().contains_key("ratelimit"));
    assert_eq!(decide(json!("cut")).await.response.status().as_u16(), 503);
    let rejected = decide(json!({"status": 400, "body": "{}"})).await;
    assert_eq!((rejected.is_allowed, rejected.response.status().as_u16()), (false, 400));
    let problem = json!({"field": "request", "status": 401}).to_string();
    let unreadable = decide(json!({"status": 401, "body": problem})).await;
    assert_eq!((unreadable.response.status().as_u16(), unreadable.response.body()), (401, &problem.into()));
}

#[test]
fn settings_are_checked_and_secrets_not_shown() {
    for address in ["127.0.0.1:8080", "ftp://127.0.0.1", "http://user@127.0.0.1", "http://127.0.0.1/path"] {
        let wrong = HttpRemote::new(HttpRemoteConfig::new(address, "shop"));
        assert!(matches!(wrong, Err(RemoteError::Address(_))), "{address}");
    }
    let config = |token: &str| HttpRemoteConfig {
        token: Some(token.to_owned()),
        ..HttpRemoteConfig::new("http://127.0.0.1:1", "shop")
    };
    assert!(matches!(HttpRemote::new(config("a\nb")), Err(RemoteError::Token)));
    let client = HttpRemote::new(config("hunter2")).expect("settings");
    assert!(!format!("{client:?}").contains("hunter2"));
}
