//! The heart of Tollgate: what a limit is, and what it says to a charge. No I/O, no runtime, no protocol, no rules.
//!
//! | file | answers |
//! |---|---|
//! | [`time`](Timestamp), [`clock`](Clock) | when is it? |
//! | [`quota`](Quota), [`calendar`](Calendar) | how many, in which period? |
//! | [`algorithm`](Algorithm), [`spec`](LimitSpec), [`limit`](Limit) | how it is held: checked once, then a pure `step` |
//! | [`refund`](Limit::refundable) | how much of an old charge may still be given back |
//! | [`escrow`](Escrow) | how long units that were taken ahead may be spent |
//! | [`measures`](Measures) | a limit as plain numbers, for a store that steps it elsewhere |
//! | [`state`](State) | what a limit remembers of one key |
//! | `bucket`, `window`, `sliding`, `strict`, `log`, `permits` | one algorithm family each |
//! | `refund` | how much of an old charge may still be given back |
//! | [`packed`](Packed) | a state in one 64-bit word that a store can read without knowing the limit |
//! | [`key`](CounterKey), [`charge`](Charge), [`outcome`](Outcome), [`store`](CounterStore) | the seam between the engine and the counters |
//! | `conformance` (feature) | what every store must do |

mod algorithm;
mod bucket;
mod calendar;
mod charge;
mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod cost;
mod escrow;
mod key;
mod limit;
mod log;
mod measures;
mod outcome;
mod packed;
mod permits;
mod quota;
mod refund;
mod sliding;
mod spec;
mod state;
mod store;
mod strict;
mod time;
mod window;

pub use algorithm::Algorithm;
pub use bucket::Tat;
pub use calendar::{Calendar, CalendarUnit, UnknownZone};
pub use charge::{Admission, AfterLoss, Charge, Enforcement, GiveBack, Mode, Outcomes, Permit};
pub use clock::{Clock, ManualClock, SystemClock};
pub use cost::Cost;
pub use escrow::Escrow;
pub use key::{CounterKey, OwnedPart, Part, Scope, StableHasher, beginning};
pub use limit::Limit;
pub use log::AdmissionLog;
pub use measures::Measures;
pub use outcome::{Outcome, Verdict};
pub use packed::{Packed, Tag};
pub use permits::{PermitId, Permits};
pub use quota::{Period, Quota};
pub use sliding::SlidingCounts;
pub use spec::{LimitError, LimitSpec};
pub use state::State;
pub use store::{CounterStore, StoreError};
pub use strict::StrictCounts;
pub use time::{Span, Timestamp};
pub use window::WindowCount;
