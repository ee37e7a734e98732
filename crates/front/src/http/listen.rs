//! Accepting connections: bounded in number, headers in bounded time, drained before the end.

use super::connection::Connection;
use super::request::Request;
use super::{App, Forward};
use crate::serving::drain::{Drain, LAST_CHANCE};
use std::future::Future;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tollgate_core::CounterStore;
use tollgate_edge::answer::AnswerSettings;
use tollgate_edge::h1::Answer;
use tollgate_engine::Limiter;
use tollgate_observe::Status;

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

/// Answers requests: what a connection is served with.
pub(crate) trait Service: Send + Sync + 'static {
    /// Whether the body of such a request is read before it is answered. One that is not is thrown away.
    fn wants_body(&self, request: &Request<'_>) -> bool;

    /// What is left to do of a request that has to wait.
    type Rest: Send;

    /// Answers where nothing has to be waited for, as nearly always. A future for it would take longer to be moved about
    /// than the answer takes.
    fn answer_now(&self, request: &Request<'_>) -> Result<Answer, Self::Rest>;

    /// The rest of the way for those who have to wait.
    fn answer(&self, request: &Request<'_>, rest: Self::Rest) -> impl Future<Output = Answer> + Send;
}

/// Serves until `drain` is ready, and then until those who were there have been answered. Who comes in that time is
/// answered too, so that a probe can read that the process is not ready any more; who comes later finds nobody.
pub async fn serve<S: CounterStore + 'static>(
    listener: TcpListener,
    limiter: Arc<Limiter<S>>,
    status: Arc<dyn Status>,
    config: HttpConfig,
    drain: impl Future<Output = ()> + Send,
) {
    let app = App { limiter, status, answers: config.answers, forward: config.forward };
    let service = Arc::new(app);
    let places = Arc::new(Semaphore::new(config.connections));
    let (early, late) = (Arc::new(Drain::default()), Arc::new(Drain::default()));
    tokio::select! {
        () = drain => {}
        () = accept_all(&listener, &service, &places, config.header_timeout, &early) => {}
    }
    tokio::select! {
        _ = tokio::time::timeout(config.drain, early.run()) => {}
        () = accept_all(&listener, &service, &places, config.header_timeout, &late) => {}
    }
    drop(listener);
    let _ = tokio::time::timeout(LAST_CHANCE, late.run()).await;
}

/// Takes connections for as long as it is asked to.
async fn accept_all<V: Service>(
    listener: &TcpListener,
    service: &Arc<V>,
    places: &Arc<Semaphore>,
    header_timeout: Duration,
    drain: &Arc<Drain>,
) {
    loop {
        let Some((stream, peer, place)) = accept(listener, places).await else { continue };
        let present = drain.enter();
        let connection =
            Connection::new(Arc::clone(service), stream, peer, header_timeout, Arc::clone(drain));
        tokio::spawn(async move {
            connection.run().await;
            drop((place, present));
        });
    }
}

async fn accept(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> Option<(tokio::net::TcpStream, IpAddr, tokio::sync::OwnedSemaphorePermit)> {
    let place = Arc::clone(places).acquire_owned().await.ok()?;
    let (stream, peer) = accept_any(listener).await?;
    Some((stream, peer, place))
}

/// The next who comes, however many there are.
async fn accept_any(listener: &TcpListener) -> Option<(tokio::net::TcpStream, IpAddr)> {
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
