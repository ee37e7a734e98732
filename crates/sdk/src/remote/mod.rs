//! Client of a Tollgate server over gRPC. It uses Envoy's rate limit service, and gRPC metadata that makes a Tollgate
//! server return the complete HTTP response. For descriptors any other server of the protocol works too; the response
//! is then generated here.
//!
//! A request never waits longer than the deadline; without a decision by then, the fail policy applies. With several
//! servers, one that faults is followed by the next (`servers`), and a slow one may be hedged (`hedge`). A denial that is
//! still in force is repeated without a server (`checks`).

mod reply;
mod reservation;

pub use reservation::{RemoteReservation, RemoteReservationError};

use self::reply::Replied;
use crate::check_request::{CheckForm, CheckRequest, Pair, TRACEPARENT};
use crate::checks::{self, CheckResult, Checked, Checks, Fault, Subject, layer_decision};
use crate::decider::{Decider, LayerDecision};
use crate::fail_policy::{FailPolicy, RemoteError};
use crate::hedge::{Exchange, HEDGE_TTL, Hedging, Verdict, hedge};
use crate::hedge_after::{Ended, HedgeAfter};
use crate::rls::{Entry, RateLimitDescriptor, RateLimitRequest, RateLimitResponse};
use crate::servers::{ServerOrder, attempt_time, total_time};
use http::uri::PathAndQuery;
use http::{HeaderMap, Uri};
use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::{Clock, SystemClock};
use tollgate_engine::DecisionId;
use tollgate_http::response::ResponseConfig;
use tonic::Status;
use tonic::client::Grpc;
use tonic::metadata::MetadataValue;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
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
    /// Time after which the next server is asked as well, for at most a tenth of the calls; the first answer counts, a denial
    /// only if no other allows. The slower one's charge is given back. `None` asks one server at a time. 3 ms suits servers on the same network,
    /// [`HedgeAfter::P95`] all others. Never later than the first server's share of the deadline.
    pub hedge_after: Option<HedgeAfter>,
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
    /// Number of denials that this process repeats by itself until they end: 10,000; 0 for none.
    pub deny_cache: usize,
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
            deny_cache: checks::DEFAULT_ENTRIES,
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
    checks: Arc<Checks>,
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
    hedging: Hedging,
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
        metadata.insert("tollgate-decision", MetadataValue::from_static("json"));
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

    /// Asks one server, and remembers whether it could be used.
    async fn ask(&self, server: usize, call: Call, within: Duration) -> Result<Replied, Fault> {
        let replied = reply::read(send(self.channel(server), call.request(), within).await);
        match &replied {
            Ok(_) => self.order.answered(server),
            Err(_) => self.order.faulted(server, self.began.elapsed()),
        }
        replied
    }

    /// Asks one server after the other until one answers.
    async fn ask_in_turn(&self, mut call: Call, deadline: Duration) -> Result<(usize, Replied), Fault> {
        let began = Instant::now();
        let order = self.order.order(self.began.elapsed());
        let mut last = Fault::Timeout;
        for (asked, server) in order.iter().enumerate() {
            let left = order.len() - asked;
            let Some(within) = attempt_time(deadline, began.elapsed(), left) else { break };
            let own = if left > 1 { call.clone() } else { std::mem::take(&mut call) };
            match self.ask(*server, own, within).await {
                Ok(replied) => return Ok((*server, replied)),
                Err(fault) => last = fault,
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

/// A hedged request: a reservation at each server that is asked.
#[derive(Clone)]
struct HedgedCall {
    servers: Arc<Servers>,
    call: Call,
}

impl Exchange for HedgedCall {
    type Answer = Replied;
    type Fault = Fault;

    fn ask(&self, server: usize) -> impl Future<Output = Result<Replied, Fault>> + Send {
        self.servers.ask(server, self.call.clone(), HEDGE_TTL)
    }

    fn verdict(replied: &Replied) -> Verdict {
        Verdict::from_result(&replied.answer.result)
    }

    fn measured(&self, latency: Duration, ended: Ended) {
        self.servers.hedging.measured(latency, ended);
    }

    fn time_out(&self, server: usize) {
        self.servers.order.faulted(server, self.servers.began.elapsed());
    }

    async fn discard(&self, server: usize, replied: Replied) {
        let Some(id) = replied.answer.reservation else { return };
        let request = reservation::cancel(&id);
        if let Err(status) = send(self.servers.channel(server), request, HEDGE_TTL).await {
            tracing::debug!(code = ?status.code(), "the charge of a hedged request was not given back");
        }
    }
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
            hedging: Hedging::new(settings.hedge_after),
            began: Instant::now(),
        };
        Ok(Self {
            servers: Arc::new(servers),
            checks: Arc::new(Checks::new(settings.fail_policy, settings.deny_cache)),
            config: settings,
            clock: SystemClock::new(),
        })
    }

    /// Charges the cost of a request if every matching limit allows it; a cost of 0 is a peek.
    ///
    /// ```no_run
    /// use tollgate_sdk::{CheckRequest, Remote, RemoteConfig};
    /// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
    /// let limits = Remote::new(RemoteConfig::new("http://127.0.0.1:8081", "shop"))?;
    /// let result = limits.check(&CheckRequest::attributes([("api_key", "abc")])).await;
    /// if !result.is_allowed {
    ///     println!("{}; retry after {:?}", result.reason.as_str(), result.retry_after);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn check(&self, request: &CheckRequest) -> CheckResult {
        self.ask(request.clone(), None, None).await.answer.result
    }

    /// Checks a request of a caller that has only this much time left.
    pub async fn check_within(&self, request: &CheckRequest, time_left: Duration) -> CheckResult {
        self.ask(request.clone(), None, Some(time_left)).await.answer.result
    }

    /// Forgets the denials that are still in force, for example after a limit was raised.
    pub fn clear_deny_cache(&self) {
        self.checks.clear();
    }

    /// Asks for a decision, or a reservation.
    async fn ask(
        &self,
        check: CheckRequest,
        reserve: Option<Duration>,
        time_left: Option<Duration>,
    ) -> Checked<Result<RateLimitResponse, Status>> {
        let key = self.checks.key(&Subject::from_request(&check), reserve.is_some());
        let cost = check.cost;
        let ask = async {
            let (server, replied) = self.ask_servers(check, reserve, time_left).await?;
            Ok((server, replied.answer, replied.reply))
        };
        self.checks.decide(key, cost, ask).await
    }

    async fn ask_servers(
        &self,
        check: CheckRequest,
        reserve: Option<Duration>,
        time_left: Option<Duration>,
    ) -> Result<(usize, Replied), Fault> {
        let (servers, deadline) = (&self.servers, total_time(self.config.deadline, time_left));
        let hedge_after = servers.hedging.after().filter(|_| servers.channels.len() > 1 && check.cost > 0);
        let began = Instant::now();
        let mut call = Call::new(&self.config.domain, check, reserve.or(hedge_after.map(|_| HEDGE_TTL)));
        // A server that did not answer in time may have reserved; the next one, on the same store, must not do so again.
        // Hedged requests are reservations of their own, of which all but one are canceled.
        if hedge_after.is_none() && reserve.is_some() && servers.channels.len() > 1 {
            call.idempotency_key = DecisionId::generate().to_string().try_into().ok();
        }
        let Some(after) = hedge_after else { return servers.ask_in_turn(call, deadline).await };
        let asked = self.ask_hedged(call.clone(), after, deadline).await;
        match &asked {
            // The server remembers no more reservations of this caller: a check needs none.
            Ok((_, replied)) if replied.is_exhausted() && reserve.is_none() => {
                let call = Call { reserve: None, ..call };
                servers.ask_in_turn(call, deadline.saturating_sub(began.elapsed())).await
            }
            _ => asked,
        }
    }

    async fn ask_hedged(
        &self,
        call: Call,
        after: Duration,
        deadline: Duration,
    ) -> Result<(usize, Replied), Fault> {
        let order = self.servers.order.order(self.servers.began.elapsed());
        let call = HedgedCall { servers: Arc::clone(&self.servers), call };
        let hedged = hedge(call, order, after, deadline, &self.servers.hedging.budget).await;
        hedged.into_result(|replied| replied.answer.is_cacheable = false)
    }
}

impl Decider for Remote {
    async fn decide(&self, request: CheckRequest) -> LayerDecision {
        let Checked { answer, from } = self.ask(request, None, None).await;
        let (responses, now) = (&self.config.responses, self.clock.now());
        match from {
            Some((_, Ok(reply))) => reply::layer_decision(reply, responses, now),
            _ => layer_decision(&answer.result, &HeaderMap::new(), responses, now),
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

#[cfg(test)]
mod tests;
