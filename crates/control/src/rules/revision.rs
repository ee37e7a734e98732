//! A published revision of the rules: what it says, who wanted it and why, and what became of it.

use serde::{Deserialize, Serialize};
use tollgate_rules::Source;
use utoipa::ToSchema;

/// One rule file as it is sent and kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RuleFile {
    /// Its name, for diagnostics.
    pub name: String,
    /// What stands in it.
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

/// What became of a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = RuleStatus)]
pub enum RevisionStatus {
    /// It acts on all nodes.
    Active,
    /// Another acts in its place.
    Superseded,
    /// It acts when another person than its author says so.
    PendingApproval,
    /// Something else was published before anybody approved of it.
    Rejected,
    /// It was taken back.
    RolledBack,
}

impl RevisionStatus {
    const ALL: [Self; 5] =
        [Self::Active, Self::Superseded, Self::PendingApproval, Self::Rejected, Self::RolledBack];

    /// Its word.
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

    /// Whether it acts, or did before.
    pub(crate) const fn was_active(self) -> bool {
        match self {
            Self::Active | Self::Superseded | Self::RolledBack => true,
            Self::PendingApproval | Self::Rejected => false,
        }
    }

    pub(crate) fn from_name(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.name() == word)
    }
}

/// A revision, without its text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RuleRevision {
    /// Its number.
    pub rev: i64,
    /// What decisions made by it say: twelve hexadecimal digits.
    pub revision: String,
    /// Who published it.
    pub author: String,
    /// Why.
    pub reason: String,
    /// When.
    pub created_at: String,
    /// What became of it.
    pub status: RevisionStatus,
    /// What acted when it was published.
    #[schema(required = true)]
    pub base_rev: Option<i64>,
    /// Since when it acts or acted first, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = i64)]
    pub active_since_ms: Option<i64>,
    /// Who else said that it may act.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    pub approved_by: Option<String>,
    /// Why it was taken back.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    pub rolled_back_because: Option<String>,
    /// Whether nodes watch what it does to callers after it has begun to act. A rollback is not watched: two revisions
    /// must not take turns.
    #[serde(skip)]
    pub watched: bool,
}

/// A revision with its text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = RuleText)]
pub struct PublishedRules {
    /// What is known of it.
    #[serde(flatten)]
    pub revision: RuleRevision,
    /// What it says.
    pub files: Vec<RuleFile>,
}

impl PublishedRules {
    /// What the rule language reads.
    #[must_use]
    pub fn sources(&self) -> Vec<Source> {
        self.files.iter().map(Source::from).collect()
    }
}

/// A revision that is to be.
#[derive(Clone, Debug)]
pub struct NewRevision {
    /// What it says.
    pub files: Vec<RuleFile>,
    /// What decisions made by it will say.
    pub hash: String,
    /// Why.
    pub reason: String,
    /// What acted when it was looked at: if anything else acts by now, it is refused.
    pub base_rev: Option<i64>,
    /// The files that act while nothing is published, and their hash: kept as the first revision, so that there is always
    /// one to go back to.
    pub first: Option<(Vec<RuleFile>, String)>,
    /// Whether it waits for another person.
    pub needs_approval: bool,
}
