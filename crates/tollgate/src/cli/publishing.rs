//! Settings of published rules: their source, the snapshot file, guardrails.

use crate::config::last_good::state_directory;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;
use tollgate_control::Guardrails;

#[derive(Clone, Debug, Args)]
pub(crate) struct PublishingFlags {
    /// Source of the active rules: `database` (with --db, published rules; the files until there are some), `files`
    /// (published rules are ignored) or `xds` (the management server of --xds-server, beside the files) [default: database].
    #[arg(long, env = "TOLLGATE_RULES_FROM", value_name = "SOURCE")]
    pub(crate) rules_from: Option<RulesFromName>,
    /// Control-plane snapshot file, or `off`: replicated state for a start without PostgreSQL [default: a file in
    /// $STATE_DIRECTORY, $XDG_STATE_HOME/tollgate or ~/.local/state/tollgate].
    #[arg(long, env = "TOLLGATE_SNAPSHOT", value_name = "FILE|off")]
    snapshot: Option<PathBuf>,
    /// Keep the active rules when changed rule files newly deny or allow much traffic, admit nothing or a tenth of a limit,
    /// or remove a domain or a security rule, also after a restart; `tollgate rules confirm-files` or SIGHUP applies them.
    #[arg(long, env = "TOLLGATE_GUARD_FILES")]
    pub(crate) guard_files: bool,
    /// Fraction of recent requests, or of callers, that new rules may newly deny or allow without --confirm [default: 0.05].
    #[arg(
        long,
        alias = "rules-confirm-over",
        env = "TOLLGATE_RULES_CONFIRM_THRESHOLD",
        value_name = "FRACTION"
    )]
    rules_confirm_threshold: Option<f64>,
    /// Fraction of recent requests that new rules may newly deny without a second person's approval [default: 0.5].
    #[arg(
        long,
        alias = "rules-approval-over",
        env = "TOLLGATE_RULES_APPROVAL_THRESHOLD",
        value_name = "FRACTION"
    )]
    rules_approval_threshold: Option<f64>,
    /// Increase of a caller's denials, as a factor, that rolls published rules back; 0 disables this [default: 10].
    #[arg(
        long,
        alias = "rules-rollback-rise",
        env = "TOLLGATE_RULES_ROLLBACK_FACTOR",
        value_name = "FACTOR"
    )]
    rules_rollback_factor: Option<f64>,
    /// Time that the increase must last before the rollback, in milliseconds [default: 60000].
    #[arg(long, alias = "rules-rollback-for-ms", env = "TOLLGATE_RULES_ROLLBACK_SUSTAIN_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=super::DAY))]
    rules_rollback_sustain_ms: Option<u64>,
    /// Time after publishing during which denials are watched, in milliseconds [default: 300000].
    #[arg(long, alias = "rules-rollback-within-ms", env = "TOLLGATE_RULES_ROLLBACK_WINDOW_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=super::DAY))]
    rules_rollback_window_ms: Option<u64>,
}

/// The same in the file of `--config`: `guardrails`.
#[derive(Clone, Copy, Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct GuardrailSection {
    #[serde(alias = "confirm_over")]
    confirm_threshold: Option<f64>,
    #[serde(alias = "approval_over")]
    approval_threshold: Option<f64>,
    #[serde(alias = "rollback_rise")]
    rollback_factor: Option<f64>,
    #[serde(alias = "rollback_for_ms")]
    rollback_sustain_ms: Option<u64>,
    #[serde(alias = "rollback_within_ms")]
    rollback_window_ms: Option<u64>,
    /// The same as `--guard-files`.
    pub(crate) files: Option<bool>,
}

/// Reads an environment variable by its former name, with a warning.
pub(crate) fn deprecated_variable<T: std::str::FromStr>(old: &str, new: &str) -> anyhow::Result<Option<T>> {
    let Ok(text) = std::env::var(old) else { return Ok(None) };
    tracing::warn!("environment variable {old} is deprecated; use {new}");
    let value = text.parse().map_err(|_| anyhow::anyhow!("{old}: `{text}` is not a number"))?;
    Ok(Some(value))
}

impl PublishingFlags {
    /// Returns the snapshot file for this database; `None` for SQLite.
    pub(crate) fn snapshot(&self, file: Option<PathBuf>, db: Option<&str>) -> Option<PathBuf> {
        let db = db.filter(|db| !db.starts_with("sqlite:"))?;
        if let Some(path) = self.snapshot.clone().or(file) {
            return (path.as_os_str() != "off").then_some(path);
        }
        let mut hasher = tollgate_core::StableHasher::default();
        hasher.bytes(db.as_bytes());
        Some(state_directory()?.join(format!("{:016x}.snapshot", hasher.finish())))
    }

    /// Merges flags, former variables, file and defaults, in this order.
    pub(crate) fn guardrails(&self, file: GuardrailSection) -> anyhow::Result<Guardrails> {
        let mut rails = Guardrails::default();
        let fractions = [
            (
                "--rules-confirm-threshold",
                setting(
                    self.rules_confirm_threshold,
                    "CONFIRM_OVER",
                    "CONFIRM_THRESHOLD",
                    file.confirm_threshold,
                )?,
                &mut rails.confirm_over,
            ),
            (
                "--rules-approval-threshold",
                setting(
                    self.rules_approval_threshold,
                    "APPROVAL_OVER",
                    "APPROVAL_THRESHOLD",
                    file.approval_threshold,
                )?,
                &mut rails.approval_over,
            ),
        ];
        for (flag, given, setting) in fractions {
            if let Some(fraction) = given {
                anyhow::ensure!(
                    (0.0..=1.0).contains(&fraction),
                    "{flag}: must be between 0 and 1, got {fraction}"
                );
                *setting = fraction;
            }
        }
        let factor =
            setting(self.rules_rollback_factor, "ROLLBACK_RISE", "ROLLBACK_FACTOR", file.rollback_factor)?;
        if let Some(factor) = factor {
            anyhow::ensure!(
                factor == 0.0 || (1.0..=1e6).contains(&factor),
                "--rules-rollback-factor: must be 0 or between 1 and 1000000, got {factor}"
            );
            rails.rise = factor;
        }
        let times = [
            (
                "rollback_sustain_ms",
                setting(
                    self.rules_rollback_sustain_ms,
                    "ROLLBACK_FOR_MS",
                    "ROLLBACK_SUSTAIN_MS",
                    file.rollback_sustain_ms,
                )?,
                &mut rails.lasting,
            ),
            (
                "rollback_window_ms",
                setting(
                    self.rules_rollback_window_ms,
                    "ROLLBACK_WITHIN_MS",
                    "ROLLBACK_WINDOW_MS",
                    file.rollback_window_ms,
                )?,
                &mut rails.within,
            ),
        ];
        for (name, given, setting) in times {
            if let Some(millis) = given {
                anyhow::ensure!(
                    (1..=super::DAY).contains(&millis),
                    "guardrails.{name}: must be between 1 and {}, got {millis}",
                    super::DAY
                );
                *setting = Duration::from_millis(millis);
            }
        }
        Ok(rails)
    }
}

/// Returns the flag, else the former variable, else the value in the file.
fn setting<T: std::str::FromStr>(
    flag: Option<T>,
    old: &str,
    new: &str,
    file: Option<T>,
) -> anyhow::Result<Option<T>> {
    if flag.is_some() {
        return Ok(flag);
    }
    let former = deprecated_variable(&format!("TOLLGATE_RULES_{old}"), &format!("TOLLGATE_RULES_{new}"))?;
    Ok(former.or(file))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RulesFromName {
    /// Published rules are active; the files until some are published.
    Database,
    /// Rule files are active; published rules are ignored.
    Files,
    /// Rules of a management server are active, beside the files; published rules are ignored.
    Xds,
}

impl From<RulesFromName> for tollgate_control::RulesFrom {
    fn from(name: RulesFromName) -> Self {
        match name {
            RulesFromName::Database => Self::Database,
            RulesFromName::Files => Self::Files,
            RulesFromName::Xds => Self::Xds,
        }
    }
}
