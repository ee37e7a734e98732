//! A client that keeps to what it is told: no call before its time, each host on its own, in bounded memory.

use http::{Request, Response};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_sdk::{RetryAfterError, RetryAfterLayer};
use tower::{Layer, Service, ServiceExt, service_fn};

/// Hosts whose names begin with `busy` deny each call and ask for three seconds; all calls are noted.
type Calls = Arc<Mutex<Vec<(String, Instant)>>>;

fn api(
    calls: &Calls,
) -> impl Service<Request<()>, Response = Response<()>, Error = Infallible, Future: Send> + Clone + Send + 'static
{
    let calls = Arc::clone(calls);
    service_fn(move |request: Request<()>| {
        let host = request.uri().host().unwrap_or("").to_owned();
        calls.lock().expect("calls").push((host.clone(), Instant::now()));
        let mut answer = Response::builder();
        if host.starts_with("busy") {
            answer = answer.status(429).header("retry-after", "3");
        } else if host.starts_with("spent") {
            answer = answer.header("ratelimit", "\"a\";r=0;t=2");
        }
        std::future::ready(Ok(answer.body(()).expect("an answer")))
    })
}

fn call(host: &str) -> Request<()> {
    Request::get(format!("http://{host}/")).body(()).expect("a request")
}

/// An API that is hammered while it asks for time bans its callers.
#[tokio::test(start_paused = true)]
async fn calls_wait_until_the_told_time_each_host_on_its_own() {
    let calls = Calls::default();
    let client = RetryAfterLayer::wait_up_to(Duration::from_secs(10)).layer(api(&calls));
    for host in ["busy", "busy", "free", "spent", "spent", "free"] {
        let answer = client.clone().oneshot(call(host)).await.expect("an answer");
        assert_eq!(answer.status() == 429, host == "busy");
    }
    let calls = calls.lock().expect("calls");
    let waits: Vec<_> = calls.windows(2).map(|pair| pair[1].1 - pair[0].1).collect();
    // Timers have a resolution of a millisecond.
    let seconds: Vec<_> = waits.iter().map(|wait| (wait.as_secs_f64() * 10.0).round() / 10.0).collect();
    assert_eq!(seconds, [3.0, 0.0, 0.0, 2.0, 0.0]);
    assert!(waits[0] >= Duration::from_secs(3), "never too early");
}

/// Who cannot wait must learn so at once, with the time to come back, and nothing may be sent.
#[tokio::test(start_paused = true)]
async fn calls_that_would_wait_too_long_fail_at_once() {
    let calls = Calls::default();
    let client = RetryAfterLayer::fail_fast().layer(api(&calls));
    client.clone().oneshot(call("busy.example:8080")).await.expect("an answer");
    tokio::time::advance(Duration::from_secs(1)).await;
    let error = client.clone().oneshot(call("BUSY.example:8080")).await.expect_err("too soon");
    let RetryAfterError::TooSoon { host, wait } = &error else { panic!("{error}") };
    assert_eq!((host.as_str(), *wait), ("busy.example:8080", Duration::from_secs(2)));
    assert!(error.to_string().contains("busy.example"), "{error}");
    assert_eq!(calls.lock().expect("calls").len(), 1);
    tokio::time::advance(Duration::from_secs(2)).await;
    client.oneshot(call("busy.example:8080")).await.expect("its time has come");
}

/// Errors are logged; what opens the host must not be.
#[tokio::test(start_paused = true)]
async fn a_password_in_the_address_is_not_told() {
    let client = RetryAfterLayer::fail_fast().layer(api(&Calls::default()));
    client.clone().oneshot(call("user:secret@busy.example:8080")).await.expect("an answer");
    let error = client.oneshot(call("other:word@busy.example:8080")).await.expect_err("too soon");
    let RetryAfterError::TooSoon { host, .. } = &error else { panic!("{error}") };
    assert_eq!(host, "busy.example:8080", "one host, whoever asks");
}

/// A crawler calls millions of hosts; each of them may ask for a pause, and the longest must not be forgotten for the rest.
#[tokio::test(start_paused = true)]
async fn hosts_are_remembered_in_bounded_number() {
    let calls = Calls::default();
    let client = RetryAfterLayer::fail_fast().layer(api(&calls));
    for at in 0..3_000 {
        client.clone().oneshot(call(&format!("busy-{at}"))).await.expect("an answer");
        tokio::time::advance(Duration::from_micros(1)).await;
    }
    let mut remembered = 0;
    for at in 0..3_000 {
        // Hosts that are not remembered are called, and push out others: count from the newest.
        let host = format!("busy-{}", 2_999 - at);
        match client.clone().oneshot(call(&host)).await {
            Err(RetryAfterError::TooSoon { .. }) => remembered += 1,
            _ => break,
        }
    }
    assert_eq!(remembered, 1_024);
}

/// The layer below may fail in its own way.
#[tokio::test]
async fn errors_of_the_client_pass_through() {
    let broken =
        service_fn(|_: Request<()>| async { Err::<Response<()>, _>(std::io::Error::other("no route")) });
    let error = RetryAfterLayer::fail_fast().layer(broken).oneshot(call("a")).await.expect_err("broken");
    assert!(matches!(&error, RetryAfterError::Inner(inner) if inner.to_string() == "no route"), "{error}");
}
