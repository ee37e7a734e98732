//! Counters that limits with other numbers charge in turn: a tier that goes up and down, as every script and the memory
//! store see it, and states that former versions have left.

use crate::servers::{Server, patient};
use std::sync::Arc;
use tollgate_core::conformance::{Ledger, SplitMix64};
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, KeyPart, Limit, LimitSpec,
    ManualClock, Rate, Scope, TimeDelta, Timestamp,
};
use tollgate_store::{MemoryConfig, MemoryStore, RedisStore};

const START: Timestamp = Timestamp::from_micros(1_700_000_017_123_457);

fn per_minute(count: u64) -> Limit {
    LimitSpec::new(Algorithm::Gcra, Rate::per(count, TimeDelta::from_secs(60))).build().expect("in range")
}

/// A scope whose buckets are whole numbers in Redis while they are alone.
fn minutely() -> Scope {
    Scope::in_group("api|user|gcra|1m", "api|user")
}

/// The key that a caller's bundle has.
fn key_of(server: &Server, name: &str) -> String {
    let keys: Vec<String> = server.command(&["KEYS", &format!("tg1:{{{name}}}*")]);
    keys.into_iter().next().expect("a key")
}

/// A caller whose tier changes has the same units used, whichever script decides and whatever form its key has.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upgrade_gives_its_room_at_once_and_a_downgrade_mints_nothing() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::at(START));
    let store = RedisStore::with_clock(patient(&server.url()), clock);
    let (free, pro, odd, beside) = (per_minute(100), per_minute(5_000), per_minute(700), per_minute(60));
    let scopes = [minutely(), Scope::in_group("api|user|x=1|gcra|1m", "api|user")];
    for name in ["alone", "crowded"] {
        let parts = [KeyPart::Text(name)];
        let other = Charge::new(CounterKey { scope: &scopes[1], parts: &parts }, &beside, Cost::ONE);
        let check = async |limit: &Limit, units: u64| {
            let key = CounterKey { scope: &scopes[0], parts: &parts };
            let mut charges = vec![Charge::new(key, limit, Cost::new(units))];
            charges.extend((name == "crowded").then_some(other));
            let outcomes = store.charge(&charges).await.expect("an answer");
            (outcomes.admission, outcomes.per_charge[0].remaining)
        };
        assert_eq!(check(&free, 100).await, (Admission::Admitted, 0));
        let written: String = server.command(&["GET", &key_of(&server, name)]);
        assert_eq!(written.starts_with('-'), name == "alone", "{written}");
        assert_eq!(check(&free, 1).await, (Admission::Denied, 0));
        assert_eq!(check(&pro, 900).await, (Admission::Admitted, 4_000), "100 and 900 are used");
        for _ in 0..3 {
            assert_eq!(check(&free, 1).await, (Admission::Denied, 0));
            assert_eq!(check(&odd, 1).await, (Admission::Denied, 0));
        }
        assert_eq!(check(&pro, 4_001).await, (Admission::Denied, 4_000));
        assert_eq!(check(&pro, 3_999).await, (Admission::Admitted, 1));
    }
    assert_eq!(store.mismatches(), 0);
}

/// Random tiers in every form that a state has, one request at a time and many in one call, over a clock that also goes
/// back: one Redis and the memory store answer as a map of states does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_of_every_scale_take_turns_alike() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::at(START));
    let store = RedisStore::with_clock(patient(&server.url()), clock.clone());
    let in_memory = MemoryStore::new(&MemoryConfig::with_bytes(1 << 20), clock.clone()).expect("a store");
    let (mut rng, mut ledger, scope) = (SplitMix64::new(23), Ledger::default(), minutely());
    // Whole microseconds with and without a short form, fractions, a longer burst; fractions too fine for a word.
    let mut limits: Vec<Limit> = [1, 60, 100, 125, 5_000, 7, 700].map(per_minute).into();
    let burst = per_minute(10).with_rate(Rate::per(10, TimeDelta::from_secs(60)), Some(300));
    limits.push(burst.expect("in range"));
    let packed = limits.len();
    limits.extend([4_999, 99_991].map(per_minute));
    let names: Vec<String> = (0..12).map(|n| format!("caller{n}")).collect();
    let is_packed = |name: &str| name.len() == "caller0".len() && name < "caller6";
    for turn in 0..1_500 {
        let picks: Vec<(&str, &Limit, Cost)> = (0..1 + rng.below(8))
            .map(|_| {
                let name = rng.pick(&names).as_str();
                // What does not fit a word forgets in memory what has expired, which a clock that goes back would show.
                let limit = rng.pick(if is_packed(name) { &limits[..packed] } else { &limits });
                let cost = match rng.below(6) {
                    0 => Cost::PEEK,
                    1 => Cost::new(limit.capacity()),
                    2 => Cost::new(1 + rng.below(limit.capacity())),
                    _ => Cost::ONE,
                };
                (name, limit, cost)
            })
            .collect();
        // Each caller once, so that it does not matter in which order one call decides.
        let mut seen = std::collections::HashSet::new();
        let picks: Vec<_> = picks.into_iter().filter(|(name, ..)| seen.insert(*name)).collect();
        let asked = picks.iter().map(|(name, limit, cost)| {
            let (store, scope) = (&store, &scope);
            async move {
                let parts = [KeyPart::Text(name)];
                store.charge(&[Charge::new(CounterKey { scope, parts: &parts }, limit, *cost)]).await
            }
        });
        let results = futures_util::future::join_all(asked).await;
        for ((name, limit, cost), result) in picks.iter().zip(results) {
            let parts = [KeyPart::Text(name)];
            let charges = [Charge::new(CounterKey { scope: &scope, parts: &parts }, limit, *cost)];
            let expected = ledger.charge(clock.now(), &charges);
            assert_eq!(result.expect("an answer"), expected, "turn {turn}: {name} {limit} {cost:?}");
            if is_packed(name) {
                assert_eq!(
                    in_memory.apply(&charges),
                    expected,
                    "memory, turn {turn}: {name} {limit} {cost:?}"
                );
            }
        }
        match rng.below(12) {
            0 => clock.set(clock.now() - TimeDelta::from_micros(rng.below(400_000_000))),
            1 => clock.advance(TimeDelta::from_micros(rng.below(100_000_000))),
            2..6 => clock.advance(TimeDelta::from_micros(rng.below(1_000_000))),
            _ => {}
        }
    }
    assert_eq!(store.mismatches(), 0);
    assert_eq!(server.keys_without_expiry(), Vec::<String>::new());
}

/// An update of Tollgate must neither forget what was used nor take what it finds for damage: states without a scale are
/// read as written by every reader.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn states_of_former_versions_are_read() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::at(START));
    let store = RedisStore::with_clock(patient(&server.url()), clock);
    let scope = minutely();
    let (whole, parts_of_a_microsecond) = (per_minute(100), per_minute(7));
    let (half, after) = (START.as_micros() + 30_000_000, START.as_micros() + 30_000_001);
    let texts = [
        format!("{half}601"),
        format!(";601:b{half}"),
        format!(";601:f{after},0"),
        format!(";601:f{after},0,27"),
        format!(";602:w{after},{half},3;601:b{half}"),
    ];
    for (number, text) in texts.iter().enumerate() {
        for (limit, left) in [(&whole, 50), (&parts_of_a_microsecond, 3)] {
            let name = format!("old{number}x{left}");
            let parts = [KeyPart::Text(&name)];
            let charge = |cost| [Charge::new(CounterKey { scope: &scope, parts: &parts }, limit, cost)];
            let _ = store.charge(&charge(Cost::ONE)).await.expect("an answer");
            let key = key_of(&server, &name);
            let _: () = server.command(&["SET", &key, text, "PX", "100000"]);
            for (cost, remaining) in [(Cost::PEEK, left), (Cost::ONE, left - 1), (Cost::ONE, left - 2)] {
                let outcome = store.charge(&charge(cost)).await.expect("an answer").per_charge[0];
                assert_eq!(outcome.remaining, remaining, "{limit} over {text}");
            }
            let all = store.charge(&charge(Cost::new(left))).await.expect("an answer");
            assert_eq!(all.admission, Admission::Denied, "{limit} over {text}");
            let now: String = server.command(&["GET", &key]);
            assert_ne!(now, *text);
        }
    }
    assert_eq!(store.mismatches(), 0);
}
