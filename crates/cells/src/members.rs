//! Membership: the configured peers, which of them answer, and which cell owns a counter.
//!
//! Every batch is a heartbeat. A peer is *silent* if the last request that it answered was sent longer ago than the
//! configured time, by this cell's clock alone: clocks are never compared between cells.
//!
//! An owner that a hash selects may change when a cell dies, so two cells must never act as the owner at once. Three
//! rules ensure that: a cell decides as such an owner only while a majority of the configured cells has answered it
//! within the silence time T (counted from when it asked), and only once that has been so for T; another cell counts as
//! dead only after 2·T without a sign of it, direct or through a third cell. So a cell that is cut off stops deciding
//! before another begins, and one that returns begins after the others have noticed. A static hash over the configured
//! cells was rejected: one dead node would leave its keys undecided for as long as it is dead. Consensus was rejected:
//! it would have to be asked for each change, and the leases and `split` need none.

mod division;

use crate::message::{Hello, Sighting};
use crate::roster::{MAX_LEARNED, PeerChanges, Roster};
use arc_swap::{ArcSwap, ArcSwapOption};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tollgate_core::{CounterKey, CounterOwner, KeyPart, StableHasher, TimeDelta, Timestamp};

pub(crate) use division::Division;

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
    /// When the last request was sent that it answered, in microseconds; 0 for never.
    answered: AtomicU64,
    /// Last sign of life, also through other cells.
    seen: AtomicU64,
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

/// Changes of the living cells that are remembered. What is older counts as unknown.
const MAX_EPOCHS: usize = 32;

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
    /// Since when a majority answers, in microseconds; 0 if it does not.
    majority_since: AtomicU64,
    /// When owners by hash last changed.
    moved_at: AtomicU64,
    /// Since when which cells were alive, oldest first, while a majority answered without a break.
    epochs: Mutex<VecDeque<(Timestamp, Arc<Living>)>>,
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
            majority_since: AtomicU64::new(0),
            moved_at: AtomicU64::new(now.as_micros()),
            epochs: Mutex::default(),
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
                peer.seen.store(0, Ordering::Relaxed);
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

    /// Returns whether none of a cell's nodes answers.
    fn is_cell_silent(&self, cell: &[usize], now: Timestamp) -> bool {
        self.answering_node(cell, now).is_none()
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
            peer.hello.store(Some(Arc::new(hello)));
        }
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
            peer.seen.fetch_max(now.as_micros(), Ordering::Relaxed);
            let view = seen.iter().map(|(cell, _)| cell.clone()).collect();
            *peer.view.lock().unwrap_or_else(PoisonError::into_inner) = view;
        }
        for (cell, age) in seen {
            let at = now.as_micros().saturating_sub(age.saturating_mul(1_000));
            self.on_sign(cell, Timestamp::from_micros(at));
        }
    }

    /// Records a sign of life of the cell with this name.
    pub fn on_sign(&self, cell: &str, at: Timestamp) {
        for peer in self.roster.load().indexes().map(|at| &self.peers[at]) {
            if peer.hello.load().as_ref().is_some_and(|hello| hello.cell == cell) {
                peer.seen.fetch_max(at.as_micros(), Ordering::Relaxed);
            }
        }
    }

    /// Returns the cells that have given a sign of life, and how long ago.
    #[must_use]
    pub fn sightings(&self, now: Timestamp) -> Vec<Sighting> {
        let seen = |peer: &Peer| {
            let at = Timestamp::from_micros(peer.answered.load(Ordering::Relaxed));
            let age = now.since(at);
            // Only what this cell has seen itself: signs must not go round in circles.
            let hello = peer.hello.load_full().filter(|_| age < self.config.silence)?;
            Some((hello.cell.clone(), age.as_micros() / 1_000))
        };
        self.roster.load().indexes().filter_map(|at| seen(&self.peers[at])).collect()
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

    /// Updates who owns counters. Called once in a tick.
    pub fn refresh(&self, now: Timestamp) {
        let roster = self.roster.load();
        let all = roster.cells.len() + 1;
        let answering = roster.cells.iter().filter(|cell| !self.is_cell_silent(cell, now)).count() + 1;
        let since = self.majority_since.load(Ordering::Relaxed);
        match (2 * answering > all, since) {
            (true, 0) => self.majority_since.store(now.as_micros(), Ordering::Relaxed),
            (false, 1..) => {
                self.majority_since.store(0, Ordering::Relaxed);
                self.moved_at.store(now.as_micros(), Ordering::Relaxed);
            }
            _ => {}
        }
        let dead_after = TimeDelta::from_micros(2 * self.config.silence.as_micros());
        let mut living = vec![(self.config.cell.clone(), None)];
        for (at, peer) in roster.indexes().map(|at| (at, &self.peers[at])) {
            let seen = Timestamp::from_micros(peer.seen.load(Ordering::Relaxed));
            if let Some(hello) = peer.hello.load_full().filter(|_| now.since(seen) <= dead_after) {
                living.push((hello.cell.clone(), Some(at)));
            }
        }
        // Of several nodes of a cell, the first that answers.
        living.sort_by_key(|(name, peer)| (name.clone(), peer.map(|peer| (self.is_silent(peer, now), peer))));
        living.dedup_by(|one, other| one.0 == other.0);
        let mut known = self.living.lock().unwrap_or_else(PoisonError::into_inner);
        if **known != living {
            *known = Arc::new(living);
            self.moved_at.store(now.as_micros(), Ordering::Relaxed);
        }
        let mut epochs = self.epochs.lock().unwrap_or_else(PoisonError::into_inner);
        if self.majority_since.load(Ordering::Relaxed) == 0 {
            epochs.clear();
        } else if epochs.back().is_none_or(|(_, last)| last != &*known) {
            epochs.push_back((now, Arc::clone(&known)));
            if epochs.len() > MAX_EPOCHS {
                epochs.pop_front();
            }
        }
    }

    /// Returns since when this cell knows what was counted: before, another cell may have owned the counter, or this
    /// one has lost it. `None` if it knows everything.
    #[must_use]
    pub fn known_since(&self, key: &CounterKey<'_>) -> Option<Timestamp> {
        if self.has_one_owner(key) {
            return (!self.config.keeps_counters).then_some(self.started_at);
        }
        let region = self.owning_region(key);
        let hash = key_hash(key);
        let is_own = |living: &Living| self.owner_among(living, hash, region) == Some(None);
        let epochs = self.epochs.lock().unwrap_or_else(PoisonError::into_inner);
        // A change among the others that left the counter here has lost nothing.
        let kept = epochs.iter().rev().take_while(|(_, living)| is_own(living)).last();
        let moved_at = || Timestamp::from_micros(self.moved_at.load(Ordering::Relaxed));
        Some(kept.map_or_else(moved_at, |(since, _)| *since))
    }

    /// Returns which cell decides a counter.
    #[must_use]
    pub fn decider(&self, key: &CounterKey<'_>, now: Timestamp) -> Decider {
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
    fn has_one_owner(&self, key: &CounterKey<'_>) -> bool {
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

    fn by_hash(&self, key: &CounterKey<'_>, region: Option<&str>, now: Timestamp) -> Decider {
        if self.config.learns_peers {
            return Decider::Nobody("no hash selects an owner among cells that are learned");
        }
        if self.peers.is_empty() {
            return Decider::Own;
        }
        let since = self.majority_since.load(Ordering::Relaxed);
        if since == 0 {
            return Decider::Nobody("this cell is not in touch with a majority of the cells");
        }
        let living = Arc::clone(&self.living.lock().unwrap_or_else(PoisonError::into_inner));
        let owner = self.owner_among(&living, key_hash(key), region);
        match owner {
            None => Decider::Nobody("no cell of the owning region is alive"),
            Some(Some(peer)) => Decider::Peer(peer),
            Some(None) if now.since(Timestamp::from_micros(since)) < self.config.silence => {
                Decider::Nobody("this cell has just joined the others")
            }
            Some(None) => Decider::Own,
        }
    }

    /// Returns which of these cells a hash selects: a peer's index, `None` within for this cell.
    fn owner_among(&self, living: &Living, key: u64, region: Option<&str>) -> Option<Option<usize>> {
        let roster = self.roster.load();
        let in_region = |peer: &Option<usize>| {
            let of = peer.map_or(self.config.region.as_str(), |at| roster.region(at));
            region.is_none_or(|region| of == region)
        };
        let score = |name: &str| {
            let mut hasher = StableHasher::default();
            hasher.bytes(name.as_bytes());
            hasher.number(key);
            hasher.finish()
        };
        let candidates = living.iter().filter(|(_, peer)| in_region(peer));
        candidates.max_by_key(|(name, _)| score(name)).map(|(_, peer)| *peer)
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

/// Returns a hash of what owners are chosen by: the group, so that all limits of a caller, and what leases keep beside
/// them, have one owner.
fn key_hash(key: &CounterKey<'_>) -> u64 {
    let mut hasher = StableHasher::default();
    hasher.number(key.scope.group());
    for part in key.parts {
        match part {
            KeyPart::Text(text) | KeyPart::Secret(text) => hasher.bytes(text.as_bytes()),
            KeyPart::Network { address, prefix } => {
                hasher.bytes(&address.to_le_bytes());
                hasher.number(u64::from(*prefix));
            }
        }
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tollgate_core::{RegionMode, Scope, region_prefix};

    /// Without it two cells that are cut off from each other and not from a third admit four thirds of a limit.
    #[test]
    fn the_parts_of_cells_sum_to_the_limit_whichever_links_are_cut() {
        let now = Timestamp::from_secs(1_000);
        // Each cell that answers, and those that answer it.
        let share = |own: &str, others: [&str; 2], answers: &[(usize, &[&str])]| {
            let peers = others.map(|name| PeerConfig::new(name, name)).to_vec();
            let members = Members::new(CellConfig::new(own, own, peers), 1, now);
            others.into_iter().enumerate().for_each(|(at, name)| members.on_hello(at, hello(name)));
            for (peer, seen) in answers {
                let seen: Vec<Sighting> = seen.iter().map(|name| ((*name).to_owned(), 0)).collect();
                members.on_answer(*peer, now, &seen, now);
            }
            members.share(now)
        };
        // The third receives from both, and learns what they take of its whole limit.
        assert_eq!(share("c", ["a", "b"], &[(0, &["c"]), (1, &["c"])]), (3_000, 3_000));
        assert_eq!(share("a", ["b", "c"], &[(1, &["a", "b"])]), (1_000, 3_000));
        assert_eq!(share("b", ["a", "c"], &[(1, &["a", "b"])]), (1_000, 3_000));
        // The third reaches both, and neither reaches it: it learns nothing of what they take.
        assert_eq!(share("c", ["a", "b"], &[(0, &["b"]), (1, &["a"])]), (1_000, 3_000));
        assert_eq!(share("a", ["b", "c"], &[(0, &["a"])]), (2_000, 3_000));
        // One is alone, and the other two know that of each other.
        assert_eq!(share("b", ["a", "c"], &[]), (1_000, 3_000));
        assert_eq!(share("a", ["b", "c"], &[(1, &["a"])]), (2_000, 3_000));
    }

    fn hello(name: &str) -> Hello {
        let (cell, region) = (name.to_owned(), name.to_owned());
        Hello { version: 1, cell, region, incarnation: 1, key_check: 0, cells_check: 0, rank: 0 }
    }

    /// Without it each restart of any cell locks out the callers of exact limits of all cells.
    #[test]
    fn a_change_among_others_leaves_what_is_known() {
        let start = Timestamp::from_secs(1_000);
        let peers = ["b", "c"].map(|name| PeerConfig::new(name, name)).to_vec();
        let members = Members::new(CellConfig::new("a", "a", peers), 1, start);
        for (at, name) in ["b", "c"].into_iter().enumerate() {
            members.on_hello(at, hello(name));
        }
        let scope = Scope::new(format!("{}x", region_prefix(RegionMode::Owner, CounterOwner::Hash)));
        let answer = |peers: &[usize], now: Timestamp| {
            peers.iter().for_each(|peer| members.on_answer(*peer, now, &[], now));
            members.refresh(now);
        };
        answer(&[0, 1], start);
        let later = |seconds| start + TimeDelta::from_secs(seconds);
        let names: Vec<String> = (0..60).map(|at| format!("k{at}")).collect();
        let since = |name: &str, now: Timestamp| {
            let parts = [KeyPart::Text(name)];
            let key = CounterKey { scope: &scope, parts: &parts };
            (members.decider(&key, now) == Decider::Own).then(|| members.known_since(&key))
        };
        answer(&[0, 1], later(3));
        let before: Vec<&String> = names.iter().filter(|name| since(name, later(3)).is_some()).collect();
        // The last cell dies: its keys move, also to this cell.
        (4..12).for_each(|at| answer(&[0], later(at)));
        let after: Vec<&String> = names.iter().filter(|name| since(name, later(11)).is_some()).collect();
        assert!(!before.is_empty() && after.len() > before.len());
        for name in after {
            let is_kept = since(name, later(11)) == Some(Some(start));
            assert_eq!(is_kept, before.contains(&name), "{name}");
        }
    }
}
