//! Connections to the admin listener, plain or over TLS: bounded in number (`limiter`), with time limits for
//! handshakes and request heads, and drained at shutdown. New connections are still served while draining, so that a
//! probe can read that the process is shutting down.

use super::limiter::{AdminConnection, TrackedBody};
use crate::auth::tls::ClientPeer;
use axum::Router;
use http::Request;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tollgate_http::server::Drain;
use tollgate_http::server::accept::{self, NewConnections, Shutdown};
use tollgate_http::server::connections::ConnectionSlots;
use tollgate_http::tls::{self, ServerTls};
use tower_service::Service;

/// Time limit for a request head, including the wait for the next request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for requests in progress at shutdown.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Serves until `drain` completes, and then until all connections are drained. Requests carry a [`ClientPeer`] and
/// their [`AdminConnection`] as extensions.
pub(crate) async fn serve(
    listener: TcpListener,
    tls: Option<Arc<ServerTls>>,
    slots: ConnectionSlots,
    drain: impl Future<Output = ()> + Send,
    router: Router,
) {
    let shutdown = Shutdown { timeout: DRAIN_TIMEOUT, new_connections: NewConnections::Serve };
    let accepting = accept::serve(listener, slots, shutdown, drain, |stream, peer, drain, activity| {
        let (connection, router, tls) = (AdminConnection::new(activity), router.clone(), tls.clone());
        async move { serve_client(stream, peer.ip(), tls, connection, router, &drain).await }
    });
    tokio::select! {
        () = accepting => {}
        () = tls::watch(tls.as_deref()) => {}
    }
}

async fn serve_client(
    stream: TcpStream,
    peer: IpAddr,
    tls: Option<Arc<ServerTls>>,
    client: Arc<AdminConnection>,
    router: Router,
    drain: &Drain,
) {
    let Some(tls) = tls else {
        return serve_connection(stream, ClientPeer::plain(peer), client, router, drain).await;
    };
    // A failed handshake is the client's problem, so it is not logged.
    if let Ok(stream) = tls.acceptor().accept(stream).await {
        let peer = ClientPeer::over_tls(peer, stream.get_ref().1.peer_certificates());
        serve_connection(stream, peer, client, router, drain).await;
    }
}

async fn serve_connection<S>(
    stream: S,
    peer: ClientPeer,
    client: Arc<AdminConnection>,
    router: Router,
    drain: &Drain,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let stalled = Arc::clone(&client);
    let service = service_fn(move |mut request: Request<Incoming>| {
        let active = client.begin_request();
        request.extensions_mut().insert(peer.clone());
        request.extensions_mut().insert(Arc::clone(&client));
        let request = request.map(|body| TrackedBody::new(body, &client));
        let responding = router.clone().call(request);
        async move {
            let response = responding.await?;
            // The request is active until the last of the body has been sent.
            Ok::<_, Infallible>(response.map(|body| {
                body.map_err(move |error| {
                    let _ = &active;
                    error
                })
            }))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(64 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let begun = drain.begun();
    if !drain.has_begun() {
        tokio::select! {
            _ = connection.as_mut() => return,
            () = stalled.ended() => return,
            () = begun => {}
        }
    }
    connection.as_mut().graceful_shutdown();
    tokio::select! {
        _ = connection => {}
        () = stalled.ended() => {}
    }
}
