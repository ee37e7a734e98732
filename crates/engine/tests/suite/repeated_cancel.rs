//! Closing a reservation while a part of the store fails: a client repeats what is answered with an error, and each counter
//! is moved once.

use crate::rig::rules;
use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use tollgate_core::{
    Charge, Clock, Cost, CounterKey, CounterStore, ManualClock, Outcomes, Permit, StoreError, TimeDelta,
    Timestamp,
};
use tollgate_engine::{Check, Limiter, ReservationId, SettleError, Settlement};
use tollgate_store::{MemoryConfig, MemoryStore};

const RULES: &str = "
domain: d
descriptors:
  - {key: user, name: tokens, limit: 1000/hour, algorithm: fixed_window}
  - {key: slot, name: slots, concurrency: 2}
  - {key: team, name: team, limit: 1000/hour, algorithm: fixed_window}
";
const ALL: [(&str, &str); 3] = [("user", "u"), ("slot", "u"), ("team", "u")];

type Memory = MemoryStore<Arc<ManualClock>>;

/// A store of two shards: the counters of these rules are on one that may be down.
#[derive(Clone)]
struct Shards(Arc<(Memory, Mutex<HashSet<&'static str>>)>);

impl Shards {
    fn fail(&self, rules: &[&'static str]) {
        *self.0.1.lock().expect("one thread") = rules.iter().copied().collect();
    }

    fn is_down(&self, key: &CounterKey<'_>) -> bool {
        let failing = self.0.1.lock().expect("one thread");
        failing.iter().any(|rule| key.scope.label().contains(rule))
    }
}

fn down() -> StoreError {
    StoreError::Unavailable("a shard".to_owned())
}

impl CounterStore for Shards {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        self.0.0.charge(charges).await
    }
    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        let failed: Vec<usize> = (0..charges.len()).filter(|at| self.is_down(&charges[*at].key)).collect();
        let up: Vec<Charge<'_>> =
            charges.iter().filter(|charge| !self.is_down(&charge.key)).copied().collect();
        self.0.0.debit(&up).await?;
        match failed.len() {
            0 => Ok(()),
            all if all == charges.len() => Err(down()),
            _ => Err(StoreError::Partial { failed, cause: Box::new(down()) }),
        }
    }
    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        if permits.iter().any(|permit| self.is_down(&permit.key)) {
            return Err(down());
        }
        self.0.0.release(permits).await
    }
}

fn node() -> (Shards, Limiter<Shards>) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_secs(1_000_000)));
    let memory = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), Arc::clone(&clock));
    let shards = Shards(Arc::new((memory.expect("a small store"), Mutex::default())));
    let time: Arc<dyn Clock> = clock as _;
    (shards.clone(), Limiter::new(rules(RULES), shards, time))
}

fn reserve(node: &Limiter<Shards>, cost: u64) -> ReservationId {
    let check = Check::attributes("d", &ALL).with_cost(Cost::new(cost));
    let made = pollster::block_on(node.reserve(&check, TimeDelta::from_secs(60), None));
    made.expect("stored").id.expect("allowed")
}

/// Returns what remains of the tokens, the slots and the team's tokens.
fn left(node: &Limiter<Shards>) -> [u64; 3] {
    let look = pollster::block_on(node.check(&Check::attributes("d", &ALL).with_cost(Cost::PEEK)));
    ["tokens", "slots", "team"].map(|rule| {
        let limit = look.limits.iter().find(|limit| look.limit_name(limit) == rule);
        limit.expect("a limit of each rule").outcome.remaining
    })
}

/// A caller that repeats its cancel while a permit's shard is down must not get units that it never took.
#[test]
fn repeated_cancels_refund_once() {
    for failing in ["slot", "team"] {
        let (shards, node) = node();
        let (id, _other) = (reserve(&node, 100), reserve(&node, 500));
        assert_eq!(left(&node), [400, 0, 400]);
        shards.fail(&[failing]);
        for _ in 0..5 {
            let closed = pollster::block_on(node.cancel(id));
            assert!(matches!(closed, Err(SettleError::Store(_))), "{failing}: {closed:?}");
            assert_eq!(left(&node)[0], 500, "{failing}");
        }
        shards.fail(&[]);
        let closed = pollster::block_on(node.cancel(id)).map(|closed| closed.settlement);
        assert_eq!(closed, Ok(Settlement::Canceled), "it stayed open");
        assert_eq!(left(&node), [500, 1, 500], "{failing}");
    }
}

/// Work that cost more than estimated is charged once, and a client that changes its mind meanwhile gets what it asks for last.
#[test]
fn repeated_settlements_charge_once() {
    let (shards, node) = node();
    let id = reserve(&node, 100);
    shards.fail(&["team"]);
    for _ in 0..5 {
        assert!(pollster::block_on(node.settle(id, 300)).is_err());
        assert_eq!(left(&node)[0], 700);
    }
    shards.fail(&[]);
    assert!(pollster::block_on(node.settle(id, 40)).is_ok());
    assert_eq!(left(&node), [960, 2, 960]);
}
