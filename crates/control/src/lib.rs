//! What operators decide while traffic flows, kept in SQLite or PostgreSQL: quotas of single callers, published
//! rules, who may change them, and a log of every change. Knows SQL; nothing here is on the way of a request but [`QuotaTable`],
//! which is memory alone.
//!
//! | folder | what is in it |
//! |---|---|
//! | `control_plane` | the whole of it, opened: what a server holds. It owns the state of every folder, and each folder adds its methods |
//! | `db`, `error` | the two databases as one, their tables, and a change: one transaction, one revision, one entry of the audit log |
//! | `audit` | what was changed, by whom, in a chain that shows what was tampered with |
//! | `auth` | tokens and how they are verified; how API keys are kept, as a keyed hash |
//! | `grant` | extra quota of single callers, once |
//! | `quota` | what is agreed with callers: one record, lists, imports; [`QuotaTable`], all of them in memory |
//! | `emergency` | what operators decide in an emergency |
//! | `preview` | a [`TrafficSample`] of the last traffic, the samples of other nodes, and what candidate rules would have done to both |
//! | `rules` | [`RuleManager`], the rules that act on this node; publishing others; the guard that rolls them back |
//! | `replication` | how nodes learn of changes; which nodes there are; the snapshot for a start without the database |
//!
//! A folder imports only from those above it (`tests/module_cycles.rs`).

mod audit;
mod auth;
mod control_plane;
mod db;
mod emergency;
mod error;
mod grant;
mod preview;
mod quota;
mod replication;
mod rules;

pub use audit::{AuditEntry, AuditVerification};
pub use auth::key_hash::{CallerRef, KeyHash, KeyHasher};
pub use auth::principal::{Principal, Role};
pub use auth::tokens::{NewToken, Token};
pub use auth::verify::{TokenCheck, UnverifiedToken};
pub use control_plane::{ChangeEvent, ControlPlane};
pub use db::time::rfc3339;
pub use db::transaction::{Actor, Precondition};
pub use db::{Db, redact_password};
pub use emergency::record::{EmergencyAction, EmergencyRecord, EmergencySpec, EmergencyTarget, TargetKind};
pub use error::{ControlError, ValidationError};
pub use grant::store::{GrantRecord, GrantSpec};
pub use preview::replay::{AffectedCaller, ImpactReport, replay};
pub use preview::report::{ChangeKind, PreviewReport, RuleDiagnostic, RuleDiff};
pub use preview::sample::TrafficSample;
pub use preview::sample_slice::SampleSlice;
pub use preview::sampled_request::SampledRequest;
pub use quota::import::{Import, ImportLine, ImportReport, LineError};
pub use quota::list::{Cursor, QuotaFilter, QuotaPage};
pub use quota::overrides::QuotaOverride;
pub use quota::pending::CurrentTerms;
pub use quota::record::{Quota, QuotaSpec};
pub use quota::table::QuotaTable;
pub use replication::lag::{LAG_BUCKETS_MS, PropagationLag};
pub use replication::node_record::NodeRecord;
pub use replication::sync::SyncConfig;
pub use rules::denial_counts::DenialCounts;
pub use rules::guardrails::Guardrails;
pub use rules::manager::{ActiveRules, RuleLoadError, RuleManager, RulesFrom};
pub use rules::publish::{PublishError, PublishRequest, PublishResult};
pub use rules::revision::{NewRevision, PublishedRules, RevisionStatus, RuleFile, RuleRevision};
