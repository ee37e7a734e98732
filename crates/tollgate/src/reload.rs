//! New rules while traffic flows: by a change on disk (a write, a rename, a ConfigMap's symlink swap) or by SIGHUP.
//!
//! Directories are watched, not files: an editor that renames and a ConfigMap that swaps a link leave a watched file
//! behind. A glance at sizes and times every half second catches what notifications miss (network file systems, lost
//! events). A set that does not load changes nothing but the status and the log; the last good rules stay.

use crate::config::Config;
use crate::sources::{self, Glimpse};
use crate::status::{Part, ServerStatus};
use crate::store::Store;
use notify::{RecursiveMode, Watcher};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tollgate_control::Desk;
use tollgate_edge::who::Tokens;
use tollgate_engine::Limiter;
use tollgate_rules::Ruleset;

const GLANCE: Duration = Duration::from_millis(500);
/// Writers need a moment: many changes in this time are one.
const SETTLE: Duration = Duration::from_millis(50);

/// Watches for changes from `seen` on: what the files looked like before they were loaded.
pub(crate) async fn watch(
    config: Config,
    mut seen: Glimpse,
    limiter: Arc<Limiter<Store>>,
    status: Arc<ServerStatus>,
    desk: Option<Arc<Desk>>,
) {
    let Ok(mut hangup) = signal(SignalKind::hangup()) else { return };
    let (tell, mut told) = mpsc::channel(1);
    let _watcher = notified(&config.rules, tell);
    loop {
        let asked = tokio::select! {
            _ = hangup.recv() => true,
            Some(()) = told.recv() => {
                tokio::time::sleep(SETTLE).await;
                while told.try_recv().is_ok() {}
                true
            }
            () = tokio::time::sleep(GLANCE) => false,
        };
        let now = sources::glimpse(&config.rules);
        if !asked && now == seen {
            continue;
        }
        seen = now;
        let (config, limiter, status, desk) =
            (config.clone(), Arc::clone(&limiter), Arc::clone(&status), desk.clone());
        let reloading = move || reload(&config, &limiter, &status, desk.as_deref());
        let _ = tokio::task::spawn_blocking(reloading).await;
    }
}

/// Loads the files and, if they are good and say something new, puts their rules in force.
fn reload(config: &Config, limiter: &Limiter<Store>, status: &ServerStatus, desk: Option<&Desk>) {
    if config.rules.is_empty() {
        return;
    }
    if let Some(rev) = desk.and_then(|desk| desk.acting().rev()) {
        tracing::warn!(
            rev,
            "rule files have changed, but published rules act: publish them, or --rules-from files"
        );
        return;
    }
    let loaded = sources::read(&config.rules).map_err(|error| format!("{error:#}")).and_then(|sources| {
        let rules = Ruleset::load(&sources, &config.rule_options()).map_err(|errors| errors.to_string())?;
        Ok((sources, Arc::new(rules)))
    });
    match loaded {
        Err(error) => {
            tracing::error!("the changed rules cannot be used; the last good ones stay\n{error}");
            status.refused(Part::Rules, error);
        }
        Ok((_, rules)) if rules.revision() == limiter.rules().revision() => status.accepted(Part::Rules),
        Ok((sources, rules)) => {
            for warning in rules.warnings() {
                tracing::warn!("{warning}");
            }
            tracing::info!(revision = rules.revision(), rules = rules.rules().len(), "new rules act");
            match desk {
                // It tells the limiter, unless published rules have come in between.
                Some(desk) => drop(desk.take_files(&sources, rules)),
                None => {
                    limiter.replace_rules(rules);
                    status.reloaded();
                }
            }
        }
    }
}

/// Looks after the keys that tokens are verified by, for as long as it is polled.
pub(crate) async fn watch_keys(tokens: impl Fn() -> Option<Arc<Tokens>> + Send, status: Arc<ServerStatus>) {
    loop {
        tokio::time::sleep(GLANCE).await;
        match tokens().map_or(Ok(false), |tokens| tokens.look_again()) {
            Ok(false) => {}
            Ok(true) => {
                tracing::info!("new keys verify tokens");
                status.accepted(Part::Keys);
            }
            Err(error) => {
                tracing::error!("the changed keys cannot be used; the last good ones stay: {error}");
                status.refused(Part::Keys, error.to_string());
            }
        }
    }
}

/// Watches the directories that the paths are in, and those that they are.
fn notified(paths: &[PathBuf], tell: mpsc::Sender<()>) -> Option<impl Watcher> {
    let watcher = notify::recommended_watcher(move |event: notify::Result<notify::Event>| {
        // Reading the files is an event too, and not one to read them for. Full means that a look is due already.
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
