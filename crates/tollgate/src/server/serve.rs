//! `tollgate serve`: runs until a shutdown signal, then drains.

use crate::cli::ServeFlags;
use crate::config::Config;
use crate::config::last_good::InsteadOfFiles;
use crate::server::admin::AdminServer;
use crate::server::build::{StoppedEarly, build};
use crate::server::logging::{self, LogControl};
use crate::server::open_files;
use crate::server::protocols::{DefaultListeners, ProtocolServers};
use crate::server::running::Running;
use crate::server::status::ServerStatus;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tollgate_store::RedisConfig;

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
    run_server(config, logs)
}

/// Runs a server with these settings until a shutdown signal.
pub(crate) fn run_server(config: Config, logs: Arc<LogControl>) -> anyhow::Result<ExitCode> {
    open_files::raise();
    let runtime = runtime()?;
    StoppedEarly::is_success(runtime.block_on(serve(config, logs)))?;
    // Tasks still running after the drain are not awaited.
    runtime.shutdown_timeout(Duration::from_millis(100));
    Ok(ExitCode::SUCCESS)
}

async fn serve(mut config: Config, logs: Arc<LogControl>) -> anyhow::Result<()> {
    let built = build(&mut config, DefaultListeners::Open).await?;
    anyhow::ensure!(!built.protocols.is_empty(), "enable at least one of --grpc, --http, --resp");
    let shutdown = shutdown_signal()?;
    match &config.service {
        None => {
            let lines = banner(&config, &built.protocols, &built.admin, &built.status);
            logs.print_banner(config.stdout(), &lines);
        }
        Some(_) => built.protocols.log_listening(),
    }
    let status = Arc::clone(&built.status);
    let mut running = Running::start(&config, built, logs)?;
    running.spawn(probe_for_health(status, config.redis_stores()));
    shutdown.await;
    running.begin_drain();
    running.shutdown().await;
    Ok(())
}

/// Finds out whether the stores answer, where health depends on it.
async fn probe_for_health(status: Arc<ServerStatus>, stores: Vec<RedisConfig>) {
    if let Some(health) = status.service() {
        health.probe(&stores).await;
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
    protocols: &ProtocolServers,
    operators: &AdminServer,
    status: &ServerStatus,
) -> Vec<String> {
    let mut lines = vec![format!("tollgate {} is listening", env!("CARGO_PKG_VERSION"))];
    lines.extend(protocols.banner());
    lines.extend(operators.banner());
    lines.push(config.store_banner());
    lines.extend(config.cell_banner());
    lines.extend(rules_banner(config, operators, status));
    let is_sample = config.rules.is_empty() && config.xds.is_none() && published_rev(operators).is_none();
    if let (true, Some(http)) = (is_sample, protocols.http()) {
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
        Some(InsteadOfFiles::NoRules(_)) => {
            vec![format!("  rules none, because {files} is broken (see the log)")]
        }
        Some(InsteadOfFiles::Broken(_)) => {
            vec![format!("  rules last good copy of {files}, because the files are broken (see the log)")]
        }
        Some(InsteadOfFiles::Refused(refused)) => vec![format!(
            "  rules last accepted copy of {files}, because the files are not confirmed (tollgate rules confirm-files {})",
            refused.revision
        )],
        None if config.xds.is_some() => {
            let files = paths.iter().map(|path| format!("  rules {path}"));
            let server =
                config.xds.iter().map(|xds| format!("  rules xds {} (node ID {})", xds.server, xds.node_id));
            files.chain(server).collect()
        }
        None if paths.is_empty() => {
            vec!["  rules: built-in sample; use --rules PATH for your own".to_owned()]
        }
        None => paths.iter().map(|path| format!("  rules {path}")).collect(),
    }
}
