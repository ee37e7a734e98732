//! Protocol servers: the listeners for gRPC, HTTP and the Redis protocol. `serve` and `gateway` have the same ones with
//! the same settings; they differ only in which are open by default.

use crate::cli::Listen;
use crate::config::Config;
use crate::config::connections::ConnectionLimits;
use crate::ratelimit::{DebugPages, MetricsPage, run_statsd};
use crate::server::bind::bind;
use crate::server::build::listen_if_free;
use crate::server::open_files;
use crate::server::status::ServerStatus;
use crate::server::store::Store;
use anyhow::Context;
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tollgate_engine::Limiter;
use tollgate_http::identity::CredentialVerifier;
use tollgate_http::tls::{ServerTls, ServerTlsConfig};
use tollgate_observe::ProcessStatus;
use tollgate_rules::Ruleset;
use tollgate_server::http::Pages;
use tollgate_server::{http, resp, rlqs, rls};

const GRPC: SocketAddr = local(8081);
/// Default address of the HTTP API.
pub(crate) const HTTP: SocketAddr = local(8080);
/// Optional by default: if the port is in use, the server starts without the Redis protocol.
const RESP: SocketAddr = local(6380);

/// The variable that replaces loopback in these; the image sets it. Without effect in the place of envoyproxy/ratelimit:
/// that service's own variables set all addresses there.
const LISTEN_HOST: &str = "TOLLGATE_LISTEN_HOST";

/// Maximum duration of draining; after it the process ends with requests still in flight.
const DRAIN: Duration = Duration::from_secs(15);

const fn local(port: u16) -> SocketAddr {
    SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, port))
}

/// Returns the host of the default addresses: loopback, but all of them in a container, where loopback cannot be reached from outside.
fn default_host() -> anyhow::Result<IpAddr> {
    match std::env::var(LISTEN_HOST) {
        Ok(host) => {
            let address = host.parse().ok();
            address.with_context(|| {
                format!("{LISTEN_HOST}={host} is not an IP address; use one such as 0.0.0.0")
            })
        }
        Err(_) => Ok(HTTP.ip()),
    }
}

/// State of the listeners that no setting configures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DefaultListeners {
    /// Listening on their default addresses.
    Open,
    /// Not listening.
    Closed,
}

/// Bound listeners of the protocol servers, with their forward-auth settings.
pub(crate) struct ProtocolServers {
    grpc: Option<rls::GrpcListener>,
    http: Option<TcpListener>,
    resp: Option<TcpListener>,
    forward: http::ForwardAuth,
    grpc_tls: Option<Arc<ServerTls>>,
    http_tls: Option<Arc<ServerTls>>,
    /// Debug pages and metrics, in the place of envoyproxy/ratelimit.
    debug: Option<TcpListener>,
    metrics: Option<TcpListener>,
    quota_stats: rlqs::RlqsStats,
}

/// Tasks of the running protocol servers.
pub(crate) struct RunningServers {
    grpc: Option<JoinHandle<Result<(), Box<dyn std::error::Error + Send + Sync>>>>,
    others: Vec<JoinHandle<()>>,
}

impl ProtocolServers {
    pub(crate) async fn open(
        config: &Config,
        unsaid: DefaultListeners,
        rules: &Ruleset,
    ) -> anyhow::Result<Self> {
        let forward = http::ForwardAuth::new(&config.forward_auth, &config.identity);
        let forward = forward.with_context(|| config.place())?;
        forward.check_domain(rules).with_context(|| config.place())?;
        for warning in http::ForwardAuth::warnings(&config.forward_auth, &config.identity, rules) {
            tracing::warn!("{warning}");
        }
        let host = default_host()?;
        let usual = |address: SocketAddr| match unsaid {
            DefaultListeners::Open => Listen::At(SocketAddr::new(host, address.port())),
            DefaultListeners::Closed => Listen::Off,
        };
        // In the words of who has set them.
        let (of_grpc, of_http) = match &config.service {
            Some(_) => ("GRPC_HOST or GRPC_PORT to another", "HOST or PORT to another"),
            None => ("--grpc to another, or to off", "--http to another, or to off"),
        };
        let grpc = match &config.grpc_socket {
            Some(path) => Some(
                rls::GrpcListener::unix(path.clone())
                    .with_context(|| format!("GRPC_UDS: cannot listen at {}", path.display()))?,
            ),
            None => listen(config.grpc.unwrap_or(usual(GRPC)), of_grpc)?.map(Into::into),
        };
        let http = listen(config.http.unwrap_or(usual(HTTP)), of_http)?;
        let resp = match (config.resp, unsaid) {
            (Some(address), _) => listen(address, "--resp to another, or to off")?,
            (None, DefaultListeners::Open) => {
                let address = SocketAddr::new(host, RESP.port());
                listen_if_free(address, "the Redis protocol is off", "--resp").await
            }
            (None, DefaultListeners::Closed) => None,
        };
        let tls = |name: &str, config: &Option<ServerTlsConfig>, protocols| {
            let tls = config.as_ref().map(|config| ServerTls::new(config, protocols)).transpose();
            tls.map_err(anyhow::Error::msg).with_context(|| format!("TLS of the {name} address"))
        };
        let (grpc_tls, http_tls) =
            (tls("gRPC", &config.grpc_tls, rls::ALPN)?, tls("HTTP", &config.http_tls, http::ALPN)?);
        let (mut debug, mut metrics) = (None, None);
        if let Some(service) = &config.service {
            // As there: the debug pages are no reason to end.
            let bound = service.debug.as_ref().map_err(ToString::to_string);
            debug = bound
                .and_then(|address| bind(*address).map_err(|error| error.to_string()))
                .inspect_err(|error| tracing::error!("Failed to open debug HTTP listener: '{error}'"))
                .ok();
            if let Some((address, _)) = &service.prometheus {
                metrics = listen(Listen::At(*address), "PROMETHEUS_ADDR to another")?;
            }
        }
        let quota_stats = rlqs::RlqsStats::default();
        Ok(Self { grpc, http, resp, forward, grpc_tls, http_tls, debug, metrics, quota_stats })
    }

    /// Logs the open listeners as envoyproxy/ratelimit does.
    pub(crate) fn log_listening(&self) {
        let grpc = self.grpc.as_ref().map(rls::GrpcListener::place);
        let all = [
            ("debug", address(self.debug.as_ref())),
            ("gRPC", grpc),
            ("HTTP", address(self.http.as_ref())),
            ("metrics", address(self.metrics.as_ref())),
        ];
        for (name, place) in all {
            if let Some(place) = place {
                tracing::warn!("Listening for {name} on '{place}'");
            }
        }
    }

    /// Returns whether no listener is open.
    pub(crate) const fn is_empty(&self) -> bool {
        self.grpc.is_none() && self.http.is_none() && self.resp.is_none()
    }

    pub(crate) fn http(&self) -> Option<SocketAddr> {
        self.http.as_ref()?.local_addr().ok()
    }

    /// Returns the lines of the start banner, one per open listener.
    pub(crate) fn banner(&self) -> Vec<String> {
        let all = [
            ("http", address(self.http.as_ref()), "probes, metrics, /v1/check"),
            (
                "grpc",
                self.grpc.as_ref().map(rls::GrpcListener::place),
                "envoy.service.ratelimit.v3, rate_limit_quota.v3",
            ),
            ("resp", address(self.resp.as_ref()), "CL.THROTTLE, TG.CHECK"),
        ];
        let line = |(name, place, about): (&str, Option<String>, &str)| {
            place.map(|place| format!("  {name}  {place}  ({about})"))
        };
        all.into_iter().filter_map(line).collect()
    }

    /// Returns the domain by which `/check` decides.
    pub(crate) fn forward_domain(&self) -> Arc<http::ForwardDomain> {
        self.forward.domain()
    }

    /// Returns the figures of quota streams.
    pub(crate) fn quota_stats(&self) -> rlqs::RlqsStats {
        self.quota_stats.clone()
    }

    /// Returns the verifier of credentials of the HTTP listener, for the task that reloads its keys.
    pub(crate) fn verifier(&self) -> Option<Arc<CredentialVerifier>> {
        self.http.as_ref().map(|_| self.forward.verifier())
    }

    /// Starts serving requests on all listeners, until `drain` completes.
    pub(crate) fn start<D: Future<Output = ()> + Send + 'static>(
        self,
        config: &Config,
        limiter: &Arc<Limiter<Store>>,
        status: &Arc<ServerStatus>,
        drain: impl Fn() -> D,
    ) -> RunningServers {
        let Self { grpc, http, resp, forward, grpc_tls, http_tls, debug, metrics, quota_stats } = self;
        let (style, health, (max_age, max_age_grace)) = service_options(config, status);
        let api =
            if config.service.is_some() { http::HttpApi::RatelimitService } else { http::HttpApi::Full };
        let responses = config.responses.clone();
        let ConnectionLimits { http: of_http, grpc: of_grpc, resp: of_resp, first_request } =
            config.connections;
        let (budget, guaranteed) = (open_files::budget(), open_files::guaranteed());
        let grpc = grpc.map(|listener| {
            let config = rls::RlsConfig {
                connections: of_grpc,
                guaranteed,
                budget: budget.clone(),
                first_request,
                responses: responses.clone(),
                style: style.clone(),
                health,
                tls: grpc_tls,
                max_age,
                max_age_grace,
                rlqs: rlqs::RlqsConfig { stats: quota_stats, ..rlqs::RlqsConfig::default() },
                ..rls::RlsConfig::default()
            };
            tokio::spawn(rls::serve(listener, Arc::clone(limiter), config, drain()))
        });
        let http = http.map(|listener| {
            let config = http::HttpConfig {
                connections: of_http,
                guaranteed,
                budget: budget.clone(),
                first_request,
                responses,
                forward_auth: forward,
                api,
                style: style.clone(),
                tls: http_tls,
                ..http::HttpConfig::default()
            };
            let status = Arc::clone(status) as Arc<dyn ProcessStatus>;
            tokio::spawn(http::serve(listener, Arc::clone(limiter), status, config, drain()))
        });
        let resp = resp.map(|listener| {
            let config = resp::RespConfig {
                connections: of_resp,
                guaranteed,
                budget: budget.clone(),
                first_request,
                has_secret_keys: config.cells.is_some(),
                ..config.resp_config.clone()
            };
            tokio::spawn(resp::serve(listener, Arc::clone(limiter), config, drain()))
        });
        let mut others: Vec<_> = http.into_iter().chain(resp).collect();
        if let Some(service) = &config.service {
            let (limiter, service) = (Arc::clone(limiter), Arc::clone(service));
            let path = service.prometheus.as_ref().map(|(_, path)| path.clone()).unwrap_or_default();
            let pages = [
                (
                    metrics,
                    Arc::new(MetricsPage { path, status: Arc::clone(status), service: Arc::clone(&service) })
                        as _,
                ),
                (
                    debug,
                    Arc::new(DebugPages {
                        limiter,
                        status: Arc::clone(status),
                        service: Arc::clone(&service),
                    }) as Arc<dyn Pages>,
                ),
            ];
            for (listener, pages) in pages {
                let Some(listener) = listener else { continue };
                let budget = budget.clone();
                others.push(tokio::spawn(http::serve_pages(
                    listener,
                    pages,
                    budget,
                    guaranteed,
                    first_request,
                    drain(),
                )));
            }
            if let Some(target) = service.statsd.clone() {
                let (status, drain) = (Arc::clone(status), drain());
                others.push(tokio::spawn(run_statsd(target, service, status, drain)));
            }
        }
        RunningServers { grpc, others }
    }
}

/// Returns what responses contain, which health names there are, and how old connections may become.
fn service_options(
    config: &Config,
    status: &Arc<ServerStatus>,
) -> (rls::ResponseStyle, rls::HealthNames, (Option<Duration>, Option<Duration>)) {
    let Some(service) = &config.service else { return Default::default() };
    let (rules, health, metrics) = (Arc::clone(status), Arc::clone(status), Arc::clone(&service.metrics));
    let style = rls::ResponseStyle::Service {
        headers: service.headers.clone(),
        metadata: service.dynamic_metadata,
        has_rules: Arc::new(move || rules.has_rules()),
        on_error: Arc::new(move |protocol| metrics.on_error(protocol)),
    };
    let names =
        rls::HealthNames::Named { name: "ratelimit", is_healthy: Arc::new(move || health.is_ready()) };
    (style, names, (service.max_age, service.max_age_grace))
}

impl RunningServers {
    /// Waits for the requests in flight, for at most `DRAIN`.
    pub(crate) async fn shutdown(self) -> anyhow::Result<()> {
        let ended = async {
            for other in self.others {
                let _ = other.await;
            }
            match self.grpc {
                None => Ok(()),
                Some(grpc) => grpc.await.unwrap_or(Ok(())),
            }
        };
        let ended = tokio::time::timeout(DRAIN, ended).await;
        let ended =
            ended.with_context(|| format!("some requests did not end within {} s", DRAIN.as_secs()))?;
        ended.map_err(|error| anyhow::anyhow!("the gRPC server failed: {error}"))
    }
}

fn address(listener: Option<&TcpListener>) -> Option<String> {
    listener.and_then(|listener| listener.local_addr().ok()).map(|address| address.to_string())
}

/// Binds an address; `correction` is which setting to set to what.
fn listen(listen: Listen, correction: &str) -> anyhow::Result<Option<TcpListener>> {
    let Listen::At(address) = listen else { return Ok(None) };
    let wrong = || format!("cannot listen on {address}; set {correction}");
    bind(address).with_context(wrong).map(Some)
}
