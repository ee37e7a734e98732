//! Preview report: errors, warnings, differences, and the impact on recent traffic.

use crate::preview::replay::ImpactReport;
use serde::Serialize;
use tollgate_rules::{Diagnostic, RuleChange};
use utoipa::ToSchema;

/// An error or warning in a rule file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct RuleDiagnostic {
    /// File name.
    pub file: String,
    /// Line, starting at 1.
    pub line: u32,
    /// Column, starting at 1.
    pub column: u32,
    /// What is wrong.
    pub message: String,
    /// How to fix it.
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

/// The difference of one rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct RuleDiff {
    /// Domain and path of the rule.
    pub rule: String,
    /// Kind of the difference.
    pub change: ChangeKind,
    /// The active definition.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    pub before: Option<String>,
    /// The new definition.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = String)]
    pub after: Option<String>,
}

impl From<RuleChange> for RuleDiff {
    fn from(change: RuleChange) -> Self {
        let kind = match (&change.before, &change.after) {
            (None, _) => ChangeKind::Added,
            (_, None) => ChangeKind::Removed,
            _ => ChangeKind::Changed,
        };
        Self { rule: change.rule, change: kind, before: change.before, after: change.after }
    }
}

/// Kind of a rule difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ChangeKind {
    /// The rule is new.
    Added,
    /// The rule is removed.
    Removed,
    /// The rule is different.
    Changed,
}

/// A reason why rules are published only with `confirm`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub struct ConfirmReason {
    /// Kind of the reason.
    pub reason: ConfirmKind,
    /// What would happen, for a person.
    pub detail: String,
}

/// Kind of a reason for confirmation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ConfirmKind {
    /// More recent requests would be denied than the threshold allows.
    NewlyDenied,
    /// More callers would have requests denied than the threshold allows.
    CallersNewlyDenied,
    /// More recent requests would be allowed than the threshold allows.
    NewlyAllowed,
    /// More callers would have requests allowed than the threshold allows.
    CallersNewlyAllowed,
    /// A domain is removed, or has no limit left that denies anything.
    DomainRemoved,
    /// A rule of class `security` is removed.
    SecurityRuleRemoved,
    /// A rule of class `security` protects less.
    SecurityRuleWeakened,
    /// A rule admits nothing, and admitted something before.
    AdmitsNothing,
    /// A rule admits a tenth or less.
    LimitCut,
}

/// Report on candidate rules before they are published.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub struct PreviewReport {
    /// Errors that make the rules invalid.
    pub errors: Vec<RuleDiagnostic>,
    /// Warnings, such as rules without effect.
    pub warnings: Vec<RuleDiagnostic>,
    /// Differences from the active rules.
    pub diff: Vec<RuleDiff>,
    /// Why publishing needs `confirm: true`; empty if it does not.
    pub confirm: Vec<ConfirmReason>,
    /// Impact on recent traffic.
    #[serde(rename = "impact")]
    #[schema(required = true)]
    pub rehearsal: Option<ImpactReport>,
}
