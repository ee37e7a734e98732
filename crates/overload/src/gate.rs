//! The gate of an upstream: every request passes it before it is forwarded, and again when it has ended.
//!
//! A request that is not held back costs a handful of relaxed atomics: no lock, no allocation. The waiting room has a lock,
//! taken only by requests that found no free slot, and by those that end while others wait. Once in an interval a caller
//! also runs the control step; the others do not wait for it.

mod config;
mod control;
mod entry;
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
use crate::room::{PATIENT, Rank, Room, Seated};
use crate::samples::{BUCKETS, bucket};
use crate::shares::{Shares, Standing, TenantDemand};
use crate::striped::{Padded, Striped};
use crate::threshold::{DEMAND_BUCKETS, PER_BUCKET, ThresholdController, passes};
use control::Control;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tollgate_core::{Priority, TimeDelta, Timestamp};

/// Places beyond the limit for requests within a guarantee and critical ones, as a part of it.
const RESERVE: f64 = 0.5;

const GUARANTEED: usize = DEMAND_BUCKETS;
const DENIED: usize = DEMAND_BUCKETS + 1;
const LATE: usize = DEMAND_BUCKETS + 2;

/// Gate of an upstream. `W` stands for a request that waits.
#[derive(Debug)]
pub struct Gate<W> {
    config: GateConfig,
    cohorts: Cohorts,
    in_flight: Padded<AtomicU32>,
    limit: AtomicU32,
    limit_with_reserve: AtomicU32,
    threshold: AtomicU16,
    /// The threshold as [`passes`] takes it.
    boundary: AtomicU32,
    /// 1 while requests are shed or wait: tenants' buckets are used then.
    pressed: AtomicU32,
    /// Seconds, for `Retry-After`.
    retry_after: AtomicU32,
    waiting: AtomicU32,
    completions: Striped<BUCKETS>,
    /// The last three count requests within a guarantee, those that a limit denied, and those that were abandoned after
    /// more than the base latency: samples, but no completions.
    arrivals: Striped<{ DEMAND_BUCKETS + 3 }>,
    /// Base latency in microseconds.
    base: AtomicU64,
    shed: [Padded<AtomicU64>; 4],
    shadowed: [Padded<AtomicU64>; 4],
    /// Whether all requests pass for now, whatever the configuration says.
    is_suspended: AtomicBool,
    admitted: [Padded<AtomicU64>; 4],
    shares: Option<Shares>,
    next_step: AtomicU64,
    control: Mutex<Control>,
    room: Mutex<Room<W>>,
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
        let bounds = control::first_bounds(limit.steady_limit());
        let shares = config.is_fair.then(|| Shares::new(config.key, &config.tiers));
        Self {
            cohorts: Cohorts::new(config.key, config.cohorts_per_place()),
            config: config.clone(),
            in_flight: Padded(AtomicU32::new(0)),
            limit: AtomicU32::new(limit.limit(false)),
            limit_with_reserve: AtomicU32::new(with_reserve(limit.limit(false))),
            threshold: AtomicU16::new(POSITIONS),
            boundary: AtomicU32::new(ThresholdController::new().boundary()),
            pressed: AtomicU32::new(0),
            retry_after: AtomicU32::new(1),
            waiting: AtomicU32::new(0),
            completions: Striped::new(),
            arrivals: Striped::new(),
            base: AtomicU64::new(control::unknown_latency().as_micros()),
            shed: Default::default(),
            shadowed: Default::default(),
            is_suspended: AtomicBool::new(false),
            admitted: Default::default(),
            next_step: AtomicU64::new(0),
            control: Mutex::new(Control::new(limit, shares.is_some().then(TenantDemand::new))),
            shares,
            room: Mutex::new(Room::new(bounds)),
        }
    }

    /// Creates a gate with other settings that knows what this one has learned about the upstream. Requests that are in
    /// flight stay with the old gate.
    #[must_use]
    pub fn with_config(&self, config: &GateConfig) -> Self {
        let mut next = Self::new(config);
        // The demand that was learned is that of the cohorts' present places.
        next.cohorts = next.cohorts.moved_as(&self.cohorts);
        let control = lock(&self.control);
        let learned = next.control.get_mut().unwrap_or_else(PoisonError::into_inner);
        learned.limit = control.limit.with_config(config.limit.bounds());
        // Fair shares give callers other places.
        learned.threshold = match config.is_fair == self.config.is_fair {
            true => control.threshold.clone(),
            false => control.threshold.with_even_demand(),
        };
        learned.denied = control.denied;
        let limit = learned.limit.limit(false);
        next.limit = AtomicU32::new(limit);
        next.limit_with_reserve = AtomicU32::new(with_reserve(limit));
        let counters =
            [(&self.shed, &next.shed), (&self.shadowed, &next.shadowed), (&self.admitted, &next.admitted)];
        for (from, to) in counters {
            for (from, to) in from.iter().zip(to) {
                to.0.store(from.0.load(Ordering::Relaxed), Ordering::Relaxed);
            }
        }
        for (from, to) in [(&self.pressed, &next.pressed), (&self.retry_after, &next.retry_after)] {
            to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        next.threshold = AtomicU16::new(self.threshold.load(Ordering::Relaxed));
        next.boundary = AtomicU32::new(self.boundary.load(Ordering::Relaxed));
        next.base = AtomicU64::new(self.base.load(Ordering::Relaxed));
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
        self.arrivals.count(counted);
        let shed = |cause| Shed {
            priority: arrival.priority,
            cohort,
            is_excess,
            in_flight: self.in_flight.0.load(Ordering::Relaxed),
            limit: self.limit.load(Ordering::Relaxed),
            cause,
            retry_after: TimeDelta::from_secs(self.retry_after.load(Ordering::Relaxed).into()),
        };
        let boundary = self.boundary.load(Ordering::Relaxed);
        let random =
            || (mix(arrival.caller ^ self.config.key ^ now.as_micros().rotate_left(24)) >> 48) as u16;
        let is_shed = position.is_some_and(|position| !passes(position, boundary, random()));
        if mode == GateMode::Shadow || self.is_shadow() {
            let in_flight = self.in_flight.0.fetch_add(1, Ordering::Relaxed) + 1;
            let ticket = Ticket { began: now, in_flight };
            if !is_shed {
                self.count_admitted(arrival.priority);
                return Entry::Admitted(ticket);
            }
            self.shadowed[arrival.priority.index()].0.fetch_add(1, Ordering::Relaxed);
            return Entry::Shadowed(ticket, shed(ShedCause::Threshold));
        }
        if is_shed {
            self.count_shed(arrival.priority);
            return Entry::Shed(shed(ShedCause::Threshold));
        }
        if (usize::from(rank.0) <= PATIENT || self.waiting.load(Ordering::Acquire) == 0)
            && let Some(in_flight) = self.take_place(rank)
        {
            self.count_admitted(arrival.priority);
            return Entry::Admitted(Ticket { began: now, in_flight });
        }
        if self.pressed.load(Ordering::Relaxed) == 0 {
            self.pressed.store(1, Ordering::Relaxed);
        }
        Entry::Full(Waiting { rank, shed: shed(ShedCause::Waited) })
    }

    /// Lets a request wait that found no free place. Call [`Gate::admit_waiting`] afterwards: a place may have become free.
    pub fn wait(&self, now: Timestamp, waiting: Waiting, waiter: W) -> Waited<W> {
        let mut room = lock(&self.room);
        let seated = room.push(now, waiting.rank, waiter);
        self.waiting.store(u32::try_from(room.len()).unwrap_or(u32::MAX), Ordering::Release);
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
    /// its reader's doing, or be meant, as with a stream of events. Call it once for a request.
    pub fn measure(&self, ticket: &Ticket, now: Timestamp) {
        self.completions.add(bucket(ticket.in_flight), now.since(ticket.began).as_micros());
    }

    /// Ends a request. Returns the waiting requests that go on in its place.
    #[must_use = "the returned requests proceed only if their waiters are woken"]
    #[allow(clippy::needless_pass_by_value, reason = "a ticket is used once")]
    pub fn leave(&self, ticket: Ticket, now: Timestamp, ended: Ended) -> Admitted<W> {
        match ended {
            // What may enter is what leaves: those that only came to be denied have to be among it.
            Ended::Denied => self.arrivals.count(DENIED),
            // A request abandoned after more than the base latency would have taken even longer. Without these the
            // limit could not fall where the upstream is slower than its clients are patient.
            Ended::Abandoned if now.since(ticket.began).as_micros() > self.base.load(Ordering::Relaxed) => {
                self.measure(&ticket, now);
                self.arrivals.count(LATE);
            }
            Ended::Completed | Ended::Abandoned => {}
        }
        self.in_flight.0.fetch_sub(1, Ordering::AcqRel);
        self.step_if_due(now);
        self.admit_waiting(now)
    }

    /// Returns the waiting requests for which there are free places now.
    #[must_use = "the returned requests proceed only if their waiters are woken"]
    pub fn admit_waiting(&self, now: Timestamp) -> Admitted<W> {
        let mut admitted = Admitted::new();
        while self.waiting.load(Ordering::Acquire) > 0 {
            let mut room = lock(&self.room);
            let Some(in_flight) = room.next_rank().and_then(|rank| self.take_place(rank)) else { break };
            let next = room.pop(now);
            self.waiting.store(u32::try_from(room.len()).unwrap_or(u32::MAX), Ordering::Release);
            drop(room);
            match next {
                Some(waiter) => admitted.push((waiter, Ticket { began: now, in_flight })),
                None => {
                    self.in_flight.0.fetch_sub(1, Ordering::AcqRel);
                }
            }
        }
        admitted
    }

    fn count_shed(&self, priority: Priority) {
        self.shed[priority.index()].0.fetch_add(1, Ordering::Relaxed);
    }

    fn count_admitted(&self, priority: Priority) {
        self.admitted[priority.index()].0.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes a place in flight, if one is free. Returns how many are in flight then.
    fn take_place(&self, rank: Rank) -> Option<u32> {
        let limit = match usize::from(rank.0) <= PATIENT {
            true => self.limit_with_reserve.load(Ordering::Relaxed),
            false => self.limit.load(Ordering::Relaxed),
        };
        let next = |in_flight: u32| (in_flight < limit).then_some(in_flight + 1);
        self.in_flight.0.fetch_update(Ordering::AcqRel, Ordering::Relaxed, next).ok().map(|before| before + 1)
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
        let rank = Rank(arrival.priority as u8 + 1);
        let Some(shares) = &self.shares else { return (Some(first + cohort), rank, false) };
        if self.pressed.load(Ordering::Relaxed) == 0 {
            return (Some(first + cohort / 2), rank, false);
        }
        match shares.take(arrival.tenant, arrival.tier, now, first < threshold) {
            Standing::Guaranteed => (None, Rank(0), false),
            Standing::Fair => (Some(first + cohort / 2), rank, false),
            Standing::Excess => (Some(first + COHORTS / 2 + cohort / 2), rank, true),
        }
    }
}

fn with_reserve(limit: u32) -> u32 {
    (f64::from(limit) * (1.0 + RESERVE)).ceil() as u32
}
