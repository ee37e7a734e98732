//! The whole limiter in process: matches rules, charges, and builds a decision.

use crate::contestants::Contestant;
use crate::traffic::Traffic;
use std::future::Future;
use std::hint::black_box;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tollgate_core::{CounterStore, SystemClock, Timestamp};
use tollgate_engine::{Check, Limiter, TraceContext};
use tollgate_observe::Telemetry;
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

/// A rule with the limit that the store alone is measured with.
const RULES: &str = "domain: bench
descriptors:
  - {key: user, limit: {count: 1000000, period: 60000000s, burst: 18000000}}
";

/// A rule with a limit that denies nearly every request.
const TIGHT: &str = "domain: bench
descriptors:
  - {key: user, limit: {count: 1, period: 60000000s}}
";

pub(crate) struct ThroughRules<S = MemoryStore<SystemClock>> {
    limiter: Limiter<S>,
    name: &'static str,
    /// Whether every request is part of a sampled trace.
    sampled: bool,
}

/// How tight the limit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Room {
    /// Every request is allowed.
    Wide,
    /// Nearly every request is denied.
    Tight,
}

impl ThroughRules {
    pub(crate) fn new(keys: u64) -> Self {
        Self { limiter: Self::limiter(keys, Room::Wide), name: "tollgate Limiter::check", sampled: false }
    }

    /// With telemetry.
    pub(crate) fn watched(keys: u64, room: Room, name: &'static str, observe: &Arc<Telemetry>) -> Self {
        Self {
            limiter: Self::limiter(keys, room).with_observer(Arc::clone(observe) as _),
            name,
            sampled: false,
        }
    }

    /// With all requests in sampled traces.
    pub(crate) fn sampled(self, name: &'static str) -> Self {
        Self { name, sampled: true, ..self }
    }

    fn limiter(keys: u64, room: Room) -> Limiter<MemoryStore<SystemClock>> {
        over(Self::store(keys), room)
    }

    /// Counters in memory.
    pub(crate) fn store(keys: u64) -> MemoryStore<SystemClock> {
        let mut config = MemoryConfig::with_bytes((keys as usize * 32).max(1 << 18));
        config.wide_bytes = Some(1 << 14);
        MemoryStore::new(&config, SystemClock::new()).expect("memory")
    }
}

fn over<S: CounterStore>(store: S, room: Room) -> Limiter<S> {
    let text = if room == Room::Wide { RULES } else { TIGHT };
    let source = Source { name: "bench.yaml".to_owned(), text: text.to_owned() };
    let rules = Ruleset::load(&[source], &Options::default()).expect("rules");
    Limiter::new(Arc::new(rules), store, Arc::new(SystemClock::new()))
}

impl<S: CounterStore> ThroughRules<S> {
    /// Over another store.
    pub(crate) fn over(store: S, name: &'static str) -> Self {
        Self { limiter: over(store, Room::Wide), name, sampled: false }
    }
}

impl<S: CounterStore> Contestant for ThroughRules<S> {
    fn name(&self) -> String {
        self.name.into()
    }

    fn answer(&self, traffic: &Traffic) {
        let mut context = Context::from_waker(Waker::noop());
        for key in &traffic.block {
            let attributes = [("user", key.as_str())];
            let trace = self.sampled.then(|| TraceContext::new([1; 16], [1; 8], Timestamp::ZERO));
            let check = Check::attributes("bench", &attributes).with_trace(trace.as_ref());
            match pin!(self.limiter.check(&check)).poll(&mut context) {
                Poll::Ready(decision) => _ = black_box(&decision),
                Poll::Pending => unreachable!("the memory store is synchronous"),
            }
        }
    }
}
