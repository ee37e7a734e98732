//! The assembly of a server: one list, from rules to listeners.

use crate::cli::StoreKind;
use crate::config::Config;
use crate::sources;
use crate::status::ServerStatus;
use anyhow::Context;
use std::sync::Arc;
use tokio::net::TcpListener;
use tollgate_core::SystemClock;
use tollgate_engine::Limiter;
use tollgate_rules::Ruleset;
use tollgate_store::{MemoryConfig, MemoryStore};

/// The store as the binary stacks it; each later decorator gets a line here.
pub(crate) type Store = MemoryStore<SystemClock>;

/// A server that is about to listen.
pub(crate) struct Built {
    pub(crate) limiter: Arc<Limiter<Store>>,
    pub(crate) status: Arc<ServerStatus>,
    pub(crate) grpc: TcpListener,
    pub(crate) http: TcpListener,
}

pub(crate) async fn build(config: &Config) -> anyhow::Result<Built> {
    let sources =
        if config.rules.is_empty() { vec![sources::sample()] } else { sources::read(&config.rules)? };
    let rules = Ruleset::load(&sources, &config.rule_options())
        .map_err(|errors| anyhow::anyhow!("the rules cannot be used\n{errors}"))?;
    for warning in rules.warnings() {
        tracing::warn!("{warning}");
    }
    let clock = SystemClock::new();
    let store = match config.store {
        StoreKind::Memory => {
            let memory = MemoryConfig::with_bytes(config.memory);
            MemoryStore::new(&memory, clock).context("--memory")?
        }
    };
    let limiter =
        Limiter::new(Arc::new(rules), store, Arc::new(clock)).with_global_shadow(config.global_shadow);
    let limiter = Arc::new(limiter);
    let status = Arc::new(ServerStatus::new(Arc::clone(&limiter), config));
    let listen = async |address, flag| {
        TcpListener::bind(address)
            .await
            .with_context(|| format!("cannot listen on {address}; set {flag} to another"))
    };
    let grpc = listen(config.grpc, "--grpc").await?;
    let http = listen(config.http, "--http").await?;
    Ok(Built { limiter, status, grpc, http })
}
