//! The whole limiter in process: match the rules, charge, fold into a decision.

use crate::contestants::Contestant;
use crate::traffic::Traffic;
use std::future::Future;
use std::hint::black_box;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tollgate_core::SystemClock;
use tollgate_engine::{Check, Limiter};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

/// The limit that the store alone is measured with, as a rule.
const RULES: &str = "domain: bench
descriptors:
  - {key: user, limit: {count: 1000000, period: 60000000s, burst: 18000000}}
";

pub(crate) struct ThroughRules(Limiter<MemoryStore<SystemClock>>);

impl ThroughRules {
    pub(crate) fn new(keys: u64) -> Self {
        let mut config = MemoryConfig::with_bytes((keys as usize * 32).max(1 << 18));
        config.aside_bytes = Some(1 << 14);
        let clock = SystemClock::new();
        let source = Source { name: "bench.yaml".to_owned(), text: RULES.to_owned() };
        let rules = Ruleset::load(&[source], &Options::default()).expect("rules");
        let store = MemoryStore::new(&config, clock).expect("memory");
        Self(Limiter::new(Arc::new(rules), store, Arc::new(clock)))
    }
}

impl Contestant for ThroughRules {
    fn name(&self) -> String {
        "tollgate Limiter::check".into()
    }

    fn answer(&self, traffic: &Traffic) {
        let mut context = Context::from_waker(Waker::noop());
        for key in &traffic.block {
            let attributes = [("user", key.as_str())];
            let check = Check::attributes("bench", &attributes);
            match pin!(self.0.check(&check)).poll(&mut context) {
                Poll::Ready(decision) => _ = black_box(&decision),
                Poll::Pending => unreachable!("memory answers at once"),
            }
        }
    }
}
