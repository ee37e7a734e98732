//! `tollgate gateway`: the reverse proxy, with the same rules and store settings as `serve`.

use crate::cli::ServeFlags;
use crate::config::Config;
use crate::config::gateway_reload::GatewayReload;
use crate::config::reload;
use crate::server::admin::AdminServer;
use crate::server::build::{Assembly, StoppedEarly, build};
use crate::server::limiter_tasks::LimiterTasks;
use crate::server::logging::{self, LogControl};
use crate::server::nodes::Heartbeats;
use crate::server::open_files;
use crate::server::protocols::{DefaultListeners, ProtocolServers};
use crate::server::serve::{rules_banner, shutdown_signal};
use crate::server::signals::SignalTasks;
use crate::server::status::{SHUTDOWN_TIMEOUT, ServerStatus};
use anyhow::Context;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tollgate_gateway::Gateway;

pub(crate) fn run(flags: &ServeFlags) -> anyhow::Result<ExitCode> {
    let logs = logging::start(flags)?;
    // Read before the configuration is loaded, so that no change in between is missed.
    let text = flags.config.as_ref().and_then(|path| std::fs::read(path).ok());
    let config = Config::new(flags)?;
    open_files::raise();
    let runtime = crate::server::serve::runtime()?;
    StoppedEarly::is_success(runtime.block_on(serve(config, flags, text, logs)))?;
    // Tasks still running after the drain are not awaited.
    runtime.shutdown_timeout(Duration::from_millis(100));
    Ok(ExitCode::SUCCESS)
}

async fn serve(
    config: Config,
    flags: &ServeFlags,
    text: Option<Vec<u8>>,
    logs: Arc<LogControl>,
) -> anyhow::Result<()> {
    let section = config.gateway()?;
    // Probes, metrics and checks have listeners only where they are configured.
    let Assembly {
        limiter,
        rule_files,
        status,
        protocols,
        admin: operators,
        export: sending,
        cells,
        durable,
    } = build(&config, DefaultListeners::Closed).await?;
    let gateway = Gateway::bind_within(&section, Arc::clone(&limiter), open_files::budget());
    let gateway = gateway.map_err(anyhow::Error::msg).with_context(|| config.place())?;
    let handle = gateway.handle();
    status.add_metrics(move |page| handle.metrics(page));
    let shutdown = shutdown_signal()?;
    logs.print_banner(
        config.stdout(),
        &banner(&config, &gateway.addresses(), &protocols, &operators, &status),
    );
    let (tokens, has_protocols) = (protocols.jwt(), !protocols.is_empty());
    let (stop, stopping) = watch::channel(false);
    let drain = || {
        let mut stopping = stopping.clone();
        async move {
            let _ = stopping.wait_for(|stop| *stop).await;
        }
    };
    let quota_stats = protocols.quota_stats();
    status.add_metrics(move |page| quota_stats.metrics(page));
    let heartbeats = Heartbeats::new(&limiter, &config, operators.control.clone());
    let signals = SignalTasks::start(&limiter, &config, operators.control.clone(), &status)?;
    let operators = operators.start(Arc::clone(&limiter), &status, logs, Arc::clone(&rule_files), drain())?;
    let protocols = protocols.start(&config, &limiter, &status, drain);
    let settings = GatewayReload {
        flags: flags.clone(),
        path: flags.config.clone().unwrap_or_default(),
        text,
        started: config.clone(),
        has_protocols,
        gateway: gateway.handle(),
        status: Arc::clone(&status),
    };
    let (handle, served) = (gateway.handle(), gateway.handle());
    let keys = tokio::spawn(reload::watch_keys(move || handle.tokens(), Arc::clone(&status)));
    let more_keys = tokio::spawn(reload::watch_keys(move || tokens.clone(), Arc::clone(&status)));
    let settings = tokio::spawn(settings.watch());
    let reloading = tokio::spawn(reload::watch(rule_files));
    let tasks = LimiterTasks::start(limiter, heartbeats, cells, signals);
    let proxy = tokio::spawn(gateway.serve(drain()));

    shutdown.await;
    tracing::info!("draining; requests in flight are finished");
    status.drain();
    let _ = stop.send(true);
    // Each server bounds its own drain.
    let _ = proxy.await;
    match protocols.shutdown().await {
        Ok(()) => tracing::info!("drained"),
        Err(error) => tracing::warn!("{error:#}"),
    }
    operators.shutdown().await;
    for task in [reloading, settings, keys, more_keys] {
        task.abort();
    }
    tasks.shutdown().await;
    if let Some(durable) = durable {
        durable.shutdown().await;
    }
    status.shutdown().await;
    if let Ok(lost @ 1..) =
        tokio::task::spawn_blocking(move || served.flush_access_log(SHUTDOWN_TIMEOUT)).await
    {
        tracing::warn!(lost, "access log lines lost at shutdown");
    }
    if let Some(sending) = sending {
        sending.shutdown().await;
    }
    Ok(())
}

/// Returns the lines of the start banner.
fn banner(
    config: &Config,
    addresses: &[(std::net::SocketAddr, bool)],
    protocols: &ProtocolServers,
    operators: &AdminServer,
    status: &ServerStatus,
) -> Vec<String> {
    let mut lines = vec![format!("tollgate {} gateway is listening", env!("CARGO_PKG_VERSION"))];
    for (address, tls) in addresses {
        let scheme = if *tls { "https" } else { "http" };
        lines.push(format!("  gateway {scheme}://{address}"));
    }
    lines.extend(protocols.banner());
    lines.extend(operators.banner());
    lines.push(config.store_banner());
    lines.extend(config.cell_banner());
    lines.extend(rules_banner(config, operators, status));
    lines
}
