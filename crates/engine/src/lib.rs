//! The limiter: combines rules and a store into one [`Decision`] per request. Contains no SQL and no protocol code.
//!
//! | module | contents |
//! |---|---|
//! | `limiter` | the limiter: its parts and settings |
//! | `decide` | the decision path |
//! | `check` | the input of a check |
//! | `decision`, `decision_id` | the complete answer to a check, and its ID |
//! | `decision_body` | the memory that decisions are written in, reused by each thread |
//! | `fold` | outcomes folded into one decision |
//! | `fail_policy` | decisions while the store is unavailable |
//! | `fallback`, `fallback_counts` | local counters that decide then, and how often they did |
//! | `reconcile` | charging the shared counters afterwards |
//! | `permits`, `permit_guard` | permits of a request in flight; a guard that renews and releases them |
//! | `delay_queue` | where `action: delay` parks requests, bounded in number |
//! | `fleet_fairness`, `fleet_standings` | tenants' shares of the fleet's capacity; the standings a request tries |
//! | `fleet_marks` | counters of the capacity that are used up |
//! | `fleet_shadow`, `fleet_refund` | the capacity in shadow mode; what a refund gives back of it |
//! | `fleet_shed` | requests that the fleet's capacity sheds: why, and how many; the capacity's state |
//! | `release_retry` | releases of permits that failed, tried again |
//! | `in_flight`, `by_rule` | permits held, by rule; bounded counters by rule name |
//! | `charge_ahead` | units charged now for requests that another process admits later |
//! | `charge_record` | a charge that outlives its request |
//! | `reservation` | charging an estimate now and settling later, on any node |
//! | `quota_provider` | lookup of a caller's quota |
//! | `grant` | extra units, charged when a limit denies |
//! | `emergency` | emergency measures |
//! | `workers` | gates that shed before an upstream |
//! | `adapt`, `signals` | limits that follow signals; who reports these |
//! | `upstream_meters` | signals that are measured here |
//! | `check_shedding` | checks that go without the store while the process is overloaded |
//! | `usage` | usage of a caller's limits, and resets |
//! | `explain`, `dry_run` | what would be decided and why, without charging |
//! | `observer` | the observer interface |
//! | `panic` | panics while a request is decided: its fail policy decides |
//! | `region_view`, `shown_limits` | how cells share a limit; which limits are shown |
//! | `consumption` | what requests use of the rules that are billed |
//! | `refill` | what time refills of pending charges of the fleet's capacity |
//! | `reconsider` | second attempt after a denial: other shards of a split counter, grants |
//! | `replay` | deciding a sampled request that represents many |
//! | `trace` | trace context of a request |
//! | `inline_limit` | limits that arrive with the request |

mod adapt;
mod by_rule;
mod charge_ahead;
mod charge_record;
mod check;
mod check_shedding;
mod consumption;
mod decide;
mod decision;
mod decision_body;
mod decision_id;
mod delay_queue;
mod dry_run;
mod emergency;
mod explain;
mod fail_policy;
mod fallback;
mod fallback_counts;
mod fallback_start;
mod fleet_fairness;
mod fleet_marks;
mod fleet_refund;
mod fleet_shadow;
mod fleet_shed;
mod fleet_standings;
mod fold;
mod grant;
mod in_flight;
mod in_force;
mod inline_limit;
mod limiter;
mod observer;
mod panic;
mod permit_guard;
mod permits;
mod quota_provider;
mod reconcile;
mod reconsider;
mod refill;
mod region_view;
mod release_retry;
mod replay;
mod reservation;
mod shown_limits;
mod signals;
mod task_guard;
mod trace;
mod upstream_meters;
mod usage;
mod workers;

pub use adapt::{AdaptationState, AdaptedStep, AdaptedTier, HeldLimits};
pub use charge_ahead::{AheadKind, ChargeAhead, CounterAhead};
pub use check::{Check, CheckInput};
pub use consumption::{Consumption, Meter};
pub use decision::{
    DecidedBy, Decision, DecisionDetails, DecisionVerdict, DescriptorStatus, INLINE_LIMIT, LimitStatus,
    Origin, UnknownDomain, Window,
};
pub use decision_id::{DecisionId, InvalidDecisionId};
pub use delay_queue::{DelayQueue, QueueFull};
pub use emergency::{ActiveMeasures, Measure, MeasureAction, MeasureTarget, Network};
pub use explain::{CheckExplanation, ExplainedLimit};
pub use fleet_shed::{FleetPriorityState, FleetSharesState, FleetShedCount, FleetState};
pub use grant::{Grant, Grants};
pub use in_force::AppliedMeasure;
pub use limiter::Limiter;
pub use observer::{Enforced, Observer};
pub use permit_guard::PermitGuard;
pub use permits::{HeldPermits, ReleaseFuture, ReleaseReason};
pub use quota_provider::{CallerQuota, QuotaProvider, Quotas};
pub use region_view::RegionView;
pub use release_retry::ReleaseStats;
pub use replay::{CounterSharing, SampleWeight};
pub use reservation::{
    ClosedReservation, RemainingUnits, Reservation, ReservationId, ReserveError, SettleError, Settlement,
};
pub use signals::{SharedSignal, SignalError, SignalQuery, SignalState};
pub use tollgate_overload::{CheckLoadState, Ended, GateState, POSITIONS, ShedOrder, TierState};
pub use trace::{ForwardedRequest, TraceContext};
pub use usage::{
    GrantBalance, LimitSource, LimitUsage, UnlimitedRule, UnmatchedRule, Usage, UsageError, UsageOf,
};
pub use workers::{UpstreamState, WorkerPermit};
