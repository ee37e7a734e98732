//! What operators decide while traffic flows, kept in SQLite or PostgreSQL: quotas of single callers, published
//! rules, who may change them, and a log of every change. Knows SQL; nothing here is on the way of a request but [`Book`],
//! which is memory alone.
//!
//! | folder | what is in it |
//! |---|---|
//! | `control_plane` | the whole of it, opened: what a server holds. It owns the state of every folder, and each folder adds its methods |
//! | `db`, `error` | the two databases as one, their tables, and a change: one transaction, one revision, one entry of the audit log |
//! | `audit` | what was changed, by whom, in a chain that shows what was tampered with |
//! | `auth` | tokens and how they are verified; how API keys are kept, as a keyed hash |
//! | `grant` | extra quota of single callers, once |
//! | `quota` | what is agreed with callers: one record, lists, imports; [`Book`], all of them in memory |
//! | `emergency` | what operators decide in an emergency |
//! | `preview` | a [`Sample`] of the last traffic, the samples of other nodes, and what candidate rules would have done to both |
//! | `rules` | [`Desk`], the rules that act on this node; publishing others; the guard that rolls them back |
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

pub use audit::{AuditEntry, Verified};
pub use auth::key_hash::{Caller, KeyHash, KeyHasher};
pub use auth::principal::{Identity, Role};
pub use auth::tokens::{NewToken, Token};
pub use auth::verify::{Claim, Claimed};
pub use control_plane::{Control, Heard};
pub use db::time::rfc3339;
pub use db::transaction::{Actor, Expected};
pub use db::{Db, without_password};
pub use emergency::record::{Emergency, EmergencyAction, EmergencyDraft, EmergencyTarget, TargetKind};
pub use error::{ControlError, QuotaProblem};
pub use grant::store::{GrantDraft, QuotaGrant};
pub use preview::replay::{Affected, Rehearsal, rehearse};
pub use preview::report::{Change, ChangeKind, Remark, Report};
pub use preview::sample::Sample;
pub use preview::sample_slice::Remembered;
pub use preview::sampled_request::Sampled;
pub use quota::import::{Import, ImportLine, Imported, LineError};
pub use quota::list::{Cursor, Page, Wanted};
pub use quota::overrides::QuotaOverride;
pub use quota::pending::QuotaUntil;
pub use quota::record::{Quota, QuotaDraft};
pub use quota::table::Book;
pub use replication::lag::{LAG_CLASSES, Lag};
pub use replication::node_record::NodeSeen;
pub use replication::sync::Following;
pub use rules::denial_counts::Denials;
pub use rules::guardrails::Guardrails;
pub use rules::manager::{Acting, Desk, DeskError, RulesFrom};
pub use rules::publish::{Proposal, Publication, Refusal};
pub use rules::revision::{PublishedRules, RuleDraft, RuleFile, RuleRevision, RuleStatus};
