//! Hot reload of rules, keys and settings, on a change on disk (a write, a rename, a ConfigMap's symlink swap) or on
//! SIGHUP.
//!
//! Directories are watched, not files: an editor that renames and a ConfigMap that swaps a link leave a watched file
//! behind. Polling sizes and times every half second catches what notifications miss (network file systems, lost
//! events). Other files in the directory, such as a log or a database, change as well, so rules are reloaded only if
//! the content of the rule files differs; otherwise each log message about a reload would cause the next one. A failed
//! reload changes only the status and the log; the previous state remains active.

use crate::config::Config;
use crate::config::file_guard::FileGuard;
use crate::config::last_good::LastGood;
use crate::config::rule_sources::{self, FileStamps, LoadedFiles};
use crate::server::status::{ReloadTarget, ServerStatus};
use crate::server::store::Store;
use notify::{RecursiveMode, Watcher};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tollgate_control::RuleManager;
use tollgate_engine::Limiter;
use tollgate_http::identity::JwtVerifier;
use tollgate_rules::Ruleset;

const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Time for writers to finish: changes within it count as one.
const SETTLE_TIME: Duration = Duration::from_millis(50);

/// Cause of a reload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReloadCause {
    /// A notification or a poll found a change in a watched directory, possibly in another file.
    FileChanged,
    /// SIGHUP.
    Signal,
}

/// Watches the rule files for changes from `said` on, their content before the rules were loaded.
pub(crate) async fn watch(
    config: Config,
    said: LoadedFiles,
    limiter: Arc<Limiter<Store>>,
    status: Arc<ServerStatus>,
    rule_manager: Option<Arc<RuleManager>>,
    guard: Option<FileGuard>,
) {
    let paths = config.rules.clone();
    let last = Mutex::new(said);
    let act = move |why| {
        let said = rule_sources::load(&config.rules);
        let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
        if why == ReloadCause::Signal || *last != said {
            last.clone_from(&said);
            // A signal is an operator's word: it applies what the guard has kept out.
            let guard = guard.as_ref().filter(|_| why != ReloadCause::Signal);
            reload(&config, said, &limiter, &status, rule_manager.as_deref(), guard);
        }
    };
    // Starts without stamps, so that a change since then is found by the first poll.
    watch_files(paths, FileStamps::default(), act).await;
}

/// Calls `act` whenever these files may have changed, one call at a time.
pub(crate) async fn watch_files(
    paths: Vec<PathBuf>,
    mut seen: FileStamps,
    act: impl Fn(ReloadCause) + Send + Sync + 'static,
) {
    let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
    let (tell, mut told) = mpsc::channel(1);
    let _watcher = notified(&paths, tell);
    let act = Arc::new(act);
    loop {
        let why = tokio::select! {
            _ = hangup.recv() => Some(ReloadCause::Signal),
            Some(()) = told.recv() => {
                tokio::time::sleep(SETTLE_TIME).await;
                while told.try_recv().is_ok() {}
                Some(ReloadCause::FileChanged)
            }
            () = tokio::time::sleep(POLL_INTERVAL) => None,
        };
        let now = rule_sources::file_stamps(&paths);
        if why.is_none() && now == seen {
            continue;
        }
        seen = now;
        let act = Arc::clone(&act);
        let _ = tokio::task::spawn_blocking(move || act(why.unwrap_or(ReloadCause::FileChanged))).await;
    }
}

/// Loads the rules from `said` and, if they are valid and new, makes them active.
fn reload(
    config: &Config,
    said: LoadedFiles,
    limiter: &Limiter<Store>,
    status: &ServerStatus,
    rule_manager: Option<&RuleManager>,
    guard: Option<&FileGuard>,
) {
    if config.rules.is_empty() {
        return;
    }
    if let Some(rev) = rule_manager.and_then(|rule_manager| rule_manager.active().rev()) {
        tracing::warn!(
            rev,
            "rule files changed but published rules are active; publish them, or use --rules-from files"
        );
        return;
    }
    let loaded = said.and_then(|sources| {
        let rules = Ruleset::load(&sources, &config.rule_options()).map_err(|errors| errors.to_string())?;
        Ok((sources, Arc::new(rules)))
    });
    match loaded {
        Err(error) => {
            tracing::error!("rule reload failed; keeping previous rules\n{error}");
            status.record_failure(ReloadTarget::Rules, error);
        }
        Ok((sources, rules)) if rules.revision() == limiter.rules().revision() => {
            LastGood::of(&config.rules).save(&sources);
            if status.record_success(ReloadTarget::Rules) {
                tracing::info!(
                    revision = rules.revision(),
                    "rule files repaired; the active rules are theirs"
                );
            }
        }
        Ok((sources, rules)) => {
            for warning in rules.warnings() {
                tracing::warn!("{warning}");
            }
            let active = limiter.rules();
            let reasons = guard.map(|guard| guard.reasons(&active, &rules)).unwrap_or_default();
            if !reasons.is_empty() {
                let reasons = reasons.join("; ");
                tracing::error!(
                    "changed rule files not applied: {reasons}; keeping previous rules (--guard-files): send SIGHUP to \
                     apply them, or change them"
                );
                let error =
                    format!("not applied by --guard-files: {reasons}; send SIGHUP to apply them anyway");
                status.record_failure(ReloadTarget::Rules, error);
                return;
            }
            log_changes(&active, &rules);
            LastGood::of(&config.rules).save(&sources);
            if status.record_success(ReloadTarget::Rules) {
                tracing::info!("rule files repaired");
            }
            tracing::info!(revision = rules.revision(), rules = rules.rules().len(), "rules reloaded");
            match rule_manager {
                // The manager updates the limiter, unless published rules became active meanwhile.
                Some(rule_manager) => drop(rule_manager.apply_files(&sources, rules)),
                None => {
                    limiter.replace_rules(rules);
                    status.reloaded();
                }
            }
        }
    }
}

/// Maximum number of changed rules in the log of one reload.
const MAX_CHANGES: usize = 50;

/// Logs what changed files change, rule by rule: whoever reads the log afterwards has only the new files.
fn log_changes(before: &Ruleset, after: &Ruleset) {
    let names = |rules: &Ruleset| -> BTreeSet<String> {
        rules.domains().map(|domain| domain.name().to_owned()).collect()
    };
    let (old, new) = (names(before), names(after));
    for domain in new.difference(&old) {
        tracing::info!(domain, "domain added");
    }
    for domain in old.difference(&new) {
        tracing::warn!(domain, "domain removed");
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

/// Reloads changed JWT keys for as long as the future is polled.
pub(crate) async fn watch_keys(
    tokens: impl Fn() -> Option<Arc<JwtVerifier>> + Send,
    status: Arc<ServerStatus>,
) {
    let mut last = tokens();
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let now = tokens();
        if now.as_ref().map(Arc::as_ptr) != last.as_ref().map(Arc::as_ptr) {
            // New settings name other keys, and are accepted only if those are valid.
            status.record_success(ReloadTarget::Keys);
            last.clone_from(&now);
        }
        match now.map_or(Ok(false), |tokens| tokens.reload_if_changed()) {
            Ok(false) => {}
            Ok(true) => {
                tracing::info!("JWT keys reloaded");
                status.record_success(ReloadTarget::Keys);
            }
            Err(error) => {
                tracing::error!("JWT key reload failed; keeping previous keys: {error}");
                status.record_failure(ReloadTarget::Keys, error.to_string());
            }
        }
    }
}

/// Watches the parent directories of the paths, and paths that are directories themselves.
fn notified(paths: &[PathBuf], tell: mpsc::Sender<()>) -> Option<impl Watcher> {
    let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Reading the files is an event too and must not cause a reload. A full channel means that one is due already.
        if !event.is_ok_and(|event| event.kind.is_access()) {
            let _ = tell.try_send(());
        }
    });
    let mut watcher =
        watcher.inspect_err(|error| tracing::warn!(%error, "rule changes are found by polling")).ok()?;
    let mut folders = BTreeSet::new();
    for path in paths {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        folders.insert(parent.unwrap_or(Path::new(".")).to_owned());
        if path.is_dir() {
            folders.insert(path.clone());
        }
    }
    for folder in folders {
        if let Err(error) = watcher.watch(&folder, RecursiveMode::NonRecursive) {
            tracing::warn!(%error, "changes in {} are found by polling", folder.display());
        }
    }
    Some(watcher)
}
