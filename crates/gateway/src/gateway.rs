//! The gateway as a whole: bound to its addresses, serving, changed while it serves, drained.

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
use tollgate_http::identity::JwtVerifier;
use tollgate_http::server::Drain;
use tollgate_observe::MetricsWriter;

/// A gateway that listens.
pub struct Gateway<S: CounterStore + 'static>(Arc<GatewayShared<S>>);

/// A hand on a gateway while it serves: to read its figures, and to change its settings.
pub struct Handle<S: CounterStore + 'static>(Arc<GatewayShared<S>>);

struct GatewayShared<S: CounterStore + 'static> {
    proxy: Arc<Proxy<S>>,
    drain: Arc<Drain>,
    running: Mutex<BackgroundTasks<S>>,
}

/// What goes on beside requests.
struct BackgroundTasks<S: CounterStore + 'static> {
    stage: Stage,
    listeners: Vec<BoundListener<S>>,
    /// Upstreams that are looked after.
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
    /// Listens on all addresses of the settings.
    ///
    /// # Errors
    /// What is wrong with the settings, and where; or why an address cannot be listened on.
    pub fn bind(config: &GatewayConfig, limiter: Arc<Limiter<S>>) -> Result<Self, String> {
        let proxy = Arc::new(Proxy::new(config, limiter)?);
        let drain = Arc::new(Drain::default());
        let mut doors = Vec::new();
        bound_listener::build(bound_listener::plan(config, &proxy, &drain, &doors)?, &mut doors);
        let running = BackgroundTasks {
            stage: Stage::Bound,
            listeners: doors,
            tasks: Vec::new(),
            drain_timeout: config.callers.drain.0,
        };
        Ok(Self(Arc::new(GatewayShared { proxy, drain, running: Mutex::new(running) })))
    }

    /// Where it listens, in the order of the settings; and whether by TLS.
    #[must_use]
    pub fn addresses(&self) -> Vec<(SocketAddr, bool)> {
        self.0.running().listeners.iter().map(|door| (door.address, door.has_tls())).collect()
    }

    /// A hand on it, for while it serves.
    #[must_use]
    pub fn handle(&self) -> Handle<S> {
        Handle(Arc::clone(&self.0))
    }

    /// Serves until `stop` is ready, and then until those who are there have been answered, within bounds.
    pub async fn serve(self, stop: impl Future<Output = ()> + Send) {
        let shared = self.0;
        {
            let mut running = shared.running();
            running.stage = Stage::Serving;
            shared.open(&mut running);
        }
        stop.await;
        let (doors, tended, drain_for) = {
            let mut running = shared.running();
            running.stage = Stage::Draining;
            let (doors, tended) =
                (std::mem::take(&mut running.listeners), std::mem::take(&mut running.tasks));
            (doors, tended, running.drain_timeout)
        };
        // Whoever comes from now on finds nobody: the listeners go first.
        for door in doors {
            door.close().await;
        }
        drop(tended);
        if tokio::time::timeout(drain_for, shared.drain.run()).await.is_err() {
            tracing::warn!("{} connections did not end in time", shared.drain.open());
        }
    }
}

impl<S: CounterStore + 'static> GatewayShared<S> {
    fn running(&self) -> MutexGuard<'_, BackgroundTasks<S>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts what is not under way yet, and ends what is not wanted any more.
    fn open(&self, running: &mut BackgroundTasks<S>) {
        for door in &mut running.listeners {
            door.open();
        }
        let pools = &self.proxy.state().pools;
        running.tasks.retain(|(tended, _)| pools.iter().any(|pool| Arc::ptr_eq(pool, tended)));
        for pool in pools {
            if !running.tasks.iter().any(|(tended, _)| Arc::ptr_eq(pool, tended)) {
                running.tasks.push((Arc::clone(pool), AbortOnDrop::spawn(health::watch(Arc::clone(pool)))));
            }
        }
    }
}

impl<S: CounterStore + 'static> Handle<S> {
    /// Puts changed settings into force, all of them or none. Requests under way end as they began; connections stay, and
    /// what comes on them next goes by the new routes. Call it on a tokio runtime.
    ///
    /// # Errors
    /// What is wrong with the settings, and where; what acted before still does.
    pub fn reload(&self, config: &GatewayConfig) -> Result<(), String> {
        let GatewayShared { proxy, drain, .. } = &*self.0;
        let mut running = self.0.running();
        if running.stage == Stage::Draining {
            return Ok(());
        }
        let state = proxy.read(config)?;
        let doors = bound_listener::plan(config, proxy, drain, &running.listeners)?;
        // Nothing can go wrong from here on.
        proxy.change(state, config.callers.held);
        bound_listener::build(doors, &mut running.listeners);
        running.drain_timeout = config.callers.drain.0;
        if running.stage == Stage::Serving {
            self.0.open(&mut running);
        }
        Ok(())
    }

    /// What reads tokens, for whoever looks after its keys.
    #[must_use]
    pub fn tokens(&self) -> Option<Arc<JwtVerifier>> {
        self.0.proxy.state().jwt.clone()
    }

    /// Waits for so long until the last lines of the access log are written: how many were not. Nobody is served any more.
    #[must_use]
    pub fn flush_access_log(&self, patience: Duration) -> u64 {
        self.0.proxy.state().log.as_ref().map_or(0, |log| log.flush(patience))
    }

    /// Adds its figures.
    pub fn metrics(&self, page: &mut MetricsWriter) {
        let state = self.0.proxy.state();
        page.gauge("gateway_connections", "Number of open client connections.", self.0.drain.open());
        let waiting = self.0.proxy.delayed.waiting();
        page.gauge("gateway_held_requests", "Number of requests in the delay queue.", waiting);
        let help = "Number of requests whose head was copied to an idle upstream connection.";
        page.counter("gateway_fast_path_total", help, state.fast_path.load(Ordering::Relaxed));
        let dropped = state.log.as_ref().map_or(0, |log| log.dropped());
        let help = "Number of access log lines dropped.";
        page.counter("gateway_access_log_dropped_total", help, dropped);
        let each = [
            ("gateway_endpoint_usable", "Whether a backend receives requests."),
            ("gateway_endpoint_requests", "Number of requests in flight at a backend."),
        ];
        for (at, (name, help)) in each.into_iter().enumerate() {
            let mut family = page.gauges(name, help);
            for pool in &state.pools {
                for endpoint in &pool.backends {
                    let (usable, in_flight) = endpoint.stats();
                    let value = if at == 0 { usize::from(usable) } else { in_flight };
                    let address = endpoint.address.to_string();
                    family.add(&[("upstream", &pool.name), ("address", &address)], value);
                }
            }
        }
    }
}
