//! The limiter: rules × store → one [`Decision`] for each request. Knows no SQL and no protocol.
//!
//! | file | answers |
//! |---|---|
//! | `limiter` | how a check runs, start to end |
//! | `check` | what is asked |
//! | `decision` | what is answered |
//! | `fold` | how many outcomes become one answer |
//! | `failing` | what is answered when the store is not |
//! | `debts` | charging the shared counters, later, with what was let through without them |
//! | `fallback` | the counters of this process that decide then |
//! | `fallback_counts` | how often that happened |
//! | `held` | what a request holds while it is under way |
//! | `permit_guard` | permits that are renewed while a request is in progress and released when the guard is dropped |
//! | `delay_queue` | where `action: delay` parks requests, bounded in number |
//! | `in_flight` | how many permits are held, by rule |
//! | `holding` | a charge that outlives its request |
//! | `reserve` | charging an estimate now and the truth later |
//! | `tenants` | what is agreed with single callers |
//! | `grant` | extra quota, once, in place of a limit that is over |
//! | `emergency` | what operators decide in an emergency |
//! | `usage` | what is used of a caller's limits, and giving it back |
//! | `observer` | who watches decisions |
//! | `reconsider` | a second look at a denial: other shards of a split counter, extra quota |
//! | `replay` | deciding a request that stands for many |
//! | `trace` | the trace that a request is part of |
//! | `inline_limit` | limits that arrive with the request, apart from the rules |
//! | `ids` | how a decision gets its name |

mod by_rule;
mod charge_record;
mod check;
mod decision;
mod decision_id;
mod delay_queue;
mod emergency;
mod fail_policy;
mod fallback;
mod fallback_counts;
mod fold;
mod grant;
mod in_flight;
mod inline_limit;
mod limiter;
mod observer;
mod permit_guard;
mod permits;
mod quota_provider;
mod reconcile;
mod reconsider;
mod replay;
mod reservation;
mod trace;
mod usage;

pub use check::{Check, CheckInput};
pub use decision::{
    DecidedBy, Decision, DecisionDetails, DecisionVerdict, DescriptorStatus, INLINE_LIMIT, LimitStatus,
    Origin, Window,
};
pub use decision_id::DecisionId;
pub use delay_queue::{DelayQueue, QueueFull};
pub use emergency::{ActiveMeasures, Measure, MeasureAction, MeasureTarget, Network};
pub use grant::{Grant, Grants};
pub use limiter::Limiter;
pub use observer::{Enforced, Observer};
pub use permit_guard::PermitGuard;
pub use permits::{HeldPermits, ReleaseFuture, ReleaseReason};
pub use quota_provider::{CallerQuota, QuotaProvider};
pub use replay::{CounterSharing, SampleWeight};
pub use reservation::{Reservation, ReservationId, ReserveError, SettleError, Settlement};
pub use trace::{ForwardedRequest, TraceContext};
pub use usage::{GrantBalance, LimitSource, LimitUsage, UnmatchedRule, Usage, UsageError};
