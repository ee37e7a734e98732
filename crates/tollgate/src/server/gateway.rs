//! `tollgate gateway`: the reverse proxy, with the same rules and store settings as `serve`.

use crate::cli::ServeFlags;
use crate::config::Config;
use crate::config::gateway_reload::GatewayReload;
use crate::config::reload;
use crate::server::admin::AdminServer;
use crate::server::build::{StoppedEarly, build};
use crate::server::logging::{self, LogControl};
use crate::server::open_files;
use crate::server::protocols::{DefaultListeners, ProtocolServers};
use crate::server::running::Running;
use crate::server::serve::{rules_banner, shutdown_signal};
use crate::server::status::{SHUTDOWN_TIMEOUT, ServerStatus};
use anyhow::Context;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
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
    mut config: Config,
    flags: &ServeFlags,
    text: Option<Vec<u8>>,
    logs: Arc<LogControl>,
) -> anyhow::Result<()> {
    config.gateway()?;
    // Probes, metrics and checks have listeners only where they are configured.
    let built = build(&mut config, DefaultListeners::Closed).await?;
    let section = config.gateway()?;
    let gateway = Gateway::bind_within(&section, Arc::clone(&built.limiter), open_files::budget());
    let gateway = gateway.map_err(anyhow::Error::msg).with_context(|| config.place())?;
    section.require_domains(&config.more_rule_options.required_domains);
    let (handle, status) = (gateway.handle(), Arc::clone(&built.status));
    status.add_metrics(move |page| handle.metrics(page));
    let shutdown = shutdown_signal()?;
    let lines = banner(&config, &gateway.addresses(), &built.protocols, &built.admin, &status);
    logs.print_banner(config.stdout(), &lines);
    let has_protocols = !built.protocols.is_empty();
    let mut running = Running::start(&config, built, logs)?;
    let settings = GatewayReload {
        flags: flags.clone(),
        path: flags.config.clone().unwrap_or_default(),
        text,
        started: config.clone(),
        has_protocols,
        gateway: gateway.handle(),
        status: Arc::clone(&status),
    };
    running.spawn(settings.watch());
    let (handle, served) = (gateway.handle(), gateway.handle());
    running.spawn(reload::watch_keys(move || Some(handle.verifier()), status));
    let proxy = tokio::spawn(gateway.serve(running.drain()));

    shutdown.await;
    running.begin_drain();
    let _ = proxy.await;
    running.shutdown().await;
    let flushed = tokio::task::spawn_blocking(move || served.flush_access_log(SHUTDOWN_TIMEOUT));
    if let Ok(lost @ 1..) = flushed.await {
        tracing::warn!(lost, "access log lines lost at shutdown");
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
