//! Findings: what the doctor has to say, with its place and what to do about it.

use serde::Serialize;
use std::fmt;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// Requests are not limited as written, or fail.
    Problem,
    /// Works, and may surprise.
    Warning,
    /// What will happen.
    Note,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Problem => "problem",
            Self::Warning => "warning",
            Self::Note => "note",
        })
    }
}

/// One thing to know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Finding {
    pub(super) level: Level,
    /// File, document and path within it.
    pub(super) place: String,
    pub(super) message: String,
    /// What to do.
    pub(super) fix: Option<String>,
}

/// Maximum number of findings of each level in one report: notes about a whole cluster must not displace problems.
const MAX_FINDINGS: usize = 1_000;

/// All findings.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) findings: Vec<Finding>,
    /// Number of findings beyond the maximum.
    pub(super) more: usize,
}

impl Report {
    fn add(&mut self, level: Level, place: &str, message: String, fix: Option<String>) {
        let finding = Finding { level, place: place.to_owned(), message, fix };
        if self.findings.contains(&finding) {
            return;
        }
        match self.count(level) < MAX_FINDINGS {
            true => self.findings.push(finding),
            false => self.more += 1,
        }
    }

    pub(super) fn problem(&mut self, place: &str, message: impl Into<String>, fix: impl Into<String>) {
        self.add(Level::Problem, place, message.into(), Some(fix.into()));
    }

    pub(super) fn warning(&mut self, place: &str, message: impl Into<String>, fix: impl Into<String>) {
        self.add(Level::Warning, place, message.into(), Some(fix.into()));
    }

    pub(super) fn note(&mut self, place: &str, message: impl Into<String>) {
        self.add(Level::Note, place, message.into(), None);
    }

    pub(super) fn count(&self, level: Level) -> usize {
        self.findings.iter().filter(|finding| finding.level == level).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_displace_no_problem() {
        let mut report = Report::default();
        for number in 0..MAX_FINDINGS + 5 {
            report.note("a", number.to_string());
        }
        report.problem("b", "wrong", "mend it");
        assert_eq!(
            (report.count(Level::Note), report.count(Level::Problem), report.more),
            (MAX_FINDINGS, 1, 5)
        );
    }
}
