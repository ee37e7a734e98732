//! The heart of Tollgate: what a limit is, and what it says to a charge. No I/O, no runtime, no protocol, no rules.
//!
//! | file | answers |
//! |---|---|
//! | [`time`](Timestamp), [`clock`](Clock) | when is it? |
//! | [`rate`](Quota), [`calendar`](Calendar) | how many, in which period? |
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
mod calendar;
mod charge;
mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod cost;
mod counter_key;
mod escrow;
mod limit;
mod limit_params;
mod limit_spec;
mod outcome;
mod packed;
mod rate;
mod refund;
mod state;
mod store;
mod time;

pub use algorithm::Algorithm;
pub use algorithm::bucket::Tat;
pub use algorithm::concurrency::{PermitId, Permits};
pub use algorithm::fixed_window::WindowCount;
pub use algorithm::sliding_log::AdmissionLog;
pub use algorithm::sliding_window::SlidingCounts;
pub use algorithm::strict_window::StrictCounts;
pub use calendar::{Calendar, CalendarUnit, UnknownZone};
pub use charge::{Admission, Charge, Enforcement, LossPolicy, Mode, Outcomes, Permit, UnitReturn};
pub use clock::{Clock, ManualClock, SystemClock};
pub use cost::Cost;
pub use counter_key::{CounterKey, KeyPart, OwnedKeyPart, Scope, StableHasher, secret_prefix};
pub use escrow::Escrow;
pub use limit::Limit;
pub use limit_params::LimitParams;
pub use limit_spec::{LimitError, LimitSpec};
pub use outcome::{Outcome, Verdict};
pub use packed::{Packed, Tag};
pub use rate::{Period, Rate};
pub use state::State;
pub use store::{CounterStore, StoreError};
pub use time::{TimeDelta, Timestamp};
