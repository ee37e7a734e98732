//! Soft limits are seen: in metrics by rule, in the log, in the stats; and callers that are about to be denied.

use std::sync::Arc;
use tollgate_core::SystemClock;
use tollgate_engine::{Check, Limiter};
use tollgate_observe::{
    DecisionQuery, ExpositionFormat, LoggedVerdict, MetricsWriter, Telemetry, TelemetryConfig,
};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "{domain: d, descriptors: [
    {key: user, name: warned, limit: 10/day, algorithm: fixed_window, soft: 60%},
    {key: tenant, name: lesser, limit: 10/day, algorithm: fixed_window, soft: {at: 8, action: degrade}},
    {key: tenant, value: over, name: marked, limit: 2/day, action: degrade},
    {key: path, name: wide, limit: 1000/day}]}";

struct Rig {
    limiter: Limiter<MemoryStore<SystemClock>>,
    observe: Arc<Telemetry>,
}

impl Rig {
    fn new() -> Self {
        let settings = TelemetryConfig { allowed_sample: 0.0, ..TelemetryConfig::default() };
        let observe = Telemetry::new(settings).expect("telemetry");
        let rules = Ruleset::load(&[Source::new("r.yaml", RULES)], &Options::default()).expect("rules");
        let clock = SystemClock::new();
        let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("memory");
        let limiter = Limiter::new(Arc::new(rules), store, Arc::new(clock));
        Self { limiter: limiter.with_observer(Arc::clone(&observe) as _), observe }
    }

    fn send(&self, pairs: &[(&str, &str)], requests: usize) {
        for _ in 0..requests {
            pollster::block_on(self.limiter.check(&Check::attributes("d", pairs)));
        }
    }

    fn metrics(&self) -> String {
        self.observe.run_once();
        let mut page = MetricsWriter::new(ExpositionFormat::Prometheus);
        self.observe.write(&mut page);
        page.finish()
    }

    /// The rules of the logged decisions with a verdict.
    fn logged(&self, verdict: LoggedVerdict) -> Vec<String> {
        self.observe.run_once();
        let query = DecisionQuery { limit: 100, ruled: Some(verdict), ..DecisionQuery::default() };
        let found = self.observe.search(&query).0;
        let rule = |record: serde_json::Value| record["rule"].as_str().expect("a rule").to_owned();
        found.iter().map(|entry| rule(entry.json(self.observe.node_info()))).collect()
    }
}

#[test]
fn warnings_are_counted_and_the_first_is_logged() {
    let rig = Rig::new();
    // The seventh to the tenth are warned, the others denied.
    rig.send(&[("user", "alice"), ("path", "/")], 12);
    let text = rig.metrics();
    let line = "ratelimit_soft_limit_total{domain=\"d\",rule=\"warned\",action=\"warn\"} 4\n";
    assert!(text.contains(line), "{text}");
    assert_eq!(rig.logged(LoggedVerdict::Warn), ["warned"], "the one that passed the threshold");
    assert_eq!(rig.logged(LoggedVerdict::Deny).len(), 2);
    let stats = rig.observe.stats(1);
    let rules = stats["rules"].as_array().expect("rules");
    let found = rules.iter().find(|rule| rule["rule"] == "warned").expect("the rule");
    assert_eq!((&found["warn"], &found["degrade"], &found["deny"]), (&4.into(), &0.into(), &2.into()));
    let query = DecisionQuery { limit: 1, ruled: Some(LoggedVerdict::Warn), ..DecisionQuery::default() };
    let why = rig.observe.search(&query).0[0].summary();
    assert!(
        why.starts_with("Allowed with a warning: over the soft limit of rule `warned`: 6 of 10"),
        "{why}"
    );
}

#[test]
fn degraded_requests_are_counted_and_logged_for_the_rule_that_degraded() {
    let rig = Rig::new();
    rig.send(&[("tenant", "acme"), ("path", "/")], 10);
    let text = rig.metrics();
    let line = "ratelimit_soft_limit_total{domain=\"d\",rule=\"lesser\",action=\"degrade\"} 2\n";
    assert!(text.contains(line), "{text}");
    assert_eq!(rig.logged(LoggedVerdict::Degrade), ["lesser", "lesser"]);
    // Over a limit that only degrades.
    rig.send(&[("tenant", "over")], 3);
    let line = "ratelimit_soft_limit_total{domain=\"d\",rule=\"marked\",action=\"degrade\"} 1\n";
    assert!(rig.metrics().contains(line));
    assert_eq!(rig.logged(LoggedVerdict::Degrade), ["marked", "lesser", "lesser"]);
}

#[test]
fn callers_at_90_percent_are_counted_by_rule() {
    let rig = Rig::new();
    for (user, requests) in [("alice", 9), ("bob", 10), ("carol", 8)] {
        rig.send(&[("user", user)], requests);
    }
    let text = rig.metrics();
    let line = "ratelimit_callers_at_90_percent{domain=\"d\",rule=\"warned\"} 2\n";
    assert!(text.contains(line), "{text}");
}
