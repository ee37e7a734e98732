//! Control plane: quotas, grants, emergency measures, published rules, tokens and the audit log, in SQLite or
//! PostgreSQL. All SQL is in this crate. Only [`QuotaTable`] is on the request path, and it is in memory.
//!
//! | folder | contents |
//! |---|---|
//! | `control_plane` | the opened control plane of a server. It owns the state of every folder, and each folder adds
//! its methods |
//! | `db`, `error` | both databases, their schema, and write transactions: one revision and one audit entry each |
//! | `audit` | the audit log of operator changes, as a hash chain that reveals tampering |
//! | `auth` | tokens and their verification; API keys, stored as keyed hashes |
//! | `billing` | consumption of billed rules by caller, by hour and month |
//! | `durable` | consumption of durable counters, read back when the counter store has lost it |
//! | `shared_records` | small records that nodes share for a while |
//! | `grant` | extra units for single callers, once |
//! | `quota` | quotas of callers: records, lists, imports; [`QuotaTable`], all of them in memory |
//! | `emergency` | emergency measures |
//! | `history` | what rules and callers did over time, kept for weeks |
//! | `preview` | the [`TrafficSample`] of recent requests, samples of other nodes, and the impact preview |
//! | `rules` | [`RuleManager`], which owns the active rules of a node; publishing; the rollback guard |
//! | `replication` | how nodes learn of changes; the list of nodes; the snapshot for a start without the database |
//!
//! A folder imports only from those above it (`tests/module_cycles.rs`).

mod adaptation;
mod audit;
mod auth;
mod billing;
mod control_plane;
mod db;
mod durable;
mod emergency;
mod error;
mod grant;
mod history;
mod preview;
#[doc(hidden)]
pub mod properties;
mod quota;
mod replication;
mod rules;
mod shared_records;

pub use adaptation::{AdaptationRecord, AdaptationStep};
pub use audit::{AuditEntry, AuditFilter, AuditVerification};
pub use auth::principal::{Principal, Role};
pub use auth::tokens::{NewToken, Token};
pub use auth::verify::{TokenCheck, UnverifiedToken};
pub use billing::delivery::Delivery;
pub use billing::ledger::DisplayCaller;
pub use billing::read::{ConsumptionFilter, ConsumptionPage};
pub use billing::row::{ConsumptionCursor, ConsumptionRow, Granularity};
pub use billing::run::{Billing, BillingRetention, BillingStats};
pub use control_plane::{ChangeEvent, ControlPlane};
pub use db::time::rfc3339;
pub use db::transaction::{Actor, Precondition};
pub use db::{Db, redact_password};
pub use durable::{DurableTotal, DurableUnits};
pub use emergency::record::{EmergencyAction, EmergencyRecord, EmergencySpec, EmergencyTarget, TargetKind};
pub use error::{ControlError, ValidationError};
pub use grant::store::{GrantRecord, GrantSpec};
pub use history::read::{HistoryRank, HistorySeries, history_step};
pub use history::write::HistoryMinute;
pub use history::{HistoryCounts, HistoryLatency, HistoryOf};
pub use preview::recent_requests::RecentRequests;
pub use preview::replay::{AffectedCaller, ImpactReport, TightenedImpact, replay};
pub use preview::report::{ChangeKind, ConfirmKind, ConfirmReason, PreviewReport, RuleDiagnostic, RuleDiff};
pub use preview::sample::TrafficSample;
pub use preview::sample_slice::SampleSlice;
pub use preview::sampled_request::SampledRequest;
pub use quota::guard::{LimitsInForce, QuotaChange, RuleInForce};
pub use quota::import::{Import, ImportLine, ImportReport, LineError};
pub use quota::list::{Cursor, QuotaFilter, QuotaPage};
pub use quota::pending::CurrentTerms;
pub use quota::record::{Quota, QuotaSpec};
pub use replication::lag::{LAG_BUCKETS_MS, PropagationLag};
pub use replication::node_record::NodeRecord;
pub use replication::sync::SyncConfig;
pub use rules::denial_counts::DenialCounts;
pub use rules::guardrails::Guardrails;
pub use rules::manager::{ActiveRules, RuleLoadError, RuleManager, RulesFrom};
pub use rules::publish::{PublishError, PublishRequest, PublishResult};
pub use rules::revision::{NewRevision, PublishedRules, RevisionStatus, RuleFile, RuleRevision};
pub use tollgate_replica::{CallerRef, KeyHash, KeyHasher, QuotaOverride, QuotaTable};
