//! A bound listener. Reloads swap its settings for new connections without closing the socket or existing connections.

use crate::acceptor::Acceptor;
use crate::config::{ClientLimits, GatewayConfig, ListenerConfig};
use crate::h2;
use crate::proxy::Proxy;
use crate::tls;
use arc_swap::ArcSwap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinHandle;
use tollgate_core::CounterStore;
use tollgate_http::h1::head::HeadLimits;
use tollgate_http::server::accept::prepare;
use tollgate_http::server::connections::{ConnectionBudget, LATE, PortLimits, WhenFull};
use tollgate_http::server::{Drain, Settings};

/// Accept backlog. The usual 128 overflow in a burst, and a dropped SYN costs the client a second.
const BACKLOG: u32 = 4096;
/// How long a request is continued whose client has finished sending, or is gone: it may occupy permits and a backend.
const HALF_CLOSED_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) struct BoundListener<S: CounterStore + 'static> {
    config: ListenerConfig,
    pub(crate) address: SocketAddr,
    current: Arc<ArcSwap<Acceptor<S>>>,
    /// Socket until accepting starts.
    bound: Option<TcpListener>,
    accepting: Option<AbortOnDrop>,
    watching: Option<AbortOnDrop>,
}

/// A task that is aborted on drop.
pub(crate) struct AbortOnDrop(JoinHandle<()>);

impl AbortOnDrop {
    pub(crate) fn spawn(future: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(future))
    }

    /// Aborts the task and waits until it has ended.
    pub(crate) async fn stop(mut self) {
        self.0.abort();
        let _ = (&mut self.0).await;
    }
}

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A listener as it will be, built before any change is made.
pub(crate) struct ListenerPlan<S: CounterStore + 'static> {
    config: ListenerConfig,
    connections: usize,
    listener: Acceptor<S>,
    slot: ListenerSlot,
}

enum ListenerSlot {
    /// Index of an existing listener.
    Existing(usize),
    New(SocketAddr, TcpListener),
}

/// Plans all listeners of the settings: existing ones are kept, new ones are bound. Changes nothing that is active.
pub(crate) fn plan<S: CounterStore + 'static>(
    config: &GatewayConfig,
    proxy: &Arc<Proxy<S>>,
    drain: &Arc<Drain>,
    budget: &ConnectionBudget,
    listeners: &[BoundListener<S>],
) -> Result<Vec<ListenerPlan<S>>, String> {
    if config.listeners.is_empty() {
        return Err("`listeners` is empty; add at least one, such as {address: 127.0.0.1:8000}".to_owned());
    }
    let mut planned: Vec<ListenerPlan<S>> = Vec::new();
    for settings in &config.listeners {
        let address = settings.address;
        let is_free = |at: usize| {
            !planned.iter().any(|other| matches!(other.slot, ListenerSlot::Existing(taken) if taken == at))
        };
        let known = (0..listeners.len()).find(|at| listeners[*at].config.address == address && is_free(*at));
        let former = known.map(|at| (&listeners[at], listeners[at].current.load_full()));
        let same = |listener: &BoundListener<S>| listener.config.tls == settings.tls;
        let tls = match former.as_ref().filter(|(listener, _)| same(listener)) {
            Some((_, former)) => former.tls.clone(),
            None => {
                let tls = settings.tls.as_ref().map(tls::listener).transpose();
                tls.map_err(|error| format!("listener {address}: {error}"))?
            }
        };
        let callers = &config.callers;
        let connections = callers.connections;
        let slots = match &former {
            Some((_, former)) => former.slots.clone(),
            // A connection to an upstream may be needed as well.
            None => budget.port(PortLimits {
                files: 2,
                guaranteed: 2,
                first_request: callers.header_timeout.0 + LATE,
                ..PortLimits::new(connections, WhenFull::Wait)
            }),
        };
        let slot = match known {
            Some(at) => ListenerSlot::Existing(at),
            None => {
                let bound =
                    listen(address).map_err(|error| format!("cannot listen on {address}: {error}"))?;
                ListenerSlot::New(bound.local_addr().map_err(|error| error.to_string())?, bound)
            }
        };
        let (h1, h2) = bounds(&config.callers);
        let (proxy, drain, proxied) = (Arc::clone(proxy), Arc::clone(drain), settings.proxy_protocol);
        let shared = Acceptor { proxy, drain, tls, proxy_protocol: proxied, h1, h2, slots };
        planned.push(ListenerPlan { config: settings.clone(), connections, listener: shared, slot });
    }
    Ok(planned)
}

/// Applies a plan: listeners that are not in it are closed.
pub(crate) fn build<S: CounterStore + 'static>(
    planned: Vec<ListenerPlan<S>>,
    listeners: &mut Vec<BoundListener<S>>,
) {
    let mut former: Vec<Option<BoundListener<S>>> = std::mem::take(listeners).into_iter().map(Some).collect();
    for ListenerPlan { config, connections, listener: acceptor, slot } in planned {
        let listener = match slot {
            ListenerSlot::New(address, bound) => Some(BoundListener {
                config,
                address,
                current: Arc::new(ArcSwap::from_pointee(acceptor)),
                bound: Some(bound),
                accepting: None,
                watching: None,
            }),
            ListenerSlot::Existing(at) => former[at].take().map(|mut listener| {
                if listener.config.tls != config.tls {
                    listener.watching = None;
                }
                acceptor.slots.change(connections, acceptor.h1.header_timeout + LATE);
                listener.current.store(Arc::new(acceptor));
                BoundListener { config, ..listener }
            }),
        };
        listeners.extend(listener);
    }
}

impl<S: CounterStore + 'static> BoundListener<S> {
    /// Starts accepting connections, unless already started.
    pub(crate) fn open(&mut self) {
        if let Some(bound) = self.bound.take() {
            self.accepting = Some(AbortOnDrop::spawn(Acceptor::accept_all(Arc::clone(&self.current), bound)));
        }
        if let (None, Some(tls)) = (&self.watching, self.current.load().tls.clone()) {
            self.watching = Some(AbortOnDrop::spawn(async move { tls.watch().await }));
        }
    }

    pub(crate) fn has_tls(&self) -> bool {
        self.config.tls.is_some()
    }

    /// Stops accepting; when this returns, new connections are refused.
    pub(crate) async fn close(self) {
        for task in [self.accepting, self.watching].into_iter().flatten() {
            task.stop().await;
        }
    }
}

fn bounds(callers: &ClientLimits) -> (Settings, h2::H2Settings) {
    let size = |size: crate::Size| usize::try_from(size.0).unwrap_or(usize::MAX);
    let h1 = Settings {
        head: HeadLimits {
            bytes: size(callers.header_bytes),
            target: size(callers.target_bytes),
            fields: callers.header_fields,
        },
        header_timeout: callers.header_timeout.0,
        idle_timeout: Some(callers.idle_timeout.0),
        body_timeout: callers.body_timeout.0,
        max_discarded: 0,
        half_closed_timeout: HALF_CLOSED_TIMEOUT,
    };
    let h2 = h2::H2Settings {
        streams: callers.streams,
        header_bytes: u32::try_from(callers.header_bytes.0).unwrap_or(u32::MAX),
        target_bytes: size(callers.target_bytes),
        idle_timeout: callers.idle_timeout.0,
        body_timeout: callers.body_timeout.0,
    };
    (h1, h2)
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    let listener = socket.listen(BACKLOG)?;
    prepare(&listener);
    Ok(listener)
}
