//! Fairness between the tenants that share the fleet's capacity, as one node sees them.
//!
//! The store's counters decide who finds room: requests beyond their tenant's fair share find the capacity in use a little
//! earlier than others, requests within a guarantee later. This controller only says which request is which. Fair shares are
//! those of [`Shares`], of what this node's requests get of the capacity, and at least its equal part, so nothing is exchanged
//! between nodes; an error changes who is served, never how much. Guarantees are counters of the store.
//!
//! All is counted in units of the capacity: a request that costs five of them, or five places, is five.
//!
//! A tenant has the larger of its guarantee and its fair share, not their sum: a request beyond the fair share that a guarantee admits is
//! debited from the share. What guarantees take beyond the shares of their tenants, the others share less of.
//!
//! What is reserved for a priority has a controller of its own: its tenants share it, whatever their shares of the whole capacity are.
//!
//! While the capacity has not been in use for [`CALM`], nothing is counted or ranked, and before it has been for the first time there
//! are no tables of tenants: a domain without load takes next to no memory. Rejected: shedding beyond the fair share at the
//! node, which wastes capacity whenever the share is estimated too low.

mod node_part;

pub use node_part::{NodePart, NodePlaces};

use crate::shares::{DISTRIBUTED, Shares, Standing, TenantDemand, TenantRequest, TierShare, TierState};
use crate::striped::Padded;
use node_part::Durations;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use tollgate_core::{TimeDelta, Timestamp};

/// Time since the capacity was last found in use after which it is not contended any more.
const CALM: TimeDelta = TimeDelta::from_secs(1);
/// Time between two control steps.
const STEP: TimeDelta = TimeDelta::from_millis(100);
/// Time constant of the measured throughput, in seconds.
const MEMORY: f64 = 0.4;

/// Controller of one domain's fleet on this node.
#[derive(Debug)]
pub struct FleetFairness {
    key: u64,
    tiers: Box<[TierShare]>,
    /// From the first contention on.
    ranking: OnceLock<Box<Ranking>>,
    /// Until when the capacity is contended, in microseconds.
    pressed_until: AtomicU64,
    /// Whether a throughput has been measured since the capacity is contended.
    is_measured: AtomicBool,
    /// Units of requests that were admitted.
    admitted: Padded<AtomicU64>,
    /// Those that a guarantee admitted, and those of them that no share covers.
    guaranteed: AtomicU64,
    uncovered: AtomicU64,
    next_step: AtomicU64,
}

/// Tables of the tenants.
#[derive(Debug)]
struct Ranking {
    shares: Shares,
    control: Mutex<Control>,
}

#[derive(Debug)]
struct Control {
    demand: TenantDemand,
    throughput: f64,
    guaranteed: f64,
    uncovered: f64,
    durations: Durations,
    last: Timestamp,
}

impl FleetFairness {
    /// Creates a controller for tiers with these weights; what they guarantee is not its concern. `key` is secret. Tenants take memory
    /// from the first contention on.
    #[must_use]
    pub fn new(key: u64, tiers: &[TierShare]) -> Self {
        Self {
            key,
            tiers: tiers.iter().map(|tier| TierShare { guarantee: 0.0, ..*tier }).collect(),
            ranking: OnceLock::new(),
            pressed_until: AtomicU64::new(0),
            is_measured: AtomicBool::new(false),
            admitted: Padded(AtomicU64::new(0)),
            guaranteed: AtomicU64::new(0),
            uncovered: AtomicU64::new(0),
            next_step: AtomicU64::new(0),
        }
    }

    fn ranking(&self) -> &Ranking {
        self.ranking.get_or_init(|| {
            let control = Control {
                demand: TenantDemand::new(),
                throughput: 0.0,
                guaranteed: 0.0,
                uncovered: 0.0,
                durations: Durations::default(),
                last: Timestamp::ZERO,
            };
            Box::new(Ranking { shares: Shares::new(self.key, &self.tiers), control: Mutex::new(control) })
        })
    }

    /// Returns whether the capacity has been in use of late.
    #[inline]
    #[must_use]
    pub fn is_pressed(&self, now: Timestamp) -> bool {
        now.as_micros() < self.pressed_until.load(Ordering::Relaxed)
    }

    /// Records that a request found the capacity in use.
    pub fn press(&self, now: Timestamp) {
        let until = (now + CALM).as_micros();
        let before = self.pressed_until.load(Ordering::Relaxed);
        if before < now.as_micros() {
            self.begin(now);
        }
        // A shared line is written a few times in a second, not with every denial.
        if before + (STEP.as_micros() / 2) < until {
            self.pressed_until.fetch_max(until, Ordering::Relaxed);
        }
    }

    /// Begins to measure after a calm time.
    #[cold]
    fn begin(&self, now: Timestamp) {
        let mut control = self.ranking().control();
        self.is_measured.store(false, Ordering::Relaxed);
        self.admitted.0.store(0, Ordering::Relaxed);
        self.guaranteed.store(0, Ordering::Relaxed);
        self.uncovered.store(0, Ordering::Relaxed);
        (control.last, control.throughput) = (now, 0.0);
        (control.guaranteed, control.uncovered) = (0.0, 0.0);
        control.durations = Durations::default();
        self.next_step.store((now + STEP).as_micros(), Ordering::Relaxed);
    }

    /// Counts a request of a tenant while the capacity is contended. Returns whether it exceeds the tenant's fair share.
    /// `part` returns this node's part of the capacity, if all nodes had the same: at least that is shared out, so that a node whose
    /// callers ask for less is not outbid by others.
    pub fn is_excess(&self, now: Timestamp, request: TenantRequest, part: impl FnOnce() -> NodePart) -> bool {
        let ranking = self.ranking();
        self.step_if_due(ranking, now, part);
        let standing = ranking.shares.take(request, now, true);
        standing == Standing::Excess && self.is_measured.load(Ordering::Relaxed)
    }

    /// Counts a request of so many units that found room while the capacity is contended.
    pub fn count_admitted(&self, units: u64) {
        self.admitted.0.fetch_add(units, Ordering::Relaxed);
    }

    /// Counts a request beyond its tenant's fair share that found room while the capacity is contended. The tenant has that much less of its
    /// share: one that takes all that others leave would else take from what is left for those within their shares as well.
    pub fn count_excess(&self, now: Timestamp, request: TenantRequest) {
        self.count_admitted(request.units);
        self.ranking().shares.debit(request, now);
    }

    /// Counts a request that a guarantee admitted while the capacity is contended. One within its tenant's fair share has been taken
    /// from that already.
    pub fn count_guaranteed(&self, now: Timestamp, request: TenantRequest, is_excess: bool) {
        self.count_admitted(request.units);
        self.guaranteed.fetch_add(request.units, Ordering::Relaxed);
        if is_excess {
            let uncovered = self.ranking().shares.debit(request, now);
            self.uncovered.fetch_add(uncovered, Ordering::Relaxed);
        }
    }

    /// Returns the demand and fair shares of each tier while the capacity is contended; the last is that of requests without one.
    #[must_use]
    pub fn states(&self, now: Timestamp) -> Vec<TierState> {
        let Some(ranking) = self.ranking.get().filter(|_| self.is_pressed(now)) else { return Vec::new() };
        let control = ranking.control();
        ranking.shares.states(&control.demand, control.throughput)
    }

    fn step_if_due(&self, ranking: &Ranking, now: Timestamp, part: impl FnOnce() -> NodePart) {
        if now.as_micros() < self.next_step.load(Ordering::Relaxed) {
            return;
        }
        // Another thread makes the step.
        let Ok(mut control) = ranking.control.try_lock() else { return };
        if now.as_micros() < self.next_step.load(Ordering::Relaxed) {
            return;
        }
        self.next_step.store((now + STEP).as_micros(), Ordering::Relaxed);
        let length = now.since(control.last).as_micros() as f64 / 1e6;
        if length <= 0.0 {
            return;
        }
        let Control { demand, throughput, guaranteed, uncovered, durations, last } = &mut *control;
        *last = now;
        let weight = if *throughput == 0.0 { 1.0 } else { 1.0 - (-length / MEMORY).exp() };
        let follow = |rate: &mut f64, count: &AtomicU64| {
            *rate += weight * (count.swap(0, Ordering::Relaxed) as f64 / length - *rate);
        };
        follow(throughput, &self.admitted.0);
        follow(guaranteed, &self.guaranteed);
        follow(uncovered, &self.uncovered);
        let part = part();
        let shared = durations.shared_out(part, length, *throughput);
        // What is not shared out is a part of what is left to share, not of what is guaranteed.
        let kept = *guaranteed * (1.0 / DISTRIBUTED - 1.0);
        ranking.shares.update(length, (shared + kept - *uncovered).max(0.0), demand);
        if part == NodePart::Whole && demand.tenants() <= 1 {
            ranking.shares.share_without_bound();
        }
        self.is_measured.store(true, Ordering::Relaxed);
    }
}

impl Ranking {
    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
