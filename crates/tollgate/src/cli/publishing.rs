//! Settings of published rules.

use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;
use tollgate_control::Guardrails;

#[derive(Clone, Debug, Args)]
pub(crate) struct PublishingFlags {
    /// Where rules come from, with --db: from the database once some are published there, or always from the files;
    /// database unless set.
    #[arg(long, env = "TOLLGATE_RULES_FROM", value_name = "SOURCE")]
    pub(crate) rules_from: Option<RulesFromName>,
    /// Where what is known from PostgreSQL is kept, for a start without it, or `off`; unless set, a file of its own in
    /// $STATE_DIRECTORY, $XDG_STATE_HOME/tollgate or ~/.local/state/tollgate.
    #[arg(long, env = "TOLLGATE_SNAPSHOT", value_name = "FILE|off")]
    snapshot: Option<PathBuf>,
    /// Publishing rules that newly deny more than this part of the last requests must be confirmed (default 0.05).
    #[arg(long, env = "TOLLGATE_RULES_CONFIRM_OVER", value_name = "PART")]
    rules_confirm_over: Option<f64>,
    /// Publishing rules that newly deny more than this part needs another person's approval (default 0.5).
    #[arg(long, env = "TOLLGATE_RULES_APPROVAL_OVER", value_name = "PART")]
    rules_approval_over: Option<f64>,
    /// Published rules are rolled back when denials of a caller rise to more than so many times what they were; 0 is never
    /// (default 10).
    #[arg(long, env = "TOLLGATE_RULES_ROLLBACK_RISE", value_name = "TIMES")]
    rules_rollback_rise: Option<f64>,
    /// For so long, in milliseconds; 60000 unless set.
    #[arg(long, env = "TOLLGATE_RULES_ROLLBACK_FOR_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=super::DAY))]
    rules_rollback_for_ms: Option<u64>,
    /// Within so long after publishing, in milliseconds; 300000 unless set.
    #[arg(long, env = "TOLLGATE_RULES_ROLLBACK_WITHIN_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=super::DAY))]
    rules_rollback_within_ms: Option<u64>,
}

/// The same in the file of `--config`: `guardrails`.
#[derive(Clone, Copy, Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GuardrailSection {
    confirm_over: Option<f64>,
    approval_over: Option<f64>,
    rollback_rise: Option<f64>,
    rollback_for_ms: Option<u64>,
    rollback_within_ms: Option<u64>,
}

impl PublishingFlags {
    /// Where what is known from this database is kept; nowhere, for a file of SQLite.
    pub(crate) fn snapshot(&self, file: Option<PathBuf>, db: Option<&str>) -> Option<PathBuf> {
        let db = db.filter(|db| !db.starts_with("sqlite:"))?;
        if let Some(path) = self.snapshot.clone().or(file) {
            return (path.as_os_str() != "off").then_some(path);
        }
        let folder = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        let state = || {
            Some(
                folder("XDG_STATE_HOME")
                    .or_else(|| Some(folder("HOME")?.join(".local/state")))?
                    .join("tollgate"),
            )
        };
        let mut hasher = tollgate_core::StableHasher::default();
        hasher.bytes(db.as_bytes());
        Some(folder("STATE_DIRECTORY").or_else(state)?.join(format!("{:016x}.snapshot", hasher.finish())))
    }

    /// Flags over file over what is usual.
    pub(crate) fn guardrails(&self, file: GuardrailSection) -> anyhow::Result<Guardrails> {
        let mut rails = Guardrails::default();
        let parts = [
            ("--rules-confirm-over", self.rules_confirm_over.or(file.confirm_over), &mut rails.confirm_over),
            (
                "--rules-approval-over",
                self.rules_approval_over.or(file.approval_over),
                &mut rails.approval_over,
            ),
        ];
        for (flag, given, setting) in parts {
            if let Some(part) = given {
                anyhow::ensure!((0.0..=1.0).contains(&part), "{flag}: write a part from 0 to 1, not {part}");
                *setting = part;
            }
        }
        if let Some(rise) = self.rules_rollback_rise.or(file.rollback_rise) {
            anyhow::ensure!(
                rise == 0.0 || (1.0..=1e6).contains(&rise),
                "--rules-rollback-rise: write 0, or a number from 1 to 1000000, not {rise}"
            );
            rails.rise = rise;
        }
        let times = [
            ("rollback_for_ms", self.rules_rollback_for_ms.or(file.rollback_for_ms), &mut rails.lasting),
            (
                "rollback_within_ms",
                self.rules_rollback_within_ms.or(file.rollback_within_ms),
                &mut rails.within,
            ),
        ];
        for (name, given, setting) in times {
            if let Some(millis) = given {
                let known = (1..=super::DAY).contains(&millis);
                anyhow::ensure!(
                    known,
                    "guardrails.{name}: write a number from 1 to {}, not {millis}",
                    super::DAY
                );
                *setting = Duration::from_millis(millis);
            }
        }
        Ok(rails)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RulesFromName {
    /// What is published acts; until something is, the files.
    Database,
    /// The files act, whatever is published.
    Files,
}

impl From<RulesFromName> for tollgate_control::RulesFrom {
    fn from(name: RulesFromName) -> Self {
        match name {
            RulesFromName::Database => Self::Database,
            RulesFromName::Files => Self::Files,
        }
    }
}
