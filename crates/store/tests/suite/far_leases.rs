//! Leases of an authority that is a long round trip away: whatever is requested, nodes decide nearly all requests themselves, and
//! the limit is used.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tollgate_core::{
    Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, KeyPart, LimitSpec, Mode, Outcomes, Permit,
    PermitId, Rate, Scope, StoreError, TimeDelta, Timestamp, UnitReturn,
};
use tollgate_store::{LeaseConfig, LeasedStore, MemoryConfig, MemoryStore};

/// The time of a paused runtime.
#[derive(Clone, Copy)]
struct VirtualClock(tokio::time::Instant);

impl Clock for VirtualClock {
    fn now(&self) -> Timestamp {
        let passed = u64::try_from(self.0.elapsed().as_micros()).expect("microseconds");
        Timestamp::from_secs(1_700_000_000) + TimeDelta::from_micros(passed)
    }
}

/// The authority, half a round trip away in each direction: in the virtual time of a paused runtime.
#[derive(Clone)]
struct Far {
    store: Arc<MemoryStore<VirtualClock>>,
}

impl CounterStore for Far {
    async fn charge(&self, charges: &[Charge<'_>]) -> Result<Outcomes, StoreError> {
        tokio::time::sleep(TRIP / 2).await;
        let outcomes = self.store.charge(charges).await;
        tokio::time::sleep(TRIP / 2).await;
        outcomes
    }

    async fn debit(&self, charges: &[Charge<'_>]) -> Result<(), StoreError> {
        self.store.debit(charges).await
    }

    async fn release(&self, permits: &[Permit<'_>]) -> Result<(), StoreError> {
        self.store.release(permits).await
    }

    async fn return_units(&self, back: &UnitReturn<'_>) -> Result<(), StoreError> {
        self.store.return_units(back).await
    }
}

struct Measured {
    /// Part of the requests that nodes decide.
    local: f64,
    /// Admitted units, as a part of 1,000 a second.
    used: f64,
    denied: u64,
}

const TRIP: Duration = Duration::from_millis(100);
const WARM: u64 = 5_000;
const SPAN: u64 = 20_000;

/// Lets each node send so many requests a second.
#[tokio::main(flavor = "current_thread")]
async fn run(limit: LimitSpec, demands: &[u64]) -> Measured {
    tokio::time::pause();
    let clock = VirtualClock(tokio::time::Instant::now());
    let limit = limit.build().expect("a limit");
    let store = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock).expect("a store");
    let far = Far { store: Arc::new(store) };
    let config = LeaseConfig { nodes: u32::try_from(demands.len()).expect("few"), ..LeaseConfig::default() };
    let ids = Arc::new(AtomicU64::new(1));
    let counts: Arc<[AtomicU64; 3]> = Arc::default();
    let mut senders = Vec::new();
    for demand in demands {
        let leases = Arc::new(LeasedStore::new(far.clone(), far.clone(), clock, config.clone()));
        let (working, ids) = (Arc::clone(&leases), Arc::clone(&ids));
        tokio::spawn(async move {
            loop {
                working.task_ready().await;
                for task in working.due_tasks() {
                    let id = PermitId(u128::from(ids.fetch_add(1, Ordering::Relaxed)));
                    let working = Arc::clone(&working);
                    tokio::spawn(async move { working.run_task(task, id).await });
                }
            }
        });
        let (demand, limit, counts) = (*demand, limit.clone(), Arc::clone(&counts));
        senders.push(tokio::spawn(async move {
            for at in 0..WARM + SPAN {
                tokio::time::sleep_until(clock.0 + Duration::from_millis(at)).await;
                for _ in at * demand / 1_000..(at + 1) * demand / 1_000 {
                    let (leases, limit, counts) = (Arc::clone(&leases), limit.clone(), Arc::clone(&counts));
                    tokio::spawn(async move {
                        let scope = Scope::new("far");
                        let parts = [KeyPart::Text("caller")];
                        let key = CounterKey { scope: &scope, parts: &parts };
                        let charge = Charge { mode: Mode::Leased, ..Charge::new(key, &limit, Cost::ONE) };
                        let mut outcomes = Outcomes::default();
                        let is_local = leases.try_charge(&[charge], &mut outcomes);
                        if !is_local {
                            outcomes = leases.charge(&[charge]).await.expect("it answers");
                        }
                        if at >= WARM {
                            let is_admitted = outcomes.admission == tollgate_core::Admission::Admitted;
                            counts[0].fetch_add(u64::from(is_local), Ordering::Relaxed);
                            counts[1].fetch_add(u64::from(is_admitted), Ordering::Relaxed);
                            counts[2].fetch_add(u64::from(!is_admitted), Ordering::Relaxed);
                        }
                    });
                }
            }
        }));
    }
    for sender in senders {
        sender.await.expect("no panic");
    }
    let [local, admitted, denied] = [0, 1, 2].map(|at| counts[at].load(Ordering::Relaxed));
    Measured { local: local as f64 / (admitted + denied) as f64, used: admitted as f64 / SPAN as f64, denied }
}

fn per_second(burst: u64) -> LimitSpec {
    LimitSpec::new(Algorithm::Gcra, Rate::per(1_000, TimeDelta::from_secs(1))).burst(burst)
}

/// Without it a caller beyond its limit waits a round trip for each denial, and the owner is asked for each of its requests.
#[test]
fn nodes_decide_nearly_all_themselves_and_the_limit_is_used() {
    for (demands, least_local, least_used) in [
        (&[300, 300, 300][..], 0.99, 0.89),
        (&[333, 333, 333], 0.99, 0.99),
        (&[400, 400, 400], 0.95, 0.99),
        (&[500, 500, 500], 0.95, 0.99),
        (&[1_000, 1_000, 1_000], 0.95, 0.99),
        (&[5_000, 5_000, 5_000], 0.99, 0.99),
        // One node uses more than its part of what may be outstanding.
        (&[800, 10, 10], 0.8, 0.8),
        (&[900, 10, 10], 0.9, 0.9),
        (&[1_500, 10, 10], 0.9, 0.99),
    ] {
        let Measured { local, used, denied } = run(per_second(1_000), demands);
        let part = f64::from(u32::try_from(demands.iter().sum::<u64>()).expect("few")) / 1_000.0;
        assert!(local >= least_local, "{demands:?}: {local} decided by nodes");
        assert!(used >= least_used && used <= 1.06, "{demands:?}: {used} of the limit used");
        assert!(part > 1.0 || denied == 0, "{demands:?}: {denied} denied within the limit");
    }
}

/// Without it callers within a limit are denied where leases are too small for what is used in a round trip.
#[test]
fn what_leases_cannot_carry_is_asked_for() {
    for (burst, demands, least_used, most_denied) in [
        (300, &[900][..], 0.89, 0),
        (200, &[300, 300, 300], 0.89, 0),
        (100, &[300, 300, 300], 0.87, 300),
        (100, &[500, 500, 500], 0.98, u64::MAX),
    ] {
        let Measured { used, denied, .. } = run(per_second(burst), demands);
        assert!(used >= least_used, "{burst} {demands:?}: {used} of the limit used");
        assert!(denied <= most_denied, "{burst} {demands:?}: {denied} denied");
    }
}

/// Without it every request of a caller that has used up a slow limit asks the owner.
#[test]
fn the_owners_own_denial_holds_for_longer_than_a_round_trip() {
    for (algorithm, period) in
        [(Algorithm::Gcra, 3_600), (Algorithm::Gcra, 86_400), (Algorithm::FixedWindow, 3_600)]
    {
        let limit = LimitSpec::new(algorithm, Rate::per(1_000, TimeDelta::from_secs(period)));
        let Measured { local, denied, .. } = run(limit, &[500, 500, 500]);
        assert!(denied > 29_900 && local > 0.85, "{algorithm:?} {period}: {local} of {denied}");
    }
}
