//! Upstream pools: load balancing over the backends of one upstream, and their idle connections.
//!
//! Of two backends drawn at random, the one with fewer requests in flight gets the next request: nearly as good as comparing
//! all, without a herd effect on the least loaded. A backend is skipped while its health check fails, and for a while after
//! several consecutive failures; if all are skipped, all are tried, because an attempt is better than a certain error.

mod idle;

pub(crate) use idle::ConnectionPermit;

use crate::config::{PoolConfig, UpstreamProtocol};
use crate::h1::exchange::UpstreamConnection;
use crate::tls::ClientTls;
use idle::IdleConnections;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tollgate_http::server::Io;

/// Minimum time between two log messages about first failures of a backend: one that fails every other request would
/// otherwise fill the log.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// One upstream.
pub(crate) struct Pool {
    pub(crate) name: String,
    pub(crate) config: PoolConfig,
    pub(crate) backends: Vec<Arc<Backend>>,
    /// Contents of the CA file, to detect changes.
    authorities: Option<Vec<u8>>,
    /// Counter from which pairs of backends are drawn.
    drawn: AtomicU64,
}

/// One address of an upstream.
pub(crate) struct Backend {
    pub(crate) address: String,
    tls: Option<ClientTls>,
    connect: Duration,
    eject_after: u32,
    eject_for: Duration,
    in_flight: AtomicUsize,
    /// Requests whose head was copied from client bytes to those of an idle connection, over all backends.
    fast_path: Arc<AtomicU64>,
    idle: IdleConnections,
    /// Result of the last health check.
    healthy: AtomicBool,
    failures: AtomicU32,
    ejected_until: Mutex<Option<Instant>>,
    ejected: AtomicBool,
    /// Time of the last log message about a failure that did not eject the backend.
    reported_at: Mutex<Option<Instant>>,
    pub(crate) streams: crate::h2::SharedConnection,
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectError {
    #[error("cannot connect to {0}: {1}")]
    Refused(String, std::io::Error),
    #[error("connecting to {0} timed out")]
    Timeout(String),
    /// The connection limit is reached; not a failure of the backend.
    #[error("all connections to {0} are in use")]
    Full(String),
}

/// Which connection to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionPreference {
    /// An idle one, or a new one.
    Any,
    /// A new one, because idle ones may be closed.
    New,
    /// A new one, if a permit is available immediately.
    Spare,
}

/// A request in flight at a backend.
pub(crate) struct InFlight(Arc<Backend>);

impl InFlight {
    pub(crate) fn backend(&self) -> &Arc<Backend> {
        &self.0
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pool {
    pub(crate) fn new(name: &str, config: &PoolConfig, fast_path: &Arc<AtomicU64>) -> Result<Self, String> {
        let tls = config.tls.as_ref().map(|tls| ClientTls::new(tls, config.protocol)).transpose()?;
        let backend = |address: &String| {
            let tls = tls.as_ref().map(|tls| tls.for_address(address)).transpose()?;
            Ok(Arc::new(Backend::new(address, config, tls, Arc::clone(fast_path))))
        };
        if config.addresses.is_empty() {
            return Err("`addresses` is empty; add at least one host:port".to_owned());
        }
        if config.max_connections == Some(0) {
            return Err(
                "`max_connections: 0` would block all requests; use 1 or more, or remove it".to_owned()
            );
        }
        let authorities = authorities(config);
        let backends = config.addresses.iter().map(backend).collect::<Result<Vec<_>, String>>()?;
        let (name, config, drawn) = (name.to_owned(), config.clone(), AtomicU64::new(0));
        Ok(Self { name, config, backends, authorities, drawn })
    }

    /// Returns whether these settings would create the same pool.
    pub(crate) fn matches_config(&self, name: &str, config: &PoolConfig) -> bool {
        self.name == name && self.config == *config && self.authorities == authorities(config)
    }

    /// Takes over the health of backends that remain after a reload, so that a failing one is not tried again.
    pub(crate) fn inherit(&self, former: &Self) {
        for own in &self.backends {
            if let Some(known) = former.backends.iter().find(|known| known.address == own.address) {
                own.inherit(known, self.config.health.is_some());
            }
        }
    }

    /// Picks the backend for the next request; those in `tried` have already failed it.
    pub(crate) fn pick(&self, tried: &[usize]) -> Option<(usize, InFlight)> {
        if let ([only], []) = (&self.backends[..], tried) {
            return Some((0, only.enter()));
        }
        let usable = |at: &usize| !tried.contains(at) && self.backends[*at].is_usable();
        let mut candidates: smallvec::SmallVec<[usize; 16]> =
            (0..self.backends.len()).filter(usable).collect();
        if candidates.is_empty() {
            candidates = (0..self.backends.len()).filter(|at| !tried.contains(at)).collect();
        }
        if candidates.is_empty() {
            candidates = (0..self.backends.len()).collect();
        }
        let load = |at: usize| self.backends[at].in_flight.load(Ordering::Relaxed);
        let draw = mix(self.drawn.fetch_add(1, Ordering::Relaxed));
        let count = candidates.len();
        let first = candidates[(draw as u32 as usize) % count];
        let second = candidates[((draw >> 32) as usize) % count];
        let at = if load(second) < load(first) { second } else { first };
        Some((at, self.backends[at].enter()))
    }

    /// Starts a request at one particular backend.
    pub(crate) fn at(&self, at: usize) -> InFlight {
        self.backends[at].enter()
    }

    pub(crate) fn protocol(&self) -> UpstreamProtocol {
        self.config.protocol
    }
}

fn authorities(config: &PoolConfig) -> Option<Vec<u8>> {
    std::fs::read(config.tls.as_ref()?.ca.as_ref()?).ok()
}

/// Spreads a count over 64 bits (the finalizer of SplitMix64).
const fn mix(count: u64) -> u64 {
    let mut x = count.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

impl Backend {
    fn new(address: &str, config: &PoolConfig, tls: Option<ClientTls>, fast_path: Arc<AtomicU64>) -> Self {
        Self {
            address: address.to_owned(),
            tls,
            connect: config.connect_timeout.0,
            eject_after: config.eject.after,
            eject_for: config.eject.for_.0,
            in_flight: AtomicUsize::new(0),
            fast_path,
            idle: IdleConnections::new(config),
            healthy: AtomicBool::new(true),
            failures: AtomicU32::new(0),
            ejected_until: Mutex::new(None),
            ejected: AtomicBool::new(false),
            reported_at: Mutex::new(None),
            streams: crate::h2::SharedConnection::default(),
        }
    }

    /// Takes over the health of `former`; `checked` is true if health checks will report a recovery.
    fn inherit(&self, former: &Self, checked: bool) {
        self.healthy.store(former.healthy.load(Ordering::Relaxed) || !checked, Ordering::Relaxed);
        self.failures.store(former.failures.load(Ordering::Relaxed), Ordering::Relaxed);
        let until = *former.ejected_until.lock().unwrap_or_else(PoisonError::into_inner);
        *self.ejected_until.lock().unwrap_or_else(PoisonError::into_inner) = until;
        self.ejected.store(until.is_some(), Ordering::Relaxed);
    }

    fn enter(self: &Arc<Self>) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        InFlight(Arc::clone(self))
    }

    fn is_usable(&self) -> bool {
        if !self.healthy.load(Ordering::Relaxed) {
            return false;
        }
        if !self.ejected.load(Ordering::Relaxed) {
            return true;
        }
        let mut until = self.ejected_until.lock().unwrap_or_else(PoisonError::into_inner);
        if until.is_some_and(|until| Instant::now() < until) {
            return false;
        }
        // One more failure ejects it again.
        *until = None;
        self.ejected.store(false, Ordering::Relaxed);
        self.failures.store(self.eject_after.saturating_sub(1), Ordering::Relaxed);
        true
    }

    /// Records a response.
    pub(crate) fn record_success(&self) {
        if self.failures.load(Ordering::Relaxed) != 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// Records a missing response or a failure of the backend. The first of a series is logged with its cause, at most
    /// once in [`REPORT_INTERVAL`], and the one that ejects the backend.
    pub(crate) fn record_failure(&self, cause: &str) {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        if failures == 1 && self.is_report_due() {
            tracing::warn!(backend = self.address, error = cause, "backend failed");
        }
        if self.eject_after > 0 && failures >= self.eject_after && !self.ejected.load(Ordering::Relaxed) {
            let until = Instant::now() + self.eject_for;
            *self.ejected_until.lock().unwrap_or_else(PoisonError::into_inner) = Some(until);
            self.ejected.store(true, Ordering::Relaxed);
            tracing::warn!(backend = self.address, failures, error = cause, "backend ejected");
        }
    }

    fn is_report_due(&self) -> bool {
        let now = Instant::now();
        let mut reported = self.reported_at.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = reported.is_none_or(|at| now.duration_since(at) >= REPORT_INTERVAL);
        if is_due {
            *reported = Some(now);
        }
        is_due
    }

    /// Records the result of a health check.
    pub(crate) fn set_healthy(&self, healthy: bool) {
        if self.healthy.swap(healthy, Ordering::Relaxed) != healthy {
            if healthy {
                tracing::info!(backend = self.address, "backend healthy");
            } else {
                tracing::warn!(backend = self.address, "backend unhealthy");
            }
        }
    }

    pub(crate) fn stats(&self) -> (bool, usize) {
        let fine = self.healthy.load(Ordering::Relaxed) && !self.ejected.load(Ordering::Relaxed);
        (fine, self.in_flight.load(Ordering::Relaxed))
    }

    /// Counts a request on the fast path.
    pub(crate) fn count_fast_path(&self) {
        self.fast_path.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns a usable idle connection, if there is one and a permit is available.
    pub(crate) fn take_idle(&self) -> Option<Box<UpstreamConnection>> {
        self.idle.take()
    }

    /// Returns a connection to the pool.
    pub(crate) fn put_back(&self, connection: Box<UpstreamConnection>) {
        self.idle.put(connection);
    }

    /// Closes expired idle connections.
    pub(crate) fn sweep(&self) {
        self.idle.sweep();
    }

    /// Returns a connection for one request.
    pub(crate) async fn connection(
        &self,
        wanted: ConnectionPreference,
    ) -> Result<Box<UpstreamConnection>, ConnectError> {
        if let (ConnectionPreference::Any, Some(idle)) = (wanted, self.idle.take()) {
            return Ok(idle);
        }
        let timeout = if wanted == ConnectionPreference::Spare { Duration::ZERO } else { self.connect };
        let permit = self.idle.permit(timeout).await;
        let mut permit = permit.ok_or_else(|| ConnectError::Full(self.address.clone()))?;
        // A connection became idle in the meantime. If a new one is required, it replaces this one.
        if let Some(mut free) = self.idle.take_with(&mut permit) {
            if wanted == ConnectionPreference::Any {
                return Ok(free);
            }
            permit = free.permit.take();
        }
        // The wait for a permit does not reduce the time for connecting.
        Ok(Box::new(UpstreamConnection::new(self.open(Instant::now() + self.connect).await?, permit)))
    }

    /// Opens a stream for either protocol.
    pub(crate) async fn open(&self, deadline: Instant) -> Result<Io, ConnectError> {
        let opening = async {
            let stream = TcpStream::connect(&self.address).await?;
            stream.set_nodelay(true)?;
            match &self.tls {
                None => Ok(Io::Tcp(stream)),
                Some(tls) => tls.connect(stream).await,
            }
        };
        match tokio::time::timeout_at(deadline, opening).await {
            Ok(Ok(io)) => Ok(io),
            Ok(Err(error)) => Err(ConnectError::Refused(self.address.clone(), error)),
            Err(_) => Err(ConnectError::Timeout(self.address.clone())),
        }
    }

    pub(crate) fn connect_timeout(&self) -> Duration {
        self.connect
    }
}
