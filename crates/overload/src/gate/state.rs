//! State of a gate, for metrics and reports.

use super::{Gate, lock};
use crate::shares::TierState;
use crate::striped::Padded;
use std::sync::atomic::{AtomicU64, Ordering};
use tollgate_core::Timestamp;

/// State of a gate, for metrics and reports.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GateState {
    /// Limit of requests in flight.
    pub limit: u32,
    /// Requests in flight.
    pub in_flight: u32,
    /// Requests that wait.
    pub waiting: u32,
    /// Place in the order of shedding from which on requests are shed: [`POSITIONS`] if none are.
    pub threshold: u16,
    /// Completions per second.
    pub throughput: f64,
    /// Arrivals per second.
    pub demand: f64,
    /// Latency without queueing, in seconds, if known.
    pub base_latency: Option<f64>,
    /// Whether nothing is shed, only counted.
    pub is_shadow: bool,
    /// Requests shed, by priority.
    pub shed: [u64; 4],
    /// Requests that would have been shed, by priority.
    pub shadowed: [u64; 4],
    /// Requests that went on, by priority.
    pub admitted: [u64; 4],
    /// Shares by configured tier; the last is that of all others. Empty if tenants are not distinguished.
    pub tiers: Vec<TierState>,
}

impl<W> Gate<W> {
    /// Returns the number of requests that wait.
    #[must_use]
    #[inline]
    pub fn waiting(&self) -> u32 {
        self.places.waiting()
    }

    /// Returns the number of requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.places.in_flight()
    }

    /// Returns the limit of requests in flight.
    #[must_use]
    #[inline]
    pub fn limit(&self) -> u32 {
        self.places.bounds.0.limit.load(Ordering::Relaxed)
    }

    /// Returns the state. Makes the control step if its time has come: without requests nothing else does.
    #[must_use]
    pub fn state(&self, now: Timestamp) -> GateState {
        self.step_if_due(now);
        let load = |counters: &[Padded<AtomicU64>; 4]| {
            std::array::from_fn(|at| counters[at].0.load(Ordering::Relaxed))
        };
        let admitted = |at: usize| {
            let counts = self.places.threads.all().map(|own| own.admitted[at].load(Ordering::Relaxed));
            counts.fold(0, u64::wrapping_add)
        };
        let control = lock(&self.control);
        let tiers = self.shares.as_ref().zip(control.demand.as_ref());
        GateState {
            limit: self.limit(),
            in_flight: self.places.in_flight(),
            waiting: self.places.waiting(),
            threshold: self.threshold.load(Ordering::Relaxed),
            throughput: control.limit.throughput(),
            demand: control.threshold.total_demand(),
            base_latency: control.limit.base_latency(),
            is_shadow: self.is_shadow(),
            shed: load(&self.places.shed),
            shadowed: load(&self.places.shadowed),
            admitted: std::array::from_fn(admitted),
            tiers: tiers
                .map_or_else(Vec::new, |(shares, demand)| shares.states(demand, control.limit.throughput())),
        }
    }
}
