//! Runs the RESP protocol server: its settings and its connections.

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
use tollgate_http::server::accept::{self, NewConnections, Shutdown};
use tollgate_http::server::connections::{ConnectionBudget, FIRST_REQUEST, PortLimits, WhenFull};

const FULL: &[u8] = b"-ERR max number of clients reached\r\n";

/// Settings of the RESP protocol server.
#[derive(Clone)]
pub struct RespConfig {
    /// The password that clients must send first; none is required if absent.
    pub password: Option<String>,
    /// Maximum number of open connections; more are closed with an error.
    pub connections: u32,
    /// Number of connections that no other listener can take.
    pub guaranteed: usize,
    /// The files that all listeners of the process share.
    pub budget: ConnectionBudget,
    /// Maximum time for the first command of a connection.
    pub first_request: Duration,
    /// Interval at which connections are checked. A client is disconnected after two ticks with an incomplete command,
    /// unread replies, or without authentication.
    pub tick: Duration,
    /// Number of ticks after which an idle connection is closed.
    pub idle_ticks: u32,
    /// Maximum time for commands in flight to finish at shutdown.
    pub drain: Duration,
    /// Whether keys of `CL.THROTTLE` are secrets: cells exchange counters, and an unknown key may be an API key.
    pub has_secret_keys: bool,
}

impl Default for RespConfig {
    fn default() -> Self {
        Self {
            password: None,
            connections: 131_072,
            guaranteed: 0,
            budget: ConnectionBudget::default(),
            first_request: FIRST_REQUEST,
            tick: Duration::from_secs(5),
            // One hour.
            idle_ticks: 720,
            drain: Duration::from_secs(10),
            has_secret_keys: false,
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

/// Serves until `drain` resolves and the clients with an incomplete command have received their replies.
pub async fn serve<S: CounterStore + 'static>(
    listener: TcpListener,
    limiter: Arc<Limiter<S>>,
    config: RespConfig,
    drain: impl Future<Output = ()> + Send,
) {
    let slots = config.budget.port(PortLimits {
        guaranteed: config.guaranteed,
        first_request: config.first_request,
        ..PortLimits::new(config.connections as usize, WhenFull::Reject(FULL))
    });
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
    accept::serve(listener, slots, shutdown, stopped, |stream, _, _, activity| {
        Connection::new(Arc::clone(&app), stream, activity, stopping.clone()).run()
    })
    .await;
}

#[cfg(test)]
mod tests;
