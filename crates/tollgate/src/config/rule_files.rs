//! The rule files of a running server: reloads them when they change, keeps out what the guard asks about, and applies
//! that once it is confirmed. Rules from xDS are loaded together with them, as files of their own.
//!
//! A failed reload changes only the status and the log; the previous rules remain active. Files that the guard keeps out
//! wait for an operator, who names them by their rules hash: what is confirmed is what was seen. SIGHUP confirms too, but
//! only files that the guard has already reported; a signal that arrives with a change confirms nothing.
//!
//! Published rules are active in place of the files. How the files differ from them is found when it is read, and once for
//! each change of either.

use crate::config::Config;
use crate::config::file_guard::FileGuard;
use crate::config::last_good::{Acceptance, InsteadOfFiles, LastGood, RefusedFiles};
use crate::config::reload::ReloadCause;
use crate::config::rule_sources::{self, FileStamps, LoadedFiles};
use crate::config::service_files::ServiceFiles;
use crate::config::stores::StoreReload;
use crate::server::status::{ReloadTarget, ServerStatus};
use crate::server::store::Store;
use crate::xds::{RefusedRules, RuleSink};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;
use tollgate_admin::{ConfirmFilesError, PendingFiles, RuleDrift, RuleFilesControl};
use tollgate_control::{ActiveRules, RuleDiff, RuleManager};
use tollgate_core::{Clock, SystemClock};
use tollgate_engine::Limiter;
use tollgate_rules::{Diagnostics, Ruleset, Source};

pub(crate) struct RuleFiles {
    config: Config,
    limiter: Arc<Limiter<Store>>,
    status: Arc<ServerStatus>,
    rule_manager: Option<Arc<RuleManager>>,
    guard: Option<FileGuard>,
    /// Adds the stores that rules may name.
    stores: Option<StoreReload>,
    /// Serializes reloads.
    state: Mutex<FileState>,
    /// Content of the files when they were last read. Not locked while rules are compiled.
    seen: Mutex<Arc<LoadedFiles>>,
    /// The last comparison of the files with published rules.
    compared: Mutex<Option<Comparison>>,
    /// Notified after the files in effect have changed.
    file_changes: watch::Sender<()>,
}

/// Comparison of rule files with published rules.
struct Comparison {
    published: Arc<ActiveRules>,
    seen: Arc<LoadedFiles>,
    drift: Option<RuleDrift>,
}

struct FileState {
    /// Their sizes and times then: files that cannot be read have no content to compare.
    stamps: FileStamps,
    /// The files in effect.
    files: Vec<Source>,
    /// Rules from xDS in effect.
    xds: Vec<Source>,
    last_good: LastGood,
    /// Files that wait for confirmation.
    refused: Option<RefusedFiles>,
    /// What the directories of rules contain besides them, as far as the log has it.
    ignored: BTreeSet<PathBuf>,
}

impl FileState {
    /// Logs what is not read, once: a rule file with another ending would have no effect.
    fn log_ignored(&mut self, config: &Config) {
        let ignored: BTreeSet<PathBuf> = rule_sources::ignored_in(config).into_iter().collect();
        for path in ignored.difference(&self.ignored) {
            tracing::info!("{}", rule_sources::ignored_text(path));
        }
        self.ignored = ignored;
    }
}

impl RuleFiles {
    /// `seen` is the content of the files before the rules were loaded, so that no change in between is missed.
    pub(crate) fn new(
        config: &Config,
        limiter: &Arc<Limiter<Store>>,
        status: &Arc<ServerStatus>,
        rule_manager: Option<Arc<RuleManager>>,
        (guard, stores): (Option<FileGuard>, Option<StoreReload>),
        seen: LoadedFiles,
        start: Option<(LastGood, Option<InsteadOfFiles>)>,
    ) -> Arc<Self> {
        let (last_good, instead) = start.unwrap_or_else(|| (LastGood::open(config), None));
        let refused = match instead {
            Some(InsteadOfFiles::Refused(refused)) => Some(refused),
            Some(InsteadOfFiles::Broken(_) | InsteadOfFiles::NoRules(_)) | None => None,
        };
        let files = limiter.rules().sources().to_vec();
        let stamps = rule_sources::file_stamps(&config.rules, config.service_files.as_ref());
        let mut state =
            FileState { stamps, files, xds: Vec::new(), last_good, refused, ignored: BTreeSet::new() };
        state.log_ignored(config);
        Arc::new(Self {
            config: config.clone(),
            limiter: Arc::clone(limiter),
            status: Arc::clone(status),
            rule_manager,
            guard,
            stores,
            state: Mutex::new(state),
            seen: Mutex::new(Arc::new(seen)),
            compared: Mutex::new(None),
            file_changes: watch::Sender::new(()),
        })
    }

    /// Returns the files whose changes call for a reload: the rules', and the one that names the stores.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        let stores = self.stores.as_ref().map(|stores| stores.path().to_owned());
        self.config.rules.iter().cloned().chain(stores).collect()
    }

    pub(crate) fn service_files(&self) -> Option<ServiceFiles> {
        self.config.service_files.clone()
    }

    fn state(&self) -> MutexGuard<'_, FileState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seen(&self) -> Arc<LoadedFiles> {
        Arc::clone(&self.seen.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn set_seen(&self, files: &LoadedFiles) {
        *self.seen.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(files.clone());
    }

    /// Reloads the files if their content differs from what was last read, or a signal asks for it.
    pub(crate) fn reload_if_changed(&self, why: ReloadCause) {
        let mut state = self.state();
        // First, because changed rules may name a store that was added with them.
        let has_new_store = self.reload_stores();
        // Before the files are read: what changes meanwhile is found the next time.
        let stamps = rule_sources::file_stamps(&self.config.rules, self.config.service_files.as_ref());
        let seen = rule_sources::load_again(&self.config, &state.files);
        state.log_ignored(&self.config);
        let is_touched = std::mem::replace(&mut state.stamps, stamps.clone()) != stamps;
        if why == ReloadCause::Signal
            || has_new_store
            || *self.seen() != seen
            || (seen.is_err() && is_touched)
        {
            self.set_seen(&seen);
            let confirmed = match why {
                ReloadCause::Signal => state.refused.as_ref().map(|refused| refused.revision.clone()),
                ReloadCause::FileChanged => None,
            };
            self.reload(&mut state, seen, why, confirmed.as_deref());
        }
    }

    /// Adds the stores that are new in the configuration; returns whether there are any.
    fn reload_stores(&self) -> bool {
        let Some(stores) = &self.stores else { return false };
        let path = stores.path().display();
        let found = match stores.reload_if_changed() {
            None => return false,
            Some(Ok(found)) => found,
            Some(Err(error)) => {
                let error = format!("{path}: stores: {error:#}");
                tracing::error!("configuration reload failed; keeping the stores: {error}");
                self.status.record_failure(ReloadTarget::Stores, error);
                return false;
            }
        };
        for store in &found.added {
            tracing::info!(store, "store added");
        }
        for store in &found.removed {
            tracing::warn!(store, "store removed from {path}; it is used until a restart");
        }
        match found.changed.is_empty() {
            true => drop(self.status.record_success(ReloadTarget::Stores)),
            false => {
                let error = format!(
                    "{path}: the settings of {} changed, and their counters do not move; restart to use them, or give the new \
                     server another name",
                    found
                        .changed
                        .iter()
                        .map(|name| format!("`stores.{name}`"))
                        .collect::<Vec<_>>()
                        .join(", ")
                );
                tracing::error!("configuration reload failed; keeping these stores: {error}");
                self.status.record_failure(ReloadTarget::Stores, error);
            }
        }
        !found.added.is_empty()
    }

    /// Makes the rules of `files` active, if they are valid, new, and either harmless or `confirmed`, by their rules hash.
    fn reload(&self, state: &mut FileState, files: LoadedFiles, why: ReloadCause, confirmed: Option<&str>) {
        if self.config.rules.is_empty() {
            return;
        }
        if let Some(rev) = self.published_rev() {
            tracing::warn!(
                rev,
                "rule files changed but published rules are active; publish them, or use --rules-from files (`tollgate rules \
                 diff` shows the differences)"
            );
            return;
        }
        let loaded = files.and_then(|sources| {
            let rules =
                self.load(&sources, &state.xds).map_err(|errors| self.config.wording.errors(&errors))?;
            Ok((sources, rules))
        });
        let (sources, rules) = match loaded {
            Ok(loaded) => loaded,
            Err(error) => {
                state.refused = None;
                self.status.record_failure(ReloadTarget::Rules, error.clone());
                self.config.wording.log_failed(&error);
                return;
            }
        };
        let (active, now) = (self.limiter.rules(), SystemClock::new().now());
        let revision = rules.revision();
        if revision == active.revision() {
            self.config.wording.log_loaded();
            let was_refused = state.refused.take().is_some();
            state.last_good.accept(&sources, Acceptance::Judged, now);
            self.set_files(state, sources);
            match self.status.record_success(ReloadTarget::Rules) {
                true if was_refused => {
                    tracing::info!(revision, "rule files changed back; the active rules are theirs");
                }
                true => tracing::info!(revision, "rule files repaired; the active rules are theirs"),
                false if why == ReloadCause::Signal => tracing::info!(revision, "rule files unchanged"),
                false => {}
            }
            return;
        }
        for warning in rules.warnings() {
            tracing::warn!("{warning}");
        }
        let confirmed = confirmed == Some(revision);
        let reasons = match &self.guard {
            Some(guard) if !confirmed => {
                let baseline = state.last_good.baseline(&self.config.rule_options(), now);
                guard.reasons(&active, &baseline.unwrap_or_else(|| Arc::clone(&active)), &rules)
            }
            _ => Vec::new(),
        };
        if !reasons.is_empty() {
            let refused = RefusedFiles { revision: revision.to_owned(), reasons };
            let error = refused.error();
            state.last_good.refuse(&refused);
            state.refused = Some(refused);
            self.status.record_failure(ReloadTarget::Rules, error.clone());
            tracing::error!("changed rule files {error}; keeping previous rules");
            return;
        }
        log_changes(&active, &rules);
        let how = match self.guard {
            Some(_) if !confirmed => Acceptance::Judged,
            _ => Acceptance::Confirmed,
        };
        state.last_good.accept(&sources, how, now);
        self.set_files(state, sources);
        let was_refused = state.refused.take().is_some();
        match self.status.record_success(ReloadTarget::Rules) {
            _ if confirmed => tracing::warn!(revision, "rule files confirmed"),
            true if !was_refused => tracing::info!("rule files repaired"),
            _ => {}
        }
        tracing::info!(revision, rules = rules.rule_count(), "rules reloaded");
        self.config.wording.log_loaded();
        self.activate(rules);
    }

    /// Compiles rule files and rules from xDS together.
    fn load(&self, files: &[Source], xds: &[Source]) -> Result<Arc<Ruleset>, Diagnostics> {
        let all = [files, xds].concat();
        Ruleset::load(&all, &self.config.rule_options()).map(Arc::new)
    }

    fn set_files(&self, state: &mut FileState, sources: Vec<Source>) {
        state.files = sources;
        self.file_changes.send_replace(());
    }

    fn activate(&self, rules: Arc<Ruleset>) {
        match &self.rule_manager {
            // The manager updates the limiter, unless published rules became active meanwhile.
            Some(rule_manager) => drop(rule_manager.apply_files(rules)),
            None => {
                self.limiter.replace_rules(rules);
                self.status.reloaded();
            }
        }
    }

    fn compare(&self, rev: i64, published: &Ruleset, files: &LoadedFiles) -> Option<RuleDrift> {
        let broken = |error| RuleDrift { rev, files_revision: None, error: Some(error), diff: Vec::new() };
        let sources = match files {
            Ok(sources) => sources,
            Err(error) => return Some(broken(error.clone())),
        };
        match self.load(sources, &[]) {
            Ok(files) if files.revision() == published.revision() => None,
            Ok(files) => Some(RuleDrift {
                rev,
                files_revision: Some(files.revision().to_owned()),
                error: None,
                diff: published.diff(&files).into_iter().map(RuleDiff::from).collect(),
            }),
            Err(errors) => Some(broken(self.config.wording.errors(&errors))),
        }
    }

    fn published_rev(&self) -> Option<i64> {
        self.rule_manager.as_ref()?.active().rev()
    }
}

/// The guard is about files: a management server is a program, and cannot confirm.
impl RuleSink for RuleFiles {
    fn apply(&self, sources: &[Source]) -> Result<(), RefusedRules> {
        let mut state = self.state();
        let rules = match self.load(&state.files, sources) {
            Ok(rules) => rules,
            Err(errors) => {
                let refused = RefusedRules::new(&errors, self.config.wording);
                self.refuse(&refused);
                return Err(refused);
            }
        };
        state.xds = sources.to_vec();
        self.status.record_success(ReloadTarget::Xds);
        let active = self.limiter.rules();
        if rules.revision() != active.revision() {
            for warning in rules.warnings() {
                tracing::warn!("{warning}");
            }
            log_changes(&active, &rules);
            self.activate(rules);
        }
        // Files that were refused may have been so because of what xDS said then. Those that wait for confirmation still do.
        let seen = self.seen();
        let is_pending = seen.as_ref().as_ref().is_ok_and(|seen| *seen != state.files);
        if is_pending && state.refused.is_none() {
            self.reload(&mut state, LoadedFiles::clone(&seen), ReloadCause::FileChanged, None);
        }
        Ok(())
    }

    fn refuse(&self, refused: &RefusedRules) {
        self.status.record_failure(ReloadTarget::Xds, refused.summary.clone());
    }

    fn file_changes(&self) -> watch::Receiver<()> {
        self.file_changes.subscribe()
    }
}

impl RuleFilesControl for RuleFiles {
    fn source(&self) -> &'static str {
        if self.config.xds.is_some() { "xds" } else { "files" }
    }

    fn pending(&self) -> Option<PendingFiles> {
        let refused = self.state().refused.clone().filter(|_| self.published_rev().is_none())?;
        Some(PendingFiles { revision: refused.revision, reasons: refused.reasons })
    }

    fn drift(&self) -> Option<RuleDrift> {
        let published = self.rule_manager.as_ref()?.active();
        let rev = published.rev().filter(|_| !self.config.rules.is_empty())?;
        let seen = self.seen();
        let mut compared = self.compared.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same =
            |one: &&Comparison| Arc::ptr_eq(&one.published, &published) && Arc::ptr_eq(&one.seen, &seen);
        if let Some(compared) = compared.as_ref().filter(is_same) {
            return compared.drift.clone();
        }
        let drift = self.compare(rev, &published.rules, &seen);
        *compared = Some(Comparison { published, seen, drift: drift.clone() });
        drift
    }

    fn confirm(&self, revision: &str) -> Result<(), ConfirmFilesError> {
        let mut state = self.state();
        let files = rule_sources::load_again(&self.config, &state.files);
        let Some(refused) = state.refused.clone().filter(|_| self.published_rev().is_none()) else {
            return Err(ConfirmFilesError::NothingPending);
        };
        if refused.revision != revision {
            return Err(ConfirmFilesError::Other(refused.revision));
        }
        self.set_seen(&files);
        self.reload(&mut state, files, ReloadCause::Signal, Some(revision));
        // The files may have changed since they were reported.
        if self.limiter.rules().revision() == revision {
            return Ok(());
        }
        Err(match &state.refused {
            Some(refused) => ConfirmFilesError::Other(refused.revision.clone()),
            None => ConfirmFilesError::NothingPending,
        })
    }
}

/// Maximum number of changed rules in the log of one reload, and of domains that were added or removed.
const MAX_CHANGES: usize = 50;

/// Logs what changed files change, rule by rule: a later reader of the log has only the new files.
fn log_changes(before: &Ruleset, after: &Ruleset) {
    let names = |rules: &Ruleset| -> BTreeSet<String> {
        rules.domains().map(|domain| domain.name().to_owned()).collect()
    };
    let (old, new) = (names(before), names(after));
    for domain in new.difference(&old).take(MAX_CHANGES) {
        tracing::info!(domain, "domain added");
    }
    for domain in old.difference(&new).take(MAX_CHANGES) {
        tracing::warn!(domain, "domain removed");
    }
    for (count, what) in [(new.difference(&old).count(), "added"), (old.difference(&new).count(), "removed")]
    {
        if count > MAX_CHANGES {
            tracing::info!("{} more domains {what}", count - MAX_CHANGES);
        }
    }
    let changes = before.diff(after);
    for change in changes.iter().take(MAX_CHANGES) {
        let rule = &change.rule;
        match (&change.before, &change.after) {
            (None, Some(after)) => tracing::info!(rule, after, "rule added"),
            (Some(before), None) => tracing::info!(rule, before, "rule removed"),
            (Some(before), Some(after)) => tracing::info!(rule, before, after, "rule changed"),
            (None, None) => {}
        }
    }
    if changes.len() > MAX_CHANGES {
        tracing::info!("{} more rules changed", changes.len() - MAX_CHANGES);
    }
    for loosening in before.loosened(after) {
        tracing::warn!("the new rules protect less: {}", loosening.detail);
    }
}
