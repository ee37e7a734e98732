//! A limiter over real memory counters, on a clock that only the test moves.
#![allow(dead_code, reason = "each test file uses its own part of the rig")]

use std::sync::Arc;
use tollgate_core::{Clock, Cost, CounterStore, ManualClock, Timestamp};
use tollgate_engine::{Check, Decision, Limiter};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{MemoryConfig, MemoryStore};

pub(crate) type Memory = MemoryStore<Arc<ManualClock>>;

pub(crate) struct Rig {
    pub(crate) clock: Arc<ManualClock>,
    pub(crate) limiter: Limiter<Memory>,
}

pub(crate) fn rules(text: &str) -> Arc<Ruleset> {
    rules_of(&[text])
}

/// Rules of several files.
fn rules_of(texts: &[&str]) -> Arc<Ruleset> {
    let source = |(at, text): (usize, &&str)| Source {
        name: if at == 0 { "test.yaml".to_owned() } else { format!("test{at}.yaml") },
        text: (*text).to_owned(),
    };
    let sources: Vec<Source> = texts.iter().enumerate().map(source).collect();
    Arc::new(Ruleset::load(&sources, &Options::default()).unwrap_or_else(|errors| panic!("{errors}")))
}

pub(crate) fn rig(text: &str) -> Rig {
    rig_of(&[text])
}

/// A limiter with the rules of several files.
pub(crate) fn rig_of(texts: &[&str]) -> Rig {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let store =
        MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock)).expect("a small store");
    let time: Arc<dyn Clock> = Arc::clone(&clock) as _;
    Rig { limiter: Limiter::new(rules_of(texts), store, time), clock }
}

pub(crate) fn check<S: CounterStore>(
    limiter: &Limiter<S>,
    attributes: &[(&str, &str)],
    cost: Cost,
) -> Decision {
    pollster::block_on(limiter.check(&Check::attributes("d", attributes).with_cost(cost)))
}

impl Rig {
    pub(crate) fn take(&self, attributes: &[(&str, &str)]) -> Decision {
        check(&self.limiter, attributes, Cost::ONE)
    }

    /// What is left of the named limit, without charging.
    pub(crate) fn left(&self, attributes: &[(&str, &str)], rule: &str) -> u64 {
        let look = check(&self.limiter, attributes, Cost::PEEK);
        let limit = look.limits.iter().find(|limit| look.limit_name(limit) == rule);
        limit.unwrap_or_else(|| panic!("no limit of {rule}")).outcome.remaining
    }
}
