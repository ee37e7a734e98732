//! Test harness: the protocol servers in this process, over in-memory counters, each on a free loopback port. All calls
//! of their `serve` functions are here.
#![allow(dead_code, unused_imports, reason = "each test file uses its own part")]

use serde::Deserialize;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tollgate_core::conformance::AnyStore;
use tollgate_core::{Clock, CounterStore, SystemClock};
use tollgate_engine::Limiter;
use tollgate_http::identity::IdentityConfig;
use tollgate_http::response::ResponseConfig;
use tollgate_observe::{MetricsWriter, ProcessStatus};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_server::http::{self, ForwardAuth, ForwardAuthConfig, HttpConfig};
use tollgate_server::resp::{self, RespConfig};
use tollgate_server::rls::{self, RlsConfig};
use tollgate_store::{MemoryConfig, MemoryStore};

pub(crate) use tollgate_testing::wait::{LONG, Stopwatch, eventually, note};
pub(crate) use tollgate_testing::web::{WebConnection, WebResponse, exchange, exchange_from, request};

/// Memory per store in bytes: there are many tests, with few keys each.
const MEMORY: usize = 16 << 20;

/// The settings of these servers, with the keys of a configuration file.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Settings {
    identity: IdentityConfig,
    forward_auth: ForwardAuthConfig,
    responses: ResponseConfig,
    resp_password: Option<String>,
}

impl Settings {
    fn read(text: &str) -> Self {
        if text.is_empty() { Self::default() } else { serde_saphyr::from_str(text).expect("settings") }
    }
}

/// The process status that these servers report.
struct Process(Arc<Limiter<AnyStore>>);

impl ProcessStatus for Process {
    fn is_ready(&self) -> bool {
        true
    }

    fn details(&self) -> Value {
        json!({"rules": {"revision": self.0.rules().revision()}})
    }

    fn metrics(&self, _: &mut MetricsWriter) {}
}

pub(crate) fn memory() -> MemoryStore<SystemClock> {
    MemoryStore::new(&MemoryConfig::with_bytes(MEMORY), SystemClock::new()).expect("memory")
}

/// All protocols over one limiter.
pub(crate) struct Server {
    runtime: Option<Runtime>,
    stop: watch::Sender<bool>,
    serving: Vec<JoinHandle<()>>,
    pub(crate) http: SocketAddr,
    pub(crate) grpc: SocketAddr,
    pub(crate) resp: SocketAddr,
}

impl Server {
    /// Starts a server with these rules.
    pub(crate) fn with_rules(rules: &str) -> Self {
        Self::start(&[rules], "")
    }

    /// Starts a server with these rule files and settings (YAML).
    pub(crate) fn start(rules: &[&str], settings: &str) -> Self {
        Self::start_at(rules, settings, "127.0.0.1:0".parse().expect("an address"))
    }

    /// Like [`Self::start`], with gRPC at this address.
    pub(crate) fn start_at(rules: &[&str], settings: &str, grpc: SocketAddr) -> Self {
        Self::start_over(memory(), 2, rules, settings, grpc)
    }

    /// Like [`Self::start_at`], over this store and with this number of threads.
    pub(crate) fn start_over(
        store: impl CounterStore + 'static,
        threads: usize,
        rules: &[&str],
        settings: &str,
        grpc: SocketAddr,
    ) -> Self {
        Self::start_over_any(AnyStore::new(store), threads, rules, settings, grpc)
    }

    fn start_over_any(
        store: AnyStore,
        threads: usize,
        rules: &[&str],
        settings: &str,
        grpc: SocketAddr,
    ) -> Self {
        let sources: Vec<Source> =
            rules.iter().enumerate().map(|(n, text)| Source::new(format!("{n}.yaml"), *text)).collect();
        let rules = Arc::new(Ruleset::load(&sources, &Options::default()).expect("rules"));
        let clock = SystemClock::new();
        let limiter = Arc::new(Limiter::new(rules, store, Arc::new(clock) as Arc<dyn Clock>));
        let settings = Settings::read(settings);
        let forward = ForwardAuth::new(&settings.forward_auth, &settings.identity).expect("settings");
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let (stop, stopping) = watch::channel(false);
        let drain = || {
            let mut stopping = stopping.clone();
            async move {
                let _ = stopping.wait_for(|stop| *stop).await;
            }
        };
        let bind = |address: SocketAddr| {
            let listener = std::net::TcpListener::bind(address).expect("a free port");
            listener.set_nonblocking(true).expect("a socket");
            let _entered = runtime.enter();
            let listener = TcpListener::from_std(listener).expect("a listener");
            let address = listener.local_addr().expect("an address");
            (listener, address)
        };
        let local = SocketAddr::from(([127, 0, 0, 1], 0));
        let ((on_http, http), (on_grpc, grpc), (on_resp, resp)) = (bind(local), bind(grpc), bind(local));
        let by_http = http::serve(
            on_http,
            Arc::clone(&limiter),
            Arc::new(Process(Arc::clone(&limiter))),
            HttpConfig { forward_auth: forward, responses: settings.responses, ..HttpConfig::default() },
            drain(),
        );
        let by_grpc = rls::serve(on_grpc, Arc::clone(&limiter), RlsConfig::default(), drain());
        let config = RespConfig { password: settings.resp_password, ..RespConfig::default() };
        let by_resp = resp::serve(on_resp, limiter, config, drain());
        let serving = vec![
            runtime.spawn(by_http),
            runtime.spawn(async { by_grpc.await.expect("gRPC is served") }),
            runtime.spawn(by_resp),
        ];
        Self { runtime: Some(runtime), stop, serving, http, grpc, resp }
    }

    /// Returns the error for invalid settings.
    pub(crate) fn settings_error(settings: &str) -> String {
        let settings = Settings::read(settings);
        ForwardAuth::new(&settings.forward_auth, &settings.identity).expect_err("an error").to_string()
    }

    pub(crate) fn get(&self, path: &str) -> WebResponse {
        self.exchange(&request("GET", path, b""))
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> WebResponse {
        self.exchange(&request("POST", path, body.to_string().as_bytes()))
    }

    /// Sends `POST /v1/check` with attributes.
    pub(crate) fn check(&self, domain: &str, attributes: &Value) -> WebResponse {
        self.post("/v1/check", &json!({"domain": domain, "attributes": attributes}))
    }

    pub(crate) fn exchange(&self, bytes: &[u8]) -> WebResponse {
        exchange(self.http, bytes).unwrap_or_else(|error| panic!("no response: {error}"))
    }

    /// Begins a graceful shutdown of all servers.
    pub(crate) fn drain(&self) {
        self.stop.send_replace(true);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.serving.iter().all(JoinHandle::is_finished)
    }

    /// Ends without a graceful shutdown, like a killed process.
    pub(crate) fn kill(mut self) {
        let address = self.grpc;
        self.end();
        eventually("the end of the server", || std::net::TcpListener::bind(address).ok());
    }

    fn end(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.drain();
        self.end();
    }
}
