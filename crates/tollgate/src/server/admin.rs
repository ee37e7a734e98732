//! Admin server: the admin listener, the control plane of `--db` if there is one, and the status and metrics of both.

use crate::cli::Listen;
use crate::config::last_good::{InsteadOfFiles, LastGood, start_rules};
use crate::config::rule_files::RuleFiles;
use crate::config::{Config, StoreChoice};
use crate::server::billing::{BillingServer, BillingTasks};
use crate::server::build::listen_if_free;
use crate::server::history;
use crate::server::open_files;
use crate::server::status::{ReloadTarget, ServerStatus};
use crate::server::store::Store;
use anyhow::Context;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tollgate_admin::{
    AdminState, AuthMode, DumpSlots, ExplainFuture, ExplainQuery, Explainer, FailedAuthThrottle, LogLevels,
    NodeCache, OverloadReport, Sessions, UsageReader,
};
use tollgate_control::{ControlPlane, DenialCounts, Role, RuleManager, SyncConfig};
use tollgate_core::{Clock, SystemClock};
use tollgate_engine::{CounterSharing, Limiter};
use tollgate_http::identity::{
    ApiKeyConfig, CredentialVerifier, IdentityConfig, IdentityResolver, QuotaKeys,
};
use tollgate_http::problem::Problem;
use tollgate_http::tls::{ClientAuth, ServerTls, ServerTlsConfig};
use tollgate_observe::{MetricsWriter, ProcessStatus};
use tollgate_rules::{Options, RequiredDomains, Ruleset};
use tollgate_server::http;

/// Default address of the admin listener.
const ADMIN: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 8082));

/// Maximum time that the start waits for quotas to load before traffic is served.
const BEFORE_TRAFFIC: Duration = Duration::from_secs(5);

/// Control plane and admin listener, each optional.
pub(crate) struct AdminServer {
    pub(crate) control: Option<Arc<ControlPlane>>,
    /// Rule manager, if rules can be published.
    pub(crate) rule_manager: Option<Arc<RuleManager>>,
    /// Path of the control-plane snapshot.
    snapshot: Option<PathBuf>,
    /// Days that the database keeps the history.
    history_days: u32,
    /// Denials per caller, for the rollback guard.
    denials: Arc<DenialCounts>,
    /// Billing, with a database.
    pub(crate) billing: Option<BillingServer>,
    listener: Option<TcpListener>,
    tls: Option<Arc<ServerTls>>,
    roles: BTreeMap<String, Role>,
    /// Options that rules are compiled with.
    rule_options: Options,
    identity: IdentityConfig,
    /// The accepted rule files, and why they are active instead of the files; none while published rules are active.
    pub(crate) start: Option<(LastGood, Option<InsteadOfFiles>)>,
}

/// Running tasks of the admin server.
pub(crate) struct RunningAdmin {
    sync: Vec<JoinHandle<()>>,
    serving: Option<JoinHandle<()>>,
    /// Heartbeat task, if there is a database: lists this node for others, and deregisters it once the sender is
    /// dropped.
    heartbeat: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
    /// The task that records the history, ended in the same way.
    history: Option<(oneshot::Sender<()>, JoinHandle<()>)>,
    billing: Option<BillingTasks>,
}

impl AdminServer {
    /// Opens the database and binds the listener.
    pub(crate) async fn open(config: &mut Config) -> anyhow::Result<Self> {
        let control = match &config.db {
            Some(db) => Some(connect(&db.0, config.snapshot.as_deref()).await.context("--db")?),
            None => None,
        };
        config.identity.api_key.quota_keys = control.as_ref().map(quota_keys);
        let config = &*config;
        let listener = match (config.admin, &control) {
            (Some(Listen::Off), _) => None,
            (None, None) => listen_if_free(ADMIN, "the admin address is off", "--admin").await,
            (asked, control) => {
                let address = match asked {
                    Some(Listen::At(address)) => address,
                    _ => ADMIN,
                };
                if AuthMode::at(&address) == AuthMode::TokenRequired && config.admin_tls.client_ca.is_none() {
                    needs_tokens(address, control.as_deref()).await?;
                }
                let listener = TcpListener::bind(address).await;
                Some(
                    listener
                        .with_context(|| format!("cannot listen on {address}; set --admin to another"))?,
                )
            }
        };
        let counters = match config.store {
            StoreChoice::Memory => CounterSharing::PerNode,
            StoreChoice::Redis(_) => CounterSharing::Shared,
        };
        let mut started = None;
        let rule_manager = control.as_ref().map(|control| {
            let files = || {
                start_rules(config).map(|start| {
                    started = Some((start.last_good, start.instead));
                    start.sources
                })
            };
            RuleManager::open(
                Arc::clone(control),
                config.rule_options(),
                config.rules_from,
                config.guardrails,
                counters,
                files,
            )
        });
        let settings = &config.admin_tls;
        let tls = settings.own.as_ref().map(|(certificate, key)| {
            let clients = settings.client_ca.clone().map_or(ClientAuth::None, ClientAuth::Optional);
            let (certificate, key) = (certificate.clone(), key.clone());
            ServerTls::new(&ServerTlsConfig { certificate, key, clients }, tollgate_admin::ALPN)
                .map_err(anyhow::Error::msg)
        });
        let tls = tls.transpose().context("--admin-tls-cert, --admin-tls-key, --admin-client-ca")?;
        let (rule_manager, snapshot, roles) =
            (rule_manager.transpose()?, config.snapshot.clone(), settings.roles.clone());
        let (denials, history_days) = (Arc::default(), config.history_days);
        let (rule_options, identity) = (config.rule_options(), config.identity.clone());
        Ok(Self {
            control,
            rule_manager,
            snapshot,
            history_days,
            denials,
            billing: None,
            listener,
            tls,
            roles,
            rule_options,
            identity,
            start: started,
        })
    }

    /// Adds the observers of the impact preview and the rollback guard, if rules can be published.
    pub(crate) fn observed(&self, limiter: Limiter<Store>) -> Limiter<Store> {
        match &self.rule_manager {
            Some(rule_manager) => {
                limiter.with_observer(rule_manager.sample()).with_observer(Arc::clone(&self.denials) as _)
            }
            None => limiter,
        }
    }

    /// Hands rule updates to the limiter. Call it before anything updates the rules.
    pub(crate) fn apply_updates(&self, limiter: &Arc<Limiter<Store>>, status: &Arc<ServerStatus>) {
        let Some(rule_manager) = &self.rule_manager else { return };
        let (own, counting) = (Arc::clone(limiter), Arc::clone(status));
        rule_manager.on_change(move |taken| match taken {
            Ok(rules) => {
                own.replace_rules(rules);
                counting.reloaded();
            }
            Err(error) => counting.record_failure(ReloadTarget::Rules, error),
        });
    }

    /// Lines of the start banner.
    pub(crate) fn banner(&self) -> Vec<String> {
        let Some(address) = self.listener.as_ref().and_then(|listener| listener.local_addr().ok()) else {
            return Vec::new();
        };
        let kept = self.control.as_ref().map_or("", |control| control.kind());
        let about = if kept.is_empty() {
            "metrics, decisions; --db for rules and quotas".to_owned()
        } else {
            format!("metrics, decisions, rules, quotas, audit; {kept}")
        };
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        // Uses an address that a browser on this machine can open.
        let mut page = address;
        match page.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => page.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => page.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        let missing =
            if tollgate_admin::has_dashboard() { "" } else { "  (not in this build; run `make run`)" };
        vec![format!("  admin {address}  ({about})"), format!("  dashboard: {scheme}://{page}/{missing}")]
    }

    /// Starts serving operators, and replicating the changes that they make on other nodes.
    pub(crate) fn start(
        self,
        (limiter, verifier): (Arc<Limiter<Store>>, Option<Arc<CredentialVerifier>>),
        status: &Arc<ServerStatus>,
        log: Arc<dyn LogLevels>,
        rule_files: Arc<RuleFiles>,
        drain: impl Future<Output = ()> + Send + 'static,
    ) -> anyhow::Result<RunningAdmin> {
        let (mut following, mut heartbeat) = (Vec::new(), None);
        let (mut recording, mut billing) = (None, None);
        if let (Some(control), Some(rule_manager)) = (&self.control, &self.rule_manager) {
            status.attach_control(Arc::clone(control), Arc::clone(rule_manager));
            let node = status.telemetry().map(|telemetry| telemetry.node_info().node.to_string());
            let node = node.unwrap_or_default();
            if let Some(server) = self.billing {
                billing = Some(server.start(control)?);
                status.attach_billing(server);
            }
            let observer = Arc::clone(status);
            control.on_change(move |what| observer.on_change(what));
            let present = Arc::clone(status);
            let (end, ended) = oneshot::channel();
            let run = Arc::clone(control).run_heartbeat(move || present.presence(), async {
                let _ = ended.await;
            });
            heartbeat = Some((end, tokio::spawn(run)));
            following.push(tokio::spawn(Arc::clone(control).run_sync(SyncConfig::default())));
            if let (Some(telemetry), true) = (status.telemetry(), self.history_days > 0) {
                let (end, ended) = oneshot::channel();
                let (control, telemetry) = (Arc::clone(control), Arc::clone(telemetry));
                let record = history::record(control, telemetry, self.history_days, async {
                    let _ = ended.await;
                });
                recording = Some((end, tokio::spawn(record)));
            }
            if let Some(file) = self.snapshot {
                following.push(tokio::spawn(Arc::clone(control).run_snapshots(file)));
            }
            let hot = super::leases::exchange_hot(Arc::clone(&limiter), Arc::clone(control));
            following.push(tokio::spawn(hot));
            following.push(tokio::spawn(super::overload::audit_steps(&limiter, Arc::clone(control), node)));
            following.push(tokio::spawn(Arc::clone(rule_manager).run()));
            following.push(tokio::spawn(Arc::clone(rule_manager).guard(self.denials)));
        }
        let Some(listener) = self.listener else {
            return Ok(RunningAdmin {
                sync: following,
                serving: None,
                heartbeat,
                history: recording,
                billing,
            });
        };
        // With client certificates configured, every operator must authenticate, also on loopback.
        let auth_mode = if self.roles.is_empty() {
            AuthMode::at(&listener.local_addr()?)
        } else {
            AuthMode::TokenRequired
        };
        let usage = Arc::clone(&limiter) as Arc<dyn UsageReader>;
        // For addresses alone.
        let addresses =
            IdentityConfig { jwt: None, api_key: ApiKeyConfig::default(), ..self.identity.clone() };
        let resolver = IdentityResolver::new(&addresses).context("`identity`")?;
        let explainer = Arc::new(RequestExplainer {
            limiter: Arc::clone(&limiter),
            // A draft may be of one domain only.
            options: Options { required_domains: RequiredDomains::default(), ..self.rule_options },
            identity: self.identity,
            verifier,
        }) as Arc<dyn Explainer>;
        let overload = {
            let limiter = Arc::clone(&limiter);
            Box::new(move || OverloadReport::new(&limiter))
        };
        let rules = Box::new(move || limiter.rules());
        let admin = AdminState {
            control: self.control,
            rule_manager: self.rule_manager,
            rules,
            rule_files,
            usage,
            address_attribute: Box::new(move |address| resolver.address_attribute(address)),
            explainer,
            overload,
            status: Arc::clone(status) as _,
            log,
            auth_mode,
            roles: self.roles,
            sessions: Sessions::default(),
            throttle: FailedAuthThrottle::default(),
            nodes: NodeCache::default(),
            dumps: DumpSlots::default(),
            history_days: self.history_days,
        };
        let slots = open_files::budget().port(tollgate_admin::port_limits(open_files::guaranteed()));
        let serving = Some(tokio::spawn(tollgate_admin::serve(listener, self.tls, admin, slots, drain)));
        Ok(RunningAdmin { sync: following, serving, heartbeat, history: recording, billing })
    }
}

/// Returns the lookup of API keys that have a quota.
fn quota_keys(control: &Arc<ControlPlane>) -> QuotaKeys {
    let (control, table) = (Arc::clone(control), control.quota_table());
    QuotaKeys::new(move |key| match table.has_key(key) {
        true => Some(true),
        false => control.table_generation().map(|_| false),
    })
}

/// Explains requests with what this process decides them by.
struct RequestExplainer {
    limiter: Arc<Limiter<Store>>,
    options: Options,
    identity: IdentityConfig,
    verifier: Option<Arc<CredentialVerifier>>,
}

impl Explainer for RequestExplainer {
    fn explain<'a>(&'a self, of: &'a ExplainQuery, draft: Option<&'a Arc<Ruleset>>) -> ExplainFuture<'a> {
        of.explain(&self.limiter, draft)
    }

    fn options(&self) -> Options {
        self.options.clone()
    }

    fn identify(
        &self,
        rules: &Ruleset,
        domain: Option<&str>,
        head: &[u8],
    ) -> Result<(Vec<(String, String)>, IpAddr), Problem> {
        let domain = match domain {
            Some(name) => rules.domain(name),
            None => rules.domains().next(),
        };
        let caller = http::identify_head(
            &self.identity,
            self.verifier.as_ref(),
            domain,
            head,
            SystemClock::new().now(),
        )?;
        Ok((caller.attributes, caller.address))
    }
}

/// Returns an error if no token exists: on an address other than loopback every operator needs one.
async fn needs_tokens(address: SocketAddr, control: Option<&ControlPlane>) -> anyhow::Result<()> {
    // The database is unavailable: its tokens cannot be checked, and no operator is admitted without one.
    if control.is_some_and(ControlPlane::is_restored) {
        return Ok(());
    }
    let Some(control) = control else {
        anyhow::bail!(
            "--admin {address}: an address other than loopback requires tokens, which are stored in a database; \
             set --db, or listen on 127.0.0.1"
        );
    };
    if !control.has_tokens().await.context("--db")? {
        anyhow::bail!(
            "--admin {address}: an address other than loopback requires tokens, and the database has none; create \
             one with `tollgate token create --db …`, or listen on 127.0.0.1"
        );
    }
    Ok(())
}

impl RunningAdmin {
    /// Waits for the requests in flight, then stops the background tasks.
    pub(crate) async fn shutdown(self) {
        if let Some(serving) = self.serving {
            let _ = serving.await;
        }
        if let Some(billing) = self.billing {
            billing.shutdown().await;
        }
        self.sync.iter().for_each(JoinHandle::abort);
        for (end, task) in [self.history, self.heartbeat].into_iter().flatten() {
            drop(end);
            let _ = task.await;
        }
    }
}

/// Opens the database and loads the quotas. If that takes long, loading continues while traffic is served: until all
/// are loaded, requests are decided with those present, and the node is not ready.
async fn connect(db: &str, snapshot: Option<&Path>) -> anyhow::Result<Arc<ControlPlane>> {
    let (control, restored) =
        ControlPlane::connect_or_restore(db, Arc::new(SystemClock::new()), snapshot).await?;
    if restored {
        return Ok(control);
    }
    let reading = Arc::clone(&control);
    let reading = tokio::spawn(async move { reading.catch_up().await });
    match tokio::time::timeout(BEFORE_TRAFFIC, reading).await {
        Ok(read) => {
            read??;
        }
        Err(_) => tracing::info!("loading quotas continues; the node is not ready until all are loaded"),
    }
    Ok(control)
}

/// Returns the control plane's part of `/readyz?verbose`.
pub(crate) fn details(control: &ControlPlane) -> Value {
    json!({
        "database": control.kind(),
        "revision": control.revision(),
        "quotas": control.quota_table().len(),
        "loaded": control.is_loaded(),
        "from_snapshot": control.is_restored(),
        "age_ms": control.staleness_millis(),
        "propagation_ms": control.lag().last_millis(),
    })
}

/// Writes the control plane's part of `/metrics`.
pub(crate) fn metrics(control: &ControlPlane, rule_manager: &RuleManager, page: &mut MetricsWriter) {
    let help = "Number of automatic rollbacks of published rules by this node.";
    page.counter("ratelimit_rules_rollbacks_total", help, rule_manager.rollbacks());
    let help = "Number of quotas on this node.";
    page.gauge("ratelimit_quotas", help, control.quota_table().len());
    let help = "Control revision that is active on this node.";
    page.gauge("ratelimit_control_revision", help, control.revision());
    let help = "Staleness of the control-plane state on this node, in seconds.";
    page.gauge("ratelimit_control_age_seconds", help, control.staleness_millis() as f64 / 1_000.0);
    let lag = control.lag();
    let (mut bounds, mut counts, mut below) = (Vec::new(), Vec::new(), 0);
    for (end, upto) in lag.cumulative() {
        bounds.push(end as f64 / 1_000.0);
        counts.push(upto.saturating_sub(below));
        below = upto;
    }
    counts.push(lag.count().saturating_sub(below));
    let help = "Seconds from an operator's change to the moment it takes effect on this node.";
    let sum = lag.sum_millis() as f64 / 1_000.0;
    page.histograms("ratelimit_propagation_seconds", help).histogram(&[], &bounds, &counts, sum);
}
