//! Overload control as pure controllers: what to shed when an upstream cannot serve all that arrives.
//!
//! Nothing here does I/O or reads a clock; `now` is an argument, and the next call does the periodic work. A request
//! that nothing holds back touches atomics alone. [`Gate`] puts the parts together, one for each upstream:
//!
//! | module | question |
//! |---|---|
//! | [`priority`](POSITIONS), `cohort` | in which order is shed? |
//! | `limit`, `samples` | how many requests can the upstream work on? |
//! | `threshold` | from which place in the order on is shed? |
//! | `shares` | what is each tenant's part? |
//! | `room` | which requests wait for a free slot, and how long? |
//! | [`gate`](Gate) | may this request go on? |
//!
//! [`AdaptController`] is independent of them: it selects the tiers whose limits are tightened while signals are above
//! their bounds. [`UpstreamMeter`] measures signals of an upstream. [`CheckLoad`] decides which classes of checks go without
//! the counter store while the process itself is overloaded. [`FleetFairness`] says which requests are beyond their tenant's fair
//! share of the fleet's capacity; [`UsedUpMarks`] says which guarantees need not be asked for.
//!
//! ```
//! use tollgate_core::Timestamp;
//! use tollgate_overload::{Arrival, Ended, GateMode, Entry, Gate, GateConfig, Priority};
//! let gate = Gate::<()>::new(&GateConfig::adaptive(16));
//! let arrival = Arrival::new(Priority::Normal, 42);
//! let (began, ended) = (Timestamp::from_secs(1), Timestamp::from_secs(2));
//! let Entry::Admitted(ticket) = gate.enter(began, &arrival, GateMode::Live) else { unreachable!() };
//! assert_eq!(gate.state(began).in_flight, 1);
//! gate.measure(&ticket, ended);
//! let waiting = gate.leave(ticket, ended, Ended::Completed);
//! assert!(waiting.is_empty());
//! assert_eq!(gate.state(ended).in_flight, 0);
//! ```

mod adapt;
mod check_load;
mod cohort;
mod fleet;
mod gate;
mod limit;
mod meter;
mod priority;
mod room;
mod samples;
mod shares;
mod striped;
mod threshold;
mod used_up;

pub use adapt::{AdaptConfig, AdaptController, AdaptStep, WHOLE};
pub use check_load::{CheckLoad, CheckLoadState, ShedChange, ShedOrder};
pub use fleet::{FleetFairness, NodePart, NodePlaces};
pub use gate::{
    Admitted, Arrival, Ended, Entry, Gate, GateConfig, GateMode, GateState, LimitKind, Shed, ShedCause,
    Ticket, Waited, Waiting,
};
pub use limit::LimitConfig;
pub use meter::{Measured, UpstreamMeter};
pub use priority::{COHORTS, POSITIONS};
pub use room::Rank;
pub use shares::{GuaranteeScope, NO_TIER, TenantRequest, TierIndex, TierShare, TierState};
pub use tollgate_core::Priority;
pub use used_up::UsedUpMarks;
