//! Server assembly, in one place from rules to listeners.

use crate::config::file_guard::FileGuard;
use crate::config::last_good::start_rules;
use crate::config::rule_files::RuleFiles;
use crate::config::rule_sources;
use crate::config::stores::StoreReload;
use crate::config::{Config, StoreChoice};
use crate::server::admin::AdminServer;
use crate::server::billing::BillingServer;
use crate::server::cells::{self, CellLinks, CellTasks};
use crate::server::durable::{self, DurableServer, DurableTasks};
use crate::server::otlp::ExportTask;
use crate::server::protocols::{DefaultListeners, ProtocolServers};
use crate::server::serve::shutdown_signal;
use crate::server::status::ServerStatus;
use crate::server::store::{KeptStore, OwnStore, Store};
use crate::server::telemetry;
use crate::xds::{FirstConfig, XdsClient};
use anyhow::Context;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tollgate_control::Billing;
use tollgate_core::{Clock, SystemClock};
use tollgate_engine::{Limiter, RegionView};
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
    /// Links to other cells, if there are any.
    pub(crate) cells: Option<CellTasks>,
    /// Durable counters, with a database.
    pub(crate) durable: Option<DurableTasks>,
}

/// The limiter, the guard of its rule files with what adds stores, and the links to other cells.
type Built = (Arc<Limiter<Store>>, (Option<FileGuard>, Option<StoreReload>), Option<CellLinks>);

/// Builds the limiter from rules and store, for `serve` and `gateway` alike.
fn limiter(config: &Config, operators: &mut AdminServer, observe: Arc<Telemetry>) -> anyhow::Result<Built> {
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
    let (mut linked, mut stores_reload) = (None, None);
    let record = durable::record(config, operators.control.as_ref(), clock)?;
    let mut with_cells = |own: OwnStore| -> anyhow::Result<Store> {
        let own = KeptStore::new(own, record.clone());
        let Some(cells) = &config.cells else { return Ok(Store::Own(own)) };
        let (store, links) = cells::assemble(own, cells, secret.as_deref(), &config.leases, clock)?;
        linked = Some(links);
        Ok(store)
    };
    let limiter = match &config.store {
        StoreChoice::Memory => {
            let store = OwnStore::Memory(MemoryStore::new(&memory, clock).context("--memory")?);
            let limiter = Limiter::new(rules, with_cells(store)?, Arc::clone(&time));
            match &config.cells {
                None => limiter,
                // For counters whose owner does not answer: each cell has its part.
                Some(cells) => {
                    let local = MemoryConfig::with_bytes((config.memory / 16).max(MemoryConfig::MIN_BYTES));
                    let fallback = MemoryStore::new(&local, time).context("--memory")?;
                    let limiter = limiter.with_pending_bytes(config.memory / 64).with_fallback(fallback);
                    limiter.set_live_nodes(u32::try_from(cells.urls.len() + 1).unwrap_or(u32::MAX));
                    limiter
                }
            }
        }
        StoreChoice::Redis(redis) => {
            let fallback = MemoryStore::new(&memory, Arc::clone(&time)).context("--memory")?;
            // A sixteenth of the memory is for rules whose counters are local to each node.
            let local = MemoryConfig::with_bytes((config.memory / 16).max(MemoryConfig::MIN_BYTES));
            let local = MemoryStore::new(&local, clock).context("--memory")?;
            let leases = LeaseConfig { nodes: config.nodes.unwrap_or(1), ..config.leases.clone() };
            let in_flight_bytes = outages / 2 / (1 + config.stores.len());
            let secret = secret.clone();
            let connect = move |redis: &RedisConfig, name: Option<&str>| {
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
            if let Some(flags) = &config.flags {
                let stores = redis.clone();
                let add = Box::new(move |name: &str, config: &RedisConfig| {
                    stores.add_named(name, connect(config, Some(name)));
                });
                stores_reload = StoreReload::new(&flags.0, config.store_names.clone(), add)?;
            }
            let store = OwnStore::redis(&redis, local, leases, clock);
            // Pending charges, and those in doubt.
            let limiter = Limiter::new(rules, with_cells(store)?, time).with_pending_bytes(outages / 4);
            if let Some(cells) = &config.cells {
                limiter.set_cells(cells.cells());
            }
            let limiter = limiter.with_fallback(fallback).with_shared_reservations(records);
            match config.shed_wait() {
                Some(wait) => limiter.with_check_shedding(wait),
                None => limiter,
            }
        }
    };
    let limiter = limiter.with_reservation_bytes(reservations);
    let limiter = limiter
        .with_global_shadow(config.global_shadow)
        .with_unknown_domain(config.unknown_domain.into())
        .with_observer(Arc::clone(&observe) as _);
    let limiter = match &config.service {
        Some(service) => limiter.with_observer(Arc::clone(&service.metrics) as _),
        None => limiter,
    };
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
    Ok((Arc::new(limiter), (guard, stores_reload), linked))
}

/// Logs which servers of the store cannot be reached at startup, and why.
async fn warn_if_unreachable(redis: RedisConfig, store: Option<String>) {
    for (shard, error) in redis.probe().await {
        tracing::warn!(store, shard, error, "store unavailable at startup; rules decide by their on_error");
    }
}

pub(crate) async fn build(config: &mut Config, unsaid: DefaultListeners) -> anyhow::Result<Assembly> {
    // Read before the rules are loaded, so that no change in between is missed.
    let seen = rule_sources::load(config);
    let mut operators = AdminServer::open(config).await?;
    let config = &*config;
    let observe = telemetry::start(config, operators.control.as_ref())?;
    let (limiter, file_guard, linked) = limiter(config, &mut operators, Arc::clone(&observe))?;
    if linked.is_some() {
        let view: Arc<dyn RegionView> = Arc::clone(&limiter) as _;
        observe.set_region_view(Arc::downgrade(&view));
    }
    let sending = ExportTask::start(config.otlp.as_ref(), &observe)?;
    let status = Arc::new(ServerStatus::new(Arc::clone(&limiter), observe, config));
    status.warn_without_database(operators.control.is_some());
    status.warn_without_prometheus();
    let start = operators.start.take();
    if let Some((_, Some(instead))) = &start {
        status.start_with_last_good(instead.clone());
    }
    let manager = operators.rule_manager.clone();
    let rule_files = RuleFiles::new(config, &limiter, &status, manager, file_guard, seen, start);
    status.attach_rule_files(&rule_files);
    operators.apply_updates(&limiter, &status);
    if let (Some(settings), Some(xds)) = (&config.xds, status.xds()) {
        let sink = Arc::clone(&rule_files);
        XdsClient::start(settings.clone(), sink, Arc::clone(xds));
        if settings.first_config == FirstConfig::Wait {
            tokio::select! {
                () = xds.first_response() => {}
                () = shutdown_signal()? => return Err(StoppedEarly.into()),
            }
        }
    }
    let protocols = ProtocolServers::open(config, unsaid, &limiter.rules()).await?;
    if config.service.is_none() {
        protocols.forward_domain().require_in(&config.more_rule_options.required_domains);
        status.watch_forward_domain(protocols.forward_domain());
    }
    let durable = match DurableServer::new(&limiter, config, operators.control.as_ref()) {
        Some(server) => {
            let figures = Arc::clone(&server);
            status.add_metrics(move |page| figures.metrics(page));
            Some(server.start().await)
        }
        None => None,
    };
    let cells = match linked {
        Some(linked) => Some(linked.start(&limiter, operators.control.as_ref()).await?),
        None => None,
    };
    Ok(Assembly { limiter, rule_files, status, protocols, admin: operators, export: sending, cells, durable })
}

/// A shutdown signal that arrived before the server was complete. The process ends as after any other.
#[derive(Debug)]
pub(crate) struct StoppedEarly;

impl std::fmt::Display for StoppedEarly {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ended before the first rules arrived")
    }
}

impl std::error::Error for StoppedEarly {}

impl StoppedEarly {
    /// Turns it into success.
    pub(crate) fn is_success(served: anyhow::Result<()>) -> anyhow::Result<()> {
        match served {
            Err(error) if error.is::<Self>() => {
                tracing::info!("{error}");
                Ok(())
            }
            served => served,
        }
    }
}

/// Binds a default address. If it is in use, logs a warning and returns `None`: no setting requires this listener.
pub(crate) async fn listen_if_free(address: SocketAddr, off: &str, flag: &str) -> Option<TcpListener> {
    let listener = TcpListener::bind(address).await;
    if let Err(error) = &listener {
        tracing::warn!(%error, "{off}: cannot listen on {address}; set {flag} to another, or to off");
    }
    listener.ok()
}
