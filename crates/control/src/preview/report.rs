//! What a preview reports: errors, warnings, what changes, and what the rules would have done to the last traffic.

use crate::preview::replay::ImpactReport;
use serde::Serialize;
use tollgate_rules::Diagnostic;
use utoipa::ToSchema;

/// What is wrong in a file, or does nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = Remark)]
pub struct RuleDiagnostic {
    /// The file.
    pub file: String,
    /// The line, from 1.
    pub line: u32,
    /// The column, from 1.
    pub column: u32,
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    pub help: Option<String>,
}

impl From<&Diagnostic> for RuleDiagnostic {
    fn from(one: &Diagnostic) -> Self {
        let Diagnostic { file, line, column, message, help, .. } = one.clone();
        Self { file, line, column, message, help }
    }
}

/// What becomes of one rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = RuleChange)]
pub struct RuleDiff {
    /// Its domain and path.
    pub rule: String,
    /// Whether it is new, goes, or stays as another.
    pub change: ChangeKind,
    /// What it says.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    pub before: Option<String>,
    /// What it will say.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    pub after: Option<String>,
}

/// Whether a rule is new, goes, or stays as another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ChangeKind {
    /// It is new.
    Added,
    /// It goes.
    Removed,
    /// It says something else.
    Changed,
}

/// What is known of rules before they act.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[schema(as = RuleReport)]
pub struct PreviewReport {
    /// Why they cannot act.
    pub errors: Vec<RuleDiagnostic>,
    /// What in them does nothing.
    pub warnings: Vec<RuleDiagnostic>,
    /// What they change.
    pub diff: Vec<RuleDiff>,
    /// What they would have done to the last traffic.
    #[serde(rename = "impact")]
    #[schema(required = true)]
    pub rehearsal: Option<ImpactReport>,
}
