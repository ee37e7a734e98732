//! The gateway as a whole: bound to its addresses, serving, drained.

use crate::config::GatewayConfig;
use crate::h1::server as h1;
use crate::h2;
use crate::health;
use crate::listener::Listener;
use crate::proxy::Proxy;
use crate::tls::ServerTls;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tollgate_core::CounterStore;
use tollgate_edge::drain::Drain;
use tollgate_edge::h1::head::HeadLimits;
use tollgate_engine::Limiter;
use tollgate_observe::Page;

/// A gateway that listens.
pub struct Gateway<S: CounterStore + 'static> {
    listeners: Vec<(TcpListener, Arc<Listener<S>>)>,
    proxy: Arc<Proxy<S>>,
    drain: Arc<Drain>,
    drain_for: Duration,
}

/// What a gateway tells about itself while it serves.
pub struct Figures<S: CounterStore + 'static> {
    proxy: Arc<Proxy<S>>,
    drain: Arc<Drain>,
}

impl<S: CounterStore + 'static> Gateway<S> {
    /// Listens on all addresses of the settings.
    ///
    /// # Errors
    /// What is wrong with the settings, and where; or why an address cannot be listened on.
    pub fn bind(config: &GatewayConfig, limiter: Arc<Limiter<S>>) -> Result<Self, String> {
        if config.listeners.is_empty() {
            return Err(
                "`listeners` is empty; write at least one, such as {address: 127.0.0.1:8000}".to_owned()
            );
        }
        for route in &config.routes {
            let known = |domain: &str| limiter.rules().domain(domain).is_some();
            if let Some(domain) = route.domain.as_deref().filter(|domain| !known(domain)) {
                return Err(format!("route `{}`: no rule file has the domain `{domain}`", route.path));
            }
        }
        let proxy = Arc::new(Proxy::new(config, limiter)?);
        let drain = Arc::new(Drain::default());
        let callers = &config.callers;
        let size = |size: crate::Size| usize::try_from(size.0).unwrap_or(usize::MAX);
        let h1 = h1::Settings {
            head: HeadLimits {
                bytes: size(callers.header_bytes),
                target: size(callers.target_bytes),
                fields: callers.header_fields,
            },
            header_timeout: callers.header_timeout.0,
            idle_timeout: callers.idle_timeout.0,
            body_timeout: callers.body_timeout.0,
        };
        let h2 = h2::Settings {
            streams: callers.streams,
            header_bytes: u32::try_from(callers.header_bytes.0).unwrap_or(u32::MAX),
            idle_timeout: callers.idle_timeout.0,
            body_timeout: callers.body_timeout.0,
        };
        let mut listeners = Vec::new();
        for listener in &config.listeners {
            let address = listener.address;
            let tls = listener.tls.as_ref().map(ServerTls::new).transpose();
            let tls = tls.map_err(|error| format!("listener {address}: {error}"))?;
            let bound = listen(address).map_err(|error| format!("cannot listen on {address}: {error}"))?;
            let shared = Listener {
                proxy: Arc::clone(&proxy),
                drain: Arc::clone(&drain),
                tls: tls.map(Arc::new),
                proxied: listener.proxy_protocol,
                h1,
                h2,
                places: Arc::new(Semaphore::new(callers.connections.min(Semaphore::MAX_PERMITS))),
            };
            listeners.push((bound, Arc::new(shared)));
        }
        Ok(Self { listeners, proxy, drain, drain_for: callers.drain.0 })
    }

    /// Where it listens, in the order of the settings; and whether by TLS.
    #[must_use]
    pub fn addresses(&self) -> Vec<(SocketAddr, bool)> {
        let of = |(bound, shared): &(TcpListener, Arc<Listener<S>>)| {
            bound.local_addr().ok().map(|address| (address, shared.tls.is_some()))
        };
        self.listeners.iter().filter_map(of).collect()
    }

    /// Its figures, to be asked while it serves.
    #[must_use]
    pub fn figures(&self) -> Figures<S> {
        Figures { proxy: Arc::clone(&self.proxy), drain: Arc::clone(&self.drain) }
    }

    /// Serves until `stop` is ready, and then until those who are there have been answered, within bounds.
    pub async fn serve(self, stop: impl Future<Output = ()> + Send) {
        let mut tasks = JoinSet::new();
        for (bound, shared) in self.listeners {
            if let Some(tls) = shared.tls.clone() {
                tasks.spawn(async move { tls.watch().await });
            }
            tasks.spawn(shared.accept_all(bound));
        }
        for pool in &self.proxy.pools {
            tasks.spawn(health::watch(Arc::clone(pool)));
        }
        let holds = Arc::clone(&self.proxy.holds);
        let renewing = tokio::spawn(async move { holds.renew().await });
        stop.await;
        // Whoever comes from now on finds nobody: the listeners go first.
        tasks.shutdown().await;
        if tokio::time::timeout(self.drain_for, self.drain.run()).await.is_err() {
            tracing::warn!("{} connections did not end in time", self.drain.open());
        }
        renewing.abort();
    }
}

/// Connections that may wait to be accepted. The usual 128 overflow in a burst, and whoever does not fit waits a second.
const BACKLOG: u32 = 4096;

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

impl<S: CounterStore + 'static> Figures<S> {
    /// Adds its figures.
    pub fn metrics(&self, page: &mut Page) {
        let open = self.drain.open();
        page.gauge("gateway_connections", "Callers' connections that are open.", open);
        let waiting = self.proxy.holds.waiting();
        page.gauge("gateway_held_requests", "Requests that wait for their turn.", waiting);
        let dropped = self.proxy.log.as_ref().map_or(0, |log| log.dropped());
        let help = "Lines that did not fit into the access log's queue.";
        page.counter("gateway_access_log_dropped_total", help, dropped);
        let each = [
            ("gateway_endpoint_usable", "Whether an upstream's address gets requests."),
            ("gateway_endpoint_requests", "Requests under way at an upstream's address."),
        ];
        for (at, (name, help)) in each.into_iter().enumerate() {
            let mut family = page.gauges(name, help);
            for pool in &self.proxy.pools {
                for endpoint in &pool.endpoints {
                    let (usable, in_flight) = endpoint.figures();
                    let value = if at == 0 { usize::from(usable) } else { in_flight };
                    let address = endpoint.address.to_string();
                    family.add(&[("upstream", &pool.name), ("address", &address)], value);
                }
            }
        }
    }
}
