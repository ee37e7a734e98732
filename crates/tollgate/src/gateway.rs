//! `tollgate gateway`: the reverse proxy, with the same rules and store settings as `serve`.

use crate::build;
use crate::cli::ServeFlags;
use crate::config::Config;
use crate::logging::{self, Logs};
use crate::operators::Operators;
use crate::otlp::Sending;
use crate::serve::{pay_debts, told_to_stop};
use crate::settings::Settings;
use crate::status::ServerStatus;
use crate::{leases, open_files, reload, sources, watching};
use anyhow::Context;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tollgate_front::http;
use tollgate_gateway::Gateway;

pub(crate) fn run(flags: &ServeFlags) -> anyhow::Result<ExitCode> {
    let logs = logging::start(flags);
    // Before it is read for good: a change in between must not be missed.
    let text = flags.config.as_ref().and_then(|path| std::fs::read(path).ok());
    let config = Config::new(flags)?;
    open_files::raise();
    let runtime = crate::serve::runtime()?;
    runtime.block_on(serve(config, flags, text, logs))?;
    // What is still running past the drain is not waited for.
    runtime.shutdown_timeout(Duration::from_millis(100));
    Ok(ExitCode::SUCCESS)
}

async fn serve(
    config: Config,
    flags: &ServeFlags,
    text: Option<Vec<u8>>,
    logs: Arc<Logs>,
) -> anyhow::Result<()> {
    let section = config.gateway()?;
    // Before the files are read: a change in between must not be missed.
    let seen = sources::glimpse(&config.rules);
    let operators = Operators::open(&config).await?;
    let observe = watching::start(&config, operators.control.as_ref())?;
    let limiter = build::limiter(&config, &operators, Arc::clone(&observe))?;
    let sending = Sending::start(config.otlp.as_ref(), &observe)?;
    let status = Arc::new(ServerStatus::new(Arc::clone(&limiter), observe, &config));
    let gateway = Gateway::bind(&section, Arc::clone(&limiter));
    let gateway = gateway.map_err(anyhow::Error::msg).context("the section `gateway`")?;
    let figures = gateway.handle();
    status.tell_also(move |page| figures.metrics(page));
    // The HTTP address is for probes, metrics and programs that ask; only where somebody wants it.
    let http = match config.asked_http {
        false => None,
        true => {
            let bound = TcpListener::bind(config.http).await;
            Some(bound.with_context(|| format!("cannot listen on {}; set `http` to another", config.http))?)
        }
    };
    greet(&config, &gateway.addresses(), http.as_ref(), &operators);
    let (stop, stopping) = watch::channel(false);
    let drain = || {
        let mut stopping = stopping.clone();
        async move {
            let _ = stopping.wait_for(|stop| *stop).await;
        }
    };
    let desk = operators.desk.clone();
    let operators = operators.start(Arc::clone(&limiter), &status, logs, drain())?;
    let web = http.map(|listener| {
        let asked: Arc<dyn tollgate_front::Status> = Arc::clone(&status) as _;
        let settings = http::HttpConfig { answers: config.answers.clone(), ..http::HttpConfig::default() };
        tokio::spawn(http::serve(listener, Arc::clone(&limiter), asked, settings, drain()))
    });
    let settings = Settings {
        flags: flags.clone(),
        path: flags.config.clone().unwrap_or_default(),
        text,
        started: config.clone(),
        gateway: gateway.handle(),
        status: Arc::clone(&status),
    };
    let handle = gateway.handle();
    let keys = tokio::spawn(reload::watch_keys(move || handle.tokens(), Arc::clone(&status)));
    let settings = tokio::spawn(settings.watch());
    let reloading =
        tokio::spawn(reload::watch(config, seen, Arc::clone(&limiter), Arc::clone(&status), desk));
    let paying = tokio::spawn(pay_debts(Arc::clone(&limiter)));
    let tending = tokio::spawn(leases::tend(Arc::clone(&limiter)));
    let proxy = tokio::spawn(gateway.serve(drain()));

    told_to_stop().await?;
    tracing::info!("draining: no new connections, requests under way are answered");
    status.drain();
    let _ = stop.send(true);
    // Each bounds its own drain.
    let _ = proxy.await;
    if let Some(web) = web {
        let _ = web.await;
    }
    operators.end().await;
    tracing::info!("drained");
    for task in [reloading, settings, keys] {
        task.abort();
    }
    paying.abort();
    tending.abort();
    leases::say_farewell(&limiter).await;
    if let Some(sending) = sending {
        sending.end().await;
    }
    Ok(())
}

/// What a person who starts it reads. A closed output is no reason not to serve.
fn greet(
    config: &Config,
    addresses: &[(std::net::SocketAddr, bool)],
    http: Option<&TcpListener>,
    operators: &Operators,
) {
    let mut lines = vec![format!("tollgate {} stands before your API", env!("CARGO_PKG_VERSION"))];
    for (address, tls) in addresses {
        let scheme = if *tls { "https" } else { "http" };
        lines.push(format!("  gateway {scheme}://{address}"));
    }
    if let Some(address) = http.and_then(|http| http.local_addr().ok()) {
        lines.push(format!("  http  {address}  (probes, metrics, /v1/check)"));
    }
    lines.extend(operators.greeting());
    let rules = if config.rules.is_empty() {
        "the sample that is compiled in".to_owned()
    } else {
        config.rules.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
    };
    lines.push(format!("  rules {rules}"));
    let _ = writeln!(std::io::stdout().lock(), "{}", lines.join("\n"));
}
