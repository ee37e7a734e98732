//! `tollgate serve`: runs until a shutdown signal, then drains.

use crate::cli::ServeFlags;
use crate::config::Config;
use crate::config::last_good::InsteadOfFiles;
use crate::config::reload;
use crate::server::admin::AdminServer;
use crate::server::build::{Assembly, build};
use crate::server::leases;
use crate::server::logging::{self, LogControl};
use crate::server::nodes::Heartbeats;
use crate::server::open_files;
use crate::server::protocols::{DefaultListeners, ProtocolServers};
use crate::server::status::ServerStatus;
use crate::server::store::Store;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tollgate_engine::Limiter;

/// Builds the runtime. A single core gets the single-threaded one: a work-stealing scheduler would only add cost per
/// request.
pub(crate) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut builder = match cores {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    builder.enable_all().build()
}

pub(crate) fn run(flags: &ServeFlags) -> anyhow::Result<ExitCode> {
    let logs = logging::start(flags)?;
    let config = Config::new(flags)?;
    if config.gateway.is_some() {
        anyhow::bail!("the file of --config has a `gateway` section; run `tollgate gateway`");
    }
    open_files::raise();
    let runtime = runtime()?;
    runtime.block_on(serve(config, logs))?;
    // Tasks still running after the drain are not awaited.
    runtime.shutdown_timeout(Duration::from_millis(100));
    Ok(ExitCode::SUCCESS)
}

async fn serve(config: Config, logs: Arc<LogControl>) -> anyhow::Result<()> {
    let Assembly { limiter, rule_files, status, protocols: fronts, admin: operators, export: sending } =
        build(&config, DefaultListeners::Open).await?;
    anyhow::ensure!(!fronts.is_empty(), "enable at least one of --grpc, --http, --resp");
    let told_to_stop = shutdown_signal()?;
    logs.print_banner(config.stdout(), &banner(&config, &fronts, &operators, &status));
    let tokens = fronts.jwt();
    let (stop, stopping) = watch::channel(false);
    let drain = || {
        let mut stopping = stopping.clone();
        async move {
            let _ = stopping.wait_for(|stop| *stop).await;
        }
    };
    let heartbeats = Heartbeats::new(&limiter, &config, operators.control.clone());
    let operators = operators.start(Arc::clone(&limiter), &status, logs, Arc::clone(&rule_files), drain())?;
    let fronts = fronts.start(&config, &limiter, Arc::clone(&status) as _, drain);
    let reloading = tokio::spawn(reload::watch(rule_files));
    let keys = tokio::spawn(reload::watch_keys(move || tokens.clone(), Arc::clone(&status)));
    let paying = tokio::spawn(run_reconciliation(Arc::clone(&limiter)));
    let tending = tokio::spawn(leases::run_lease_tasks(Arc::clone(&limiter)));
    let beating = heartbeats.start();

    told_to_stop.await;
    tracing::info!("draining; requests in flight are finished");
    status.drain();
    let _ = stop.send(true);
    match fronts.shutdown().await {
        Ok(()) => tracing::info!("drained"),
        Err(error) => tracing::warn!("{error:#}"),
    }
    operators.shutdown().await;
    reloading.abort();
    keys.abort();
    paying.abort();
    reconcile_before_exit(&limiter).await;
    tending.abort();
    beating.end().await;
    leases::return_leases(&limiter).await;
    status.shutdown().await;
    if let Some(sending) = sending {
        sending.shutdown().await;
    }
    Ok(())
}

/// Charges the shared counters for requests allowed in fallback while the store was unavailable. The pause grows while
/// it remains unavailable: each attempt counts as a store error, and a check reconciles the pending charges of its
/// counters first anyway.
pub(crate) async fn run_reconciliation(limiter: Arc<Limiter<Store>>) {
    const SOON: Duration = Duration::from_millis(100);
    const LATE: Duration = Duration::from_secs(5);
    let mut pause = SOON;
    loop {
        tokio::time::sleep(pause).await;
        pause = if limiter.reconcile().await { LATE.min(pause * 2) } else { SOON };
    }
}

/// Charges the shared counters before the process ends: what it has admitted without them is known to nobody else. If the
/// store does not answer in time, says how much is lost.
pub(crate) async fn reconcile_before_exit(limiter: &Limiter<Store>) {
    /// Longer than a node takes to find a store that answers again, and less than a drain may take.
    const PATIENCE: Duration = Duration::from_secs(5);
    const PAUSE: Duration = Duration::from_millis(50);
    let reconciled = async {
        while limiter.reconcile().await || limiter.unreconciled().0 > 0 {
            tokio::time::sleep(PAUSE).await;
        }
    };
    if tokio::time::timeout(PATIENCE, reconciled).await.is_err() {
        let (counters, units) = limiter.unreconciled();
        tracing::warn!(
            counters,
            units,
            "the store does not answer; what was admitted without it is not counted in the shared limits"
        );
    }
}

/// Returns a future that completes on SIGTERM or SIGINT. From this call on, these signals no longer terminate the
/// process directly; call it before the start banner is printed, because a signal may follow at once.
pub(crate) fn shutdown_signal() -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    // Keeps SIGHUP from terminating the process; the reload task subscribes to it later.
    drop(signal(SignalKind::hangup())?);
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}

/// The start banner.
fn banner(
    config: &Config,
    fronts: &ProtocolServers,
    operators: &AdminServer,
    status: &ServerStatus,
) -> Vec<String> {
    let mut lines = vec![format!("tollgate {} is listening", env!("CARGO_PKG_VERSION"))];
    lines.extend(fronts.banner());
    lines.extend(operators.banner());
    lines.push(config.store_banner());
    lines.extend(rules_banner(config, operators, status));
    let is_sample = config.rules.is_empty() && published_rev(operators).is_none();
    if let (true, Some(http)) = (is_sample, fronts.http()) {
        let check = |attributes: &str| {
            format!("curl -s {http}/v1/check -d '{{\"domain\":\"sample\",\"attributes\":{{{attributes}}}}}'")
        };
        let log_in = check(r#""api_key":"abc","endpoint":"POST /login""#);
        lines.extend([
            "\nTry:".to_owned(),
            format!("  {}", check(r#""api_key":"abc""#)),
            format!("  for i in 1 2 3 4 5 6; do {log_in}; echo; done"),
            format!("  curl -s '{http}/readyz?verbose'"),
        ]);
    }
    lines
}

fn published_rev(operators: &AdminServer) -> Option<i64> {
    operators.rule_manager.as_ref()?.active().rev()
}

/// The lines of the start banner that name the active rules and, where these are not the files, why.
pub(crate) fn rules_banner(config: &Config, operators: &AdminServer, status: &ServerStatus) -> Vec<String> {
    let paths = config.rules.iter().map(|path| path.display().to_string()).collect::<Vec<_>>();
    let files = paths.join(", ");
    if let Some(rev) = published_rev(operators) {
        let ignored = match paths.is_empty() {
            true => String::new(),
            false => format!("; {files} ignored (--rules-from files)"),
        };
        return vec![format!("  rules revision {rev}, published in the database{ignored}")];
    }
    match status.instead_of_files() {
        Some(InsteadOfFiles::Broken(_)) => {
            vec![format!("  rules last good copy of {files}, because the files are broken (see the log)")]
        }
        Some(InsteadOfFiles::Refused(refused)) => vec![format!(
            "  rules last accepted copy of {files}, because the files are not confirmed (tollgate rules confirm-files {})",
            refused.revision
        )],
        None if paths.is_empty() => {
            vec!["  rules: built-in sample; use --rules PATH for your own".to_owned()]
        }
        None => paths.iter().map(|path| format!("  rules {path}")).collect(),
    }
}
