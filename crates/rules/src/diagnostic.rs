//! Diagnostics of rule files: the error, its position and a suggested fix.
//!
//! A diagnostic carries its own snippet, so that it can be logged, shown at `/readyz` and printed long after the file
//! has changed. All errors of all files are collected, up to a maximum, so that one run shows everything to fix.

use crate::yaml::Position;
use std::fmt;

/// Severity of a diagnostic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The rules are rejected.
    Error,
    /// The rules load, but one of them has no effect, or another than it seems to have.
    Warning,
    /// A warning only for some stores, when it is not known which one will be used.
    Note,
}

/// One problem in a rule file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Severity: whether the rules are rejected.
    pub severity: Severity,
    /// Name of the file.
    pub file: String,
    /// Line, starting at 1.
    pub line: u32,
    /// Column in characters, starting at 1.
    pub column: u32,
    /// Description of the problem.
    pub message: String,
    /// Suggested fix.
    pub help: Option<String>,
    /// The problem in the words of envoyproxy/ratelimit, if it has some: logs and alerts are searched for them.
    pub envoy_reason: Option<String>,
    /// Text of the line in the file.
    snippet: String,
    /// Number of characters to underline.
    width: u32,
}

/// The maximum length of a line in a snippet; longer lines are truncated.
const MAX_SNIPPET: usize = 120;

impl Diagnostic {
    pub(crate) fn new(severity: Severity, source: &crate::Source, at: Position, message: String) -> Self {
        let line = source.text.lines().nth(at.line.saturating_sub(1) as usize).unwrap_or("");
        let snippet: String =
            line.chars().take(MAX_SNIPPET).map(|c| if c.is_control() { ' ' } else { c }).collect();
        let room = (snippet.chars().count() as u32).saturating_sub(at.column.saturating_sub(1)).max(1);
        Self {
            severity,
            file: source.name.clone(),
            line: at.line,
            column: at.column,
            message,
            help: None,
            envoy_reason: None,
            snippet: snippet.trim_end().to_owned(),
            width: at.width.clamp(1, room),
        }
    }

    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Error => "error",
            Severity::Warning => "warning",
            Severity::Note => "note",
        };
        let Self { file, line, column, message, .. } = self;
        write!(f, "{severity}: {message}\n  --> {file}:{line}:{column}")?;
        if (*column as usize) <= MAX_SNIPPET && !self.snippet.is_empty() {
            let margin = " ".repeat(line.to_string().len());
            let indent = " ".repeat(column.saturating_sub(1) as usize);
            let carets = "^".repeat(self.width as usize);
            write!(f, "\n{margin} |\n{line} | {}\n{margin} | {indent}{carets}", self.snippet)?;
        }
        match &self.help {
            Some(help) => write!(f, "\n  = help: {help}"),
            None => Ok(()),
        }
    }
}

/// All errors that prevent a set of rule files from loading. Never empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diagnostics {
    all: Vec<Diagnostic>,
    /// Number of errors beyond [`Self::MAX`].
    more: usize,
}

impl Diagnostics {
    /// The maximum number of errors that are kept.
    pub const MAX: usize = 100;

    /// Returns the errors, in the order of the files.
    #[must_use]
    pub fn all(&self) -> &[Diagnostic] {
        &self.all
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Adds what envoyproxy/ratelimit says to the error that was added last.
    pub(crate) fn envoy_reason(&mut self, reason: String) {
        if let (Some(last), 0) = (self.all.last_mut(), self.more) {
            last.envoy_reason = Some(reason);
        }
    }

    /// Adds an error; `make` is not called once the maximum is reached.
    pub(crate) fn push(&mut self, make: impl FnOnce() -> Diagnostic) {
        if self.all.len() < Self::MAX {
            self.all.push(make());
        } else {
            self.more += 1;
        }
    }
}

impl fmt::Display for Diagnostics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, diagnostic) in self.all.iter().enumerate() {
            if i > 0 {
                f.write_str("\n\n")?;
            }
            diagnostic.fmt(f)?;
        }
        if self.more > 0 {
            write!(f, "\n\n... and {} more errors", self.more)?;
        }
        Ok(())
    }
}

impl std::error::Error for Diagnostics {}
