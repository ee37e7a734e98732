//! Connections to the admin address, plain or over TLS: bounded in number (`limiter`), handshakes and heads in bounded time,
//! drained before the end. Who connects while others are drained is answered too, so that a probe can read that the process
//! ends.

use super::limiter::{ConnectionLimiter, ConnectionSlot};
use crate::auth::tls::{AdminTls, ClientPeer};
use axum::Router;
use http::Request;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tower_service::Service;

/// The time that a head may take, the wait for the next request included.
const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// How long requests under way may take to end when the process is told to.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// What those get who connect in that time.
const LATE_TIMEOUT: Duration = Duration::from_secs(1);

/// What connections share.
struct Shared<'s> {
    listener: &'s TcpListener,
    tls: Option<&'s Arc<AdminTls>>,
    router: &'s Router,
    limiter: &'s ConnectionLimiter,
}

/// Serves until `drain` is ready, and then until those who were connected have been answered. Requests carry a
/// [`ClientPeer`] and their [`ConnectionSlot`] as extensions.
pub(crate) async fn serve(
    listener: TcpListener,
    tls: Option<AdminTls>,
    drain: impl Future<Output = ()> + Send,
    router: Router,
) {
    let (limiter, tls) = (ConnectionLimiter::default(), tls.map(Arc::new));
    let shared = Shared { listener: &listener, tls: tls.as_ref(), router: &router, limiter: &limiter };
    let (early, late) = (GracefulShutdown::new(), GracefulShutdown::new());
    tokio::select! {
        () = drain => {}
        () = accept_all(&shared, &early) => {}
        () = watched(tls.as_deref()) => {}
    }
    tokio::select! {
        _ = tokio::time::timeout(DRAIN_TIMEOUT, early.shutdown()) => {}
        () = accept_all(&shared, &late) => {}
    }
    drop(listener);
    let _ = tokio::time::timeout(LATE_TIMEOUT, late.shutdown()).await;
}

async fn watched(tls: Option<&AdminTls>) {
    match tls {
        Some(tls) => tls.watch().await,
        None => std::future::pending().await,
    }
}

/// Accepts connections for as long as it is polled.
async fn accept_all(shared: &Shared<'_>, open: &GracefulShutdown) {
    loop {
        let Some((stream, peer)) = accept(shared.listener).await else { continue };
        let Some(slot) = shared.limiter.admit(peer).map(Arc::new) else { continue };
        let (router, tls, watcher) = (shared.router.clone(), shared.tls.cloned(), open.watcher());
        tokio::spawn(async move {
            let own = Arc::clone(&slot);
            let serving = async move {
                match tls {
                    None => serve_connection(stream, ClientPeer::plain(peer), own, router, watcher).await,
                    Some(tls) => {
                        // A connection that ends badly is its client's affair.
                        if let Ok(stream) = tls.acceptor().accept(stream).await {
                            let peer = ClientPeer::over_tls(peer, stream.get_ref().1.peer_certificates());
                            serve_connection(stream, peer, own, router, watcher).await;
                        }
                    }
                }
            };
            tokio::select! {
                () = serving => {}
                () = slot.evicted() => {}
            }
        });
    }
}

async fn accept(listener: &TcpListener) -> Option<(TcpStream, IpAddr)> {
    match listener.accept().await {
        Ok((stream, peer)) => {
            let _ = stream.set_nodelay(true);
            Some((stream, peer.ip()))
        }
        Err(error) => {
            // Out of file descriptors, most likely: wait for some to come back rather than spin.
            tracing::warn!(%error, "could not accept a connection");
            tokio::time::sleep(Duration::from_millis(50)).await;
            None
        }
    }
}

async fn serve_connection<S>(
    stream: S,
    peer: ClientPeer,
    slot: Arc<ConnectionSlot>,
    router: Router,
    watcher: Watcher,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let service = service_fn(move |mut request: Request<Incoming>| {
        let active = slot.begin_request();
        request.extensions_mut().insert(peer.clone());
        request.extensions_mut().insert(Arc::clone(&slot));
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
    let _ = watcher.watch(connection).await;
}
