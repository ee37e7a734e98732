//! Runs the HTTP protocol server on the HTTP/1 server: its settings and its connections.

use super::request::Request;
use super::{App, ForwardAuth, HttpApi};
use crate::rls::{MAX_MESSAGE, ResponseStyle};
use bytes::BytesMut;
use http::StatusCode;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsStream;
use tollgate_core::CounterStore;
use tollgate_engine::Limiter;
use tollgate_http::h1::head::{HeadError, HeadLimits};
use tollgate_http::h1::{RawResponse, ScannedHead};
use tollgate_http::problem::Problem;
use tollgate_http::response::ResponseConfig;
use tollgate_http::server::accept::{self, NewConnections, Shutdown};
use tollgate_http::server::connections::{ConnectionBudget, FIRST_REQUEST, LATE, PortLimits, WhenFull};
use tollgate_http::server::{self, BodyMode, Io, NoStream, Rejection, Response, Scope, Service, Settings};
use tollgate_http::tls::ServerTls;
use tollgate_observe::ProcessStatus;

/// Maximum size of a body in bytes.
const MAX_BODY: usize = 64 * 1024;
const MAX_HEAD: HeadLimits = HeadLimits { bytes: 64 * 1024, target: 16 * 1024, fields: 100 };
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of an unread body that are discarded to keep the connection.
const MAX_DISCARDED: usize = 1024 * 1024;
/// How long a request is continued whose client has finished sending, or is gone: longer than any store takes, and short
/// for the place of a delayed request.
const HALF_CLOSED_TIMEOUT: Duration = Duration::from_secs(2);

/// Settings of the HTTP protocol server.
#[derive(Debug)]
pub struct HttpConfig {
    /// Maximum number of open connections; more wait, or displace silent ones.
    pub connections: usize,
    /// Number of connections that no other listener can take.
    pub guaranteed: usize,
    /// The files that all listeners of the process share.
    pub budget: ConnectionBudget,
    /// Maximum time for the first request of a connection.
    pub first_request: Duration,
    /// Maximum time for the headers of a request.
    pub header_timeout: Duration,
    /// Maximum time between two requests.
    pub idle_timeout: Duration,
    /// Maximum time for requests in flight to finish at shutdown.
    pub drain: Duration,
    /// Response settings.
    pub responses: ResponseConfig,
    /// Forward auth.
    pub forward_auth: ForwardAuth,
    /// The paths that are served.
    pub api: HttpApi,
    /// What `/json` contains beside the statuses.
    pub style: ResponseStyle,
    /// TLS, if connections are encrypted.
    pub tls: Option<Arc<ServerTls>>,
}

/// Protocols that the listener offers with TLS.
pub const ALPN: &[&[u8]] = &[b"http/1.1"];

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            connections: 65_536,
            guaranteed: 0,
            budget: ConnectionBudget::default(),
            first_request: FIRST_REQUEST,
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(60),
            drain: Duration::from_secs(10),
            responses: ResponseConfig::default(),
            forward_auth: ForwardAuth::default(),
            api: HttpApi::default(),
            style: ResponseStyle::default(),
            tls: None,
        }
    }
}

/// One connection.
struct Session<S> {
    app: Arc<App<S>>,
    peer: IpAddr,
}

impl<S: CounterStore + 'static> Service for Session<S> {
    type Head = ScannedHead;
    type Body = NoStream;

    fn parse(&self, head: &[u8], limits: &HeadLimits) -> Result<ScannedHead, HeadError> {
        ScannedHead::new(head, limits)
    }

    fn body_mode(&self, scan: &ScannedHead, head: &[u8]) -> BodyMode {
        let request = Request::new(self.peer, scan, head, b"");
        if self.app.api.has_body(request.method, request.path) {
            let is_message = request.path == "/json";
            BodyMode::Whole { max: if is_message { MAX_MESSAGE } else { MAX_BODY } }
        } else {
            BodyMode::Skip
        }
    }

    async fn handle<'r>(
        &'r self,
        request: server::Request<'r, ScannedHead>,
        _: Scope<'r>,
    ) -> Response<NoStream> {
        let request = Request::new(self.peer, request.head, request.bytes, request.body.whole());
        Response::Whole(self.app.handle(&request).await)
    }

    fn reject(&self, rejection: Rejection) -> RawResponse {
        bad_head(rejection)
    }
}

/// Returns the response to a request that cannot be read.
pub(super) fn bad_head(rejection: Rejection) -> RawResponse {
    let problem = match rejection {
        Rejection::Head(error) => {
            // An unsupported version or encoding is reported as a client error.
            let status = Some(error.status()).filter(StatusCode::is_client_error);
            let status = status.unwrap_or(StatusCode::BAD_REQUEST);
            Problem::new(status, "Bad request", error.to_string())
        }
        Rejection::Chunks => Problem::bad("malformed chunked body"),
        Rejection::TooLarge { max } => {
            let detail = format!("the body is too large; send at most {max} bytes");
            Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "Body too large", detail)
        }
        _ => {
            let detail = "the rest of the request did not arrive in time";
            Problem::new(StatusCode::REQUEST_TIMEOUT, "Request timeout", detail)
        }
    };
    problem.response()
}

/// Returns the settings of connections.
pub(super) fn settings(header: Duration, idle: Duration, first_request: Duration) -> Settings {
    Settings {
        head: MAX_HEAD,
        header_timeout: header.min(first_request),
        idle_timeout: Some(idle),
        body_timeout: BODY_TIMEOUT,
        max_discarded: MAX_DISCARDED,
        half_closed_timeout: HALF_CLOSED_TIMEOUT,
    }
}

/// Serves until `drain` resolves and the open connections have finished. Clients that connect during the drain are
/// served too, so that a probe can read that the process is no longer ready; after it the listener is closed.
pub async fn serve<S: CounterStore + 'static>(
    listener: TcpListener,
    limiter: Arc<Limiter<S>>,
    status: Arc<dyn ProcessStatus>,
    config: HttpConfig,
    drain: impl Future<Output = ()> + Send,
) {
    let is_loopback = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    let app = Arc::new(App {
        limiter,
        status,
        responses: config.responses,
        forward_auth: config.forward_auth,
        api: config.api,
        style: config.style,
        is_loopback,
    });
    let slots = config.budget.port(PortLimits {
        guaranteed: config.guaranteed,
        first_request: config.first_request + LATE,
        ..PortLimits::new(config.connections, WhenFull::Wait)
    });
    let shutdown = Shutdown { timeout: config.drain, new_connections: NewConnections::Serve };
    let settings = settings(config.header_timeout, config.idle_timeout, config.first_request);
    let tls = config.tls;
    let serving = accept::serve(listener, slots, shutdown, drain, |stream, peer, drain, activity| {
        let session = Session { app: Arc::clone(&app), peer: peer.ip() };
        let tls = tls.clone();
        async move {
            let io = match tls {
                None => Some(Io::Tcp(stream)),
                Some(tls) => Box::pin(encrypted(&tls, stream)).await,
            };
            let Some(io) = io else { return };
            server::serve(io, BytesMut::new(), &settings, &drain, &activity, &session).await;
        }
    });
    tokio::select! {
        () = serving => {}
        () = tollgate_http::tls::watch(tls.as_deref()) => {}
    }
}

/// Returns the connection after its handshake; `None` if that fails, which is the client's problem and not logged. A
/// client that takes too long loses its slot.
async fn encrypted(tls: &ServerTls, stream: TcpStream) -> Option<Io> {
    let stream = tls.acceptor().accept(stream).await.ok()?;
    tls.check_client(stream.get_ref().1.peer_certificates()).ok()?;
    Some(Io::Tls(Box::new(TlsStream::Server(stream))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::SystemClock;
    use tollgate_http::server::Drain;
    use tollgate_http::server::connections::Activity;
    use tollgate_store::MemoryStore;

    fn size_of_future<A, F: Future>(_: impl Fn(A) -> F) -> usize {
        size_of::<F>()
    }

    /// An idle connection takes the memory of its largest state, so rare and large states must be boxed.
    #[test]
    fn a_connection_is_small() {
        type Parts<'a> =
            (Io, &'a Settings, &'a Drain, &'a Arc<Activity>, &'a Session<MemoryStore<SystemClock>>);
        let size = size_of_future(|(io, settings, drain, activity, session): Parts<'_>| {
            server::serve(io, BytesMut::new(), settings, drain, activity, session)
        });
        assert!(size <= 8 * 1024, "{size} bytes");
    }
}
