//! The gate of an upstream: every request passes it before it is forwarded, and again when it has ended.
//!
//! A request that is not held back costs a handful of relaxed atomics: no lock, no allocation. The waiting room has a lock,
//! taken only by requests that found no free slot, and by those that end while others wait. Once in an interval a caller
//! also runs the control step; the others do not wait for it.

mod config;
mod control;
mod entry;
mod places;
mod reentry;
mod state;
#[cfg(test)]
mod tests;

pub use config::{GateConfig, LimitKind};
pub use entry::{Admitted, Arrival, Ended, Entry, GateMode, Shed, ShedCause, Ticket, Waited, Waiting};
pub use state::GateState;

use crate::cohort::{Cohorts, mix};
use crate::limit::LimitController;
use crate::priority::{COHORTS, POSITIONS, first_position};
use crate::room::{Rank, Seated};
use crate::samples::bucket;
use crate::shares::{Shares, Standing, TenantDemand};
use crate::threshold::{PER_BUCKET, ThresholdController, passes};
use control::Control;
use places::{DENIED, GUARANTEED, LATE, Places};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tollgate_core::{Priority, TimeDelta, Timestamp};

/// A failure after more than this many base latencies was not a fast one: the upstream is slow.
const LATE_FAILURE: u64 = 4;

/// Gate of an upstream. `W` stands for a request that waits.
#[derive(Debug)]
pub struct Gate<W> {
    config: GateConfig,
    cohorts: Cohorts,
    places: Arc<Places<W>>,
    threshold: AtomicU16,
    /// The threshold as [`passes`] takes it.
    boundary: AtomicU32,
    /// 1 while requests are shed or wait: tenants' buckets are used then.
    pressed: AtomicU32,
    /// Seconds, for `Retry-After`.
    retry_after: AtomicU32,
    /// Whether all requests pass for now, whatever the configuration says.
    is_suspended: AtomicBool,
    shares: Option<Shares>,
    next_step: AtomicU64,
    control: Mutex<Control>,
}

/// The data under these locks is consistent whenever a panic could happen.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<W> Gate<W> {
    /// Creates a gate.
    #[must_use]
    pub fn new(config: &GateConfig) -> Self {
        let limit = LimitController::new(config.limit.bounds());
        let places = Places::new(limit.limit(false), limit.steady_limit());
        let shares = config.is_fair.then(|| Shares::new(config.key, &config.tiers));
        Self {
            cohorts: Cohorts::new(config.key, config.cohorts_per_place()),
            config: config.clone(),
            places: Arc::new(places),
            threshold: AtomicU16::new(POSITIONS),
            boundary: AtomicU32::new(ThresholdController::new().boundary()),
            pressed: AtomicU32::new(0),
            retry_after: AtomicU32::new(1),
            is_suspended: AtomicBool::new(false),
            next_step: AtomicU64::new(0),
            control: Mutex::new(Control::new(limit, shares.is_some().then(TenantDemand::new))),
            shares,
        }
    }

    /// Creates a gate with other settings for the same upstream. It knows what this one has learned, and has its places:
    /// requests that are in flight or wait count in the new gate too, and end in either. This one makes no more control
    /// steps.
    #[must_use]
    pub fn with_config(&self, config: &GateConfig) -> Self {
        let mut next = Self { places: Arc::clone(&self.places), ..Self::new(config) };
        // The demand that was learned is that of the cohorts' present places.
        next.cohorts = next.cohorts.moved_as(&self.cohorts);
        let mut control = lock(&self.control);
        control.is_replaced = true;
        let learned = next.control.get_mut().unwrap_or_else(PoisonError::into_inner);
        learned.limit = control.limit.with_config(config.limit.bounds());
        // Fair shares give callers other places.
        learned.threshold = match config.is_fair == self.config.is_fair {
            true => control.threshold.clone(),
            false => control.threshold.with_even_demand(),
        };
        (learned.denied, learned.last) = (control.denied, control.last);
        next.next_step = AtomicU64::new(self.next_step.load(Ordering::Relaxed));
        self.places.set_limit(learned.limit.limit(false));
        for (from, to) in [(&self.pressed, &next.pressed), (&self.retry_after, &next.retry_after)] {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        next.threshold = AtomicU16::new(self.threshold.load(Ordering::Relaxed));
        next.boundary = AtomicU32::new(self.boundary.load(Ordering::Relaxed));
        drop(control);
        next
    }

    /// Sets whether all requests pass for now, as in the shadow mode.
    #[inline]
    pub fn set_shadow(&self, on: bool) {
        if self.is_suspended.load(Ordering::Relaxed) != on {
            self.is_suspended.store(on, Ordering::Relaxed);
        }
    }

    fn is_shadow(&self) -> bool {
        self.config.shadow || self.is_suspended.load(Ordering::Relaxed)
    }

    /// Decides about a request that arrives. With [`GateMode::Shadow`] this one passes whatever happens to others.
    pub fn enter(&self, now: Timestamp, arrival: &Arrival, mode: GateMode) -> Entry {
        self.step_if_due(now);
        let cohort = self.cohorts.cohort(arrival.caller);
        let threshold = self.threshold.load(Ordering::Relaxed);
        let (position, rank, is_excess) = self.position(now, arrival, cohort, threshold);
        let counted = position.map_or(GUARANTEED, |position| usize::from(position / PER_BUCKET));
        self.places.arrivals.count(counted);
        let shed = |cause| Shed {
            priority: arrival.priority,
            cohort,
            is_excess,
            in_flight: self.places.in_flight.0.load(Ordering::Relaxed),
            limit: self.places.limit.load(Ordering::Relaxed),
            cause,
            retry_after: TimeDelta::from_secs(self.retry_after.load(Ordering::Relaxed).into()),
        };
        let boundary = self.boundary.load(Ordering::Relaxed);
        let random =
            || (mix(arrival.caller ^ self.config.key ^ now.as_micros().rotate_left(24)) >> 48) as u16;
        let is_shed = position.is_some_and(|position| !passes(position, boundary, random()));
        if mode == GateMode::Shadow || self.is_shadow() {
            let (has_place, in_flight) = self.places.take_beyond(rank);
            // While requests would be shed by the threshold, there are always more in flight than there would be.
            let cause = match is_shed {
                true => Some(ShedCause::Threshold),
                false => (threshold >= POSITIONS && !has_place).then_some(ShedCause::Waited),
            };
            let ticket = Ticket { began: now, in_flight, is_shadowed: cause.is_some() };
            let Some(cause) = cause else {
                self.count_admitted(arrival.priority);
                return Entry::Admitted(ticket);
            };
            self.places.count_shadowed();
            self.places.shadowed[arrival.priority.index()].0.fetch_add(1, Ordering::Relaxed);
            return Entry::Shadowed(ticket, shed(cause));
        }
        if is_shed {
            self.count_shed(arrival.priority);
            return Entry::Shed(shed(ShedCause::Threshold));
        }
        if (rank.is_patient() || self.places.waiting.load(Ordering::Acquire) == 0)
            && let Some(in_flight) = self.places.take(rank)
        {
            self.count_admitted(arrival.priority);
            return Entry::Admitted(Ticket { began: now, in_flight, is_shadowed: false });
        }
        if self.pressed.load(Ordering::Relaxed) == 0 {
            self.pressed.store(1, Ordering::Relaxed);
        }
        Entry::Full(Waiting { rank, shed: shed(ShedCause::Waited) })
    }

    /// Lets a request wait that found no free place. Call [`Gate::admit_waiting`] afterwards: a place may have become free.
    pub fn wait(&self, now: Timestamp, waiting: Waiting, waiter: W) -> Waited<W> {
        let mut room = lock(&self.places.room);
        let seated = room.push(now, waiting.rank, waiter);
        self.places.waiting.store(u32::try_from(room.len()).unwrap_or(u32::MAX), Ordering::Release);
        drop(room);
        match seated {
            Seated::Until(until, replaced) => Waited::Until(until, replaced),
            Seated::Full => {
                self.count_shed(waiting.shed.priority);
                Waited::Shed(waiting.shed)
            }
        }
    }

    /// Counts a request that waited: as shed if it was given no place.
    pub fn count_waited(&self, priority: Priority, is_admitted: bool) {
        if is_admitted { self.count_admitted(priority) } else { self.count_shed(priority) }
    }

    /// Counts a response when its head has arrived. That is the latency of the request: how long its body takes may be
    /// its reader's doing, or be meant, as with a stream of events. Call it once for a request, and not for one that
    /// [failed](Ended::Failed): how fast an upstream fails is not how fast it works.
    pub fn measure(&self, ticket: &Ticket, now: Timestamp) {
        self.places.completions.add(bucket(ticket.in_flight), now.since(ticket.began).as_micros());
    }

    /// Ends a request. Returns the waiting requests that go on in its place.
    #[must_use = "the returned requests proceed only if their waiters are woken"]
    #[allow(clippy::needless_pass_by_value, reason = "a ticket is used once")]
    pub fn leave(&self, ticket: Ticket, now: Timestamp, ended: Ended) -> Admitted<W> {
        let (age, base) = (now.since(ticket.began).as_micros(), self.places.base.load(Ordering::Relaxed));
        // What may enter is what leaves: those that only came to be denied, or failed, have to be among it.
        if matches!(ended, Ended::Denied | Ended::Failed) {
            self.places.arrivals.count(DENIED);
        }
        // A request abandoned after more than the base latency would have taken even longer. Without these the limit
        // could not fall where the upstream is slower than its clients are patient.
        let is_late = match ended {
            Ended::Completed | Ended::Denied => false,
            Ended::Abandoned => age > base,
            Ended::Failed => age > base.saturating_mul(LATE_FAILURE),
        };
        if is_late {
            self.places.arrivals.add(LATE, age);
        }
        self.places.free(&ticket);
        self.step_if_due(now);
        self.admit_waiting(now)
    }

    /// Returns the waiting requests for which there are free places now.
    #[must_use = "the returned requests proceed only if their waiters are woken"]
    pub fn admit_waiting(&self, now: Timestamp) -> Admitted<W> {
        let mut admitted = Admitted::new();
        while self.places.waiting.load(Ordering::Acquire) > 0 {
            let mut room = lock(&self.places.room);
            let Some(in_flight) = room.next_rank().and_then(|rank| self.places.take(rank)) else { break };
            let next = room.pop(now);
            self.places.waiting.store(u32::try_from(room.len()).unwrap_or(u32::MAX), Ordering::Release);
            drop(room);
            match next {
                Some(waiter) => admitted.push((waiter, Ticket { began: now, in_flight, is_shadowed: false })),
                None => {
                    self.places.in_flight.0.fetch_sub(1, Ordering::AcqRel);
                }
            }
        }
        admitted
    }

    fn count_shed(&self, priority: Priority) {
        self.places.shed[priority.index()].0.fetch_add(1, Ordering::Relaxed);
    }

    fn count_admitted(&self, priority: Priority) {
        self.places.admitted[priority.index()].0.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the place in the order of shedding (none if it is within a guarantee), the rank in the waiting room, and
    /// whether it exceeds its tenant's fair share.
    fn position(
        &self,
        now: Timestamp,
        arrival: &Arrival,
        cohort: u16,
        threshold: u16,
    ) -> (Option<u16>, Rank, bool) {
        let first = first_position(arrival.priority);
        let standing = match &self.shares {
            None => return (Some(first + cohort), Rank::new(arrival.priority, Standing::Fair), false),
            Some(_) if self.pressed.load(Ordering::Relaxed) == 0 => Standing::Fair,
            Some(shares) => shares.take(arrival.tenant, arrival.tier, now, first < threshold),
        };
        let place = match standing {
            Standing::Guaranteed => None,
            // The first of the priority: it is not shed unless the whole priority is.
            Standing::Ample => Some(first),
            Standing::Fair => Some(first + cohort / 2),
            Standing::Excess => Some(first + COHORTS / 2 + cohort / 2),
        };
        (place, Rank::new(arrival.priority, standing), standing == Standing::Excess)
    }
}
