//! Core types: rates, limits, charges, and the algorithms as pure step functions. No I/O, no runtime, no protocol, no
//! rules.
//!
//! | module | contents |
//! |---|---|
//! | [`time`](Timestamp), [`clock`](Clock) | timestamps, time deltas, clocks |
//! | [`rate`](Rate), [`calendar`](Calendar) | counts per period |
//! | [`algorithm`](Algorithm) | one module per algorithm: `bucket`, `fixed_window`, `sliding_window`, `strict_window`, `sliding_log`, `concurrency` |
//! | [`limit_spec`](LimitSpec), [`limit`](Limit) | options of a limit, validated once, and the pure `step` |
//! | [`limit_params`](LimitParams) | a limit as plain numbers, for a store that steps it elsewhere |
//! | [`refund`](Limit::refundable) | how much of an old charge may still be undone |
//! | [`escrow`](Escrow) | until when units that were deducted ahead may be spent |
//! | [`scale`](Scale) | what a bucket's time is in units, and the same units under another limit |
//! | [`state`](State), [`packed`](Packed) | the state of one counter; the same in one 64-bit word |
//! | [`counter_key`](CounterKey), [`charge`](Charge), [`outcome`](Outcome), [`store`](CounterStore) | the interface between engine and stores |
//! | [`region`](RegionMode) | how cells share a counter's limit, and which cell owns it |
//! | [`late`](LateCharge) | charges whose answers come after their deadline |
//! | [`record_store`](RecordStore) | records that nodes share |
//! | [`priority`](Priority) | importance of a request when not all can be served |
//! | [`log_throttle`](LogThrottle) | at most one message a second |
//! | [`thread_index`](ThreadIndex) | a small number that one running thread has alone |
//! | [`name`](is_same_name) | comparison of short names, and sets of them |
//! | `conformance` (feature) | the suite that every store must pass |

mod algorithm;
mod calendar;
mod charge;
mod clock;
#[cfg(feature = "conformance")]
pub mod conformance;
mod cost;
mod counter_key;
mod escrow;
mod late;
mod limit;
mod limit_params;
mod limit_spec;
mod log_throttle;
mod name;
mod outcome;
mod packed;
mod priority;
mod rate;
mod record_store;
mod refund;
mod region;
mod scale;
mod state;
mod store;
mod thread_index;
mod time;

pub use algorithm::Algorithm;
pub use algorithm::bucket::Tat;
pub use algorithm::concurrency::{PermitId, Permits};
pub use algorithm::fixed_window::WindowCount;
pub use algorithm::sliding_log::AdmissionLog;
pub use algorithm::sliding_window::SlidingCounts;
pub use algorithm::strict_window::StrictCounts;
pub use calendar::{Calendar, CalendarUnit, UnknownZone};
pub use charge::{Admission, Charge, Charged, Enforcement, LossPolicy, Mode, Outcomes, Permit, UnitReturn};
pub use clock::{Clock, ManualClock, SystemClock};
pub use cost::Cost;
pub use counter_key::{CounterKey, KeyPart, OwnedKeyPart, Scope, StableHasher, secret_prefix};
pub use escrow::Escrow;
pub use late::{CounterId, LateAnswer, LateCharge, LateResponder};
pub use limit::Limit;
pub use limit_params::LimitParams;
pub use limit_spec::{LimitError, LimitSpec};
pub use log_throttle::LogThrottle;
pub use name::{NameSet, is_same_name};
pub use outcome::{Outcome, Verdict};
pub use packed::{Packed, Tag};
pub use priority::Priority;
pub use rate::{Period, Rate};
pub use record_store::{Exchange, RecordFuture, RecordName, RecordStore};
pub use region::{CounterOwner, RegionMode, RegionStatus, region_prefix};
pub use scale::Scale;
pub use state::State;
pub use store::{CounterStore, LastKnown, StoreError};
pub use thread_index::ThreadIndex;
pub use time::{TimeDelta, Timestamp};
