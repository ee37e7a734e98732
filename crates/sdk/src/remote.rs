//! Client of a Tollgate server over gRPC. It uses Envoy's rate limit service, and gRPC metadata that makes a Tollgate
//! server return the complete HTTP response. For descriptors any other server of the protocol works too; the response
//! is then generated here.
//!
//! A request never waits longer than the deadline; without a decision by then, the fail policy applies.

use crate::check_request::{CheckForm, CheckRequest, Pair};
use crate::decider::{Decider, LayerDecision};
use crate::rls::{
    DescriptorStatus, Entry, OVER_LIMIT, RateLimitDescriptor, RateLimitRequest, RateLimitResponse,
};
use http::uri::PathAndQuery;
use http::{HeaderName, HeaderValue, Response, StatusCode, Uri};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tollgate_core::{CalendarUnit, Clock, SystemClock, TimeDelta};
use tollgate_engine::Window;
use tollgate_http::response::{DecisionSummary, Disposition, Policy, ResponseConfig};
use tonic::Status;
use tonic::client::Grpc;
use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic_prost::ProstCodec;

/// Length of a `traceparent` that is forwarded, in bytes.
const TRACEPARENT: usize = 55;

/// What happens to requests while the server is unavailable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FailPolicy {
    /// They are allowed.
    #[default]
    Open,
    /// They are rejected with 503.
    Closed,
}

/// TLS settings for an `https` address.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteTls {
    /// PEM file with the trusted authorities; by default those of the system.
    pub ca: Option<PathBuf>,
    /// Name in the server's certificate; by default the host of the address.
    pub server_name: Option<String>,
}

impl RemoteTls {
    fn config(&self) -> Result<ClientTlsConfig, RemoteError> {
        let mut tls = ClientTlsConfig::new();
        tls = match &self.ca {
            None => tls.with_native_roots(),
            Some(path) => {
                let wrong = |wrong: String| RemoteError::Authorities { path: path.clone(), wrong };
                let pem = std::fs::read(path).map_err(|error| wrong(error.to_string()))?;
                if !String::from_utf8_lossy(&pem).contains("-----BEGIN CERTIFICATE-----") {
                    return Err(wrong("no PEM certificate found".to_owned()));
                }
                tls.ca_certificate(Certificate::from_pem(pem))
            }
        };
        Ok(match &self.server_name {
            Some(name) => tls.domain_name(name),
            None => tls,
        })
    }
}

/// Settings of [`Remote`].
#[derive(Clone, Debug)]
pub struct RemoteConfig {
    /// Address of the server: `http://127.0.0.1:8081`, or `https://…` for TLS.
    pub address: String,
    /// TLS settings for an `https` address.
    pub tls: RemoteTls,
    /// The domain whose rules apply.
    pub domain: String,
    /// Maximum time that a request waits for its decision.
    pub deadline: Duration,
    /// Number of connections, shared by all requests.
    pub connections: usize,
    /// What happens without a decision.
    pub fail_policy: FailPolicy,
    /// Settings for responses that are generated here.
    pub responses: ResponseConfig,
}

impl RemoteConfig {
    /// Creates settings with one connection, a deadline of 50 ms, and [`FailPolicy::Open`].
    #[must_use]
    pub fn new(address: impl Into<String>, domain: impl Into<String>) -> Self {
        Self {
            address: address.into(),
            tls: RemoteTls::default(),
            domain: domain.into(),
            deadline: Duration::from_millis(50),
            connections: 1,
            fail_policy: FailPolicy::Open,
            responses: ResponseConfig::default(),
        }
    }
}

/// Invalid settings of [`Remote`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// An invalid address.
    #[error(
        "invalid server address `{0}`; write one such as http://127.0.0.1:8081 or https://tollgate.internal:8443"
    )]
    Address(String),
    /// Trusted authorities that cannot be loaded.
    #[error("{}: {wrong}", path.display())]
    Authorities {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        wrong: String,
    },
    /// TLS cannot be configured.
    #[error("cannot configure TLS: {0}")]
    Tls(String),
}

/// Decides with a Tollgate server.
///
/// ```no_run
/// use tollgate_sdk::{CheckRequest, FailPolicy, Remote, RemoteConfig, TollgateLayer};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let settings = RemoteConfig { fail_policy: FailPolicy::Closed, ..RemoteConfig::new("http://127.0.0.1:8081", "api") };
/// let layer = TollgateLayer::new(Remote::new(settings)?, |request| {
///     Some(CheckRequest::attributes([("endpoint", format!("{} {}", request.method, request.uri.path()))]))
/// });
/// # let _ = layer;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Remote {
    channels: Vec<Channel>,
    next: AtomicUsize,
    /// The last request got no decision; changes are logged once, not for every request.
    is_unavailable: AtomicBool,
    config: RemoteConfig,
    clock: SystemClock,
}

impl Remote {
    /// Creates a client that connects at the first request and reconnects when a connection is lost. Must be called on
    /// a tokio runtime.
    ///
    /// # Errors
    /// The address is invalid, or TLS cannot be configured.
    pub fn new(settings: RemoteConfig) -> Result<Self, RemoteError> {
        let wrong = || RemoteError::Address(settings.address.clone());
        let uri: Uri = settings.address.parse().map_err(|_| wrong())?;
        let uses_tls = match (uri.scheme_str(), uri.authority()) {
            (Some("http"), Some(_)) => false,
            (Some("https"), Some(_)) => true,
            _ => return Err(wrong()),
        };
        let mut endpoint = Endpoint::from(uri);
        if uses_tls {
            let configured = endpoint.tls_config(settings.tls.config()?);
            endpoint = configured.map_err(|error| {
                let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
                RemoteError::Tls(format!("{error}{}", cause.unwrap_or_default()))
            })?;
        }
        let endpoint = endpoint
            .tcp_nodelay(true)
            .connect_timeout(settings.deadline.max(Duration::from_millis(100)))
            .http2_keep_alive_interval(Duration::from_secs(30))
            .keep_alive_while_idle(true);
        let channels = (0..settings.connections.max(1)).map(|_| endpoint.connect_lazy()).collect();
        Ok(Self {
            channels,
            next: AtomicUsize::new(0),
            is_unavailable: AtomicBool::new(false),
            config: settings,
            clock: SystemClock::new(),
        })
    }

    async fn send(&self, check: CheckRequest) -> Result<RateLimitResponse, Status> {
        const PATH: PathAndQuery =
            PathAndQuery::from_static("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
        let hits = (check.cost != 1).then_some(check.cost);
        let descriptor = |pairs: Vec<Pair>| RateLimitDescriptor {
            entries: pairs.into_iter().map(|(key, value)| Entry { key: key.into_owned(), value }).collect(),
            hits_addend: hits,
        };
        let (form, descriptors) = match check.form {
            CheckForm::Attributes(pairs) => ("attributes", vec![descriptor(pairs)]),
            CheckForm::Descriptors(all) => ("descriptors", all.into_iter().map(descriptor).collect()),
        };
        let message = RateLimitRequest { domain: self.config.domain.clone(), descriptors, hits_addend: 0 };
        let mut request = tonic::Request::new(message);
        request.metadata_mut().insert("tollgate-ask", MetadataValue::from_static(form));
        if let Some(parent) = check.traceparent.filter(|parent| parent.len() == TRACEPARENT)
            && let Ok(parent) = parent.as_bytes().try_into()
        {
            request.metadata_mut().insert("traceparent", parent);
        }
        request.set_timeout(self.config.deadline);
        let at = self.next.fetch_add(1, Ordering::Relaxed) % self.channels.len();
        let mut client = Grpc::new(self.channels[at].clone());
        let call = async {
            client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            client.unary(request, PATH, ProstCodec::<RateLimitRequest, RateLimitResponse>::default()).await
        };
        match tokio::time::timeout(self.config.deadline, call).await {
            Ok(response) => response.map(tonic::Response::into_inner),
            Err(_) => Err(Status::deadline_exceeded("no decision before the deadline")),
        }
    }

    fn undecided(&self, status: &Status) -> LayerDecision {
        if !self.is_unavailable.swap(true, Ordering::Relaxed) {
            tracing::warn!(code = ?status.code(), message = status.message(), "Tollgate server unavailable");
        }
        match self.config.fail_policy {
            FailPolicy::Open => LayerDecision::pass(),
            FailPolicy::Closed => {
                let facts = DecisionSummary {
                    disposition: Disposition::Unavailable,
                    retry_after: Some(1),
                    ..DecisionSummary::from_policies([])
                };
                LayerDecision::from_response(self.config.responses.respond(&facts, self.clock.now()))
            }
        }
    }

    fn decided(&self, reply: RateLimitResponse) -> LayerDecision {
        let is_allowed = reply.overall_code != OVER_LIMIT;
        let field = |name: &str| {
            let all = &reply.response_headers_to_add;
            all.iter().find(|field| field.key == name).map(|field| field.value.as_str())
        };
        let Some(status) = field("tollgate-status").and_then(|code| code.parse::<StatusCode>().ok()) else {
            let facts = summary(&reply.statuses, is_allowed);
            return LayerDecision {
                is_allowed,
                ..LayerDecision::from_response(self.config.responses.respond(&facts, self.clock.now()))
            };
        };
        let delay = field("tollgate-delay-ms").and_then(|delay| delay.parse().ok()).unwrap_or(0);
        let mut response = Response::new(reply.raw_body);
        *response.status_mut() = status;
        for field in reply.response_headers_to_add {
            let parts = (HeaderName::try_from(&field.key), HeaderValue::try_from(field.value));
            if let (Ok(key), Ok(value)) = parts
                && !field.key.starts_with("tollgate-")
            {
                response.headers_mut().append(key, value);
            }
        }
        LayerDecision {
            is_allowed,
            delay: Duration::from_millis(delay),
            ..LayerDecision::from_response(response)
        }
    }
}

impl Decider for Remote {
    async fn decide(&self, request: CheckRequest) -> LayerDecision {
        match self.send(request).await {
            Ok(reply) => {
                // Loaded before the swap, because all requests share the cache line.
                if self.is_unavailable.load(Ordering::Relaxed)
                    && self.is_unavailable.swap(false, Ordering::Relaxed)
                {
                    tracing::info!("Tollgate server available again");
                }
                self.decided(reply)
            }
            Err(status) => self.undecided(&status),
        }
    }
}

/// Summarizes the response of another server of the protocol.
fn summary(statuses: &[DescriptorStatus], is_allowed: bool) -> DecisionSummary<'_> {
    let policies = statuses.iter().filter_map(|status| {
        let limit = status.current_limit.as_ref()?;
        let window = match limit.unit {
            2 => Window::Rolling(TimeDelta::from_secs(60)),
            3 => Window::Rolling(TimeDelta::from_secs(3_600)),
            4 => Window::Rolling(TimeDelta::from_secs(86_400)),
            5 => Window::Calendar(CalendarUnit::Month),
            6 => Window::Rolling(TimeDelta::from_secs(365 * 86_400)),
            7 => Window::Rolling(TimeDelta::from_secs(7 * 86_400)),
            _ => Window::Rolling(TimeDelta::from_secs(1)),
        };
        let reset = status
            .duration_until_reset
            .as_ref()
            .map_or(0, |reset| u64::try_from(reset.seconds).unwrap_or(0) + u64::from(reset.nanos > 0));
        let name = if limit.name.is_empty() { "default" } else { &limit.name };
        let policy = Policy::new(name, u64::from(limit.requests_per_unit), window)
            .with_remaining(u64::from(status.limit_remaining))
            .with_reset(reset);
        Some(if status.code == OVER_LIMIT { policy.denied() } else { policy })
    });
    let mut facts = DecisionSummary::from_policies(policies);
    if !is_allowed {
        facts.disposition = Disposition::Denied;
        facts.retry_after = Some(facts.nearest().map_or(1, |policy| policy.reset.max(1)));
        facts.denied_by = facts.nearest().map(|policy| policy.rule);
    }
    facts
}
