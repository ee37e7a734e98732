//! Published rule revisions: their files, author, reason and status.

use serde::{Deserialize, Serialize};
use tollgate_rules::Source;
use utoipa::ToSchema;

/// A rule file, as sent and stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RuleFile {
    /// File name, for diagnostics.
    pub name: String,
    /// Contents.
    pub text: String,
}

impl From<&RuleFile> for Source {
    fn from(file: &RuleFile) -> Self {
        Self::new(file.name.clone(), file.text.clone())
    }
}

impl From<&Source> for RuleFile {
    fn from(source: &Source) -> Self {
        Self { name: source.name.clone(), text: source.text.clone() }
    }
}

/// Status of a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RevisionStatus {
    /// Active on all nodes.
    Active,
    /// Replaced by a later revision.
    Superseded,
    /// Waiting for the approval of another operator than its author.
    PendingApproval,
    /// Another revision became active before it was approved.
    Rejected,
    /// Rolled back.
    RolledBack,
}

impl RevisionStatus {
    const ALL: [Self; 5] =
        [Self::Active, Self::Superseded, Self::PendingApproval, Self::Rejected, Self::RolledBack];

    /// Returns the name of the status.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Active => "active",
            Self::Superseded => "superseded",
            Self::PendingApproval => "pending_approval",
            Self::Rejected => "rejected",
            Self::RolledBack => "rolled_back",
        }
    }

    /// Returns whether the revision is or was active.
    pub(crate) const fn was_active(self) -> bool {
        match self {
            Self::Active | Self::Superseded | Self::RolledBack => true,
            Self::PendingApproval | Self::Rejected => false,
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.name() == name)
    }
}

/// A revision, without its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RuleRevision {
    /// Number of the revision.
    pub rev: i64,
    /// Rules hash, as in decisions: twelve hexadecimal digits.
    pub revision: String,
    /// Principal that published it.
    pub author: String,
    /// Reason for the publication.
    pub reason: String,
    /// Time of the publication.
    pub created_at: String,
    /// Status of the revision.
    pub status: RevisionStatus,
    /// The revision that was active when it was published.
    #[schema(required = true)]
    pub base_rev: Option<i64>,
    /// Time at which it first became active, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = i64)]
    pub active_since_ms: Option<i64>,
    /// Operator that approved it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    pub approved_by: Option<String>,
    /// Reason for its rollback.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    pub rolled_back_because: Option<String>,
    /// Whether the rollback guard watches it after it becomes active. A rollback is not watched: two revisions must
    /// not alternate.
    #[serde(skip)]
    pub watched: bool,
}

/// A revision with its files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PublishedRules {
    /// The revision's metadata.
    #[serde(flatten)]
    pub revision: RuleRevision,
    /// The rule files.
    pub files: Vec<RuleFile>,
}

impl PublishedRules {
    /// Returns the files as sources for the rule compiler.
    #[must_use]
    pub fn sources(&self) -> Vec<Source> {
        self.files.iter().map(Source::from).collect()
    }
}

/// A revision to be published.
#[derive(Clone, Debug)]
pub struct NewRevision {
    /// The rule files.
    pub files: Vec<RuleFile>,
    /// Rules hash, as in decisions.
    pub hash: String,
    /// Reason for the publication.
    pub reason: String,
    /// The revision that was active when the rules were previewed: publishing fails if another is active by now.
    pub base_rev: Option<i64>,
    /// The files that are active while nothing is published, and their hash: stored as the first revision, so that
    /// there is always one to roll back to.
    pub first: Option<(Vec<RuleFile>, String)>,
    /// Whether it needs another operator's approval.
    pub needs_approval: bool,
}
