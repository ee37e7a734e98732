//! Server assembly, in one place from rules to listeners.

use crate::config::file_guard::FileGuard;
use crate::config::last_good::start_rules;
use crate::config::rule_files::RuleFiles;
use crate::config::rule_sources;
use crate::config::{Config, StoreChoice};
use crate::server::admin::AdminServer;
use crate::server::billing::BillingServer;
use crate::server::otlp::ExportTask;
use crate::server::protocols::{DefaultListeners, ProtocolServers};
use crate::server::status::ServerStatus;
use crate::server::store::Store;
use crate::server::telemetry;
use anyhow::Context;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tollgate_control::Billing;
use tollgate_core::{Clock, SystemClock};
use tollgate_engine::Limiter;
use tollgate_observe::Telemetry;
use tollgate_rules::Ruleset;
use tollgate_store::{LeaseConfig, MemoryConfig, MemoryStore, RedisConfig, RedisRecords, RedisStore};

/// Assembled server, before it serves.
pub(crate) struct Assembly {
    pub(crate) limiter: Arc<Limiter<Store>>,
    pub(crate) rule_files: Arc<RuleFiles>,
    pub(crate) status: Arc<ServerStatus>,
    pub(crate) protocols: ProtocolServers,
    pub(crate) admin: AdminServer,
    /// Span exporter, if a collector is configured.
    pub(crate) export: Option<ExportTask>,
}

/// Builds the limiter from rules and store, for `serve` and `gateway` alike.
fn limiter(
    config: &Config,
    operators: &mut AdminServer,
    observe: Arc<Telemetry>,
) -> anyhow::Result<(Arc<Limiter<Store>>, Option<FileGuard>)> {
    let rules = match &operators.rule_manager {
        Some(rule_manager) => Arc::clone(&rule_manager.active().rules),
        None => {
            let start = start_rules(config)?;
            operators.start = Some((start.last_good, start.instead));
            let rules = Ruleset::load(&start.sources, &config.rule_options());
            Arc::new(rules.map_err(|errors| anyhow::anyhow!("the rules cannot be used\n{errors}"))?)
        }
    };
    for warning in rules.warnings() {
        tracing::warn!("{warning}");
    }
    let secret = config.identity.api_key.secret().context("`identity.api_key.secret_file`")?;
    let clock = SystemClock::new();
    // A sixteenth of the memory is for reservations.
    let reservations = config.memory / 16;
    let mut memory = MemoryConfig::with_bytes(config.memory);
    // With Redis another, for requests in flight and for what was admitted without it, half each.
    let outages = if matches!(config.store, StoreChoice::Redis(_)) { config.memory / 16 } else { 0 };
    memory.other_bytes = reservations + outages;
    let time: Arc<dyn Clock> = Arc::new(clock);
    let limiter = match &config.store {
        StoreChoice::Memory => {
            let store = Store::Memory(MemoryStore::new(&memory, clock).context("--memory")?);
            Limiter::new(rules, store, time)
        }
        StoreChoice::Redis(redis) => {
            let fallback = MemoryStore::new(&memory, Arc::clone(&time)).context("--memory")?;
            // A sixteenth of the memory is for rules whose counters are local to each node.
            let local = MemoryConfig::with_bytes((config.memory / 16).max(MemoryConfig::MIN_BYTES));
            let local = MemoryStore::new(&local, clock).context("--memory")?;
            let leases = LeaseConfig { nodes: config.nodes.unwrap_or(1), ..config.leases.clone() };
            let in_flight_bytes = outages / 2 / (1 + config.stores.len());
            let connect = |redis: &RedisConfig, name: Option<&str>| {
                tokio::spawn(warn_if_unreachable(redis.clone(), name.map(str::to_owned)));
                let redis = match &secret {
                    Some(secret) => redis.clone().with_key_secret(secret),
                    None => redis.clone(),
                };
                let each = in_flight_bytes / redis.connections.max(1);
                RedisStore::connect(redis.with_in_flight_bytes(each))
            };
            let named = config.stores.iter().map(|(name, redis)| (name.clone(), connect(redis, Some(name))));
            let redis = connect(redis, None).with_named(named.collect());
            let records = Arc::new(RedisRecords::new(redis.clone()));
            let store = Store::redis(&redis, local, leases, clock);
            // Pending charges, and those in doubt.
            let limiter = Limiter::new(rules, store, time).with_pending_bytes(outages / 4);
            limiter.with_fallback(fallback).with_shared_reservations(records)
        }
    };
    let limiter = limiter.with_reservation_bytes(reservations);
    let limiter = limiter
        .with_global_shadow(config.global_shadow)
        .with_unknown_domain(config.unknown_domain.into())
        .with_observer(Arc::clone(&observe) as _);
    let limiter = operators.observed(limiter);
    let (guard, limiter) = FileGuard::new(config, operators, limiter);
    let limiter = match &operators.control {
        Some(control) => {
            let display = Box::new(move |key: &str, value: &str| observe.display_caller(key, value));
            let billing = Billing::new(Arc::clone(control), display, config.billing.retention);
            let meter = billing.meter();
            operators.billing = Some(BillingServer::new(billing, &config.billing));
            let limiter = limiter.with_quotas(control.quota_table()).with_meter(meter);
            limiter.with_measures(control.active_measures())
        }
        None => limiter,
    };
    Ok((Arc::new(limiter), guard))
}

/// Logs which servers of the store cannot be reached at startup, and why.
async fn warn_if_unreachable(redis: RedisConfig, store: Option<String>) {
    for (shard, error) in redis.probe().await {
        tracing::warn!(store, shard, error, "store unavailable at startup; rules decide by their on_error");
    }
}

pub(crate) async fn build(config: &Config, unsaid: DefaultListeners) -> anyhow::Result<Assembly> {
    // Read before the rules are loaded, so that no change in between is missed.
    let seen = rule_sources::load(&config.rules);
    let mut operators = AdminServer::open(config).await?;
    let observe = telemetry::start(config, operators.control.as_ref())?;
    let (limiter, file_guard) = limiter(config, &mut operators, Arc::clone(&observe))?;
    let sending = ExportTask::start(config.otlp.as_ref(), &observe)?;
    let status = Arc::new(ServerStatus::new(Arc::clone(&limiter), observe, config));
    status.warn_if_not_billed(operators.control.is_some());
    let start = operators.start.take();
    if let Some((_, Some(instead))) = &start {
        status.start_with_last_good(instead.clone());
    }
    let manager = operators.rule_manager.clone();
    let rule_files = RuleFiles::new(config, &limiter, &status, manager, file_guard, seen, start);
    let fronts = ProtocolServers::open(config, unsaid, &limiter.rules()).await?;
    Ok(Assembly { limiter, rule_files, status, protocols: fronts, admin: operators, export: sending })
}

/// Binds a default address. If it is in use, logs a warning and returns `None`: no setting requires this listener.
pub(crate) async fn listen_if_free(address: SocketAddr, off: &str, flag: &str) -> Option<TcpListener> {
    let listener = TcpListener::bind(address).await;
    if let Err(error) = &listener {
        tracing::warn!(%error, "{off}: cannot listen on {address}; set {flag} to another, or to off");
    }
    listener.ok()
}
