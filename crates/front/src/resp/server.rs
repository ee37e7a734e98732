//! Accepting connections: bounded in number, drained before the end.

use super::connection::Connection;
use super::{App, throttle};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tollgate_core::CounterStore;
use tollgate_engine::Limiter;

/// What callers may do.
#[derive(Clone)]
pub struct RespConfig {
    /// What callers must give before anything else; nothing is asked of them if absent.
    pub password: Option<String>,
    /// Connections open at once; more are told so and closed.
    pub connections: u32,
    /// How often connections are looked at. Whoever owes the rest of a command, or takes no replies, or has not given the
    /// password, for two of these, is let go.
    pub tick: Duration,
    /// So many of them an idle connection is kept.
    pub idle_ticks: u32,
    /// How long commands under way may take to end when the process is told to.
    pub drain: Duration,
}

impl Default for RespConfig {
    fn default() -> Self {
        Self {
            password: None,
            connections: 131_072,
            tick: Duration::from_secs(15),
            // An hour.
            idle_ticks: 240,
            drain: Duration::from_secs(10),
        }
    }
}

impl std::fmt::Debug for RespConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let password = if self.password.is_some() { "set" } else { "none" };
        f.debug_struct("RespConfig")
            .field("password", &password)
            .field("connections", &self.connections)
            .finish_non_exhaustive()
    }
}

/// Serves until `drain` is ready, and then until those who have sent half a command have been answered.
pub async fn serve<S: CounterStore + 'static>(
    listener: TcpListener,
    limiter: Arc<Limiter<S>>,
    config: RespConfig,
    drain: impl Future<Output = ()> + Send,
) {
    let all = config.connections;
    let patience = config.drain;
    let places = Arc::new(Semaphore::new(all as usize));
    let app = Arc::new(App {
        limiter,
        config,
        scope: throttle::scope(),
        connections: AtomicU64::new(0),
        draining: AtomicBool::new(false),
    });
    let (stop, stopping) = watch::channel(false);
    tokio::select! {
        () = drain => {}
        () = accept_all(&listener, &app, &places, &stopping) => {}
    }
    drop(listener);
    app.draining.store(true, Ordering::Relaxed);
    let _ = stop.send(true);
    let _ = tokio::time::timeout(patience, places.acquire_many(all)).await;
}

async fn accept_all<S: CounterStore + 'static>(
    listener: &TcpListener,
    app: &Arc<App<S>>,
    places: &Arc<Semaphore>,
    stopping: &watch::Receiver<bool>,
) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, most likely: wait for some to come back rather than spin.
                tracing::warn!(%error, "could not accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(places).try_acquire_owned() else {
            turn_away(&stream);
            continue;
        };
        let _ = stream.set_nodelay(true);
        let connection = Connection::new(Arc::clone(app), stream, stopping.clone());
        tokio::spawn(async move {
            connection.run().await;
            drop(place);
        });
    }
}

/// A fresh connection has room for a line; one that has not is closed all the same.
fn turn_away(stream: &TcpStream) {
    let _ = stream.try_write(b"-ERR max number of clients reached\r\n");
}

#[cfg(test)]
mod tests;
