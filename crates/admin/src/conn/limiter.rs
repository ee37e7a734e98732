//! Connection limiter for the admin listener, with per-network caps and eviction of idle clients. Operators are few,
//! so the cap is low; still, no client can take all connections:
//!
//! - A network (an address, or the /64 of an IPv6 address) has a share of them, so that others can always connect.
//! - At the cap, of the network or in total, a new connection evicts another: first one that has sent nothing, then
//!   an unauthorized one, then an authorized one without a request in progress; within each class the one that has
//!   been idle longest. An authorized connection with a request in progress is never evicted.
//! - A new connection has less time to send its first request than it has between later requests.
//!
//! Rejected: letting new connections wait to be accepted, because clients that hold idle connections would determine
//! how long that takes.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;
use tollgate_http::server::connections::{Activity, PortLimits, WhenFull, network};

/// Maximum number of connections.
const MAX_CONNECTIONS: usize = 512;
/// Maximum number of connections per network.
pub(crate) const MAX_PER_NETWORK: usize = 256;
/// Time limit for the first request of a connection, including the TLS handshake.
const FIRST_REQUEST: Duration = Duration::from_secs(5);

/// Returns the limits of the admin listener within the budget of the process; `guaranteed` connections are held back
/// for it.
#[must_use]
pub const fn port_limits(guaranteed: usize) -> PortLimits {
    // Evicted connections close a moment later.
    PortLimits {
        guaranteed,
        first_request: FIRST_REQUEST,
        ..PortLimits::new(2 * MAX_CONNECTIONS, WhenFull::Wait)
    }
}

/// What a connection has shown so far, in eviction order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum EvictionClass {
    /// No complete request head yet.
    Silent,
    /// Only public or rejected requests so far.
    Unauthorized,
    /// Authorized by a token, session or certificate.
    Authorized,
}

#[derive(Debug)]
struct TrackedConnection {
    network: IpAddr,
    class: EvictionClass,
    /// Number of requests in progress.
    active_requests: u32,
    /// Logical time of the last activity; the clock advances with every activity of any connection.
    last_active: u64,
    evict: Arc<Notify>,
}

#[derive(Debug, Default)]
struct ConnectionTable {
    connections: HashMap<u64, TrackedConnection>,
    clock: u64,
}

impl ConnectionTable {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Evicts one of the connections that match `candidate`. Returns whether there was one to evict.
    fn evict(&mut self, candidate: impl Fn(&TrackedConnection) -> bool) -> bool {
        let evictable = |connection: &TrackedConnection| {
            connection.class < EvictionClass::Authorized || connection.active_requests == 0
        };
        let all =
            self.connections.iter().filter(|(_, connection)| candidate(connection) && evictable(connection));
        let first = all
            .min_by_key(|(_, connection)| (connection.class, connection.last_active))
            .map(|(number, _)| *number);
        let evicted = first.and_then(|number| self.connections.remove(&number));
        evicted.inspect(|evicted| evicted.evict.notify_one()).is_some()
    }
}

/// All open connections.
#[derive(Debug, Default)]
pub(crate) struct ConnectionLimiter(Arc<Mutex<ConnectionTable>>);

fn locked(table: &Mutex<ConnectionTable>) -> MutexGuard<'_, ConnectionTable> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ConnectionLimiter {
    /// Admits a connection, evicting another if needed; returns `None` if none can be evicted.
    pub(crate) fn admit(&self, peer: IpAddr, activity: Arc<Activity>) -> Option<ConnectionSlot> {
        let network = network(peer);
        let mut table = locked(&self.0);
        let here = table.connections.values().filter(|connection| connection.network == network).count();
        let is_free = match (here >= MAX_PER_NETWORK, table.connections.len() >= MAX_CONNECTIONS) {
            (true, _) => table.evict(|connection| connection.network == network),
            (false, true) => table.evict(|_| true),
            (false, false) => true,
        };
        if !is_free {
            return None;
        }
        let (number, evict) = (table.tick(), Arc::new(Notify::new()));
        let connection = TrackedConnection {
            network,
            class: EvictionClass::Silent,
            active_requests: 0,
            last_active: number,
            evict: Arc::clone(&evict),
        };
        table.connections.insert(number, connection);
        Some(ConnectionSlot { table: Arc::clone(&self.0), number, evict, activity })
    }
}

/// An admitted connection; the slot is released on drop.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    table: Arc<Mutex<ConnectionTable>>,
    number: u64,
    evict: Arc<Notify>,
    /// What the accept loop knows of the connection.
    activity: Arc<Activity>,
}

impl ConnectionSlot {
    fn change(&self, change: impl FnOnce(&mut TrackedConnection)) {
        let mut table = locked(&self.table);
        let now = table.tick();
        if let Some(connection) = table.connections.get_mut(&self.number) {
            connection.last_active = now;
            change(connection);
        }
    }

    /// Starts a request, which is in progress until the returned guard is dropped.
    pub(crate) fn begin_request(self: &Arc<Self>) -> ActiveRequest {
        self.change(|connection| {
            connection.class = connection.class.max(EvictionClass::Unauthorized);
            connection.active_requests += 1;
            self.activity.busy();
        });
        ActiveRequest(Arc::clone(self))
    }

    /// Marks the connection as authorized.
    pub(crate) fn authorized(&self) {
        self.change(|connection| connection.class = EvictionClass::Authorized);
    }

    /// Completes when the connection must be closed.
    pub(crate) async fn evicted(&self) {
        tokio::select! {
            () = self.evict.notified() => return,
            () = tokio::time::sleep(FIRST_REQUEST) => {}
        }
        if !self.is_silent() {
            self.evict.notified().await;
        }
    }

    fn is_silent(&self) -> bool {
        let table = locked(&self.table);
        table.connections.get(&self.number).is_none_or(|connection| connection.class == EvictionClass::Silent)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        locked(&self.table).connections.remove(&self.number);
    }
}

/// A request in progress.
#[derive(Debug)]
pub(crate) struct ActiveRequest(Arc<ConnectionSlot>);

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.change(|connection| {
            connection.active_requests = connection.active_requests.saturating_sub(1);
            if connection.active_requests == 0 {
                self.0.activity.idle(Instant::now());
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn address(number: usize) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(u32::try_from(number).expect("an address")))
    }

    fn slot(limiter: &ConnectionLimiter, from: IpAddr) -> Arc<ConnectionSlot> {
        Arc::new(limiter.admit(from, Arc::default()).expect("a slot"))
    }

    fn stays(slot: &ConnectionSlot) -> bool {
        locked(&slot.table).connections.contains_key(&slot.number)
    }

    /// Takes all free slots, from addresses other than `address(0)`.
    fn full(limiter: &ConnectionLimiter) -> Vec<Arc<ConnectionSlot>> {
        let taken = locked(&limiter.0).connections.len();
        (taken..MAX_CONNECTIONS).map(|i| slot(limiter, address(1 + i / MAX_PER_NETWORK))).collect()
    }

    #[test]
    fn one_network_never_takes_all_slots() {
        let limiter = ConnectionLimiter::default();
        let six = |last: u16| -> IpAddr { format!("2001:db8::{last:x}").parse().expect("an address") };
        let held: Vec<_> = (0..600).map(|i| slot(&limiter, six(i))).collect();
        assert_eq!(held.iter().filter(|held| stays(held)).count(), MAX_PER_NETWORK, "of one /64");
        assert!(held[600 - MAX_PER_NETWORK..].iter().all(|held| stays(held)), "the oldest were evicted");
        let other = slot(&limiter, address(0));
        assert!(stays(&other) && stays(&held[600 - MAX_PER_NETWORK]), "other networks caused no eviction");
        drop(held);
        assert_eq!(locked(&limiter.0).connections.len(), 1);
    }

    #[test]
    fn silent_connections_are_evicted_first() {
        let limiter = ConnectionLimiter::default();
        let served = slot(&limiter, address(0));
        let served_request = served.begin_request();
        served.authorized();
        let idle = slot(&limiter, address(0));
        drop(idle.begin_request());
        idle.authorized();
        let unauthorized = slot(&limiter, address(0));
        let public_request = unauthorized.begin_request();
        let silent = full(&limiter);
        let mut admitted = Vec::new();
        let mut admit = |many: usize| {
            for _ in 0..many {
                let new = slot(&limiter, address(1_000 + admitted.len()));
                drop(new.begin_request());
                new.authorized();
                admitted.push(new);
            }
        };
        admit(1);
        assert!(
            !stays(&silent[0]) && silent[1..].iter().all(|one| stays(one)),
            "the oldest silent connection"
        );
        admit(silent.len() - 1);
        assert!(!silent.iter().any(|one| stays(one)) && stays(&unauthorized));
        admit(1);
        assert!(!stays(&unauthorized) && stays(&idle), "a public request does not protect its connection");
        admit(1);
        assert!(!stays(&idle) && stays(&served));
        admit(2 * MAX_CONNECTIONS);
        assert!(stays(&served), "authorized with a request in progress");
        drop((served_request, public_request));
        admit(MAX_CONNECTIONS);
        assert!(!stays(&served));
    }

    #[test]
    fn a_connection_is_rejected_when_none_can_be_evicted() {
        let limiter = ConnectionLimiter::default();
        let mut held: Vec<_> = (0..MAX_PER_NETWORK)
            .map(|_| {
                let slot = slot(&limiter, address(0));
                let request = slot.begin_request();
                slot.authorized();
                (slot, request)
            })
            .collect();
        assert!(limiter.admit(address(0), Arc::default()).is_none());
        assert!(limiter.admit(address(1), Arc::default()).is_some());
        drop(held.pop());
        assert!(limiter.admit(address(0), Arc::default()).is_some());
    }
}
