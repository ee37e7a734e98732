//! Owners that a hash selects.
//!
//! An owner that a hash selects may change when a cell dies, so two cells must never act as the owner at once. Three
//! rules ensure that: a cell decides as such an owner only while a majority of the configured cells has answered it
//! within the silence time T (counted from when it asked), and only once that has been so for T; another cell counts as
//! dead only after 2·T without a sign of it, direct or through a third cell. So a cell that is cut off stops deciding
//! before another begins, and one that returns begins after the others have noticed. The majority is looked up at the
//! moment of the decision, and a process that stood still begins anew: it cannot know what others did meanwhile. T is the
//! longest of all cells'. Two majorities have a cell in common, which tells each of them of the other, whichever of
//! them it can reach itself; what a cell owns that this one has not reached since it started is not decided here.
//!
//! A cell that has had no majority for 2·T, or whose own store has been down for as long, says so, and the others leave it
//! out: it answers, and decides nothing by hash. It asks the others until its store has been up for T, so that one that comes
//! and goes moves nothing. Then it says that it is back, and begins 3/2·T later: another that stood still for 3/4·T may
//! have used its older answer for T/2. Until then no cell decides what it owns. Of a cell with several nodes, each speaks for
//! itself: the others ask one that can decide. A node that has died holds back the move of what the other nodes cannot decide,
//! because a third cell may still reach it. Which cells one of the nodes has heard, the others read in their record (`tenure`).
//!
//! What was counted is unknown from the moment at which another cell may have decided. It has not if the last answers of a
//! majority are never older than T, whether this process stood still in between or not: all others have a cell of that
//! majority in theirs, which heard of this one (of a cell with several nodes, if they reach the same cells). Of two cells the
//! other is no majority: it decides for this one only if this one has answered that it cannot.
//!
//! A static hash over the configured cells was rejected: one dead node would leave its keys undecided for as long as it is dead.
//! Consensus was rejected: it would have to be asked for each change, and the leases and `split` need none.

use super::{Decider, Living, Members, Peer, UNREACHED, Unreached};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use tollgate_core::{CounterKey, KeyPart, StableHasher, TimeDelta, Timestamp};

/// Longest silence time of a peer that is believed, in microseconds: no cell can be configured with a longer one.
const MAX_SILENCE: u64 = 60_000_000;

impl Members {
    /// Returns the silence time that owners are chosen by: the longest of all cells, because a cell goes on deciding for
    /// its own.
    pub(super) fn owner_silence(&self) -> TimeDelta {
        TimeDelta::from_micros(self.longest_silence.load(Ordering::Relaxed))
    }

    /// Returns whether a majority of the cells answers this one.
    #[must_use]
    pub fn has_majority(&self, now: Timestamp) -> bool {
        now.since(self.majority_heard_at(now)) <= self.config.silence
    }

    /// Returns whether this cell decides what a hash gives it: a majority has answered it for the silence time.
    #[must_use]
    pub fn has_joined(&self, now: Timestamp) -> bool {
        self.has_joined.load(Ordering::Acquire) && !self.has_stood_still(now) && self.has_majority(now)
    }

    /// Records whether this cell's own store takes charges.
    pub fn on_store(&self, is_down: bool) {
        self.is_store_down.store(is_down, Ordering::Relaxed);
    }

    fn able_at(&self) -> Timestamp {
        Timestamp::from_micros(self.able_at.load(Ordering::Relaxed))
    }

    /// Returns for how many milliseconds this cell could decide nothing that a hash gives it.
    pub(crate) fn unable_for(&self, now: Timestamp) -> u64 {
        let is_store_up = !self.is_store_down.load(Ordering::Relaxed) && !self.waits_for_store(now);
        if self.has_majority(now) && is_store_up {
            return 0;
        }
        let (unable_for, twice) =
            (now.since(self.able_at()).as_micros() / 1_000, 2 * self.config.silence.as_micros() / 1_000);
        // Once it says 2 T, others decide in its place: not before it has noticed that itself.
        if unable_for < twice || self.is_left_out() || self.cede() { unable_for } else { twice - 1 }
    }

    /// Leaves what a hash gives this cell to others, unless it has joined. Returns whether it does.
    #[cold]
    fn cede(&self) -> bool {
        let _refreshing = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        if self.has_joined.load(Ordering::Acquire) {
            return false;
        }
        self.is_left_out.store(true, Ordering::Relaxed);
        self.able_since.store(0, Ordering::Relaxed);
        self.tenure.lock().unwrap_or_else(PoisonError::into_inner).end();
        true
    }

    /// Returns whether other cells decide what a hash would give this one, because it could not for too long.
    #[must_use]
    pub fn is_left_out(&self) -> bool {
        self.is_left_out.load(Ordering::Relaxed)
    }

    /// Returns whether the others go on deciding for this cell until its store has been up for the silence time.
    fn waits_for_store(&self, now: Timestamp) -> bool {
        let up_since = self.store_up_since.load(Ordering::Relaxed);
        self.is_left_out()
            && (up_since == 0 || now.since(Timestamp::from_micros(up_since)) < self.owner_silence())
    }

    /// Returns since when a majority of the cells, this one among them, has answered what this one sent, whether they applied it
    /// or not.
    pub(super) fn majority_heard_at(&self, now: Timestamp) -> Timestamp {
        let roster = self.roster.load();
        let heard = |at: &usize| self.peers[*at].heard_at.load(Ordering::Relaxed);
        let of_cell = |cell: &Vec<usize>| cell.iter().map(heard).max().unwrap_or(0);
        let mut answers: Vec<u64> = roster.cells.iter().map(of_cell).collect();
        answers.sort_unstable_by_key(|at| std::cmp::Reverse(*at));
        match answers.len().div_ceil(2) {
            0 => now,
            others => Timestamp::from_micros(answers[others - 1]),
        }
    }

    /// Returns whether the last refresh is so long ago that others may have declared this cell dead since: then a
    /// majority at both ends proves nothing.
    fn has_stood_still(&self, now: Timestamp) -> bool {
        let refreshed_at = Timestamp::from_micros(self.refreshed_at.load(Ordering::Relaxed));
        now.since(refreshed_at).as_micros() > self.config.silence.as_micros() / 4 * 3
    }

    /// Returns how often this cell may have begun to decide counters that another decided before, and when last.
    #[must_use]
    pub fn moves(&self) -> (u64, Timestamp) {
        let at = Timestamp::from_micros(self.gained_at.load(Ordering::Acquire));
        (self.moves.load(Ordering::Acquire), at)
    }

    fn record_move(&self, now: Timestamp) {
        self.gained_at.store(now.as_micros(), Ordering::Release);
        self.moves.fetch_add(1, Ordering::Release);
    }

    /// Updates who owns counters. Called once in a tick.
    pub fn refresh(&self, now: Timestamp) {
        let _refreshing = self.refreshing.lock().unwrap_or_else(PoisonError::into_inner);
        let roster = self.roster.load();
        let silences = roster.indexes().filter_map(|at| Some(self.hello(at)?.silence?.min(MAX_SILENCE)));
        let longest = silences.fold(self.config.silence.as_micros(), u64::max);
        self.longest_silence.store(longest, Ordering::Relaxed);
        let has_stood_still = self.has_stood_still(now);
        self.refreshed_at.store(now.as_micros(), Ordering::Relaxed);
        let has_majority = self.has_majority(now);
        let since = self.able_since.load(Ordering::Relaxed);
        let is_broken = !has_majority || has_stood_still;
        let is_store_down = self.is_store_down.load(Ordering::Relaxed);
        if is_store_down {
            self.store_up_since.store(0, Ordering::Relaxed);
        } else if self.store_up_since.load(Ordering::Relaxed) == 0 {
            self.store_up_since.store(now.as_micros(), Ordering::Relaxed);
        }
        if is_store_down && now.since(self.able_at()).as_micros() >= 2 * self.config.silence.as_micros() {
            self.is_left_out.store(true, Ordering::Relaxed);
        }
        let mut tenure = self.tenure.lock().unwrap_or_else(PoisonError::into_inner);
        let heard_at = self.majority_heard_at(now);
        let was_heard_at =
            Timestamp::from_micros(self.majority_at.swap(heard_at.as_micros(), Ordering::Relaxed));
        // Another cell may have decided in its place.
        if self.is_left_out() || roster.cells.len() > 1 && now.since(was_heard_at) > self.config.silence {
            tenure.end();
        }
        let is_able = has_majority && !self.waits_for_store(now);
        if is_able {
            tenure.take_over(heard_at, self.config.silence);
        }
        let parts = if self.is_left_out() { 3 } else { 2 };
        let join_time = TimeDelta::from_micros(self.owner_silence().as_micros() / 2 * parts);
        if is_broken || !is_able || since == 0 {
            self.has_joined.store(false, Ordering::Relaxed);
            self.able_since.store(if is_able { now.as_micros() } else { 0 }, Ordering::Relaxed);
        } else if now.since(Timestamp::from_micros(since)) >= join_time
            && !is_store_down
            && !self.has_joined.load(Ordering::Relaxed)
        {
            // Others may have decided what this cell decides from now on.
            self.record_move(now);
            self.first_joined_at.fetch_min(now.as_micros(), Ordering::Relaxed);
            tenure.begin(now);
            self.is_left_out.store(false, Ordering::Relaxed);
            self.has_joined.store(true, Ordering::Release);
        }
        if has_majority && !is_store_down && !self.is_left_out() {
            self.able_at.store(now.as_micros(), Ordering::Relaxed);
        }
        let dead_after = TimeDelta::from_micros(2 * longest);
        // Of late it says that it cannot. Not what it said longer ago: it begins again T after it can.
        let decides_nothing = |peer: &Peer| {
            let said_at = Timestamp::from_micros(peer.heard_at.load(Ordering::Acquire));
            now.since(said_at).as_micros() <= self.config.silence.as_micros() / 2
                && peer.unable_for.load(Ordering::Relaxed) >= dead_after.as_micros() / 1_000
        };
        let mut unreached = self.unreached.lock().unwrap_or_else(PoisonError::into_inner);
        let own = (!self.is_left_out()).then(|| (self.config.cell.clone(), None));
        let mut living = Vec::from_iter(own);
        for (at, peer) in roster.indexes().map(|at| (at, &self.peers[at])) {
            let seen = Timestamp::from_micros(peer.seen.load(Ordering::Relaxed));
            let is_alive = now.since(seen) <= dead_after && !decides_nothing(peer);
            if let Some(hello) = peer.hello.load_full().filter(|_| is_alive) {
                tenure.see(&hello.cell, roster.region(at), seen + dead_after);
                living.push((hello.cell.clone(), Some(at)));
            }
        }
        // A node that was never reached may decide for its cell, although another says that it cannot.
        for cell in roster.cells.iter().filter(|cell| cell.iter().any(|at| self.hello(*at).is_none())) {
            let unable = cell.iter().filter(|at| decides_nothing(&self.peers[**at]));
            living.extend(unable.filter_map(|at| Some((self.hello(*at)?.cell.clone(), Some(UNREACHED)))));
        }
        // A cell that only others reach may decide as an owner: it is not left out, and what it owns is not decided here.
        let is_named = |name: &str| living.iter().any(|(known, _)| known == name);
        let is_configured =
            |name: &str| roster.indexes().any(|at| self.hello(at).is_some_and(|hello| hello.cell == name));
        unreached.retain(|Unreached { name, seen, .. }| {
            now.since(Timestamp::from_micros(*seen)) <= dead_after && !is_named(name) && !is_configured(name)
        });
        for Unreached { name, seen, .. } in unreached.iter() {
            let region = Self::region_of_living(&roster, name, UNREACHED);
            tenure.see(name, region, Timestamp::from_micros(*seen) + dead_after);
        }
        // Nor is one that another node of this cell has heard of, and this one not yet.
        let is_heard = |name: &str| {
            let is_heard = |at: usize| self.peers[at].seen.load(Ordering::Relaxed) != 0;
            roster.indexes().any(|at| is_heard(at) && self.hello(at).is_some_and(|hello| hello.cell == name))
        };
        let beside = tenure.alive(now).filter(|name| !is_named(name) && !is_heard(name));
        let unreached_names = unreached.iter().map(|known| known.name.as_str());
        let unreached_names: Vec<String> = unreached_names.chain(beside).map(str::to_owned).collect();
        tenure.shorten();
        drop(tenure);
        drop(unreached);
        living.extend(unreached_names.into_iter().map(|name| (name, Some(UNREACHED))));
        // Of several nodes of a cell, the first that answers.
        living.sort_by_key(|(name, peer)| (name.clone(), peer.map(|peer| (self.is_silent(peer, now), peer))));
        living.dedup_by(|one, other| one.0 == other.0);
        let mut known = self.living.lock().unwrap_or_else(PoisonError::into_inner);
        if **known != living {
            // Before the first decision of what has moved.
            self.record_move(now);
            *known = Arc::new(living);
        }
    }

    /// Returns which cell a hash selects among the living ones.
    pub(super) fn by_hash(&self, key: &CounterKey<'_>, region: Option<&str>, now: Timestamp) -> Decider {
        if self.config.learns_peers {
            return Decider::Nobody("no hash selects an owner among cells that are learned");
        }
        if self.peers.is_empty() {
            return Decider::Own;
        }
        if self.has_stood_still(now) || !self.has_majority(now) {
            return Decider::Nobody("this cell is not in touch with a majority of the cells");
        }
        let living = Arc::clone(&self.living.lock().unwrap_or_else(PoisonError::into_inner));
        let owner = self.owner_among(&living, key_hash(key), region);
        match owner {
            None => Decider::Nobody("no cell of the owning region is alive"),
            Some(Some(UNREACHED)) => {
                Decider::Nobody("the owner is a cell that this one has not reached since it started")
            }
            Some(Some(peer)) => Decider::Peer(peer),
            Some(None) if !self.has_joined.load(Ordering::Acquire) => {
                Decider::Nobody("this cell has just joined the others")
            }
            Some(None) => Decider::Own,
        }
    }

    /// Returns which of these cells a hash selects: a peer's index, `None` within for this cell.
    fn owner_among(&self, living: &Living, key: u64, region: Option<&str>) -> Option<Option<usize>> {
        let roster = self.roster.load();
        let in_region = |name: &str, peer: Option<usize>| {
            region.is_none_or(|region| match peer {
                None => self.config.region == region,
                Some(peer) => Self::region_of_living(&roster, name, peer) == region,
            })
        };
        let candidates = living.iter().filter(|(name, peer)| in_region(name, *peer));
        candidates.max_by_key(|(name, _)| score(name, key)).map(|(_, peer)| *peer)
    }
}

/// Returns the score of a cell: of those that are alive, the one with the best decides.
pub(super) fn score(cell: &str, key: u64) -> u64 {
    let mut hasher = StableHasher::default();
    hasher.bytes(cell.as_bytes());
    hasher.number(key);
    hasher.finish()
}

/// Returns a hash of what owners are chosen by: the group, so that all limits of a caller, and what leases keep beside
/// them, have one owner.
pub(super) fn key_hash(key: &CounterKey<'_>) -> u64 {
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
