//! The layer around a service: denied requests never reach it, and permits are released however a request ends.

use bytes::Bytes;
use futures_util::stream::poll_fn;
use http::request::Parts;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tollgate_core::{Clock, ManualClock, TimeDelta, Timestamp};
use tollgate_engine::Limiter;
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_sdk::{CheckRequest, IdentityConfig, IdentityResolver, InProcess, TollgateLayer};
use tollgate_store::{MemoryConfig, MemoryStore};
use tower::{Layer, Service, ServiceExt, service_fn};

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: per-user, limit: 2/hour}
  - {key: slot, name: slots, concurrency: {limit: 1, ttl: 60s}}
  - {key: queue, name: queue, limit: 1/second, burst: 10, action: delay}
  - {key: lesser, name: lesser, limit: 1/hour, action: degrade}
";

type Limits = InProcess<MemoryStore<Arc<ManualClock>>>;

fn limits() -> (Limits, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let rules = Ruleset::load(&[Source::new("test.yaml", RULES)], &Options::default());
    let rules = Arc::new(rules.unwrap_or_else(|errors| panic!("{errors}")));
    let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
    (InProcess::new(Arc::new(Limiter::new(rules, store, time)), "d"), clock)
}

/// Checks the key that the header `x-key` names.
fn extract(head: &http::request::Parts) -> Option<CheckRequest> {
    let key = head.headers.get("x-key")?.to_str().ok()?;
    Some(CheckRequest::attributes([(key.to_owned(), "x")]))
}

fn request(key: &str) -> Request<Full<Bytes>> {
    Request::get("/").header("x-key", key).body(Full::default()).expect("a request")
}

fn hello(
    served: &Arc<AtomicU64>,
) -> impl Service<Request<Full<Bytes>>, Response = Response<Full<Bytes>>, Error = Infallible, Future: Send>
+ Clone
+ Send
+ 'static {
    let served = Arc::clone(served);
    service_fn(move |request: Request<Full<Bytes>>| {
        served.fetch_add(1, Ordering::SeqCst);
        let degraded = request.headers().get("x-ratelimit-degraded").cloned();
        async move {
            let mut response = Response::new(Full::new(Bytes::from("hello")));
            if let Some(degraded) = degraded {
                response.headers_mut().insert("x-seen", degraded);
            }
            Ok(response)
        }
    })
}

/// Responses are the same as those of the Tollgate server, and a denial costs the service nothing.
#[tokio::test]
async fn requests_over_the_limit_are_denied_and_never_reach_the_service() {
    let served = Arc::new(AtomicU64::new(0));
    let service = TollgateLayer::new(limits().0, extract).layer(hello(&served));
    for left in [1, 0] {
        let response = service.clone().oneshot(request("user")).await.expect("a response");
        let field = response.headers()["ratelimit"].to_str().expect("ASCII").to_owned();
        assert!(field.starts_with(&format!("\"per-user\";r={left};t=")), "{field}");
        assert_eq!(response.headers()["ratelimit-policy"], "\"per-user\";q=2;w=3600");
        assert_eq!(response.into_body().collect().await.expect("a body").to_bytes(), "hello");
    }
    let denied = service.clone().oneshot(request("user")).await.expect("a response");
    assert_eq!(denied.status(), 429);
    assert_eq!(denied.headers()["retry-after"], "1800");
    assert_eq!(denied.headers()["content-type"], "application/problem+json");
    let body = denied.into_body().collect().await.expect("a body").to_bytes();
    assert!(String::from_utf8_lossy(&body).contains("violated-policies"), "{body:?}");
    assert_eq!(served.load(Ordering::SeqCst), 2);

    let unlimited = Request::get("/").body(Full::default()).expect("a request");
    assert!(
        service.oneshot(unlimited).await.expect("a response").headers().is_empty(),
        "a request that is not limited has no rate limit fields"
    );
}

/// gRPC clients read `grpc-status`; an HTTP 429 would be an unknown error for them.
#[tokio::test]
async fn grpc_clients_get_a_grpc_status() {
    let served = Arc::new(AtomicU64::new(0));
    let service = TollgateLayer::new(limits().0, extract).layer(hello(&served));
    let call = || {
        let mut call = request("user");
        call.headers_mut().insert("content-type", "application/grpc+proto".parse().expect("a value"));
        service.clone().oneshot(call)
    };
    call().await.expect("a response");
    call().await.expect("a response");
    let denied = call().await.expect("a response");
    assert_eq!(
        (denied.status().as_u16(), &denied.headers()["grpc-status"]),
        (200, &"8".parse().expect("a value"))
    );
    assert_eq!(denied.headers()["content-type"], "application/grpc");
    assert!(denied.headers().contains_key("retry-after"));
    assert!(denied.into_body().collect().await.expect("a body").to_bytes().is_empty());
}

/// A service degrades by this marker, so clients must not be able to set it.
#[tokio::test]
async fn only_the_layer_marks_degraded_requests() {
    let served = Arc::new(AtomicU64::new(0));
    let service = TollgateLayer::new(limits().0, extract).layer(hello(&served));
    for seen in [None, Some("lesser")] {
        let mut call = request("lesser");
        call.headers_mut().insert("x-ratelimit-degraded", "forged".parse().expect("a value"));
        let response = service.clone().oneshot(call).await.expect("a response");
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers().get("x-seen").and_then(|value| value.to_str().ok()), seen);
    }
    let unlimited = Request::get("/").header("x-ratelimit-degraded", "forged").body(Full::default());
    let response = service.oneshot(unlimited.expect("a request")).await.expect("a response");
    assert!(response.headers().is_empty(), "requests that are not limited neither: {:?}", response.headers());
}

/// Observers of the engine receive the decision time of the layer, as of every other protocol.
#[tokio::test]
async fn decision_times_are_reported_to_observers() {
    #[derive(Default)]
    struct Watch(std::sync::Mutex<Vec<(&'static str, u64)>>);
    impl tollgate_engine::Observer for Watch {
        fn on_decision(&self, _: &tollgate_engine::Check<'_>, _: &tollgate_engine::Decision) {}
        fn on_latency(&self, protocol: &'static str, requests: u64, _: TimeDelta) {
            self.0.lock().expect("a list").push((protocol, requests));
        }
    }
    let (watch, clock) =
        (Arc::new(Watch::default()), Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000))));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let rules = Ruleset::load(&[Source::new("test.yaml", RULES)], &Options::default()).expect("rules");
    let limiter = Limiter::new(Arc::new(rules), store, clock).with_observer(Arc::clone(&watch) as _);
    let service =
        TollgateLayer::new(InProcess::new(Arc::new(limiter), "d"), extract).layer(hello(&Arc::default()));
    service.clone().oneshot(request("user")).await.expect("a response");
    service.oneshot(request("slot")).await.expect("a response");
    assert_eq!(*watch.0.lock().expect("a list"), [("sdk", 1), ("sdk", 1)]);
}

/// The channel of a service that streams the frames that a test sends.
struct Slow {
    frames: mpsc::UnboundedSender<Bytes>,
    stream: Option<mpsc::UnboundedReceiver<Bytes>>,
}

impl Slow {
    fn new() -> Self {
        let (frames, stream) = mpsc::unbounded_channel();
        Self { frames, stream: Some(stream) }
    }
}

/// A permit that is not released blocks its slot until it expires.
#[tokio::test]
async fn a_permit_is_released_when_the_body_ends_or_is_dropped_or_the_service_fails() {
    let (limits, _clock) = limits();
    let layer = TollgateLayer::new(limits, extract);
    let served = Arc::new(AtomicU64::new(0));
    let quick = layer.layer(hello(&served));
    let free = async || quick.clone().oneshot(request("slot")).await.expect("a response").status() == 200;
    let start = async |slow: &mut Slow| {
        let stream = slow.stream.take().expect("started once");
        let stream = Arc::new(std::sync::Mutex::new(Some(stream)));
        let service = service_fn(move |_: Request<Full<Bytes>>| {
            let mut stream = stream.lock().expect("a lock").take().expect("called once");
            async move {
                let frames = poll_fn(move |context| {
                    stream
                        .poll_recv(context)
                        .map(|data| data.map(|data| Ok::<_, Infallible>(Frame::data(data))))
                });
                Ok::<_, Infallible>(Response::new(StreamBody::new(frames)))
            }
        });
        layer.layer(service).oneshot(request("slot")).await.expect("a response")
    };

    // The body is read to its end.
    let mut slow = Slow::new();
    let response = start(&mut slow).await;
    assert_eq!(response.status(), 200);
    assert!(!free().await, "while the body streams");
    let mut body = response.into_body();
    slow.frames.send(Bytes::from("part")).expect("listening");
    assert_eq!(body.frame().await.expect("a frame").expect("data").into_data().expect("data"), "part");
    assert!(!free().await, "between two parts");
    drop(slow);
    assert!(body.frame().await.is_none());
    assert!(free().await, "at the end, although the body is not dropped");
    drop(body);

    // The body is dropped early: the client has disconnected.
    let mut slow = Slow::new();
    let response = start(&mut slow).await;
    assert!(!free().await);
    drop(response);
    assert!(free().await);

    // The service fails.
    let failing = service_fn(|_: Request<Full<Bytes>>| async { Err::<Response<Full<Bytes>>, _>("broken") });
    assert_eq!(layer.layer(failing).oneshot(request("slot")).await.err(), Some("broken"));
    assert!(free().await);

    // The client disconnects before the service responds.
    let reached = Arc::new(Notify::new());
    let called = Arc::clone(&reached);
    let never = service_fn(move |_: Request<Full<Bytes>>| {
        called.notify_one();
        std::future::pending::<Result<Response<Full<Bytes>>, Infallible>>()
    });
    let task = tokio::spawn(layer.layer(never).oneshot(request("slot")));
    reached.notified().await;
    assert!(!free().await);
    task.abort();
    assert!(task.await.is_err());
    assert!(free().await);
}

/// `action: delay` paces callers instead of denying them; a request that leaves the queue frees its time for the next
/// one.
#[tokio::test(start_paused = true)]
async fn the_delay_queue_delays_requests() {
    let (limits, _clock) = limits();
    let served = Arc::new(AtomicU64::new(0));
    let service = TollgateLayer::with_queue(limits, extract, 2).layer(hello(&served));
    let start = tokio::time::Instant::now();
    let call = || tokio::spawn(service.clone().oneshot(request("queue")));
    assert_eq!(call().await.expect("a task").expect("a response").status(), 200);
    assert_eq!(start.elapsed(), Duration::ZERO, "the first is not delayed");
    let (second, third) = (call(), call());
    while served.load(Ordering::SeqCst) < 2 {
        tokio::time::advance(Duration::from_millis(10)).await;
        tokio::task::yield_now().await;
    }
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(second.await.expect("a task").expect("a response").status(), 200);
    third.abort();
    assert!(third.await.is_err(), "canceled while delayed");
    assert_eq!(served.load(Ordering::SeqCst), 2);
    // The next request takes its time, two seconds after the start, because the engine's clock has not moved.
    let before = tokio::time::Instant::now();
    assert_eq!(call().await.expect("a task").expect("a response").status(), 200);
    assert!(before.elapsed() <= Duration::from_millis(2_000), "{:?}", before.elapsed());
}

/// A retry before the end of the delay would only be shed again.
#[tokio::test(start_paused = true)]
async fn retry_after_of_a_shed_request_is_rounded_up() {
    let (limits, clock) = limits();
    let service = TollgateLayer::with_queue(limits, extract, 1).layer(hello(&Arc::default()));
    service.clone().oneshot(request("queue")).await.expect("a response");
    let waiting = tokio::spawn(service.clone().oneshot(request("queue")));
    tokio::task::yield_now().await;
    clock.advance(TimeDelta::from_millis(500));
    let shed = service.oneshot(request("queue")).await.expect("a response");
    assert_eq!(shed.status(), 503);
    assert_eq!(shed.headers()["retry-after"], "2", "the delay is a second and a half");
    waiting.await.expect("a task").expect("a response");
}

/// An unbounded queue would use unbounded memory.
#[tokio::test(start_paused = true)]
async fn a_full_queue_sheds_with_503_and_charges_nothing() {
    let (limits, _clock) = limits();
    let served = Arc::new(AtomicU64::new(0));
    let service = TollgateLayer::with_queue(limits, extract, 1).layer(hello(&served));
    service.clone().oneshot(request("queue")).await.expect("a response");
    let waiting = tokio::spawn(service.clone().oneshot(request("queue")));
    tokio::task::yield_now().await;
    let shed = service.clone().oneshot(request("queue")).await.expect("a response");
    assert_eq!(
        (shed.status().as_u16(), &shed.headers()["retry-after"]),
        (503, &"2".parse().expect("a value"))
    );
    assert_eq!(waiting.await.expect("a task").expect("a response").status(), 200);
    let before = tokio::time::Instant::now();
    assert_eq!(service.oneshot(request("queue")).await.expect("a response").status(), 200);
    let waited = before.elapsed();
    assert!(
        (Duration::from_millis(1_999)..=Duration::from_millis(2_001)).contains(&waited),
        "{waited:?}: the shed request was refunded"
    );
}

/// A request that lasts longer than the TTL of its permit keeps its permit.
#[tokio::test(start_paused = true)]
async fn permits_of_long_requests_are_renewed() {
    let (limits, clock) = limits();
    let layer = TollgateLayer::new(limits, extract);
    let never = service_fn(|_: Request<Full<Bytes>>| {
        std::future::pending::<Result<Response<Full<Bytes>>, Infallible>>()
    });
    let long = tokio::spawn(layer.layer(never).oneshot(request("slot")));
    tokio::task::yield_now().await;
    let served = Arc::new(AtomicU64::new(0));
    let quick = layer.layer(hello(&served));
    for _ in 0..10 {
        clock.advance(TimeDelta::from_secs(20));
        tokio::time::sleep(Duration::from_secs(20)).await;
        tokio::task::yield_now().await;
        assert_eq!(quick.clone().oneshot(request("slot")).await.expect("a response").status(), 429);
    }
    long.abort();
    assert!(long.await.is_err());
    assert_eq!(quick.oneshot(request("slot")).await.expect("a response").status(), 200);
}

/// The layer reads callers as the gateway and `/check` do, and refuses what they refuse.
#[tokio::test]
async fn callers_are_identified_by_the_rules_of_the_gateway() {
    let rules = "{domain: d, descriptors: [{key: api_key, limit: 1/hour}, {key: endpoint, value: POST /login, limit: 1/hour}]}";
    let decider = InProcess::from_rules(rules, "d").expect("rules");
    let settings = IdentityConfig { routes: vec!["POST /login".to_owned()], ..IdentityConfig::default() };
    let identity = IdentityResolver::new(&settings).expect("settings");
    let layer = TollgateLayer::new(decider, move |head: &Parts| {
        let peer = std::net::Ipv4Addr::new(192, 0, 2, 1).into();
        CheckRequest::identified(&identity, peer, head, tollgate_core::Timestamp::ZERO)
    });
    let service = layer.layer(service_fn(async |_: Request<Full<Bytes>>| {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("hello"))))
    }));
    for (line, header, status) in [
        ("POST /login", None, 200),
        ("POST /%6Cogin//", None, 429),
        ("POST //x/login", None, 400),
        ("POST /", Some(("x_api_key", "k")), 400),
        ("POST /login%2F", None, 400),
        ("POST /", Some(("x-original-url", "/login")), 400),
        ("GET /login", Some(("x-http-method-override", "POST")), 400),
        ("GET /", Some(("authorization", "Bearer k")), 200),
        ("GET /", Some(("authorization", "bearer\tk")), 429),
        ("GET /", Some(("authorization", "Bearer k x")), 401),
    ] {
        let (method, path) = line.split_once(' ').expect("a line");
        let mut request = Request::builder().method(method).uri(path);
        if let Some((name, value)) = header {
            request = request.header(name, value);
        }
        let request = request.body(Full::<Bytes>::default()).expect("a request");
        let response = service.clone().oneshot(request).await.expect("a response");
        assert_eq!(response.status(), status, "{line} {header:?}");
        assert_eq!(response.headers().contains_key("www-authenticate"), status == 401, "{line}");
    }
}

/// A rule on an endpoint that no setting lists, also one that is published later.
#[tokio::test]
async fn endpoints_that_rules_name_are_known_to_the_layer() {
    let rules = |path: &str| {
        format!(
            "{{domain: d, descriptors: [{{key: endpoint, value: 'POST {path}', limit: 1/hour}}, {{key: endpoint, value: 'PURGE {path}', limit: 1/hour}}]}}"
        )
    };
    let decider = InProcess::from_rules(&rules("/login"), "d").expect("rules");
    let limiter = Arc::clone(decider.limiter());
    let settings = IdentityConfig { routes: vec!["/{*rest}".to_owned()], ..IdentityConfig::default() };
    let identity = IdentityResolver::new(&settings).expect("settings");
    let layer = TollgateLayer::new(decider, move |head: &Parts| {
        let peer = std::net::Ipv4Addr::new(192, 0, 2, 1).into();
        CheckRequest::identified(&identity, peer, head, tollgate_core::Timestamp::ZERO)
    });
    let service = layer.layer(service_fn(async |_: Request<Full<Bytes>>| {
        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("hello"))))
    }));
    let status = async |line: &str| {
        let (method, path) = line.split_once(' ').expect("a line");
        let request = Request::builder().method(method).uri(path).body(Full::<Bytes>::default());
        service.clone().oneshot(request.expect("a request")).await.expect("a response").status().as_u16()
    };
    let twice = async |line: &str| [status(line).await, status(line).await];
    assert_eq!(twice("POST /login").await, [200, 429]);
    assert_eq!(twice("PURGE /login").await, [200, 429]);
    assert_eq!(twice("POST /token/17").await, [200, 200]);
    let source = tollgate_rules::Source::new("rules", rules("/token/{id}"));
    let changed =
        tollgate_rules::Ruleset::load(&[source], &tollgate_rules::Options::default()).expect("rules");
    limiter.replace_rules(Arc::new(changed));
    assert_eq!(twice("POST /token/17").await, [200, 429]);
}

/// A service that cannot take more sheds with 503; critical requests go before others.
#[tokio::test]
async fn the_layer_sheds_by_priority() {
    let rules =
        "{domain: d, overload: {priorities: [{when: {user: vip}, priority: critical}], workers: {limit: 1}}}";
    let limits = InProcess::from_rules(rules, "d").expect("rules").with_upstream("api");
    let limiter = Arc::clone(limits.limiter());
    let (gate, entered) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (opening, entering) = (Arc::clone(&gate), Arc::clone(&entered));
    let service = service_fn(move |_: Request<Full<Bytes>>| {
        let (opening, entering) = (Arc::clone(&opening), Arc::clone(&entering));
        async move {
            entering.notify_one();
            opening.notified().await;
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"hello"))))
        }
    });
    let user = |head: &Parts| {
        let user = head.headers.get("x-key")?.to_str().ok()?.to_owned();
        Some(CheckRequest::attributes([("user".to_owned(), user)]))
    };
    let layered = TollgateLayer::new(limits, user).layer(service);
    let call = |key| {
        let service = layered.clone();
        tokio::spawn(async move { service.oneshot(request(key)).await.expect("infallible").status() })
    };
    let first = call("a");
    entered.notified().await;
    assert_eq!(call("b").await.expect("an answer"), 503);
    let second = call("vip");
    entered.notified().await;
    let state = limiter.upstream_states();
    assert_eq!((state[0].upstream.as_str(), state[0].gate.in_flight, state[0].gate.shed[2]), ("api", 2, 1));
    gate.notify_one();
    gate.notify_one();
    while limiter.upstream_states()[0].gate.in_flight > 0 {
        gate.notify_one();
        tokio::task::yield_now().await;
    }
    assert_eq!(
        (first.await.expect("one"), second.await.expect("two")),
        (http::StatusCode::OK, http::StatusCode::OK)
    );
}
