//! HTTP/2, both sides of it, by hyper: framing and flow control are its affair; what a message may say is ours.

use crate::body::{Incoming, Outgoing, StreamBody};
use crate::h1::body::BodyError;
use crate::io::{Io, Rewound};
use crate::pool::{ConnectError, Endpoint};
use crate::problem;
use bytes::{Bytes, BytesMut};
use http::header::{CONNECTION, CONTENT_LENGTH, HOST};
use http::{Method, Request, Response, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use hyper::client::conn::http2::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use std::convert::Infallible;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;
use tollgate_edge::h1::head::{self, HeadError};
use tollgate_front::serving::drain::Drain;

/// What an HTTP/2 connection begins with.
pub(crate) const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// What callers may do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    pub(crate) streams: u32,
    pub(crate) header_bytes: u32,
    pub(crate) idle_timeout: Duration,
    pub(crate) body_timeout: Duration,
}

/// Serves one connection to its end.
///
/// `refused` hears of what is no request that could be handled.
pub(crate) async fn serve<F, Fut>(
    io: Io,
    first: BytesMut,
    settings: Settings,
    drain: &Drain,
    handle: F,
    refused: impl Fn(StatusCode, &str),
) where
    F: Fn(Request<Option<Incoming>>) -> Fut,
    Fut: Future<Output = Response<Outgoing>> + Send + 'static,
{
    let under_way = Arc::new(AtomicUsize::new(0));
    let service = service_fn(|request: Request<hyper::body::Incoming>| {
        let busy = Busy::new(&under_way);
        let answering =
            match check(&request) {
                Err(error) => {
                    let (status, detail) = (error.status(), error.to_string());
                    refused(status, &detail);
                    Err(problem::answer(status, &detail))
                }
                Ok(()) => {
                    let idle = settings.body_timeout;
                    Ok(handle(request.map(|body| {
                        (!body.is_end_stream()).then(|| Incoming::H2(StreamBody::new(body, idle)))
                    })))
                }
            };
        async move {
            let _busy = busy;
            let mut answer = match answering {
                Ok(answering) => answering.await,
                Err(refusal) => refusal,
            };
            answer.headers_mut().remove(CONNECTION);
            Ok::<_, Infallible>(answer)
        }
    });
    let mut builder = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(settings.streams)
        .max_header_list_size(settings.header_bytes)
        .max_send_buf_size(64 * 1024)
        .keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(20));
    let connection = builder.serve_connection(TokioIo::new(Rewound { first, io }), service);
    let mut connection = pin!(connection);
    let mut begun = pin!(drain.begin().notified());
    let mut told = false;
    loop {
        tokio::select! {
            _ = connection.as_mut() => return,
            () = begun.as_mut(), if !told => {}
            () = tokio::time::sleep(settings.idle_timeout), if !told => {
                if under_way.load(Ordering::Relaxed) != 0 {
                    continue;
                }
            }
        }
        told = true;
        connection.as_mut().graceful_shutdown();
    }
}

/// A request under way on a connection.
struct Busy(Arc<AtomicUsize>);

impl Busy {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(count))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The framing cannot be ambiguous here, but a head can still name two hosts or hide its path.
fn check(request: &Request<hyper::body::Incoming>) -> Result<(), HeadError> {
    if request.method() == Method::CONNECT {
        return Err(HeadError::Method);
    }
    head::check_path(request.uri().path())?;
    let mut hosts = request.headers().get_all(HOST).iter();
    let authority = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    match (authority, hosts.next(), hosts.next()) {
        (Some(authority), Some(host), None) if authority.eq_ignore_ascii_case(host.as_bytes()) => {}
        (Some(_), None, None) => {}
        (None, Some(host), None) if head::is_host(host.as_bytes()) => {}
        _ => return Err(HeadError::Host),
    }
    if request.headers().get_all(CONTENT_LENGTH).iter().count() > 1 {
        return Err(HeadError::ContentLength);
    }
    Ok(())
}

/// A request's body, or none.
pub(crate) struct MaybeBody(pub(crate) Option<Incoming>);

impl Body for MaybeBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match &mut self.get_mut().0 {
            None => Poll::Ready(None),
            Some(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map_or(SizeHint::with_exact(0), Body::size_hint)
    }
}

/// The connection of an endpoint that speaks HTTP/2: one, shared by all requests.
#[derive(Default)]
pub(crate) struct Streams {
    current: Mutex<Option<Shared>>,
    opening: tokio::sync::Mutex<()>,
    opened: AtomicUsize,
}

/// A handle on a connection, and which of an endpoint's it is.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) send: SendRequest<MaybeBody>,
    which: usize,
}

impl Streams {
    fn current(&self) -> Option<Shared> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().filter(|current| !current.send.is_closed()).cloned()
    }

    /// The next request opens another connection; those under way stay on this one.
    pub(crate) fn forget(&self, shared: &Shared) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.as_ref().is_some_and(|current| current.which == shared.which) {
            *current = None;
        }
    }

    /// A handle on the connection, opened anew if there is none.
    pub(crate) async fn open(&self, endpoint: &Endpoint) -> Result<Shared, ConnectError> {
        if let Some(current) = self.current() {
            return Ok(current);
        }
        // One of those that wait opens it for all.
        let _turn = self.opening.lock().await;
        if let Some(current) = self.current() {
            return Ok(current);
        }
        let deadline = Instant::now() + endpoint.connect_timeout();
        let io = endpoint.open(deadline).await?;
        let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .keep_alive_interval(Duration::from_secs(20))
            .keep_alive_timeout(Duration::from_secs(10));
        let io = TokioIo::new(Rewound { first: BytesMut::new(), io });
        let refused = |error: std::io::Error| ConnectError::Refused(endpoint.address.clone(), error);
        let (send, connection) = tokio::time::timeout_at(deadline, builder.handshake(io))
            .await
            .map_err(|_| ConnectError::Timeout(endpoint.address.clone()))?
            .map_err(|error| refused(std::io::Error::other(error)))?;
        tokio::spawn(async move {
            // Requests on it are told of its end by themselves.
            let _ = connection.await;
        });
        let shared = Shared { send, which: self.opened.fetch_add(1, Ordering::Relaxed) };
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(shared.clone());
        Ok(shared)
    }
}

/// Whether the other side says that it has not looked at a request: its stream was refused, or lies behind the last one
/// that a connection on its way out still answers.
pub(crate) fn is_unseen(error: &hyper::Error) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref::<::h2::Error>());
    error.is_canceled()
        || cause.is_some_and(|cause| {
            cause.reason() == Some(::h2::Reason::REFUSED_STREAM)
                || (cause.is_go_away() && cause.is_remote() && cause.reason() == Some(::h2::Reason::NO_ERROR))
        })
}

/// A request as it goes out on a stream.
pub(crate) fn outbound(
    method: &Method,
    target: &str,
    headers: &http::HeaderMap,
    scheme: &str,
    body: Option<Incoming>,
) -> Result<Request<MaybeBody>, http::Error> {
    let mut headers = headers.clone();
    headers.remove(CONNECTION);
    headers.remove(CONTENT_LENGTH);
    let host = headers.remove(HOST);
    let host = host.as_ref().and_then(|host| host.to_str().ok()).unwrap_or("localhost");
    let uri = http::Uri::builder().scheme(scheme).authority(host).path_and_query(target).build()?;
    let mut request = Request::new(MaybeBody(body));
    *request.method_mut() = method.clone();
    *request.uri_mut() = uri;
    *request.version_mut() = Version::HTTP_2;
    *request.headers_mut() = headers;
    Ok(request)
}
