//! Keeping to the limits of those that we call. An API that said "come back in 30 seconds" is not called before: requests
//! wait, or fail at once, and each host is remembered on its own. Retrying is not done here: who knows whether a request
//! may be sent twice wraps a retry around this.

use crate::retry_after;
use http::{Request, Response};
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};
use tokio::time::Instant;
use tollgate_core::{Clock, SystemClock};
use tower_layer::Layer;
use tower_service::Service;

/// Hosts that are remembered at once.
const MAX_HOSTS: usize = 1024;
/// What a host may ask for at most: nobody shuts us up for a year.
const MAX_PAUSE: Duration = Duration::from_secs(3_600);

/// A layer for clients, that keeps to `Retry-After` and `RateLimit` of the hosts they call.
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
/// // It is not asked again until its time has come.
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
    /// Requests wait up to `longest` for their time to come; those that would have to wait longer fail at once.
    #[must_use]
    pub fn wait_up_to(longest: Duration) -> Self {
        Self { pauses: Arc::default(), max_wait: longest }
    }

    /// Requests that come too soon fail at once.
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

/// A client that keeps to the limits of the hosts it calls.
#[derive(Clone, Debug)]
pub struct RetryAfterService<S> {
    inner: S,
    pauses: Arc<Pauses>,
    max_wait: Duration,
    clock: SystemClock,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RetryAfterError<E> {
    /// The host has asked not to be called yet.
    #[error("`{host}` asked not to be called for another {} s", wait.as_secs_f32().ceil())]
    TooSoon {
        /// The host.
        host: String,
        /// How long it is to be left alone.
        wait: Duration,
    },
    /// The client below failed.
    #[error(transparent)]
    Inner(#[from] E),
}

/// Until when each host is to be left alone.
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
        let until = now + pause.min(MAX_PAUSE);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get_mut(&host) {
            // Answers overtake each other: the longest pause holds.
            *known = until.max(*known);
            return;
        }
        if all.len() >= MAX_HOSTS {
            all.retain(|_, until| *until > now);
            // Still full: the one that ends first is the least to forget.
            let first = all.iter().min_by_key(|(_, until)| **until).map(|(host, _)| host.clone());
            if let Some(first) = first.filter(|_| all.len() >= MAX_HOSTS) {
                all.remove(&first);
            }
        }
        all.insert(host, until);
    }
}

/// Whom a request goes to: host and port, and never the name and password that may stand before them.
fn host_of<B>(request: &Request<B>) -> String {
    let named = request.uri().authority().map(http::uri::Authority::as_str);
    let header = || request.headers().get(http::header::HOST)?.to_str().ok();
    let whole = named.or_else(header).unwrap_or("");
    whole.rsplit_once('@').map_or(whole, |(_, host)| host).to_ascii_lowercase()
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
        let (pauses, longest, clock) = (Arc::clone(&self.pauses), self.max_wait, self.clock);
        Box::pin(async move {
            let host = host_of(&request);
            let mut patience = longest;
            // Another answer may have put the time off while we waited.
            while let Some(wait) = pauses.remaining(&host, Instant::now()) {
                if wait > patience {
                    return Err(RetryAfterError::TooSoon { host, wait });
                }
                patience -= wait;
                tokio::time::sleep(wait).await;
            }
            let answer = inner.call(request).await?;
            let wall = SystemTime::UNIX_EPOCH + Duration::from_micros(clock.now().as_micros());
            if let Some(pause) = retry_after::pause(&answer, wall).filter(|pause| !pause.is_zero()) {
                pauses.record(host, pause, Instant::now());
            }
            Ok(answer)
        })
    }
}
