//! A test service that acts by the path of a request, and a server for it.

use bytes::{Bytes, BytesMut};
use http::StatusCode;
use http_body::{Body, Frame, SizeHint};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use tollgate_http::h1::head::{HeadError, HeadLimits};
use tollgate_http::h1::{RawResponse, ScannedHead};
use tollgate_http::server::accept::{self, NewConnections, Shutdown};
use tollgate_http::server::connections::{ConnectionSlots, WhenFull};
use tollgate_http::server::{
    self, BodyMode, Io, Payload, Rejection, Request, Response, ResponseBody, Scope, Service, Settings,
    Streamed, Upgrade, write,
};

/// Timeouts that a busy machine does not reach, and that a test can wait for.
pub(crate) const SETTINGS: Settings = Settings {
    head: HeadLimits { bytes: 64 * 1024, target: 8 * 1024, fields: 100 },
    header_timeout: Duration::from_secs(5),
    idle_timeout: Some(Duration::from_secs(5)),
    body_timeout: Duration::from_secs(5),
    max_discarded: 100_000,
    half_closed_timeout: Duration::from_secs(5),
};

/// Signals between a test and the service.
#[derive(Default)]
pub(crate) struct Signals {
    /// A handler waits.
    pub(crate) begun: Notify,
    /// The handler may continue.
    pub(crate) go_on: Notify,
    /// The handler was dropped.
    pub(crate) dropped: Notify,
}

pub(crate) struct Server {
    address: SocketAddr,
    pub(crate) signals: Arc<Signals>,
    pub(crate) stop: Arc<Notify>,
    pub(crate) ended: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start() -> Self {
        Self::with(64, WhenFull::Wait, NewConnections::Reject).await
    }

    pub(crate) async fn with(
        connections: usize,
        when_full: WhenFull,
        new_connections: NewConnections,
    ) -> Self {
        Self::with_settings(SETTINGS, connections, when_full, new_connections).await
    }

    pub(crate) async fn with_settings(
        settings: Settings,
        connections: usize,
        when_full: WhenFull,
        new_connections: NewConnections,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let (signals, stop) = (Arc::new(Signals::default()), Arc::new(Notify::new()));
        let shutdown = Shutdown { timeout: Duration::from_secs(30), new_connections };
        let (service, stopped) = (Arc::clone(&signals), Arc::clone(&stop));
        let ended = tokio::spawn(async move {
            let slots = ConnectionSlots::new(connections, when_full);
            accept::serve(
                listener,
                slots,
                shutdown,
                async move { stopped.notified().await },
                |stream, _, drain, activity| {
                    let service = ByPath(Arc::clone(&service));
                    async move {
                        server::serve(
                            Io::Tcp(stream),
                            BytesMut::new(),
                            &settings,
                            &drain,
                            &activity,
                            &service,
                        )
                        .await;
                    }
                },
            )
            .await;
        });
        Self { address, signals, stop, ended }
    }

    pub(crate) async fn connect(&self) -> TcpStream {
        TcpStream::connect(self.address).await.expect("a connection")
    }
}

/// The service.
pub(crate) struct ByPath(pub(crate) Arc<Signals>);

struct Dropped(Arc<Signals>);

impl Drop for Dropped {
    fn drop(&mut self) {
        self.0.dropped.notify_one();
    }
}

fn whole(body: impl Into<Vec<u8>>) -> Response<Pieces> {
    Response::Whole(RawResponse::new(StatusCode::OK, "text/plain", body))
}

impl Service for ByPath {
    type Head = ScannedHead;
    type Body = Pieces;

    fn parse(&self, head: &[u8], limits: &HeadLimits) -> Result<ScannedHead, HeadError> {
        ScannedHead::new(head, limits)
    }

    fn body_mode(&self, scan: &ScannedHead, head: &[u8]) -> BodyMode {
        match scan.target(head) {
            "/echo" => BodyMode::Whole { max: 100 },
            "/pull" => BodyMode::Stream,
            _ => BodyMode::Skip,
        }
    }

    async fn handle<'r>(&'r self, request: Request<'r, ScannedHead>, scope: Scope<'r>) -> Response<Pieces> {
        let path = request.head.target(request.bytes);
        match (path, request.body) {
            ("/echo", body) => whole(body.whole()),
            ("/pull", Payload::Stream(mut body)) => {
                let mut gathered = Vec::new();
                while let Some(frame) = std::future::poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
                    gathered.extend_from_slice(&frame.expect("a frame").into_data().expect("data"));
                }
                whole(gathered)
            }
            ("/wait", _) => {
                let _dropped = Dropped(Arc::clone(&self.0));
                self.0.begun.notify_one();
                self.0.go_on.notified().await;
                whole("waited")
            }
            ("/upgrade", _) => {
                write::status_line(scope.out, StatusCode::SWITCHING_PROTOCOLS);
                Response::Upgrade(Upgrade(Box::new(|mut source, mut write| {
                    Box::pin(async move {
                        let echo = std::future::poll_fn(|cx| {
                            write.poll_write_both(cx, &mut source.buffer, &mut Bytes::new())
                        });
                        echo.await.expect("written");
                        write.shutdown().await.expect("ended");
                    })
                })))
            }
            (path, _) if path.starts_with("/stream/") => {
                write::status_line(scope.out, StatusCode::OK);
                scope.out.extend_from_slice(b"x-own: 1\r\n");
                let known = (path == "/stream/known").then_some(6);
                let pieces = vec![Bytes::from_static(b"two"), Bytes::from_static(b"one")];
                let body = Pieces { pieces, left: known, fails: path == "/stream/fails" };
                Response::Stream(Streamed { status: StatusCode::OK, stated_length: known, body })
            }
            (path, _) => whole(path),
        }
    }

    fn reject(&self, rejection: Rejection) -> RawResponse {
        let (status, text) = match rejection {
            Rejection::SlowHead | Rejection::SlowBody => (StatusCode::REQUEST_TIMEOUT, "too slow"),
            Rejection::TooLarge { .. } => (StatusCode::PAYLOAD_TOO_LARGE, "too large"),
            _ => (StatusCode::BAD_REQUEST, "bad"),
        };
        RawResponse::new(status, "text/plain", text)
    }
}

/// A body in pieces, stored in reverse order; its length may be known.
pub(crate) struct Pieces {
    pieces: Vec<Bytes>,
    left: Option<u64>,
    fails: bool,
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = ();

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, ()>>> {
        let Some(piece) = self.pieces.pop() else {
            return Poll::Ready(self.fails.then_some(Err(())));
        };
        self.left = self.left.map(|left| left - piece.len() as u64);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty() && !self.fails
    }

    fn size_hint(&self) -> SizeHint {
        self.left.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

impl ResponseBody for Pieces {
    fn take_short(&mut self, _: usize, _: &mut BytesMut) -> bool {
        false
    }

    fn skip(self) {}
}
