//! What a preview reports: errors, warnings, what changes, and what the rules would have done to the last traffic.

use crate::preview::replay::Rehearsal;
use serde::Serialize;
use tollgate_rules::Diagnostic;

/// What is wrong in a file, or does nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Remark {
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
    pub help: Option<String>,
}

impl From<&Diagnostic> for Remark {
    fn from(one: &Diagnostic) -> Self {
        let Diagnostic { file, line, column, message, help, .. } = one.clone();
        Self { file, line, column, message, help }
    }
}

/// What becomes of one rule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Change {
    /// Its domain and path.
    pub rule: String,
    /// `added`, `removed` or `changed`.
    pub change: &'static str,
    /// What it says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub before: Option<String>,
    /// What it will say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<String>,
}

/// What is known of rules before they act.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Why they cannot act.
    pub errors: Vec<Remark>,
    /// What in them does nothing.
    pub warnings: Vec<Remark>,
    /// What they change.
    pub diff: Vec<Change>,
    /// What they would have done to the last traffic.
    pub rehearsal: Option<Rehearsal>,
}
