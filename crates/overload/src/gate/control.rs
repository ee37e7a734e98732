//! The control step of a gate: once in an interval it reads what was counted, and sets the limit, the threshold, the shares
//! and the bounds of the waiting room.

use super::places::{DENIED, GUARANTEED, LATE};
use super::{Gate, lock, sampling};
use crate::limit::{Interval, LimitController};
use crate::priority::{COHORTS, POSITIONS};
use crate::room::RoomBounds;
use crate::samples::BUCKETS;
use crate::shares::TenantDemand;
use crate::threshold::{QueueState, ThresholdController};
use std::sync::atomic::Ordering;
use tollgate_core::{TimeDelta, Timestamp};

/// Bounds of the control interval, and its length in base latencies.
const SHORTEST: f64 = 0.1;
const LONGEST: f64 = 2.0;
const LATENCIES: f64 = 2.0;
/// Waiting requests that the threshold's controller holds, and that the room has space for, as parts of the limit.
const WANTED: f64 = 0.5;
const SPACE: f64 = 1.5;
/// Longest wait outside a standing queue, in base latencies.
const LONG_WAIT: f64 = 3.0;
/// Base latency until one has been measured, in seconds.
const UNKNOWN_LATENCY: f64 = 0.05;
/// Most requests that may wait.
const MAX_WAITING: f64 = 10_000.0;

/// Time constant of the rate of denials, in seconds.
const DENIED_MEMORY: f64 = 0.7;

/// What the control step keeps between intervals.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) limit: LimitController,
    pub(super) threshold: ThresholdController,
    pub(super) demand: Option<TenantDemand>,
    /// Requests per second that limits deny after they have passed the gate, or that fail.
    pub(super) denied: f64,
    /// Whether the places belong to a gate with other settings by now.
    pub(super) is_replaced: bool,
    pub(super) last: Timestamp,
}

impl Control {
    pub(super) fn new(limit: LimitController, demand: Option<TenantDemand>) -> Self {
        let threshold = ThresholdController::new();
        Self { limit, threshold, demand, denied: 0.0, is_replaced: false, last: Timestamp::ZERO }
    }
}

/// Returns the base latency in microseconds until one has been measured.
pub(super) fn unknown_latency() -> TimeDelta {
    micros(UNKNOWN_LATENCY)
}

/// Returns the bounds of the waiting room until there are measurements.
pub(super) fn first_bounds(limit: f64) -> RoomBounds {
    RoomBounds {
        size: room_size(limit),
        short: micros(UNKNOWN_LATENCY),
        long: micros(UNKNOWN_LATENCY * LONG_WAIT),
        standing: TimeDelta::MAX,
    }
}

impl<W> Gate<W> {
    /// Runs the control step if its time has come and no other thread does.
    #[inline]
    pub(super) fn step_if_due(&self, now: Timestamp) {
        if now.as_micros() >= self.next_step.load(Ordering::Relaxed) {
            self.step(now);
        }
    }

    #[cold]
    fn step(&self, now: Timestamp) {
        let Ok(mut control) = self.control.try_lock() else { return };
        if control.is_replaced {
            self.next_step.store(u64::MAX, Ordering::Relaxed);
            return;
        }
        let Control { limit, threshold, demand, denied, last, .. } = &mut *control;
        let base = limit.base_latency().unwrap_or(UNKNOWN_LATENCY);
        let interval = micros((base * LATENCIES).clamp(SHORTEST, LONGEST));
        if *last == Timestamp::ZERO {
            *last = now;
            self.next_step.store((now + interval).as_micros(), Ordering::Relaxed);
            return;
        }
        let elapsed = now.since(*last);
        if elapsed < interval {
            // It has become longer: the next requests need not ask.
            self.next_step.store((*last + interval).as_micros(), Ordering::Relaxed);
            return;
        }
        *last = now;
        let length = elapsed.as_micros() as f64 / 1e6;
        let (mut read, threads) = (lock(&self.places.read), &self.places.threads);
        let completed = read.completed(threads);
        for at in 0..BUCKETS {
            let (count, sum) = read.completions(threads, at);
            if count > 0 {
                limit.add_samples(at, count, sum as f64 / 1e6);
            }
        }
        let period = sampling::period(f64::from(completed) / length);
        let per_sample = self.places.bounds.0.sample_period.swap(period, Ordering::Relaxed);
        let mut room = lock(&self.places.room);
        let (late, sum) = read.arrivals(threads, LATE);
        limit.add_late(late, sum as f64 / 1e6);
        let mut waiting = room.take_mean(now, elapsed);
        let is_shadow = self.is_shadow();
        if is_shadow {
            let over = f64::from(self.places.in_flight()) - limit.steady_limit();
            waiting = over.max(0.0);
        }
        let is_saturated = waiting > 0.0;
        let is_flooded = is_shadow && is_saturated;
        limit.update(Interval { length, completed, per_sample, waiting, is_flooded });
        let guaranteed = read.arrivals(threads, GUARANTEED).0;
        threshold.add_demand(length, guaranteed, |at| read.arrivals(threads, at).0);
        let per_place = self.config.cohorts_per_place();
        threshold.move_demand(self.cohorts.advance(now) / per_place, COHORTS / per_place);
        let steady = limit.steady_limit();
        let wanted = (steady * WANTED).max(1.0);
        // What is denied or fails shows no capacity, but passes the gate beside what does.
        let turned_away = f64::from(read.arrivals(threads, DENIED).0) / length;
        *denied += (1.0 - (-length / DENIED_MEMORY).exp()) * (turned_away - *denied);
        let throughput = limit.throughput();
        let passing = throughput + *denied;
        let place = threshold.update(QueueState { length, passing, waiting, wanted });
        let is_pressed = place < POSITIONS || is_saturated;
        if let (Some(shares), Some(demand)) = (&self.shares, demand) {
            shares.update(length, throughput, demand);
        }
        let base = limit.base_latency().unwrap_or(UNKNOWN_LATENCY);
        self.places.bounds.0.base.store(micros(base).as_micros(), Ordering::Relaxed);
        room.bounds = RoomBounds {
            size: room_size(steady),
            short: micros(base * (self.config.target - 1.0).max(0.05)),
            long: micros(base * LONG_WAIT),
            standing: if place < POSITIONS { interval } else { TimeDelta::MAX },
        };
        let served_in_time = throughput * base * LONG_WAIT;
        self.places.set_could_wait(served_in_time.min(room.bounds.size as f64) as u32);
        self.places.set_waiting(&room);
        drop(room);
        drop(read);
        let retry_after = (threshold.total_demand() / passing.max(1.0)).ceil().clamp(1.0, 10.0);
        self.retry_after.store(retry_after as u32, Ordering::Relaxed);
        let next = limit.limit(is_saturated);
        self.places.set_limit(next);
        self.threshold.store(place, Ordering::Relaxed);
        self.boundary.store(threshold.boundary(), Ordering::Relaxed);
        self.pressed.store(is_pressed.into(), Ordering::Relaxed);
        self.next_step.store((now + interval).as_micros(), Ordering::Relaxed);
    }
}

pub(super) fn room_size(limit: f64) -> usize {
    (limit * SPACE).clamp(4.0, MAX_WAITING) as usize
}

fn micros(seconds: f64) -> TimeDelta {
    TimeDelta::from_micros((seconds * 1e6) as u64)
}
