//! Debits of thousands of counters at once, as a cell reports them that is busy.

use crate::servers::{Server, patient};
use std::sync::Arc;
use tollgate_core::conformance::{Ledger, SplitMix64};
use tollgate_core::{
    Algorithm, Charge, Clock, Cost, CounterKey, CounterStore, Enforcement, KeyPart, Limit, LimitSpec,
    ManualClock, Rate, Scope, TimeDelta, Timestamp,
};
use tollgate_store::RedisStore;

/// More than a script can read in one call.
const COUNTERS: usize = 10_000;

fn counter(algorithm: Algorithm, secs: u64) -> (Scope, Limit) {
    counter_of(algorithm, 20, secs)
}

fn counter_of(algorithm: Algorithm, count: u64, secs: u64) -> (Scope, Limit) {
    let length = TimeDelta::from_secs(secs);
    let group = format!("api{count}|{algorithm}");
    let limit = LimitSpec::new(algorithm, Rate::per(count, length)).build().expect("in range");
    (Scope::in_group(format!("{group}|{algorithm}|{length}"), &group), limit)
}

/// A batch that Redis cannot apply is sent again in every tick, and nothing that the other cell consumes is ever debited.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_thousands_is_debited_once() {
    let server = Server::start(&[]);
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(1_700_000_017_123_457)));
    let store = RedisStore::with_clock(patient(&server.url()), clock.clone());
    let kinds = [
        counter(Algorithm::Gcra, 60),
        counter(Algorithm::FixedWindow, 60),
        counter(Algorithm::SlidingWindow, 60),
    ];
    let names: Vec<String> = (0..COUNTERS).map(|number| format!("caller{number}")).collect();
    let parts: Vec<[KeyPart<'_>; 1]> = names.iter().map(|name| [KeyPart::Text(name)]).collect();
    let (mut rng, mut ledger) = (SplitMix64::new(11), Ledger::default());
    for round in 0..3 {
        let mut charges: Vec<Charge<'_>> = Vec::new();
        for parts in &parts {
            let (scope, limit) = rng.pick(&kinds);
            let cost = match rng.below(10) {
                0 => Cost::refund(1 + rng.below(3)),
                1 => Cost::new(50),
                _ => Cost::new(1 + rng.below(3)),
            };
            let charge = Charge::new(CounterKey { scope, parts }, limit, cost);
            charges.push(Charge { enforcement: Enforcement::Independent, ..charge });
        }
        ledger.debit(clock.now(), &charges);
        store.debit_reported(&charges).await.expect("a debit");
        for charge in charges.iter().step_by(37) {
            let peek = [Charge { cost: Cost::PEEK, ..*charge }];
            let expected = ledger.charge(clock.now(), &peek);
            assert_eq!(store.charge(&peek).await.expect("an answer"), expected, "round {round}: {charge:?}");
        }
        clock.advance(TimeDelta::from_secs(7));
    }
    assert_eq!(store.mismatches(), 0);
}

/// Counters in use are added to without being read: each must end as if it had been, also one that is new, full, at its limit or
/// in a window that has turned, and no key may stay for ever.
#[tokio::test(flavor = "multi_thread")]
async fn counters_that_are_added_to_unread_are_debited_like_the_others() {
    let server = Server::start(&[]);
    debit_unread(&server, &server.url()).await;
}

/// A user that may not change an expiry, as older versions needed none: what was added before such a counter must not be added
/// again with the next batch.
#[tokio::test(flavor = "multi_thread")]
async fn debits_need_no_leave_to_change_an_expiry() {
    let server = Server::start(&[]);
    let _: () = server.command(&["ACL", "SETUSER", "gate", "on", ">sesame", "~*", "+@all", "-pexpire"]);
    debit_unread(&server, &server.url().replacen("://", "://gate:sesame@", 1)).await;
    let refused: redis::Value = server.command(&["ACL", "LOG", "1"]);
    assert!(format!("{refused:?}").contains("pexpire"), "a refusal of PEXPIRE: {refused:?}");
}

async fn debit_unread(server: &Server, url: &str) {
    let clock = Arc::new(ManualClock::at(Timestamp::from_micros(1_700_000_017_123_457)));
    let store = RedisStore::with_clock(patient(url), clock.clone());
    // Another process, whose clock is ahead: what it has written is in no short form for this one, and the whole batch is left to
    // another script after some of it has been added.
    let ahead = TimeDelta::from_secs(120);
    let late_clock = Arc::new(ManualClock::at(clock.now() + ahead));
    let late = RedisStore::with_clock(patient(url), late_clock.clone());
    let window = |count| counter_of(Algorithm::FixedWindow, count, 60);
    let kinds = [counter(Algorithm::Gcra, 60), window(20), window(100), window(5_000)];
    let names: Vec<String> = (0..300).map(|number| format!("caller{number}")).collect();
    let parts: Vec<[KeyPart<'_>; 1]> = names.iter().map(|name| [KeyPart::Text(name)]).collect();
    let (mut rng, mut ledger) = (SplitMix64::new(12), Ledger::default());
    for round in 0..120 {
        // At times a few of many, at times nearly all; and steps of less than what a double of the state is off.
        let (most, step) = (1 + rng.below(300), 1 << rng.below(25));
        let mut charges: Vec<Charge<'_>> = Vec::new();
        for (at, parts) in parts.iter().enumerate() {
            if rng.below(300) >= most {
                continue;
            }
            let (scope, limit) = &kinds[at % kinds.len()];
            let cost = Cost::new(1 + rng.below(limit.capacity() / 7));
            let charge = Charge::new(CounterKey { scope, parts }, limit, cost);
            charges.push(Charge { enforcement: Enforcement::Independent, ..charge });
        }
        if round % 10 == 9
            && let Some(one) = charges.last()
        {
            ledger.debit(late_clock.now(), &[*one]);
            late.debit_reported(&[*one]).await.expect("a debit");
        }
        ledger.debit(clock.now(), &charges);
        store.debit_reported(&charges).await.expect("a debit");
        for charge in charges.iter().step_by(7) {
            let peek = [Charge { cost: Cost::PEEK, ..*charge }];
            let expected = ledger.charge(clock.now(), &peek);
            assert_eq!(store.charge(&peek).await.expect("an answer"), expected, "round {round}: {charge:?}");
        }
        clock.advance(TimeDelta::from_micros(step));
        late_clock.advance(TimeDelta::from_micros(step));
    }
    assert_eq!(store.mismatches(), 0);
    assert_eq!(server.keys_without_expiry(), Vec::<String>::new());
}

/// The number of a full window is followed by that of the next one when it is empty: a count of the one before must not be taken
/// for one of this.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_window_is_not_taken_for_the_next() {
    let server = Server::start(&[]);
    let length = TimeDelta::from_secs(1);
    let limit =
        LimitSpec::new(Algorithm::FixedWindow, Rate::per(2_000_000, length)).build().expect("in range");
    let scope = Scope::in_group(format!("api|{}|{length}", Algorithm::FixedWindow), "api");
    for count in [995_902, 995_903, 995_904, 999_990, 999_999, 1_000_000] {
        let _: () = server.command(&["FLUSHALL"]);
        let clock = Arc::new(ManualClock::at(Timestamp::from_micros(1_700_000_017_123_457)));
        let store = RedisStore::with_clock(patient(&server.url()), clock.clone());
        let mut ledger = Ledger::default();
        let key = CounterKey { scope: &scope, parts: &[KeyPart::Text("alice")] };
        let of = |units| {
            let cost = Charge::new(key, &limit, Cost::new(units));
            [Charge { enforcement: Enforcement::Independent, ..cost }]
        };
        for (units, later) in [(count, 0), (1, 1), (1, 0), (30, 0)] {
            clock.advance(TimeDelta::from_secs(later));
            ledger.debit(clock.now(), &of(units));
            store.debit_reported(&of(units)).await.expect("a debit");
            let peek = Charge { cost: Cost::PEEK, ..of(1)[0] };
            let expected = ledger.charge(clock.now(), &[peek]);
            assert_eq!(store.charge(&[peek]).await.expect("an answer"), expected, "{units} after {count}");
        }
    }
}

/// A damaged counter must fail before anything is written: the batch is sent again, and the others would be debited twice.
#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_counter_in_a_batch_changes_nothing() {
    let server = Server::start(&[]);
    let store = RedisStore::connect(patient(&server.url()));
    for (scope, limit) in [counter(Algorithm::Gcra, 60), counter(Algorithm::FixedWindow, 3_600)] {
        let _: () = server.command(&["FLUSHALL"]);
        let parts: Vec<[KeyPart<'_>; 1]> = ["a", "b", "c"].iter().map(|name| [KeyPart::Text(name)]).collect();
        let charge = |parts| Charge {
            enforcement: Enforcement::Independent,
            ..Charge::new(CounterKey { scope: &scope, parts }, &limit, Cost::ONE)
        };
        let charges: Vec<Charge<'_>> = parts.iter().map(|parts| charge(parts)).collect();
        store.debit_reported(&charges).await.expect("a debit");
        let mut keys: Vec<String> = server.command(&["KEYS", "tg1:*"]);
        keys.sort();
        let values = || keys.iter().map(|key| server.command(&["GET", key])).collect::<Vec<String>>();
        // Still a number for Lua, but not for Redis.
        let value = values().pop().expect("the last");
        assert!(matches!(value.len(), 18 | 20), "{value} is in short form");
        let _: () = server.command(&["SET", &keys[2], &format!("{}1e1", &value[..value.len() - 3])]);
        let before = values();
        assert!(store.debit_reported(&charges).await.is_err(), "{before:?}");
        assert_eq!(values(), before);
    }
}
