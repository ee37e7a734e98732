//! One request's way to an upstream: an endpoint, a connection, an exchange; and another, where that is safe.
//!
//! Tried again is only what the caller could repeat itself (an idempotent method), of whose body nothing was sent, and
//! only if not a byte of an answer came: no request is ever carried out twice by our doing.

use crate::body::{BodyError, ClientBody};
use crate::config::{RouteConfig, UpstreamProtocol};
use crate::h1::exchange::{ExchangeError, ExchangeOptions, Pump, UpstreamConnection, exchange};
use crate::h2;
use crate::pool::{ConnectError, ConnectionPreference, InFlight, Pool};
use crate::stall::{BodyProgress, TrackedBody};
use http::{HeaderMap, Method, Response, StatusCode};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;
use tollgate_http::h1::head::ResponseHead;
use tollgate_http::headers::HeaderAppend;
use tollgate_http::server::write::{self, Frames};
use tollgate_http::server::{self, LazyTimeout};

/// How many connections in a row may turn out to be closed.
const STALE: u32 = 3;

/// What is sent.
pub(crate) struct UpstreamRequest<'a, H> {
    pub(crate) method: &'a Method,
    pub(crate) target: &'a str,
    pub(crate) head: &'a H,
    /// How the body follows.
    pub(crate) frames: Frames,
    pub(crate) upgrades: bool,
    pub(crate) route: &'a RouteConfig,
}

/// The fields of a request, as its upstream gets them.
pub(crate) trait WriteFields: Sync {
    /// Whether they are copied from the bytes of a head, without a map in between.
    const ARE_BYTES: bool;

    /// Writes them into the bytes of a head, or into a map for HTTP/2; again for each attempt.
    fn write(&self, out: &mut impl HeaderAppend);
}

/// The head of an upstream's response, and what follows it.
#[allow(clippy::large_enum_variant, reason = "the large one is the usual one, and lives for a moment")]
pub(crate) enum Received {
    H1 {
        connection: Box<UpstreamConnection>,
        in_flight: InFlight,
        /// The request, as far as it is still being sent.
        pumping: Option<Pump>,
        head: ResponseHead,
        /// Where the head ends in what was received.
        end: usize,
    },
    H2 {
        response: Response<hyper::body::Incoming>,
        in_flight: InFlight,
    },
}

impl Received {
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::H1 { head, .. } => head.status,
            Self::H2 { response, .. } => response.status(),
        }
    }

    pub(crate) fn address(&self) -> &str {
        let (Self::H1 { in_flight, .. } | Self::H2 { in_flight, .. }) = self;
        &in_flight.backend().address
    }
}

/// Whether a request can be sent again without anybody being the wiser.
pub(crate) fn is_idempotent(method: &Method) -> bool {
    matches!(
        *method,
        Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::PUT | Method::DELETE
    )
}

/// Why the caller gets no upstream's answer.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: StatusCode,
    pub(crate) detail: String,
}

impl Failure {
    pub(crate) fn new(status: StatusCode, detail: &(impl ToString + ?Sized)) -> Self {
        Self { status, detail: detail.to_string() }
    }

    pub(crate) fn too_large() -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, &server::BodyError::TooLarge)
    }
}

/// What became of an attempt that was not answered.
pub(crate) enum AttemptError {
    /// Nothing came back, and nothing of a body went out.
    NoResponse(Failure),
    /// An idle connection turned out to be closed. Nobody's fault.
    Stale(Failure),
    /// There was no place for another connection. Nothing went out, and the endpoint has done nothing wrong.
    Full(Failure),
    Failed(Failure),
}

/// Sends a request, and sends it again where that is safe. `timeout` is of the request's own task.
pub(crate) async fn send<H: WriteFields>(
    pool: &Pool,
    sent: &UpstreamRequest<'_, H>,
    mut body: Option<ClientBody>,
    timeout: &mut LazyTimeout,
) -> Result<Received, Failure> {
    let idempotent = is_idempotent(sent.method);
    let bodiless = body.is_none();
    let mut retries = if idempotent { sent.route.retries } else { 0 };
    let (mut stale, mut wanted) = (0, ConnectionPreference::Any);
    let mut tried: SmallVec<[usize; 4]> = SmallVec::new();
    loop {
        let Some((at, in_flight)) = pool.pick(&tried) else {
            return Err(Failure::new(StatusCode::BAD_GATEWAY, "the upstream has no address"));
        };
        let attempt = match pool.protocol() {
            UpstreamProtocol::Http1 => attempt_h1(&in_flight, sent, &mut body, wanted, timeout).await,
            UpstreamProtocol::Http2 => Box::pin(attempt_h2(pool, &in_flight, sent, &mut body)).await,
        };
        let endpoint = in_flight.backend();
        let failure = match attempt {
            Ok(answered) => {
                endpoint.record_success();
                return Ok(answered.with(in_flight));
            }
            Err(AttemptError::Stale(failure)) => {
                // Of a body nothing may have been sent.
                if !idempotent || (body.is_none() && !bodiless) || stale == STALE {
                    return Err(failure);
                }
                stale += 1;
                wanted = ConnectionPreference::New;
                continue;
            }
            Err(AttemptError::Failed(failure)) => {
                if failure.status.is_server_error() {
                    endpoint.record_failure();
                }
                return Err(failure);
            }
            Err(AttemptError::NoResponse(failure)) => {
                endpoint.record_failure();
                failure
            }
            Err(AttemptError::Full(failure)) => failure,
        };
        if retries == 0 || (body.is_none() && !bodiless) {
            tracing::debug!(pool = pool.name, detail = failure.detail, "no answer");
            return Err(failure);
        }
        retries -= 1;
        tried.push(at);
    }
}

/// An attempt that was answered.
#[allow(clippy::large_enum_variant, reason = "the large one is the usual one, and lives for a moment")]
enum AttemptResult {
    H1(Box<UpstreamConnection>, Option<Pump>, usize, ResponseHead),
    H2(Response<hyper::body::Incoming>),
}

impl AttemptResult {
    fn with(self, in_flight: InFlight) -> Received {
        match self {
            Self::H1(connection, pumping, end, head) => {
                Received::H1 { connection, in_flight, pumping, head, end }
            }
            Self::H2(response) => Received::H2 { response, in_flight },
        }
    }
}

fn connect_failure(error: &ConnectError) -> Failure {
    let status = match error {
        ConnectError::Refused(..) => StatusCode::BAD_GATEWAY,
        ConnectError::Timeout(_) => StatusCode::GATEWAY_TIMEOUT,
        ConnectError::Full(_) => StatusCode::SERVICE_UNAVAILABLE,
    };
    tracing::debug!(%error, "no connection");
    // Which addresses there are behind the gateway is nobody's business.
    let detail = match error {
        ConnectError::Refused(..) => "the upstream cannot be reached",
        ConnectError::Timeout(_) => "the upstream did not take the connection in time",
        ConnectError::Full(_) => "all connections to the upstream are taken",
    };
    Failure::new(status, detail)
}

fn body_failure(error: &BodyError) -> Failure {
    let status = match error {
        BodyError::Message(server::BodyError::TooLarge) => StatusCode::PAYLOAD_TOO_LARGE,
        BodyError::Message(server::BodyError::TooSlow) => StatusCode::REQUEST_TIMEOUT,
        _ => StatusCode::BAD_REQUEST,
    };
    Failure::new(status, error)
}

async fn attempt_h1<H: WriteFields>(
    in_flight: &InFlight,
    sent: &UpstreamRequest<'_, H>,
    body: &mut Option<ClientBody>,
    wanted: ConnectionPreference,
    timeout: &mut LazyTimeout,
) -> Result<AttemptResult, AttemptError> {
    let endpoint = in_flight.backend();
    let idle = if wanted == ConnectionPreference::Any { endpoint.take_idle() } else { None };
    let mut connection = match idle {
        Some(idle) => {
            if H::ARE_BYTES && body.is_none() {
                endpoint.count_fast_path();
            }
            idle
        }
        None => match Box::pin(endpoint.connection(wanted)).await {
            Ok(connection) => connection,
            Err(error @ ConnectError::Full(_)) => return Err(AttemptError::Full(connect_failure(&error))),
            Err(error) => return Err(AttemptError::NoResponse(connect_failure(&error))),
        },
    };
    let reused = connection.is_reused;
    let out = connection.out();
    write::request_line(out, sent.method, sent.target);
    sent.head.write(out);
    write::end_of_fields(out, sent.frames);
    let terms = ExchangeOptions {
        method: sent.method,
        frames: sent.frames,
        upgrades: sent.upgrades,
        response: sent.route.timeout.0,
        idle: sent.route.idle_timeout.0,
    };
    let mut pumping = None;
    match exchange(&mut connection, &terms, body.take(), &mut pumping, timeout).await {
        Ok((end, head)) => Ok(AttemptResult::H1(connection, pumping, end, head)),
        Err(error) => Err(attempt_error(error, reused, &endpoint.address)),
    }
}

/// What it means that an exchange failed; `reused`: on a connection that had waited.
fn attempt_error(error: ExchangeError, reused: bool, endpoint: &str) -> AttemptError {
    match error {
        ExchangeError::Reset(_) => {
            let failure =
                Failure::new(StatusCode::BAD_GATEWAY, "the upstream closed the connection without an answer");
            tracing::debug!(%error, endpoint, "no answer");
            if reused { AttemptError::Stale(failure) } else { AttemptError::NoResponse(failure) }
        }
        ExchangeError::Body(error) => AttemptError::Failed(body_failure(&error)),
        ExchangeError::Timeout => AttemptError::Failed(Failure::new(StatusCode::GATEWAY_TIMEOUT, &error)),
        error => {
            tracing::warn!(%error, endpoint, "a bad answer");
            AttemptError::Failed(Failure::new(StatusCode::BAD_GATEWAY, &error))
        }
    }
}

async fn attempt_h2<H: WriteFields>(
    pool: &Pool,
    in_flight: &InFlight,
    sent: &UpstreamRequest<'_, H>,
    body: &mut Option<ClientBody>,
) -> Result<AttemptResult, AttemptError> {
    let endpoint = in_flight.backend();
    let mut streams = match endpoint.streams.open(endpoint).await {
        Ok(streams) => streams,
        Err(error) => return Err(AttemptError::NoResponse(connect_failure(&error))),
    };
    let ready = tokio::time::timeout(sent.route.timeout.0, streams.send.ready()).await;
    if !matches!(ready, Ok(Ok(()))) {
        // It was told to go away: another one is opened.
        endpoint.streams.discard(&streams);
        let failure = Failure::new(StatusCode::BAD_GATEWAY, "the upstream takes no stream");
        return Err(AttemptError::Stale(failure));
    }
    let scheme = if pool.config.tls.is_some() { "https" } else { "http" };
    let had_body = body.is_some();
    let flow = Arc::new(BodyProgress::default());
    let outgoing = TrackedBody::new(body.take(), Arc::clone(&flow));
    let mut fields = HeaderMap::new();
    sent.head.write(&mut fields);
    let request = match h2::outbound(sent.method, sent.target, fields, scheme, outgoing) {
        Ok(request) => request,
        Err(error) => return Err(AttemptError::Failed(Failure::new(StatusCode::BAD_REQUEST, &error))),
    };
    // Time runs from when all was sent, unless the upstream stops taking it.
    let late = async {
        if !had_body || flow.ended(sent.route.idle_timeout.0).await.is_ok() {
            tokio::time::sleep(sent.route.timeout.0).await;
        }
    };
    let answered = tokio::select! {
        biased;
        answered = streams.send.send_request(request) => Some(answered),
        () = late => None,
    };
    match answered {
        Some(Ok(response)) => Ok(AttemptResult::H2(response)),
        Some(Err(error)) => {
            let of_caller =
                std::error::Error::source(&error).and_then(|cause| cause.downcast_ref::<BodyError>());
            if let Some(error) = of_caller {
                return Err(AttemptError::Failed(body_failure(error)));
            }
            tracing::debug!(%error, endpoint = endpoint.address, "no answer");
            let failure =
                Failure::new(StatusCode::BAD_GATEWAY, "the upstream ended the stream without an answer");
            if h2::is_unprocessed(&error) && !had_body {
                endpoint.streams.discard(&streams);
                return Err(AttemptError::Stale(failure));
            }
            Err(AttemptError::Failed(failure))
        }
        None => {
            let failure = Failure::new(StatusCode::GATEWAY_TIMEOUT, &ExchangeError::Timeout);
            Err(AttemptError::Failed(failure))
        }
    }
}

/// The fields of a health check's request.
struct Probe<'a>(&'a str);

impl WriteFields for Probe<'_> {
    const ARE_BYTES: bool = false;

    fn write(&self, out: &mut impl HeaderAppend) {
        out.add(b"host", self.0.as_bytes());
        out.add(b"user-agent", b"tollgate-health");
    }
}

/// Asks one endpoint whether it is well. Nothing is found where all its connections are in use.
pub(crate) async fn probe(pool: &Pool, at: usize, path: &str, timeout: Duration) -> Option<bool> {
    let in_flight = pool.at(at);
    let (route, head) = (RouteConfig::probe(timeout), Probe(&in_flight.backend().address));
    let sent = UpstreamRequest {
        method: &Method::GET,
        target: path,
        head: &head,
        frames: Frames::None,
        upgrades: false,
        route: &route,
    };
    let attempt = match pool.protocol() {
        UpstreamProtocol::Http1 => {
            let mut timeout = LazyTimeout::new(timeout);
            attempt_h1(&in_flight, &sent, &mut None, ConnectionPreference::Spare, &mut timeout).await
        }
        UpstreamProtocol::Http2 => attempt_h2(pool, &in_flight, &sent, &mut None).await,
    };
    match attempt {
        Ok(AttemptResult::H1(_, _, _, head)) => Some(head.status.as_u16() < 400),
        Ok(AttemptResult::H2(response)) => Some(response.status().as_u16() < 400),
        Err(AttemptError::Full(_)) => None,
        Err(AttemptError::NoResponse(_) | AttemptError::Stale(_) | AttemptError::Failed(_)) => Some(false),
    }
}
