//! Statistics of the exchange between cells.

use crate::members::PeerStatus;
use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_core::TimeDelta;

#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) batches_sent: AtomicU64,
    pub(crate) batches_received: AtomicU64,
    pub(crate) batches_repeated: AtomicU64,
    pub(crate) counters_received: AtomicU64,
    pub(crate) charges_received: AtomicU64,
    pub(crate) forwarded: AtomicU64,
    pub(crate) forward_failures: AtomicU64,
    pub(crate) regional_only: AtomicU64,
    pub(crate) unknown_messages: AtomicU64,
    pub(crate) assumed_lost: AtomicU64,
    pub(crate) overshoot: AtomicU64,
    pub(crate) late_assumed: AtomicU64,
}

pub(crate) fn add(count: &AtomicU64, more: u64) {
    count.fetch_add(more, Ordering::Relaxed);
}

/// State of one peer.
#[derive(Clone, Debug)]
pub struct PeerStats {
    /// Who it is, and whether it answers.
    pub status: PeerStatus,
    /// How long ago all consumption that it knows was made.
    pub lag: TimeDelta,
    /// Counters whose consumption it has not acknowledged.
    pub waiting: usize,
    /// Units that were not reported, because too many counters were waiting.
    pub dropped: u64,
    /// Batches that it did not apply, each time that they were sent.
    pub refused: u64,
}

impl PeerStats {
    pub(crate) const fn new(status: PeerStatus) -> Self {
        Self { status, lag: TimeDelta::ZERO, waiting: 0, dropped: 0, refused: 0 }
    }
}

/// Statistics.
#[derive(Clone, Debug)]
pub struct RegionStats {
    /// Each peer.
    pub peers: Vec<PeerStats>,
    /// Part of shared limits by which this cell decides, in millionths; less than the whole while peers are silent.
    pub share_millionths: u64,
    /// Batches that peers have acknowledged.
    pub batches_sent: u64,
    /// Batches applied.
    pub batches_received: u64,
    /// Batches that arrived again, and were not applied.
    pub batches_repeated: u64,
    /// Counters in applied batches.
    pub counters_received: u64,
    /// Requests charged for other cells.
    pub charges_received: u64,
    /// Requests that other cells decide in part.
    pub forwarded: u64,
    /// Those that failed.
    pub forward_failures: u64,
    /// Requests decided by this cell's share while peers were silent.
    pub regional_only: u64,
    /// Messages of unknown kinds.
    pub unknown_messages: u64,
    /// Counters that counted as used up, because their state may be in another cell.
    pub assumed_lost: u64,
    /// Units admitted by other cells beyond what was left here.
    pub overshoot: u64,
    /// Requests decided with the consumption of a late cell assumed.
    pub late_assumed: u64,
    /// Processes of other cells whose reports are late.
    pub late_peers: usize,
    /// Whether another process has this cell's name: then this one decides nothing that cells share.
    pub is_displaced: bool,
    /// Whether a majority of the cells answers this one: without it, a cell decides nothing that a hash gives it.
    pub has_majority: bool,
    /// Whether it has done so for the silence time, and the store of this cell is not down: then it decides what a hash gives it.
    pub has_joined: bool,
    /// Units that were not reported, because too many counters were active.
    pub unreported: u64,
    /// Debts beyond a bucket's state that were dropped, because there were too many.
    pub dropped_overdrafts: u64,
    /// Units of debits that the store refused after its deadline and that were dropped, because there were too many.
    pub dropped_debits: u64,
}

impl Counts {
    pub(crate) fn read(&self, peers: Vec<PeerStats>, unreported: u64, share_millionths: u64) -> RegionStats {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        RegionStats {
            peers,
            share_millionths,
            batches_sent: of(&self.batches_sent),
            batches_received: of(&self.batches_received),
            batches_repeated: of(&self.batches_repeated),
            counters_received: of(&self.counters_received),
            charges_received: of(&self.charges_received),
            forwarded: of(&self.forwarded),
            forward_failures: of(&self.forward_failures),
            regional_only: of(&self.regional_only),
            unknown_messages: of(&self.unknown_messages),
            assumed_lost: of(&self.assumed_lost),
            overshoot: of(&self.overshoot),
            late_assumed: of(&self.late_assumed),
            late_peers: 0,
            is_displaced: false,
            has_majority: true,
            has_joined: true,
            unreported,
            dropped_overdrafts: 0,
            dropped_debits: 0,
        }
    }
}
