//! The open connections of a process: how many each listener may have, and which one ends when there is no room.
//!
//! Every connection needs a file descriptor, and the process has a limited number of them. All listeners share one
//! [`ConnectionBudget`]; each has a cap of its own and a number of connections that the others can never take, so that
//! a flood on one port leaves the probes and the operators on another theirs.
//!
//! A connection that has not sent a complete request is *silent*. It ends after [`PortLimits::first_request`], and it is
//! the first to end when a newcomer finds no room. After those, the connection that has waited longest for its client
//! ends, of the network with the most connections: at once if the newcomer's network has far fewer of them, otherwise
//! only after [`MIN_IDLE`]. A connection waits for its client between two requests, while the rest of a body is missing,
//! and while a response is not read; so half a request protects no connection. A connection whose request is being decided or
//! answered never ends this way, and those of operators ([`Activity::trust`]) end last. If none can end, the newcomer
//! waits or is rejected, as [`WhenFull`] says. Where there is room, an idle client that has sent a request is left alone,
//! so the long-lived connections of a proxy stay.
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

/// Time that a connection which has sent a request may wait for its client before a newcomer of the same network can
/// displace it. A probe that comes after a full queue of them waits for this several times over, so it is short.
pub const MIN_IDLE: Duration = Duration::from_millis(100);
/// Time that a new connection has at least to send its request, where newcomers can wait: without it, those who arrive
/// in one moment would displace each other.
pub const MIN_SILENT: Duration = Duration::from_millis(100);
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
/// How many silent connections are a flood, of which the oldest ends at once.
const MANY_SILENT: usize = 16;
/// How often a newcomer that waits looks for a connection that has become old enough to end.
const ADMIT_INTERVAL: Duration = Duration::from_millis(25);
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
    /// Maximum number of open connections of one network. The next one displaces another of the same network, or is
    /// closed if none of them can end.
    pub per_network: usize,
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
        Self {
            max,
            guaranteed: 0,
            per_network: usize::MAX,
            files: 1,
            first_request: FIRST_REQUEST,
            when_full,
        }
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
    /// Connections that a search has found waiting for their clients, the one to end first at the end, and since when.
    idle: Vec<(u64, u64)>,
    /// When the next search may begin.
    next_search: u64,
}

#[derive(Debug)]
struct Tracked {
    network: IpAddr,
    /// When it was accepted.
    since: u64,
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

    /// The oldest silent connection, if it has had `patience` to send its request, or if it is one of many: a flood of
    /// them displaces itself, and not those who have sent a request.
    fn late_silent(&mut self, timeout: Duration, now: u64) -> Option<u64> {
        let number = self.oldest_silent()?;
        let age = now.saturating_sub(self.open.get(&number)?.since);
        let is_silent = |number: &u64| self.open.get(number).is_some_and(|one| one.activity.is_silent());
        // Of the oldest only: counting all would cost as much as all connections together.
        let oldest = self.silent.iter().take(2 * MANY_SILENT);
        let many = || oldest.filter(|(number, _)| is_silent(number)).count() >= MANY_SILENT;
        (age >= timeout.as_micros() as u64 || many()).then_some(number)
    }

    /// The connection of one network to end first, however recently it was used.
    fn first_of(&self, network: IpAddr, now: u64) -> Option<u64> {
        let own = self.open.iter().filter(|(_, one)| one.network == network);
        let ending = own.filter_map(|(number, one)| {
            let is_silent = one.activity.is_silent();
            let since = if is_silent { one.since } else { one.activity.idle_since(now)? };
            Some(((!is_silent, one.activity.is_trusted(), since), *number))
        });
        ending.min().map(|(_, number)| number)
    }

    fn is_network_full(&self, network: IpAddr) -> bool {
        self.of_network(network) >= self.limits.per_network
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

    /// The connection that has waited longest for its client, of the network with the most connections.
    fn longest_idle(&mut self, arrival: IpAddr, now: u64) -> Option<u64> {
        loop {
            while let Some((number, since)) = self.idle.pop() {
                let Some(one) = self.open.get(&number) else { continue };
                if one.activity.idle_since(now) != Some(since) {
                    continue;
                }
                let is_long = now.saturating_sub(since) >= MIN_IDLE.as_micros() as u64;
                if is_long || self.of_network(one.network) > 2 * (self.of_network(arrival) + 1) {
                    return Some(number);
                }
            }
            if now < self.next_search {
                return None;
            }
            self.next_search = now + SEARCH_INTERVAL.as_micros() as u64;
            self.search_idle(now);
            if self.idle.len() == REMEMBERED {
                // There are more, and they may be searched for at once.
                self.next_search = now + 1;
            }
        }
    }

    fn search_idle(&mut self, now: u64) {
        let most = self.networks.values().copied().max().unwrap_or(0);
        let idle = self.open.iter().filter(|(_, one)| self.of_network(one.network) * 2 > most);
        let idle = idle.filter_map(|(number, one)| {
            Some(((one.activity.is_trusted(), one.activity.idle_since(now)?), *number))
        });
        let mut idle: Vec<_> = idle.collect();
        idle.sort_unstable();
        idle.truncate(REMEMBERED);
        self.idle = idle.into_iter().rev().map(|((_, since), number)| (number, since)).collect();
    }
}

impl Table {
    fn has_room(&self, port: usize, network: IpAddr) -> bool {
        if self.ports[port].is_network_full(network) {
            return false;
        }
        let limits = &self.ports[port].limits;
        let others = self.ports.iter().enumerate().filter(|(at, _)| *at != port);
        let held_back: usize = others.map(|(_, port)| port.held_back()).sum();
        self.ports[port].open.len() < limits.max && self.used + held_back + limits.files <= self.files
    }

    /// Ends one connection so that a newcomer on `port` has room. Returns whether there was one to end.
    fn make_room(&mut self, port: usize, arrival: IpAddr, now: u64) -> bool {
        if self.ports[port].is_network_full(arrival) {
            let first = self.ports[port].first_of(arrival, now);
            return first.is_some_and(|number| self.end(port, number));
        }
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
        let timeout = match self.ports[port].limits.when_full {
            WhenFull::Wait => MIN_SILENT,
            WhenFull::Reject(_) => Duration::ZERO,
        };
        let silent = order.iter().find_map(|at| Some((*at, self.ports[*at].late_silent(timeout, now)?)));
        let victim = match silent {
            Some(victim) => Some(victim),
            None => order.iter().find_map(|at| Some((*at, self.ports[*at].longest_idle(arrival, now)?))),
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
    #[must_use]
    pub fn admit(&self, peer: IpAddr) -> Option<ConnectionSlot> {
        let shared = &self.0.shared;
        let now = Instant::now();
        let micros = now.duration_since(shared.base).as_micros() as u64;
        let (port, network) = (self.0.port, network(peer));
        let mut table = shared.table();
        // Two, if another port needs more files for its connections than one of the ended ones had.
        for _ in 0..2 {
            if table.has_room(port, network) {
                break;
            }
            if !table.make_room(port, network, micros) {
                return None;
            }
        }
        if !table.has_room(port, network) {
            return None;
        }
        let number = table.next;
        table.next += 1;
        let activity = Arc::new(Activity::new(shared.base));
        let state = &mut table.ports[port];
        state.silent.push_back((number, now + state.limits.first_request));
        state.insert(number, Tracked { network, since: micros, activity: Arc::clone(&activity) });
        let files = state.limits.files;
        table.used += files;
        Some(ConnectionSlot { port: Arc::clone(&self.0), number, activity })
    }

    /// Returns whether the network of a client has all connections that one may have: it does not wait for the others.
    pub(super) fn is_network_full(&self, peer: IpAddr) -> bool {
        self.0.shared.table().ports[self.0.port].is_network_full(network(peer))
    }

    /// Admits a connection as soon as there is room.
    pub(super) async fn admit_when_free(&self, peer: IpAddr) -> ConnectionSlot {
        loop {
            let mut freed = std::pin::pin!(self.0.shared.freed.notified());
            freed.as_mut().enable();
            if let Some(slot) = self.admit(peer) {
                return slot;
            }
            // Connections become old enough to end without a signal.
            let _ = tokio::time::timeout(ADMIT_INTERVAL, freed).await;
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
    /// What the connection is doing, kept up to date by its task.
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
/// Waits for its client, since some time before the next search.
const WAITING: u64 = 2;
/// Values from here on: waits for its client, since so many microseconds after the base.
const IDLE: u64 = 3;

/// What a connection is doing. Its task stores it here; the accept loop reads it when there is no room.
#[derive(Debug)]
pub struct Activity {
    base: Instant,
    state: AtomicU64,
    is_trusted: AtomicBool,
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
            is_trusted: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            task: Mutex::new(None),
        }
    }

    /// A complete request has arrived and is in progress.
    pub fn busy(&self) {
        self.state.store(BUSY, Ordering::Relaxed);
    }

    /// The client has sent a request, and the connection waits for it since `now`: for another request, for the rest of
    /// one, or until it reads a response.
    pub fn idle(&self, now: Instant) {
        self.state.store(IDLE + now.duration_since(self.base).as_micros() as u64, Ordering::Relaxed);
    }

    /// Like [`Self::idle`], unless no complete request has been sent yet.
    pub fn idle_unless_silent(&self, now: Instant) {
        if !self.is_silent() {
            self.idle(now);
        }
    }

    /// Like [`Self::idle`], without reading the time, which costs as much as a small command. The wait counts from the
    /// first search that finds it.
    pub fn waiting(&self) {
        self.state.store(WAITING, Ordering::Relaxed);
    }

    /// The client is known to be an operator: its connection ends after those of anonymous clients.
    pub fn trust(&self) {
        self.is_trusted.store(true, Ordering::Relaxed);
    }

    /// Returns whether the client is known to be an operator.
    #[must_use]
    pub fn is_trusted(&self) -> bool {
        self.is_trusted.load(Ordering::Relaxed)
    }

    /// Returns whether no complete request has been sent yet.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.state.load(Ordering::Relaxed) == SILENT
    }

    /// Returns whether a complete request is in progress.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        self.state.load(Ordering::Relaxed) == BUSY
    }

    /// Returns since when the connection has waited for its client; `None` if it does not.
    fn idle_since(&self, now: u64) -> Option<u64> {
        match self.state.compare_exchange(WAITING, IDLE + now, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => Some(now),
            Err(state) => state.checked_sub(IDLE),
        }
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
