//! What operators decide while traffic flows, kept in SQLite or PostgreSQL: quotas of single callers, published
//! rules, who may change them, and a log of every change. Knows SQL; nothing here is on the way of a request but [`Book`],
//! which is memory alone.
//!
//! | file | answers |
//! |---|---|
//! | `control` | the whole of it, opened: what a server holds |
//! | `db`, `migrate` | the two databases as one, and how their tables come about |
//! | `change` | a change: one transaction, one revision, one entry of the audit log |
//! | `quota`, `quotas`, `until` | what is agreed with a caller; how it is kept; what acts until it does |
//! | `bulk` | many of them at once |
//! | `revision`, `published` | a revision of the rules; how all of them are kept |
//! | [`desk`](Desk) | the rules that act on this node, and how others come in their place |
//! | `publish`, `look` | publishing rules; what must be known of them before they act |
//! | [`sample`](Sample), [`sampled`](Sampled), [`rehearsal`](Rehearsal) | the last traffic; what other rules would have done to it |
//! | `gather`, `answer`, `wire`, `hidden`, `merge` | the traffic of other nodes: how it is asked for, how it is written, what stands in it for those who ask, how it becomes one sample |
//! | [`denials`](Denials), [`guard`](Guardrails) | what new rules do to callers, and going back where it is too much |
//! | `caller` | who asks, for those who watch |
//! | `emergency`, `emergencies` | what operators decide in an emergency; how it is kept |
//! | `grants`, `granted` | extra quota of single callers, once |
//! | `key` | how API keys are kept: as a keyed hash |
//! | [`book`](Book) | all agreements in memory, for the limiter |
//! | `follow`, `lag` | how this node learns of changes that others make, and how long that takes |
//! | `nodes` | which nodes share the database, and what they are at |
//! | `snapshot` | what is known, in a file beside, for a start without the database |
//! | `purge` | when rows go that were deleted |
//! | `tokens`, `proof`, `lately` | who may do what; how a token proves it; who may look while the database is away |
//! | `audit` | what was changed, by whom, in a chain that shows what was tampered with |

mod answer;
mod audit;
mod book;
mod bulk;
mod caller;
mod change;
mod control;
mod db;
mod denials;
mod desk;
mod emergencies;
mod emergency;
mod follow;
mod gather;
mod granted;
mod grants;
mod guard;
mod hidden;
mod key;
mod lag;
mod lately;
mod look;
mod merge;
mod migrate;
mod nodes;
mod proof;
mod publish;
mod published;
mod purge;
mod quota;
mod quotas;
mod rehearsal;
mod revision;
mod sample;
mod sampled;
mod snapshot;
mod tokens;
mod until;
mod wire;

pub use audit::{AuditEntry, Verified};
pub use book::Book;
pub use bulk::{Import, ImportLine, Imported, LineError};
pub use change::{Actor, Expected};
pub use control::{Control, Heard};
pub use db::{ControlError, Db, without_password};
pub use denials::Denials;
pub use desk::{Acting, Desk, DeskError, RulesFrom};
pub use emergency::{Emergency, EmergencyAction, EmergencyDraft, EmergencyTarget, TargetKind};
pub use follow::Following;
pub use grants::{GrantDraft, QuotaGrant};
pub use guard::Guardrails;
pub use key::{Caller, KeyHash, KeyHasher};
pub use lag::{LAG_CLASSES, Lag};
pub use nodes::NodeSeen;
pub use proof::{Claim, Claimed};
pub use publish::{Change, ChangeKind, Proposal, Publication, Refusal, Remark, Report};
pub use quota::{Quota, QuotaDraft, QuotaOverride, QuotaProblem, rfc3339};
pub use quotas::{Cursor, Page, Wanted};
pub use rehearsal::{Affected, Rehearsal, rehearse};
pub use revision::{PublishedRules, RuleDraft, RuleFile, RuleRevision, RuleStatus};
pub use sample::{Remembered, Sample};
pub use sampled::Sampled;
pub use tokens::{Identity, NewToken, Role, Token};
pub use until::QuotaUntil;
