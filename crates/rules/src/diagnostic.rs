//! Diagnostics of rule files: what is wrong, where, and what to write instead.
//!
//! A diagnostic carries its own snippet, so that it can be logged, shown at `/readyz` and printed long after the file
//! has changed. All errors of all files are collected, up to a bound: one run shows the whole work that is left.

use crate::yaml::Position;
use std::fmt;

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The rules are refused.
    Error,
    /// The rules load, and one of them does nothing.
    Warning,
}

/// One thing that is wrong in a rule file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnostic {
    /// Whether the rules are refused for it.
    pub severity: Severity,
    /// The file.
    pub file: String,
    /// The line, from 1.
    pub line: u32,
    /// The column in characters, from 1.
    pub column: u32,
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    pub help: Option<String>,
    /// The line as it stands in the file.
    snippet: String,
    /// Characters to underline.
    width: u32,
}

/// Longer lines are cut in snippets.
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

/// Everything that keeps a set of rule files from loading. Never empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Diagnostics {
    all: Vec<Diagnostic>,
    /// Errors beyond [`Self::MAX`].
    more: usize,
}

impl Diagnostics {
    /// The most errors that are kept.
    pub const MAX: usize = 100;

    /// The errors, in the order of the files.
    #[must_use]
    pub fn all(&self) -> &[Diagnostic] {
        &self.all
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// Takes one more; its making is skipped once there are enough.
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
