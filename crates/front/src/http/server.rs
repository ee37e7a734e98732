//! Accepting connections: bounded in number, headers in bounded time, drained before the end.

use super::{App, Forward, handle};
use crate::Status;
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
use tollgate_core::CounterStore;
use tollgate_edge::answer::AnswerSettings;
use tollgate_engine::Limiter;

/// What callers may do.
#[derive(Debug)]
pub struct HttpConfig {
    /// Connections open at once; more wait to be accepted.
    pub connections: usize,
    /// The time that a request's headers may take, the wait for the next request included.
    pub header_timeout: Duration,
    /// How long requests under way may take to end when the process is told to.
    pub drain: Duration,
    /// How answers are written.
    pub answers: AnswerSettings,
    /// How proxies that ask are answered.
    pub forward: Forward,
}

impl Default for HttpConfig {
    fn default() -> Self {
        Self {
            connections: 65_536,
            header_timeout: Duration::from_secs(60),
            drain: Duration::from_secs(10),
            answers: AnswerSettings::default(),
            forward: Forward::default(),
        }
    }
}

/// What those get who come while others are being drained.
const LATE: Duration = Duration::from_secs(1);

/// Serves until `drain` is ready, and then until those who were there have been answered. Who comes in that time is
/// answered too, so that a probe can read that the process is not ready any more; who comes later finds nobody.
pub async fn serve<S: CounterStore + 'static>(
    listener: TcpListener,
    limiter: Arc<Limiter<S>>,
    status: Arc<dyn Status>,
    config: HttpConfig,
    drain: impl Future<Output = ()> + Send,
) {
    let app = Arc::new(App { limiter, status, answers: config.answers, forward: config.forward });
    let answer = move |peer: IpAddr, request: Request<Incoming>| {
        let app = Arc::clone(&app);
        async move { handle(&app, peer, request).await }
    };
    let bounds = Bounds {
        connections: config.connections,
        header_timeout: config.header_timeout,
        drain: config.drain,
    };
    serve_each(listener, bounds, drain, answer).await;
}

/// What connections are held to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub(crate) connections: usize,
    pub(crate) header_timeout: Duration,
    pub(crate) drain: Duration,
}

/// The same for any way to answer.
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

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(tokio::net::TcpStream, IpAddr, tokio::sync::OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.ok()?;
    match listener.accept().await {
        Ok((stream, peer)) => {
            let _ = stream.set_nodelay(true);
            Some((stream, peer.ip(), place))
        }
        Err(error) => {
            // Out of file descriptors, most likely: wait for some to come back rather than spin.
            tracing::warn!(%error, "could not accept a connection");
            tokio::time::sleep(Duration::from_millis(50)).await;
            None
        }
    }
}
