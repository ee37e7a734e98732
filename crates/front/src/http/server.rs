//! Accepting connections whose answers may be in the making for long, by hyper: for the admin address.

use super::listen::accept;
use hyper::body::{Body, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use std::convert::Infallible;
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// What those get who come while others are being drained.
const LATE: Duration = Duration::from_secs(1);

/// What connections are held to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) connections: usize,
    pub(crate) header_timeout: Duration,
    pub(crate) drain: Duration,
}

/// Serves until `drain` is ready, and then until those who were there have been answered. Who comes in that time is
/// answered too.
pub(crate) async fn serve_each<F, A, B>(
    listener: TcpListener,
    bounds: Bounds,
    drain: impl Future<Output = ()> + Send,
    answer: F,
) where
    F: Fn(IpAddr, Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(bounds.connections));
    let (early, late) = (GracefulShutdown::new(), GracefulShutdown::new());
    tokio::select! {
        () = drain => {}
        () = accept_all(&listener, &answer, &places, bounds.header_timeout, &early) => {}
    }
    tokio::select! {
        _ = tokio::time::timeout(bounds.drain, early.shutdown()) => {}
        () = accept_all(&listener, &answer, &places, bounds.header_timeout, &late) => {}
    }
    drop(listener);
    let _ = tokio::time::timeout(LATE, late.shutdown()).await;
}

/// Takes connections for as long as it is asked to.
async fn accept_all<F, A, B>(
    listener: &TcpListener,
    answer: &F,
    places: &Arc<Semaphore>,
    header_timeout: Duration,
    open: &GracefulShutdown,
) where
    F: Fn(IpAddr, Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Response<B>> + Send + 'static,
    B: Body<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
{
    loop {
        let Some((stream, peer, place)) = accept(listener, places).await else { continue };
        let answer = answer.clone();
        let service = service_fn(move |request| {
            let answering = answer(peer, request);
            async move { Ok::<_, Infallible>(answering.await) }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(header_timeout)
            .max_buf_size(64 * 1024)
            .pipeline_flush(true)
            .serve_connection(TokioIo::new(stream), service);
        let connection = open.watch(connection);
        tokio::spawn(async move {
            // A connection that ends badly is its caller's affair.
            let _ = connection.await;
            drop(place);
        });
    }
}
