//! In-flight permits: the number held now, by rule for metrics, and of each fleet's capacity for its fair shares. Counted where permits are held (a gateway, a layer, a
//! reservation), so only concurrency rules pay for it.

use crate::by_rule::ByRule;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_core::Priority;

/// Permit counts by rule.
#[derive(Debug, Default)]
pub(crate) struct InFlight(ByRule<AtomicU64>);

/// Places of a fleet's capacity that the requests of this node hold.
#[derive(Debug, Default)]
pub(crate) struct FleetPlaces {
    all: Places,
    /// Those of what is reserved for each priority.
    reserves: [Places; 4],
}

#[derive(Debug, Default)]
struct Places {
    held: AtomicU64,
    begun: AtomicU64,
}

/// A request's places in a fleet's capacity, and in what is reserved for its priority if that admitted it.
#[derive(Debug)]
pub(crate) struct FleetPlace {
    pub(crate) fleet: Arc<FleetPlaces>,
    pub(crate) reserve: Option<Priority>,
    /// Number of places.
    pub(crate) units: u64,
}

/// Counts a request as in flight until it is dropped.
#[derive(Debug)]
pub(crate) struct InFlightGuard(SmallVec<[Arc<AtomicU64>; 2]>, Option<FleetPlace>);

impl Places {
    fn read(&self) -> (u64, u64) {
        (self.held.load(Ordering::Relaxed), self.begun.load(Ordering::Relaxed))
    }
}

impl FleetPlaces {
    /// Returns the number of places that are held, and of those that have ever been taken.
    pub(crate) fn read(&self) -> (u64, u64) {
        self.all.read()
    }

    /// Returns the same of what is reserved for a priority.
    pub(crate) fn read_reserve(&self, priority: usize) -> (u64, u64) {
        self.reserves[priority].read()
    }
}

impl FleetPlace {
    fn places(&self) -> impl Iterator<Item = (&Places, u64)> {
        let reserve = self.reserve.map(|priority| &self.fleet.reserves[priority.index()]);
        std::iter::once(&self.fleet.all).chain(reserve).map(|places| (places, self.units))
    }
}

impl InFlight {
    /// Counts one request under `rules`, and in the fleet's capacity if it has a place there. Returns `None` if there are no rules.
    pub(crate) fn enter<'r>(
        &self,
        rules: impl Iterator<Item = &'r str>,
        fleet: Option<FleetPlace>,
    ) -> Option<Arc<InFlightGuard>> {
        let counts: SmallVec<[_; 2]> = rules.map(|rule| self.0.counter(rule)).collect();
        if counts.is_empty() {
            return None;
        }
        counts.iter().for_each(|count| _ = count.fetch_add(1, Ordering::Relaxed));
        for (places, units) in fleet.iter().flat_map(FleetPlace::places) {
            places.held.fetch_add(units, Ordering::Relaxed);
            places.begun.fetch_add(units, Ordering::Relaxed);
        }
        Some(Arc::new(InFlightGuard(counts, fleet)))
    }

    /// Returns all rules that ever held permits, with their current counts.
    pub(crate) fn all(&self) -> Vec<(String, u64)> {
        self.0.all(|rule, count| (rule.to_owned(), count.load(Ordering::Relaxed)))
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.iter().for_each(|count| _ = count.fetch_sub(1, Ordering::Relaxed));
        for (places, units) in self.1.iter().flat_map(FleetPlace::places) {
            places.held.fetch_sub(units, Ordering::Relaxed);
        }
    }
}
