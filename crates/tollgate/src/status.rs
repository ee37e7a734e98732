//! What the process tells about itself: readiness, the rules it runs, the last change that was refused, its figures.

use crate::build::Store;
use crate::config::Config;
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tollgate_engine::Limiter;
use tollgate_front::Status;

pub(crate) struct ServerStatus {
    limiter: Arc<Limiter<Store>>,
    draining: AtomicBool,
    paths: Vec<String>,
    refused: Mutex<Option<String>>,
    reloads: AtomicU64,
    refusals: AtomicU64,
}

impl ServerStatus {
    pub(crate) fn new(limiter: Arc<Limiter<Store>>, config: &Config) -> Self {
        Self {
            limiter,
            draining: AtomicBool::new(false),
            paths: config.rules.iter().map(|path| path.display().to_string()).collect(),
            refused: Mutex::new(None),
            reloads: AtomicU64::new(0),
            refusals: AtomicU64::new(0),
        }
    }

    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// New rules act.
    pub(crate) fn reloaded(&self) {
        self.reloads.fetch_add(1, Ordering::Relaxed);
        self.set_refused(None);
    }

    /// A change was refused; what was good before still acts.
    pub(crate) fn refused(&self, error: String) {
        self.refusals.fetch_add(1, Ordering::Relaxed);
        self.set_refused(Some(error));
    }

    /// The files say again what already acts.
    pub(crate) fn set_refused(&self, error: Option<String>) {
        *self.refused.lock().unwrap_or_else(PoisonError::into_inner) = error;
    }
}

impl Status for ServerStatus {
    fn is_ready(&self) -> bool {
        !self.draining.load(Ordering::Relaxed)
    }

    fn details(&self) -> Value {
        let rules = self.limiter.rules();
        let refused = self.refused.lock().unwrap_or_else(PoisonError::into_inner).clone();
        json!({
            "draining": self.draining.load(Ordering::Relaxed),
            "rules": {
                "revision": rules.revision(),
                "domains": rules.domains().map(tollgate_rules::Domain::name).collect::<Vec<_>>(),
                "count": rules.rules().len(),
                "paths": self.paths,
                "error": refused,
            },
            "store": {"kind": "memory"},
        })
    }

    fn metrics(&self) -> String {
        let mut text = String::new();
        let figures = self.limiter.store().figures();
        let mut metric = |name: &str, kind: &str, help: &str, value: u64| {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}");
        };
        let gauges = [
            ("ratelimit_memory_cap_bytes", "The most bytes that counters can take.", figures.bytes_cap),
            ("ratelimit_memory_slots", "Slots of the counter table.", figures.slots),
            ("ratelimit_memory_live_slots", "Slots with a live counter, estimated.", figures.live),
            ("ratelimit_memory_aside_counters", "Counters too wide for a slot.", figures.aside),
            ("ratelimit_memory_aside_bytes", "Bytes that those take.", figures.aside_bytes),
        ];
        for (name, help, value) in gauges {
            metric(name, "gauge", help, value);
        }
        let counters = [
            ("ratelimit_memory_inserted_total", "Keys that got a slot.", figures.inserted),
            ("ratelimit_memory_reused_total", "Of these, in a slot that had expired.", figures.reused),
            (
                "ratelimit_memory_evicted_total",
                "Of these, in the slot of a live key that had used less than half of its limit.",
                figures.evicted,
            ),
            (
                "ratelimit_memory_overflow_charges_total",
                "Charges on a counter shared by newcomers, for want of a slot.",
                figures.overflowed,
            ),
            (
                "ratelimit_memory_overflow_evicted_total",
                "Shared counters given up for others.",
                figures.overflow_evicted,
            ),
            ("ratelimit_memory_aside_evicted_total", "Wide counters given up.", figures.aside_evicted),
            (
                "ratelimit_memory_aside_overflow_charges_total",
                "Wide charges on a shared counter.",
                figures.aside_overflowed,
            ),
            (
                "ratelimit_memory_aside_refused_total",
                "Wide charges denied for want of memory.",
                figures.aside_refused,
            ),
        ];
        for (name, help, value) in counters {
            metric(name, "counter", help, value);
        }
        let reloads = self.reloads.load(Ordering::Relaxed);
        metric("ratelimit_rule_reloads_total", "counter", "Rule changes that were taken.", reloads);
        let refusals = self.refusals.load(Ordering::Relaxed);
        metric("ratelimit_rule_refusals_total", "counter", "Rule changes that were refused.", refusals);
        text
    }
}
