//! The subjects: who stands between the clients and the upstream. Each has one configuration for all scenarios.

use super::clients::PRIORITIES;
use super::workers::{Listening, ServiceTime, Upstream, WORKERS, Workers, listen};
use crate::process::{Server, free_port, tollgate_binary};
use hyper::Request;
use hyper::body::Incoming;
use hyper::service::service_fn;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use tollgate_sdk::{CheckRequest, InProcess, TollgateLayer};
use tower::{Layer, ServiceExt};

/// Rules of the gateway and of the layer.
const RULES: &str = "domain: api
overload:
  priorities:
    - {when: {class: critical}, priority: critical}
    - {when: {class: important}, priority: important}
    - {when: {class: sheddable}, priority: sheddable}
  workers: {limit: adaptive, floor: 16, target: 2x}
  fairness: {by: tenant, guarantees: {enterprise: 5% each, pro: 1% each, free: 10% together}}
";

/// Attributes of the rules, and the headers that have them.
const HEADERS: [(&str, &str); 4] =
    [("api_key", "x-api-key"), ("tenant", "x-tenant"), ("tier", "x-tier"), ("class", "x-class")];

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Subject {
    /// The upstream alone.
    Nothing,
    /// Envoy with at most 24 requests in flight.
    Fixed,
    /// Envoy with adaptive concurrency, which measures the latency without load so often, in seconds.
    Adaptive(u32),
    /// Envoy with admission control.
    Admission,
    /// Tollgate's gateway.
    Gateway,
    /// Tollgate's tower layer.
    Layer,
}

/// A subject that runs, with an upstream of its own.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) upstream: Upstream,
    /// The upstream's HTTP server, and the process before it.
    _servers: (Listening, Option<Server>),
}

impl Subject {
    pub(crate) const ALL: [Self; 7] = [
        Self::Nothing,
        Self::Fixed,
        Self::Adaptive(60),
        Self::Adaptive(10),
        Self::Admission,
        Self::Gateway,
        Self::Layer,
    ];
    pub(crate) const SHORT: [Self; 5] =
        [Self::Nothing, Self::Fixed, Self::Adaptive(10), Self::Gateway, Self::Layer];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Fixed => "envoy-fixed",
            Self::Adaptive(60) => "envoy-adaptive-60s",
            Self::Adaptive(_) => "envoy-adaptive",
            Self::Admission => "envoy-admission",
            Self::Gateway => "gateway",
            Self::Layer => "layer",
        }
    }

    pub(crate) const fn is_ours(self) -> bool {
        matches!(self, Self::Gateway | Self::Layer)
    }

    /// Starts it before a new upstream. Files go to `folder`.
    pub(crate) async fn start(
        self,
        folder: &Path,
        service: ServiceTime,
        seed: u64,
    ) -> Result<Running, String> {
        let upstream = Upstream::start(service, seed);
        let workers = upstream.workers.clone();
        if self == Self::Layer {
            let behind = layered(workers).await?;
            return Ok(Running { address: behind.address, upstream, _servers: (behind, None) });
        }
        let plain = service_fn(move |_: Request<Incoming>| {
            let workers = workers.clone();
            async move { Ok::<_, Infallible>(workers.serve().await) }
        });
        let behind = listen(plain).await?;
        let name = format!("{}-{seed}", self.name());
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder).map_err(|error| error.to_string())?;
        let server = match self {
            Self::Nothing | Self::Layer => {
                return Ok(Running { address: behind.address, upstream, _servers: (behind, None) });
            }
            Self::Fixed => envoy(&folder, behind.address, "", 24)?,
            Self::Adaptive(seconds) => {
                envoy(&folder, behind.address, &adaptive_concurrency(seconds), 100_000)?
            }
            Self::Admission => envoy(&folder, behind.address, ADMISSION_CONTROL, 100_000)?,
            Self::Gateway => gateway(&folder, behind.address)?,
        };
        let address = server.address.parse().map_err(|_| format!("bad address {}", server.address))?;
        Ok(Running { address, upstream, _servers: (behind, Some(server)) })
    }
}

/// The layer around the workers themselves, in this process.
async fn layered(workers: Workers) -> Result<Listening, String> {
    let limits = InProcess::from_rules(RULES, "api").map_err(|error| error.to_string())?;
    let extract = |head: &hyper::http::request::Parts| {
        let value = |header: &str| head.headers.get(header)?.to_str().ok().map(str::to_owned);
        let found = HEADERS.iter().filter_map(|(name, header)| Some(((*name).to_owned(), value(header)?)));
        Some(CheckRequest::attributes(found))
    };
    let inner = tower::service_fn(move |_: Request<Incoming>| {
        let workers = workers.clone();
        async move { Ok::<_, Infallible>(workers.serve().await) }
    });
    let service = TollgateLayer::new(limits, extract).layer(inner);
    listen(service_fn(move |request: Request<Incoming>| service.clone().oneshot(request))).await
}

fn gateway(folder: &Path, upstream: SocketAddr) -> Result<Server, String> {
    let myself = std::env::current_exe().map_err(|error| error.to_string())?;
    let address = format!("127.0.0.1:{}", free_port()?);
    let headers: Vec<String> =
        HEADERS[1..].iter().map(|(name, header)| format!("{name}: {header}")).collect();
    let config = format!(
        "rules: [rules.yaml]\nmemory: 64MiB\nidentity: {{headers: {{{}}}}}\ngateway:\n  listeners: [{{address: \"{address}\"}}]\n  upstreams: {{up: {{addresses: [\"{upstream}\"]}}}}\n  routes: [{{path: \"/{{*rest}}\", upstream: up, domain: api}}]\n",
        headers.join(", ")
    );
    let path = folder.join("gateway.yaml");
    std::fs::write(folder.join("rules.yaml"), RULES).map_err(|error| error.to_string())?;
    std::fs::write(&path, config).map_err(|error| error.to_string())?;
    let path = path.display().to_string();
    Server::start_anywhere_at(&tollgate_binary(&myself)?, &["gateway", "--config", &path], &address)
}

/// Returns the path of Envoy: where the tests find it.
fn envoy_binary() -> Result<PathBuf, String> {
    let named = std::env::var_os("TOLLGATE_TEST_ENVOY").map(PathBuf::from);
    let made = Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/envoy/bin/envoy");
    let path = named.unwrap_or(made);
    match path.exists() {
        true => Ok(path),
        false => Err(format!(
            "{} not found; run make .venv/envoy/installed or set TOLLGATE_TEST_ENVOY",
            path.display()
        )),
    }
}

fn adaptive_concurrency(seconds: u32) -> String {
    format!(
        r#"
          - name: envoy.filters.http.adaptive_concurrency
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.adaptive_concurrency.v3.AdaptiveConcurrency
              gradient_controller_config:
                sample_aggregate_percentile: {{value: 50}}
                concurrency_limit_params: {{concurrency_update_interval: 0.1s}}
                min_rtt_calc_params: {{jitter: {{value: 10}}, interval: {seconds}s, request_count: 50}}
              enabled: {{default_value: true, runtime_key: adaptive_concurrency.enabled}}"#
    )
}

const ADMISSION_CONTROL: &str = r#"
          - name: envoy.filters.http.admission_control
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.admission_control.v3.AdmissionControl
              enabled: {default_value: true, runtime_key: admission_control.enabled}
              sampling_window: 10s
              sr_threshold: {default_value: {value: 95}, runtime_key: admission_control.sr_threshold}
              aggression: {default_value: 1.5, runtime_key: admission_control.aggression}
              success_criteria: {http_criteria: {http_success_status: [{start: 200, end: 400}]}, grpc_criteria: {grpc_success_status: [0]}}"#;

/// Starts Envoy with a filter and a limit of requests in flight.
fn envoy(folder: &Path, upstream: SocketAddr, filter: &str, in_flight: u32) -> Result<Server, String> {
    let port = free_port()?;
    let config = format!(
        r#"static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: in
          route_config:
            virtual_hosts:
            - {{name: all, domains: ["*"], routes: [{{match: {{prefix: /}}, route: {{cluster: up}}}}]}}
          http_filters:{filter}
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: up
    connect_timeout: 1s
    type: STATIC
    circuit_breakers: {{thresholds: [{{max_connections: 100000, max_pending_requests: 100000, max_requests: {in_flight}}}]}}
    load_assignment:
      cluster_name: up
      endpoints: [{{lb_endpoints: [{{endpoint: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {}}}}}}}}}]}}]
"#,
        upstream.port()
    );
    let path = folder.join("envoy.yaml");
    std::fs::write(&path, config).map_err(|error| error.to_string())?;
    let path = path.display().to_string();
    let arguments = ["-c", &path, "--use-dynamic-base-id", "--concurrency", "1", "-l", "off"];
    Server::start_anywhere_at(&envoy_binary()?, &arguments, &format!("127.0.0.1:{port}"))
}

/// Describes the settings, for the report.
pub(crate) fn describe() -> String {
    format!(
        "{WORKERS} workers; priorities {}; the rules of the gateway and the layer:\n{RULES}",
        PRIORITIES.join(", ")
    )
}
