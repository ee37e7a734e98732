//! What a cell takes for known, beside all that any cell has decided.

use super::*;
use crate::members::{CellConfig, Decider, PeerConfig};
use crate::message::{Hello, Sighting};
use std::collections::HashMap;
use tollgate_core::conformance::SplitMix64;
use tollgate_core::{CounterOwner, KeyPart, RegionMode, Scope, region_prefix};

const CELLS: [&str; 3] = ["eu", "us", "ap"];
const STEP: u64 = 100;

/// Until which step something lasts.
type Until = u64;

/// A node: a process, or none.
struct Node {
    cell: usize,
    members: Option<Members>,
    /// Other cells' nodes by peer index.
    peers: Vec<usize>,
    /// The processes to which its links lead.
    linked: HashMap<usize, u64>,
    dead: Until,
    paused: Until,
    /// Its own link to the cell's store.
    unlinked: Until,
    /// When it last read the record.
    shared: u64,
}

/// A store, and by how much its clock is ahead.
#[derive(Default)]
struct Store {
    record: Option<Vec<u8>>,
    /// The record as it was at some time.
    copy: Option<Vec<u8>>,
    ahead: u64,
    down: Until,
    /// When it lost the record, and with it its counters.
    lost: u64,
}

struct World {
    rng: SplitMix64,
    step: u64,
    nodes: Vec<Node>,
    stores: Vec<Store>,
    cut: HashMap<(usize, usize), Until>,
    processes: u64,
    /// The last decision of each cell for each key.
    decided: HashMap<(usize, usize), Timestamp>,
    /// Decisions with what was counted before the process began, and of counters that had been another cell's.
    kept: u64,
    moved: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = SplitMix64::new(seed);
        let of: Vec<usize> = (0..3).flat_map(|cell| vec![cell; 1 + rng.below(2) as usize]).collect();
        let node = |cell: usize| {
            let peers = (0..of.len()).filter(|other| of[*other] != cell).collect();
            Node {
                cell,
                members: None,
                peers,
                linked: HashMap::new(),
                dead: 0,
                paused: 0,
                unlinked: 0,
                shared: 0,
            }
        };
        let stores = (0..3).map(|_| Store { ahead: rng.below(1 << 40), ..Store::default() }).collect();
        Self {
            nodes: of.iter().map(|cell| node(*cell)).collect(),
            stores,
            step: 0,
            cut: HashMap::new(),
            processes: 0,
            decided: HashMap::new(),
            kept: 0,
            moved: 0,
            rng,
        }
    }

    fn now(&self) -> Timestamp {
        Timestamp::from_secs(1_000_000) + TimeDelta::from_millis(self.step * STEP)
    }

    fn start(&mut self, at: usize) {
        self.processes += 1;
        let node = &self.nodes[at];
        let peer = |other: &usize| PeerConfig {
            store: CELLS[self.nodes[*other].cell].to_owned(),
            ..PeerConfig::new(CELLS[self.nodes[*other].cell], other.to_string())
        };
        let peers = node.peers.iter().map(peer).collect();
        let mut config = CellConfig::new(CELLS[node.cell], CELLS[node.cell], peers);
        config.keeps_counters = true;
        let members = Members::new(config, self.processes, self.now());
        let node = &mut self.nodes[at];
        (node.members, node.linked) = (Some(members), HashMap::new());
    }

    fn runs(&self, at: usize) -> bool {
        self.nodes[at].members.is_some() && self.nodes[at].paused <= self.step
    }

    fn has_store(&self, at: usize) -> bool {
        let node = &self.nodes[at];
        node.unlinked <= self.step && self.stores[node.cell].down <= self.step
    }

    fn break_something(&mut self) {
        let at = self.rng.below(self.nodes.len() as u64) as usize;
        let cell = self.nodes[at].cell;
        // Up to ten seconds: others decide after four.
        let most = if self.rng.chance(500) { 15 } else { 100 };
        let until = self.step + 1 + self.rng.below(most);
        match self.rng.below(6) {
            5 => {
                let (back, now) = (self.rng.below(200_000), self.step);
                let store = &mut self.stores[cell];
                match self.rng.below(4) {
                    0 => (store.record, store.lost) = (None, now),
                    1 => store.copy = store.record.clone(),
                    // With its counters, as they were.
                    2 => {
                        store.lost = if store.copy.is_some() { 0 } else { now };
                        store.record = store.copy.clone();
                    }
                    // Farther, it would seem that no time has passed while a process was away.
                    _ => store.ahead = store.ahead.saturating_sub(back),
                }
            }
            0 => {
                self.nodes[at].members = None;
                self.nodes[at].dead = until;
            }
            1 => self.nodes[at].paused = until,
            2 => self.nodes[at].unlinked = until,
            3 => self.stores[cell].down = until,
            _ => {
                let other = (cell + 1 + self.rng.below(2) as usize) % 3;
                self.cut.insert((cell, other), until);
                if self.rng.chance(600) {
                    self.cut.insert((other, cell), until);
                }
            }
        }
    }

    /// One node asks another and receives its answer.
    fn ask(&mut self, at: usize, peer: usize) {
        let (now, other) = (self.now(), self.nodes[at].peers[peer]);
        let is_cut =
            |one: usize, two: usize| self.cut.get(&(one, two)).is_some_and(|until| *until > self.step);
        let (from, to) = (self.nodes[at].cell, self.nodes[other].cell);
        if !self.runs(other) || is_cut(from, to) || self.rng.chance(50) {
            return;
        }
        let has_store = self.has_store(other);
        let members = self.nodes[other].members.as_ref().expect("it runs");
        members.on_request(CELLS[from], now);
        let (seen, incarnation): (Vec<Sighting>, u64) = (members.sightings(now), members.incarnation());
        if is_cut(to, from) {
            return;
        }
        let is_new = self.nodes[at].linked.insert(peer, incarnation) != Some(incarnation);
        let members = self.nodes[at].members.as_ref().expect("it runs");
        if is_new {
            let (cell, region) = (CELLS[to].to_owned(), CELLS[to].to_owned());
            let (version, rank, silence) = (1, 0, None);
            let hello =
                Hello { version, cell, region, incarnation, key_check: 0, cells_check: 0, rank, silence };
            members.on_hello(peer, hello);
        }
        match has_store {
            true => members.on_answer(peer, now, &seen, now),
            false => members.on_heard(peer, now, &seen, now),
        }
    }

    fn share(&mut self, at: usize) {
        let (now, cell) = (self.now(), self.nodes[at].cell);
        let wait = self.rng.below(60_000);
        let (sent, between) = (Timestamp::from_micros(now.as_micros() - wait), self.rng.below(wait + 1));
        let store = &mut self.stores[cell];
        let there = Timestamp::from_micros(sent.as_micros() + between + store.ahead);
        let clock = StoreClock::new(sent, now, there);
        let members = self.nodes[at].members.as_ref().expect("it runs");
        members.on_tenure(TenureRecord::read(store.record.as_deref(), there), clock, now);
        if let Some(new) = members.tenure_to_write(clock, now) {
            store.record = Some(new.encode());
            members.on_tenure_written(&new);
        }
        self.nodes[at].shared = self.step;
    }

    /// Looks what a node decides, and that it knows of all that others have decided.
    fn decide(&mut self, at: usize, keys: &[String], scope: &Scope, seed: u64) {
        let (now, cell) = (self.now(), self.nodes[at].cell);
        let members = self.nodes[at].members.as_ref().expect("it runs");
        for (number, key) in keys.iter().enumerate() {
            let key = CounterKey { scope, parts: &[KeyPart::Text(key)] };
            if members.decider(&key, now) != Decider::Own {
                continue;
            }
            let since = members.known_since(&key, now).expect("a hash selects the owner").since;
            for other in (0..CELLS.len()).filter(|other| *other != cell) {
                let Some(decided) = self.decided.get(&(number, other)) else { continue };
                assert!(
                    *decided <= since,
                    "seed {seed}, step {}: {} decides key {number} by what it knows since {since:?}, {} decided it at {decided:?}",
                    self.step,
                    CELLS[cell],
                    CELLS[other]
                );
                self.moved += 1;
            }
            let lost = self.stores[cell].lost;
            if self.nodes[at].shared > lost {
                let lost = Timestamp::from_secs(1_000_000) + TimeDelta::from_millis(lost * STEP);
                assert!(since >= lost, "seed {seed}, step {}: it trusts what the store lost", self.step);
            }
            self.kept += u64::from(since < members.started_at);
            self.decided.insert((number, cell), now);
        }
    }

    fn run(&mut self, seed: u64, steps: u64) {
        let keys: Vec<String> = (0..8).map(|at| format!("k{at}")).collect();
        let scope = Scope::new(format!("{}x", region_prefix(RegionMode::Owner, CounterOwner::Hash)));
        while self.step < steps {
            self.step += 1;
            if self.step > 30 && self.rng.chance(60) {
                self.break_something();
            }
            for at in 0..self.nodes.len() {
                if self.nodes[at].members.is_none() && self.nodes[at].dead <= self.step {
                    self.start(at);
                }
                if !self.runs(at) {
                    continue;
                }
                (0..self.nodes[at].peers.len()).for_each(|peer| self.ask(at, peer));
                let has_store = self.has_store(at);
                let members = self.nodes[at].members.as_ref().expect("it runs");
                members.on_store(!has_store);
                members.refresh(self.now());
                if has_store {
                    if self.rng.chance(900) {
                        self.share(at);
                    }
                    self.decide(at, &keys, &scope, seed);
                }
            }
        }
    }
}

/// Without it a cell that comes back with its Redis trusts counters that others decided meanwhile, or counts all of them as used
/// up each time a process is replaced.
#[test]
fn a_cell_knows_of_all_that_others_have_decided_since() {
    let (mut kept, mut moved) = (0, 0);
    for seed in 0..400 {
        let mut world = World::new(seed);
        world.run(seed, 600);
        (kept, moved) = (kept + world.kept, moved + world.moved);
    }
    assert!(kept > 10_000 && moved > 10_000, "{kept} by what was known before, {moved} after another cell");
}
