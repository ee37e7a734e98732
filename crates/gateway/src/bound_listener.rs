//! One address that callers reach, and what those who come in there are held to. A change of the settings leaves the address
//! open, and those who are there: it acts on whoever comes next.

use crate::acceptor::Acceptor;
use crate::config::{ClientLimits, GatewayConfig, ListenerConfig};
use crate::h2;
use crate::proxy::Proxy;
use crate::tls::ServerTls;
use arc_swap::ArcSwap;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinHandle;
use tollgate_core::CounterStore;
use tollgate_http::h1::head::HeadLimits;
use tollgate_http::server::accept::{ConnectionSlots, WhenFull};
use tollgate_http::server::{Drain, Settings};

/// Connections that may wait to be accepted. The usual 128 overflow in a burst, and whoever does not fit waits a second.
const BACKLOG: u32 = 4096;

pub(crate) struct BoundListener<S: CounterStore + 'static> {
    config: ListenerConfig,
    connections: usize,
    pub(crate) address: SocketAddr,
    current: Arc<ArcSwap<Acceptor<S>>>,
    /// Until it is opened.
    bound: Option<TcpListener>,
    accepting: Option<AbortOnDrop>,
    watching: Option<AbortOnDrop>,
}

/// A task that ends when it is dropped.
pub(crate) struct AbortOnDrop(JoinHandle<()>);

impl AbortOnDrop {
    pub(crate) fn spawn(future: impl Future<Output = ()> + Send + 'static) -> Self {
        Self(tokio::spawn(future))
    }

    /// Waits until it has ended.
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

/// What a door is going to be, once nothing can go wrong any more.
pub(crate) struct ListenerPlan<S: CounterStore + 'static> {
    config: ListenerConfig,
    connections: usize,
    listener: Acceptor<S>,
    slot: ListenerSlot,
}

enum ListenerSlot {
    /// The door that is there, by its number.
    Existing(usize),
    New(SocketAddr, TcpListener),
}

/// All doors of the settings: those that are there stay, others are bound here. Nothing of what acts is touched.
pub(crate) fn plan<S: CounterStore + 'static>(
    config: &GatewayConfig,
    proxy: &Arc<Proxy<S>>,
    drain: &Arc<Drain>,
    doors: &[BoundListener<S>],
) -> Result<Vec<ListenerPlan<S>>, String> {
    if config.listeners.is_empty() {
        return Err("`listeners` is empty; write at least one, such as {address: 127.0.0.1:8000}".to_owned());
    }
    let mut planned: Vec<ListenerPlan<S>> = Vec::new();
    for listener in &config.listeners {
        let address = listener.address;
        let is_free = |at: usize| {
            !planned.iter().any(|other| matches!(other.slot, ListenerSlot::Existing(taken) if taken == at))
        };
        let known = (0..doors.len()).find(|at| doors[*at].config.address == address && is_free(*at));
        let former = known.map(|at| (&doors[at], doors[at].current.load_full()));
        let same = |door: &BoundListener<S>| door.config.tls == listener.tls;
        let tls = match former.as_ref().filter(|(door, _)| same(door)) {
            Some((_, former)) => former.tls.clone(),
            None => {
                let tls = listener.tls.as_ref().map(ServerTls::new).transpose();
                tls.map_err(|error| format!("listener {address}: {error}"))?.map(Arc::new)
            }
        };
        let connections = config.callers.connections;
        let slots = match former.as_ref().filter(|(door, _)| door.connections == connections) {
            Some((_, former)) => former.slots.clone(),
            None => ConnectionSlots::new(connections, WhenFull::Wait),
        };
        let place = match known {
            Some(at) => ListenerSlot::Existing(at),
            None => {
                let bound =
                    listen(address).map_err(|error| format!("cannot listen on {address}: {error}"))?;
                ListenerSlot::New(bound.local_addr().map_err(|error| error.to_string())?, bound)
            }
        };
        let (h1, h2) = bounds(&config.callers);
        let (proxy, drain, proxied) = (Arc::clone(proxy), Arc::clone(drain), listener.proxy_protocol);
        let shared = Acceptor { proxy, drain, tls, proxy_protocol: proxied, h1, h2, slots };
        planned.push(ListenerPlan { config: listener.clone(), connections, listener: shared, slot: place });
    }
    Ok(planned)
}

/// Puts a plan into force: doors that are not in it are closed.
pub(crate) fn build<S: CounterStore + 'static>(
    planned: Vec<ListenerPlan<S>>,
    doors: &mut Vec<BoundListener<S>>,
) {
    let mut former: Vec<Option<BoundListener<S>>> = std::mem::take(doors).into_iter().map(Some).collect();
    for ListenerPlan { config, connections, listener, slot: place } in planned {
        let door = match place {
            ListenerSlot::New(address, bound) => Some(BoundListener {
                config,
                connections,
                address,
                current: Arc::new(ArcSwap::from_pointee(listener)),
                bound: Some(bound),
                accepting: None,
                watching: None,
            }),
            ListenerSlot::Existing(at) => former[at].take().map(|mut door| {
                if door.config.tls != config.tls {
                    door.watching = None;
                }
                door.current.store(Arc::new(listener));
                BoundListener { config, connections, ..door }
            }),
        };
        doors.extend(door);
    }
}

impl<S: CounterStore + 'static> BoundListener<S> {
    /// Takes callers in, if it does not already.
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

    /// Lets nobody in any more: whoever comes finds nobody when this has ended.
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
    };
    let h2 = h2::H2Settings {
        streams: callers.streams,
        header_bytes: u32::try_from(callers.header_bytes.0).unwrap_or(u32::MAX),
        idle_timeout: callers.idle_timeout.0,
        body_timeout: callers.body_timeout.0,
    };
    (h1, h2)
}

fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}
