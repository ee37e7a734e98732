//! The layer around a service: who is over the limit never reaches it, and what a request holds comes back however it ends.

use bytes::Bytes;
use futures_util::stream::poll_fn;
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
use tollgate_sdk::{CheckRequest, InProcess, TollgateLayer};
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

/// The header `x-ask: key` asks about that key.
fn asked(head: &http::request::Parts) -> Option<CheckRequest> {
    let key = head.headers.get("x-ask")?.to_str().ok()?;
    Some(CheckRequest::attributes([(key.to_owned(), "x")]))
}

fn request(key: &str) -> Request<Full<Bytes>> {
    Request::get("/").header("x-ask", key).body(Full::default()).expect("a request")
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
            let mut answer = Response::new(Full::new(Bytes::from("hello")));
            if let Some(degraded) = degraded {
                answer.headers_mut().insert("x-seen", degraded);
            }
            Ok(answer)
        }
    })
}

/// The answers are those of every other front, and a denial costs the service nothing.
#[tokio::test]
async fn callers_over_the_limit_are_told_so_and_never_reach_the_service() {
    let served = Arc::new(AtomicU64::new(0));
    let service = TollgateLayer::new(limits().0, asked).layer(hello(&served));
    for left in [1, 0] {
        let answer = service.clone().oneshot(request("user")).await.expect("an answer");
        let told = answer.headers()["ratelimit"].to_str().expect("ASCII").to_owned();
        assert!(told.starts_with(&format!("\"per-user\";r={left};t=")), "{told}");
        assert_eq!(answer.headers()["ratelimit-policy"], "\"per-user\";q=2;w=3600");
        assert_eq!(answer.into_body().collect().await.expect("a body").to_bytes(), "hello");
    }
    let denied = service.clone().oneshot(request("user")).await.expect("an answer");
    assert_eq!(denied.status(), 429);
    assert_eq!(denied.headers()["retry-after"], "1800");
    assert_eq!(denied.headers()["content-type"], "application/problem+json");
    let body = denied.into_body().collect().await.expect("a body").to_bytes();
    assert!(String::from_utf8_lossy(&body).contains("violated-policies"), "{body:?}");
    assert_eq!(served.load(Ordering::SeqCst), 2);

    let unasked = Request::get("/").body(Full::default()).expect("a request");
    assert!(
        service.oneshot(unasked).await.expect("an answer").headers().is_empty(),
        "not limited, nothing told"
    );
}

/// gRPC clients read `grpc-status`; an HTTP 429 would be an unknown error to them.
#[tokio::test]
async fn callers_over_grpc_get_a_status_of_that_protocol() {
    let served = Arc::new(AtomicU64::new(0));
    let service = TollgateLayer::new(limits().0, asked).layer(hello(&served));
    let call = || {
        let mut call = request("user");
        call.headers_mut().insert("content-type", "application/grpc+proto".parse().expect("a value"));
        service.clone().oneshot(call)
    };
    call().await.expect("an answer");
    call().await.expect("an answer");
    let denied = call().await.expect("an answer");
    assert_eq!(
        (denied.status().as_u16(), &denied.headers()["grpc-status"]),
        (200, &"8".parse().expect("a value"))
    );
    assert_eq!(denied.headers()["content-type"], "application/grpc");
    assert!(denied.headers().contains_key("retry-after"));
    assert!(denied.into_body().collect().await.expect("a body").to_bytes().is_empty());
}

/// A service serves less by this mark; a caller that could set it would have it set for others' logs.
#[tokio::test]
async fn lesser_requests_are_marked_for_the_service_and_by_nobody_else() {
    let served = Arc::new(AtomicU64::new(0));
    let service = TollgateLayer::new(limits().0, asked).layer(hello(&served));
    for seen in [None, Some("lesser")] {
        let mut call = request("lesser");
        call.headers_mut().insert("x-ratelimit-degraded", "forged".parse().expect("a value"));
        let answer = service.clone().oneshot(call).await.expect("an answer");
        assert_eq!(answer.status(), 200);
        assert_eq!(answer.headers().get("x-seen").and_then(|value| value.to_str().ok()), seen);
    }
    let unlimited = Request::get("/").header("x-ratelimit-degraded", "forged").body(Full::default());
    let answer = service.oneshot(unlimited.expect("a request")).await.expect("an answer");
    assert!(answer.headers().is_empty(), "of those that are not limited neither: {:?}", answer.headers());
}

/// Those who watch the engine see what the layer takes, as of every other front.
#[tokio::test]
async fn how_long_decisions_take_is_told_to_those_who_watch() {
    #[derive(Default)]
    struct Watch(std::sync::Mutex<Vec<(&'static str, u64)>>);
    impl tollgate_engine::Observer for Watch {
        fn on_decision(&self, _: &tollgate_engine::Check<'_>, _: &tollgate_engine::Decision) {}
        fn on_latency(&self, front: &'static str, requests: u64, _: TimeDelta) {
            self.0.lock().expect("a list").push((front, requests));
        }
    }
    let (watch, clock) =
        (Arc::new(Watch::default()), Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000))));
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a store");
    let rules = Ruleset::load(&[Source::new("test.yaml", RULES)], &Options::default()).expect("rules");
    let limiter = Limiter::new(Arc::new(rules), store, clock).with_observer(Arc::clone(&watch) as _);
    let service =
        TollgateLayer::new(InProcess::new(Arc::new(limiter), "d"), asked).layer(hello(&Arc::default()));
    service.clone().oneshot(request("user")).await.expect("an answer");
    service.oneshot(request("slot")).await.expect("an answer");
    assert_eq!(*watch.0.lock().expect("a list"), [("sdk", 1), ("sdk", 1)]);
}

/// A service that streams what it is sent, and answers when it is let.
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

/// A permit that does not come back is a slot that is lost until its time limit.
#[tokio::test]
async fn a_permit_comes_back_when_the_body_ends_or_is_dropped_or_the_service_fails() {
    let (limits, _clock) = limits();
    let layer = TollgateLayer::new(limits, asked);
    let served = Arc::new(AtomicU64::new(0));
    let quick = layer.layer(hello(&served));
    let free = async || quick.clone().oneshot(request("slot")).await.expect("an answer").status() == 200;
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
        layer.layer(service).oneshot(request("slot")).await.expect("an answer")
    };

    // Read to its end.
    let mut slow = Slow::new();
    let answer = start(&mut slow).await;
    assert_eq!(answer.status(), 200);
    assert!(!free().await, "while the body streams");
    let mut body = answer.into_body();
    slow.frames.send(Bytes::from("part")).expect("listening");
    assert_eq!(body.frame().await.expect("a frame").expect("data").into_data().expect("data"), "part");
    assert!(!free().await, "between two parts");
    drop(slow);
    assert!(body.frame().await.is_none());
    assert!(free().await, "at the end, though the body is still there");
    drop(body);

    // Dropped midway: the caller has left.
    let mut slow = Slow::new();
    let answer = start(&mut slow).await;
    assert!(!free().await);
    drop(answer);
    assert!(free().await);

    // The service fails.
    let failing = service_fn(|_: Request<Full<Bytes>>| async { Err::<Response<Full<Bytes>>, _>("broken") });
    assert_eq!(layer.layer(failing).oneshot(request("slot")).await.err(), Some("broken"));
    assert!(free().await);

    // The caller leaves before the service has answered.
    let reached = Arc::new(Notify::new());
    let told = Arc::clone(&reached);
    let never = service_fn(move |_: Request<Full<Bytes>>| {
        told.notify_one();
        std::future::pending::<Result<Response<Full<Bytes>>, Infallible>>()
    });
    let task = tokio::spawn(layer.layer(never).oneshot(request("slot")));
    reached.notified().await;
    assert!(!free().await);
    task.abort();
    assert!(task.await.is_err());
    assert!(free().await);
}

/// `action: delay` paces callers instead of turning them away; who leaves the queue gives the turn to those behind.
#[tokio::test(start_paused = true)]
async fn a_queue_holds_requests_until_their_time() {
    let (limits, _clock) = limits();
    let served = Arc::new(AtomicU64::new(0));
    let service = TollgateLayer::with_queue(limits, asked, 2).layer(hello(&served));
    let start = tokio::time::Instant::now();
    let call = || tokio::spawn(service.clone().oneshot(request("queue")));
    assert_eq!(call().await.expect("a task").expect("an answer").status(), 200);
    assert_eq!(start.elapsed(), Duration::ZERO, "the first is not held");
    let (second, third) = (call(), call());
    while served.load(Ordering::SeqCst) < 2 {
        tokio::time::advance(Duration::from_millis(10)).await;
        tokio::task::yield_now().await;
    }
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
    assert_eq!(second.await.expect("a task").expect("an answer").status(), 200);
    third.abort();
    assert!(third.await.is_err(), "it left while it waited");
    assert_eq!(served.load(Ordering::SeqCst), 2);
    // Its turn, two seconds after the start, is the next one's: the engine's clock has not moved.
    let before = tokio::time::Instant::now();
    assert_eq!(call().await.expect("a task").expect("an answer").status(), 200);
    assert!(before.elapsed() <= Duration::from_millis(2_000), "{:?}", before.elapsed());
}

/// Who comes back sooner than its turn is only turned away again.
#[tokio::test(start_paused = true)]
async fn a_shed_request_is_told_whole_seconds_that_are_enough() {
    let (limits, clock) = limits();
    let service = TollgateLayer::with_queue(limits, asked, 1).layer(hello(&Arc::default()));
    service.clone().oneshot(request("queue")).await.expect("an answer");
    let waiting = tokio::spawn(service.clone().oneshot(request("queue")));
    tokio::task::yield_now().await;
    clock.advance(TimeDelta::from_millis(500));
    let shed = service.oneshot(request("queue")).await.expect("an answer");
    assert_eq!(shed.status(), 503);
    assert_eq!(shed.headers()["retry-after"], "2", "its turn is in a second and a half");
    waiting.await.expect("a task").expect("an answer");
}

/// A queue without an end is memory without an end.
#[tokio::test(start_paused = true)]
async fn a_full_queue_sheds_with_503_and_takes_nothing() {
    let (limits, _clock) = limits();
    let served = Arc::new(AtomicU64::new(0));
    let service = TollgateLayer::with_queue(limits, asked, 1).layer(hello(&served));
    service.clone().oneshot(request("queue")).await.expect("an answer");
    let waiting = tokio::spawn(service.clone().oneshot(request("queue")));
    tokio::task::yield_now().await;
    let shed = service.clone().oneshot(request("queue")).await.expect("an answer");
    assert_eq!(
        (shed.status().as_u16(), &shed.headers()["retry-after"]),
        (503, &"2".parse().expect("a value"))
    );
    assert_eq!(waiting.await.expect("a task").expect("an answer").status(), 200);
    let before = tokio::time::Instant::now();
    assert_eq!(service.oneshot(request("queue")).await.expect("an answer").status(), 200);
    let waited = before.elapsed();
    assert!(
        (Duration::from_millis(1_999)..=Duration::from_millis(2_001)).contains(&waited),
        "{waited:?}: the shed one left no gap"
    );
}

/// A request that lasts longer than its permit's time limit still holds its slot.
#[tokio::test(start_paused = true)]
async fn permits_of_long_requests_are_renewed() {
    let (limits, clock) = limits();
    let layer = TollgateLayer::new(limits, asked);
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
        assert_eq!(quick.clone().oneshot(request("slot")).await.expect("an answer").status(), 429);
    }
    long.abort();
    assert!(long.await.is_err());
    assert_eq!(quick.oneshot(request("slot")).await.expect("an answer").status(), 200);
}
