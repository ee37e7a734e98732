//! `tollgate serve`: run until told to stop, then drain.

use crate::build::{Built, build};
use crate::cli::ServeFlags;
use crate::config::Config;
use crate::logging::{self, Logs};
use crate::operators::Operators;
use crate::store::Store;
use crate::{leases, open_files, reload, sources};
use anyhow::Context;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tollgate_engine::Limiter;
use tollgate_front::{http, resp, rls};

/// The longest that draining may take before the process ends all the same.
const DRAIN: Duration = Duration::from_secs(15);

/// Where there is one core, there is nobody to share work with: a scheduler that could costs every request.
pub(crate) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let mut builder = match cores {
        1 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    builder.enable_all().build()
}

pub(crate) fn run(flags: &ServeFlags) -> anyhow::Result<ExitCode> {
    let logs = logging::start(flags);
    let config = Config::new(flags)?;
    if config.gateway.is_some() {
        anyhow::bail!("the file of --config has a `gateway` section: start it with `tollgate gateway`");
    }
    open_files::raise();
    let runtime = runtime()?;
    runtime.block_on(serve(config, logs))?;
    // What is still running past the drain is not waited for.
    runtime.shutdown_timeout(Duration::from_millis(100));
    Ok(ExitCode::SUCCESS)
}

async fn serve(config: Config, logs: Arc<Logs>) -> anyhow::Result<()> {
    // Before the files are read: a change in between must not be missed.
    let seen = sources::glimpse(&config.rules);
    let forward = http::Forward::new(&config.forward_auth, &config.who).context("the file of --config")?;
    let tokens = forward.tokens();
    let rls_config = rls::RlsConfig { answers: config.answers.clone(), ..rls::RlsConfig::default() };
    let http_config =
        http::HttpConfig { answers: config.answers.clone(), forward, ..http::HttpConfig::default() };
    let Built { limiter, status, grpc, http, resp, operators, sending } = build(&config).await?;
    greet(&config, &grpc, &http, resp.as_ref(), &operators)?;
    let resp_config = config.resp_config.clone();
    let (stop, stopping) = watch::channel(false);
    let drain = || {
        let mut stopping = stopping.clone();
        async move {
            let _ = stopping.wait_for(|stop| *stop).await;
        }
    };
    let desk = operators.desk.clone();
    let operators = operators.start(Arc::clone(&limiter), &status, logs, drain())?;
    let reloading = reload::watch(config, seen, Arc::clone(&limiter), Arc::clone(&status), desk);
    let reloading = tokio::spawn(reloading);
    let keys = tokio::spawn(reload::watch_keys(move || tokens.clone(), Arc::clone(&status)));
    let paying = tokio::spawn(pay_debts(Arc::clone(&limiter)));
    let tending = tokio::spawn(leases::tend(Arc::clone(&limiter)));
    let rls = tokio::spawn(rls::serve(grpc, Arc::clone(&limiter), rls_config, drain()));
    let redis = resp.map(|listener| resp::serve(listener, Arc::clone(&limiter), resp_config, drain()));
    let redis = redis.map(tokio::spawn);
    let asked: Arc<dyn tollgate_front::Status> = Arc::clone(&status) as _;
    let web = tokio::spawn(http::serve(http, Arc::clone(&limiter), asked, http_config, drain()));

    told_to_stop().await?;
    tracing::info!("draining: no new connections, requests under way are answered");
    status.drain();
    let _ = stop.send(true);
    let drained = async {
        let _ = web.await;
        if let Some(redis) = redis {
            let _ = redis.await;
        }
        operators.end().await;
        rls.await
    };
    match tokio::time::timeout(DRAIN, drained).await {
        Ok(Ok(Err(error))) => tracing::warn!(%error, "the gRPC server ended badly"),
        Ok(_) => tracing::info!("drained"),
        Err(_) => tracing::warn!("some requests did not end within {} s", DRAIN.as_secs()),
    }
    reloading.abort();
    keys.abort();
    paying.abort();
    tending.abort();
    leases::say_farewell(&limiter).await;
    if let Some(sending) = sending {
        sending.end().await;
    }
    Ok(())
}

/// Charges the shared counters with what was let through while they were away.
pub(crate) async fn pay_debts(limiter: Arc<Limiter<Store>>) {
    loop {
        tokio::time::sleep(Duration::from_millis(100)).await;
        limiter.pay_debts().await;
    }
}

pub(crate) async fn told_to_stop() -> anyhow::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// What a person who starts the server reads. A closed output is no reason not to serve.
fn greet(
    config: &Config,
    grpc: &tokio::net::TcpListener,
    http: &tokio::net::TcpListener,
    resp: Option<&tokio::net::TcpListener>,
    operators: &Operators,
) -> anyhow::Result<()> {
    let (grpc, http) = (grpc.local_addr()?, http.local_addr()?);
    let mut lines = vec![
        format!("tollgate {} is listening", env!("CARGO_PKG_VERSION")),
        format!("  http  {http}"),
        format!("  grpc  {grpc}  (envoy.service.ratelimit.v3)"),
    ];
    if let Some(resp) = resp {
        lines.push(format!("  resp  {}  (CL.THROTTLE, TG.CHECK)", resp.local_addr()?));
    }
    lines.extend(operators.greeting());
    if config.rules.is_empty() {
        let check = |attributes: &str| {
            format!("curl -s {http}/v1/check -d '{{\"domain\":\"sample\",\"attributes\":{{{attributes}}}}}'")
        };
        let log_in = check(r#""api_key":"abc","endpoint":"POST /login""#);
        lines.extend([
            "  rules: the sample that is compiled in; --rules PATH for your own".to_owned(),
            "\nTry:".to_owned(),
            format!("  {}", check(r#""api_key":"abc""#)),
            format!("  for i in 1 2 3 4 5 6; do {log_in}; echo; done"),
            format!("  curl -s '{http}/readyz?verbose'"),
        ]);
    } else {
        lines.extend(config.rules.iter().map(|path| format!("  rules {}", path.display())));
    }
    let _ = writeln!(std::io::stdout().lock(), "{}", lines.join("\n"));
    Ok(())
}
