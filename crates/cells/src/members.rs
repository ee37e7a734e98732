//! Membership: the configured peers, which of them answer, and which cell owns a counter.
//!
//! Every batch is a heartbeat. A peer is *silent* if the last request that it answered was sent longer ago than the
//! configured time, by this cell's clock alone: clocks are never compared between cells.

mod displaced;
mod division;
mod majority;
mod tenure;

use crate::message::{Hello, Sighting, Sign};
use crate::roster::{MAX_LEARNED, PeerChanges, Roster};
use arc_swap::{ArcSwap, ArcSwapOption};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tollgate_core::{CounterKey, CounterOwner, KeyPart, StableHasher, TimeDelta, Timestamp};

pub(crate) use division::{Division, WHOLE};
use tenure::Tenure;
pub(crate) use tenure::{Kept, Known, StoreClock, TenureRecord};

/// A configured peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerConfig {
    /// Region of the peer.
    pub region: String,
    /// Where it is reached, for links and for labels.
    pub address: String,
    /// What its counter store is called: peers with the same name are nodes of one cell, of which one receives what was
    /// consumed, and one is asked.
    pub store: String,
}

impl PeerConfig {
    /// Creates a peer that is a cell of its own.
    #[must_use]
    pub fn new(region: impl Into<String>, address: impl Into<String>) -> Self {
        let (region, address) = (region.into(), address.into());
        Self { store: address.clone(), region, address }
    }
}

/// Settings of a cell.
#[derive(Clone, Debug)]
pub struct CellConfig {
    /// Name of this cell, unique among all cells.
    pub cell: String,
    /// Region of this cell.
    pub region: String,
    /// The other cells; empty if they are learned.
    pub peers: Vec<PeerConfig>,
    /// Whether the other cells are learned while the process runs ([`Members::set_peers`]). Then no hash selects owners:
    /// cells that know of different ones would select different ones.
    pub learns_peers: bool,
    /// Time between two batches of consumption.
    pub tick: TimeDelta,
    /// Time without an answer after which a peer counts as silent.
    pub silence: TimeDelta,
    /// Deadline of a request to another cell.
    pub deadline: TimeDelta,
    /// Maximum number of counters that wait for one peer.
    pub max_pending: usize,
    /// Weights of the regions; equal for all cells if empty.
    pub weights: Vec<(String, u64)>,
    /// Whether the cell's own counters outlive this process.
    pub keeps_counters: bool,
    /// Index of this cell among those of its region.
    pub rank: u32,
}

impl CellConfig {
    /// Creates the settings of a cell with the default times.
    #[must_use]
    pub fn new(cell: impl Into<String>, region: impl Into<String>, peers: Vec<PeerConfig>) -> Self {
        Self {
            cell: cell.into(),
            region: region.into(),
            peers,
            learns_peers: false,
            tick: TimeDelta::from_millis(200),
            silence: TimeDelta::from_secs(2),
            deadline: TimeDelta::from_millis(150),
            max_pending: 65_536,
            weights: Vec::new(),
            keeps_counters: false,
            rank: 0,
        }
    }
}

#[derive(Default)]
struct Peer {
    /// Its first message, once it has been reached.
    hello: ArcSwapOption<Hello>,
    /// Whether the link on which that came is open.
    is_linked: AtomicBool,
    /// When the last request was sent that it answered, in microseconds; 0 for never.
    answered: AtomicU64,
    /// When it last sent a request.
    requested: AtomicU64,
    /// Last sign of life, also through other cells.
    seen: AtomicU64,
    /// When it last refused this process because it reaches another one under this cell's name; 0 for never.
    displaced: AtomicU64,
    /// When what was sent that it last answered, whether it applied that or not; and for how long it could then decide nothing
    /// that a hash gives it, in milliseconds.
    heard_at: AtomicU64,
    unable_for: AtomicU64,
    /// The cells that have answered it, as it last said.
    view: Mutex<Vec<String>>,
}

/// The cell that decides a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decider {
    /// This cell.
    Own,
    /// The peer with this index.
    Peer(usize),
    /// None can be determined.
    Nobody(&'static str),
}

/// In the place of a peer's index: a living cell that this one has not reached since it started.
const UNREACHED: usize = usize::MAX;
/// Cells of which signs are kept although they have not been reached: more than are ever configured.
const MAX_UNREACHED: usize = 256;

/// A cell that this one has not reached since it started.
struct Unreached {
    name: String,
    /// Its last sign, in microseconds, and its last request to this cell; 0 for never.
    seen: u64,
    requested: u64,
}

/// Living cells: their names, and which peers they are.
type Living = Vec<(String, Option<usize>)>;

/// The cells and their state.
pub struct Members {
    config: CellConfig,
    peers: Vec<Peer>,
    roster: ArcSwap<Roster>,
    /// Whether the peers are known: they are configured, or have been learned once.
    are_peers_known: AtomicBool,
    started_at: Timestamp,
    incarnation: u64,
    /// Since when a majority answers, and its store has not been down for too long, in microseconds; 0 if that is not so.
    able_since: AtomicU64,
    /// Whether that has been so for long enough to decide as an owner that a hash selects.
    has_joined: AtomicBool,
    /// When it first was, in microseconds.
    first_joined_at: AtomicU64,
    /// When this cell could last decide what a hash gives it: a majority answered, and its store took charges.
    able_at: AtomicU64,
    /// Whether its store takes no charges.
    is_store_down: AtomicBool,
    /// Since when it does, in microseconds; 0 while it does not.
    store_up_since: AtomicU64,
    /// The time of the answers of a majority, at the last refresh.
    majority_at: AtomicU64,
    /// Whether the others decide what a hash would give this cell, because it could not for too long.
    is_left_out: AtomicBool,
    /// Locked by a refresh.
    refreshing: Mutex<()>,
    /// The last refresh.
    refreshed_at: AtomicU64,
    /// The longest silence time of all cells, in microseconds.
    longest_silence: AtomicU64,
    /// How often, and when last, this cell may have begun to decide counters that another decided before.
    moves: AtomicU64,
    gained_at: AtomicU64,
    /// Since when this cell knows what has been counted of what a hash gives it.
    tenure: Mutex<Tenure>,
    /// Cells of which there are signs, from others or by their requests, and that this one has not reached. Locked while a
    /// peer's first message is recorded: a cell is there or among the peers.
    unreached: Mutex<Vec<Unreached>>,
    /// The cells that owners are chosen from: their names and peers.
    living: Mutex<Arc<Living>>,
}

impl Members {
    /// Creates the state of a process that starts at `now`. `incarnation` is a random number.
    #[must_use]
    pub fn new(config: CellConfig, incarnation: u64, now: Timestamp) -> Self {
        let slots = if config.learns_peers { MAX_LEARNED } else { config.peers.len() };
        let own = (config.cell.clone(), None);
        let roster = Roster::new(config.peers.iter().cloned().map(Some).collect());
        Self {
            peers: (0..slots).map(|_| Peer::default()).collect(),
            roster: ArcSwap::from_pointee(roster),
            are_peers_known: AtomicBool::new(!config.learns_peers),
            started_at: now,
            incarnation,
            able_since: AtomicU64::new(0),
            has_joined: AtomicBool::new(false),
            first_joined_at: AtomicU64::new(u64::MAX),
            able_at: AtomicU64::new(now.as_micros()),
            is_store_down: AtomicBool::new(false),
            store_up_since: AtomicU64::new(0),
            majority_at: AtomicU64::new(now.as_micros()),
            is_left_out: AtomicBool::new(false),
            refreshing: Mutex::default(),
            refreshed_at: AtomicU64::new(0),
            unreached: Mutex::default(),
            longest_silence: AtomicU64::new(config.silence.as_micros()),
            moves: AtomicU64::new(0),
            gained_at: AtomicU64::new(0),
            tenure: Mutex::default(),
            living: Mutex::new(Arc::new(vec![own])),
            config,
        }
    }

    /// Returns the settings.
    #[must_use]
    pub const fn config(&self) -> &CellConfig {
        &self.config
    }

    /// Returns the number of indexes that peers may have.
    #[must_use]
    pub const fn slots(&self) -> usize {
        self.peers.len()
    }

    /// Returns the peer with this index.
    #[must_use]
    pub fn peer(&self, at: usize) -> Option<PeerConfig> {
        self.roster.load().get(at).cloned()
    }

    /// Returns the number of other cells.
    #[must_use]
    pub fn other_cells(&self) -> usize {
        self.roster.load().cells.len()
    }

    /// Replaces the learned peers. One that is gone is forgotten; one that stays keeps its index.
    pub fn set_peers(&self, peers: &[PeerConfig]) -> PeerChanges {
        let (roster, changes) = self.roster.load().with_peers(peers);
        self.roster.store(Arc::new(roster));
        self.are_peers_known.store(true, Ordering::Relaxed);
        for at in &changes.removed {
            if let Some(peer) = self.peers.get(*at) {
                peer.hello.store(None);
                peer.answered.store(0, Ordering::Relaxed);
                peer.requested.store(0, Ordering::Relaxed);
                peer.seen.store(0, Ordering::Relaxed);
                peer.displaced.store(0, Ordering::Relaxed);
                peer.unable_for.store(0, Ordering::Relaxed);
                peer.heard_at.store(0, Ordering::Relaxed);
                peer.view.lock().unwrap_or_else(PoisonError::into_inner).clear();
            }
        }
        changes
    }

    /// Returns the number of this process.
    #[must_use]
    pub const fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Returns a fingerprint of the configured regions, the number of cells in each, and their weights; 0 if cells are
    /// learned, because what is known of them may differ for a moment.
    #[must_use]
    pub fn cells_check(&self) -> u64 {
        if self.config.learns_peers {
            return 0;
        }
        let roster = self.roster.load();
        let mut regions: Vec<&str> = roster.cells.iter().map(|cell| roster.region_of(cell)).collect();
        regions.push(&self.config.region);
        regions.sort_unstable();
        let mut hasher = StableHasher::default();
        regions.iter().for_each(|region| hasher.bytes(region.as_bytes()));
        for (region, weight) in &self.config.weights {
            hasher.bytes(region.as_bytes());
            hasher.number(*weight);
        }
        hasher.finish()
    }

    /// Returns the first node of a cell that answers. A learned one must also have had an answer of this cell: until it
    /// knows this cell, it reports no consumption to it.
    fn answering_node(&self, cell: &[usize], now: Timestamp) -> Option<usize> {
        let knows_own = |peer: &Peer| {
            let view = peer.view.lock().unwrap_or_else(PoisonError::into_inner);
            view.contains(&self.config.cell)
        };
        let answers = |peer: &usize| {
            !self.is_silent(*peer, now) && (!self.config.learns_peers || knows_own(&self.peers[*peer]))
        };
        cell.iter().copied().find(answers)
    }

    /// Returns the node of each other cell that receives consumption and charges: the first that answers. Second, the
    /// others.
    #[must_use]
    pub fn contacts(&self, now: Timestamp) -> Vec<(usize, Vec<usize>)> {
        let contact = |cell: &Vec<usize>| {
            let first = cell.iter().copied().find(|peer| !self.is_silent(*peer, now)).unwrap_or(cell[0]);
            (first, cell.iter().copied().filter(|peer| *peer != first).collect())
        };
        self.roster.load().cells.iter().map(contact).collect()
    }

    /// Records the first message of a peer.
    pub fn on_hello(&self, peer: usize, hello: Hello) {
        if let Some(peer) = self.peers.get(peer) {
            self.longest_silence.fetch_max(hello.silence.unwrap_or(0), Ordering::Relaxed);
            let mut unreached = self.unreached.lock().unwrap_or_else(PoisonError::into_inner);
            // Its signs stay known: until its first answer others tell of it, or this cell would take over what it owns.
            if let Some(at) = unreached.iter().position(|known| known.name == hello.cell) {
                let known = unreached.swap_remove(at);
                peer.seen.fetch_max(known.seen, Ordering::Relaxed);
                peer.requested.fetch_max(known.requested, Ordering::Relaxed);
            }
            // So do those of the other nodes of its cell.
            for other in self.roster.load().indexes().map(|at| &self.peers[at]) {
                if other.hello.load().as_ref().is_some_and(|known| known.cell == hello.cell) {
                    peer.seen.fetch_max(other.seen.load(Ordering::Relaxed), Ordering::Relaxed);
                }
            }
            peer.hello.store(Some(Arc::new(hello)));
            drop(unreached);
            peer.is_linked.store(true, Ordering::Relaxed);
            peer.displaced.store(0, Ordering::Relaxed);
        }
    }

    /// Records that the link to a peer has ended.
    pub fn on_unlinked(&self, peer: usize) {
        if let Some(peer) = self.peers.get(peer) {
            peer.is_linked.store(false, Ordering::Relaxed);
        }
    }

    /// Returns whether another process than the one that sends this is reached under its name: a copy of a cell, or one that
    /// its replacement runs beside, would admit a cell's part once more. Nodes that share a store have one name.
    #[must_use]
    pub fn has_other_process(&self, from: &Hello, now: Timestamp) -> bool {
        let is_other = |at: usize| {
            let (peer, hello) = (&self.peers[at], self.peers[at].hello.load());
            let hello = hello.as_ref().filter(|_| peer.is_linked.load(Ordering::Relaxed));
            hello.is_some_and(|known| known.cell == from.cell && known.incarnation != from.incarnation)
                && !self.is_silent(at, now)
        };
        !self.config.keeps_counters && self.roster.load().indexes().any(is_other)
    }

    /// Returns the first message of a peer.
    #[must_use]
    pub fn hello(&self, peer: usize) -> Option<Arc<Hello>> {
        self.peers.get(peer).and_then(|peer| peer.hello.load_full())
    }

    /// Records that a peer answered a request that was sent at `sent`, and which cells it has heard of.
    pub fn on_answer(&self, peer: usize, sent: Timestamp, seen: &[Sighting], now: Timestamp) {
        if let Some(peer) = self.peers.get(peer) {
            peer.answered.fetch_max(sent.as_micros(), Ordering::Relaxed);
            let answered = seen.iter().filter(|seen| seen.sign == Sign::Answered);
            let view = answered.map(|seen| seen.cell.clone()).collect();
            *peer.view.lock().unwrap_or_else(PoisonError::into_inner) = view;
        }
        self.on_heard(peer, sent, seen, now);
    }

    /// Records that a peer answered what was sent at `sent`, although it may not have applied it, and which cells it has heard of.
    pub fn on_heard(&self, peer: usize, sent: Timestamp, seen: &[Sighting], now: Timestamp) {
        let Some(peer) = self.peers.get(peer) else { return };
        peer.seen.fetch_max(now.as_micros(), Ordering::Relaxed);
        // What it said before its last answer is out of date: it may decide again by now.
        if peer.heard_at.load(Ordering::Relaxed) <= sent.as_micros() {
            let unable_for = seen.iter().find(|seen| seen.sign == Sign::Able).map_or(0, |seen| seen.age);
            peer.unable_for.store(unable_for, Ordering::Relaxed);
            peer.heard_at.fetch_max(sent.as_micros(), Ordering::Release);
        }
        // Of two cells in majorities of their own, the one that both have tells each of the other.
        for Sighting { cell, age, .. } in seen.iter().filter(|seen| seen.sign != Sign::Able) {
            let at = now.as_micros().saturating_sub(age.saturating_mul(1_000));
            self.on_sign(cell, at, false);
        }
    }

    /// Records a request of the cell with this name.
    pub fn on_request(&self, cell: &str, now: Timestamp) {
        self.on_sign(cell, now.as_micros(), true);
    }

    /// Records a sign of a cell: a request that it sent to this one, or what another has heard of it.
    fn on_sign(&self, cell: &str, at: u64, is_request: bool) {
        let requested = if is_request { at } else { 0 };
        let mut is_reached = cell == self.config.cell;
        for peer in self.roster.load().indexes().map(|at| &self.peers[at]) {
            if peer.hello.load().as_ref().is_some_and(|hello| hello.cell == cell) {
                peer.seen.fetch_max(at, Ordering::Relaxed);
                peer.requested.fetch_max(requested, Ordering::Relaxed);
                is_reached = true;
            }
        }
        if !is_reached {
            self.on_sign_of_unreached(cell, at, requested);
        }
    }

    #[cold]
    fn on_sign_of_unreached(&self, cell: &str, at: u64, requested: u64) {
        let mut unreached = self.unreached.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = unreached.iter_mut().find(|known| known.name == cell) {
            (known.seen, known.requested) = (known.seen.max(at), known.requested.max(requested));
        } else if unreached.len() < MAX_UNREACHED {
            unreached.push(Unreached { name: cell.to_owned(), seen: at, requested });
        }
    }

    /// Returns the cells that have given a sign of life, and how long ago; and when this one could decide as an
    /// owner that a hash selects.
    #[must_use]
    pub fn sightings(&self, now: Timestamp) -> Vec<Sighting> {
        let since = |at: u64| now.since(Timestamp::from_micros(at));
        // Only what this cell has seen itself: signs must not go round in circles.
        let seen = |cell: &str, answered: u64, requested: u64| {
            let (answered, requested) = (since(answered), since(requested));
            let (age, sign) = match answered < self.config.silence {
                true => (answered, Sign::Answered),
                false if requested < self.owner_silence() => (requested, Sign::Requested),
                false => return None,
            };
            Some(Sighting { cell: cell.to_owned(), age: age.as_micros() / 1_000, sign })
        };
        let of_peer = |peer: &Peer| {
            let [answered, requested] =
                [&peer.answered, &peer.requested].map(|at| at.load(Ordering::Relaxed));
            seen(&peer.hello.load_full()?.cell, answered, requested)
        };
        let own = Sighting { cell: self.config.cell.clone(), age: self.unable_for(now), sign: Sign::Able };
        let unreached = self.unreached.lock().unwrap_or_else(PoisonError::into_inner);
        let unreached = unreached.iter().filter_map(|known| seen(&known.name, 0, known.requested));
        let peers = self.roster.load();
        let peers = peers.indexes().filter_map(|at| of_peer(&self.peers[at]));
        peers.chain(unreached).chain([own]).collect()
    }

    /// Returns whether a peer is silent.
    #[must_use]
    pub fn is_silent(&self, peer: usize, now: Timestamp) -> bool {
        let answered = self.peers.get(peer).map_or(0, |peer| peer.answered.load(Ordering::Relaxed));
        answered == 0 || now.since(Timestamp::from_micros(answered)) > self.config.silence
    }

    /// Returns whether no node of the cell with this name answers.
    #[must_use]
    pub fn is_named_silent(&self, cell: &str, now: Timestamp) -> bool {
        let is_named = |peer: &Peer| peer.hello.load().as_ref().is_some_and(|hello| hello.cell == cell);
        let roster = self.roster.load();
        let mut named = roster.indexes().filter(|peer| is_named(&self.peers[*peer]));
        named.all(|peer| self.is_silent(peer, now))
    }

    /// Returns which cell decides a counter.
    #[must_use]
    pub fn decider(&self, key: &CounterKey<'_>, now: Timestamp) -> Decider {
        if self.is_displaced(now) {
            return Decider::Nobody("another process has this cell's name");
        }
        let region = self.owning_region(key);
        if let Some(region) = region {
            let roster = self.roster.load();
            let mut cells = roster.cells.iter().filter(|cell| roster.region_of(cell) == region);
            match (self.config.region == region, cells.next(), cells.next()) {
                // Nodes that share a store are one cell, whatever other nodes are learned.
                (true, None, _)
                    if !self.config.keeps_counters && !self.are_peers_known.load(Ordering::Relaxed) =>
                {
                    return Decider::Nobody("the other cells have not been learned");
                }
                // A region with one cell has one owner, whichever cells answer.
                (true, None, _) => return Decider::Own,
                (false, Some(cell), None) => {
                    let answers = cell.iter().copied().find(|peer| !self.is_silent(*peer, now));
                    return Decider::Peer(answers.unwrap_or(cell[0]));
                }
                (false, None, _) => return Decider::Nobody("no cell of the owning region is configured"),
                _ => {}
            }
        }
        self.by_hash(key, region, now)
    }

    /// Returns the region that owns a counter; `None` if a hash selects among all.
    fn owning_region<'k>(&self, key: &CounterKey<'k>) -> Option<&'k str> {
        match key.scope.owner() {
            CounterOwner::Region(region) => Some(region),
            CounterOwner::Home => match key.parts.last() {
                // A region that does not exist gives the owner of requests that name none.
                Some(KeyPart::Text(region)) if self.is_region(region) => Some(*region),
                _ => None,
            },
            CounterOwner::Hash => None,
        }
    }

    /// Returns whether a counter has the same owner whichever cells are alive.
    pub(crate) fn has_one_owner(&self, key: &CounterKey<'_>) -> bool {
        let roster = self.roster.load();
        let Some(region) = self.owning_region(key) else { return roster.cells.is_empty() };
        let others = roster.cells.iter().filter(|cell| roster.region_of(cell) == region).count();
        others + usize::from(self.config.region == region) <= 1
    }

    /// Returns whether this is the region of a cell that is known.
    pub(crate) fn is_region(&self, name: &str) -> bool {
        self.config.region == name || self.roster.load().has_region(name)
    }

    /// Returns whether a cell of this region may connect: it is configured, or cells are learned.
    #[must_use]
    pub fn expects_region(&self, name: &str) -> bool {
        self.config.learns_peers || self.is_region(name)
    }

    /// Returns each peer's index, region and address, whether it is silent, and its name if it is known.
    #[must_use]
    pub fn peers(&self, now: Timestamp) -> Vec<(usize, PeerStatus)> {
        let roster = self.roster.load();
        let status = |at: usize| {
            let PeerConfig { region, address, .. } = roster.get(at)?.clone();
            let cell = self.hello(at).map(|hello| hello.cell.clone());
            Some((at, PeerStatus { region, address, cell, silent: self.is_silent(at, now) }))
        };
        roster.indexes().filter_map(status).collect()
    }
}

/// State of a peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerStatus {
    /// Its region.
    pub region: String,
    /// Its address.
    pub address: String,
    /// Its name, once it has been reached.
    pub cell: Option<String>,
    /// Whether it does not answer.
    pub silent: bool,
}

#[cfg(test)]
mod tests;
