//! Rules whose counters each node keeps for itself, beside rules whose counters are shared: a request that meets both takes
//! of all or of none.

use crate::differential::{ATTEMPTS, limits};
use crate::servers::{Server, patient};
use std::sync::Arc;
use tollgate_core::conformance::Ledger;
use tollgate_core::conformance::SplitMix64;
use tollgate_core::{
    Admission, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, KeyPart, ManualClock, Mode,
    Outcome, PermitId, Scope, TimeDelta, Timestamp,
};
use tollgate_store::{LeaseConfig, LeasedStore, MemoryConfig, MemoryStore, RedisStore};

/// One node must answer as if all its counters lay in one place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_here_and_in_redis_answer_as_one() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(1_700_000_017_123_457)));
    let shared_clock: Arc<dyn Clock> = clock.clone();
    let redis = RedisStore::with_clock(patient(&server.url()), shared_clock);
    let memory = MemoryStore::new(&MemoryConfig::with_bytes(64 << 20), Arc::clone(&clock)).expect("a store");
    let store = LeasedStore::new(redis.clone(), redis.clone(), Arc::clone(&clock), LeaseConfig::default());
    let store = store.with_local(memory);
    let (limits, mut rng, mut ledger) = (limits(), SplitMix64::new(5), Ledger::default());
    let scopes: Vec<Scope> = (0..limits.len()).map(|n| Scope::new(format!("local|{n}"))).collect();
    let parts = [KeyPart::Text("alice")];
    let (mut refused, mut answered) = (0, 0);
    for turn in 0..4_000 {
        let count = 1 + rng.below(4);
        let charges: Vec<Charge<'_>> = (0..count)
            .map(|number| {
                let n = usize::try_from(rng.below(limits.len() as u64)).expect("small");
                let enforcement = match rng.below(5) {
                    _ if n == ATTEMPTS => Enforcement::Independent,
                    // A rule whose limits are alternatives has no others.
                    _ if n % 5 == 0 => Enforcement::Alternative,
                    0 => Enforcement::Independent,
                    _ => Enforcement::Required,
                };
                let cost = if rng.below(9) == 0 { Cost::PEEK } else { Cost::new(1 + rng.below(3)) };
                let permit = PermitId(u128::from(turn * 8 + number + 1));
                let mode = if n % 2 == 0 { Mode::Local } else { Mode::Central };
                let key = CounterKey { scope: &scopes[n], parts: &parts };
                Charge { enforcement, permit, mode, ..Charge::new(key, &limits[n], cost) }
            })
            .collect();
        let now = clock.now();
        let expected = ledger.charge(now, &charges);
        let outcomes = store.charge(&charges).await.expect("an answer");
        assert_eq!(outcomes.admission, expected.admission, "turn {turn}: {charges:#?}");
        refused += u32::from(outcomes.admission == Admission::Denied);
        for (outcome, expected) in outcomes.per_charge.iter().zip(&expected.per_charge) {
            // What is refused here is not asked about elsewhere: of the other limits, the last reply of the last second is
            // repeated, if there is one.
            let is_repeated = outcomes.admission == Admission::Denied && outcome.verdict.is_allowed();
            if *outcome != Outcome::UNKNOWN && !is_repeated {
                assert_eq!(outcome, expected, "turn {turn}: {charges:#?}");
                answered += 1;
            }
        }
        clock.advance(TimeDelta::from_micros(match rng.below(6) {
            0..=2 => rng.below(1_000),
            3..=4 => rng.below(200_000),
            _ => rng.below(20_000_000),
        }));
    }
    assert!((400..3_600).contains(&refused), "{refused} of 4000 refused");
    assert!(answered > 5_000, "{answered}");
}
