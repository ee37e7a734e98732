//! A tower layer for HTTP clients that respects `Retry-After`. While a host has requested a pause, requests to it wait
//! or fail immediately; each host has its own pause. Rejected: retries in this layer, because only the program can
//! decide whether a request may be sent twice; it can wrap a retry layer around this one.

use crate::host::host_of;
use crate::pace::Signals;
use http::{Request, Response};
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::{Clock, SystemClock};
use tower_layer::Layer;
use tower_service::Service;

/// Maximum number of hosts with a pause.
const MAX_HOSTS: usize = 1024;

/// A layer for HTTP clients that respects `Retry-After` and `RateLimit` of the hosts that they call.
///
/// ```
/// use http::{Request, Response};
/// use std::time::Duration;
/// use tollgate_sdk::{RetryAfterError, RetryAfterLayer};
/// use tower::{Layer, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let api = service_fn(|_: Request<()>| async {
///     Response::builder().status(429).header("retry-after", "30").body(())
/// });
/// let client = RetryAfterLayer::wait_up_to(Duration::from_secs(1)).layer(api);
/// let call = || Request::get("https://api.example/items").body(());
/// assert_eq!(client.clone().oneshot(call()?).await?.status(), 429);
/// // The host is not called again before the pause ends.
/// match client.oneshot(call()?).await {
///     Err(RetryAfterError::TooSoon { host, wait }) => assert!(host == "api.example" && wait > Duration::from_secs(29)),
///     other => panic!("{other:?}"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct RetryAfterLayer {
    pauses: Arc<Pauses>,
    max_wait: Duration,
}

impl RetryAfterLayer {
    /// Creates a layer whose requests wait up to `max_wait` for a pause to end; those that would wait longer fail
    /// immediately.
    #[must_use]
    pub fn wait_up_to(max_wait: Duration) -> Self {
        Self { pauses: Arc::default(), max_wait }
    }

    /// Creates a layer whose requests fail immediately during a pause.
    #[must_use]
    pub fn fail_fast() -> Self {
        Self::wait_up_to(Duration::ZERO)
    }
}

impl<S> Layer<S> for RetryAfterLayer {
    type Service = RetryAfterService<S>;
    fn layer(&self, inner: S) -> RetryAfterService<S> {
        let (pauses, clock) = (Arc::clone(&self.pauses), SystemClock::new());
        RetryAfterService { inner, pauses, max_wait: self.max_wait, clock }
    }
}

/// A client that respects the limits of the hosts that it calls.
#[derive(Clone, Debug)]
pub struct RetryAfterService<S> {
    inner: S,
    pauses: Arc<Pauses>,
    max_wait: Duration,
    clock: SystemClock,
}

/// The reason a request has no response.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RetryAfterError<E> {
    /// The pause that the host requested has not ended.
    #[error("`{host}` is rate limiting this client; retry after {} s", wait.as_secs_f32().ceil())]
    TooSoon {
        /// The host.
        host: String,
        /// The rest of the pause.
        wait: Duration,
    },
    /// The inner client failed.
    #[error(transparent)]
    Inner(#[from] E),
}

/// The end of the pause of each host.
#[derive(Default)]
struct Pauses(Mutex<HashMap<String, Instant>>);

impl fmt::Debug for Pauses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pauses")
    }
}

impl Pauses {
    fn remaining(&self, host: &str, now: Instant) -> Option<Duration> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let until = *all.get(host)?;
        if until <= now {
            all.remove(host);
            return None;
        }
        Some(until - now)
    }

    fn record(&self, host: String, pause: Duration, now: Instant) {
        let until = now + pause;
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get_mut(&host) {
            // Responses may arrive out of order: the longest pause applies.
            *known = until.max(*known);
            return;
        }
        if all.len() >= MAX_HOSTS {
            all.retain(|_, until| *until > now);
            // Still full: the pause that ends first is dropped.
            let first = all.iter().min_by_key(|(_, until)| **until).map(|(host, _)| host.clone());
            if let Some(first) = first.filter(|_| all.len() >= MAX_HOSTS) {
                all.remove(&first);
            }
        }
        all.insert(host, until);
    }
}

impl<S, B, R> Service<Request<B>> for RetryAfterService<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    type Response = Response<R>;
    type Error = RetryAfterError<S::Error>;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context).map_err(RetryAfterError::Inner)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let copy = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, copy);
        let (pauses, mut timeout, clock) = (Arc::clone(&self.pauses), self.max_wait, self.clock);
        Box::pin(async move {
            let host = host_of(&request);
            // Another response may extend the pause during the wait.
            while let Some(wait) = pauses.remaining(&host, Instant::now()) {
                if wait > timeout {
                    return Err(RetryAfterError::TooSoon { host, wait });
                }
                timeout -= wait;
                tokio::time::sleep(wait).await;
            }
            let response = inner.call(request).await?;
            let signals =
                Signals::read(response.status(), response.headers(), clock.now().as_micros() / 1_000);
            if let Some(pause) = signals.wait_ms.filter(|pause| *pause > 0) {
                pauses.record(host, Duration::from_millis(pause), Instant::now());
            }
            Ok(response)
        })
    }
}
