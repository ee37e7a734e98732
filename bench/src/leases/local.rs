//! Cost of the local path: an available lease compared with counters in memory, as in `mode: local`; on one thread, while
//! another renews the leases. The store behind the leases is in memory too, so that nothing else is measured.

use super::Length;
use crate::contest::{fill, measure};
use crate::contestants::{Contestant, Ours, Way};
use crate::limiter::ThroughRules;
use crate::report::{at_most, heading, rows};
use crate::traffic::{Law, Traffic};
use std::future::Future;
use std::hint::black_box;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec, Mode, Outcomes, PermitId,
    Rate, Scope, SystemClock, nonzero,
};
use tollgate_engine::{Check, DecisionId, Limiter};
use tollgate_rules::{Options, Ruleset, Source};
use tollgate_store::{HugePages, LeaseConfig, LeasedStore, MemoryConfig, MemoryStore};

type Memory = Arc<MemoryStore<SystemClock>>;
type Leases = LeasedStore<Memory, Memory, SystemClock>;

/// Burst: more than one thread uses during the measurement. One unit is refilled every microsecond.
const BURST: u64 = 100_000_000_000;

pub(super) fn measure_all(length: Length) {
    let (rounds, blocks) = if length == Length::Full { (7, 400) } else { (5, 100) };
    for keys in [1, 1_000] {
        let memory = Ours::new(keys, Way::OneLimit, HugePages::WhenDense);
        let leased = Alone::new();
        let rules = ThroughRules::new(keys);
        let leased_rules = Ruled::new();
        let all: [&dyn Contestant; 4] = [&memory, &leased, &rules, &leased_rules];
        let stop = AtomicBool::new(false);
        let nanos = std::thread::scope(|scope| {
            scope.spawn(|| run_lease_tasks(&leased.leases, &stop));
            scope.spawn(|| run_lease_tasks(leased_rules.0.store(), &stop));
            for contestant in all {
                fill(contestant, keys.max(1_024));
            }
            // Leases grow with demand.
            for _ in 0..20 {
                let _ = measure(&all[1..], keys, Law::Uniform, 1, 1, 100);
                std::thread::sleep(Duration::from_millis(50));
            }
            let nanos = measure(&all, keys, Law::Uniform, 1, rounds, blocks);
            stop.store(true, Ordering::Relaxed);
            nanos
        });
        heading(&format!("The local path, {keys} key(s), one thread"));
        let names: Vec<String> = all.iter().map(|contestant| contestant.name()).collect();
        rows(&names, &nanos);
        let stats = leased.leases.stats();
        let local_share = stats.local as f64 / (stats.local + stats.denied + stats.central).max(1) as f64;
        println!("({:.3}% of the charges were spent from a lease)", 100.0 * local_share);
        at_most("available lease ÷ counters in memory", nanos[1] / nanos[0], 2.0);
        at_most("the same through Limiter::check", nanos[3] / nanos[2], 2.0);
    }
}

fn leases() -> Leases {
    let clock = SystemClock::new();
    let memory = MemoryStore::new(&MemoryConfig::with_bytes(1 << 22), clock).expect("memory");
    let memory = Arc::new(memory);
    LeasedStore::new(Arc::clone(&memory), memory, clock, LeaseConfig::default())
}

/// Renews leases until `stop` is set.
fn run_lease_tasks(leases: &Leases, stop: &AtomicBool) {
    let mut context = Context::from_waker(Waker::noop());
    while !stop.load(Ordering::Relaxed) {
        for errand in leases.due_tasks() {
            let errand = pin!(leases.run_task(errand, PermitId(DecisionId::generate().0)));
            assert!(errand.poll(&mut context).is_ready(), "the memory store is synchronous");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Leases called directly.
struct Alone {
    leases: Leases,
    scope: Scope,
    limit: Limit,
}

impl Alone {
    fn new() -> Self {
        let limit =
            LimitSpec::new(Algorithm::Gcra, Rate::per_second(nonzero!(1_000_000))).burst(BURST).build();
        Self { leases: leases(), scope: Scope::new("bench"), limit: limit.expect("a limit") }
    }
}

impl Contestant for Alone {
    fn name(&self) -> String {
        "leases".into()
    }

    fn answer(&self, traffic: &Traffic) {
        let mut context = Context::from_waker(Waker::noop());
        for key in &traffic.block {
            let key = CounterKey { scope: &self.scope, parts: &[KeyPart::Text(key)] };
            let charge = Charge { mode: Mode::Leased, ..Charge::new(key, &self.limit, Cost::ONE) };
            let mut outcomes = Outcomes::default();
            if self.leases.try_charge(&[charge], &mut outcomes) {
                _ = black_box(&outcomes);
                continue;
            }
            match pin!(self.leases.charge(&[charge])).poll(&mut context) {
                Poll::Ready(outcomes) => _ = black_box(&outcomes),
                Poll::Pending => unreachable!("the memory store is synchronous"),
            }
        }
    }
}

/// Leases behind rules.
struct Ruled(Limiter<Leases>);

impl Ruled {
    fn new() -> Self {
        let text = format!(
            "domain: bench\ndescriptors:\n  - {{key: user, mode: leased, \
             limit: {{count: 1000000, period: 1s, burst: {BURST}}}}}\n"
        );
        let source = Source { name: "bench.yaml".to_owned(), text };
        let rules = Ruleset::load(&[source], &Options::default()).expect("rules");
        Self(Limiter::new(Arc::new(rules), leases(), Arc::new(SystemClock::new())))
    }
}

impl Contestant for Ruled {
    fn name(&self) -> String {
        "Limiter::check, leased".into()
    }

    fn answer(&self, traffic: &Traffic) {
        let mut context = Context::from_waker(Waker::noop());
        for key in &traffic.block {
            let attributes = [("user", key.as_str())];
            let check = Check::attributes("bench", &attributes);
            match pin!(self.0.check(&check)).poll(&mut context) {
                Poll::Ready(decision) => _ = black_box(&decision),
                Poll::Pending => unreachable!("the memory store is synchronous"),
            }
        }
    }
}
