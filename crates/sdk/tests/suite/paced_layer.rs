//! The paced layer: fewer refusals than waiting for them, retries only of what may be sent twice and within the budget.

use http::{Method, Request, Response};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_sdk::{PacedError, PacedLayer};
use tower::{Layer, Service, ServiceExt, service_fn};

/// Statuses to respond with, in turn; 200 afterwards. And the times of all calls.
#[derive(Clone, Default)]
struct Script {
    statuses: Arc<Mutex<VecDeque<u16>>>,
    calls: Arc<Mutex<Vec<Instant>>>,
}

impl Script {
    fn new(statuses: impl IntoIterator<Item = u16>) -> Self {
        Self { statuses: Arc::new(Mutex::new(statuses.into_iter().collect())), calls: Arc::default() }
    }

    fn calls(&self) -> usize {
        self.calls.lock().expect("calls").len()
    }

    fn service(
        &self,
    ) -> impl Service<Request<()>, Response = Response<()>, Error = Infallible, Future: Send>
    + Clone
    + Send
    + 'static {
        let script = self.clone();
        service_fn(move |_: Request<()>| {
            script.calls.lock().expect("calls").push(Instant::now());
            let status = script.statuses.lock().expect("statuses").pop_front().unwrap_or(200);
            let response = Response::builder().status(status);
            let response = if status == 429 { response.header("retry-after", "2") } else { response };
            std::future::ready(Ok(response.body(()).expect("a response")))
        })
    }
}

fn request(method: Method) -> Request<()> {
    Request::builder().method(method).uri("http://api.example/").body(()).expect("a request")
}

/// Ten units in ten seconds: a client that only reacts is refused once a window; a paced one never.
#[tokio::test(start_paused = true)]
async fn requests_are_spread_over_the_time_to_the_reset() {
    let window = Arc::new(Mutex::new((0, 0_u64)));
    let refused = Arc::new(Mutex::new(0));
    let started = Instant::now();
    let api = {
        let (window, refused) = (Arc::clone(&window), Arc::clone(&refused));
        service_fn(move |_: Request<()>| {
            let elapsed = started.elapsed().as_secs();
            let mut window = window.lock().expect("window");
            if window.0 != elapsed / 10 {
                *window = (elapsed / 10, 0);
            }
            let allowed = window.1 < 10;
            window.1 += u64::from(allowed);
            *refused.lock().expect("refused") += u32::from(!allowed);
            let reset = 10 - elapsed % 10;
            let response = Response::builder()
                .status(if allowed { 200 } else { 429 })
                .header("ratelimit-policy", "\"api\";q=10;w=10")
                .header("ratelimit", format!("\"api\";r={};t={reset}", 10 - window.1));
            std::future::ready(Ok::<_, Infallible>(response.body(()).expect("a response")))
        })
    };
    let client = PacedLayer::new().layer(api);
    for _ in 0..50 {
        assert_eq!(client.clone().oneshot(request(Method::GET)).await.expect("a response").status(), 200);
    }
    assert_eq!(*refused.lock().expect("refused"), 0, "paced before the limit");
    let seconds = started.elapsed().as_secs();
    assert!((38..=60).contains(&seconds), "50 requests at one a second, the first burst free: {seconds} s");
}

/// Sent twice, an order is paid twice.
#[tokio::test(start_paused = true)]
async fn only_methods_that_may_be_sent_twice_are_retried() {
    for (method, layer, status, calls) in [
        (Method::GET, PacedLayer::new(), 200, 2),
        (Method::POST, PacedLayer::new(), 429, 1),
        (Method::POST, PacedLayer::new().retry_methods([Method::POST]), 200, 2),
        (Method::GET, PacedLayer::new().max_retries(0), 429, 1),
    ] {
        let script = Script::new([429]);
        let started = Instant::now();
        let response =
            layer.layer(script.service()).oneshot(request(method.clone())).await.expect("a response");
        assert_eq!((response.status().as_u16(), script.calls()), (status, calls), "{method}");
        assert!(calls == 1 || started.elapsed() >= Duration::from_secs(2), "not before the stated time");
    }
}

/// A wait that is too long is the program's to decide on: it gets the refusal, and later requests fail at once.
#[tokio::test(start_paused = true)]
async fn long_waits_are_not_waited_for() {
    let script = Script::new([429]);
    let client = PacedLayer::new().max_wait(Duration::from_secs(1)).layer(script.service());
    assert_eq!(client.clone().oneshot(request(Method::GET)).await.expect("a response").status(), 429);
    match client.clone().oneshot(request(Method::GET)).await {
        Err(PacedError::TooSoon { host, wait }) => {
            assert_eq!(host, "api.example");
            assert!(wait > Duration::from_secs(1) && wait <= Duration::from_millis(2_200), "{wait:?}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(script.calls(), 1, "nothing was sent");
    tokio::time::advance(Duration::from_secs(3)).await;
    assert_eq!(client.oneshot(request(Method::GET)).await.expect("a response").status(), 200);
}

/// A host that fails gets at most ten retries at once and a tenth of the requests after that; then fewer requests.
#[tokio::test(start_paused = true)]
async fn retries_are_within_the_budget_and_throttling_follows() {
    let script = Script::new(std::iter::repeat_n(503, 10_000));
    let client = PacedLayer::new().layer(script.service());
    let (mut throttled, mut refused) = (0, 0);
    for _ in 0..200 {
        match client.clone().oneshot(request(Method::GET)).await {
            Ok(response) => {
                assert_eq!(response.status(), 503);
                refused += 1;
            }
            Err(PacedError::Throttled { .. }) => throttled += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(throttled + refused, 200);
    assert!(throttled > 100, "{throttled} of 200 were not sent");
    assert!(script.calls() <= 200 + 10 + 20, "{} calls", script.calls());
}

/// A request whose future is dropped is no longer under way: it must not be subtracted from what remains for ever.
#[tokio::test(start_paused = true)]
async fn dropped_requests_are_not_under_way() {
    let hang = Arc::new(Mutex::new(true));
    let hangs = Arc::clone(&hang);
    let api = service_fn(move |_: Request<()>| {
        let hangs = *hangs.lock().expect("a flag");
        async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            let response = Response::builder().header("ratelimit", "\"api\";r=6;t=60");
            let response = response.header("ratelimit-policy", "\"api\";q=10;w=60").body(());
            Ok::<_, Infallible>(response.expect("a response"))
        }
    });
    let client = PacedLayer::new().layer(api);
    for _ in 0..8 {
        let call = client.clone().oneshot(request(Method::GET));
        tokio::time::timeout(Duration::from_millis(10), call).await.expect_err("hangs");
    }
    *hang.lock().expect("a flag") = false;
    let started = Instant::now();
    for _ in 0..2 {
        client.clone().oneshot(request(Method::GET)).await.expect("a response");
    }
    assert!(started.elapsed() < Duration::from_secs(1), "more than half of the limit remains");
}
