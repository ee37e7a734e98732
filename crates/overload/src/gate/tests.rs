use super::*;
use std::sync::mpsc;
use std::time::Duration;

#[test]
fn denials_are_no_capacity() {
    let gate = Gate::<()>::new(&GateConfig::adaptive(4));
    let arrival = Arrival::new(Priority::Normal, 1);
    for at in 1..1_000u64 {
        let now = Timestamp::from_micros(1_000_000 + at * 10_000);
        let Entry::Admitted(ticket) = gate.enter(now, &arrival, GateMode::Live) else {
            panic!("nothing is in flight");
        };
        let is_served = at % 10 == 0;
        if is_served {
            gate.measure(&ticket, now + TimeDelta::from_millis(5));
        }
        let ended = if is_served { Ended::Completed } else { Ended::Denied };
        assert!(gate.leave(ticket, now, ended).is_empty());
    }
    // 100 a second arrive, 10 of them are served.
    let throughput = gate.state(Timestamp::from_secs(11)).throughput;
    assert!((5.0..=20.0).contains(&throughput), "{throughput}");
}

/// Keeps `many` requests of 10 ms each in flight for a while. Returns the time at the end.
fn load(gate: &Gate<()>, from: Timestamp, seconds: u64, many: usize, latency: u64) -> Timestamp {
    let mut now = from;
    let mut open = std::collections::VecDeque::new();
    while now < from + TimeDelta::from_secs(seconds) {
        now = now + TimeDelta::from_micros(latency * 1000 / many as u64);
        if open.len() >= many
            && let Some(ticket) = open.pop_front()
        {
            gate.measure(&ticket, now);
            let _ = gate.leave(ticket, now, Ended::Completed);
        }
        match gate.enter(now, &Arrival::new(Priority::Normal, open.len() as u64), GateMode::Live) {
            Entry::Admitted(ticket) | Entry::Shadowed(ticket, _) => open.push_back(ticket),
            Entry::Full(_) | Entry::Shed(_) => {}
        }
    }
    for ticket in open {
        let _ = gate.leave(ticket, now, Ended::Abandoned);
    }
    now
}

#[test]
fn while_shedding_is_suspended_what_would_be_shed_is_counted_and_the_base_line_stays() {
    let gate = Gate::<()>::new(&GateConfig::adaptive(4));
    let now = load(&gate, Timestamp::from_secs(1), 10, 4, 10);
    let before = gate.state(now);
    assert_eq!((before.is_shadow, before.shadowed), (false, [0; 4]));
    let base = before.base_latency.expect("measured");
    gate.set_shadow(true);
    // The upstream completes 400 a second as before; 200 are in flight, and latency is that of a queue.
    let now = load(&gate, now, 120, 200, 500);
    let state = gate.state(now);
    assert!(state.is_shadow && state.shadowed[2] > 0 && state.shed == [0; 4], "{state:?}");
    let after = state.base_latency.expect("measured");
    assert!(after < 2.0 * base, "{base} s, then {after} s");
}

#[test]
fn new_settings_keep_what_was_learned() {
    let gate = Gate::<()>::new(&GateConfig::adaptive(4));
    let now = load(&gate, Timestamp::from_secs(1), 10, 4, 10);
    let config = GateConfig { target: 3.0, is_fair: true, ..GateConfig::adaptive(8) };
    let (old, new) = (gate.state(now), gate.with_config(&config).state(now));
    assert!(old.base_latency.is_some() && old.admitted[2] > 0);
    assert_eq!(
        (new.base_latency, new.throughput, new.limit, new.admitted, new.in_flight),
        (old.base_latency, old.throughput, old.limit.max(8), old.admitted, 0)
    );
}

#[test]
fn the_limit_falls_also_where_all_clients_leave_before_they_are_answered() {
    let gate = Gate::<()>::new(&GateConfig::adaptive(4));
    let start = load(&gate, Timestamp::from_secs(1), 10, 4, 10);
    let before = gate.state(start);
    let mut open = std::collections::VecDeque::new();
    for at in 0..20_000u64 {
        let now = start + TimeDelta::from_millis(at);
        while let Some((since, ticket)) = open.pop_front() {
            if now.since(since) < TimeDelta::from_millis(300) {
                open.push_front((since, ticket));
                break;
            }
            let next = gate.leave(ticket, now, Ended::Abandoned);
            open.extend(next.into_iter().map(|(_, ticket)| (now, ticket)));
        }
        match gate.enter(now, &Arrival::new(Priority::Normal, at), GateMode::Live) {
            Entry::Admitted(ticket) | Entry::Shadowed(ticket, _) => open.push_back((now, ticket)),
            Entry::Full(waiting) => {
                let _ = gate.wait(now, waiting, ());
            }
            Entry::Shed(_) => {}
        }
    }
    let after = gate.state(start + TimeDelta::from_secs(20));
    assert!(after.limit <= before.limit / 2, "{} and then {}", before.limit, after.limit);
    assert!(after.throughput <= before.throughput, "nothing was completed");
}

fn fixed(limit: u32, target: f64) -> GateConfig {
    GateConfig { limit: LimitKind::Fixed(limit), target, ..GateConfig::adaptive(1) }
}

/// Enters once more than there should be places.
fn fill(gate: &Gate<u32>, now: Timestamp) -> Vec<Ticket> {
    let enter = |caller| match gate.enter(now, &Arrival::new(Priority::Normal, caller), GateMode::Live) {
        Entry::Admitted(ticket) => Some(ticket),
        Entry::Full(_) => None,
        other => panic!("{other:?}"),
    };
    (0..100).map_while(enter).collect()
}

#[test]
fn requests_in_flight_count_whatever_settings_follow() {
    let now = Timestamp::from_secs(1);
    let old = Gate::<u32>::new(&fixed(8, 2.0));
    let mut tickets = fill(&old, now);
    assert_eq!(tickets.len(), 8);
    let mut new = old.with_config(&fixed(8, 2.1));
    for target in [2.2, 2.3, 2.4] {
        assert!(fill(&new, now).is_empty() && new.state(now).in_flight == 8, "at {target}");
        new = new.with_config(&fixed(8, target));
    }
    // A request that waits in the new gate has the place of one that ends in the old gate.
    let Entry::Full(waiting) = new.enter(now, &Arrival::new(Priority::Normal, 1), GateMode::Live) else {
        panic!("no place is free");
    };
    assert!(matches!(new.wait(now, waiting, 7), Waited::Until(..)));
    let ended = tickets.pop().expect("eight");
    let admitted = old.leave(ended, now, Ended::Completed);
    assert_eq!(admitted.iter().map(|(waiter, _)| *waiter).collect::<Vec<_>>(), [7]);
    tickets.extend(admitted.into_iter().map(|(_, ticket)| ticket));
    // A lower limit holds for all of them, although the old gate had another, also after its next control step.
    let lower = new.with_config(&fixed(4, 2.0));
    let later = now + TimeDelta::from_secs(1);
    tickets.drain(..4).for_each(|ticket| assert!(old.leave(ticket, later, Ended::Completed).is_empty()));
    assert!(fill(&lower, later).is_empty());
    assert_eq!((lower.state(later).in_flight, lower.state(later).limit), (4, 4));
    tickets.drain(..).for_each(|ticket| assert!(lower.leave(ticket, later, Ended::Completed).is_empty()));
    assert_eq!((lower.state(later).in_flight, fill(&lower, later).len()), (0, 4));
}

#[test]
fn shadow_counts_requests_that_would_find_no_place() {
    let enter = |gate: &Gate<u32>, at: u64| {
        let now = Timestamp::from_micros(1_000_000 + at * 20_000);
        gate.enter(now, &Arrival::new(Priority::Normal, at), GateMode::Live)
    };
    let [live, shadow] = [false, true].map(|shadow| Gate::new(&GateConfig { shadow, ..fixed(8, 2.0) }));
    let mut tickets: Vec<Ticket> = (0..8)
        .map(|at| match (enter(&live, at), enter(&shadow, at)) {
            (Entry::Admitted(_), Entry::Admitted(ticket)) => ticket,
            other => panic!("{other:?}"),
        })
        .collect();
    for at in 8..23 {
        assert!(matches!(enter(&live, at), Entry::Full(_) | Entry::Shed(_)), "{at}");
        match enter(&shadow, at) {
            Entry::Shadowed(ticket, _) => tickets.push(ticket),
            other => panic!("{at}: {other:?}"),
        }
    }
    let state = shadow.state(Timestamp::from_micros(1_460_000));
    assert_eq!((state.shadowed[2], state.admitted[2], state.in_flight), (15, 8, 23));
    // Those that would have been shed would hold no places.
    let later = Timestamp::from_secs(10);
    tickets.drain(..).for_each(|ticket| assert!(shadow.leave(ticket, later, Ended::Completed).is_empty()));
    for at in 1_000..1_008 {
        assert!(matches!(enter(&shadow, at), Entry::Admitted(_)), "{at}");
    }
}

#[test]
fn the_state_is_that_of_now_also_when_nothing_arrives() {
    let gate = Gate::<()>::new(&fixed(4, 2.0));
    let mut open = std::collections::VecDeque::new();
    let mut now = Timestamp::from_secs(1);
    // 1,000 a second arrive, each takes 10 ms, and four are served at a time.
    for at in 0..2_000 {
        now = Timestamp::from_secs(1) + TimeDelta::from_millis(at);
        while let Some((_, ticket)) = open.pop_front_if(|(end, _)| *end <= now) {
            gate.measure(&ticket, now);
            let next = gate.leave(ticket, now, Ended::Completed);
            open.extend(next.into_iter().map(|(_, ticket)| (now + TimeDelta::from_millis(10), ticket)));
        }
        match gate.enter(now, &Arrival::new(Priority::Normal, at), GateMode::Live) {
            Entry::Full(waiting) => drop(gate.wait(now, waiting, ())),
            Entry::Admitted(ticket) => open.push_back((now + TimeDelta::from_millis(10), ticket)),
            Entry::Shadowed(..) | Entry::Shed(_) => {}
        }
    }
    let state = gate.state(now);
    assert!(state.demand > 500.0 && state.threshold < POSITIONS, "{state:?}");
    for (_, ticket) in open {
        let _ = gate.leave(ticket, now, Ended::Abandoned);
    }
    // Those of the last interval are a tenth of a second's in ten seconds.
    let state = gate.state(now + TimeDelta::from_secs(10));
    assert!(state.demand < 20.0 && state.waiting == 0 && state.threshold == POSITIONS, "{state:?}");
}

/// One request more in flight than the limit, or a place that is never free again, would be an upstream that collapses, or
/// one that serves nobody.
#[test]
fn threads_never_exceed_the_limit_and_lose_no_place() {
    for limit in [1, 3, 16, 40] {
        let gate = Gate::<mpsc::Sender<Ticket>>::new(&fixed(limit, 2.0));
        let (open, clock) = (AtomicU32::new(0), AtomicU64::new(1_000_000));
        let now = || Timestamp::from_micros(clock.fetch_add(3, Ordering::Relaxed));
        let leave = |ticket, ended| {
            for (waiter, ticket) in gate.leave(ticket, now(), ended) {
                // One that does not wait any more passes it on when the receiver is dropped.
                waiter.send(ticket).expect("receivers wait until they are answered");
            }
        };
        let request = |caller| {
            let entry = gate.enter(now(), &Arrival::new(Priority::Normal, caller), GateMode::Live);
            let ticket = match entry {
                Entry::Admitted(ticket) => ticket,
                Entry::Shed(_) | Entry::Shadowed(..) => return,
                Entry::Full(waiting) => {
                    let (waiter, place) = mpsc::channel();
                    let Waited::Until(_, replaced) = gate.wait(now(), waiting, waiter) else { return };
                    drop(replaced);
                    for (waiter, ticket) in gate.admit_waiting(now()) {
                        waiter.send(ticket).expect("receivers wait until they are answered");
                    }
                    match place.recv_timeout(Duration::from_secs(60)) {
                        Ok(ticket) => ticket,
                        Err(mpsc::RecvTimeoutError::Disconnected) => return,
                        Err(mpsc::RecvTimeoutError::Timeout) => panic!("a free place was given to nobody"),
                    }
                }
            };
            let others = open.fetch_add(1, Ordering::SeqCst);
            assert!(others < limit, "{others} others are in flight");
            if caller % 8 == 0 {
                std::thread::yield_now();
            }
            open.fetch_sub(1, Ordering::SeqCst);
            gate.measure(&ticket, now());
            leave(ticket, if caller % 3 == 0 { Ended::Abandoned } else { Ended::Completed });
        };
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let request = &request;
                scope.spawn(move || (0..3_000).for_each(|at| request(thread * 10_000 + at)));
            }
        });
        // The queue is long over, and nothing is shed any more.
        let mut state = gate.state(now());
        for second in 1..60 {
            state = gate.state(now() + TimeDelta::from_secs(second));
        }
        assert_eq!((state.in_flight, state.threshold), (0, POSITIONS));
        let later = now() + TimeDelta::from_secs(60);
        let enter = |caller| gate.enter(later, &Arrival::new(Priority::Normal, caller), GateMode::Live);
        let places = (0..100).take_while(|caller| matches!(enter(*caller), Entry::Admitted(_))).count();
        assert_eq!(places, limit as usize);
    }
}

/// A thread keeps places for its next requests, but not from the requests of others.
#[test]
fn places_that_a_thread_keeps_are_free_for_all() {
    let now = Timestamp::from_secs(1);
    let gate = Gate::<u32>::new(&fixed(2, 2.0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            fill(&gate, now).into_iter().for_each(|ticket| drop(gate.leave(ticket, now, Ended::Completed)));
        });
    });
    assert_eq!((gate.state(now).in_flight, fill(&gate, now).len(), gate.state(now).in_flight), (0, 2, 2));
}

/// Requests that gave their places back come back one after the other, before new ones, and leave the reserve to requests that
/// may use it.
#[test]
fn requests_that_need_their_places_again_go_first_and_keep_the_limit() {
    let now = Timestamp::from_secs(1);
    let gate = Gate::<u32>::new(&fixed(2, 2.0));
    let entry = |priority| gate.enter(now, &Arrival::new(priority, 7), GateMode::Live);
    let again = |is_patient| gate.try_enter_again(is_patient, || now);
    let mut open = fill(&gate, now);
    let Entry::Full(new) = entry(Priority::Normal) else { panic!("all places are taken") };
    assert!(matches!(gate.wait(now, new, 1), Waited::Until(..)));
    assert!(again(false).is_none(), "no place is free");
    [2, 3].into_iter().for_each(|waiter| gate.wait_again(false, waiter));
    assert!(gate.admit_waiting(now).is_empty());
    assert_eq!(gate.waiting(), 3);

    let Entry::Admitted(critical) = entry(Priority::Critical) else { panic!("the reserve is free") };
    assert!(critical.is_patient() && !open[0].is_patient());
    assert!(matches!(entry(Priority::Critical), Entry::Full(_)), "the reserve is one place");
    gate.wait_again(true, 4);
    let mut next = |ticket| {
        let admitted = gate.leave(ticket, now, Ended::Completed);
        let waiters: Vec<u32> = admitted.iter().map(|(waiter, _)| *waiter).collect();
        open.extend(admitted.into_iter().map(|(_, ticket)| ticket));
        (waiters, open.remove(0))
    };
    let (waiters, ticket) = next(critical);
    assert_eq!(waiters, [4], "one that may use the reserve");
    let (waiters, ticket) = next(ticket);
    assert!(waiters.is_empty(), "two are in flight beside the reserve: {waiters:?}");
    let (waiters, ticket) = next(ticket);
    assert_eq!(waiters, [2], "before the new one");
    let (waiters, ticket) = next(ticket);
    assert_eq!(waiters, [3]);
    let (waiters, _) = next(ticket);
    assert_eq!((waiters, gate.waiting()), (vec![1], 0));
}

/// Otherwise a normal request has the reserve's place when the critical one that was to have it has gone.
#[test]
fn the_reserve_stays_free_when_who_waits_for_it_has_waited_too_long() {
    let start = Timestamp::from_secs(1);
    let at = |millis| start + TimeDelta::from_millis(millis);
    let gate = Gate::<u32>::new(&fixed(2, 2.0));
    let entry = |now, priority| gate.enter(now, &Arrival::new(priority, 7), GateMode::Live);
    assert_eq!(fill(&gate, start).len(), 2);
    let Entry::Admitted(critical) = entry(start, Priority::Critical) else { panic!("the reserve is free") };
    for (now, priority, waiter) in [(start, Priority::Critical, 1), (at(90), Priority::Normal, 2)] {
        let Entry::Full(waiting) = entry(now, priority) else { panic!("all places are taken") };
        assert!(matches!(gate.wait(now, waiting, waiter), Waited::Until(..)));
    }
    // Makes a control step, so that none removes the critical request after its 150 ms.
    assert!(!matches!(entry(at(140), Priority::Sheddable), Entry::Admitted(_)));
    let admitted = gate.leave(critical, at(160), Ended::Completed);
    assert!(admitted.is_empty(), "{admitted:?}");
    assert_eq!((gate.state(at(160)).in_flight, gate.waiting()), (2, 1));
}

/// A metric by priority that was sampled would be wrong.
#[test]
fn all_requests_are_counted_where_few_are_measured() {
    let gate = Gate::<()>::new(&fixed(1_000, 2.0));
    // A million in a second, for two seconds, half a millisecond each.
    let mut open = std::collections::VecDeque::new();
    let mut measured = [0; 20];
    for at in 0..2_000_000u64 {
        let now = Timestamp::from_micros(1_000_000 + at);
        let Entry::Admitted(ticket) =
            gate.enter(now, &Arrival::new(Priority::ALL[at as usize % 4], at % 50), GateMode::Live)
        else {
            panic!("places are free");
        };
        measured[at as usize / 100_000] += u32::from(ticket.weight > 0);
        open.push_back(ticket);
        if at >= 500 {
            let ticket = open.pop_front().expect("500");
            gate.measure(&ticket, now);
            assert!(gate.leave(ticket, now, Ended::Completed).is_empty());
        }
    }
    // In the first tenth of a second the gate does not know how many there are.
    assert!(
        measured[2..].iter().all(|count| (70..=150).contains(count)),
        "a thousand in a second: {measured:?}"
    );
    let state = gate.state(Timestamp::from_micros(3_000_000));
    assert_eq!((state.admitted, state.in_flight), ([500_000; 4], 500));
    let base = state.base_latency.expect("measured");
    assert!((0.000_45..0.000_55).contains(&base), "{base} s instead of half a millisecond");
    assert!((state.throughput - 1e6).abs() < 1e5 && (state.demand - 1e6).abs() < 1e5, "{state:?}");
}

/// A reading of the clock takes half as long as all the rest of passing a gate.
#[test]
fn the_clock_is_read_once_for_a_request_that_is_measured() {
    let gate = Gate::<()>::new(&GateConfig::adaptive(16));
    let (now, readings) = (Timestamp::from_secs(1), std::cell::Cell::new(0));
    let read = || {
        readings.set(readings.get() + 1);
        now
    };
    let Entry::Admitted(ticket) = gate.enter(now, &Arrival::new(Priority::Normal, 1), GateMode::Live) else {
        panic!("places are free");
    };
    assert!(ticket.weight > 0, "all are measured where there are few");
    gate.measure_at(&ticket, read);
    assert!(gate.leave_at(&mut Some(ticket), read, Ended::Completed).is_none());
    assert_eq!(readings.get(), 1);
}

/// Otherwise each request that ends twice would leave a place more than there are.
#[test]
fn a_ticket_frees_one_place() {
    let gate = Gate::<()>::new(&GateConfig::adaptive(16));
    let now = Timestamp::from_secs(1);
    let mut tickets: Vec<_> = (0..3).map(|caller| gate.try_enter(now, Priority::Normal, || caller)).collect();
    assert!(tickets.iter().all(Option::is_some), "places are free");
    for (left, ended) in [(2, Ended::Completed), (1, Ended::Abandoned)] {
        let ticket = &mut tickets[left];
        for _ in 0..2 {
            assert!(gate.leave_at(ticket, || now, ended).is_none_or(|admitted| admitted.is_empty()));
            assert!(ticket.is_none());
            assert_eq!(gate.state(now).in_flight, left as u32, "{ended:?}");
        }
    }
}

/// The next sample may be far away when the load goes; the control step is not.
#[test]
fn the_control_step_does_not_wait_for_a_sample() {
    let gate = Gate::<()>::new(&fixed(100, 2.0));
    let request = |micros: u64| {
        let now = Timestamp::from_micros(1_000_000 + micros);
        let Entry::Admitted(ticket) = gate.enter(now, &Arrival::new(Priority::Normal, 1), GateMode::Live)
        else {
            panic!("places are free");
        };
        let is_measured = ticket.weight > 0;
        gate.measure(&ticket, now);
        assert!(gate.leave(ticket, now, Ended::Completed).is_empty());
        is_measured
    };
    (0..300_000).for_each(|at| _ = request(at));
    // Ten in a second now: from the next interval on all of them are measured.
    let measured: Vec<bool> = (0..10).map(|at| request(400_000 + at * 100_000)).collect();
    assert!(measured[3..].iter().all(|is_measured| *is_measured), "{measured:?}");
}
