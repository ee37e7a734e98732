//! Hot reload of rules, keys and settings, on a change on disk (a write, a rename, a ConfigMap's symlink swap) or on
//! SIGHUP.
//!
//! Directories are watched, not files: an editor that renames and a ConfigMap that swaps a link leave a watched file
//! behind. Polling sizes and times every half second catches what notifications miss (network file systems, lost
//! events). Other files in the directory, such as a log or a database, change as well, so rules are reloaded only if
//! the content of the rule files differs; otherwise each log message about a reload would cause the next one
//! (`rule_files.rs`).

use crate::config::rule_files::RuleFiles;
use crate::config::rule_sources::{self, FileStamps};
use crate::config::service_files::ServiceFiles;
use crate::server::status::{ReloadTarget, ServerStatus};
use notify::{RecursiveMode, Watcher};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tollgate_http::identity::CredentialVerifier;

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

/// Reloads changed rule files for as long as the future is polled.
pub(crate) async fn watch(rule_files: Arc<RuleFiles>) {
    let (paths, service) = (rule_files.paths(), rule_files.service_files());
    // Starts without stamps, so that a change since then is found by the first poll.
    watch_files(paths, service, FileStamps::default(), move |why| rule_files.reload_if_changed(why)).await;
}

/// Calls `act` whenever these files may have changed, one call at a time.
pub(crate) async fn watch_files(
    paths: Vec<PathBuf>,
    service: Option<ServiceFiles>,
    mut seen: FileStamps,
    act: impl Fn(ReloadCause) + Send + Sync + 'static,
) {
    let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
    let (on_change, mut changes) = mpsc::channel(1);
    let _watcher = notified(&paths, on_change);
    let act = Arc::new(act);
    loop {
        let why = tokio::select! {
            _ = hangup.recv() => Some(ReloadCause::Signal),
            Some(()) = changes.recv() => {
                tokio::time::sleep(SETTLE_TIME).await;
                while changes.try_recv().is_ok() {}
                Some(ReloadCause::FileChanged)
            }
            () = tokio::time::sleep(POLL_INTERVAL) => None,
        };
        let now = rule_sources::file_stamps(&paths, service.as_ref());
        if why.is_none() && now == seen {
            continue;
        }
        seen = now;
        let act = Arc::clone(&act);
        let _ = tokio::task::spawn_blocking(move || act(why.unwrap_or(ReloadCause::FileChanged))).await;
    }
}

/// Reloads changed files of JWT and API keys for as long as the future is polled.
pub(crate) async fn watch_keys(
    verifier: impl Fn() -> Option<Arc<CredentialVerifier>> + Send,
    status: Arc<ServerStatus>,
) {
    let mut last = verifier();
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        let now = verifier();
        if now.as_ref().map(Arc::as_ptr) != last.as_ref().map(Arc::as_ptr) {
            // New settings name other keys, and are accepted only if those are valid.
            status.record_success(ReloadTarget::Keys);
            last.clone_from(&now);
        }
        let Some(now) = now else { continue };
        // A list of a million keys takes a moment to read.
        let reloaded = tokio::task::spawn_blocking(move || now.reload_if_changed()).await;
        match reloaded.unwrap_or(Ok(false)) {
            Ok(false) => {}
            Ok(true) => {
                tracing::info!("keys reloaded");
                status.record_success(ReloadTarget::Keys);
            }
            Err(error) => {
                tracing::error!("key reload failed; keeping previous keys: {error}");
                status.record_failure(ReloadTarget::Keys, error);
            }
        }
    }
}

/// Watches the parent directories of the paths, and paths that are directories themselves.
fn notified(paths: &[PathBuf], on_change: mpsc::Sender<()>) -> Option<impl Watcher> {
    let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Reading the files is an event too and must not cause a reload. A full channel means that one is due already.
        if !event.is_ok_and(|event| event.kind.is_access()) {
            let _ = on_change.try_send(());
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
