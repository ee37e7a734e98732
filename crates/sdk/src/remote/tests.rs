//! The client against servers that do what the shared cases say, over real connections.

use super::*;
use crate::checks::{CheckReason, ResultSource};
use crate::conformance_cases::load_cases;
use crate::rls::{HeaderValue, OK, OVER_LIMIT};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::AsyncReadExt;
use tokio::net::TcpSocket;
use tonic::Code;
use tonic::body::Body;
use tonic::server::{NamedService, UnaryService};
use tonic::transport::server::TcpIncoming;

/// Long enough for a busy machine; servers that never answer take all of it.
const DEADLINE: Duration = Duration::from_secs(3);

type Pending<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A rate limit service that replies to every request as a case says.
#[derive(Clone)]
struct ScriptedService {
    behavior: Value,
    asked: Arc<AtomicUsize>,
}

impl NamedService for ScriptedService {
    const NAME: &'static str = "envoy.service.ratelimit.v3.RateLimitService";
}

impl tower::Service<http::Request<Body>> for ScriptedService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pending<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let service = self.clone();
        Box::pin(async move {
            let codec = ProstCodec::<RateLimitResponse, RateLimitRequest>::default();
            Ok(tonic::server::Grpc::new(codec).unary(service, request).await)
        })
    }
}

impl UnaryService<RateLimitRequest> for ScriptedService {
    type Response = RateLimitResponse;
    type Future = Pending<Result<tonic::Response<RateLimitResponse>, Status>>;

    fn call(&mut self, request: tonic::Request<RateLimitRequest>) -> Self::Future {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let metadata = request.metadata();
        let reply = if metadata.get("tollgate-ask").is_some_and(|ask| ask == "cancel") {
            Ok(RateLimitResponse::default())
        } else if metadata.contains_key("tollgate-reserve") && self.behavior["reserve"].is_object() {
            replied(&self.behavior["reserve"])
        } else {
            replied(&self.behavior)
        };
        Box::pin(std::future::ready(reply.map(tonic::Response::new)))
    }
}

/// Returns what a Tollgate server replies over gRPC where it would respond like this over HTTP.
fn replied(response: &Value) -> Result<RateLimitResponse, Status> {
    let body = response["body"].as_str().expect("a body");
    let status = response["status"].as_u64().expect("a status");
    let is_decision = serde_json::from_str::<Value>(body).is_ok_and(|body| body.get("allowed").is_some());
    match status {
        200 => {}
        429 | 503 if is_decision => {}
        400 => return Err(Status::invalid_argument("wrong")),
        401 | 403 => return Err(Status::unauthenticated("no token")),
        _ => return Err(Status::unavailable("not now")),
    }
    let field = |key: &str, value: &str| HeaderValue { key: key.to_owned(), value: value.to_owned() };
    let mut fields = vec![field("tollgate-status", &status.to_string()), field("tollgate-decision", body)];
    if let Some(id) = response["reservation"].as_str() {
        fields.push(field("tollgate-reservation", id));
    }
    let overall_code = if status == 200 { OK } else { OVER_LIMIT };
    Ok(RateLimitResponse { overall_code, response_headers_to_add: fields, ..RateLimitResponse::default() })
}

/// A server that does one thing with every request.
struct ScriptedServer {
    address: String,
    asked: Arc<AtomicUsize>,
    /// Of one that refuses connections: a port that is bound and not listened at, so that no other test gets it.
    _refusing: Option<TcpSocket>,
}

impl ScriptedServer {
    async fn start(behavior: Value) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(([127, 0, 0, 1], 0).into()).expect("a port");
        let address = format!("http://{}", socket.local_addr().expect("an address"));
        let asked = Arc::new(AtomicUsize::new(0));
        if behavior == "refused" {
            return Self { address, asked, _refusing: Some(socket) };
        }
        let (listener, counter) = (socket.listen(16).expect("a listener"), Arc::clone(&asked));
        match behavior.as_str() {
            // Over HTTP/2 there is no difference between a connection that ends before and inside of a body.
            Some(kind) => {
                let is_cut = kind.starts_with("cut");
                tokio::spawn(async move {
                    while let Ok((mut stream, _)) = listener.accept().await {
                        counter.fetch_add(1, Ordering::SeqCst);
                        tokio::spawn(async move {
                            let _ = stream.read_u8().await;
                            if !is_cut {
                                std::future::pending::<()>().await;
                            }
                        });
                    }
                });
            }
            None => {
                let service = ScriptedService { behavior, asked: counter };
                let server = tonic::transport::Server::builder().add_service(service);
                tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
            }
        }
        Self { address, asked, _refusing: None }
    }

    fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

fn client_of(servers: &[ScriptedServer], change: impl FnOnce(&mut RemoteConfig)) -> Remote {
    let mut config = RemoteConfig::new(servers[0].address.clone(), "shop");
    config.deadline = DEADLINE;
    config.other_addresses = servers[1..].iter().map(|server| server.address.clone()).collect();
    change(&mut config);
    Remote::new(config).expect("settings")
}

fn millis(time: Option<Duration>) -> Option<u64> {
    time.map(|time| u64::try_from(time.as_millis()).expect("short"))
}

async fn fails_as(case: Value) {
    let mut servers = Vec::new();
    for behavior in case["servers"].as_array().expect("servers") {
        servers.push(ScriptedServer::start(behavior.clone()).await);
    }
    let policy = if case["policy"] == "closed" { FailPolicy::Closed } else { FailPolicy::Open };
    let client = client_of(&servers, |config| config.fail_policy = policy);
    let result = client.check(&CheckRequest::attributes([("user", "ann")])).await;
    // Servers are asked in order: those that faulted, then the one that answered.
    let faults = client.servers.order.faults();
    let mut asked: Vec<usize> = (0..servers.len()).filter(|at| faults[*at] > 0).collect();
    if result.source == ResultSource::Server {
        asked.push(asked.len());
    }
    for (at, server) in servers.iter().enumerate() {
        let is_counted = case["servers"][at] != "refused" && asked.contains(&at);
        assert_eq!(server.asked() > 0, is_counted, "{}: server {at}", case["name"]);
    }
    let got = json!({
        "allowed": result.is_allowed, "source": result.source.as_str(), "reason": result.reason.as_str(),
        "retry_after_ms": millis(result.retry_after), "asked": asked,
    });
    assert_eq!(got, case["expect"], "{}", case["name"]);
}

/// Whether a program asks over gRPC or HTTP must not decide what it does while its servers fail.
#[tokio::test]
async fn faults_end_as_in_the_other_clients() {
    let data = load_cases("faults");
    let mut running = tokio::task::JoinSet::new();
    for case in data["cases"].as_array().filter(|cases| !cases.is_empty()).expect("cases") {
        running.spawn(fails_as(case.clone()));
    }
    while let Some(done) = running.join_next().await {
        done.expect("as the case says");
    }
}

/// Results have the same fields with the same values, whichever way they came.
#[test]
fn decisions_are_read_as_by_the_other_clients() {
    let data = load_cases("answers");
    let cases = data["check"].as_array().filter(|cases| !cases.is_empty()).expect("cases");
    let mut read = 0;
    for case in cases.iter().filter(|case| case["pad_with_spaces_to_bytes"].is_null()) {
        let response = json!({
            "status": case["status"], "body": case["body"], "reservation": case["result"]["reservation"],
        });
        // What is not a decision has no counterpart in gRPC.
        let Ok(reply) = replied(&response) else { continue };
        read += 1;
        match (reply::read(Ok(reply)), case["fault"].as_str()) {
            (Err(fault), expected) => assert_eq!(Some(fault.as_str()), expected, "{}", case["name"]),
            (Ok(replied), _) => {
                let (answer, result) = (&replied.answer, &replied.answer.result);
                let shown = json!({
                    "allowed": result.is_allowed, "source": result.source.as_str(), "reason": result.reason.as_str(),
                    "origin": result.origin, "rule": result.rule, "limit": result.limit, "remaining": result.remaining,
                    "reset_ms": millis(result.reset_after), "retry_after_ms": millis(result.retry_after),
                    "delay_ms": millis(Some(result.delay)), "decision_id": result.decision_id,
                    "reservation": answer.reservation, "cacheable": answer.is_cacheable, "shed": result.is_shed,
                });
                assert_eq!(shown, case["result"], "{}", case["name"]);
            }
        }
    }
    assert!(read > 40, "most cases are decisions: {read}");
}

fn denial(retry_after_ms: u64) -> Value {
    let body = json!({
        "allowed": false, "denied_by": "r", "retry_after_ms": retry_after_ms, "decision_id": "d", "origin": "store",
        "limits": [{"rule": "r", "limit": 1, "remaining": 0, "reset_ms": retry_after_ms, "over": true}],
    });
    json!({"status": 429, "body": body.to_string()})
}

/// A caller over its limit would otherwise cost a request for each of its own.
#[tokio::test]
async fn a_denial_is_repeated_without_the_server() {
    let server = ScriptedServer::start(denial(60_000)).await;
    let client = client_of(std::slice::from_ref(&server), |_| ());
    let request = CheckRequest::attributes([("user", "ann")]);
    assert_eq!(client.check(&request).await.source, ResultSource::Server);
    let again = client.check(&request).await;
    assert_eq!((again.source, again.reason, server.asked()), (ResultSource::Cache, CheckReason::Denied, 1));
    assert!(again.retry_after.is_some_and(|wait| wait <= Duration::from_secs(60)));
    let decided = client.decide(request.clone()).await;
    assert_eq!((decided.is_allowed, decided.response.status().as_u16(), server.asked()), (false, 429, 1));
    assert_eq!(decided.response.headers()["retry-after"], "60");
    // Other callers, peeks and reservations are asked for.
    client.check(&CheckRequest::attributes([("user", "ben")])).await;
    client.check(&request.clone().with_cost(0)).await;
    for _ in 0..2 {
        let reserved = client.reserve(request.clone(), Duration::from_secs(1)).await;
        assert!(
            matches!(reserved, Err(RemoteReservationError::Denied { retry_after: Some(_) })),
            "{reserved:?}"
        );
    }
    assert_eq!(server.asked(), 4, "a denied reservation is repeated too");
    client.clear_deny_cache();
    client.check(&request).await;
    assert_eq!(server.asked(), 5);
    let without = client_of(std::slice::from_ref(&server), |config| config.deny_cache = 0);
    without.check(&request).await;
    without.check(&request).await;
    assert_eq!(server.asked(), 7);
}

/// A setting that nothing measures for would hedge after the default forever.
#[tokio::test]
async fn the_p95_is_measured_by_calls_that_may_be_hedged() {
    let body = json!({"allowed": true, "limits": [], "decision_id": "d", "origin": "store"});
    let allowance = json!({"status": 200, "body": body.to_string(), "reservation": "r"});
    let servers =
        [ScriptedServer::start(allowance.clone()).await, ScriptedServer::start(allowance.clone()).await];
    let request = CheckRequest::attributes([("user", "ann")]);
    for (after, first, recorded) in
        [(HedgeAfter::P95, Duration::from_millis(3), 3), (HedgeAfter::Fixed(DEADLINE), DEADLINE, 0)]
    {
        let client = client_of(&servers, |config| config.hedge_after = Some(after));
        let hedging = &client.servers.hedging;
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
    let servers = [ScriptedServer::start(json!("hang")).await, ScriptedServer::start(denial(60_000)).await];
    let client = client_of(&servers, |config| config.hedge_after = Some(Duration::from_millis(1).into()));
    let request = CheckRequest::attributes([("user", "ann")]);
    let result = client.check(&request).await;
    assert_eq!((result.source, result.reason), (ResultSource::Server, CheckReason::Denied));
    assert_eq!((servers[1].asked(), client.servers.hedging.budget.balance()), (1, 9_000));
    let again = client.check_within(&request, Duration::from_millis(1)).await;
    assert_ne!(again.source, ResultSource::Cache);
}

/// A reservation that ends makes room: what was denied meanwhile is asked for again.
#[tokio::test]
async fn a_closed_reservation_ends_cached_denials() {
    let allowed = json!({"allowed": true, "limits": [], "decision_id": "d", "origin": "store"}).to_string();
    let mut behavior = denial(60_000);
    behavior["reserve"] = json!({"status": 200, "body": allowed, "reservation": "id"});
    let server = ScriptedServer::start(behavior).await;
    let client = client_of(std::slice::from_ref(&server), |_| ());
    let request = CheckRequest::attributes([("user", "ann")]);
    let reserved = client.reserve(request.clone(), Duration::from_secs(1)).await.expect("a reservation");
    for source in [ResultSource::Server, ResultSource::Cache] {
        assert_eq!(client.check(&request).await.source, source);
    }
    reserved.cancel().await.expect("it is canceled");
    assert_eq!(client.check(&request).await.source, ResultSource::Server);
}

/// A caller that has no time left must not wait for a server.
#[tokio::test]
async fn a_callers_own_deadline_goes_before() {
    let server = ScriptedServer::start(json!("hang")).await;
    let client =
        client_of(std::slice::from_ref(&server), |config| config.deadline = Duration::from_secs(3_600));
    let request = CheckRequest::attributes([("user", "ann")]);
    let result = client.check_within(&request, Duration::from_millis(20)).await;
    assert_eq!((result.source, result.reason), (ResultSource::Policy, CheckReason::Fault(Fault::Timeout)));
}

/// Servers of the protocol that are not Tollgate, or are older, send no decision; an empty reply allows nothing.
#[test]
fn replies_without_a_decision_are_read_by_their_statuses() {
    let status = |code, remaining| crate::rls::DescriptorStatus {
        code,
        current_limit: Some(crate::rls::RateLimit { requests_per_unit: 5, unit: 2, name: "r".to_owned() }),
        limit_remaining: remaining,
        duration_until_reset: Some(crate::rls::Duration { seconds: 7, nanos: 0 }),
    };
    let read = |overall_code, statuses| {
        let reply = RateLimitResponse { overall_code, statuses, ..RateLimitResponse::default() };
        reply::read(Ok(reply)).map(|replied| replied.answer)
    };
    let allowed = read(OK, vec![status(OK, 4)]).expect("an answer").result;
    assert_eq!((allowed.is_allowed, allowed.limit, allowed.remaining), (true, Some(5), Some(4)));
    let denied = read(OVER_LIMIT, vec![status(OVER_LIMIT, 0)]).expect("an answer");
    assert_eq!((denied.result.is_allowed, denied.result.reason.as_str()), (false, "denied"));
    assert_eq!((denied.result.retry_after, denied.is_cacheable), (Some(Duration::from_secs(7)), false));
    assert_eq!(read(0, Vec::new()).map_err(Fault::as_str), Err("invalid_response"));
    let no_room = reply::read(Err(Status::new(Code::ResourceExhausted, "full"))).expect("an answer");
    assert!(no_room.is_exhausted() && !no_room.answer.result.is_allowed);
}
