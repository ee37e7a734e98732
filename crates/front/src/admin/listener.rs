//! Connections to the admin address, plain or over TLS: bounded in number (`seats`), handshakes and heads in bounded time,
//! drained before the end. Who comes while others are drained is answered too, so that a probe can read that the process ends.

use super::routes::Reply;
use super::seats::{Seat, Seats};
use super::tls::{AdminTls, Caller};
use http_body_util::BodyExt;
use hyper::Request;
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
use tokio::net::TcpListener;
use tollgate_edge::server::accept::accept_any;

/// The time that a head may take, the wait for the next request included.
const HEAD: Duration = Duration::from_secs(30);
/// How long requests under way may take to end when the process is told to.
const DRAIN: Duration = Duration::from_secs(5);
/// What those get who come in that time.
const LATE: Duration = Duration::from_secs(1);

/// Serves until `drain` is ready, and then until those who were there have been answered. What is known of the
/// caller is an extension of its requests.
pub(super) async fn serve<F, A>(
    listener: TcpListener,
    tls: Option<AdminTls>,
    drain: impl Future<Output = ()> + Send,
    answer: F,
) where
    F: Fn(IpAddr, Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Reply> + Send + 'static,
{
    let (seats, tls) = (Seats::default(), tls.map(Arc::new));
    let (early, late) = (GracefulShutdown::new(), GracefulShutdown::new());
    tokio::select! {
        () = drain => {}
        () = accept_all(&listener, tls.as_ref(), &answer, &seats, &early) => {}
        () = watched(tls.as_deref()) => {}
    }
    tokio::select! {
        _ = tokio::time::timeout(DRAIN, early.shutdown()) => {}
        () = accept_all(&listener, tls.as_ref(), &answer, &seats, &late) => {}
    }
    drop(listener);
    let _ = tokio::time::timeout(LATE, late.shutdown()).await;
}

async fn watched(tls: Option<&AdminTls>) {
    match tls {
        Some(tls) => tls.watch().await,
        None => std::future::pending().await,
    }
}

/// Takes connections for as long as it is asked to.
async fn accept_all<F, A>(
    listener: &TcpListener,
    tls: Option<&Arc<AdminTls>>,
    answer: &F,
    seats: &Seats,
    open: &GracefulShutdown,
) where
    F: Fn(IpAddr, Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Reply> + Send + 'static,
{
    loop {
        let (stream, peer) = accept_any(listener).await;
        let peer = peer.ip();
        let Some(seat) = seats.take(peer).map(Arc::new) else { continue };
        let (answer, tls, watcher) = (answer.clone(), tls.cloned(), open.watcher());
        tokio::spawn(async move {
            let own = Arc::clone(&seat);
            let serving = async move {
                match tls {
                    None => speak(stream, Caller::plain(peer), own, answer, watcher).await,
                    Some(tls) => {
                        // A connection that ends badly is its caller's affair.
                        if let Ok(stream) = tls.acceptor().accept(stream).await {
                            let caller = Caller::over_tls(peer, stream.get_ref().1.peer_certificates());
                            speak(stream, caller, own, answer, watcher).await;
                        }
                    }
                }
            };
            tokio::select! {
                () = serving => {}
                () = seat.given_up() => {}
            }
        });
    }
}

async fn speak<S, F, A>(stream: S, caller: Caller, seat: Arc<Seat>, answer: F, watcher: Watcher)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    F: Fn(IpAddr, Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Reply> + Send + 'static,
{
    let service = service_fn(move |mut request: Request<Incoming>| {
        let under_way = seat.answering();
        request.extensions_mut().insert(caller.clone());
        request.extensions_mut().insert(Arc::clone(&seat));
        let answering = answer(caller.address, request);
        // Until the last of its body has been taken.
        let mark = |answer: Reply| {
            answer.map(|body| {
                body.map_err(move |error| {
                    let _ = &under_way;
                    error
                })
                .boxed_unsync()
            })
        };
        async move { Ok::<_, Infallible>(mark(answering.await)) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(64 * 1024)
        .serve_connection(TokioIo::new(stream), service);
    let _ = watcher.watch(connection).await;
}
