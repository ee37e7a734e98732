//! The open connections of a process: how many each listener may have, and which one ends when there is no room.
//!
//! Every connection needs a file descriptor, and the process has a limited number of them. All listeners share one
//! [`ConnectionBudget`]; each has a cap of its own and a number of connections that the others can never take, so that
//! a flood on one port leaves the probes and the operators on another theirs.
//!
//! A connection that has not sent a request is *silent*. It ends after [`PortLimits::first_request`], and it is the
//! first to end when a newcomer finds no room. After those, the connection that has been idle longest ends, of the
//! network with the most connections: at once if the newcomer's network has far fewer of them, otherwise only after
//! [`MIN_IDLE`]. A connection with a request in progress never ends this way. If none can end, the newcomer waits or is
//! rejected, as [`WhenFull`] says. Where there is room, an idle client that has sent a request is left alone, so the
//! long-lived connections of a proxy stay.
//!
//! Rejected: letting every newcomer wait in the kernel's queue, because clients that hold silent connections would
//! determine how long that takes; and a cap per address alone, because many clients share the address of a proxy.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Time that a client which has sent a request may be idle before a newcomer of its own network can displace it.
pub const MIN_IDLE: Duration = Duration::from_secs(5);
/// Time beyond which a silent connection is closed although the protocol has not done so: one that answers a late client
/// comes first.
pub const LATE: Duration = Duration::from_secs(1);
/// Default of [`PortLimits::first_request`].
pub const FIRST_REQUEST: Duration = Duration::from_secs(10);
/// How many idle connections one search for them remembers: searching for each newcomer would cost as much as all
/// connections together.
const REMEMBERED: usize = 64;
/// How many files may be on their way to being closed while another connection is accepted.
const MAX_CLOSING: usize = 8;
/// How long an accept waits for them.
const MAX_CLOSING_TIME: Duration = Duration::from_secs(1);
/// Minimum time between two searches that found few: a flood that is rejected must not search for each connection.
const SEARCH_INTERVAL: Duration = Duration::from_millis(50);

/// What happens to a client that connects while there is no room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenFull {
    /// It waits until there is.
    Wait,
    /// It is sent these bytes and closed.
    Reject(&'static [u8]),
}

/// Limits of one listener.
#[derive(Clone, Copy, Debug)]
pub struct PortLimits {
    /// Maximum number of open connections.
    pub max: usize,
    /// Number of connections that no other listener can take.
    pub guaranteed: usize,
    /// File descriptors that one connection needs: 2 for a proxy, which opens another one to an upstream.
    pub files: usize,
    /// Time that a new connection has for its first complete request, including the TLS handshake.
    pub first_request: Duration,
    /// What happens to a client that connects while there is no room.
    pub when_full: WhenFull,
}

impl PortLimits {
    /// Limits for `max` connections of one file each, with the default time for the first request.
    #[must_use]
    pub const fn new(max: usize, when_full: WhenFull) -> Self {
        Self { max, guaranteed: 0, files: 1, first_request: FIRST_REQUEST, when_full }
    }
}

/// The file descriptors that all listeners of a process share.
#[derive(Clone, Debug)]
pub struct ConnectionBudget(Arc<Shared>);

impl ConnectionBudget {
    /// A budget of `files` file descriptors.
    #[must_use]
    pub fn new(files: usize) -> Self {
        let table = Table { files, used: 0, closing: 0, next: 0, ports: Vec::new() };
        Self(Arc::new(Shared { table: Mutex::new(table), freed: Notify::new(), base: Instant::now() }))
    }

    /// Opens a port within the budget.
    #[must_use]
    pub fn port(&self, limits: PortLimits) -> ConnectionSlots {
        let mut table = self.0.table();
        table.ports.push(Port {
            limits,
            open: HashMap::new(),
            networks: HashMap::new(),
            silent: VecDeque::new(),
            idle: Vec::new(),
            next_search: 0,
        });
        ConnectionSlots(Arc::new(PortHandle { shared: Arc::clone(&self.0), port: table.ports.len() - 1 }))
    }
}

/// Without a limit other than those of the ports.
impl Default for ConnectionBudget {
    fn default() -> Self {
        Self::new(usize::MAX / 4)
    }
}

/// The connections that a listener may have open.
#[derive(Clone, Debug)]
pub struct ConnectionSlots(Arc<PortHandle>);

#[derive(Debug)]
struct PortHandle {
    shared: Arc<Shared>,
    port: usize,
}

impl Drop for PortHandle {
    fn drop(&mut self) {
        // A closed listener keeps nothing from the others.
        self.shared.table().ports[self.port].limits.guaranteed = 0;
    }
}

#[derive(Debug)]
struct Shared {
    table: Mutex<Table>,
    /// A slot was freed.
    freed: Notify,
    base: Instant,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct Table {
    files: usize,
    used: usize,
    /// Files of connections that were ended and whose tasks have not closed them yet.
    closing: usize,
    next: u64,
    ports: Vec<Port>,
}

#[derive(Debug)]
struct Port {
    limits: PortLimits,
    open: HashMap<u64, Tracked>,
    /// Number of open connections by network.
    networks: HashMap<IpAddr, usize>,
    /// Connections that were silent when accepted, the oldest first, with the time at which a silent one ends.
    silent: VecDeque<(u64, Instant)>,
    /// Connections that a search has found idle, the one to end first at the end, and since when.
    idle: Vec<(u64, u64)>,
    /// When the next search may begin.
    next_search: u64,
}

#[derive(Debug)]
struct Tracked {
    network: IpAddr,
    activity: Arc<Activity>,
}

impl Port {
    fn files(&self) -> usize {
        self.open.len() * self.limits.files
    }

    /// Files that others must leave to this port.
    fn held_back(&self) -> usize {
        self.limits.guaranteed.saturating_sub(self.open.len()) * self.limits.files
    }

    fn oldest_silent(&mut self) -> Option<u64> {
        while let Some((number, _)) = self.silent.front().copied() {
            if self.open.get(&number).is_some_and(|one| one.activity.is_silent()) {
                return Some(number);
            }
            self.silent.pop_front();
        }
        None
    }

    fn of_network(&self, network: IpAddr) -> usize {
        self.networks.get(&network).copied().unwrap_or(0)
    }

    fn insert(&mut self, number: u64, one: Tracked) {
        *self.networks.entry(one.network).or_default() += 1;
        self.open.insert(number, one);
    }

    fn remove(&mut self, number: u64) -> Option<Tracked> {
        let one = self.open.remove(&number)?;
        if let Entry::Occupied(mut count) = self.networks.entry(one.network) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        Some(one)
    }

    /// The connection that has been idle longest, of the network with the most connections.
    fn longest_idle(&mut self, newcomer: IpAddr, now: u64) -> Option<u64> {
        loop {
            while let Some((number, since)) = self.idle.pop() {
                let Some(one) = self.open.get(&number) else { continue };
                if one.activity.idle_since() != Some(since) {
                    continue;
                }
                let is_long = now.saturating_sub(since) >= MIN_IDLE.as_micros() as u64;
                if is_long || self.of_network(one.network) > 2 * (self.of_network(newcomer) + 1) {
                    return Some(number);
                }
            }
            if now < self.next_search {
                return None;
            }
            self.next_search = now + SEARCH_INTERVAL.as_micros() as u64;
            self.search_idle();
            if self.idle.len() == REMEMBERED {
                // There are more, and they may be searched for at once.
                self.next_search = now + 1;
            }
        }
    }

    fn search_idle(&mut self) {
        let most = self.networks.values().copied().max().unwrap_or(0);
        let idle = self.open.iter().filter(|(_, one)| self.of_network(one.network) * 2 > most);
        let idle = idle.filter_map(|(number, one)| Some((*number, one.activity.idle_since()?)));
        self.idle = idle.collect();
        self.idle.sort_unstable_by_key(|(number, since)| std::cmp::Reverse((*since, *number)));
        self.idle.drain(..self.idle.len().saturating_sub(REMEMBERED));
    }
}

impl Table {
    fn has_room(&self, port: usize) -> bool {
        let limits = &self.ports[port].limits;
        let others = self.ports.iter().enumerate().filter(|(at, _)| *at != port);
        let held_back: usize = others.map(|(_, port)| port.held_back()).sum();
        self.ports[port].open.len() < limits.max && self.used + held_back + limits.files <= self.files
    }

    /// Ends one connection so that a newcomer on `port` has room. Returns whether there was one to end.
    fn make_room(&mut self, port: usize, newcomer: IpAddr, now: u64) -> bool {
        let mut order = vec![port];
        if self.ports[port].open.len() < self.ports[port].limits.max {
            // The budget is spent. Ports give back what is above their guarantee, the fullest first.
            order = (0..self.ports.len())
                .filter(|at| {
                    let other = &self.ports[*at];
                    *at == port || other.open.len() > other.limits.guaranteed
                })
                .collect();
            order.sort_by_key(|at| std::cmp::Reverse(self.ports[*at].files()));
        }
        let silent = order.iter().find_map(|at| Some((*at, self.ports[*at].oldest_silent()?)));
        let victim = match silent {
            Some(victim) => Some(victim),
            None => order.iter().find_map(|at| Some((*at, self.ports[*at].longest_idle(newcomer, now)?))),
        };
        victim.is_some_and(|(at, number)| self.end(at, number))
    }

    fn end(&mut self, port: usize, number: u64) -> bool {
        let Some(ended) = self.ports[port].remove(number) else { return false };
        let files = self.ports[port].limits.files;
        self.used -= files;
        self.closing += files;
        ended.activity.end();
        true
    }
}

impl ConnectionSlots {
    /// Slots for `max` connections, in a budget of their own.
    #[must_use]
    pub fn new(max: usize, when_full: WhenFull) -> Self {
        ConnectionBudget::default().port(PortLimits::new(max, when_full))
    }

    /// Changes the maximum number of connections, of which those above it stay open, and the time for the first request
    /// of new ones.
    pub fn change(&self, max: usize, first_request: Duration) {
        {
            let limits = &mut self.0.shared.table().ports[self.0.port].limits;
            (limits.max, limits.first_request) = (max, first_request);
        }
        self.0.shared.freed.notify_waiters();
    }

    pub(super) fn when_full(&self) -> WhenFull {
        self.0.shared.table().ports[self.0.port].limits.when_full
    }

    /// Admits a connection, ending another if there is no room. `None`: none can end now.
    pub(super) fn admit(&self, peer: IpAddr) -> Option<ConnectionSlot> {
        let shared = &self.0.shared;
        let now = Instant::now();
        let micros = now.duration_since(shared.base).as_micros() as u64;
        let (port, network) = (self.0.port, network(peer));
        let mut table = shared.table();
        // Two, if another port needs more files for its connections than one of the ended ones had.
        for _ in 0..2 {
            if table.has_room(port) {
                break;
            }
            if !table.make_room(port, network, micros) {
                return None;
            }
        }
        if !table.has_room(port) {
            return None;
        }
        let number = table.next;
        table.next += 1;
        let activity = Arc::new(Activity::new(shared.base));
        let state = &mut table.ports[port];
        state.silent.push_back((number, now + state.limits.first_request));
        state.insert(number, Tracked { network, activity: Arc::clone(&activity) });
        let files = state.limits.files;
        table.used += files;
        Some(ConnectionSlot { port: Arc::clone(&self.0), number, activity })
    }

    /// Admits a connection as soon as there is room.
    pub(super) async fn admit_when_free(&self, peer: IpAddr) -> ConnectionSlot {
        loop {
            let mut freed = std::pin::pin!(self.0.shared.freed.notified());
            freed.as_mut().enable();
            if let Some(slot) = self.admit(peer) {
                return slot;
            }
            // Idle connections become old enough to end without a signal.
            let _ = tokio::time::timeout(Duration::from_millis(200), freed).await;
            self.end_silent();
        }
    }

    /// Waits while many ended connections still have their files: those who took their slots would find none. Not for
    /// long, because a connection that does not close must not keep newcomers out.
    pub(super) async fn closed(&self) {
        let deadline = Instant::now() + MAX_CLOSING_TIME;
        loop {
            let mut freed = std::pin::pin!(self.0.shared.freed.notified());
            freed.as_mut().enable();
            if self.0.shared.table().closing <= MAX_CLOSING {
                return;
            }
            if tokio::time::timeout_at(deadline, freed).await.is_err() {
                return;
            }
        }
    }

    /// Ends the connections whose first request is overdue. Returns when the next one may be.
    pub(super) fn end_silent(&self) -> Option<Instant> {
        let now = Instant::now();
        let port = self.0.port;
        let mut table = self.0.shared.table();
        while let Some(number) = table.ports[port].oldest_silent() {
            let due = table.ports[port].silent.front().map(|(_, due)| *due)?;
            if due > now {
                return Some(due);
            }
            table.end(port, number);
        }
        None
    }

    /// Returns the number of open connections.
    #[must_use]
    pub fn open(&self) -> usize {
        self.0.shared.table().ports[self.0.port].open.len()
    }
}

/// One admitted connection; dropping it frees its slot.
#[derive(Debug)]
pub struct ConnectionSlot {
    port: Arc<PortHandle>,
    number: u64,
    activity: Arc<Activity>,
}

impl ConnectionSlot {
    /// What the connection is doing, to be kept up to date by whoever serves it.
    #[must_use]
    pub fn activity(&self) -> Arc<Activity> {
        Arc::clone(&self.activity)
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut table = self.port.shared.table();
        let files = table.ports[self.port.port].limits.files;
        match table.ports[self.port.port].remove(self.number) {
            Some(_) => table.used -= files,
            // Of an ended connection, another one has the slot.
            None => table.closing -= files,
        }
        drop(table);
        self.port.shared.freed.notify_waiters();
    }
}

const SILENT: u64 = 0;
const BUSY: u64 = 1;
/// Values from here on: idle, since so many microseconds after the base.
const IDLE: u64 = 2;

/// What a connection is doing. Whoever serves it stores it here; the accept loop reads it when there is no room.
#[derive(Debug)]
pub struct Activity {
    base: Instant,
    state: AtomicU64,
    has_ended: AtomicBool,
    task: Mutex<Option<Waker>>,
}

/// The activity of a connection that no listener tracks.
impl Default for Activity {
    fn default() -> Self {
        Self::new(Instant::now())
    }
}

impl Activity {
    const fn new(base: Instant) -> Self {
        Self {
            base,
            state: AtomicU64::new(SILENT),
            has_ended: AtomicBool::new(false),
            task: Mutex::new(None),
        }
    }

    /// A complete request has arrived and is in progress.
    pub fn busy(&self) {
        self.state.store(BUSY, Ordering::Relaxed);
    }

    /// The client has sent a request, and the connection waits for the next one since `now`.
    pub fn idle(&self, now: Instant) {
        self.state.store(IDLE + now.duration_since(self.base).as_micros() as u64, Ordering::Relaxed);
    }

    /// Like [`Self::idle`], unless no request has been sent yet.
    pub fn idle_unless_silent(&self, now: Instant) {
        if !self.is_silent() {
            self.idle(now);
        }
    }

    /// Returns whether no request has been sent yet.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.state.load(Ordering::Relaxed) == SILENT
    }

    fn idle_since(&self) -> Option<u64> {
        self.state.load(Ordering::Relaxed).checked_sub(IDLE)
    }

    /// Returns whether the connection must end.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Ready when the connection must end. Until then the task is registered to be woken.
    pub fn poll_ended(&self, cx: &mut Context<'_>) -> Poll<()> {
        {
            let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
            if task.as_ref().is_none_or(|task| !task.will_wake(cx.waker())) {
                *task = Some(cx.waker().clone());
            }
        }
        if self.has_ended() { Poll::Ready(()) } else { Poll::Pending }
    }

    fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            task.wake();
        }
    }
}

/// Returns the network of an address: the address itself, or the /64 of an IPv6 address, since a client usually has all
/// of it.
#[must_use]
pub fn network(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V4(four) => IpAddr::V4(four),
        IpAddr::V6(six) => IpAddr::V6(Ipv6Addr::from_bits(six.to_bits() & (u128::MAX << 64))),
    }
}

#[cfg(test)]
mod tests;
