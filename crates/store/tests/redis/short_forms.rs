//! Windows and buckets that are alone in their bundles, as whole numbers: decided by a part of the script of their own.
//!
//! Most limits are such. They must answer as all others do, whichever form a state has at the moment: theirs, the text of
//! former versions, or beside other counters.

use crate::servers::{Server, patient};
use std::sync::Arc;
use tollgate_core::conformance::{Ledger, SplitMix64};
use tollgate_core::{
    Admission, Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, KeyPart, Limit,
    LimitSpec, ManualClock, Rate, Scope, TimeDelta, Timestamp,
};
use tollgate_store::RedisStore;

const START: Timestamp = Timestamp::from_micros(1_700_000_017_123_457);

/// A scope, and limits that take turns on it.
struct Counted {
    scope: Scope,
    limits: Vec<Limit>,
}

fn counted(group: &str, algorithm: Algorithm, seconds: u64, counts: &[u64]) -> Counted {
    let length = TimeDelta::from_secs(seconds);
    let label = format!("{group}|{algorithm}|{length}");
    let spec = |count: &u64| LimitSpec::new(algorithm, Rate::per(*count, length));
    let mut limits: Vec<LimitSpec> = counts.iter().map(spec).collect();
    if algorithm == Algorithm::FixedWindow {
        limits.extend(counts.iter().map(|count| spec(count).count_denied()));
    }
    if group == "api|shifted" {
        limits = limits.into_iter().map(LimitSpec::jitter).collect();
    }
    let limits = limits.into_iter().map(|spec| spec.build().expect("in range")).collect();
    Counted { scope: Scope::in_group(label, group), limits }
}

/// The name of a window in the text of a bundle.
fn name_of(scope: &Scope) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let digit = |place: u32| char::from(ALPHABET[(scope.id() >> (6 * place) & 63) as usize]);
    (0..11).map(digit).collect()
}

/// Random requests over several bundles, one at a time and many in one call, with limits that change, and with states that
/// are rewritten as former versions had them: Redis answers as a map of states does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_form_of_a_state_gives_the_same_answers() {
    let server = Server::start(&[]);
    for seed in [5, 6, 7] {
        let _: () = server.command(&["FLUSHALL"]);
        let clock = Arc::new(ManualClock::at(START));
        let store = RedisStore::with_clock(patient(&server.url()), clock.clone());
        let (mut rng, mut ledger) = (SplitMix64::new(seed), Ledger::default());
        let all = [
            counted("api|user", Algorithm::FixedWindow, 1, &[3, 2_000_000]),
            counted("api|path", Algorithm::FixedWindow, 60, &[5, 8, 300_000_000]),
            counted("api|tenant", Algorithm::FixedWindow, 86_400, &[20, 1 << 40]),
            counted("api|shifted", Algorithm::FixedWindow, 60, &[4]),
            counted("api|address", Algorithm::Gcra, 60, &[10, 60]),
            // In the bundle of the first.
            counted("api|user", Algorithm::Gcra, 60, &[20]),
            counted("api|user", Algorithm::FixedWindow, 3_600, &[9]),
        ];
        for turn in 0..1_200 {
            // Each caller has requests of its own, so that it does not matter in which order one call decides.
            let callers: Vec<String> = (0..1 + rng.below(4)).map(|n| format!("caller{n}")).collect();
            let parts: Vec<[KeyPart<'_>; 1]> = callers.iter().map(|name| [KeyPart::Text(name)]).collect();
            let alone = rng.below(4) > 0;
            let requests: Vec<Vec<Charge<'_>>> = parts
                .iter()
                .map(|parts| {
                    let count = 1 + rng.below(4);
                    let charge = |_| {
                        let of = &all[usize::try_from(rng.below(if alone { 5 } else { 7 })).expect("small")];
                        let limit = rng.pick(&of.limits);
                        let cost = match rng.below(24) {
                            0 => Cost::PEEK,
                            1 => Cost::refund(1 + rng.below(3)),
                            2 => Cost::new(limit.capacity() + rng.below(2)),
                            3 => Cost::new(1 + rng.below(limit.capacity())),
                            4 => Cost::new(u64::MAX >> rng.below(30)),
                            _ => Cost::new(1 + rng.below(3)),
                        };
                        let enforcement = match rng.below(8) {
                            0..3 => Enforcement::Independent,
                            3 if !alone => Enforcement::Alternative,
                            _ => Enforcement::Required,
                        };
                        let key = CounterKey { scope: &of.scope, parts };
                        Charge { enforcement, ..Charge::new(key, limit, cost) }
                    };
                    (0..count).map(charge).collect()
                })
                .collect();
            if rng.below(15) == 0 {
                // One charge: debits of one counter by two limits depend on their order.
                ledger.debit(clock.now(), &requests[0][..1]);
                store.debit(&requests[0][..1]).await.expect("a debit");
            }
            let results =
                futures_util::future::join_all(requests.iter().map(|charges| store.charge(charges))).await;
            for (charges, result) in requests.iter().zip(results) {
                let expected = ledger.charge(clock.now(), charges);
                assert_eq!(result.expect("an answer"), expected, "seed {seed}, turn {turn}: {charges:#?}");
            }
            if rng.below(6) == 0 {
                rewrite(&server, &all[1].scope, "15", 60);
            }
            match rng.below(12) {
                1 => clock.advance(TimeDelta::from_micros(rng.below(100_000_000_000))),
                2..6 => clock.advance(TimeDelta::from_micros(rng.below(2_000_000))),
                _ => {}
            }
        }
        assert_eq!(store.mismatches(), 0);
        assert_eq!(server.keys_without_expiry(), Vec::<String>::new());
    }
    // Without these the short forms were never used, and nothing was compared.
    let used: String = server.command(&["INFO", "commandstats"]);
    let increments = used.lines().find_map(|line| line.strip_prefix("cmdstat_incrby:calls="));
    let increments = increments.and_then(|rest| rest.split(',').next()?.parse::<u64>().ok());
    assert!(increments.is_some_and(|calls| calls > 300), "{increments:?}");
}

/// Rewrites the windows of a scope as former versions wrote them.
fn rewrite(server: &Server, scope: &Scope, code: &str, seconds: u64) {
    let keys: Vec<String> = server.command(&["KEYS", "tg1:*"]);
    for key in keys {
        let value: String = server.command(&["GET", &key]);
        if value.len() == 18 && value.starts_with(code) {
            let (number, count) = value[2..].split_at(8);
            let number: u64 = number.parse().expect("a number");
            let (start, end) = (number * seconds * 1_000_000, (number + 1) * seconds * 1_000_000);
            let count: u64 = count.parse().expect("a count");
            let text = format!(";{}:w{end},{start},{count}", name_of(scope));
            let _: () = server.command(&["SET", &key, &text, "KEEPTTL"]);
        }
    }
}

/// A window alone is a number; it leaves that form when another counter joins it or its count grows too long, and nothing that
/// was counted is lost on the way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_keeps_its_count_through_every_form() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::at(START));
    let store = RedisStore::with_clock(patient(&server.url()), clock.clone());
    let all = [
        counted("api|user", Algorithm::FixedWindow, 1, &[2_000_000]),
        counted("api|user", Algorithm::Gcra, 60, &[20]),
        counted("api|user", Algorithm::FixedWindow, 3_600, &[9]),
    ];
    let parts = [KeyPart::Text("alice")];
    let charge = |which: usize, cost| {
        let Counted { scope, limits } = &all[which];
        Charge::new(CounterKey { scope, parts: &parts }, &limits[0], cost)
    };
    let remaining = async |which: usize, cost| {
        let outcomes = store.charge(&[charge(which, cost)]).await.expect("an answer");
        assert_eq!(outcomes.admission, Admission::Admitted);
        outcomes.per_charge[0].remaining
    };
    let form = || -> String {
        let keys: Vec<String> = server.command(&["KEYS", "tg1:*"]);
        server.command(&["GET", &keys[0]])
    };
    assert_eq!(remaining(0, Cost::new(5)).await, 1_999_995);
    assert_eq!(
        form(),
        "101700000017000005",
        "one second: code 10, ten digits of its number, six of its count"
    );
    assert_eq!(remaining(0, Cost::refund(2)).await, 1_999_997);
    assert_eq!(form(), "101700000017000003");
    // A bucket joins: by the script of buckets, which does not know the window's name.
    assert_eq!(remaining(1, Cost::ONE).await, 19);
    assert!(form().contains(";10:w1700000018000000,1700000017000000,3"), "{}", form());
    assert_eq!(remaining(0, Cost::ONE).await, 1_999_996);
    assert!(form().contains(&format!(";{}:w", name_of(&all[0].scope))), "{}", form());
    assert_eq!(remaining(2, Cost::ONE).await, 8);
    assert_eq!(remaining(0, Cost::new(1_000_000)).await, 999_996);
    clock.advance(TimeDelta::from_secs(600));
    // The bucket is full again, and the first window is over: the third counter is alone.
    assert_eq!(remaining(2, Cost::ONE).await, 7);
    assert_eq!(form(), "210472222000000002");
    clock.advance(TimeDelta::from_secs(3_600));
    assert_eq!(remaining(0, Cost::new(1_000_000)).await, 1_000_000);
    assert!(form().ends_with(",1000000"), "seven digits have no short form: {}", form());
    let denied = store.charge(&[charge(0, Cost::new(1_000_001))]).await.expect("an answer");
    assert_eq!(denied.admission, Admission::Denied);
    assert_eq!(remaining(0, Cost::refund(999_998)).await, 1_999_998);
    assert_eq!(form().len(), 18, "{}", form());
    assert_eq!(store.mismatches(), 0);
}

/// A window that a clock which went back has left ahead counts on, as it does in memory.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_ahead_counts_on() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::at(START));
    let store = RedisStore::with_clock(patient(&server.url()), clock.clone());
    let mut ledger = Ledger::default();
    let all = [
        counted("api|user", Algorithm::FixedWindow, 60, &[1_000]),
        counted("api|path", Algorithm::FixedWindow, 1, &[1_000]),
    ];
    let parts = [KeyPart::Text("alice")];
    for back in [0, 1, 70, 300, 0, 61, 0] {
        clock.set(START + TimeDelta::from_secs(1_000) - TimeDelta::from_secs(back));
        for _ in 0..2 {
            let charges: Vec<Charge<'_>> = all
                .iter()
                .map(|Counted { scope, limits }| {
                    Charge::new(CounterKey { scope, parts: &parts }, &limits[0], Cost::new(2))
                })
                .collect();
            let expected = ledger.charge(clock.now(), &charges);
            assert_eq!(expected.admission, Admission::Admitted);
            assert_eq!(store.charge(&charges).await.expect("an answer"), expected, "{back} s back");
        }
    }
    assert_eq!(store.mismatches(), 0);
}
