//! Client of a Tollgate server over HTTP, by the rules that Tollgate's clients in every language share
//! (`clients/conformance/README.md`).
//!
//! A request never waits longer than the deadline. A server that faults is followed by the next one, a slow one may be
//! hedged, and a denial that is still in force is repeated without a server. Without a decision the fail policy decides, and
//! the result has the reason.
//!
//! | file | contents |
//! |---|---|
//! | `body`, `head` | bodies of checks; [`RequestHead`] |
//! | `transport`, `client` | connections; which server is asked |
//! | `reservation` | [`HttpReservation`] |
//!
//! What is not about HTTP is in `crate::checks`, which the client over gRPC uses too.

mod body;
mod client;
mod head;
mod reservation;
mod transport;

pub use head::RequestHead;
pub use reservation::HttpReservation;

use self::body::CheckBody;
use self::client::{Answered, Call, Client};
use self::transport::Transport;
use crate::check_request::{CheckRequest, TRACEPARENT};
use crate::checks::{self, CheckResult, Checked, Checks, Fault, Subject, layer_decision};
use crate::decider::{Decider, LayerDecision};
use crate::fail_policy::{FailPolicy, RemoteError};
use crate::hedge::{HEDGE_TTL, Hedging, hedge};
use crate::hedge_after::{self, HedgeAfter};
use crate::http1::{Origin, OriginError};
use crate::servers::{ServerOrder, total_time};
use http::{HeaderMap, HeaderValue};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tollgate_core::{Clock, SystemClock};
use tollgate_engine::DecisionId;
use tollgate_http::response::ResponseConfig;

/// Idle connections that are kept to each server.
const MAX_IDLE: usize = 64;

/// Settings of [`HttpRemote`].
#[derive(Clone)]
pub struct HttpRemoteConfig {
    /// Address of the server: `http://127.0.0.1:8080`, or `https://…` for TLS.
    pub address: String,
    /// Further servers, asked in this order while those before them fault. They should share their counters: with
    /// counters in memory each has its own.
    pub other_addresses: Vec<String>,
    /// The domain whose rules apply.
    pub domain: String,
    /// Maximum time of a check, all servers together: 50 ms.
    pub deadline: Duration,
    /// What happens without a decision: requests are allowed.
    pub fail_policy: FailPolicy,
    /// Time after which the next server is asked as well, for at most a tenth of the calls; the first answer counts, a denial
    /// only if no other allows. The slower one's charge is given back. `None` asks one server at a time. [`HttpRemoteConfig::HEDGE_AFTER`] suits servers on the same network,
    /// [`HedgeAfter::P95`] all others. Never later than the first server's share of the deadline.
    pub hedge_after: Option<HedgeAfter>,
    /// Number of denials that this process repeats by itself until they end: 10,000; 0 for none.
    pub deny_cache: usize,
    /// A bearer token for the servers, or for a proxy before them.
    pub token: Option<String>,
    /// CA bundle for `https://`, in PEM; the system's authorities if absent.
    pub ca: Option<PathBuf>,
    /// Settings for the responses of a layer.
    pub responses: ResponseConfig,
}

impl HttpRemoteConfig {
    /// A time for [`HttpRemoteConfig::hedge_after`] that suits servers on the same network.
    pub const HEDGE_AFTER: HedgeAfter = HedgeAfter::Fixed(hedge_after::DEFAULT);

    /// Returns the usual settings for a server.
    #[must_use]
    pub fn new(address: impl Into<String>, domain: impl Into<String>) -> Self {
        Self {
            address: address.into(),
            other_addresses: Vec::new(),
            domain: domain.into(),
            deadline: Duration::from_millis(50),
            fail_policy: FailPolicy::Open,
            hedge_after: None,
            deny_cache: checks::DEFAULT_ENTRIES,
            token: None,
            ca: None,
            responses: ResponseConfig::default(),
        }
    }
}

/// The token is left out.
impl fmt::Debug for HttpRemoteConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpRemoteConfig")
            .field("address", &self.address)
            .field("other_addresses", &self.other_addresses)
            .field("domain", &self.domain)
            .field("deadline", &self.deadline)
            .field("fail_policy", &self.fail_policy)
            .finish_non_exhaustive()
    }
}

/// Decides with a Tollgate server, over HTTP.
///
/// ```no_run
/// use tollgate_sdk::{CheckRequest, HttpRemote, HttpRemoteConfig};
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let limits = HttpRemote::new(HttpRemoteConfig::new("http://127.0.0.1:8080", "shop"))?;
/// let result = limits.check(&CheckRequest::attributes([("api_key", "abc")])).await;
/// if !result.is_allowed {
///     println!("{}; retry after {:?}", result.reason.as_str(), result.retry_after);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct HttpRemote {
    client: Arc<Client>,
    checks: Arc<Checks>,
    config: HttpRemoteConfig,
    clock: SystemClock,
}

/// What is asked for.
#[derive(Default)]
struct Wanted {
    cost: u64,
    /// How long to reserve; `None` for a check.
    reserve: Option<Duration>,
    traceparent: Option<HeaderValue>,
    /// Time that the caller has.
    time_left: Option<Duration>,
}

impl HttpRemote {
    /// Creates a client that connects at the first request. Its requests need a tokio runtime.
    ///
    /// # Errors
    /// An address, the token or the authorities cannot be used.
    pub fn new(config: HttpRemoteConfig) -> Result<Self, RemoteError> {
        let origin = |address: &String| {
            Origin::parse(address, config.ca.as_deref()).map_err(|error| match error {
                OriginError::Address => RemoteError::Address(address.clone()),
                OriginError::Authorities(text) => RemoteError::Tls(text),
            })
        };
        let addresses = std::iter::once(&config.address).chain(&config.other_addresses);
        let origins = addresses.map(origin).collect::<Result<Vec<_>, _>>()?;
        if let Some(exposed) = origins.iter().find(|server| config.token.is_some() && server.is_exposed()) {
            tracing::warn!(server = exposed.authority(), "sending the token unencrypted; use https://");
        }
        let token = config.token.as_deref().map(|token| {
            let mut header =
                HeaderValue::from_str(&format!("Bearer {}", token.trim())).map_err(|_| RemoteError::Token)?;
            header.set_sensitive(true);
            Ok(header)
        });
        let client = Client {
            order: ServerOrder::new(origins.len()),
            hedging: Hedging::new(config.hedge_after),
            transport: Transport::new(origins, token.transpose()?, MAX_IDLE),
            began: Instant::now(),
        };
        Ok(Self {
            client: Arc::new(client),
            checks: Arc::new(Checks::new(config.fail_policy, config.deny_cache)),
            config,
            clock: SystemClock::new(),
        })
    }

    /// Charges the cost of a request if every matching limit allows it; a cost of 0 is a peek.
    pub async fn check(&self, request: &CheckRequest) -> CheckResult {
        self.ask(&Subject::from_request(request), wanted(request)).await.answer.result
    }

    /// Checks a request of a caller that has only this much time left.
    pub async fn check_within(&self, request: &CheckRequest, time_left: Duration) -> CheckResult {
        let wanted = Wanted { time_left: Some(time_left), ..wanted(request) };
        self.ask(&Subject::from_request(request), wanted).await.answer.result
    }

    /// Checks a received request: the server identifies its caller, by the rules of the gateway. `attributes` are checked
    /// beside what identifies the caller.
    pub async fn check_head(
        &self,
        head: &RequestHead,
        attributes: impl IntoIterator<Item = (String, String)>,
        cost: u64,
    ) -> CheckResult {
        let wanted = Wanted { cost, ..Wanted::default() };
        self.ask(&Subject::head(head, attributes), wanted).await.answer.result
    }

    /// Forgets the denials that are still in force, for example after a limit was raised.
    pub fn clear_deny_cache(&self) {
        self.checks.clear();
    }

    async fn ask(&self, subject: &Subject, wanted: Wanted) -> Checked<HeaderMap> {
        let key = self.checks.key(subject, wanted.reserve.is_some());
        let ask = async {
            let (server, answered) = self.ask_servers(subject, &wanted).await?;
            Ok((server, answered.answer, answered.headers))
        };
        self.checks.decide(key, wanted.cost, ask).await
    }

    async fn ask_servers(&self, subject: &Subject, wanted: &Wanted) -> Result<(usize, Answered), Fault> {
        let deadline = total_time(self.config.deadline, wanted.time_left);
        let has_others = self.client.transport.servers() > 1;
        let hedge_after = self.client.hedging.after().filter(|_| has_others && wanted.cost > 0);
        let reserve = wanted.reserve.or(hedge_after.map(|_| HEDGE_TTL));
        // A server that did not answer in time may have reserved; the next one, on the same store, must not do so again.
        // Hedged requests are reservations of their own, of which all but one are canceled.
        let once = (hedge_after.is_none() && wanted.reserve.is_some() && has_others)
            .then(|| DecisionId::generate().to_string());
        let body = CheckBody {
            cost: wanted.cost,
            deadline_ms: reserve.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX).max(1)),
            idempotency_key: once.as_deref(),
            ..CheckBody::new(&self.config.domain, subject)
        };
        let call = Call {
            client: Arc::clone(&self.client),
            path: if reserve.is_some() { "/v1/reserve" } else { "/v1/check" },
            body: body.encode(),
            traceparent: wanted.traceparent.clone(),
        };
        let Some(after) = hedge_after else { return call.in_turn(deadline).await };
        let order = self.client.order.order(self.client.began.elapsed());
        let hedged = hedge(call, order, after, deadline, &self.client.hedging.budget).await;
        hedged.into_result(|answered| answered.answer.is_cacheable = false)
    }
}

impl Decider for HttpRemote {
    async fn decide(&self, request: CheckRequest) -> LayerDecision {
        let Checked { answer, from } = self.ask(&Subject::from_request(&request), wanted(&request)).await;
        let fields = from.map(|(_, fields)| fields).unwrap_or_default();
        layer_decision(&answer.result, &fields, &self.config.responses, self.clock.now())
    }
}

fn wanted(request: &CheckRequest) -> Wanted {
    let traceparent = request.traceparent.clone().filter(|parent| parent.len() == TRACEPARENT);
    Wanted { cost: request.cost, traceparent, ..Wanted::default() }
}

#[cfg(test)]
mod tests;
