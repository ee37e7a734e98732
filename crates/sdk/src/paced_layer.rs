//! A tower layer for HTTP clients that are limited well: they slow down before they are refused, wait as long as they are
//! told to, retry within a budget, and send less while they are mostly refused. The rules are those of [`crate::pace`].
//! Only idempotent methods are retried unless the program says otherwise: only it knows what may be sent twice.

use crate::host::host_of;
use crate::pace::{AdaptiveThrottle, Pacer, RetryBudget, Signals, backoff};
use http::{Method, Request, Response, StatusCode};
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::{Clock, SystemClock};
use tower_layer::Layer;
use tower_service::Service;

/// Maximum number of hosts with a state of their own; the one used longest ago makes room.
const MAX_HOSTS: usize = 1024;

/// A layer for HTTP clients that paces, retries and throttles their requests, for each host apart.
///
/// ```
/// use http::{Request, Response};
/// use std::sync::atomic::{AtomicU32, Ordering};
/// use tollgate_sdk::PacedLayer;
/// use tower::{Layer, ServiceExt, service_fn};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// static CALLS: AtomicU32 = AtomicU32::new(0);
/// // Refuses the first call, with the time after which to try again.
/// let api = service_fn(|_: Request<()>| async {
///     let first = CALLS.fetch_add(1, Ordering::Relaxed) == 0;
///     let status = if first { 429 } else { 200 };
///     Response::builder().status(status).header("retry-after", "2").body(())
/// });
/// let client = PacedLayer::new().layer(api);
/// let response = client.oneshot(Request::get("https://api.example/items").body(())?).await?;
/// assert_eq!((response.status().as_u16(), CALLS.load(Ordering::Relaxed)), (200, 2));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct PacedLayer {
    shared: Arc<Shared>,
    settings: Settings,
}

#[derive(Clone, Debug)]
struct Settings {
    max_wait: Duration,
    max_retries: u32,
    retry_methods: Arc<[Method]>,
}

impl PacedLayer {
    /// Creates a layer that waits up to 30 s and retries idempotent requests up to 3 times.
    #[must_use]
    pub fn new() -> Self {
        let idempotent =
            [Method::GET, Method::HEAD, Method::PUT, Method::DELETE, Method::OPTIONS, Method::TRACE];
        let settings = Settings {
            max_wait: Duration::from_secs(30),
            max_retries: 3,
            retry_methods: Arc::new(idempotent),
        };
        Self { shared: Arc::default(), settings }
    }

    /// Sets the longest single wait. A request that would wait longer fails with [`PacedError::TooSoon`]; a refusal
    /// that asks for more is returned.
    #[must_use]
    pub fn max_wait(mut self, max_wait: Duration) -> Self {
        self.settings.max_wait = max_wait;
        self
    }

    /// Sets the number of retries of one request.
    #[must_use]
    pub fn max_retries(mut self, max_retries: u32) -> Self {
        self.settings.max_retries = max_retries;
        self
    }

    /// Sets the methods that may be sent twice.
    #[must_use]
    pub fn retry_methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.settings.retry_methods = methods.into_iter().collect();
        self
    }
}

impl Default for PacedLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl<S> Layer<S> for PacedLayer {
    type Service = PacedService<S>;
    fn layer(&self, inner: S) -> PacedService<S> {
        PacedService { inner, shared: Arc::clone(&self.shared), settings: self.settings.clone() }
    }
}

/// A client that respects the limits of the hosts that it calls, before it reaches them.
#[derive(Clone, Debug)]
pub struct PacedService<S> {
    inner: S,
    shared: Arc<Shared>,
    settings: Settings,
}

/// The reason a request has no response.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PacedError<E> {
    /// The host allows no request for longer than the maximum wait. Nothing was sent.
    #[error("`{host}` is rate limiting this client; retry after {} s", wait.as_secs_f32().ceil())]
    TooSoon {
        /// The host.
        host: String,
        /// Time until the request's slot.
        wait: Duration,
    },
    /// Requests to the host are mostly refused. Nothing was sent.
    #[error("`{host}` refuses most requests; send fewer, or retry after {} s", wait.as_secs_f32().ceil())]
    Throttled {
        /// The host.
        host: String,
        /// Time after which to try again.
        wait: Duration,
    },
    /// The inner client failed.
    #[error(transparent)]
    Inner(#[from] E),
}

#[derive(Default)]
struct Host {
    pacer: Pacer,
    throttle: AdaptiveThrottle,
    budget: RetryBudget,
    used: u64,
}

struct Shared {
    hosts: Mutex<HashMap<String, Host>>,
    started: Instant,
    wall: SystemClock,
    random: AtomicU64,
}

impl Default for Shared {
    fn default() -> Self {
        // The seed of a hasher is the only chance that the standard library has.
        let seed = RandomState::new().hash_one(0);
        let wall = SystemClock::new();
        Self { hosts: Mutex::default(), started: Instant::now(), wall, random: AtomicU64::new(seed) }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Shared")
    }
}

impl Shared {
    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Returns a random number in [0, 1), by SplitMix64.
    fn random(&self) -> f64 {
        let mut state = self.random.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((state ^ (state >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Runs a step on the state of a host.
    fn host<T>(&self, name: &str, step: impl FnOnce(&mut Host, u64) -> T) -> T {
        let now = self.now();
        let mut hosts = self.hosts.lock().unwrap_or_else(PoisonError::into_inner);
        if !hosts.contains_key(name) {
            if hosts.len() >= MAX_HOSTS {
                let oldest = hosts.iter().min_by_key(|(_, host)| host.used).map(|(name, _)| name.clone());
                if let Some(oldest) = oldest {
                    hosts.remove(&oldest);
                }
            }
            hosts.insert(name.to_owned(), Host::default());
        }
        let host = hosts.entry(name.to_owned()).or_default();
        host.used = now;
        step(host, now)
    }
}

/// A request under way; dropped without a response, it failed or its future was.
struct InFlight<'a> {
    shared: &'a Shared,
    host: &'a str,
    has_response: bool,
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        if !self.has_response {
            self.shared.host(self.host, |host, _| host.pacer.failed());
        }
    }
}

impl<'a> InFlight<'a> {
    /// Waits for the request's slot; the error is the time until it, if that is too long.
    async fn start(shared: &'a Shared, host: &'a str, max_wait: Duration) -> Result<Self, Duration> {
        let mut delay = shared.host(host, |host, now| host.pacer.send(now));
        let in_flight = Self { shared, host, has_response: false };
        while delay > 0 {
            let wait = Duration::from_millis(delay);
            if wait > max_wait {
                return Err(wait);
            }
            tokio::time::sleep(wait).await;
            // Another response may have blocked the host meanwhile.
            delay = shared.host(host, |host, now| host.pacer.blocked_until().saturating_sub(now));
        }
        Ok(in_flight)
    }

    fn response<B>(mut self, response: &Response<B>) -> Signals {
        self.has_response = true;
        let wall_ms = self.shared.wall.now().as_micros() / 1_000;
        let signals = Signals::read(response.status(), response.headers(), wall_ms);
        let random = self.shared.random();
        self.shared.host(self.host, |host, now| {
            host.pacer.response(now, &signals, random);
            host.throttle.request(now);
            if !signals.is_refused {
                host.throttle.accept(now);
            }
        });
        signals
    }
}

fn is_retryable(status: StatusCode, signals: &Signals) -> bool {
    signals.is_refused || matches!(status, StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT)
}

impl<S, B, R> Service<Request<B>> for PacedService<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    B: Clone + Send + 'static,
    R: Send,
{
    type Response = Response<R>;
    type Error = PacedError<S::Error>;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context).map_err(PacedError::Inner)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let copy = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, copy);
        let (shared, settings) = (Arc::clone(&self.shared), self.settings.clone());
        Box::pin(async move {
            let name = host_of(&request);
            let may_retry = settings.retry_methods.contains(request.method());
            let max_retries = if may_retry { settings.max_retries } else { 0 };
            shared.host(&name, |host, _| host.budget.deposit());
            let mut next = Some(request);
            let mut attempt = 0;
            loop {
                // The last attempt takes the request, earlier ones a copy.
                let is_last = attempt >= max_retries;
                let mut wait_ms = None;
                let random = shared.random();
                let is_throttled = shared.host(&name, |host, now| {
                    let rejects = host.throttle.rejects(now, random);
                    if rejects {
                        host.throttle.request(now);
                    }
                    rejects
                });
                let outcome = if is_throttled {
                    let wait = Duration::from_millis(backoff(attempt, shared.random(), None));
                    Err(PacedError::Throttled { host: name.clone(), wait })
                } else {
                    let too_soon = |wait| PacedError::TooSoon { host: name.clone(), wait };
                    let slot = InFlight::start(&shared, &name, settings.max_wait).await.map_err(too_soon)?;
                    if attempt > 0 {
                        std::future::poll_fn(|context| inner.poll_ready(context)).await?;
                    }
                    let sent = if is_last { next.take() } else { next.clone() };
                    let Some(sent) = sent else { unreachable!("the last attempt ends the loop") };
                    match inner.call(sent).await {
                        Ok(response) => {
                            let signals = slot.response(&response);
                            if !is_retryable(response.status(), &signals) {
                                return Ok(response);
                            }
                            wait_ms = signals.wait_ms;
                            Ok(response)
                        }
                        Err(error) => {
                            drop(slot);
                            shared.host(&name, |host, now| host.throttle.request(now));
                            Err(PacedError::Inner(error))
                        }
                    }
                };
                let delay = Duration::from_millis(backoff(attempt, shared.random(), wait_ms));
                let gives_up = is_last
                    || delay > settings.max_wait
                    || !shared.host(&name, |host, _| host.budget.withdraw());
                if gives_up {
                    return outcome;
                }
                drop(outcome);
                tokio::time::sleep(delay).await;
                attempt += 1;
            }
        })
    }
}
