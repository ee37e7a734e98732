//! Results of reserving, settling and canceling.

use super::ReservationId;
use crate::decision::Decision;
use tollgate_core::{Limit, StoreError, TimeDelta, Timestamp};

/// A reservation and its decision.
#[derive(Clone, Debug)]
pub struct Reservation {
    /// ID of the reservation; `None` if nothing is held: the request was denied, or no limit counts it.
    pub id: Option<ReservationId>,
    /// The decision on the estimate.
    pub decision: Decision,
    /// Time at which the reservation expires.
    pub deadline: Timestamp,
}

/// Final state of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// Settled with this actual cost, in units.
    Settled(u64),
    /// Canceled; everything was refunded.
    Canceled,
    /// Neither by its deadline: it stays as charged.
    Expired,
}

impl std::fmt::Display for Settlement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Settled(cost) => write!(f, "has already been settled, with a cost of {cost}"),
            Self::Canceled => f.write_str("has already been cancelled"),
            Self::Expired => f.write_str("has expired, and stands as it was taken"),
        }
    }
}

/// What remains of one limit after a reservation was closed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemainingUnits {
    /// Name of the rule.
    pub rule: String,
    /// The limit.
    pub limit: Limit,
    /// Units that remain.
    pub remaining: u64,
    /// Time until the limit is unused if nothing else is charged.
    pub reset_after: TimeDelta,
}

/// A reservation that was settled or canceled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClosedReservation {
    /// How it ended.
    pub settlement: Settlement,
    /// What remains of its limits now; empty if the store is unavailable.
    pub limits: Vec<RemainingUnits>,
}

/// Reason why nothing was reserved.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReserveError {
    /// This caller's share of the memory for reservations is used.
    #[error(
        "too many reservations of this caller are remembered; settle or cancel some, or ask for shorter deadlines"
    )]
    TooMany,
    /// A reservation with the same idempotency key is in progress.
    #[error("a reservation with this idempotency key is under way; try again")]
    InProgress,
    /// The idempotency key was used with another domain, caller or cost.
    #[error(
        "this idempotency key was used with another domain, other attributes or another cost; send a new key"
    )]
    OtherContents,
    /// The reservation with this idempotency key has ended.
    #[error("the reservation with this idempotency key {0}; send a new key for a new one")]
    Ended(Settlement),
    /// The store did not keep the reservation; nothing is held.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Reason why a reservation could not be settled or canceled.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SettleError {
    /// There is no reservation with this ID, or it ended long ago.
    #[error(
        "there is no such reservation, or it ended long ago; one made while the store was unavailable is known only to \
         its node until the store answers"
    )]
    Unknown,
    /// The reservation has already ended in another way.
    #[error("the reservation {0}")]
    Ended(Settlement),
    /// The reservation is being settled or canceled at this moment.
    #[error("the reservation is being settled or cancelled at this moment; try again")]
    InProgress,
    /// The store did not apply the difference; the reservation is still open.
    #[error(transparent)]
    Store(#[from] StoreError),
}
