//! What a gate is given and returns: a request that arrives, its place in flight, or why it was shed.

use crate::room::Rank;
use crate::shares::{NO_TIER, TierIndex};
use smallvec::SmallVec;
use std::fmt;
use tollgate_core::{Priority, TimeDelta, Timestamp};

/// A request that arrives.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// Its priority.
    pub priority: Priority,
    /// Hash of its caller.
    pub caller: u64,
    /// Hash of its tenant.
    pub tenant: u64,
    /// The tenant's tier.
    pub tier: TierIndex,
}

impl Arrival {
    /// Creates a request of a caller that is its own tenant, without a tier.
    #[must_use]
    pub const fn new(priority: Priority, caller: u64) -> Self {
        Self { priority, caller, tenant: caller, tier: NO_TIER }
    }
}

/// Whether a decision to shed is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateMode {
    /// It is.
    Live,
    /// It is only counted.
    Shadow,
}

/// A place in flight. Must be given to [`Gate::leave`](crate::Gate::leave).
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket {
    /// When it began, and how many were in flight then, if its latency is measured.
    pub(super) began: Timestamp,
    pub(super) in_flight: u32,
    /// How many requests it counts for as a sample; 0 if its latency is not measured.
    pub(super) weight: u16,
    /// Whether it would have been shed but for the shadow mode.
    pub(super) is_shadowed: bool,
    /// Whether it may use the reserve: within a guarantee, or critical.
    pub(super) is_patient: bool,
}

impl Ticket {
    /// Returns whether the request may use the reserve, for [`Gate::try_enter_again`](crate::Gate::try_enter_again).
    #[must_use]
    #[inline]
    pub const fn is_patient(&self) -> bool {
        self.is_patient
    }
}

/// Answer to a request that arrives.
#[derive(Debug)]
pub enum Entry {
    /// It may go on.
    Admitted(Ticket),
    /// It may go on, but only because of the shadow mode.
    Shadowed(Ticket, Shed),
    /// No place is free: it may wait ([`Gate::wait`](crate::Gate::wait)).
    Full(Waiting),
    /// It is shed.
    Shed(Shed),
}

/// A request that found no free place.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    pub(super) rank: Rank,
    /// What to say if it does not get one.
    pub shed: Shed,
}

/// Result of waiting.
#[derive(Debug)]
pub enum Waited<W> {
    /// The request waits until then at most; a request of a lower rank that it replaced is shed.
    Until(Timestamp, Option<W>),
    /// The room is full: the request is shed.
    Shed(Shed),
}

/// Requests that take places which became free.
pub type Admitted<W> = SmallVec<[(W, Ticket); 1]>;

/// Why a request was shed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShedCause {
    /// Its place in the order of shedding is beyond the threshold.
    Threshold,
    /// No place became free in time, or requests that go first filled the waiting room.
    Waited,
}

/// A request that was shed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shed {
    /// Its priority.
    pub priority: Priority,
    /// Its caller's cohort.
    pub cohort: u16,
    /// Whether its tenant is beyond its fair share.
    pub is_excess: bool,
    /// Requests in flight.
    pub in_flight: u32,
    /// Limit of requests in flight.
    pub limit: u32,
    /// Why.
    pub cause: ShedCause,
    /// When to try again.
    pub retry_after: TimeDelta,
}

impl fmt::Display for Shed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { priority, cohort, in_flight, limit, .. } = self;
        write!(f, "shed at priority {priority}, cohort {cohort}, in flight {in_flight} of {limit}")?;
        if self.is_excess {
            f.write_str(", beyond its tenant's fair share")?;
        }
        if self.cause == ShedCause::Waited {
            f.write_str(", after waiting")?;
        }
        Ok(())
    }
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// With a response, which [`Gate::measure`](crate::Gate::measure) has recorded.
    Completed,
    /// With a response that reports a failure of the upstream (5xx), or with none within the time-out: nothing to measure
    /// its latency by.
    Failed,
    /// Denied by a limit before it was sent: it needed no capacity.
    Denied,
    /// Without a response of the upstream, because its client left or there was none to be had.
    Abandoned,
}
