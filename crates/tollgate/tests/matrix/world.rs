//! A limiter of one case in simulated time, with its telemetry and the admin API in front of it.

use crate::features::{Case, DOMAIN, Store};
use http::Request;
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tollgate_admin::{
    AdminState, AuthMode, ConfirmFilesError, DumpSlots, ExplainFuture, ExplainQuery, Explainer,
    FailedAuthThrottle, LogLevels, LogSettings, NodeCache, OverloadReport, PendingFiles, RuleDrift,
    RuleFilesControl, Sessions, UsageFuture, UsageQuery, UsageReader, router_for,
};
use tollgate_control::{ControlPlane, Role};
use tollgate_core::conformance::{AnyStore, Fault, FaultyStore, RemoteStore};
use tollgate_core::{Clock, ManualClock, Timestamp};
use tollgate_engine::Limiter;
use tollgate_http::problem::Problem;
use tollgate_observe::{ExpositionFormat, MetricsWriter, ProcessStatus, Telemetry, TelemetryConfig};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{DenyCache, LeaseConfig, LeasedStore, MemoryConfig, MemoryStore};
use tower::ServiceExt;

/// When every case begins: not at the start of a window of any length.
pub(crate) const START: Timestamp = Timestamp::from_micros(1_764_000_017_350_000);

type Time = Arc<ManualClock>;

/// The limiter of a case.
pub(crate) struct World {
    pub(crate) clock: Time,
    pub(crate) limiter: Arc<Limiter<AnyStore>>,
    pub(crate) status: Arc<Process>,
    faults: Option<Arc<FaultyStore<MemoryStore<Time>>>>,
}

/// Sends a request to the admin API.
type AdminRouter = Box<dyn Fn(&str, &str, &str) -> Answer>;
type Answer = Pin<Box<dyn Future<Output = (u16, Value)>>>;

thread_local! {
    /// One admin API of each thread: to build its document takes longer than a case.
    static ADMIN: AdminRouter = admin(None);
    /// The process that it is about.
    static CURRENT: RefCell<Option<Arc<Process>>> = const { RefCell::new(None) };
}

fn current() -> Arc<Process> {
    CURRENT.with_borrow(|current| current.clone().expect("a process"))
}

fn memory(clock: &Time) -> MemoryStore<Time> {
    MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(clock)).expect("memory")
}

/// The control plane of a case. Worlds of the same case share it: what they change is in their counters.
///
/// # Errors
/// What the admin API has refused.
pub(crate) async fn control_plane(case: &Case) -> Result<Option<Arc<ControlPlane>>, String> {
    if case.control.is_empty() {
        return Ok(None);
    }
    let clock = Arc::new(ManualClock::at(START));
    let file = std::env::temp_dir().join(format!("tollgate-matrix-{}-{}.db", std::process::id(), unique()));
    let address = format!("sqlite:{}", file.display());
    let control = ControlPlane::connect(&address, clock as Arc<dyn Clock>).await.expect("a database");
    control.catch_up().await.expect("a database");
    let world = World::new(case, false, Some(&control));
    CURRENT.set(Some(Arc::clone(&world.status)));
    let admin = admin(Some(Arc::clone(&control)));
    for (method, path, body) in &case.control {
        let (status, answer) = admin(method, path, body).await;
        if status >= 300 {
            assert!(case.features.len() > 1, "{}: {method} {path} {body}: {status} {answer}", case.name);
            return Err(format!("the admin API refuses: {}", answer["detail"]));
        }
    }
    // What is open stays readable; nothing is written any more.
    for ending in ["", "-wal", "-shm"] {
        let _ = std::fs::remove_file(format!("{}{ending}", file.display()));
    }
    Ok(Some(control))
}

fn unique() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl World {
    pub(crate) fn new(case: &Case, match_all: bool, control: Option<&Arc<ControlPlane>>) -> Self {
        let clock: Time = Arc::new(ManualClock::at(START));
        let rules = Ruleset::load(&[Source::new("rules", case.rules(match_all))], &Options::default());
        let rules = Arc::new(rules.expect("rules"));
        let mut faults = None;
        let store = match case.store {
            Store::Memory => AnyStore::new(memory(&clock)),
            Store::Awaited => AnyStore::new(RemoteStore::new(memory(&clock))),
            Store::Away => {
                let faulty = Arc::new(FaultyStore::new(memory(&clock)));
                faults = Some(Arc::clone(&faulty));
                AnyStore::new(faulty)
            }
            Store::Leased => {
                let far = Arc::new(RemoteStore::new(memory(&clock)));
                let cached = DenyCache::new(Arc::clone(&far), Arc::clone(&clock), 64);
                let leased = LeasedStore::new(cached, far, Arc::clone(&clock), LeaseConfig::default());
                AnyStore::new(leased.with_local(memory(&clock)))
            }
        };
        let telemetry =
            TelemetryConfig { allowed_sample: 1.0, max_records: 64, ..TelemetryConfig::default() };
        let telemetry = Telemetry::new(telemetry).expect("telemetry");
        let limiter = Limiter::new(rules, store, Arc::clone(&clock) as Arc<dyn Clock>)
            .with_fallback(memory(&clock))
            .with_observer(Arc::clone(&telemetry) as _);
        let limiter = match control {
            Some(control) => {
                limiter.with_quotas(control.quota_table()).with_measures(control.active_measures())
            }
            None => limiter,
        };
        let limiter = Arc::new(limiter);
        if case.has("adapted") {
            limiter.record_signals(DOMAIN, [("queue", 150.0)]).expect("a signal of the rules");
        }
        let status = Arc::new(Process { telemetry, limiter: Arc::clone(&limiter) });
        Self { clock, limiter, status, faults }
    }

    /// Makes the store answer, or not.
    pub(crate) fn set_away(&self, is_away: bool) {
        if let Some(faults) = &self.faults {
            if is_away { faults.set_fault(Fault::outage) } else { faults.clear_fault() }
        }
    }

    /// Calls the admin API as an administrator.
    pub(crate) async fn admin(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        CURRENT.set(Some(Arc::clone(&self.status)));
        let answer = ADMIN.with(|admin| admin(method, path, body));
        answer.await
    }

    /// Returns the metrics with these beginnings, by name with labels.
    pub(crate) fn metrics(&self) -> BTreeMap<String, u64> {
        let mut page = MetricsWriter::new(ExpositionFormat::Prometheus);
        self.status.telemetry.write(&mut page);
        let text = page.finish();
        let pairs = text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        });
        pairs.collect()
    }
}

fn admin(control: Option<Arc<ControlPlane>>) -> AdminRouter {
    let state = AdminState {
        control,
        rule_manager: None,
        rules: Box::new(|| current().limiter.rules()),
        rule_files: Arc::new(Current),
        usage: Arc::new(Current),
        address_attribute: Box::new(|address| address.to_string()),
        explainer: Arc::new(Current),
        overload: Box::new(OverloadReport::default),
        status: Arc::new(Current),
        log: Arc::new(Current),
        auth_mode: AuthMode::TokenRequired,
        sessions: Sessions::default(),
        roles: BTreeMap::from([("admin".to_owned(), Role::Admin)]),
        throttle: FailedAuthThrottle::default(),
        nodes: NodeCache::default(),
        dumps: DumpSlots::default(),
        history_days: 0,
    };
    let router = router_for(state, Some("admin"));
    Box::new(move |method, path, body| {
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        let request = request.body(Full::<bytes::Bytes>::from(body.to_owned())).expect("a request");
        let router = router.clone();
        Box::pin(async move {
            let response = router.oneshot(request).await.expect("a response");
            let status = response.status().as_u16();
            let bytes = response.into_body().collect().await.expect("a body").to_bytes();
            (status, serde_json::from_slice(&bytes).unwrap_or(Value::Null))
        })
    })
}

/// The process as the servers and the admin API see it.
pub(crate) struct Process {
    pub(crate) telemetry: Arc<Telemetry>,
    limiter: Arc<Limiter<AnyStore>>,
}

impl ProcessStatus for Process {
    fn is_ready(&self) -> bool {
        true
    }

    fn details(&self) -> Value {
        json!({})
    }

    fn metrics(&self, page: &mut MetricsWriter) {
        self.telemetry.write(page);
    }

    fn telemetry(&self) -> Option<&Arc<Telemetry>> {
        Some(&self.telemetry)
    }
}

/// The process of the case that this thread runs.
struct Current;

impl ProcessStatus for Current {
    fn is_ready(&self) -> bool {
        true
    }

    fn details(&self) -> Value {
        json!({})
    }

    fn metrics(&self, _: &mut MetricsWriter) {}
}

impl UsageReader for Current {
    fn usage<'a>(&'a self, of: &'a UsageQuery) -> UsageFuture<'a> {
        let limiter = Arc::clone(&current().limiter);
        Box::pin(async move { UsageReader::usage(&*limiter, of).await })
    }

    fn reset<'a>(&'a self, of: &'a UsageQuery) -> UsageFuture<'a> {
        let limiter = Arc::clone(&current().limiter);
        Box::pin(async move { UsageReader::reset(&*limiter, of).await })
    }
}

impl Explainer for Current {
    fn explain<'a>(&'a self, of: &'a ExplainQuery, draft: Option<&'a Arc<Ruleset>>) -> ExplainFuture<'a> {
        let limiter = Arc::clone(&current().limiter);
        Box::pin(async move { of.explain(&limiter, draft).await })
    }

    fn options(&self) -> Options {
        Options::default()
    }

    fn identify(
        &self,
        _: &Ruleset,
        _: Option<&str>,
        _: &[u8],
    ) -> Result<(Vec<(String, String)>, IpAddr), Problem> {
        Err(Problem::bad("no head is explained here"))
    }
}

impl LogLevels for Current {
    fn now(&self) -> LogSettings {
        LogSettings { level: "info".to_owned(), modules: BTreeMap::new() }
    }

    fn change(&self, _: LogSettings) -> Result<(), (String, String)> {
        Ok(())
    }
}

impl RuleFilesControl for Current {
    fn pending(&self) -> Option<PendingFiles> {
        None
    }

    fn drift(&self) -> Option<RuleDrift> {
        None
    }

    fn confirm(&self, _: &str) -> Result<(), ConfirmFilesError> {
        Err(ConfirmFilesError::NothingPending)
    }
}
