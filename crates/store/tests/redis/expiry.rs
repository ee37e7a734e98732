//! When the keys of buckets expire: never before their states, also where a charge leaves the expiry as it is.

use crate::servers::{Server, patient};
use tollgate_core::conformance::SplitMix64;
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, CounterStore, Enforcement, KeyPart, Limit, LimitSpec, Rate, Scope,
    TimeDelta,
};
use tollgate_store::RedisStore;

/// Microseconds of a span: a key with buckets lives to the end of the one in which the latest of their TATs lies.
const SPAN: u64 = 1 << 23;

fn counter(group: &str, algorithm: Algorithm, seconds: u64, count: u64, burst: u64) -> (Scope, Limit) {
    let length = TimeDelta::from_secs(seconds);
    let spec = LimitSpec::new(algorithm, Rate::per(count, length));
    let spec = if algorithm == Algorithm::Gcra { spec.burst(burst) } else { spec };
    let scope = Scope::in_group(format!("{group}|{algorithm}|{length}"), group);
    (scope, spec.build().expect("in range"))
}

/// Returns the latest TAT of a value, in microseconds; `None` if it holds a window.
fn latest(value: &str) -> Option<u64> {
    if let Some(digits) = value.strip_prefix('-') {
        return Some(digits[4..].parse::<u64>().expect("digits") + 1_600_000_000_000_000);
    }
    let instants = value.split(';').filter_map(|entry| {
        let body = entry.split_once(':')?.1;
        let instant = body[1..].split(',').next()?.parse::<u64>().ok()?;
        Some(if body.starts_with('f') { instant - 1 } else { instant })
    });
    instants.max()
}

/// A key that expires before its buckets are full is a fresh budget.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_key_expires_before_its_buckets_are_full() {
    let server = Server::start(&[]);
    let store = RedisStore::connect(patient(&server.url()));
    use Algorithm::{FixedWindow, Gcra};
    // Alone in short form, alone as text, several in one bundle, and beside a window in a bundle of its own.
    let requests = [
        vec![counter("api|user", Gcra, 3_600, 3_600, 3_600)],
        vec![counter("api|path", Gcra, 3_600, 3_600, 9_000)],
        vec![counter("api|two", Gcra, 3_600, 3_600, 3_600), counter("api|two", Gcra, 60, 60, 900)],
        [1, 60, 3_600, 86_400].map(|secs| counter("api|four", Gcra, secs, secs, 5_000)).to_vec(),
        vec![counter("api|address", Gcra, 60, 200, 200), counter("api|window", FixedWindow, 3_600, 9_000, 0)],
    ];
    let mut rng = SplitMix64::new(3);
    let (mut kept, mut moved) = (0, 0);
    let mut known: std::collections::HashMap<String, (String, u64)> = std::collections::HashMap::new();
    for turn in 0..600 {
        let names: Vec<String> = (0..1 + rng.below(3)).map(|name| format!("caller{name}")).collect();
        let parts: Vec<[KeyPart<'_>; 1]> = names.iter().map(|name| [KeyPart::Text(name)]).collect();
        let limits = rng.pick(&requests);
        let cost = match rng.below(12) {
            0 => Cost::refund(1 + rng.below(20)),
            1 => Cost::new(30),
            _ => Cost::new(1 + rng.below(2)),
        };
        let is_debit = rng.below(4) == 0;
        let all: Vec<Vec<Charge<'_>>> = parts
            .iter()
            .map(|parts| {
                let charge = |(scope, limit)| Charge::new(CounterKey { scope, parts }, limit, cost);
                limits.iter().map(|(scope, limit)| charge((scope, limit))).collect()
            })
            .collect();
        if is_debit {
            let mut charges: Vec<Charge<'_>> = all.concat();
            charges.iter_mut().for_each(|charge| charge.enforcement = Enforcement::Independent);
            store.debit_reported(&charges).await.expect("a debit");
        } else {
            // In one call.
            let results =
                futures_util::future::join_all(all.iter().map(|charges| store.charge(charges))).await;
            assert!(results.iter().all(Result::is_ok), "{results:?}");
        }
        let mut connection = server.connection().expect("a server");
        let keys: Vec<String> = redis::cmd("KEYS").arg("tg1:*").query(&mut connection).expect("keys");
        for key in keys {
            let (value, expires): (Option<String>, i64) = redis::pipe()
                .cmd("GET")
                .arg(&key)
                .cmd("PEXPIRETIME")
                .arg(&key)
                .query(&mut connection)
                .expect("a key");
            let Some((value, full)) = value.and_then(|value| latest(&value).map(|full| (value, full))) else {
                continue;
            };
            let expires = u64::try_from(expires).expect("an expiry");
            assert!(
                expires * 1_000 >= full - full % SPAN + SPAN,
                "turn {turn}: {key} holds {value} and expires at {expires} ms"
            );
            if let Some((before, expiry)) = known.insert(key, (value.clone(), expires))
                && before != value
            {
                *if expiry == expires { &mut kept } else { &mut moved } += 1;
            }
        }
    }
    assert_eq!(store.mismatches(), 0);
    assert!(kept > 200 && moved > 50, "{kept} charges left the expiry, {moved} moved it");
}
