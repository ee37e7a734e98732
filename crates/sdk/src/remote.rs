//! Client of a Tollgate server over gRPC. It uses Envoy's rate limit service, and gRPC metadata that makes a Tollgate
//! server return the complete HTTP response. For descriptors any other server of the protocol works too; the response
//! is then generated here.
//!
//! A request never waits longer than the deadline; without a decision by then, the fail policy applies. With several
//! servers, one that faults is followed by the next (`servers`), and a slow one may be hedged (`hedge`).

mod reservation;

pub use reservation::{RemoteReservation, RemoteReservationError};

use crate::check_request::{CheckForm, CheckRequest, Pair, TRACEPARENT};
use crate::decider::{Decider, LayerDecision};
use crate::fail_policy::{FailPolicy, RemoteError};
use crate::hedge::{Exchange, HEDGE_TTL, Hedged, hedge};
use crate::rls::{
    DescriptorStatus, Entry, OVER_LIMIT, RateLimitDescriptor, RateLimitRequest, RateLimitResponse,
};
use crate::servers::{ServerOrder, attempt_time};
use http::uri::PathAndQuery;
use http::{HeaderName, HeaderValue, Response, StatusCode, Uri};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::{CalendarUnit, Clock, SystemClock, TimeDelta};
use tollgate_engine::{DecisionId, Window};
use tollgate_http::response::{DecisionSummary, Disposition, Policy, ResponseConfig};
use tonic::client::Grpc;
use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic::{Code, Status};
use tonic_prost::ProstCodec;

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
    /// Further servers, asked in this order while those before them fault. They should share their counters: with
    /// counters in memory each has its own.
    pub other_addresses: Vec<String>,
    /// Time after which the next server is asked as well, and the first answer counts; the slower one's charge is given
    /// back. `None` asks one server at a time. 3 ms suits servers on the same network.
    pub hedge_after: Option<Duration>,
    /// TLS settings for an `https` address.
    pub tls: RemoteTls,
    /// The domain whose rules apply.
    pub domain: String,
    /// Maximum time that a request waits for its decision.
    pub deadline: Duration,
    /// Number of connections to each server, shared by all requests.
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
            other_addresses: Vec::new(),
            hedge_after: None,
            tls: RemoteTls::default(),
            domain: domain.into(),
            deadline: Duration::from_millis(50),
            connections: 1,
            fail_policy: FailPolicy::Open,
            responses: ResponseConfig::default(),
        }
    }
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
    servers: Arc<Servers>,
    /// The last request got no decision; changes are logged once, not for every request.
    is_unavailable: AtomicBool,
    config: RemoteConfig,
    clock: SystemClock,
}

/// The connections, and which server to ask.
#[derive(Debug)]
struct Servers {
    /// Connections of each server.
    channels: Vec<Vec<Channel>>,
    next: AtomicUsize,
    order: ServerOrder,
    /// The time that `order` counts from.
    began: Instant,
}

/// A message with what is sent beside it.
#[derive(Clone, Debug, Default)]
struct Call {
    message: RateLimitRequest,
    form: &'static str,
    traceparent: Option<MetadataValue<tonic::metadata::Ascii>>,
    /// How long to reserve, in milliseconds; `None` for a check.
    reserve: Option<u64>,
    /// Identifies one reservation to all servers that are asked for it.
    idempotency_key: Option<MetadataValue<tonic::metadata::Ascii>>,
}

impl Call {
    fn new(domain: &str, check: CheckRequest, reserve: Option<Duration>) -> Self {
        let hits = (check.cost != 1).then_some(check.cost);
        let descriptor = |pairs: Vec<Pair>| RateLimitDescriptor {
            entries: pairs.into_iter().map(|(key, value)| Entry { key: key.into_owned(), value }).collect(),
            hits_addend: hits,
        };
        let (form, descriptors) = match check.form {
            CheckForm::Attributes(pairs) => ("attributes", vec![descriptor(pairs)]),
            CheckForm::Descriptors(all) => ("descriptors", all.into_iter().map(descriptor).collect()),
        };
        let parent = check.traceparent.filter(|parent| parent.len() == TRACEPARENT);
        Self {
            message: RateLimitRequest { domain: domain.to_owned(), descriptors, hits_addend: 0 },
            form,
            traceparent: parent.and_then(|parent| parent.as_bytes().try_into().ok()),
            reserve: reserve.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).max(1)),
            idempotency_key: None,
        }
    }

    fn request(self) -> tonic::Request<RateLimitRequest> {
        let mut request = tonic::Request::new(self.message);
        let metadata = request.metadata_mut();
        metadata.insert("tollgate-ask", MetadataValue::from_static(self.form));
        if let Some(parent) = self.traceparent {
            metadata.insert("traceparent", parent);
        }
        if let Some(millis) = self.reserve {
            metadata.insert("tollgate-reserve", millis.into());
        }
        if let Some(key) = self.idempotency_key {
            metadata.insert("tollgate-idempotency-key", key);
        }
        request
    }
}

impl Servers {
    fn channel(&self, server: usize) -> Channel {
        let channels = &self.channels[server];
        channels[self.next.fetch_add(1, Ordering::Relaxed) % channels.len()].clone()
    }

    /// Asks one server, and remembers whether it answered.
    async fn ask(&self, server: usize, call: Call, within: Duration) -> Result<RateLimitResponse, Status> {
        let result = send(self.channel(server), call.request(), within).await;
        match &result {
            Err(status) if is_fault(status) => self.order.faulted(server, self.began.elapsed()),
            _ => self.order.answered(server),
        }
        result
    }

    /// Asks one server after the other until one answers.
    async fn ask_in_turn(
        &self,
        mut call: Call,
        deadline: Duration,
    ) -> Result<(usize, RateLimitResponse), Status> {
        let began = Instant::now();
        let order = self.order.order(self.began.elapsed());
        let mut last = Status::deadline_exceeded("no decision before the deadline");
        for (asked, server) in order.iter().enumerate() {
            let left = order.len() - asked;
            let Some(within) = attempt_time(deadline, began.elapsed(), left) else { break };
            let own = if left > 1 { call.clone() } else { std::mem::take(&mut call) };
            match self.ask(*server, own, within).await {
                Err(status) if is_fault(&status) => last = status,
                result => return result.map(|reply| (*server, reply)),
            }
        }
        Err(last)
    }
}

/// Sends a request and waits for its response until the deadline.
async fn send(
    channel: Channel,
    mut request: tonic::Request<RateLimitRequest>,
    within: Duration,
) -> Result<RateLimitResponse, Status> {
    const PATH: PathAndQuery =
        PathAndQuery::from_static("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
    request.set_timeout(within);
    let mut client = Grpc::new(channel);
    let call = async {
        client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        client.unary(request, PATH, ProstCodec::<RateLimitRequest, RateLimitResponse>::default()).await
    };
    match tokio::time::timeout(within, call).await {
        Ok(response) => response.map(tonic::Response::into_inner),
        Err(_) => Err(Status::deadline_exceeded("no decision before the deadline")),
    }
}

/// Returns whether another server may answer: a request that is wrong, or that no server has room for, is so everywhere.
fn is_fault(status: &Status) -> bool {
    !matches!(
        status.code(),
        Code::InvalidArgument | Code::NotFound | Code::FailedPrecondition | Code::ResourceExhausted
    )
}

/// A hedged request: a reservation at each server that is asked.
#[derive(Clone)]
struct HedgedCall {
    servers: Arc<Servers>,
    call: Call,
}

impl Exchange for HedgedCall {
    type Answer = Result<RateLimitResponse, Status>;
    type Fault = Status;

    async fn ask(&self, server: usize) -> Result<Self::Answer, Status> {
        match self.servers.ask(server, self.call.clone(), HEDGE_TTL).await {
            Err(status) if is_fault(&status) => Err(status),
            answer => Ok(answer),
        }
    }

    async fn discard(&self, server: usize, answer: Self::Answer) {
        let Ok(reply) = answer else { return };
        if let Some(id) = field(&reply, "tollgate-reservation") {
            let request = reservation::cancel(id);
            if let Err(status) = send(self.servers.channel(server), request, HEDGE_TTL).await {
                tracing::debug!(code = ?status.code(), "the charge of a hedged request was not given back");
            }
        }
    }
}

/// Returns a field of the reply.
fn field<'r>(reply: &'r RateLimitResponse, name: &str) -> Option<&'r str> {
    let mut all = reply.response_headers_to_add.iter();
    all.find(|field| field.key == name).map(|field| field.value.as_str())
}

impl Remote {
    /// Creates a client that connects at the first request and reconnects when a connection is lost. Must be called on
    /// a tokio runtime.
    ///
    /// # Errors
    /// An address is invalid, or TLS cannot be configured.
    pub fn new(settings: RemoteConfig) -> Result<Self, RemoteError> {
        let mut channels = Vec::with_capacity(1 + settings.other_addresses.len());
        for address in std::iter::once(&settings.address).chain(&settings.other_addresses) {
            let endpoint = endpoint(address, &settings)?;
            channels.push((0..settings.connections.max(1)).map(|_| endpoint.connect_lazy()).collect());
        }
        let servers = Servers {
            order: ServerOrder::new(channels.len()),
            channels,
            next: AtomicUsize::new(0),
            began: Instant::now(),
        };
        Ok(Self {
            servers: Arc::new(servers),
            is_unavailable: AtomicBool::new(false),
            config: settings,
            clock: SystemClock::new(),
        })
    }

    /// Asks for a decision, or a reservation; returns the server that answered.
    async fn ask(
        &self,
        check: CheckRequest,
        reserve: Option<Duration>,
    ) -> Result<(usize, RateLimitResponse), Status> {
        let (servers, deadline) = (&self.servers, self.config.deadline);
        let hedge_after = self.config.hedge_after.filter(|_| servers.channels.len() > 1 && check.cost > 0);
        let began = Instant::now();
        let mut call = Call::new(&self.config.domain, check, reserve.or(hedge_after.map(|_| HEDGE_TTL)));
        // A server that did not answer in time may have reserved; the next one, on the same store, must not do so again.
        // Hedged requests are reservations of their own, of which all but one are canceled.
        if hedge_after.is_none() && reserve.is_some() && servers.channels.len() > 1 {
            call.idempotency_key = DecisionId::generate().to_string().try_into().ok();
        }
        let asked = match hedge_after {
            None => servers.ask_in_turn(call, deadline).await,
            Some(after) => match self.ask_hedged(call.clone(), after).await {
                // The server remembers no more reservations of this caller: a check needs none.
                Err(status) if status.code() == Code::ResourceExhausted && reserve.is_none() => {
                    let call = Call { reserve: None, ..call };
                    servers.ask_in_turn(call, deadline.saturating_sub(began.elapsed())).await
                }
                asked => asked,
            },
        };
        match &asked {
            // Loaded before the swap, because all requests share the cache line.
            Ok(_) => {
                if self.is_unavailable.load(Ordering::Relaxed)
                    && self.is_unavailable.swap(false, Ordering::Relaxed)
                {
                    tracing::info!("Tollgate server available again");
                }
            }
            Err(status) => {
                if !self.is_unavailable.swap(true, Ordering::Relaxed) {
                    tracing::warn!(code = ?status.code(), message = status.message(), "Tollgate server unavailable");
                }
            }
        }
        asked
    }

    async fn ask_hedged(&self, call: Call, after: Duration) -> Result<(usize, RateLimitResponse), Status> {
        let order = self.servers.order.order(self.servers.began.elapsed());
        let call = HedgedCall { servers: Arc::clone(&self.servers), call };
        match hedge(call, order, after, self.config.deadline).await {
            Hedged::Answered(server, answer) => answer.map(|reply| (server, reply)),
            Hedged::Faulted(status) => Err(status),
            Hedged::TimedOut => Err(Status::deadline_exceeded("no decision before the deadline")),
        }
    }

    fn undecided(&self) -> LayerDecision {
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
        let Some(status) = field(&reply, "tollgate-status").and_then(|code| code.parse::<StatusCode>().ok())
        else {
            let facts = summary(&reply.statuses, is_allowed);
            return LayerDecision {
                is_allowed,
                ..LayerDecision::from_response(self.config.responses.respond(&facts, self.clock.now()))
            };
        };
        let delay = field(&reply, "tollgate-delay-ms").and_then(|delay| delay.parse().ok()).unwrap_or(0);
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
        match self.ask(request, None).await {
            Ok((_, reply)) => self.decided(reply),
            Err(_) => self.undecided(),
        }
    }
}

/// Describes the connections to one server.
fn endpoint(address: &str, settings: &RemoteConfig) -> Result<Endpoint, RemoteError> {
    let wrong = || RemoteError::Address(address.to_owned());
    let uri: Uri = address.parse().map_err(|_| wrong())?;
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
    Ok(endpoint
        .tcp_nodelay(true)
        .connect_timeout(settings.deadline.max(Duration::from_millis(100)))
        .http2_keep_alive_interval(Duration::from_secs(30))
        .keep_alive_while_idle(true))
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
