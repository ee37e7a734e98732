//! Test harness: a gateway with in-memory counters on a free loopback port, in this process. All calls of the gateway's own
//! interface are here.
#![allow(dead_code, unused_imports, reason = "each test file uses a different part")]

use serde::Deserialize;
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tollgate_core::conformance::AnyStore;
use tollgate_core::{Clock, CounterStore, SystemClock};
use tollgate_engine::{GateState, Limiter};
use tollgate_gateway::{GatewayConfig, GatewaySection, Handle};
use tollgate_http::identity::IdentityConfig;
use tollgate_http::response::ResponseConfig;
use tollgate_observe::{ExpositionFormat, MetricsWriter};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

pub(crate) use tollgate_testing::origin::Origin;
pub(crate) use tollgate_testing::wait::{LONG, Stopwatch, eventually, note};
pub(crate) use tollgate_testing::web::{WebConnection, WebResponse, exchange, request};

/// Small, because tests are many and their keys few.
const MEMORY: usize = 16 << 20;

/// Configuration file of a gateway.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    gateway: GatewaySection,
    #[serde(default)]
    identity: IdentityConfig,
    #[serde(default)]
    responses: ResponseConfig,
}

pub(crate) struct Gateway {
    runtime: Option<Runtime>,
    stop: watch::Sender<bool>,
    serving: JoinHandle<()>,
    handle: Handle<AnyStore>,
    limiter: Arc<Limiter<AnyStore>>,
    addresses: Vec<SocketAddr>,
}

impl Gateway {
    /// Starts a gateway with these rules and this `gateway` section (indented by two).
    pub(crate) fn start(rules: &str, section: &str) -> Self {
        Self::start_with(rules, "", section)
    }

    /// Starts a gateway with further settings besides the section.
    pub(crate) fn start_with(rules: &str, more: &str, section: &str) -> Self {
        Self::start_over(memory(), 2, rules, more, section)
    }

    /// Starts a gateway over this store, on `threads` threads.
    pub(crate) fn start_over(
        store: impl CounterStore + 'static,
        threads: usize,
        rules: &str,
        more: &str,
        section: &str,
    ) -> Self {
        Self::start_over_any(AnyStore::new(store), threads, rules, more, section)
    }

    fn start_over_any(store: AnyStore, threads: usize, rules: &str, more: &str, section: &str) -> Self {
        let file: File = serde_saphyr::from_str(&format!("{more}\ngateway:\n{section}")).expect("settings");
        let config =
            GatewayConfig { gateway: file.gateway, identity: file.identity, responses: file.responses };
        let rules = Ruleset::load(&[Source::new("rules.yaml", rules)], &Options::default()).expect("rules");
        let clock = SystemClock::new();
        let limiter = Arc::new(Limiter::new(Arc::new(rules), store, Arc::new(clock) as Arc<dyn Clock>));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let gateway = {
            let _entered = runtime.enter();
            tollgate_gateway::Gateway::bind(&config, Arc::clone(&limiter)).expect("a gateway")
        };
        let addresses = gateway.addresses().into_iter().map(|(address, _)| address).collect();
        let (stop, mut stopping) = watch::channel(false);
        let handle = gateway.handle();
        let serving = runtime.spawn(gateway.serve(async move {
            let _ = stopping.wait_for(|stop| *stop).await;
        }));
        Self { runtime: Some(runtime), stop, serving, handle, limiter, addresses }
    }

    /// Publishes other rules.
    pub(crate) fn replace_rules(&self, rules: &str) {
        let rules = Ruleset::load(&[Source::new("rules.yaml", rules)], &Options::default()).expect("rules");
        self.limiter.replace_rules(Arc::new(rules));
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.addresses[0]
    }

    pub(crate) fn get(&self, path: &str) -> WebResponse {
        self.exchange(&request("GET", path, b""))
    }

    pub(crate) fn exchange(&self, bytes: &[u8]) -> WebResponse {
        exchange(self.address(), bytes).unwrap_or_else(|error| panic!("no answer: {error}"))
    }

    pub(crate) fn open(&self) -> WebConnection {
        WebConnection::to(self.address()).expect("a connection")
    }

    /// Returns the state of the only upstream's gate.
    pub(crate) fn overload(&self) -> GateState {
        self.limiter.upstream_states().into_iter().next().expect("an upstream").gate
    }

    /// Returns the value of a metric, by name with labels.
    pub(crate) fn metric(&self, name: &str) -> u64 {
        let mut page = MetricsWriter::new(ExpositionFormat::Prometheus);
        self.handle.metrics(&mut page);
        let text = page.finish();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        line.unwrap_or_else(|| panic!("no {name} in\n{text}"))
    }

    /// Starts draining.
    pub(crate) fn drain(&self) {
        self.stop.send_replace(true);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.serving.is_finished()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        self.drain();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

pub(crate) fn memory() -> MemoryStore<SystemClock> {
    MemoryStore::new(&MemoryConfig::with_bytes(MEMORY), SystemClock::new()).expect("memory")
}

/// Returns a section with one listener, one upstream and one route for everything; `route` is added to that route.
pub(crate) fn plain(upstream: SocketAddr, route: &str) -> String {
    format!(
        "  listeners: [{{address: \"127.0.0.1:0\"}}]\n  upstreams: {{api: {{addresses: [\"{upstream}\"]}}}}\n  routes:\n    - {{path: \"/{{*rest}}\", upstream: api, domain: d{route}}}\n"
    )
}
