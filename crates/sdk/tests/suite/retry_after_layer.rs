//! The Retry-After layer: no call before the pause ends, one pause per host, bounded memory.

use http::{Request, Response};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_sdk::{RetryAfterError, RetryAfterLayer};
use tower::{Layer, Service, ServiceExt, service_fn};

/// All recorded calls. Hosts whose names start with `busy` deny each call with a pause of three seconds.
type Calls = Arc<Mutex<Vec<(String, Instant)>>>;

fn api(
    calls: &Calls,
) -> impl Service<Request<()>, Response = Response<()>, Error = Infallible, Future: Send> + Clone + Send + 'static
{
    let calls = Arc::clone(calls);
    service_fn(move |request: Request<()>| {
        let host = request.uri().host().unwrap_or("").to_owned();
        calls.lock().expect("calls").push((host.clone(), Instant::now()));
        let mut response = Response::builder();
        if host.starts_with("busy") {
            response = response.status(429).header("retry-after", "3");
        } else if host.starts_with("spent") {
            response = response.header("ratelimit", "\"a\";r=0;t=2");
        }
        std::future::ready(Ok(response.body(()).expect("a response")))
    })
}

fn call(host: &str) -> Request<()> {
    Request::get(format!("http://{host}/")).body(()).expect("a request")
}

/// An API may ban clients that ignore its pause.
#[tokio::test(start_paused = true)]
async fn calls_wait_for_the_pause_of_their_own_host() {
    let calls = Calls::default();
    let client = RetryAfterLayer::wait_up_to(Duration::from_secs(10)).layer(api(&calls));
    for host in ["busy", "busy", "free", "spent", "spent", "free"] {
        let response = client.clone().oneshot(call(host)).await.expect("a response");
        assert_eq!(response.status() == 429, host == "busy");
    }
    let calls = calls.lock().expect("calls");
    let waits: Vec<_> = calls.windows(2).map(|pair| pair[1].1 - pair[0].1).collect();
    // Timers have a resolution of a millisecond.
    let seconds: Vec<_> = waits.iter().map(|wait| (wait.as_secs_f64() * 10.0).round() / 10.0).collect();
    assert_eq!(seconds, [3.0, 0.0, 0.0, 2.0, 0.0]);
    assert!(waits[0] >= Duration::from_secs(3), "never too early");
}

/// A call that cannot wait fails immediately with the time to retry, and nothing is sent.
#[tokio::test(start_paused = true)]
async fn calls_that_would_wait_too_long_fail_immediately() {
    let calls = Calls::default();
    let client = RetryAfterLayer::fail_fast().layer(api(&calls));
    client.clone().oneshot(call("busy.example:8080")).await.expect("a response");
    tokio::time::advance(Duration::from_secs(1)).await;
    let error = client.clone().oneshot(call("BUSY.example:8080")).await.expect_err("too soon");
    let RetryAfterError::TooSoon { host, wait } = &error else { panic!("{error}") };
    assert_eq!((host.as_str(), *wait), ("busy.example:8080", Duration::from_secs(2)));
    assert!(error.to_string().contains("busy.example"), "{error}");
    assert_eq!(calls.lock().expect("calls").len(), 1);
    tokio::time::advance(Duration::from_secs(2)).await;
    client.oneshot(call("busy.example:8080")).await.expect("the pause has ended");
}

/// Errors are logged, so they must not contain credentials.
#[tokio::test(start_paused = true)]
async fn errors_do_not_contain_the_password_of_an_address() {
    let client = RetryAfterLayer::fail_fast().layer(api(&Calls::default()));
    client.clone().oneshot(call("user:secret@busy.example:8080")).await.expect("a response");
    let error = client.oneshot(call("other:word@busy.example:8080")).await.expect_err("too soon");
    let RetryAfterError::TooSoon { host, .. } = &error else { panic!("{error}") };
    assert_eq!(host, "busy.example:8080", "the same host for all users");
}

/// A crawler calls millions of hosts, each of which may request a pause; the pauses that end last must be kept.
#[tokio::test(start_paused = true)]
async fn the_number_of_paused_hosts_is_bounded() {
    let calls = Calls::default();
    let client = RetryAfterLayer::fail_fast().layer(api(&calls));
    for at in 0..3_000 {
        client.clone().oneshot(call(&format!("busy-{at}"))).await.expect("a response");
        tokio::time::advance(Duration::from_micros(1)).await;
    }
    let mut paused = 0;
    for at in 0..3_000 {
        // Calls to hosts without a pause evict others, so the count starts with the newest.
        let host = format!("busy-{}", 2_999 - at);
        match client.clone().oneshot(call(&host)).await {
            Err(RetryAfterError::TooSoon { .. }) => paused += 1,
            _ => break,
        }
    }
    assert_eq!(paused, 1_024);
}

/// Errors of the inner client are returned unchanged.
#[tokio::test]
async fn errors_of_the_client_pass_through() {
    let broken =
        service_fn(|_: Request<()>| async { Err::<Response<()>, _>(std::io::Error::other("no route")) });
    let error = RetryAfterLayer::fail_fast().layer(broken).oneshot(call("a")).await.expect_err("broken");
    assert!(matches!(&error, RetryAfterError::Inner(inner) if inner.to_string() == "no route"), "{error}");
}
