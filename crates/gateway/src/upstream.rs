//! Sending a request to an upstream: picks a backend and a connection, runs the exchange, and retries where that is safe.
//!
//! Only a request that the client itself could repeat (an idempotent method) is retried, and only if none of its body was sent
//! and not a byte of a response arrived: the gateway never causes a request to be executed twice.

use crate::body::{BodyError, ClientBody};
use crate::config::{RouteConfig, UpstreamProtocol};
use crate::h1::exchange::{ExchangeError, ExchangeOptions, Pump, UpstreamConnection, exchange};
use crate::h2;
use crate::pool::{Backend, ConnectError, ConnectionPreference, InFlight, Pool};
use crate::stall::{BodyProgress, TrackedBody};
use http::{HeaderMap, Method, Response, StatusCode};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;
use tollgate_http::h1::head::ResponseHead;
use tollgate_http::headers::HeaderAppend;
use tollgate_http::server::write::{self, Frames};
use tollgate_http::server::{self, LazyTimeout};

/// Maximum number of stale connections in a row.
const STALE: u32 = 3;

/// A request to an upstream.
pub(crate) struct UpstreamRequest<'a, H> {
    pub(crate) method: &'a Method,
    pub(crate) target: &'a str,
    pub(crate) head: &'a H,
    /// Framing of the body.
    pub(crate) frames: Frames,
    pub(crate) upgrades: bool,
    pub(crate) route: &'a RouteConfig,
}

/// The header fields of a request to an upstream.
pub(crate) trait WriteFields: Sync {
    /// Whether they are copied from the bytes of a head, without a header map.
    const ARE_BYTES: bool;

    /// Writes the fields into HTTP/1 bytes or an HTTP/2 header map; called for each attempt.
    fn write(&self, out: &mut impl HeaderAppend);
}

/// The head of an upstream's response, and the source of its body.
#[allow(clippy::large_enum_variant, reason = "the large variant is the common one and short-lived")]
pub(crate) enum Received {
    H1 {
        connection: Box<UpstreamConnection>,
        in_flight: InFlight,
        /// The rest of the request while it is still being sent.
        pumping: Option<Pump>,
        head: ResponseHead,
        /// End of the head in the received bytes.
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

/// Returns whether repeating a request has no further effect.
pub(crate) fn is_idempotent(method: &Method) -> bool {
    matches!(
        *method,
        Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::PUT | Method::DELETE
    )
}

/// Why there is no upstream response.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: StatusCode,
    /// What the client is sent.
    pub(crate) detail: String,
    /// The cause, for logs: it may name addresses behind the gateway.
    pub(crate) cause: Option<String>,
    /// The backend that failed, for logs.
    pub(crate) backend: Option<String>,
}

impl Failure {
    pub(crate) fn new(status: StatusCode, detail: &(impl ToString + ?Sized)) -> Self {
        Self { status, detail: detail.to_string(), cause: None, backend: None }
    }

    /// Returns the cause as far as it is known.
    pub(crate) fn logged(&self) -> &str {
        self.cause.as_deref().unwrap_or(&self.detail)
    }

    /// Returns whether the upstream did not answer in time.
    pub(crate) fn is_timeout(&self) -> bool {
        self.status == StatusCode::GATEWAY_TIMEOUT
    }

    /// Adds the backend that failed.
    fn of(self, backend: &Backend) -> Self {
        Self { backend: Some(backend.address.clone()), ..self }
    }

    pub(crate) fn too_large() -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, &server::BodyError::TooLarge)
    }
}

/// Why an attempt got no response.
pub(crate) enum AttemptError {
    /// Nothing was received, and no part of a body was sent.
    NoResponse(Failure),
    /// An idle connection turned out to be closed; not a failure of the backend.
    Stale(Failure),
    /// The connection closed before the request was sent; not a failure of the backend. The request's body is there.
    Unsent(Failure),
    /// The connection limit is reached. Nothing was sent; not a failure of the backend.
    Full(Failure),
    /// The request's body ended with an error; not a failure of the backend.
    Body(Failure),
    Failed(Failure),
}

/// Sends a request and retries it where that is safe. `timeout` belongs to the request's task.
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
            return Err(Failure::new(StatusCode::BAD_GATEWAY, "the upstream has no backends"));
        };
        let attempt = match pool.protocol() {
            UpstreamProtocol::Http1 => attempt_h1(&in_flight, sent, &mut body, wanted, timeout).await,
            UpstreamProtocol::Http2 => Box::pin(attempt_h2(pool, &in_flight, sent, &mut body)).await,
        };
        let backend = in_flight.backend();
        let failure = match attempt {
            Ok(answered) => {
                backend.record_success();
                return Ok(answered.with(in_flight));
            }
            Err(AttemptError::Stale(failure)) => {
                // Part of a body may already be sent.
                if !idempotent || (body.is_none() && !bodiless) || stale == STALE {
                    return Err(failure.of(backend));
                }
                stale += 1;
                wanted = ConnectionPreference::New;
                continue;
            }
            Err(AttemptError::Unsent(failure)) => {
                if stale == STALE {
                    return Err(failure.of(backend));
                }
                stale += 1;
                continue;
            }
            Err(AttemptError::Body(failure)) => return Err(failure.of(backend)),
            Err(AttemptError::Failed(failure)) => {
                if failure.status.is_server_error() {
                    backend.record_failure(failure.logged());
                }
                return Err(failure.of(backend));
            }
            Err(AttemptError::NoResponse(failure)) => {
                backend.record_failure(failure.logged());
                failure.of(backend)
            }
            Err(AttemptError::Full(failure)) => failure.of(backend),
        };
        if retries == 0 || (body.is_none() && !bodiless) {
            tracing::debug!(pool = pool.name, detail = failure.detail, "request failed");
            return Err(failure);
        }
        retries -= 1;
        tried.push(at);
    }
}

/// The response to an attempt.
#[allow(clippy::large_enum_variant, reason = "the large variant is the common one and short-lived")]
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
    tracing::debug!(%error, "connect failed");
    // Addresses behind the gateway are not disclosed to clients.
    let detail = match error {
        ConnectError::Refused(..) => "cannot connect to the upstream",
        ConnectError::Timeout(_) => "connecting to the upstream timed out",
        ConnectError::Full(_) => "all connections to the upstream are in use",
    };
    Failure { cause: Some(error.to_string()), ..Failure::new(status, detail) }
}

pub(crate) fn body_failure(error: &BodyError) -> Failure {
    let status = match error {
        BodyError::Message(server::BodyError::TooLarge) => StatusCode::PAYLOAD_TOO_LARGE,
        BodyError::Message(server::BodyError::TooSlow) => StatusCode::REQUEST_TIMEOUT,
        BodyError::NoPlace => StatusCode::SERVICE_UNAVAILABLE,
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
    let backend = in_flight.backend();
    let idle = if wanted == ConnectionPreference::Any { backend.take_idle() } else { None };
    let mut connection = match idle {
        Some(idle) => {
            if H::ARE_BYTES && body.is_none() {
                backend.count_fast_path();
            }
            idle
        }
        None => match Box::pin(backend.connection(wanted)).await {
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
        Err(error) => Err(attempt_error(error, reused, &backend.address)),
    }
}

/// Classifies a failed exchange; `reused` is true for a connection that was idle before.
fn attempt_error(error: ExchangeError, reused: bool, backend: &str) -> AttemptError {
    match error {
        ExchangeError::Reset(_) => {
            let failure = Failure::new(
                StatusCode::BAD_GATEWAY,
                "the upstream closed the connection without a response",
            );
            tracing::debug!(%error, backend, "no response");
            if reused { AttemptError::Stale(failure) } else { AttemptError::NoResponse(failure) }
        }
        ExchangeError::Body(error) => AttemptError::Body(body_failure(&error)),
        ExchangeError::Timeout => AttemptError::Failed(Failure::new(StatusCode::GATEWAY_TIMEOUT, &error)),
        error => {
            tracing::warn!(%error, backend, "invalid upstream response");
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
    let backend = in_flight.backend();
    let mut streams = match backend.streams.open(backend).await {
        Ok(streams) => streams,
        Err(error) => return Err(AttemptError::NoResponse(connect_failure(&error))),
    };
    let closing = "the upstream closes its connections";
    if streams.send.ready().await.is_err() {
        // The connection received GOAWAY; another one is opened.
        backend.streams.discard(&streams);
        return Err(AttemptError::Unsent(Failure::new(StatusCode::BAD_GATEWAY, closing)));
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
    // The response timeout starts when the body has been sent, unless the upstream stops reading it.
    let late = async {
        if !had_body || flow.ended(sent.route.idle_timeout.0).await.is_ok() {
            tokio::time::sleep(sent.route.timeout.0).await;
        }
    };
    let answered = tokio::select! {
        biased;
        answered = streams.send.try_send_request(request) => Some(answered),
        () = late => None,
    };
    match answered {
        Some(Ok(response)) => Ok(AttemptResult::H2(response)),
        Some(Err(mut unsent)) => {
            if let Some(request) = unsent.take_message() {
                *body = request.into_body().into_inner();
                backend.streams.discard(&streams);
                return Err(AttemptError::Unsent(Failure::new(StatusCode::BAD_GATEWAY, closing)));
            }
            let error = unsent.into_error();
            // hyper reports that the stream was reset, not why.
            if let Some(failure) = flow.take_failure() {
                return Err(AttemptError::Body(failure));
            }
            tracing::debug!(%error, backend = backend.address, "no response");
            let failure =
                Failure::new(StatusCode::BAD_GATEWAY, "the upstream closed the stream without a response");
            if h2::is_unprocessed(&error) && !had_body {
                backend.streams.discard(&streams);
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

/// Header fields of a health check.
struct Probe<'a>(&'a str);

impl WriteFields for Probe<'_> {
    const ARE_BYTES: bool = false;

    fn write(&self, out: &mut impl HeaderAppend) {
        out.add(b"host", self.0.as_bytes());
        out.add(b"user-agent", b"tollgate-health");
    }
}

/// Probes one backend. Returns `None` if all its connections are in use.
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
        Err(AttemptError::Full(_) | AttemptError::Unsent(_) | AttemptError::Body(_)) => None,
        Err(AttemptError::NoResponse(_) | AttemptError::Stale(_) | AttemptError::Failed(_)) => Some(false),
    }
}
