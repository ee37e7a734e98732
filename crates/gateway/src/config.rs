//! Gateway configuration. Unknown keys are errors; everything except addresses has a default.

mod units;

pub use units::{Size, Time};

use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use tollgate_http::h1::head::HeadLimits;
use tollgate_http::identity::IdentityConfig;
use tollgate_http::response::ResponseConfig;
use tollgate_rules::RequiredDomains;

/// Complete configuration of the gateway.
#[derive(Clone, Debug)]
pub struct GatewayConfig {
    /// The `gateway` section.
    pub gateway: GatewaySection,
    /// How callers are identified.
    pub identity: IdentityConfig,
    /// Rate limit headers and denial responses.
    pub responses: ResponseConfig,
}

impl GatewayConfig {
    /// Lets rules without a domain of the routes be refused.
    pub fn require_domains(&self, required: &RequiredDomains) {
        let domains = self.routes.iter().filter_map(|route| route.domain.as_deref());
        required.set("a route of the gateway", domains);
    }
}

impl std::ops::Deref for GatewayConfig {
    type Target = GatewaySection;
    fn deref(&self) -> &GatewaySection {
        &self.gateway
    }
}

/// The `gateway` section of a configuration file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatewaySection {
    /// Listeners.
    pub listeners: Vec<ListenerConfig>,
    /// Upstreams by name.
    pub upstreams: BTreeMap<String, PoolConfig>,
    /// Routes.
    pub routes: Vec<RouteConfig>,
    /// Limits on client connections and requests.
    #[serde(default)]
    #[serde(rename = "clients", alias = "callers")]
    pub callers: ClientLimits,
    /// Headers that forward the client address to upstreams.
    #[serde(default)]
    pub forward: ForwardedHeader,
    /// Access log file, one line per request; `-` for standard output.
    pub access_log: Option<PathBuf>,
}

/// A listener.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListenerConfig {
    /// Address to listen on.
    pub address: SocketAddr,
    /// Certificate for TLS; the client then negotiates HTTP/2 or HTTP/1.1.
    pub tls: Option<ServerTlsConfig>,
    /// Whether connections start with a PROXY header; only trusted peers may then connect.
    #[serde(default)]
    pub proxy_protocol: bool,
}

/// Certificate of a listener.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerTlsConfig {
    /// Certificate chain, PEM.
    pub certificate: PathBuf,
    /// Private key, PEM.
    pub key: PathBuf,
}

/// An upstream.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// Backends as `host:port`, at least one.
    pub addresses: Vec<String>,
    /// Protocol of the backends.
    #[serde(default)]
    pub protocol: UpstreamProtocol,
    /// TLS settings; plain text if absent.
    pub tls: Option<UpstreamTlsConfig>,
    /// Timeout for connecting, including the TLS handshake.
    #[serde(default = "PoolConfig::connect_timeout")]
    pub connect_timeout: Time,
    /// Maximum idle time of a pooled connection; set it below the upstream's own keep-alive.
    #[serde(default = "PoolConfig::keep_alive")]
    pub keep_alive: Time,
    /// Maximum number of idle connections per backend and thread.
    #[serde(default = "PoolConfig::idle_connections")]
    pub idle_connections: usize,
    /// Maximum number of open connections per backend (HTTP/1 only).
    pub max_connections: Option<usize>,
    /// Outlier ejection.
    #[serde(default)]
    pub eject: OutlierEjection,
    /// Active health check settings.
    pub health: Option<HealthConfig>,
}

impl PoolConfig {
    fn connect_timeout() -> Time {
        Time::seconds(2)
    }
    fn keep_alive() -> Time {
        Time::seconds(30)
    }
    fn idle_connections() -> usize {
        256
    }
}

/// Protocol of an upstream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UpstreamProtocol {
    /// HTTP/1.1.
    #[default]
    Http1,
    /// HTTP/2; without TLS by prior knowledge.
    Http2,
}

/// TLS settings of an upstream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UpstreamTlsConfig {
    /// CA bundle; the system's if absent.
    pub ca: Option<PathBuf>,
    /// Name that the certificate must prove; the backend's host if absent.
    pub server_name: Option<String>,
}

/// Outlier ejection: when a failing backend stops getting requests.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OutlierEjection {
    /// Number of consecutive failures; 0 disables ejection.
    pub after: u32,
    /// Duration of an ejection.
    #[serde(rename = "for")]
    pub for_: Time,
}

impl Default for OutlierEjection {
    fn default() -> Self {
        Self { after: 5, for_: Time::seconds(10) }
    }
}

/// Active health check settings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HealthConfig {
    /// Path to request; any status below 400 is healthy.
    pub path: String,
    /// Interval between checks.
    #[serde(default = "HealthConfig::every")]
    pub every: Time,
    /// Timeout for a response.
    #[serde(default = "HealthConfig::timeout")]
    pub timeout: Time,
    /// Consecutive successes after which a backend is healthy again.
    #[serde(default = "HealthConfig::two")]
    pub healthy_after: u32,
    /// Consecutive failures after which a backend is unhealthy.
    #[serde(default = "HealthConfig::two")]
    pub unhealthy_after: u32,
}

impl HealthConfig {
    fn every() -> Time {
        Time::seconds(5)
    }
    fn timeout() -> Time {
        Time::seconds(2)
    }
    fn two() -> u32 {
        2
    }
}

/// A route: which requests go to which upstream, and with which limits.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteConfig {
    /// Host, as `api.example.com` or `*.example.com`; any host if absent.
    pub host: Option<String>,
    /// Path template, as `/users/{id}` or `/files/{*rest}`.
    pub path: String,
    /// Methods; any if empty.
    #[serde(default)]
    pub methods: Vec<String>,
    /// Name of the upstream.
    pub upstream: String,
    /// Domain whose rules apply; no limits if absent.
    pub domain: Option<String>,
    /// Endpoint templates within this route for rules: `GET /api/users/{id}`.
    #[serde(default)]
    pub endpoints: Vec<String>,
    /// Prefix to remove from the path before forwarding.
    pub strip_prefix: Option<String>,
    /// `Host` header for the upstream; the client's if absent.
    pub host_header: Option<String>,
    /// Timeout for the response head.
    #[serde(default = "RouteConfig::timeout")]
    pub timeout: Time,
    /// Maximum idle time within a response or a tunnel.
    #[serde(default = "RouteConfig::idle_timeout")]
    pub idle_timeout: Time,
    /// Number of further attempts for an idempotent request that got no response.
    #[serde(default = "RouteConfig::retries")]
    pub retries: u32,
    /// Maximum size of a request body.
    #[serde(default = "RouteConfig::max_body")]
    pub max_body: Size,
    /// Protocols that a connection may be upgraded to.
    #[serde(default = "RouteConfig::upgrades")]
    pub upgrades: Vec<String>,
}

impl RouteConfig {
    fn timeout() -> Time {
        Time::seconds(30)
    }
    fn idle_timeout() -> Time {
        Time::seconds(60)
    }
    fn retries() -> u32 {
        1
    }
    fn max_body() -> Size {
        Size(100 << 20)
    }
    fn upgrades() -> Vec<String> {
        vec!["websocket".to_owned()]
    }

    /// Returns the route of a health check.
    pub(crate) fn probe(timeout: std::time::Duration) -> Self {
        Self {
            host: None,
            path: String::new(),
            methods: Vec::new(),
            upstream: String::new(),
            domain: None,
            endpoints: Vec::new(),
            strip_prefix: None,
            host_header: None,
            timeout: Time(timeout),
            idle_timeout: Time(timeout),
            retries: 0,
            max_body: Size(0),
            upgrades: Vec::new(),
        }
    }
}

/// Limits on client connections and requests.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClientLimits {
    /// Maximum number of open connections per listener; more wait to be accepted.
    pub connections: usize,
    /// Timeout from the first byte of a head to its last, and from a connection's start to its first request.
    pub header_timeout: Time,
    /// Maximum idle time between two requests on a connection.
    pub idle_timeout: Time,
    /// Maximum idle time within a request body, or while the client does not read the response.
    pub body_timeout: Time,
    /// Maximum size of a head.
    pub header_bytes: Size,
    /// Maximum number of header fields in a head.
    pub header_fields: usize,
    /// Maximum length of a request target.
    pub target_bytes: Size,
    /// Maximum number of requests in the delay queue (`action: delay`); more are shed with 503.
    #[serde(rename = "max_delayed", alias = "held")]
    pub held: usize,
    /// Maximum number of concurrent streams on an HTTP/2 connection.
    pub streams: u32,
    /// Time that requests in flight get to complete on shutdown.
    pub drain: Time,
}

impl Default for ClientLimits {
    fn default() -> Self {
        let head = HeadLimits::default();
        Self {
            connections: 200_000,
            header_timeout: Time::seconds(10),
            idle_timeout: Time::seconds(60),
            body_timeout: Time::seconds(30),
            header_bytes: Size(head.bytes as u64),
            header_fields: head.fields,
            target_bytes: Size(head.target as u64),
            held: 10_000,
            streams: 128,
            drain: Time::seconds(30),
        }
    }
}

/// Headers that forward the client address to upstreams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ForwardedHeader {
    /// `X-Forwarded-For`, `-Proto`, `-Host`.
    #[default]
    XForwarded,
    /// `Forwarded` (RFC 7239).
    Forwarded,
    /// Both.
    Both,
}

impl GatewaySection {
    /// Resolves relative file paths against the folder of the configuration file.
    pub fn resolve(&mut self, folder: &Path) {
        for tls in self.listeners.iter_mut().filter_map(|listener| listener.tls.as_mut()) {
            for path in [&mut tls.certificate, &mut tls.key] {
                *path = folder.join(&*path);
            }
        }
        for tls in self.upstreams.values_mut().filter_map(|pool| pool.tls.as_mut()) {
            if let Some(ca) = &mut tls.ca {
                *ca = folder.join(&*ca);
            }
        }
        if let Some(log) = self.access_log.as_mut().filter(|log| log.as_os_str() != "-") {
            *log = folder.join(&*log);
        }
    }
}
