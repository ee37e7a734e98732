//! One request's way to an upstream: an endpoint, a connection, an exchange; and another, where that is safe.
//!
//! Tried again is only what the caller could repeat itself (an idempotent method), of whose body nothing was sent, and
//! only if not a byte of an answer came: no request is ever carried out twice by our doing.

use crate::body::{Incoming, Outgoing, Source, StreamBody};
use crate::config::{RouteConfig, UpstreamProtocol};
use crate::flow::{Flow, Flowing};
use crate::h1::body::BodyError;
use crate::h1::client::{Answered, ExchangeError, Outbound, exchange};
use crate::h1::tunnel::Tunnel;
use crate::h1::write::{self, Frames};
use crate::h2;
use crate::headers;
use crate::headers::AddFields;
use crate::pool::{ConnectError, InFlight, Pool, Wanted};
use bytes::BytesMut;
use http::header::{CONNECTION, UPGRADE};
use http::{HeaderMap, Method, Response, StatusCode};
use smallvec::SmallVec;
use std::sync::Arc;

/// How many connections in a row may turn out to be closed.
const STALE: u32 = 3;

/// What is sent.
pub(crate) struct Sent<'a> {
    pub(crate) method: &'a Method,
    pub(crate) target: &'a str,
    pub(crate) head: Head,
    pub(crate) upgrades: bool,
    /// Whether it was sent before, on a connection that had waited and turned out to be closed.
    pub(crate) is_stale: bool,
    pub(crate) route: &'a RouteConfig,
}

/// A request's head as the upstream's protocol has it.
pub(crate) enum Head {
    /// The whole of it, and how the body follows.
    H1(BytesMut, Frames),
    /// Its fields.
    H2(HeaderMap),
}

impl Head {
    /// Of a request whose fields `write` writes.
    pub(crate) fn new(
        protocol: UpstreamProtocol,
        method: &Method,
        target: &str,
        frames: Frames,
        write: impl FnOnce(&mut dyn AddFields),
    ) -> Self {
        match protocol {
            UpstreamProtocol::Http1 => {
                let mut out = BytesMut::new();
                write::request_line(&mut out, method, target);
                write(&mut out);
                write::end_of_fields(&mut out, frames);
                Self::H1(out, frames)
            }
            UpstreamProtocol::Http2 => {
                let mut fields = HeaderMap::new();
                write(&mut fields);
                Self::H2(fields)
            }
        }
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
    fn new(status: StatusCode, detail: &(impl ToString + ?Sized)) -> Self {
        Self { status, detail: detail.to_string() }
    }

    pub(crate) fn too_large() -> Self {
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, &BodyError::TooLarge)
    }
}

/// What became of one attempt.
#[allow(clippy::large_enum_variant, reason = "the large one is the usual one, and lives for a moment")]
pub(crate) enum Attempt {
    Answered(Response<Outgoing>),
    /// Nothing came back, and nothing of a body went out.
    Nothing(Failure),
    /// A waiting connection turned out to be closed. Nobody's fault.
    Stale(Failure),
    /// There was no place for another connection. Nothing went out, and the endpoint has done nothing wrong.
    Full(Failure),
    Failed(Failure),
}

/// Sends a request, and sends it again where that is safe. Tells who answered.
pub(crate) async fn send(
    pool: &Pool,
    sent: &Sent<'_>,
    mut body: Option<Incoming>,
) -> Result<(Response<Outgoing>, String), Failure> {
    let idempotent = is_idempotent(sent.method);
    let bodiless = body.is_none();
    let mut retries = if idempotent { sent.route.retries } else { 0 };
    let mut stale = u32::from(sent.is_stale);
    let mut wanted = if sent.is_stale { Wanted::New } else { Wanted::Any };
    let mut tried: SmallVec<[usize; 4]> = SmallVec::new();
    loop {
        let Some((at, in_flight)) = pool.pick(&tried) else {
            return Err(Failure::new(StatusCode::BAD_GATEWAY, "the upstream has no address"));
        };
        let endpoint = Arc::clone(in_flight.endpoint());
        let attempt = match &sent.head {
            Head::H1(head, frames) => attempt_h1(in_flight, sent, (head, *frames), &mut body, wanted).await,
            Head::H2(fields) => Box::pin(attempt_h2(pool, in_flight, sent, fields, &mut body)).await,
        };
        if let Attempt::Nothing(_) = attempt {
            endpoint.failed();
        }
        match attempt {
            Attempt::Answered(answer) => {
                endpoint.succeeded();
                return Ok((answer, endpoint.address.clone()));
            }
            Attempt::Stale(failure) => {
                // Of a body nothing may have been sent.
                if !idempotent || (body.is_none() && !bodiless) || stale == STALE {
                    return Err(failure);
                }
                stale += 1;
                wanted = Wanted::New;
            }
            Attempt::Nothing(failure) | Attempt::Full(failure) => {
                if retries == 0 || (body.is_none() && !bodiless) {
                    tracing::debug!(pool = pool.name, detail = failure.detail, "no answer");
                    return Err(failure);
                }
                retries -= 1;
                tried.push(at);
            }
            Attempt::Failed(failure) => {
                if failure.status.is_server_error() {
                    endpoint.failed();
                }
                return Err(failure);
            }
        }
    }
}

fn unconnected(error: &ConnectError) -> Failure {
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

fn of_body(error: &BodyError) -> Failure {
    let status = match error {
        BodyError::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
        BodyError::TooSlow => StatusCode::REQUEST_TIMEOUT,
        _ => StatusCode::BAD_REQUEST,
    };
    Failure::new(status, error)
}

async fn attempt_h1(
    in_flight: InFlight,
    sent: &Sent<'_>,
    (head, frames): (&[u8], Frames),
    body: &mut Option<Incoming>,
    wanted: Wanted,
) -> Attempt {
    let endpoint = Arc::clone(in_flight.endpoint());
    let connection = match Box::pin(endpoint.connection(wanted)).await {
        Ok(connection) => connection,
        Err(error @ ConnectError::Full(_)) => return Attempt::Full(unconnected(&error)),
        Err(error) => return Attempt::Nothing(unconnected(&error)),
    };
    let reused = connection.has_waited;
    let outbound = Outbound {
        method: sent.method,
        head,
        frames,
        upgrades: sent.upgrades,
        response: sent.route.timeout.0,
        idle: sent.route.idle_timeout.0,
    };
    // The tunnel needs to be counted as well.
    let counted = sent.upgrades.then(|| in_flight.again());
    match exchange(connection, in_flight, outbound, body.take()).await {
        Ok(Answered::Response(status, fields, body)) => {
            let mut answer = Response::new(Outgoing { source: Source::H1(body), finish: None });
            *answer.status_mut() = status;
            *answer.headers_mut() = fields;
            headers::strip_towards_caller(answer.headers_mut());
            Attempt::Answered(answer)
        }
        Ok(Answered::Switched(fields, source, write, place)) => {
            let upgrade = fields.get(UPGRADE).cloned();
            let (Some(upgrade), Some(in_flight)) = (upgrade, counted) else {
                return Attempt::Failed(Failure::new(StatusCode::BAD_GATEWAY, &ExchangeError::Unasked));
            };
            let tunnel = Tunnel { source, write, in_flight, place, idle: sent.route.idle_timeout.0 };
            let mut answer =
                Response::new(Outgoing { source: Source::Tunnel(Box::new(tunnel)), finish: None });
            *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            *answer.headers_mut() = fields;
            headers::strip_towards_caller(answer.headers_mut());
            answer.headers_mut().insert(CONNECTION, http::HeaderValue::from_static("upgrade"));
            answer.headers_mut().insert(UPGRADE, upgrade);
            Attempt::Answered(answer)
        }
        Err(error) => unanswered(error, reused, &endpoint.address),
    }
}

/// What it means that an exchange failed; `reused`: on a connection that had waited.
pub(crate) fn unanswered(error: ExchangeError, reused: bool, endpoint: &str) -> Attempt {
    match error {
        ExchangeError::Reset(_) => {
            let failure =
                Failure::new(StatusCode::BAD_GATEWAY, "the upstream closed the connection without an answer");
            tracing::debug!(%error, endpoint, "no answer");
            if reused { Attempt::Stale(failure) } else { Attempt::Nothing(failure) }
        }
        ExchangeError::Body(error) => Attempt::Failed(of_body(&error)),
        ExchangeError::Timeout => Attempt::Failed(Failure::new(StatusCode::GATEWAY_TIMEOUT, &error)),
        error => {
            tracing::warn!(%error, endpoint, "a bad answer");
            Attempt::Failed(Failure::new(StatusCode::BAD_GATEWAY, &error))
        }
    }
}

async fn attempt_h2(
    pool: &Pool,
    in_flight: InFlight,
    sent: &Sent<'_>,
    fields: &HeaderMap,
    body: &mut Option<Incoming>,
) -> Attempt {
    let endpoint = Arc::clone(in_flight.endpoint());
    let mut streams = match endpoint.streams.open(&endpoint).await {
        Ok(streams) => streams,
        Err(error) => return Attempt::Nothing(unconnected(&error)),
    };
    let ready = tokio::time::timeout(sent.route.timeout.0, streams.send.ready()).await;
    if !matches!(ready, Ok(Ok(()))) {
        // It was told to go away: another one is opened.
        endpoint.streams.forget(&streams);
        return Attempt::Stale(Failure::new(StatusCode::BAD_GATEWAY, "the upstream takes no stream"));
    }
    let scheme = if pool.config.tls.is_some() { "https" } else { "http" };
    let had_body = body.is_some();
    let flow = Arc::new(Flow::default());
    let outgoing = Flowing::new(body.take(), Arc::clone(&flow));
    let request = match h2::outbound(sent.method, sent.target, fields, scheme, outgoing) {
        Ok(request) => request,
        Err(error) => return Attempt::Failed(Failure::new(StatusCode::BAD_REQUEST, &error)),
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
        Some(Ok(answer)) => {
            let idle = sent.route.idle_timeout.0;
            let mut answer = answer.map(|body| Outgoing {
                source: Source::H2 { body: StreamBody::new(body, idle), _in_flight: in_flight },
                finish: None,
            });
            headers::strip_towards_caller(answer.headers_mut());
            Attempt::Answered(answer)
        }
        Some(Err(error)) => {
            let of_caller =
                std::error::Error::source(&error).and_then(|cause| cause.downcast_ref::<BodyError>());
            if let Some(error) = of_caller {
                return Attempt::Failed(of_body(error));
            }
            tracing::debug!(%error, endpoint = endpoint.address, "no answer");
            let failure =
                Failure::new(StatusCode::BAD_GATEWAY, "the upstream ended the stream without an answer");
            if h2::is_unseen(&error) && !had_body {
                endpoint.streams.forget(&streams);
                return Attempt::Stale(failure);
            }
            Attempt::Failed(failure)
        }
        None => Attempt::Failed(Failure::new(StatusCode::GATEWAY_TIMEOUT, &ExchangeError::Timeout)),
    }
}

/// Asks one endpoint whether it is well. Nothing is found where all its connections are in use.
pub(crate) async fn probe(pool: &Pool, at: usize, path: &str, timeout: std::time::Duration) -> Option<bool> {
    let in_flight = pool.at(at);
    let endpoint = Arc::clone(in_flight.endpoint());
    let route = RouteConfig::probe(timeout);
    let head = Head::new(pool.protocol(), &Method::GET, path, Frames::None, |out| {
        out.add(b"host", endpoint.address.as_bytes());
        out.add(b"user-agent", b"tollgate-health");
    });
    let sent =
        Sent { method: &Method::GET, target: path, head, upgrades: false, is_stale: false, route: &route };
    let attempt = match &sent.head {
        Head::H1(head, frames) => {
            attempt_h1(in_flight, &sent, (head, *frames), &mut None, Wanted::Spare).await
        }
        Head::H2(fields) => attempt_h2(pool, in_flight, &sent, fields, &mut None).await,
    };
    match attempt {
        Attempt::Answered(answer) => Some(answer.status().as_u16() < 400),
        Attempt::Full(_) => None,
        Attempt::Nothing(_) | Attempt::Stale(_) | Attempt::Failed(_) => Some(false),
    }
}
