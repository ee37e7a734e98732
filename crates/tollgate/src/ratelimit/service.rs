//! Settings that a replacement of envoyproxy/ratelimit needs besides the server's [`Config`](crate::config::Config).

use super::health::HealthPolicy;
use super::metrics::ServiceMetrics;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tollgate_server::rls::LimitHeaders;

/// Settings of the service.
pub(crate) struct Service {
    /// Address of the debug pages, or why there are none.
    pub(crate) debug: Result<SocketAddr, String>,
    /// Address and path of its metrics for Prometheus.
    pub(crate) prometheus: Option<(SocketAddr, String)>,
    pub(crate) statsd: Option<Statsd>,
    /// Headers of responses.
    pub(crate) headers: Option<LimitHeaders>,
    /// Whether responses have dynamic metadata.
    pub(crate) dynamic_metadata: bool,
    pub(crate) health: HealthPolicy,
    /// Age at which a gRPC connection is asked to end.
    pub(crate) max_age: Option<Duration>,
    /// Time after that in which it ends whatever goes on.
    pub(crate) max_age_grace: Option<Duration>,
    pub(crate) metrics: Arc<ServiceMetrics>,
}

/// Protocol of statsd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StatsdProtocol {
    /// Lines over TCP, with tags in the names.
    Statsd,
    /// DogStatsD: datagrams, with tags of their own.
    DogStatsd,
}

/// The address of statsd, and the interval between reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Statsd {
    pub(crate) protocol: StatsdProtocol,
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) interval: Duration,
}

impl fmt::Debug for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Service").field("debug", &self.debug).finish_non_exhaustive()
    }
}
