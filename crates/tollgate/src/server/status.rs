//! Process status: readiness, active rules, last failed reload, metrics and node details.

use crate::config::Config;
use crate::config::last_good::InsteadOfFiles;
use crate::config::rule_files::RuleFiles;
use crate::ratelimit::ServiceHealth;
use crate::server::admin;
use crate::server::billing::BillingServer;
use crate::server::durable;
use crate::server::learn;
use crate::server::logging;
use crate::server::open_files;
use crate::server::store::Store;
use crate::xds::XdsStatus;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;
use tollgate_admin::{RuleDrift, RuleFilesControl};
use tollgate_control::{ActiveRules, ChangeEvent, ControlPlane, RuleManager};
use tollgate_core::{Clock, SystemClock, Timestamp};
use tollgate_engine::{Limiter, Origin};
use tollgate_observe::{MetricsWriter, ProcessStatus, Telemetry, rfc3339};
use tollgate_server::http::ForwardDomain;

/// Maximum time that shutdown waits for the last decisions to be written.
pub(crate) const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) struct ServerStatus {
    limiter: Arc<Limiter<Store>>,
    telemetry: Arc<Telemetry>,
    clock: SystemClock,
    started: Timestamp,
    /// Time at which the active rules took effect, in microseconds.
    rules_since: AtomicU64,
    draining: AtomicBool,
    paths: Vec<String>,
    failures: Mutex<BTreeMap<ReloadTarget, String>>,
    reloads: AtomicU64,
    failure_count: AtomicU64,
    /// 1 if the rules could be used at the start.
    loads_at_start: AtomicU64,
    /// Why the last good copy is active instead of the rule files, since the start.
    instead_of_files: Mutex<Option<InsteadOfFiles>>,
    /// Metrics of other components of the process, such as the gateway.
    more: Mutex<Vec<MetricsSource>>,
    /// Control plane and rule manager, with a database.
    control: std::sync::OnceLock<(Arc<ControlPlane>, Arc<RuleManager>)>,
    /// The domain of `/check`, unless this process is in the place of envoyproxy/ratelimit.
    forward_domain: std::sync::OnceLock<Arc<ForwardDomain>>,
    /// The rule files, for their differences from published rules.
    rule_files: std::sync::OnceLock<Weak<RuleFiles>>,
    /// Billing, with a database.
    billing: std::sync::OnceLock<BillingServer>,
    /// Health as envoyproxy/ratelimit has it, in its place.
    service: Option<ServiceHealth>,
    /// Whether rules have been loaded since the start, be they none.
    has_rules: AtomicBool,
    /// The xDS stream, if rules come from one.
    xds: Option<Arc<XdsStatus>>,
    /// Whether a Prometheus is asked for signals.
    has_prometheus: bool,
    /// What this node announces of its cell, if it has one.
    cell: Option<Value>,
    /// Name of the record that this node's durable counters have in the database.
    durable_record: String,
}

/// Parts of the configuration that are reloaded independently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ReloadTarget {
    /// Rule files, or published rules.
    Rules,
    /// Rules from xDS.
    Xds,
    /// Keys that verify JWTs, and the list of known API keys.
    Keys,
    /// The `gateway` part of the file of `--config`.
    Settings,
    /// The `stores` of that file.
    Stores,
}

type MetricsSource = Box<dyn Fn(&mut MetricsWriter) + Send + Sync>;

impl ServerStatus {
    pub(crate) fn new(limiter: Arc<Limiter<Store>>, observe: Arc<Telemetry>, config: &Config) -> Self {
        let clock = SystemClock::new();
        // Rules of files decide until those of xDS come.
        let has_rules = config.xds.is_none() || limiter.rules().domains().next().is_some();
        Self {
            limiter,
            telemetry: observe,
            started: clock.now(),
            rules_since: AtomicU64::new(clock.now().as_micros()),
            clock,
            draining: AtomicBool::new(false),
            paths: config.rules.iter().map(|path| path.display().to_string()).collect(),
            failures: Mutex::default(),
            reloads: AtomicU64::new(0),
            failure_count: AtomicU64::new(0),
            loads_at_start: AtomicU64::new(u64::from(config.xds.is_none())),
            instead_of_files: Mutex::default(),
            more: Mutex::default(),
            control: std::sync::OnceLock::new(),
            forward_domain: std::sync::OnceLock::new(),
            rule_files: std::sync::OnceLock::new(),
            billing: std::sync::OnceLock::new(),
            service: config.service.as_ref().map(|service| ServiceHealth::new(service.health)),
            has_rules: AtomicBool::new(has_rules),
            xds: config.xds.as_ref().map(XdsStatus::new),
            has_prometheus: config.prometheus.is_some(),
            cell: config.cells.as_ref().map(learn::announcement),
            durable_record: durable::cell_name(config),
        }
    }

    /// Returns the health as envoyproxy/ratelimit has it, in its place.
    pub(crate) const fn service(&self) -> Option<&ServiceHealth> {
        self.service.as_ref()
    }

    /// Returns whether rules have been loaded since the start, be they none.
    pub(crate) fn has_rules(&self) -> bool {
        self.has_rules.load(Ordering::Relaxed)
    }

    /// Returns how often rules were loaded and refused, the start included.
    pub(crate) fn rule_loads(&self) -> (u64, u64) {
        let reloads = self.reloads.load(Ordering::Relaxed);
        (reloads + self.loads_at_start.load(Ordering::Relaxed), self.failure_count.load(Ordering::Relaxed))
    }

    /// Returns the number of open connections to the store.
    pub(crate) fn store_connections(&self) -> u64 {
        self.limiter.store().connections()
    }

    /// Returns the state of the xDS stream, if rules come from one.
    pub(crate) fn xds(&self) -> Option<&Arc<XdsStatus>> {
        self.xds.as_ref()
    }

    /// Adds the domain by which `/check` decides, which stays the same when others are added.
    pub(crate) fn watch_forward_domain(&self, domain: Arc<ForwardDomain>) {
        let _ = self.forward_domain.set(domain);
    }

    /// Adds a source of metrics.
    pub(crate) fn add_metrics(&self, write: impl Fn(&mut MetricsWriter) + Send + Sync + 'static) {
        self.more.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(write));
    }

    /// Adds the control plane to status and metrics.
    pub(crate) fn attach_control(&self, control: Arc<ControlPlane>, rule_manager: Arc<RuleManager>) {
        let _ = self.control.set((control, rule_manager));
    }

    /// Adds the rule files, which report to this status.
    pub(crate) fn attach_rule_files(&self, rule_files: &Arc<RuleFiles>) {
        let _ = self.rule_files.set(Arc::downgrade(rule_files));
    }

    /// Returns how the rule files differ from published rules.
    fn drift(&self) -> Option<RuleDrift> {
        self.rule_files.get()?.upgrade()?.drift()
    }

    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        // Subscribers of the event stream would otherwise never disconnect.
        self.telemetry.close();
    }

    /// Writes the last decisions to the decision log. Call it when no more decisions are made.
    pub(crate) async fn shutdown(&self) {
        let observe = Arc::clone(&self.telemetry);
        let lost = tokio::task::spawn_blocking(move || observe.flush(SHUTDOWN_TIMEOUT)).await;
        if let Ok(lost @ 1..) = lost {
            tracing::warn!(lost, "decision log entries lost at shutdown");
        }
    }

    fn rules_age_millis(&self) -> u64 {
        let since = Timestamp::from_micros(self.rules_since.load(Ordering::Relaxed));
        self.clock.now().since(since).as_micros() / 1_000
    }

    /// Adds the metrics of billing.
    pub(crate) fn attach_billing(&self, billing: BillingServer) {
        let _ = self.billing.set(billing);
    }

    /// Logs a warning if rules are to be billed and there is nowhere to record it.
    pub(crate) fn warn_without_database(&self, has_db: bool) {
        if !has_db && self.limiter.rules().has_billing() {
            tracing::warn!("rules have `billing: true`, but no consumption is recorded; set --db");
        }
        if !has_db && let Some(rule) = self.limiter.rules().durable_rule() {
            tracing::warn!(rule, "rules have `durable: true`, but consumption survives no restart; set --db");
        }
    }

    /// Logs a warning if rules ask for signals and there is no Prometheus.
    pub(crate) fn warn_without_prometheus(&self) {
        if let Some(query) = self.limiter.signal_queries().first().filter(|_| !self.has_prometheus) {
            let (domain, signal) = (&query.domain, &query.signal);
            tracing::warn!(
                domain,
                signal,
                "rules query a signal, but nobody is asked for it; set --prometheus"
            );
        }
    }

    /// Records that new rules took effect.
    pub(crate) fn reloaded(&self) {
        if let Some(domain) = self.forward_domain.get() {
            domain.follow(&self.limiter.rules());
        }
        self.warn_without_database(self.control.get().is_some());
        self.warn_without_prometheus();
        self.reloads.fetch_add(1, Ordering::Relaxed);
        self.rules_since.store(self.clock.now().as_micros(), Ordering::Relaxed);
        self.telemetry.broadcast("rules", &json!({"revision": self.limiter.rules().revision()}));
        // Files that are broken no longer matter then.
        if self.control.get().is_some_and(|(_, rule_manager)| rule_manager.active().published.is_some()) {
            self.record_success(ReloadTarget::Rules);
        }
    }

    /// Broadcasts that operators' state has changed, on this or another node, so that dashboards refresh. The event has
    /// only the kind and the control revision: reading the change itself requires authorization.
    pub(crate) fn on_change(&self, event: ChangeEvent) {
        let Some((control, _)) = self.control.get() else { return };
        let kind = match event {
            ChangeEvent::Quotas => "quota",
            ChangeEvent::Emergencies => "emergency",
            ChangeEvent::Rules => "rules",
        };
        self.telemetry.broadcast(kind, &json!({"revision": control.revision()}));
    }

    /// Records a failed reload; the previous state remains active.
    pub(crate) fn record_failure(&self, part: ReloadTarget, error: String) {
        if matches!(part, ReloadTarget::Rules | ReloadTarget::Xds) {
            self.failure_count.fetch_add(1, Ordering::Relaxed);
        }
        self.all_failures().insert(part, error);
    }

    /// Records that the last good copy of the rule files is active since the start, and why.
    pub(crate) fn start_with_last_good(&self, instead: InsteadOfFiles) {
        self.record_failure(ReloadTarget::Rules, instead.error());
        self.loads_at_start.store(0, Ordering::Relaxed);
        self.has_rules.store(!matches!(instead, InsteadOfFiles::NoRules(_)), Ordering::Relaxed);
        *self.instead() = Some(instead);
    }

    /// Returns why the last good copy is active instead of the rule files; `None` if it is not.
    pub(crate) fn instead_of_files(&self) -> Option<InsteadOfFiles> {
        self.instead().clone()
    }

    fn instead(&self) -> MutexGuard<'_, Option<InsteadOfFiles>> {
        self.instead_of_files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the state on disk is active. Returns whether it was not before.
    pub(crate) fn record_success(&self, part: ReloadTarget) -> bool {
        if part == ReloadTarget::Rules {
            *self.instead() = None;
        }
        if matches!(part, ReloadTarget::Rules | ReloadTarget::Xds) {
            self.has_rules.store(true, Ordering::Relaxed);
        }
        self.all_failures().remove(&part).is_some()
    }

    fn all_failures(&self) -> MutexGuard<'_, BTreeMap<ReloadTarget, String>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProcessStatus for ServerStatus {
    fn is_ready(&self) -> bool {
        let known = self.control.get().is_none_or(|(control, _)| control.is_loaded());
        let is_healthy = self.service.as_ref().is_none_or(|health| {
            let has_domain = self.limiter.rules().domains().next().is_some();
            health.is_healthy(has_domain, self.limiter.store().is_any_store_down())
        });
        let is_cell = !self.limiter.store().is_displaced();
        known && is_healthy && is_cell && !self.draining.load(Ordering::Relaxed)
    }

    fn details(&self) -> Value {
        let rules = self.limiter.rules();
        let active = self.control.get().map(|(_, rule_manager)| rule_manager.active());
        let refused = self.all_failures().clone();
        json!({
            "draining": self.draining.load(Ordering::Relaxed),
            "rules": {
                "revision": rules.revision(),
                "domains": rules.domains().map(tollgate_rules::Domain::name).collect::<Vec<_>>(),
                "count": rules.rule_count(),
                "paths": self.paths,
                "source": active.as_deref().map_or(if self.xds.is_some() { "xds" } else { "files" }, ActiveRules::source),
                "rev": active.as_deref().and_then(ActiveRules::rev),
                "guard": self.control.get().map(|(_, rule_manager)| rule_manager.guard_state()),
                "error": refused.get(&ReloadTarget::Rules).or(refused.get(&ReloadTarget::Xds)),
                "last_good": self.instead().is_some(),
                "drift": self.drift().map(|drift| json!({
                    "rev": drift.rev,
                    "files_revision": drift.files_revision,
                    "error": drift.error,
                    "changed_rules": drift.diff.len(),
                })),
            },
            "forward_auth": self.forward_domain.get().map(|domain| domain.details(&rules)),
            "keys": {"error": refused.get(&ReloadTarget::Keys)},
            "settings": {"error": refused.get(&ReloadTarget::Settings).or(refused.get(&ReloadTarget::Stores))},
            "open_files": open_files::details(),
            "store": self.limiter.store().details(),
            "control": self.control.get().map(|(control, _)| admin::details(control)),
            "xds": self.xds.as_ref().map(|xds| xds.details()),
        })
    }

    fn hot(&self) -> Value {
        match self.limiter.store().leases() {
            Some(leases) => crate::server::leases::hot(leases, &self.telemetry),
            None => json!({"hot": [], "threshold_per_second": null}),
        }
    }

    fn metrics(&self, page: &mut MetricsWriter) {
        self.telemetry.write(page);
        self.limiter.store().metrics(page);
        let fallbacks = self.limiter.fallback_counts();
        let help = "Number of decisions made without the store, by rule and origin.";
        let mut family = page.counters("ratelimit_fallback_decisions_total", help);
        for (rule, origin, count) in &fallbacks {
            family.add(&[("rule", rule), ("origin", origin)], count);
        }
        let help = "Number of nodes that share the store, by their heartbeats there; 0 if unknown.";
        page.gauge("ratelimit_nodes", help, self.limiter.live_nodes());
        let help = "Number of requests that failed open because the store was unavailable, by rule.";
        let mut family = page.counters("ratelimit_failopen_total", help);
        for (rule, _, count) in fallbacks.iter().filter(|(_, origin, _)| *origin == Origin::FailOpen.name()) {
            family.add(&[("rule", rule)], count);
        }
        let help =
            "Number of panics while deciding; each is a bug, and its request was decided by its fail policy.";
        page.counter("ratelimit_panics_total", help, self.limiter.panics());
        let help = "Number of concurrency permits held on this node, by rule.";
        let mut family = page.gauges("ratelimit_concurrency_in_flight", help);
        for (rule, count) in self.limiter.in_flight() {
            family.add(&[("rule", &rule)], count);
        }
        let releases = self.limiter.release_stats();
        let help = "Number of releases of permits that failed and are tried again.";
        page.gauge("ratelimit_permit_releases_pending", help, releases.pending);
        let help = "Number of releases of permits that failed at first, by result: released later, or lost because the permit had expired.";
        let mut family = page.counters("ratelimit_permit_releases_retried_total", help);
        family.add(&[("result", "released")], releases.retried);
        family.add(&[("result", "lost")], releases.lost);
        crate::server::overload::metrics(&self.limiter.upstream_states(), page);
        let fleets = self.limiter.fleet_states();
        crate::server::overload::fleet_metrics(&self.limiter.fleet_sheds(), &fleets, page);
        crate::server::overload::signal_metrics(&self.limiter.adaptations(), page);
        if let Some(load) = self.limiter.check_load() {
            crate::server::overload::check_metrics(&load, page);
        }
        let mut family = page.gauges(
            "ratelimit_overload_adapted_percent",
            "Percent of a tier's limits that apply, where limits follow signals; 100 if they are as in the rules.",
        );
        let tiers = self.limiter.adapted_tiers();
        for tier in &tiers {
            let labels = [("domain", tier.domain.as_str()), ("tier", tier.tier.as_str())];
            family.add(&labels, tier.percent());
        }
        let mut family = page.gauges(
            "ratelimit_overload_adapted_shadow_percent",
            "Percent of a tier's limits that would apply but for `shadow: true` or an emergency measure that restores them.",
        );
        for (tier, percent) in tiers.iter().filter_map(|tier| tier.shadow_percent().map(|own| (tier, own))) {
            family.add(&[("domain", tier.domain.as_str()), ("tier", tier.tier.as_str())], percent);
        }
        let reloads = self.reloads.load(Ordering::Relaxed);
        page.counter("ratelimit_rule_reloads_total", "Number of successful rule reloads.", reloads);
        let refusals = self.failure_count.load(Ordering::Relaxed);
        page.counter("ratelimit_rule_reload_failures_total", "Number of failed rule reloads.", refusals);
        let help = "1 if the last good copy of the rule files is active, because they were broken or not confirmed at the start.";
        page.gauge("ratelimit_rules_last_good", help, u64::from(self.instead().is_some()));
        let help = "1 if the rule files of the node differ from the published rules, which are active in their place.";
        page.gauge("ratelimit_rules_drift", help, u64::from(self.drift().is_some()));
        let rules = self.limiter.rules();
        page.gauges("ratelimit_rules_info", "Rules hash of the active rules.")
            .add(&[("revision", rules.revision())], 1);
        page.gauge("ratelimit_rules", "Number of active rules.", rules.rule_count());
        let help = "Seconds since the active rules took effect.";
        page.gauge("ratelimit_rules_age_seconds", help, self.rules_age_millis() as f64 / 1_000.0);
        let help = "Number of log messages dropped because standard error was not read.";
        page.counter("ratelimit_log_messages_dropped_total", help, logging::dropped_messages());
        if let Some((control, rule_manager)) = self.control.get() {
            admin::metrics(control, rule_manager, page);
        }
        if let Some(billing) = self.billing.get() {
            billing.metrics(page);
        }
        if let Some(xds) = &self.xds {
            xds.metrics(page);
        }
        for more in self.more.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            more(page);
        }
    }

    fn telemetry(&self) -> Option<&Arc<Telemetry>> {
        Some(&self.telemetry)
    }

    fn node(&self) -> Value {
        let store = self.limiter.store();
        let control = self.control.get().map(|(control, _)| control);
        json!({
            "rules_revision": self.limiter.rules().revision(),
            "rules_age_ms": self.rules_age_millis(),
            "rules_error": self.all_failures().get(&ReloadTarget::Rules),
            "rules_last_good": self.instead().is_some(),
            "control_age_ms": control.map(|control| control.staleness_millis()),
            "propagation_lag_ms": control.and_then(|control| took(control)),
            "store": store.kind(),
            "breakers": store.breakers(),
            "leases": store.leases().map(|leases| crate::server::leases::stats_json(&leases.stats())),
            "cells": store.cells(),
            "overload": crate::server::overload::states_json(&self.limiter.upstream_states()),
            "concurrency": self.limiter.in_flight().into_iter().map(|(rule, count)| json!({"rule": rule, "in_flight": count})).collect::<Vec<_>>(),
            "draining": self.draining.load(Ordering::Relaxed),
        })
    }

    fn presence(&self) -> Value {
        let (store, place) = (self.limiter.store(), self.telemetry.node_info());
        let mut breakers = BTreeMap::<String, u64>::new();
        for breaker in store.breakers() {
            *breakers.entry(breaker["state"].as_str().unwrap_or_default().to_owned()).or_default() += 1;
        }
        let control = self.control.get();
        json!({
            "name": place.node,
            "region": place.region,
            "version": env!("CARGO_PKG_VERSION"),
            "started_at": rfc3339(self.started),
            "revision": control.map(|(control, _)| control.revision()),
            "rules_revision": self.limiter.rules().revision(),
            "rules_rev": control.and_then(|(_, rule_manager)| rule_manager.active().rev()),
            "control_age_ms": control.map(|(control, _)| control.staleness_millis()),
            "lag_ms": control.and_then(|(control, _)| took(control)),
            "store": store.kind(),
            "breakers": breakers,
            "draining": self.draining.load(Ordering::Relaxed),
            (learn::CELL): self.cell,
            (durable::RECORD): self.durable_record,
        })
    }
}

/// Returns the propagation time of the last change to this node, in milliseconds; `None` without one since the start.
fn took(control: &ControlPlane) -> Option<i64> {
    (control.lag().count() > 0).then(|| control.lag().last_millis())
}
