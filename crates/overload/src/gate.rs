//! The gate of an upstream: every request passes it before it is forwarded, and again when it has ended.
//!
//! While nothing is shed and no request waits, a request writes to its thread's cache lines alone: it counts, takes a place and
//! gives it back, without a lock or an allocation. Tenants, shares and the place in the order of shedding matter only otherwise.
//! The waiting room has a lock, taken only by requests that found no free place, and by those that end while others wait. Once
//! in an interval a caller also runs the control step; the others do not wait for it.

mod config;
mod control;
mod entry;
mod places;
mod reentry;
mod sampling;
mod state;
#[cfg(test)]
mod tests;

pub use config::{GateConfig, LimitKind};
pub use entry::{Admitted, Arrival, Ended, Entry, GateMode, Shed, ShedCause, Ticket, Waited, Waiting};
pub use state::GateState;

use crate::cohort::{Cohorts, mix};
use crate::limit::LimitController;
use crate::priority::{COHORTS, POSITIONS, first_position};
use crate::room::{Next, Rank, Seated};
use crate::samples::bucket;
use crate::shares::{Shares, Standing, TenantDemand, TenantRequest};
use crate::striped::Own;
use crate::threshold::{PER_BUCKET, ThresholdController, passes};
use control::Control;
use places::{DENIED, GUARANTEED, LATE, Places, ThreadPlaces};
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
        if mode == GateMode::Live
            && let Some(ticket) = self.try_enter(now, arrival.priority, || arrival.caller)
        {
            return Entry::Admitted(ticket);
        }
        self.enter_pressed(now, arrival, mode)
    }

    /// Admits a request that arrives, if nothing is shed, no request waits and a place is free, as is usual: its tenant and the
    /// tenant's tier need not be looked up then, and its caller only if it is one of those that are measured. `None` if
    /// [`Gate::enter_pressed`] has to decide about it.
    #[inline]
    pub fn try_enter(
        &self,
        now: Timestamp,
        priority: Priority,
        caller: impl FnOnce() -> u64,
    ) -> Option<Ticket> {
        self.step_if_due(now);
        if !self.is_calm() || self.is_shadow() {
            return None;
        }
        let own = self.places.threads.own();
        let is_patient = Rank::new(priority, Standing::Fair).is_patient();
        if !self.places.take(&own, is_patient) {
            return None;
        }
        own.add_long(|own| &own.admitted[priority.index()], 1);
        let weight = self.places.sample_weight(&own);
        if weight > 0 {
            let place = self.cohorts.cohort(caller()) / self.config.cohorts_per_place();
            let bucket = usize::from((first_position(priority) + place) / PER_BUCKET);
            own.add(|own| &own.arrivals.counts[bucket], weight.into());
        }
        Some(self.ticket_of(weight, now, is_patient))
    }

    /// Returns whether nothing is shed and no request waits.
    #[inline]
    fn is_calm(&self) -> bool {
        self.pressed.load(Ordering::Relaxed) == 0 && self.places.waiting() == 0
    }

    /// Decides about a request while others are shed or wait, or in shadow mode, as [`Gate::enter`].
    #[inline(never)]
    pub fn enter_pressed(&self, now: Timestamp, arrival: &Arrival, mode: GateMode) -> Entry {
        self.step_if_due(now);
        let own = self.places.threads.own();
        let cohort = self.cohorts.cohort(arrival.caller);
        let threshold = self.threshold.load(Ordering::Relaxed);
        let (position, rank, is_excess) = self.position(now, arrival, cohort, threshold);
        let counted = position.map_or(GUARANTEED, |position| usize::from(position / PER_BUCKET));
        own.add(|own| &own.arrivals.counts[counted], 1);
        let shed = |cause| Shed {
            priority: arrival.priority,
            cohort,
            is_excess,
            in_flight: self.places.in_flight(),
            limit: self.limit(),
            cause,
            retry_after: TimeDelta::from_secs(self.retry_after.load(Ordering::Relaxed).into()),
        };
        let boundary = self.boundary.load(Ordering::Relaxed);
        let random =
            || (mix(arrival.caller ^ self.config.key ^ now.as_micros().rotate_left(24)) >> 48) as u16;
        let is_shed = position.is_some_and(|position| !passes(position, boundary, random()));
        if mode == GateMode::Shadow || self.is_shadow() {
            let has_place = self.places.take_beyond(&own, rank.is_patient());
            // While requests would be shed by the threshold, there are always more in flight than there would be.
            let cause = match is_shed {
                true => Some(ShedCause::Threshold),
                false => (threshold >= POSITIONS && !has_place).then_some(ShedCause::Waited),
            };
            let Some(cause) = cause else {
                return Entry::Admitted(self.admitted(&own, now, arrival.priority, rank));
            };
            self.places.count_shadowed();
            self.places.shadowed[arrival.priority.index()].0.fetch_add(1, Ordering::Relaxed);
            let ticket = Ticket { is_shadowed: true, ..self.ticket(&own, now, rank.is_patient()) };
            return Entry::Shadowed(ticket, shed(cause));
        }
        if is_shed {
            self.count_shed(arrival.priority);
            return Entry::Shed(shed(ShedCause::Threshold));
        }
        if (rank.is_patient() || self.places.waiting() == 0) && self.places.take(&own, rank.is_patient()) {
            return Entry::Admitted(self.admitted(&own, now, arrival.priority, rank));
        }
        if self.pressed.load(Ordering::Relaxed) == 0 {
            self.pressed.store(1, Ordering::Relaxed);
        }
        Entry::Full(Waiting { rank, shed: shed(ShedCause::Waited) })
    }

    /// Returns the ticket of a request that has just taken a place.
    #[inline]
    fn ticket(&self, own: &Own<'_, ThreadPlaces>, now: Timestamp, is_patient: bool) -> Ticket {
        self.ticket_of(self.places.sample_weight(own), now, is_patient)
    }

    #[inline]
    fn ticket_of(&self, weight: u16, began: Timestamp, is_patient: bool) -> Ticket {
        let in_flight = if weight == 0 { 0 } else { self.places.in_flight() };
        Ticket { began, in_flight, weight, is_shadowed: false, is_patient }
    }

    /// Counts a request that has just taken a place, and returns its ticket.
    #[inline]
    fn admitted(
        &self,
        own: &Own<'_, ThreadPlaces>,
        now: Timestamp,
        priority: Priority,
        rank: Rank,
    ) -> Ticket {
        own.add_long(|own| &own.admitted[priority.index()], 1);
        self.ticket(own, now, rank.is_patient())
    }

    /// Lets a request wait that found no free place. Call [`Gate::admit_waiting`] afterwards: a place may have become free.
    pub fn wait(&self, now: Timestamp, waiting: Waiting, waiter: W) -> Waited<W> {
        let mut room = lock(&self.places.room);
        let seated = room.push(now, waiting.rank, waiter);
        self.places.set_waiting(&room);
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
        match is_admitted {
            true => self.places.threads.own().add_long(|own| &own.admitted[priority.index()], 1),
            false => self.count_shed(priority),
        }
    }

    /// Counts a response when its head has arrived. That is the latency of the request: how long its body takes may be
    /// its reader's doing, or be meant, as with a stream of events. Call it once for a request, and not for one that
    /// [failed](Ended::Failed): how fast an upstream fails is not how fast it works.
    pub fn measure(&self, ticket: &Ticket, now: Timestamp) {
        self.measure_at(ticket, || now);
    }

    /// Counts a response when its head has arrived, as [`Gate::measure`]. `now` is called only if the request is one of those
    /// whose latency is measured.
    #[inline]
    pub fn measure_at(&self, ticket: &Ticket, now: impl FnOnce() -> Timestamp) {
        let own = self.places.threads.own();
        own.add(|own| &own.completed, 1);
        if ticket.weight > 0 {
            let (at, weight, now) = (bucket(ticket.in_flight), u32::from(ticket.weight), now());
            own.add(|own| &own.completions.counts[at], weight);
            let took = now.since(ticket.began).as_micros().saturating_mul(weight.into());
            own.add_long(|own| &own.completions.sums[at], took);
            self.step_if_due(now);
        }
    }

    /// Ends a request. Returns the waiting requests that go on in its place.
    #[must_use = "the returned requests proceed only if their waiters are woken"]
    pub fn leave(&self, ticket: Ticket, now: Timestamp, ended: Ended) -> Admitted<W> {
        self.leave_at(&mut Some(ticket), || now, ended).unwrap_or_default()
    }

    /// Ends a request, as [`Gate::leave`], whose ticket it takes from where it is: a copy would wait for the parts that have not
    /// yet left the processor's store buffer. `now` is called only if it matters when the request has ended: not for one that was
    /// completed while nothing is shed and no request waits. Returns `None` if no request goes on, or there is no ticket.
    #[must_use = "the returned requests proceed only if their waiters are woken"]
    #[inline]
    pub fn leave_at(
        &self,
        ticket: &mut Option<Ticket>,
        now: impl FnOnce() -> Timestamp,
        ended: Ended,
    ) -> Option<Admitted<W>> {
        let is_shadowed = ticket.as_ref()?.is_shadowed;
        if ended == Ended::Completed && self.is_calm() {
            *ticket = None;
            self.places.free(&self.places.threads.own(), is_shadowed);
            let admitted = (self.places.waiting() > 0).then(|| self.admit_waiting(now()));
            return admitted.filter(|admitted| !admitted.is_empty());
        }
        let admitted = ticket.take().map(|ticket| self.leave_pressed(&ticket, now(), ended));
        admitted.filter(|admitted| !admitted.is_empty())
    }

    /// Ends a request while others are shed or wait, or one that was not completed.
    #[inline(never)]
    fn leave_pressed(&self, ticket: &Ticket, now: Timestamp, ended: Ended) -> Admitted<W> {
        let own = self.places.threads.own();
        let age = now.since(ticket.began).as_micros();
        let base = self.places.bounds.0.base.load(Ordering::Relaxed);
        // What may enter is what leaves: those that only came to be denied, or failed, have to be among it.
        if matches!(ended, Ended::Denied | Ended::Failed) {
            own.add(|own| &own.arrivals.counts[DENIED], 1);
        }
        // A request abandoned after more than the base latency would have taken even longer. Without these the limit
        // could not fall where the upstream is slower than its clients are patient.
        let is_late = match ended {
            Ended::Completed | Ended::Denied => false,
            Ended::Abandoned => age > base,
            Ended::Failed => age > base.saturating_mul(LATE_FAILURE),
        };
        if is_late && ticket.weight > 0 {
            own.add(|own| &own.arrivals.counts[LATE], ticket.weight.into());
            own.add_long(|own| &own.arrivals.sums[LATE], age.saturating_mul(ticket.weight.into()));
        }
        self.places.free(&own, ticket.is_shadowed);
        self.step_if_due(now);
        self.admit_waiting(now)
    }

    /// Returns the waiting requests for which there are free places now.
    #[must_use = "the returned requests proceed only if their waiters are woken"]
    pub fn admit_waiting(&self, now: Timestamp) -> Admitted<W> {
        let mut admitted = Admitted::new();
        while self.places.waiting() > 0 {
            let own = self.places.threads.own();
            let mut room = lock(&self.places.room);
            let Some(next) = room.next() else { break };
            let is_patient = next.is_patient();
            if !self.places.take(&own, is_patient) {
                break;
            }
            let next = match next {
                Next::Again(_) => room.pop_again(is_patient),
                Next::New(_) => room.pop(now, is_patient),
            };
            self.places.set_waiting(&room);
            drop(room);
            match next {
                Some(waiter) => admitted.push((waiter, self.ticket(&own, now, is_patient))),
                None => self.places.free_unused(),
            }
        }
        admitted
    }

    fn count_shed(&self, priority: Priority) {
        self.places.shed[priority.index()].0.fetch_add(1, Ordering::Relaxed);
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
            Some(shares) => {
                let request = TenantRequest { tenant: arrival.tenant, tier: arrival.tier, units: 1 };
                shares.take(request, now, first < threshold)
            }
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
