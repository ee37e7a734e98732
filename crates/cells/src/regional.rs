//! The regional store: the cell's own store, and what other cells own. Outermost of all decorators.
//!
//! | `region` | a charge is decided by |
//! |---|---|
//! | `shared` | the own store; what it takes is written to the ledger, and other cells debit it |
//! | `split` | the own store, whose limit is this cell's part already |
//! | `owner` | the own store if this cell is the owner, else the owner over a link |
//! | `leased` | the same, with leases in front of the link |
//!
//! **All or none, whatever the modes**: `mixed`.
//!
//! **Silent peers.** While a peer is silent, limits of mode `shared` are decided by a part: that of the cells that
//! answer, if all of them miss the same ones, else this cell's own. A cell that all others answer, and that answers all
//! others, decides by the whole limit and knows what the others take of it. So the parts sum to the limit whichever links are cut, and a partition
//! adds nothing beyond what was admitted before it was noticed. The part of all that answer, without asking what they
//! see, was rejected: two cells that are cut off from each other and not from a third would both count its part as
//! theirs.

mod counter_store;
mod decide;
mod exchange;
mod serve;
mod tenure;

use crate::counter_locks::CounterLocks;
use crate::inbox::Inbox;
use crate::late::LatePeers;
use crate::late_debits::LateDebits;
use crate::ledger::{Consumed, Ledger};
use crate::lost_units::LostUnits;
use crate::members::WHOLE;
use crate::members::{Decider, Division, Members};
use crate::message::{Hello, MAX_CELLS};
use crate::others::Others;
use crate::outbox::Outbox;
use crate::overdraft::Overdrafts;
use crate::owner::{OwnerStore, Transport};
use crate::pseudonym::Pseudonyms;
use crate::stats::{Counts, RegionStats};
use arc_swap::ArcSwap;
use smallvec::SmallVec;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use tollgate_core::{Charge, Clock, CounterKey, CounterStore, TimeDelta, Timestamp};
use tollgate_store::{LeaseConfig, LeasedStore};

/// Leases of counters that other cells own.
pub type OwnerLeases<T, C> = LeasedStore<OwnerStore<T, C>, OwnerStore<T, C>, C>;

/// A cell's own store, and the counters of other cells.
pub struct RegionalStore<S, T, C> {
    pub(crate) own: S,
    pub(crate) leases: OwnerLeases<T, C>,
    pub(crate) owners: OwnerStore<T, C>,
    pub(crate) members: Arc<Members>,
    names: Pseudonyms,
    ledger: Arc<Ledger>,
    /// Consumption of the last tick, whose memory the next uses again.
    last_tick: Mutex<Arc<Vec<Consumed>>>,
    outboxes: Vec<Mutex<Outbox>>,
    pub(crate) inbox: Inbox,
    pub(crate) locks: CounterLocks,
    pub(crate) overdrafts: Overdrafts,
    pub(crate) lost_units: LostUnits,
    pub(crate) others: Others,
    pub(crate) late: LatePeers,
    pub(crate) late_debits: LateDebits,
    pub(crate) clock: C,
    /// The part of shared limits by which this cell decides, in millionths.
    share: AtomicU64,
    /// How limits are divided while peers are silent.
    division: ArcSwap<Division>,
    pub(crate) counts: Counts,
}

pub(crate) type Charges<'a> = SmallVec<[Charge<'a>; 4]>;

impl<S: CounterStore, T: Transport + Clone, C: Clock + Clone> RegionalStore<S, T, C> {
    /// Puts the limits of several cells in front of a cell's own store.
    pub fn new(
        own: S,
        members: Arc<Members>,
        transport: T,
        names: Pseudonyms,
        clock: C,
        leases: LeaseConfig,
    ) -> Self {
        let owners = OwnerStore::new(Arc::clone(&members), transport, clock.clone());
        let config = members.config();
        let (now, most) = (clock.now(), config.max_pending);
        let share = if config.peers.is_empty() { WHOLE } else { 0 };
        let store = Self {
            own,
            leases: LeasedStore::new(owners.clone(), owners.clone(), clock.clone(), leases),
            owners,
            names,
            ledger: Arc::new(Ledger::new(most)),
            last_tick: Mutex::default(),
            outboxes: (0..members.slots()).map(|_| Mutex::new(Outbox::new(most, now))).collect(),
            inbox: Inbox::new(MAX_CELLS),
            locks: CounterLocks::default(),
            overdrafts: Overdrafts::default(),
            lost_units: LostUnits::default(),
            others: Others::default(),
            late: LatePeers::default(),
            late_debits: LateDebits::default(),
            clock,
            share: AtomicU64::new(share),
            division: ArcSwap::default(),
            counts: Counts::default(),
            members,
        };
        store.refresh();
        store
    }

    /// Returns the cell's own store.
    pub const fn own(&self) -> &S {
        &self.own
    }

    /// Returns the leases of other cells' counters.
    pub const fn leases(&self) -> &OwnerLeases<T, C> {
        &self.leases
    }

    /// Returns the cells.
    pub fn members(&self) -> &Arc<Members> {
        &self.members
    }

    /// Returns the time by this cell's clock.
    pub fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Returns the first message of this cell.
    pub fn hello(&self) -> Hello {
        let config = self.members.config();
        Hello {
            version: crate::message::VERSION,
            cell: config.cell.clone(),
            region: config.region.clone(),
            incarnation: self.members.incarnation(),
            key_check: self.names.key_check(),
            cells_check: self.members.cells_check(),
            rank: config.rank,
            silence: Some(config.silence.as_micros()),
        }
    }

    /// Returns how long ago everything was consumed that all cells know which answer; of those that are silent, see the
    /// share.
    fn lag(&self, now: Timestamp) -> TimeDelta {
        let answering = self.members.contacts(now).into_iter().map(|(contact, _)| contact);
        let answering = answering.filter(|contact| !self.members.is_silent(*contact, now));
        let known = answering.filter_map(|contact| self.outbox(contact).map(|outbox| outbox.acked_until()));
        known.min().map_or(TimeDelta::ZERO, |known| now.since(known))
    }

    /// Returns the part of shared limits by which this cell decides, in millionths.
    pub(crate) fn share_millionths(&self) -> u64 {
        self.share.load(Ordering::Relaxed)
    }

    /// Returns statistics.
    pub fn stats(&self) -> RegionStats {
        let now = self.clock.now();
        let peers = self.members.peers(now).into_iter().map(|(at, status)| {
            let (mut peer, outbox) = (crate::stats::PeerStats::new(status), self.outbox(at));
            if let Some(outbox) = outbox {
                peer.lag = now.since(outbox.acked_until());
                (peer.waiting, peer.dropped) = (outbox.waiting(), outbox.dropped());
                peer.refused = outbox.refused();
            }
            peer
        });
        RegionStats {
            dropped_overdrafts: self.overdrafts.dropped(),
            dropped_debits: self.late_debits.dropped(),
            late_peers: self.late.count(),
            is_displaced: self.members.is_displaced(now),
            has_majority: self.members.has_majority(now),
            has_joined: self.members.has_joined(now),
            ..self.counts.read(peers.collect(), self.ledger.dropped(), self.share_millionths())
        }
    }

    /// Returns whether this cell decides a charge.
    pub(crate) fn is_own(&self, key: &CounterKey<'_>) -> bool {
        !key.scope.region_mode().has_owner() || self.members.decider(key, self.clock.now()) == Decider::Own
    }
}
