//! The RESP front: its settings, and its connections.

use super::connection::Connection;
use super::{App, throttle};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tollgate_core::CounterStore;
use tollgate_engine::Limiter;
use tollgate_http::server::accept::{self, ConnectionSlots, NewConnections, Shutdown, WhenFull};

const FULL: &[u8] = b"-ERR max number of clients reached\r\n";

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
    let slots = ConnectionSlots::new(config.connections as usize, WhenFull::Reject(FULL));
    let shutdown = Shutdown { timeout: config.drain, new_connections: NewConnections::Reject };
    let app = Arc::new(App {
        limiter,
        config,
        scope: throttle::scope(),
        connections: AtomicU64::new(0),
        draining: AtomicBool::new(false),
    });
    let (stop, stopping) = watch::channel(false);
    let stopped = async {
        drain.await;
        app.draining.store(true, Ordering::Relaxed);
        let _ = stop.send(true);
    };
    accept::serve(listener, slots, shutdown, stopped, |stream, _, _| {
        Connection::new(Arc::clone(&app), stream, stopping.clone()).run()
    })
    .await;
}

#[cfg(test)]
mod tests;
