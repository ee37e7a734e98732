//! The threshold: from which place in the order of shedding on requests are shed.
//!
//! What may enter is what the upstream completes, times a factor; what arrives at each place of the order is measured; the
//! threshold is the place up to which arrivals add up to that. So a jump of the load is answered in one interval, whatever
//! the mix of priorities. The factor is a PI controller's on the waiting room: it holds a short queue there, which keeps the
//! upstream busy and costs the requests that wait only a fraction of their latency. The threshold falls at once and rises
//! slowly. Moving the threshold itself by a PI controller was rejected: its gain would depend on how many requests each
//! priority has, which changes as the threshold crosses from one to the next.

use crate::priority::{COHORTS, POSITIONS};

/// Buckets in which arrivals are counted, and places in each.
pub(crate) const DEMAND_BUCKETS: usize = 128;
pub(crate) const PER_BUCKET: u16 = POSITIONS / DEMAND_BUCKETS as u16;

const PROPORTIONAL: f64 = 0.08;
/// Per second.
const INTEGRAL: f64 = 0.25;
/// Bounds of the integral part.
const LEAST: f64 = -0.3;
const MOST: f64 = 1.0;
/// Places per second that the threshold rises at most.
const RISE: f64 = 250.0;
/// Places per second that it rises at least while no request waits.
const IDLE_RISE: f64 = 100.0;
/// Time constant of the measured demand, in seconds.
const DEMAND_MEMORY: f64 = 0.4;

/// Controller of the threshold.
#[derive(Clone, Debug)]
pub(crate) struct ThresholdController {
    demand: [f64; DEMAND_BUCKETS],
    guaranteed: f64,
    integral: f64,
    threshold: f64,
}

/// What a control interval measured.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueState {
    /// Length of the interval in seconds.
    pub(crate) length: f64,
    /// Requests per second that may pass: those that complete and those that limits deny.
    pub(crate) passing: f64,
    /// Mean number of waiting requests.
    pub(crate) waiting: f64,
    /// The number that should wait while requests are shed.
    pub(crate) wanted: f64,
}

impl ThresholdController {
    pub(crate) fn new() -> Self {
        Self {
            demand: [0.0; DEMAND_BUCKETS],
            guaranteed: 0.0,
            integral: 0.0,
            threshold: f64::from(POSITIONS),
        }
    }

    /// Adds the arrivals of an interval: by bucket, and those within a guarantee.
    pub(crate) fn add_demand(&mut self, length: f64, guaranteed: u32, mut take: impl FnMut(usize) -> u32) {
        let weight = 1.0 - (-length / DEMAND_MEMORY).exp();
        for (bucket, rate) in self.demand.iter_mut().enumerate() {
            *rate += weight * (f64::from(take(bucket)) / length - *rate);
        }
        self.guaranteed += weight * (f64::from(guaranteed) / length - self.guaranteed);
    }

    /// Follows callers that have moved by this many places within each `span` of the order of shedding.
    pub(crate) fn move_demand(&mut self, places: u16, span: u16) {
        let (by, span) = (usize::from(places / PER_BUCKET), usize::from(span / PER_BUCKET));
        self.demand.chunks_exact_mut(span).for_each(|part| part.rotate_right(by % span));
    }

    /// Returns the controller for another order within the priorities: it keeps what arrives in each of them, but not where.
    pub(crate) fn with_even_demand(&self) -> Self {
        let mut next = self.clone();
        let of_each = usize::from(COHORTS / PER_BUCKET);
        for part in next.demand.chunks_exact_mut(of_each) {
            let mean = part.iter().sum::<f64>() / of_each as f64;
            part.fill(mean);
        }
        next
    }

    /// Ends a control interval. Returns the threshold, rounded to a place.
    pub(crate) fn update(&mut self, state: QueueState) -> u16 {
        let QueueState { length, passing, waiting, wanted } = state;
        let error = ((wanted - waiting) / wanted).clamp(-1.5, 1.0);
        let whole = f64::from(POSITIONS);
        if self.threshold >= whole && error > 0.0 {
            self.integral = 0.0;
            return POSITIONS;
        }
        self.integral = (self.integral + INTEGRAL * error * length).clamp(LEAST, MOST);
        let factor = 1.0 + PROPORTIONAL * error + self.integral;
        let place = self.place(passing * factor - self.guaranteed);
        // An upstream that completed nothing for a while shows its capacity only if requests are let in again.
        let least = if waiting == 0.0 { self.threshold + IDLE_RISE * length } else { 0.0 };
        self.threshold = place.max(least).min(self.threshold + RISE * length).clamp(0.0, whole);
        self.threshold.round() as u16
    }

    /// Returns the place up to which arrivals add up to `rate`.
    fn place(&self, mut rate: f64) -> f64 {
        // Guarantees alone are more than what completes.
        if rate <= 0.0 {
            return 0.0;
        }
        for (bucket, demand) in (0u16..).zip(&self.demand) {
            if *demand > rate {
                return f64::from(PER_BUCKET) * (f64::from(bucket) + rate / demand);
            }
            rate -= demand;
        }
        f64::from(POSITIONS)
    }

    /// Returns the threshold in buckets × 65536, for [`passes`].
    pub(crate) fn boundary(&self) -> u32 {
        (self.threshold / f64::from(PER_BUCKET) * 65_536.0) as u32
    }

    /// Returns the arrivals per second.
    pub(crate) fn total_demand(&self) -> f64 {
        self.demand.iter().sum::<f64>() + self.guaranteed
    }
}

/// Returns whether a request at this place passes. In the bucket that the threshold divides, which may be that of a single
/// caller, a random part passes: all or nothing would serve a few callers far more or less than there is room for.
#[inline]
pub(crate) fn passes(position: u16, boundary: u32, random: u16) -> bool {
    (u32::from(position / PER_BUCKET) << 16 | u32::from(random)) < boundary
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(waiting: f64) -> QueueState {
        QueueState { length: 0.1, passing: 100.0, waiting, wanted: 4.0 }
    }

    #[test]
    fn an_upstream_that_stood_still_is_tried_again() {
        let mut controller = ThresholdController::new();
        controller.add_demand(10.0, 0, |_| 20);
        let still = QueueState { passing: 0.0, ..state(20.0) };
        assert_eq!(controller.update(still), 0);
        let back: Vec<_> = (0..60).map(|_| controller.update(QueueState { waiting: 0.0, ..still })).collect();
        assert!(back.is_sorted() && back[0] > 0, "{back:?}");
        assert_eq!(back.last(), Some(&POSITIONS));
    }

    #[test]
    fn another_order_keeps_the_demand_of_each_priority() {
        let mut controller = ThresholdController::new();
        controller.add_demand(10.0, 0, |bucket| if bucket == 70 { 3_200 } else { 0 });
        let even = controller.with_even_demand();
        assert!((even.total_demand() - controller.total_demand()).abs() < 1e-6);
        let normal = &even.demand[64..96];
        assert!(normal.iter().all(|rate| *rate > 0.0 && *rate == normal[0]), "{normal:?}");
        assert!(even.demand[..64].iter().chain(&even.demand[96..]).all(|rate| *rate == 0.0));
    }

    #[test]
    fn guarantees_that_take_everything_leave_nothing_to_others() {
        let mut controller = ThresholdController::new();
        // Nothing arrives in the first part of the order.
        controller.add_demand(10.0, 20_000, |bucket| if bucket == 0 { 0 } else { 20 });
        assert_eq!(controller.update(state(20.0)), 0);
    }

    #[test]
    fn nothing_is_shed_without_a_queue_and_the_threshold_returns_when_it_is_gone() {
        let mut controller = ThresholdController::new();
        controller.add_demand(10.0, 0, |_| 20);
        assert_eq!(controller.update(state(0.0)), POSITIONS);
        let shed = controller.update(state(20.0));
        assert!(shed < POSITIONS / 2, "256 arrive, about 100 may enter: {shed}");
        controller.add_demand(10.0, 0, |_| 4);
        let back: Vec<_> = (0..30).map(|_| controller.update(state(0.0))).collect();
        assert!(back.is_sorted(), "{back:?}");
        assert_eq!(back.last(), Some(&POSITIONS));
    }
}
