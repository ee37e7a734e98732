//! The gateway as a whole: binds its listeners, serves, reloads its configuration while serving, and drains.

use crate::bound_listener::{self, AbortOnDrop, BoundListener};
use crate::config::GatewayConfig;
use crate::health;
use crate::pool::Pool;
use crate::proxy::Proxy;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tollgate_core::CounterStore;
use tollgate_engine::Limiter;
use tollgate_http::identity::CredentialVerifier;
use tollgate_http::server::Drain;
use tollgate_http::server::connections::ConnectionBudget;
use tollgate_observe::MetricsWriter;

/// A gateway bound to its addresses.
pub struct Gateway<S: CounterStore + 'static>(Arc<GatewayShared<S>>);

/// A handle to a running gateway, for metrics and reloads.
pub struct Handle<S: CounterStore + 'static>(Arc<GatewayShared<S>>);

struct GatewayShared<S: CounterStore + 'static> {
    proxy: Arc<Proxy<S>>,
    drain: Arc<Drain>,
    running: Mutex<BackgroundTasks<S>>,
    budget: ConnectionBudget,
}

/// Listeners and tasks that run besides requests.
struct BackgroundTasks<S: CounterStore + 'static> {
    stage: Stage,
    listeners: Vec<BoundListener<S>>,
    /// Health check tasks by upstream.
    tasks: Vec<(Arc<Pool>, AbortOnDrop)>,
    drain_timeout: Duration,
}

#[derive(PartialEq, Eq)]
enum Stage {
    Bound,
    Serving,
    Draining,
}

impl<S: CounterStore + 'static> Gateway<S> {
    /// Binds all listeners of the configuration, with as many connections as it says.
    ///
    /// # Errors
    /// If the configuration is invalid or an address cannot be bound.
    pub fn bind(config: &GatewayConfig, limiter: Arc<Limiter<S>>) -> Result<Self, String> {
        Self::bind_within(config, limiter, ConnectionBudget::default())
    }

    /// Like [`Self::bind`], within the files that all listeners of the process share.
    ///
    /// # Errors
    /// If the configuration is invalid or an address cannot be bound.
    pub fn bind_within(
        config: &GatewayConfig,
        limiter: Arc<Limiter<S>>,
        budget: ConnectionBudget,
    ) -> Result<Self, String> {
        let proxy = Arc::new(Proxy::new(config, limiter)?);
        let drain = Arc::new(Drain::default());
        let mut listeners = Vec::new();
        let planned = bound_listener::plan(config, &proxy, &drain, &budget, &listeners)?;
        bound_listener::build(planned, &mut listeners);
        let running = BackgroundTasks {
            stage: Stage::Bound,
            listeners,
            tasks: Vec::new(),
            drain_timeout: config.callers.drain.0,
        };
        Ok(Self(Arc::new(GatewayShared { proxy, drain, running: Mutex::new(running), budget })))
    }

    /// Returns the bound addresses in the order of the configuration, and whether each uses TLS.
    #[must_use]
    pub fn addresses(&self) -> Vec<(SocketAddr, bool)> {
        self.0.running().listeners.iter().map(|listener| (listener.address, listener.has_tls())).collect()
    }

    /// Returns a handle for use while it serves.
    #[must_use]
    pub fn handle(&self) -> Handle<S> {
        Handle(Arc::clone(&self.0))
    }

    /// Serves until `stop` is ready, then drains requests in flight within the configured time.
    pub async fn serve(self, stop: impl Future<Output = ()> + Send) {
        let shared = self.0;
        {
            let mut running = shared.running();
            running.stage = Stage::Serving;
            shared.open(&mut running);
        }
        stop.await;
        let (listeners, tasks, drain_timeout) = {
            let mut running = shared.running();
            running.stage = Stage::Draining;
            let (listeners, tasks) =
                (std::mem::take(&mut running.listeners), std::mem::take(&mut running.tasks));
            (listeners, tasks, running.drain_timeout)
        };
        // Listeners close first, so that new connections are refused.
        for listener in listeners {
            listener.close().await;
        }
        drop(tasks);
        if tokio::time::timeout(drain_timeout, shared.drain.run()).await.is_err() {
            tracing::warn!(connections = shared.drain.open(), "drain timed out; closing open connections");
        }
    }
}

impl<S: CounterStore + 'static> GatewayShared<S> {
    fn running(&self) -> MutexGuard<'_, BackgroundTasks<S>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts listeners and health checks that are new, and stops those that are gone.
    fn open(&self, running: &mut BackgroundTasks<S>) {
        for listener in &mut running.listeners {
            listener.open();
        }
        let pools = &self.proxy.state().pools;
        running.tasks.retain(|(checked, _)| pools.iter().any(|pool| Arc::ptr_eq(pool, checked)));
        for pool in pools {
            if !running.tasks.iter().any(|(checked, _)| Arc::ptr_eq(pool, checked)) {
                running.tasks.push((Arc::clone(pool), AbortOnDrop::spawn(health::watch(Arc::clone(pool)))));
            }
        }
    }
}

impl<S: CounterStore + 'static> Handle<S> {
    /// Applies a changed configuration, all of it or nothing. Requests in flight complete under the old one; connections
    /// stay open, and their next requests use the new routes. Must be called on a tokio runtime.
    ///
    /// # Errors
    /// If the configuration is invalid; the previous one stays active.
    pub fn reload(&self, config: &GatewayConfig) -> Result<(), String> {
        let GatewayShared { proxy, drain, budget, .. } = &*self.0;
        let mut running = self.0.running();
        if running.stage == Stage::Draining {
            return Ok(());
        }
        let state = proxy.read(config)?;
        let listeners = bound_listener::plan(config, proxy, drain, budget, &running.listeners)?;
        // Nothing below can fail.
        proxy.change(state, config.callers.held);
        bound_listener::build(listeners, &mut running.listeners);
        running.drain_timeout = config.callers.drain.0;
        if running.stage == Stage::Serving {
            self.0.open(&mut running);
        }
        Ok(())
    }

    /// Returns the verifier of credentials, for reloading its keys.
    #[must_use]
    pub fn verifier(&self) -> Arc<CredentialVerifier> {
        Arc::clone(&self.0.proxy.state().verifier)
    }

    /// Waits up to `timeout` for the last lines of the access log. Returns how many were lost. For use after serving has ended.
    #[must_use]
    pub fn flush_access_log(&self, timeout: Duration) -> u64 {
        self.0.proxy.state().log.as_ref().map_or(0, |log| log.flush(timeout))
    }

    /// Writes the gateway's metrics.
    pub fn metrics(&self, page: &mut MetricsWriter) {
        let state = self.0.proxy.state();
        page.gauge("gateway_connections", "Number of open client connections.", self.0.drain.open());
        let waiting = self.0.proxy.delayed.waiting();
        page.gauge("gateway_held_requests", "Number of requests in the delay queue.", waiting);
        let help = "Number of requests whose head was copied to an idle upstream connection.";
        page.counter("gateway_fast_path_total", help, state.fast_path.load(Ordering::Relaxed));
        if let Some(unknown) = state.verifier.unknown_keys() {
            let help = "Number of requests to the gateway with an API key that is not known.";
            page.counter("gateway_unknown_keys_total", help, unknown);
        }
        let dropped = state.log.as_ref().map_or(0, |log| log.dropped());
        let help = "Number of access log lines dropped.";
        page.counter("gateway_access_log_dropped_total", help, dropped);
        let each = [
            ("gateway_endpoint_usable", "Whether a backend is healthy and not ejected."),
            ("gateway_endpoint_requests", "Number of requests in flight at a backend."),
        ];
        for (at, (name, help)) in each.into_iter().enumerate() {
            let mut family = page.gauges(name, help);
            for pool in &state.pools {
                for backend in &pool.backends {
                    let (usable, in_flight) = backend.stats();
                    let value = if at == 0 { usize::from(usable) } else { in_flight };
                    let address = backend.address.to_string();
                    family.add(&[("upstream", &pool.name), ("address", &address)], value);
                }
            }
        }
    }
}
