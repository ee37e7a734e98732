//! Who may be connected to the admin address at once. Operators are few, so connections are; and yet nobody takes all of them:
//!
//! - One place (an address, or the /64 of an IPv6 one) has a part of them, so that others get in whatever it does.
//! - Where there are as many as there may be, of the place or of all, somebody gives way to who comes: first those who have
//!   sent nothing, then those whom nobody has let in, then those who were let in and ask for nothing just now; of each kind
//!   whoever has been quiet for longest. Who was let in and is being answered stays.
//! - Who comes and asks for nothing is not waited for as long as who has asked before.
//!
//! To let them wait to be accepted was rejected: whoever holds connections that do nothing would decide how long that is.

use crate::auth::throttle::prefix;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;

/// Connections at once.
const MAX_CONNECTIONS: usize = 512;
/// Those of one place.
pub(crate) const MAX_PER_NETWORK: usize = 256;
/// How long the first request of a connection may take to arrive, the handshake included.
const FIRST_REQUEST: Duration = Duration::from_secs(5);

/// What is known of somebody who is connected, in the order in which they give way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum EvictionClass {
    /// Has sent nothing, or not yet all of a head.
    Silent,
    /// Has asked for something that anybody may, or was refused.
    Unauthorized,
    /// Was let in by a token, a session or a certificate.
    Authorized,
}

#[derive(Debug)]
struct TrackedConnection {
    network: IpAddr,
    class: EvictionClass,
    /// Answers under way.
    active_requests: u32,
    /// Counts up with everything that anybody does.
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

    /// Makes somebody leave of those who are meant; says whether anybody could.
    fn evict(&mut self, meant: impl Fn(&TrackedConnection) -> bool) -> bool {
        let movable = |connection: &TrackedConnection| {
            connection.class < EvictionClass::Authorized || connection.active_requests == 0
        };
        let all = self.connections.iter().filter(|(_, connection)| meant(connection) && movable(connection));
        let first = all
            .min_by_key(|(_, connection)| (connection.class, connection.last_active))
            .map(|(number, _)| *number);
        let gone = first.and_then(|number| self.connections.remove(&number));
        gone.inspect(|gone| gone.evict.notify_one()).is_some()
    }
}

/// All that there are.
#[derive(Debug, Default)]
pub(crate) struct ConnectionLimiter(Arc<Mutex<ConnectionTable>>);

fn locked(table: &Mutex<ConnectionTable>) -> MutexGuard<'_, ConnectionTable> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ConnectionLimiter {
    /// For somebody who has come; nothing, where nobody can give way.
    pub(crate) fn admit(&self, peer: IpAddr) -> Option<ConnectionSlot> {
        let place = prefix(peer);
        let mut table = locked(&self.0);
        let here = table.connections.values().filter(|connection| connection.network == place).count();
        let is_free = match (here >= MAX_PER_NETWORK, table.connections.len() >= MAX_CONNECTIONS) {
            (true, _) => table.evict(|connection| connection.network == place),
            (false, true) => table.evict(|_| true),
            (false, false) => true,
        };
        if !is_free {
            return None;
        }
        let (number, leave) = (table.tick(), Arc::new(Notify::new()));
        let connection = TrackedConnection {
            network: place,
            class: EvictionClass::Silent,
            active_requests: 0,
            last_active: number,
            evict: Arc::clone(&leave),
        };
        table.connections.insert(number, connection);
        Some(ConnectionSlot { table: Arc::clone(&self.0), number, leave })
    }
}

/// One, until it is dropped.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    table: Arc<Mutex<ConnectionTable>>,
    number: u64,
    leave: Arc<Notify>,
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

    /// A request has come; its answer is under way until what is returned is dropped.
    pub(crate) fn begin_request(self: &Arc<Self>) -> ActiveRequest {
        self.change(|connection| {
            connection.class = connection.class.max(EvictionClass::Unauthorized);
            connection.active_requests += 1;
        });
        ActiveRequest(Arc::clone(self))
    }

    /// Whoever asks has proven who they are.
    pub(crate) fn authorized(&self) {
        self.change(|connection| connection.class = EvictionClass::Authorized);
    }

    /// Comes when it is to be given up.
    pub(crate) async fn evicted(&self) {
        tokio::select! {
            () = self.leave.notified() => return,
            () = tokio::time::sleep(FIRST_REQUEST) => {}
        }
        if !self.is_silent() {
            self.leave.notified().await;
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

/// An answer under way.
#[derive(Debug)]
pub(crate) struct ActiveRequest(Arc<ConnectionSlot>);

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.change(|connection| connection.active_requests = connection.active_requests.saturating_sub(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    fn address(number: usize) -> IpAddr {
        IpAddr::V4(Ipv4Addr::from_bits(u32::try_from(number).expect("an address")))
    }

    fn slot(seats: &ConnectionLimiter, from: IpAddr) -> Arc<ConnectionSlot> {
        Arc::new(seats.admit(from).expect("a seat"))
    }

    fn stays(seat: &ConnectionSlot) -> bool {
        locked(&seat.table).connections.contains_key(&seat.number)
    }

    /// Takes all seats, by addresses that others than `address(0)` have.
    fn full(seats: &ConnectionLimiter) -> Vec<Arc<ConnectionSlot>> {
        let taken = locked(&seats.0).connections.len();
        (taken..MAX_CONNECTIONS).map(|i| slot(seats, address(1 + i / MAX_PER_NETWORK))).collect()
    }

    #[test]
    fn one_network_never_takes_all_slots() {
        let seats = ConnectionLimiter::default();
        let six = |last: u16| -> IpAddr { format!("2001:db8::{last:x}").parse().expect("an address") };
        let held: Vec<_> = (0..600).map(|i| slot(&seats, six(i))).collect();
        assert_eq!(held.iter().filter(|held| stays(held)).count(), MAX_PER_NETWORK, "of one /64");
        assert!(held[600 - MAX_PER_NETWORK..].iter().all(|held| stays(held)), "the oldest have left");
        let other = slot(&seats, address(0));
        assert!(stays(&other) && stays(&held[600 - MAX_PER_NETWORK]), "and for others nobody had to");
        drop(held);
        assert_eq!(locked(&seats.0).connections.len(), 1);
    }

    #[test]
    fn silent_connections_are_evicted_first() {
        let seats = ConnectionLimiter::default();
        let served = slot(&seats, address(0));
        let answer = served.begin_request();
        served.authorized();
        let idle = slot(&seats, address(0));
        drop(idle.begin_request());
        idle.authorized();
        let stranger = slot(&seats, address(0));
        let asks = stranger.begin_request();
        let silent = full(&seats);
        let mut came = Vec::new();
        let mut come = |many: usize| {
            for _ in 0..many {
                let new = slot(&seats, address(1_000 + came.len()));
                drop(new.begin_request());
                new.authorized();
                came.push(new);
            }
        };
        come(1);
        assert!(!stays(&silent[0]) && silent[1..].iter().all(|one| stays(one)), "the oldest of the silent");
        come(silent.len() - 1);
        assert!(!silent.iter().any(|one| stays(one)) && stays(&stranger));
        come(1);
        assert!(!stays(&stranger) && stays(&idle), "an answer that anybody may have protects nobody");
        come(1);
        assert!(!stays(&idle) && stays(&served));
        come(2 * MAX_CONNECTIONS);
        assert!(stays(&served), "who was let in and is being answered stays");
        drop((answer, asks));
        come(MAX_CONNECTIONS);
        assert!(!stays(&served));
    }

    #[test]
    fn a_connection_is_rejected_when_none_can_be_evicted() {
        let seats = ConnectionLimiter::default();
        let mut held: Vec<_> = (0..MAX_PER_NETWORK)
            .map(|_| {
                let seat = slot(&seats, address(0));
                let answer = seat.begin_request();
                seat.authorized();
                (seat, answer)
            })
            .collect();
        assert!(seats.admit(address(0)).is_none());
        assert!(seats.admit(address(1)).is_some());
        drop(held.pop());
        assert!(seats.admit(address(0)).is_some());
    }
}
