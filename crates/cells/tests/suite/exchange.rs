//! The exchange of consumption: nothing is counted zero times, nothing twice.

use std::collections::HashMap;
use std::sync::{Arc, Barrier};
use tollgate_cells::{Consumed, Inbox, KeyValues, Ledger, Outbox, Receipt, SentCounter};
use tollgate_core::{
    Algorithm, Charge, Cost, CounterKey, KeyPart, Limit, LimitSpec, Rate, Scope, TimeDelta, Timestamp,
};

fn limit(per_second: u64) -> Limit {
    LimitSpec::new(Algorithm::Gcra, Rate::per(per_second, TimeDelta::from_secs(1))).build().expect("valid")
}

fn consumed(key: &str, units: i64, limit: &Limit) -> Consumed {
    Consumed {
        counter: Arc::new(SentCounter { scope: Scope::new("api|user"), limit: limit.clone() }),
        values: KeyValues::new(&[KeyPart::Text(key)]),
        units,
    }
}

const NOW: Timestamp = Timestamp::from_secs(1_000);

/// Without it a broken link loses a batch, or its repetition is counted twice.
#[test]
fn a_batch_is_repeated_until_it_is_acknowledged_and_applied_once() {
    let (mut outbox, inbox) = (Outbox::new(100, NOW), Inbox::new(8));
    outbox.add(&[consumed("a", 3, &limit(10))], false, NOW);
    let first = outbox.next_batch(NOW);
    outbox.add(&[consumed("a", 4, &limit(10))], false, NOW);
    assert_eq!(outbox.next_batch(NOW), first, "the same, because it was not acknowledged");
    apply(&inbox, 1, first.sequence);
    assert!(matches!(inbox.receive("us", 1, first.sequence), Receipt::Repeated));
    outbox.acknowledge(first.sequence);
    let second = outbox.next_batch(NOW);
    assert_eq!((first.entries[0].units, second.entries[0].units), (3, 4));
    apply(&inbox, 1, second.sequence);
    outbox.acknowledge(first.sequence);
    assert_eq!(outbox.next_batch(NOW), second, "an old acknowledgement is not one of this batch");
    // A restarted sender begins at 1 again; a late message of the process before is still known.
    apply(&inbox, 2, 1);
    assert!(matches!(inbox.receive("us", 1, second.sequence), Receipt::Repeated));
}

/// Without it the consumption of a tick that is sent as it came is lost or counted twice where a peer is slow, gone or new.
#[test]
fn a_tick_is_sent_as_it_came_and_added_up_where_it_waits() {
    let limit = limit(1_000);
    let tick = |units: &[(&str, i64)]| -> Arc<Vec<Consumed>> {
        Arc::new(units.iter().map(|(key, units)| consumed(key, *units, &limit)).collect())
    };
    let units = |outbox: &mut Outbox, now| {
        let batch = outbox.next_batch(now);
        outbox.acknowledge(batch.sequence);
        let mut units: Vec<i64> = batch.entries.iter().map(|entry| entry.units).collect();
        units.sort_unstable();
        (units, batch.covers)
    };
    let later = NOW + TimeDelta::from_millis(200);
    let mut outbox = Outbox::new(3, NOW);
    outbox.add_tick(&tick(&[("a", 1), ("b", 2)]), false, later);
    assert_eq!((outbox.waiting(), outbox.has_more()), (2, true));
    let in_flight = outbox.next_batch(later);
    assert_eq!((in_flight.entries.len(), in_flight.covers, outbox.has_more()), (2, Some(200_000), false));
    // The peer is slow: two ticks are added up, and what was sent is not among them.
    outbox.add_tick(&tick(&[("a", 4), ("c", 8)]), false, later);
    assert_eq!(outbox.next_batch(later), in_flight);
    outbox.add_tick(&tick(&[("a", 16)]), false, later);
    assert_eq!(outbox.waiting(), 4);
    outbox.acknowledge(in_flight.sequence);
    assert_eq!(units(&mut outbox, later).0, [8, 20]);
    assert_eq!(outbox.acked_until(), later);
    // Another node of its cell gets what is in flight and what waits.
    outbox.add_tick(&tick(&[("a", 1)]), false, later);
    let lost = outbox.next_batch(later);
    outbox.add_tick(&tick(&[("b", 2)]), false, later);
    let taken: i64 = outbox.take(later).iter().map(|consumed| consumed.units).sum();
    assert_eq!((taken, outbox.waiting(), lost.entries.len()), (3, 0, 1));
    // A silent peer, and one that the tick has no room for.
    outbox.add_tick(&tick(&[("a", 6)]), true, later);
    assert_eq!(units(&mut outbox, later + TimeDelta::from_millis(4)).0, [2], "four have been restored");
    outbox.add_tick(&tick(&[("a", 5), ("b", 6), ("c", 7), ("d", 8)]), false, later);
    let (sent, _) = units(&mut outbox, later);
    assert_eq!(sent.iter().sum::<i64>() + i64::try_from(outbox.dropped()).expect("small"), 26);
    assert_eq!(sent.len(), 3);
    // One that is larger than a message is continued.
    let mut outbox = Outbox::new(40_000, NOW);
    let many: Vec<String> = (0..20_000).map(|key| key.to_string()).collect();
    let many: Vec<(&str, i64)> = many.iter().map(|key| (key.as_str(), 1)).collect();
    outbox.add_tick(&tick(&many), false, later);
    let (first, second) = (units(&mut outbox, later), units(&mut outbox, later));
    assert_eq!((first.0.len() + second.0.len(), first.1, second.1), (20_000, Some(200_000), Some(0)));
    assert!(first.0.len() <= 16_384 && !outbox.has_more());
    // What a peer was not told for longer than it counts is not sent.
    outbox.add_tick(&tick(&[("a", 6)]), false, later);
    assert!(units(&mut outbox, later + TimeDelta::from_secs(60)).0.is_empty());
}

fn apply(inbox: &Inbox, incarnation: u64, sequence: u64) {
    let Receipt::New(application) = inbox.receive("us", incarnation, sequence) else { panic!("not new") };
    application.finish();
}

/// Without it a batch that fails is acknowledged and never counted, or what was applied of it is counted in each tick.
#[test]
fn a_batch_is_applied_only_once_it_is() {
    let inbox = Inbox::new(8);
    let Receipt::New(mut application) = inbox.receive("us", 1, 1) else { panic!("not new") };
    assert!(matches!(inbox.receive("us", 1, 1), Receipt::Busy), "neither applied nor to be applied again");
    application.applied.insert(3);
    drop(application);
    let Receipt::New(application) = inbox.receive("us", 1, 1) else { panic!("it has failed") };
    assert!(application.applied.contains(&3) && application.applied.len() == 1);
    application.finish();
    assert!(matches!(inbox.receive("us", 1, 1), Receipt::Repeated));
}

/// Without it a refund of units that time has restored gives them to the peer a second time when the link heals.
#[test]
fn a_refund_while_the_peer_is_silent_makes_no_units() {
    let mut outbox = Outbox::new(100, NOW);
    outbox.add(&[consumed("a", -4, &limit(10)), consumed("b", 6, &limit(10))], true, NOW);
    outbox.add(&[consumed("b", -2, &limit(10))], true, NOW);
    let batch = outbox.next_batch(NOW);
    let units: Vec<i64> = batch.entries.iter().map(|entry| entry.units).collect();
    assert_eq!(units, [4]);
}

/// Without it cells that decided by their shares for a minute each forget what the bucket has restored of the others'
/// consumption too, and admit up to a burst again once the link heals.
#[test]
fn a_bucket_is_restored_by_the_share_while_the_peer_is_silent() {
    let window = LimitSpec::new(Algorithm::SlidingLog, Rate::per(60, TimeDelta::from_secs(60)));
    let bucket = LimitSpec::new(Algorithm::Gcra, Rate::per(60, TimeDelta::from_secs(60)));
    let [window, bucket] = [window, bucket].map(|spec| spec.build().expect("a limit"));
    let mut outbox = Outbox::new(100, NOW);
    outbox.set_share(333_334, NOW);
    outbox.add(&[consumed("a", 20, &bucket), consumed("b", 20, &window)], true, NOW);
    for second in 1..=30 {
        let now = NOW + TimeDelta::from_secs(second);
        outbox.set_share(333_334, now);
        outbox.add(&[consumed("a", i64::from(second % 3 == 0), &bucket)], true, now);
    }
    let batch = outbox.next_batch(NOW + TimeDelta::from_secs(30));
    let mut units: Vec<i64> = batch.entries.iter().map(|entry| entry.units).collect();
    units.sort_unstable();
    assert_eq!(units, [20, 20], "as many as were restored, and all of the last minute");
}

/// Without it the busiest counters are forgotten first while a peer is silent, and the loss is not seen.
#[test]
fn a_full_outbox_drops_the_smallest_and_counts_it() {
    let mut outbox = Outbox::new(2, NOW);
    outbox.add(&[consumed("a", 8, &limit(10)), consumed("b", 3, &limit(10))], true, NOW);
    outbox.add(&[consumed("c", 5, &limit(10))], false, NOW);
    let mut units: Vec<i64> = outbox.next_batch(NOW).entries.iter().map(|entry| entry.units).collect();
    units.sort_unstable();
    assert_eq!((units, outbox.dropped()), (vec![5, 8], 3));
}

/// Without it strangers that claim many names fill a cell's memory, or no cell with a new name can join any more.
#[test]
fn senders_are_bounded_and_the_one_that_is_silent_for_longest_gives_way() {
    let inbox = Inbox::new(2);
    let finish = |name: &str, sequence: u64| match inbox.receive(name, 1, sequence) {
        Receipt::New(application) => application.finish(),
        other => panic!("{name}: {other:?}"),
    };
    finish("living", 1);
    for (at, name) in (0..300).map(|at| (at, format!("stranger-{at}"))) {
        finish(&name, 1);
        finish("living", 2 + at);
        assert!(matches!(inbox.receive("living", 1, 2 + at), Receipt::Repeated), "it is remembered");
    }
    let inbox = Inbox::new(2);
    let running = ["a", "b"].map(|name| inbox.receive(name, 1, 1));
    assert!(running.iter().all(|receipt| matches!(receipt, Receipt::New(_))));
    assert!(matches!(inbox.receive("c", 1, 1), Receipt::Refused), "what is being applied is not forgotten");
    drop(running);
    for incarnation in 2..100 {
        assert!(matches!(inbox.receive("a", incarnation, 1), Receipt::New(_)));
    }
}

/// Without it a healed link debits an hour of consumption at once, or nothing.
#[test]
fn what_was_consumed_by_the_share_counts_as_long_as_a_counter_would() {
    let mut outbox = Outbox::new(100, NOW);
    outbox.add(&[consumed("a", 6, &limit(10))], true, NOW);
    let later = NOW + TimeDelta::from_millis(400);
    assert_eq!(outbox.next_batch(later).entries[0].units, 2, "four units have been restored since");
    let mut outbox = Outbox::new(100, NOW);
    outbox.add(&[consumed("a", 6, &limit(10))], false, NOW);
    assert_eq!(outbox.next_batch(later).entries[0].units, 6, "not known to be within a share: in full");
    let mut outbox = Outbox::new(100, NOW);
    outbox.add(&[consumed("a", 6, &limit(10))], false, NOW);
    assert!(outbox.next_batch(NOW + TimeDelta::from_secs(60)).entries.is_empty(), "the state has run out");
}

/// Without it a peer that is away for a day takes all memory; and what is dropped is known.
#[test]
fn memory_is_bounded_and_the_smallest_give_way() {
    let mut outbox = Outbox::new(4, NOW);
    for n in 0..20 {
        outbox.add(&[consumed(&format!("k{n}"), 1 + n, &limit(1_000))], false, NOW);
    }
    assert_eq!(outbox.waiting(), 4);
    let units: i64 = outbox.next_batch(NOW).entries.iter().map(|entry| entry.units).sum();
    assert_eq!(u64::try_from(units).expect("positive") + outbox.dropped(), (1..=20).sum::<u64>());
    let (ledger, scope, limit) = (Ledger::new(64), Scope::new("s"), limit(10));
    for n in 0..10_000 {
        let (name, parts);
        name = n.to_string();
        parts = [KeyPart::Text(&name)];
        ledger.record(&Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::ONE));
    }
    let kept: i64 = ledger.drain().iter().map(|consumed| consumed.units).sum();
    assert_eq!(u64::try_from(kept).expect("positive") + ledger.dropped(), 10_000);
    assert!(kept <= 64);
}

/// Without it callers with long values take many times the memory of the counters that are allowed to wait.
#[test]
fn memory_is_bounded_in_bytes_as_well() {
    let long = |n: u64| format!("{n}-{}", "x".repeat(60_000));
    let mut outbox = Outbox::new(1_000, NOW);
    for n in 0..100 {
        outbox.add(&[consumed(&long(n), 1, &limit(1_000))], n % 2 == 0, NOW);
    }
    assert!(outbox.waiting() <= 1_000 * 512 / 60_000, "{}", outbox.waiting());
    assert_eq!(outbox.waiting() as u64 + outbox.dropped(), 100);
    // One that is there already is only added to, and what was sent has left room.
    let waiting = outbox.waiting();
    let sent = outbox.next_batch(NOW);
    outbox.acknowledge(sent.sequence);
    assert_eq!((sent.entries.len(), outbox.waiting()), (waiting, 0));
    outbox.add(&[consumed(&long(7), 1, &limit(1_000)), consumed(&long(7), 2, &limit(1_000))], false, NOW);
    assert_eq!((outbox.waiting(), outbox.dropped()), (1, 100 - waiting as u64));
    let (ledger, scope, limit) = (Ledger::new(6_400), Scope::new("s"), limit(10));
    for n in 0..1_000 {
        let value = long(n);
        let parts = [KeyPart::Text(&value)];
        ledger.record(&Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, Cost::ONE));
    }
    let left = ledger.drain().len() as u64;
    assert!((1..=64).contains(&left), "{left}");
    assert_eq!(left + ledger.dropped(), 1_000);
}

/// Without it limits of other sizes on one counter are mixed up, or a refund is lost.
#[test]
fn consumption_is_added_up_by_counter_and_limit() {
    let (ledger, scope) = (Ledger::new(1_000), Scope::new("s"));
    let parts = [KeyPart::Text("a")];
    let key = CounterKey { scope: &scope, parts: &parts };
    let (small, large) = (limit(10), limit(20));
    for (limit, cost) in
        [(&small, Cost::new(3)), (&large, Cost::new(5)), (&small, Cost::new(4)), (&large, Cost::refund(2))]
    {
        ledger.record(&Charge::new(key, limit, cost));
    }
    let mut found: Vec<(u64, i64)> =
        ledger.drain().iter().map(|one| (one.counter.limit.capacity(), one.units)).collect();
    found.sort_unstable();
    assert_eq!(found, [(10, 7), (20, 3)]);
    assert!(ledger.drain().is_empty());
}

/// Without it a charge is sent apart from its refund, or as one of another limit of the same counter.
#[test]
fn a_counter_has_one_line_for_each_limit() {
    let (ledger, scope) = (Ledger::new(8_192), Scope::new("s"));
    let parts = [KeyPart::Text("a")];
    let per = |secs| {
        let spec = LimitSpec::new(Algorithm::Gcra, Rate::per(100, TimeDelta::from_secs(secs))).burst(100);
        spec.build().expect("valid")
    };
    let (second, hour) = (per(1), per(3_600));
    let drained = |costs: &[(&Limit, Cost)]| {
        for (limit, cost) in costs {
            ledger.record(&Charge::new(CounterKey { scope: &scope, parts: &parts }, limit, *cost));
        }
        let mut found: Vec<(bool, i64)> =
            ledger.drain().iter().map(|one| (one.counter.limit == hour, one.units)).collect();
        found.sort_unstable();
        found
    };
    assert_eq!(drained(&[(&second, Cost::new(5)), (&hour, Cost::new(7))]), [(false, 5), (true, 7)]);
    let refunded = [(&second, Cost::new(90_000)), (&second, Cost::new(4)), (&second, Cost::refund(90_001))];
    assert_eq!(drained(&refunded), [(false, 3)]);
    assert_eq!(drained(&[(&hour, Cost::new(60_000)), (&hour, Cost::new(60_000))]), [(true, 120_000)]);
    assert_eq!(drained(&[(&hour, Cost::new(60)), (&hour, Cost::refund(60))]), []);
    assert_eq!(drained(&[(&hour, Cost::refund(60))]), [(true, -60)]);
}

/// Without it units are lost or counted twice where threads and the tick meet, or each thread's part is sent on its own.
#[test]
fn what_threads_consume_is_added_up_by_counter() {
    let (ledger, scope, limit) = (Ledger::new(8_192), Scope::new("s"), limit(10));
    let charge = |caller: u64, cost: Cost| {
        let name = caller.to_string();
        let parts = [KeyPart::Text(&name)];
        ledger.record(&Charge::new(CounterKey { scope: &scope, parts: &parts }, &limit, cost));
    };
    // Each thread charges callers of its own and those of all.
    let work = |thread: u64| {
        for at in 0..4_000 {
            charge(at % 50, Cost::ONE);
            charge(1_000 * (1 + thread) + at % 500, Cost::new(3));
            if at % 8 == 0 {
                charge(at % 50, Cost::refund(2));
            }
        }
    };
    let add = |found: &mut HashMap<u64, i64>, all: Vec<Consumed>| {
        for one in all {
            let parts = one.values.parts();
            let KeyPart::Text(name) = parts[0] else { panic!("{parts:?}") };
            *found.entry(name.parse().expect("a number")).or_default() += one.units;
        }
    };
    let mut found = HashMap::new();
    // The threads of later rounds take over the tables of earlier ones.
    for _ in 0..3 {
        std::thread::scope(|threads| {
            let all: Vec<_> = (0..4).map(|thread| threads.spawn(move || work(thread))).collect();
            while all.iter().any(|thread| !thread.is_finished()) {
                add(&mut found, ledger.drain());
            }
            all.into_iter().for_each(|thread| thread.join().expect("no panic"));
        });
    }
    add(&mut found, ledger.drain());
    let refunds = |caller: u64| (0..4_000).step_by(8).filter(|at| at % 50 == caller).count() as i64;
    let of_all = (0..50).map(|caller| (caller, 3 * 4 * (80 - 2 * refunds(caller))));
    let own = (0..4).flat_map(|thread| (0..500).map(move |at| (1_000 * (1 + thread) + at, 3 * 8 * 3)));
    assert_eq!(found, of_all.chain(own).collect());
    assert_eq!(ledger.dropped(), 0);
    let both_there = Barrier::new(2);
    std::thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                charge(7, Cost::ONE);
                both_there.wait();
            });
        }
    });
    let units: Vec<i64> = ledger.drain().iter().map(|one| one.units).collect();
    assert_eq!(units, [2], "of two threads, in one line");
}

/// Without it what a caller used while a link was down is forgotten at the end of a minute, though its window goes on.
#[test]
fn what_was_consumed_by_the_share_counts_until_the_shifted_window_ends() {
    let minute = TimeDelta::from_secs(60);
    let spec = LimitSpec::new(Algorithm::FixedWindow, Rate::per(90, minute));
    let limit = spec.jitter().build().expect("valid");
    // Ten seconds before and after the end of a minute by the clock.
    let (before, after) = (Timestamp::from_secs(1_790), Timestamp::from_secs(1_810));
    let (mut still_counts, mut ended) = (0, 0);
    for name in (0..40).map(|at| format!("k{at}")) {
        let mut outbox = Outbox::new(100, before);
        outbox.add(&[consumed(&name, 20, &limit)], true, before);
        outbox.add(&[consumed(&name, -5, &limit)], true, before);
        let parts = [KeyPart::Text(&name)];
        let hash = CounterKey { scope: &Scope::new("api|user"), parts: &parts }.stable_hash();
        let is_same = limit.window(before, hash) == limit.window(after, hash);
        let sent: Vec<i64> = outbox.next_batch(after).entries.iter().map(|entry| entry.units).collect();
        assert_eq!(sent, if is_same { vec![15] } else { vec![] }, "{name}");
        if is_same { still_counts += 1 } else { ended += 1 }
    }
    assert!(still_counts > 0 && ended > 0, "{still_counts} {ended}");
}

/// Without it what is reserved and canceled while a peer is silent is debited there once it answers.
#[test]
fn a_refund_in_parts_of_a_unit_undoes_what_a_silent_peer_was_not_told() {
    let limit = LimitSpec::new(Algorithm::Gcra, Rate::per(900, TimeDelta::from_secs(3_600)));
    let counter =
        Arc::new(SentCounter { scope: Scope::new("api|caller"), limit: limit.build().expect("valid") });
    let (mut now, values) = (Timestamp::from_secs(1_700_000_000), KeyValues::new(&[KeyPart::Text("a")]));
    let mut outbox = Outbox::new(100, now);
    for _ in 0..8 {
        let taken = now;
        now = now + TimeDelta::from_millis(300);
        let (finer, cost) = counter.limit.refund(300, 300, taken, now).expect("a refund");
        let finer = Arc::new(SentCounter { scope: counter.scope.clone(), limit: finer });
        let units = -i64::try_from(cost.units()).expect("units");
        let refunded = Consumed { counter: finer, values: values.clone(), units };
        let reserved = Consumed { counter: Arc::clone(&counter), values: values.clone(), units: 300 };
        outbox.add(&[refunded, reserved], true, now);
    }
    let units: i64 = outbox.next_batch(now).entries.iter().map(|entry| entry.units).sum();
    assert!((0..=1).contains(&units), "{units}");
}

/// Without it a refund that waits for a peer takes off what is consumed in the next window.
#[test]
fn a_refund_is_not_sent_after_its_window() {
    let limit = LimitSpec::new(Algorithm::FixedWindow, Rate::per(1_000, TimeDelta::from_secs(10)));
    let counter =
        Arc::new(SentCounter { scope: Scope::new("api|caller"), limit: limit.build().expect("valid") });
    let (now, values) = (Timestamp::from_secs(1_700_000_005), KeyValues::new(&[KeyPart::Text("a")]));
    let consumed = |units| [Consumed { counter: Arc::clone(&counter), values: values.clone(), units }];
    let sent = |outbox: &mut Outbox, now| {
        outbox.next_batch(now).entries.iter().map(|entry| entry.units).collect::<Vec<_>>()
    };
    let later = now + TimeDelta::from_secs(5);
    for (units, after) in [(-40, 0), (40, 40)] {
        let mut outbox = Outbox::new(100, now);
        outbox.add(&consumed(units), false, now);
        assert_eq!(sent(&mut outbox, now), [units]);
        // It is sent again, at the same place.
        assert_eq!(sent(&mut outbox, now + TimeDelta::from_secs(1)), [units]);
        assert_eq!(sent(&mut outbox, later), [after]);
        let mut outbox = Outbox::new(100, now);
        outbox.add(&consumed(units), false, now);
        assert_eq!(sent(&mut outbox, later).iter().sum::<i64>(), after);
    }
}
