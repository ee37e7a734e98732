//! What an operator can say about the gateway. Unknown keys are errors; everything has a default but the addresses.

mod units;

pub use units::{Size, Time};

use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use tollgate_http::h1::head::HeadLimits;
use tollgate_http::identity::IdentityConfig;
use tollgate_http::response::ResponseConfig;

/// Everything that the gateway needs to know.
#[derive(Clone, Debug)]
pub struct GatewayConfig {
    /// What is its own.
    pub gateway: GatewaySection,
    /// How callers are told apart.
    pub who: IdentityConfig,
    /// What they are told.
    pub answers: ResponseConfig,
}

impl std::ops::Deref for GatewayConfig {
    type Target = GatewaySection;
    fn deref(&self) -> &GatewaySection {
        &self.gateway
    }
}

/// The section `gateway` of a settings file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GatewaySection {
    /// Where callers come in.
    pub listeners: Vec<ListenerConfig>,
    /// Where their requests go, by name.
    pub upstreams: BTreeMap<String, PoolConfig>,
    /// Which goes where.
    pub routes: Vec<RouteConfig>,
    /// What callers may do.
    #[serde(default)]
    #[serde(rename = "clients", alias = "callers")]
    pub callers: ClientLimits,
    /// Which headers tell upstreams who asked.
    #[serde(default)]
    pub forward: ForwardedHeader,
    /// One line a request; `-` is the standard output.
    pub access_log: Option<PathBuf>,
}

/// One address that callers reach.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListenerConfig {
    /// Where it listens.
    pub address: SocketAddr,
    /// With a certificate: TLS, HTTP/2 or HTTP/1.1 as the caller likes.
    pub tls: Option<ServerTlsConfig>,
    /// Whether connections begin with a PROXY header. Only trusted peers may connect then.
    #[serde(default)]
    pub proxy_protocol: bool,
}

/// A listener's certificate.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerTlsConfig {
    /// The chain, in PEM form.
    pub certificate: PathBuf,
    /// Its key, in PEM form.
    pub key: PathBuf,
}

/// One upstream.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolConfig {
    /// `host:port`, at least one.
    pub addresses: Vec<String>,
    /// What it speaks.
    #[serde(default)]
    pub protocol: UpstreamProtocol,
    /// Whether by TLS.
    pub tls: Option<UpstreamTlsConfig>,
    /// The longest that connecting may take, TLS included.
    #[serde(default = "PoolConfig::connect_timeout")]
    pub connect_timeout: Time,
    /// How long a connection may wait for its next request. Less than the upstream's own.
    #[serde(default = "PoolConfig::keep_alive")]
    pub keep_alive: Time,
    /// The most connections that wait, for each address and thread.
    #[serde(default = "PoolConfig::idle_connections")]
    pub idle_connections: usize,
    /// The most connections that are open at once, for each address (HTTP/1 alone).
    pub max_connections: Option<usize>,
    /// When an address that fails is passed over.
    #[serde(default)]
    pub eject: OutlierEjection,
    /// How addresses are asked whether they are well.
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

/// What an upstream speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UpstreamProtocol {
    /// HTTP/1.1.
    #[default]
    Http1,
    /// HTTP/2, without TLS by prior knowledge.
    Http2,
}

/// TLS towards an upstream.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct UpstreamTlsConfig {
    /// The authorities that may vouch for it; those of the system where nothing is said.
    pub ca: Option<PathBuf>,
    /// The name that it must prove, where that is not the address's host.
    pub server_name: Option<String>,
}

/// When an address that fails is passed over.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OutlierEjection {
    /// After so many failures in a row; 0 never.
    pub after: u32,
    /// For how long.
    #[serde(rename = "for")]
    pub for_: Time,
}

impl Default for OutlierEjection {
    fn default() -> Self {
        Self { after: 5, for_: Time::seconds(10) }
    }
}

/// How addresses are asked whether they are well.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HealthConfig {
    /// What is asked for; any status below 400 is well.
    pub path: String,
    /// How often.
    #[serde(default = "HealthConfig::every")]
    pub every: Time,
    /// The longest wait for an answer.
    #[serde(default = "HealthConfig::timeout")]
    pub timeout: Time,
    /// So many answers in a row make it well again.
    #[serde(default = "HealthConfig::two")]
    pub healthy_after: u32,
    /// So many failures in a row make it unwell.
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

/// Which requests go where, and what limits them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteConfig {
    /// `api.example.com`, `*.example.com`; any where nothing is said.
    pub host: Option<String>,
    /// `/users/{id}`, `/files/{*rest}`.
    pub path: String,
    /// Any where nothing is said.
    #[serde(default)]
    pub methods: Vec<String>,
    /// The name of an upstream.
    pub upstream: String,
    /// The domain whose rules limit it; no limits where nothing is said.
    pub domain: Option<String>,
    /// Templates within this route that rules tell apart: `GET /api/users/{id}`.
    #[serde(default)]
    pub endpoints: Vec<String>,
    /// Taken off the front of the path before it is passed on.
    pub strip_prefix: Option<String>,
    /// What `Host` says to the upstream; as the caller wrote it where nothing is said.
    pub host_header: Option<String>,
    /// The longest wait for an answer's head.
    #[serde(default = "RouteConfig::timeout")]
    pub timeout: Time,
    /// The longest silence within an answer, or a tunnel.
    #[serde(default = "RouteConfig::idle_timeout")]
    pub idle_timeout: Time,
    /// How many other attempts an idempotent request has that got no answer at all.
    #[serde(default = "RouteConfig::retries")]
    pub retries: u32,
    /// The largest body that is passed on.
    #[serde(default = "RouteConfig::max_body")]
    pub max_body: Size,
    /// Protocols that a connection may switch to.
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

    /// What a health check is sent by.
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

/// What callers may do.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClientLimits {
    /// Connections open at once, for each listener; more wait to be accepted.
    pub connections: usize,
    /// From the first byte of a head to its last; of a connection, to its first request.
    pub header_timeout: Time,
    /// Between two requests of a connection.
    pub idle_timeout: Time,
    /// Between two pieces of a body, or of an answer that the caller does not read.
    pub body_timeout: Time,
    /// Bytes of a head.
    pub header_bytes: Size,
    /// Fields of a head.
    pub header_fields: usize,
    /// Bytes of a target.
    pub target_bytes: Size,
    /// Requests that wait for their turn at once (`action: delay`); more are turned away with 503.
    #[serde(rename = "max_delayed", alias = "held")]
    pub held: usize,
    /// Streams at once on one HTTP/2 connection.
    pub streams: u32,
    /// How long requests under way may take to end when the process is told to.
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

/// Which headers tell upstreams who asked.
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
    /// Makes the files that it names relative to the folder of the settings' own file.
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
