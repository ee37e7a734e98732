//! Last good rules: a copy of the rule files that were accepted, for a restart while the files are broken or, with
//! `--guard-files`, not confirmed.
//!
//! A running server keeps its rules when a file is broken or kept out by the guard, and a restart must not be worse:
//! machines restart by themselves, and often at night. The copy lies in the state directory, under a name that belongs
//! to the paths of the files. Beside the files it has what the guard needs to know after a restart: which files it kept
//! out, and the baseline that small steps are judged against.
//!
//! Rejected: a copy beside the files, because their directory is often read-only, and a copy there would be read as a
//! rule file.

use crate::config::Config;
use crate::config::rule_sources;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tollgate_control::ImpactReport;
use tollgate_core::{Clock, SystemClock, TimeDelta, Timestamp};
use tollgate_rules::{Options, Ruleset, Source};

/// Returns the directory for state that survives a restart.
pub(crate) fn state_directory() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    let user = || folder("XDG_STATE_HOME").or_else(|| Some(folder("HOME")?.join(".local/state")));
    folder("STATE_DIRECTORY").or_else(|| Some(user()?.join("tollgate")))
}

/// Time for which rules must have been active to be the baseline of later changes.
const BASELINE_AGE: TimeDelta = TimeDelta::from_secs(24 * 3_600);

/// The accepted rule files, and the file that keeps them; no file without rule files or a state directory.
#[derive(Debug)]
pub(crate) struct LastGood {
    path: Option<PathBuf>,
    /// None before any files were accepted.
    record: Option<Record>,
}

/// Content of the copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    files: Vec<StoredFile>,
    /// Time at which they were accepted, in milliseconds since 1970.
    accepted_ms: u64,
    /// Files that were active for [`BASELINE_AGE`], or were confirmed, before these; none if these were confirmed.
    baseline: Option<Vec<StoredFile>>,
    /// Files that the guard keeps out.
    refused: Option<RefusedFiles>,
}

/// The formats of the copy: the first versions had the files alone.
#[derive(Deserialize)]
#[serde(untagged)]
enum StoredRecord {
    Record(Record),
    Files(Vec<StoredFile>),
}

/// A rule file in the copy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct StoredFile {
    name: String,
    text: String,
}

/// Rule files that the guard keeps out until they are confirmed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RefusedFiles {
    /// Their rules hash.
    pub(crate) revision: String,
    /// Why they need confirmation.
    pub(crate) reasons: Vec<String>,
}

impl RefusedFiles {
    /// Returns what happened and what to do.
    pub(crate) fn error(&self) -> String {
        format!(
            "not applied by --guard-files: {}; to apply them, run `tollgate rules confirm-files {}` or send SIGHUP, or \
             change the files",
            self.reasons.join("; "),
            self.revision
        )
    }
}

/// How files came to be accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Acceptance {
    /// The guard found no reason to ask: the baseline stays until it is old enough.
    Judged,
    /// By an operator, or without a guard: they are their own baseline.
    Confirmed,
}

impl LastGood {
    /// Reads the copy for the paths of a configuration, if there is one.
    pub(crate) fn open(config: &Config) -> Self {
        // A service's files are not copied: it writes nothing.
        match config.service_files {
            Some(_) => Self { path: None, record: None },
            None => Self::open_for(&config.rules),
        }
    }

    fn open_for(rules: &[PathBuf]) -> Self {
        if rules.is_empty() {
            return Self { path: None, record: None };
        }
        let mut hasher = tollgate_core::StableHasher::default();
        for path in rules {
            // A path to a file that is gone has no canonical form.
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            hasher.bytes(path.as_os_str().as_encoded_bytes());
            hasher.bytes(b"\0");
        }
        let path = state_directory().map(|folder| folder.join(format!("{:016x}.rules", hasher.finish())));
        let text = path.as_ref().and_then(|path| std::fs::read(path).ok());
        let record = text.and_then(|text| serde_json::from_slice(&text).ok()).map(|stored| match stored {
            StoredRecord::Record(record) => record,
            StoredRecord::Files(files) => Record { files, accepted_ms: 0, baseline: None, refused: None },
        });
        Self { path, record }
    }

    /// Keeps a copy of rules that become active.
    pub(crate) fn accept(&mut self, sources: &[Source], how: Acceptance, now: Timestamp) {
        let files: Vec<StoredFile> = sources
            .iter()
            .map(|source| StoredFile { name: source.name.clone(), text: source.text.clone() })
            .collect();
        let old = self.record.take();
        let mut record = Record { files, accepted_ms: millis(now), baseline: None, refused: None };
        match old {
            Some(old) if old.files == record.files => {
                record = Record { refused: None, ..old };
                if how == Acceptance::Confirmed {
                    record.baseline = None;
                }
            }
            Some(old) if how == Acceptance::Judged => record.baseline = Some(old.into_baseline(now)),
            _ => {}
        }
        self.record = Some(record);
        self.write();
    }

    /// Records files that the guard keeps out.
    pub(crate) fn refuse(&mut self, refused: &RefusedFiles) {
        if let Some(record) = &mut self.record {
            record.refused = Some(refused.clone());
            self.write();
        }
    }

    /// Returns the files that the guard keeps out.
    fn refused(&self) -> Option<&RefusedFiles> {
        self.record.as_ref()?.refused.as_ref()
    }

    /// Returns the accepted rules, if they are still valid.
    fn accepted(&self, options: &Options) -> Option<(Vec<Source>, Arc<Ruleset>)> {
        load(&self.record.as_ref()?.files, options)
    }

    /// Returns the rules that steps are judged against: those that were active for [`BASELINE_AGE`] or were confirmed.
    pub(crate) fn baseline(&self, options: &Options, now: Timestamp) -> Option<Arc<Ruleset>> {
        Some(load(&self.record.clone()?.into_baseline(now), options)?.1)
    }

    /// Returns whether a restart finds the copy.
    fn is_kept(&self) -> bool {
        self.path.as_ref().is_some_and(|path| path.is_file())
    }

    /// Writes the copy. A failure only costs the copy.
    fn write(&self) {
        let (Some(path), Some(record)) = (&self.path, &self.record) else { return };
        let written = serde_json::to_vec(record).map_err(Into::into).and_then(|text| replace(path, &text));
        if let Err(error) = written {
            tracing::info!(
                "no copy of the rules kept in {}: {error}; set STATE_DIRECTORY to a writable directory",
                path.display()
            );
        }
    }
}

impl Record {
    fn into_baseline(self, now: Timestamp) -> Vec<StoredFile> {
        let age = millis(now).saturating_sub(self.accepted_ms);
        if age >= BASELINE_AGE.as_micros() / 1_000 { self.files } else { self.baseline.unwrap_or(self.files) }
    }
}

fn load(files: &[StoredFile], options: &Options) -> Option<(Vec<Source>, Arc<Ruleset>)> {
    let sources: Vec<Source> =
        files.iter().map(|file| Source::new(file.name.clone(), file.text.clone())).collect();
    let rules = Ruleset::load(&sources, options).ok()?;
    Some((sources, Arc::new(rules)))
}

fn millis(now: Timestamp) -> u64 {
    now.as_micros() / 1_000
}

/// Writes a file that is either the old or the new one at any time.
pub(crate) fn replace(path: &Path, text: &[u8]) -> std::io::Result<()> {
    if std::fs::read(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let new = path.with_extension(format!("new.{}", std::process::id()));
    let write = || {
        let options = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).clone();
        let mut file = options.open(&new)?;
        file.write_all(text)?;
        file.sync_all()?;
        std::fs::rename(&new, path)
    };
    write().inspect_err(|_| drop(std::fs::remove_file(&new)))
}

/// The rules that a server starts with.
pub(crate) struct StartRules {
    pub(crate) sources: Vec<Source>,
    /// Why they are the last good copy and not the files.
    pub(crate) instead: Option<InsteadOfFiles>,
    pub(crate) last_good: LastGood,
}

/// Why the last good copy is active instead of the files.
#[derive(Clone, Debug)]
pub(crate) enum InsteadOfFiles {
    /// The files are broken: what is wrong.
    Broken(String),
    /// The guard keeps the files out.
    Refused(RefusedFiles),
    /// The files are broken, there is no copy, and the server started without rules.
    NoRules(String),
}

impl InsteadOfFiles {
    pub(crate) fn error(&self) -> String {
        match self {
            Self::Broken(error) | Self::NoRules(error) => error.clone(),
            Self::Refused(refused) => refused.error(),
        }
    }
}

/// Reads the rule files, or their last good copy if they are broken or the guard keeps them out; the sample without any.
pub(crate) fn start_rules(config: &Config) -> anyhow::Result<StartRules> {
    let (options, now) = (config.rule_options(), SystemClock::new().now());
    let mut last_good = LastGood::open(config);
    let read =
        rule_sources::load_or_sample(config).and_then(|sources| match Ruleset::load(&sources, &options) {
            Ok(rules) => Ok((sources, rules)),
            Err(errors) => Err(anyhow::anyhow!("{}", config.wording.start_errors(&errors))),
        });
    let instead = match read {
        Ok((sources, rules)) => match refused_at_start(config, &last_good, &rules, now) {
            None => {
                let how = if config.guard_files { Acceptance::Judged } else { Acceptance::Confirmed };
                last_good.accept(&sources, how, now);
                // Rules from xDS are not there yet.
                if config.xds.is_none() || !sources.is_empty() {
                    config.wording.log_loaded();
                }
                if config.guard_files && !config.rules.is_empty() && !last_good.is_kept() {
                    tracing::warn!(
                        "--guard-files cannot protect a restart: the accepted rules are kept nowhere; set STATE_DIRECTORY to \
                         a writable directory"
                    );
                }
                return Ok(StartRules { sources, instead: None, last_good });
            }
            Some(refused) => {
                last_good.refuse(&refused);
                InsteadOfFiles::Refused(refused)
            }
        },
        Err(error) if config.service_files.is_some() => {
            let error = format!("{error:#}");
            config.wording.log_failed(&error);
            let instead = Some(InsteadOfFiles::NoRules(error));
            return Ok(StartRules { sources: Vec::new(), instead, last_good });
        }
        Err(error) if last_good.accepted(&options).is_none() => return Err(error),
        Err(error) => InsteadOfFiles::Broken(format!("{error:#}")),
    };
    let (sources, _) = last_good.accepted(&options).ok_or_else(|| anyhow::anyhow!(instead.error()))?;
    match &instead {
        InsteadOfFiles::NoRules(_) => {}
        InsteadOfFiles::Broken(error) => tracing::error!(
            "RULE FILES ARE BROKEN: starting with the last good rules instead; repair the files, and they take effect at \
             once\n{error}"
        ),
        InsteadOfFiles::Refused(refused) => tracing::error!(
            "RULE FILES ARE NOT CONFIRMED: starting with the last accepted rules instead; the files were {}",
            refused.error()
        ),
    }
    Ok(StartRules { sources, instead: Some(instead), last_good })
}

/// Returns why the guard keeps files out at a start. There is no recent traffic to judge them by: what was kept out
/// before the start stays out, and other changes are judged by the rules alone.
fn refused_at_start(
    config: &Config,
    last_good: &LastGood,
    rules: &Ruleset,
    now: Timestamp,
) -> Option<RefusedFiles> {
    if !config.guard_files {
        return None;
    }
    let options = config.rule_options();
    let (_, accepted) = last_good.accepted(&options)?;
    if accepted.revision() == rules.revision() {
        return None;
    }
    let revision = rules.revision().to_owned();
    if let Some(refused) = last_good.refused() {
        if refused.revision == revision {
            return Some(refused.clone());
        }
        let reasons = vec![format!(
            "they were changed again while changes waited for confirmation ({}), and there is no recent traffic to judge them by",
            refused.reasons.join("; ")
        )];
        return Some(RefusedFiles { revision, reasons });
    }
    let baseline = last_good.baseline(&options, now).unwrap_or_else(|| Arc::clone(&accepted));
    let reasons = config.guardrails.confirm_reasons(&accepted, &baseline, rules, &ImpactReport::default());
    let reasons: Vec<String> = reasons.into_iter().map(|reason| reason.detail).collect();
    (!reasons.is_empty()).then_some(RefusedFiles { revision, reasons })
}

#[cfg(test)]
mod tests;
