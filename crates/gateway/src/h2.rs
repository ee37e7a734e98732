//! HTTP/2 on both sides, over hyper, which does framing and flow control. This module checks messages and times out streams.

mod stream;

use crate::body::{ClientBody, ProxiedBody, StreamBody};
use crate::headers::Peer;
use crate::message::{Forwarded, Proxied};
use crate::pool::{Backend, ConnectError};
use crate::problem;
use crate::proxy::Proxy;
use crate::stall::TrackedBody;
use bytes::BytesMut;
use http::header::{CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HOST};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version};
use http_body::Body;
use hyper::client::conn::http2::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use std::convert::Infallible;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use stream::Activity;
pub(crate) use stream::{RequestProgress, Responding};
use tokio::time::Instant;
use tollgate_core::CounterStore;
use tollgate_http::h1::head::{self, HeadError};
use tollgate_http::identity::RequestView;
use tollgate_http::server::{Drain, Io, LazyTimeout, PrefixedStream};

/// Connection preface of HTTP/2.
pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// Initial value of a timeout that is set before it is used.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Limits for client connections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct H2Settings {
    pub(crate) streams: u32,
    pub(crate) header_bytes: u32,
    pub(crate) target_bytes: usize,
    pub(crate) idle_timeout: Duration,
    pub(crate) body_timeout: Duration,
}

/// Serves one connection until it ends.
///
/// `refused` is called for messages that are rejected before they become requests.
pub(crate) async fn serve<F, Fut>(
    io: Io,
    first: BytesMut,
    settings: H2Settings,
    drain: &Drain,
    connection: &Arc<tollgate_http::server::connections::Activity>,
    handle: F,
    refused: impl Fn(StatusCode, &str),
) where
    F: Fn(Request<Option<ClientBody>>) -> Fut,
    Fut: Future<Output = Response<ProxiedBody>> + Send + 'static,
{
    let activity = Activity::new(Arc::clone(connection));
    let service = service_fn(|request: Request<hyper::body::Incoming>| {
        let handled = match check(&request, settings.target_bytes) {
            Err(error) => {
                let (status, detail) = (error.status(), error.to_string());
                refused(status, &detail);
                Err(problem(status, &detail))
            }
            Ok(()) => {
                let idle = settings.body_timeout;
                let has_body = !request.body().is_end_stream();
                let progress = has_body.then(|| RequestProgress::new(&activity));
                let handled = handle(request.map(|body| {
                    let progress = progress.clone()?;
                    Some(ClientBody::h2(StreamBody::new(body, idle).with_progress(progress)))
                }));
                Ok((handled, progress))
            }
        };
        async move {
            let mut response = match handled {
                Ok((response, progress)) => {
                    let response = response.await;
                    if let Some(progress) = &progress {
                        progress.answered();
                    }
                    response.map(|body| stream::tracked(body, progress))
                }
                Err(problem) => problem.map(|body| stream::tracked(body, None)),
            };
            response.headers_mut().remove(CONNECTION);
            Ok::<_, Infallible>(response)
        }
    });
    let streams = stream::StreamExecutor { activity: Arc::clone(&activity), timeout: settings.body_timeout };
    let mut builder = hyper::server::conn::http2::Builder::new(streams);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(settings.streams)
        .max_header_list_size(settings.header_bytes)
        .max_send_buf_size(64 * 1024)
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(20));
    let connection = builder.serve_connection(TokioIo::new(PrefixedStream { first, io }), service);
    let mut connection = pin!(connection);
    let mut begun = pin!(drain.begun());
    // The notice has passed already where the first bytes came after draining had begun.
    let mut is_closing = drain.has_begun();
    if is_closing {
        connection.as_mut().graceful_shutdown();
    }
    let mut next_check = Instant::now() + settings.idle_timeout;
    loop {
        tokio::select! {
            _ = connection.as_mut() => return,
            () = begun.as_mut(), if !is_closing => {}
            () = tokio::time::sleep_until(next_check), if !is_closing => {
                let now = Instant::now();
                next_check = activity.quiet_since().unwrap_or(now) + settings.idle_timeout;
                if next_check > now {
                    continue;
                }
            }
        }
        is_closing = true;
        connection.as_mut().graceful_shutdown();
    }
}

/// Returns the proxy's response to one request.
pub(crate) async fn respond<S: CounterStore + 'static>(
    proxy: &Proxy<S>,
    peer: &Peer,
    request: Request<Option<ClientBody>>,
) -> Response<ProxiedBody> {
    let (parts, body) = request.into_parts();
    let forwarded = Forwarded {
        asked: RequestView::new(peer.address, &parts.method, &parts.uri, &parts.headers),
        method: &parts.method,
        target: parts.uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str),
    };
    let mut fields = HeaderMap::new();
    let mut timeout = LazyTimeout::new(TIMEOUT);
    match proxy.handle(peer, &forwarded, body, &mut fields, &mut timeout).await {
        Proxied::Response { status, stated_length, mut body } => {
            body.start();
            if let Some(length) = stated_length {
                fields.insert(CONTENT_LENGTH, HeaderValue::from(length));
            }
            let mut response = Response::new(body);
            *response.status_mut() = status;
            *response.headers_mut() = fields;
            response
        }
        // Streams cannot switch protocols, so the proxy offers no upgrade here.
        Proxied::Tunnel(..) => {
            problem(StatusCode::BAD_GATEWAY, "the upstream switched protocols without an upgrade request")
        }
    }
}

/// Returns a problem response.
fn problem(status: StatusCode, detail: &str) -> Response<ProxiedBody> {
    let mut response = Response::new(ProxiedBody::local(problem::body(status, detail).into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(problem::MEDIA_TYPE));
    response
}

/// Rejects heads with conflicting hosts or a hidden path; framing cannot be ambiguous in HTTP/2.
fn check(request: &Request<hyper::body::Incoming>, target_bytes: usize) -> Result<(), HeadError> {
    if request.method() == Method::CONNECT {
        return Err(HeadError::Method);
    }
    let target = request.uri().path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    if target.len() > target_bytes {
        return Err(HeadError::TargetTooLong);
    }
    if !target.starts_with('/') && (target != "*" || request.method() != Method::OPTIONS) {
        return Err(HeadError::Target);
    }
    head::check_path(request.uri().path())?;
    let mut hosts = request.headers().get_all(HOST).iter();
    let authority = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    let host = match (authority, hosts.next().map(http::HeaderValue::as_bytes), hosts.next()) {
        (Some(authority), Some(host), None) if authority.eq_ignore_ascii_case(host) => authority,
        (Some(host), None, None) | (None, Some(host), None) => host,
        _ => return Err(HeadError::Host),
    };
    // User information is not supported, so an `@` makes a host invalid.
    if !head::is_host(host) {
        return Err(HeadError::Host);
    }
    if request.headers().get_all(CONTENT_LENGTH).iter().count() > 1 {
        return Err(HeadError::ContentLength);
    }
    Ok(())
}

/// Bytes of one response that an upstream may send before its client takes them, and of all on a connection. Clients that do
/// not read would stall the responses to all others if a few of them filled the connection's window.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 256 << 20;

/// The HTTP/2 connection of a backend, shared by all requests.
#[derive(Default)]
pub(crate) struct SharedConnection {
    current: Mutex<Option<ConnectionHandle>>,
    opening: tokio::sync::Mutex<()>,
    opened: AtomicUsize,
}

/// A handle to a connection, and its number.
#[derive(Clone)]
pub(crate) struct ConnectionHandle {
    pub(crate) send: SendRequest<TrackedBody<ClientBody>>,
    which: usize,
}

impl SharedConnection {
    fn current(&self) -> Option<ConnectionHandle> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().filter(|current| !current.send.is_closed()).cloned()
    }

    /// Makes the next request open a new connection; requests in flight stay on this one.
    pub(crate) fn discard(&self, shared: &ConnectionHandle) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.as_ref().is_some_and(|current| current.which == shared.which) {
            *current = None;
        }
    }

    /// Returns a handle to the connection, and opens one if needed.
    pub(crate) async fn open(&self, backend: &Backend) -> Result<ConnectionHandle, ConnectError> {
        if let Some(current) = self.current() {
            return Ok(current);
        }
        // One of the waiting requests opens it for all. They do not wait for one attempt after the other: each has its own
        // deadline.
        let deadline = Instant::now() + backend.connect_timeout();
        let timed_out = || ConnectError::Timeout(backend.address.clone());
        let _turn = tokio::time::timeout_at(deadline, self.opening.lock()).await.map_err(|_| timed_out())?;
        if let Some(current) = self.current() {
            return Ok(current);
        }
        let io = backend.open(deadline).await?;
        let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .keep_alive_interval(Duration::from_secs(20))
            .keep_alive_timeout(Duration::from_secs(10));
        let io = TokioIo::new(PrefixedStream { first: BytesMut::new(), io });
        let refused = |error: std::io::Error| ConnectError::Refused(backend.address.clone(), error);
        let (send, connection) = tokio::time::timeout_at(deadline, builder.handshake(io))
            .await
            .map_err(|_| timed_out())?
            .map_err(|error| refused(std::io::Error::other(error)))?;
        tokio::spawn(async move {
            // Requests on it receive its errors themselves.
            let _ = connection.await;
        });
        let shared = ConnectionHandle { send, which: self.opened.fetch_add(1, Ordering::Relaxed) };
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(shared.clone());
        Ok(shared)
    }
}

/// Returns whether the peer has not processed a request: its stream was refused, or is after the last one that a closing
/// connection still processes.
pub(crate) fn is_unprocessed(error: &hyper::Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<::h2::Error>());
    error.is_canceled()
        || cause.is_some_and(|cause| {
            cause.reason() == Some(::h2::Reason::REFUSED_STREAM)
                || (cause.is_go_away() && cause.is_remote() && cause.reason() == Some(::h2::Reason::NO_ERROR))
        })
}

/// Builds a request to send on a stream.
pub(crate) fn outbound(
    method: &Method,
    target: &str,
    mut headers: HeaderMap,
    scheme: &str,
    body: TrackedBody<ClientBody>,
) -> Result<Request<TrackedBody<ClientBody>>, http::Error> {
    headers.remove(CONNECTION);
    headers.remove(CONTENT_LENGTH);
    let host = headers.remove(HOST);
    let host = host.as_ref().and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    let uri = http::Uri::builder().scheme(scheme).authority(host).path_and_query(target).build()?;
    let mut request = Request::new(body);
    *request.method_mut() = method.clone();
    *request.uri_mut() = uri;
    *request.version_mut() = Version::HTTP_2;
    *request.headers_mut() = headers;
    Ok(request)
}
