//! What the process tells about itself: readiness, the rules it runs, the last change that was refused, its figures.

use crate::config::Config;
use crate::operators;
use crate::store::{Store, label, metric};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tollgate_control::{Acting, Control, Desk};
use tollgate_engine::Limiter;
use tollgate_front::Status;

pub(crate) struct ServerStatus {
    limiter: Arc<Limiter<Store>>,
    draining: AtomicBool,
    paths: Vec<String>,
    refused: Mutex<BTreeMap<Part, String>>,
    reloads: AtomicU64,
    refusals: AtomicU64,
    /// Figures of whatever else runs in the process.
    more: std::sync::OnceLock<Figures>,
    /// What operators decide, where that is kept.
    control: std::sync::OnceLock<(Arc<Control>, Arc<Desk>)>,
}

/// What can be changed while the process runs, each on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    Rules,
    /// What tokens are verified by.
    Keys,
    /// The gateway's part of the file of `--config`.
    Settings,
}

type Figures = Box<dyn Fn(&mut String) + Send + Sync>;

impl ServerStatus {
    pub(crate) fn new(limiter: Arc<Limiter<Store>>, config: &Config) -> Self {
        Self {
            limiter,
            draining: AtomicBool::new(false),
            paths: config.rules.iter().map(|path| path.display().to_string()).collect(),
            refused: Mutex::default(),
            reloads: AtomicU64::new(0),
            refusals: AtomicU64::new(0),
            more: std::sync::OnceLock::new(),
            control: std::sync::OnceLock::new(),
        }
    }

    /// Adds figures to those that are told already.
    pub(crate) fn tell_also(&self, figures: impl Fn(&mut String) + Send + Sync + 'static) {
        let _ = self.more.set(Box::new(figures));
    }

    /// Tells of what operators decide, too.
    pub(crate) fn tell_of(&self, control: Arc<Control>, desk: Arc<Desk>) {
        let _ = self.control.set((control, desk));
    }

    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// New rules act.
    pub(crate) fn reloaded(&self) {
        self.reloads.fetch_add(1, Ordering::Relaxed);
        self.accepted(Part::Rules);
    }

    /// A change was refused; what was good before still acts.
    pub(crate) fn refused(&self, part: Part, error: String) {
        if part == Part::Rules {
            self.refusals.fetch_add(1, Ordering::Relaxed);
        }
        self.all_refused().insert(part, error);
    }

    /// What is on disk is what acts.
    pub(crate) fn accepted(&self, part: Part) {
        self.all_refused().remove(&part);
    }

    fn all_refused(&self) -> MutexGuard<'_, BTreeMap<Part, String>> {
        self.refused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Status for ServerStatus {
    fn is_ready(&self) -> bool {
        let known = self.control.get().is_none_or(|(control, _)| control.is_loaded());
        known && !self.draining.load(Ordering::Relaxed)
    }

    fn details(&self) -> Value {
        let rules = self.limiter.rules();
        let acting = self.control.get().map(|(_, desk)| desk.acting());
        let refused = self.all_refused().clone();
        json!({
            "draining": self.draining.load(Ordering::Relaxed),
            "rules": {
                "revision": rules.revision(),
                "domains": rules.domains().map(tollgate_rules::Domain::name).collect::<Vec<_>>(),
                "count": rules.rules().len(),
                "paths": self.paths,
                "source": acting.as_deref().map_or("files", Acting::source),
                "rev": acting.as_deref().and_then(Acting::rev),
                "guard": self.control.get().map(|(_, desk)| desk.guarding()),
                "error": refused.get(&Part::Rules),
            },
            "keys": {"error": refused.get(&Part::Keys)},
            "settings": {"error": refused.get(&Part::Settings)},
            "store": self.limiter.store().details(),
            "control": self.control.get().map(|(control, _)| operators::details(control)),
        })
    }

    fn hot(&self) -> Value {
        match self.limiter.store().leases() {
            Some(leases) => crate::leases::hot(leases),
            None => json!({"hot": [], "threshold_per_second": null}),
        }
    }

    fn metrics(&self) -> String {
        let mut text = String::new();
        self.limiter.store().metrics(&mut text);
        let name = "ratelimit_fallback_decisions_total";
        let help = "Decisions made without the store, by rule and by what decided instead.";
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
        for (rule, origin, count) in self.limiter.fallbacks() {
            let _ = writeln!(text, "{name}{{rule=\"{}\",origin=\"{origin}\"}} {count}", label(&rule));
        }
        let reloads = self.reloads.load(Ordering::Relaxed);
        metric(
            &mut text,
            "ratelimit_rule_reloads_total",
            "counter",
            "Rule changes that were taken.",
            reloads,
        );
        let refusals = self.refusals.load(Ordering::Relaxed);
        metric(
            &mut text,
            "ratelimit_rule_refusals_total",
            "counter",
            "Rule changes that were refused.",
            refusals,
        );
        if let Some((control, desk)) = self.control.get() {
            operators::metrics(control, desk, &mut text);
        }
        if let Some(more) = self.more.get() {
            more(&mut text);
        }
        text
    }
}
