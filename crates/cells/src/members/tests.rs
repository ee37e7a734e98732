//! Which cell decides, and by which part, whatever cells see of each other.

use super::*;
use tollgate_core::{RegionMode, Scope, region_prefix};

/// Without it two cells that are cut off from each other and not from a third admit four thirds of a limit.
#[test]
fn the_parts_of_cells_sum_to_the_limit_whichever_links_are_cut() {
    let now = Timestamp::from_secs(1_000);
    // Each cell that answers, and those that answer it.
    let share = |own: &str, others: [&str; 2], answers: &[(usize, &[&str])]| {
        let peers = others.map(|name| PeerConfig::new(name, name)).to_vec();
        let members = Members::new(CellConfig::new(own, own, peers), 1, now);
        others.into_iter().enumerate().for_each(|(at, name)| members.on_hello(at, hello(name)));
        for (peer, seen) in answers {
            let answered = |name: &&str| Sighting { cell: (*name).to_owned(), age: 0, sign: Sign::Answered };
            let seen: Vec<Sighting> = seen.iter().map(answered).collect();
            members.on_answer(*peer, now, &seen, now);
        }
        members.share(now)
    };
    // The third receives from both, and learns what they take of its whole limit.
    assert_eq!(share("c", ["a", "b"], &[(0, &["c"]), (1, &["c"])]), (3_000, 3_000));
    assert_eq!(share("a", ["b", "c"], &[(1, &["a", "b"])]), (1_000, 3_000));
    assert_eq!(share("b", ["a", "c"], &[(1, &["a", "b"])]), (1_000, 3_000));
    // The third reaches both, and neither reaches it: it learns nothing of what they take.
    assert_eq!(share("c", ["a", "b"], &[(0, &["b"]), (1, &["a"])]), (1_000, 3_000));
    assert_eq!(share("a", ["b", "c"], &[(0, &["a"])]), (2_000, 3_000));
    // One is alone, and the other two know that of each other.
    assert_eq!(share("b", ["a", "c"], &[]), (1_000, 3_000));
    assert_eq!(share("a", ["b", "c"], &[(1, &["a"])]), (2_000, 3_000));
}

fn hello(name: &str) -> Hello {
    let (cell, region) = (name.to_owned(), name.to_owned());
    Hello { version: 1, cell, region, incarnation: 1, key_check: 0, cells_check: 0, rank: 0, silence: None }
}

/// Without it two cells whose link was cut before they first met both decide what a hash gives one of them, each in a majority
/// with the third: twice the limit.
#[test]
fn a_cell_that_was_never_reached_keeps_what_it_owns() {
    let start = Timestamp::from_secs(1_000);
    let names: Vec<String> = (0..60).map(|at| format!("k{at}")).collect();
    let cells = ["eu/a", "us/b", "ap/c"];
    // Each of the outer two reaches the middle one, which reaches both.
    let outer = |own: usize, other: usize| {
        let peers = [cells[1], cells[other]].map(|name| PeerConfig::new(&name[..2], name)).to_vec();
        let members = Members::new(CellConfig::new(cells[own], &cells[own][..2], peers), 1, start);
        members.on_hello(0, Hello { region: "us".to_owned(), ..hello(cells[1]) });
        for seconds in 0..20 {
            let now = start + TimeDelta::from_secs(seconds);
            let seen = [cells[own], cells[other]].map(|cell| Sighting {
                cell: cell.to_owned(),
                age: 0,
                sign: Sign::Answered,
            });
            members.on_answer(0, now, &seen, now);
            members.refresh(now);
        }
        let now = start + TimeDelta::from_secs(19);
        names.iter().map(|name| decides(&members, name, now)).collect::<Vec<_>>()
    };
    let (first, last) = (outer(0, 2), outer(2, 0));
    let mut own = [0, 0];
    for (name, (first, last)) in names.iter().zip(first.into_iter().zip(last)) {
        own[0] += usize::from(first == Decider::Own);
        own[1] += usize::from(last == Decider::Own);
        match (first, last) {
            (Decider::Own, Decider::Nobody(_)) | (Decider::Nobody(_), Decider::Own) => {}
            (Decider::Peer(0), Decider::Peer(0)) => {}
            other => panic!("{name}: {other:?}"),
        }
    }
    assert!(own.iter().all(|own| (5..40).contains(own)), "{own:?}");
}

/// Between a cell's first message and its first answer there may be a tick. Without it what the cell owns is decided here
/// meanwhile, and there.
#[test]
fn a_cell_that_has_just_been_reached_keeps_what_it_owns() {
    let start = Timestamp::from_secs(1_000);
    let names: Vec<String> = (0..60).map(|at| format!("k{at}")).collect();
    let peers = ["b", "c"].map(|name| PeerConfig::new(name, name)).to_vec();
    let members = Members::new(CellConfig::new("a", "a", peers), 1, start);
    members.on_hello(0, hello("b"));
    let mut now = start;
    for seconds in 0..20 {
        now = start + TimeDelta::from_secs(seconds);
        let seen = ["a", "c"].map(|cell| Sighting { cell: cell.to_owned(), age: 0, sign: Sign::Answered });
        members.on_answer(0, now, &seen, now);
        members.refresh(now);
    }
    let own = || names.iter().filter(|name| decides(&members, name, now) == Decider::Own).collect::<Vec<_>>();
    let before = own();
    assert!((5..40).contains(&before.len()), "{before:?}");
    members.on_hello(1, hello("c"));
    members.refresh(now);
    assert_eq!(own(), before);
    assert!(names.iter().any(|name| decides(&members, name, now) == Decider::Peer(1)), "it is asked");
}

/// Without it each restart of any cell locks out the callers of exact limits of all cells.
#[test]
fn a_change_among_others_leaves_what_is_known() {
    let start = Timestamp::from_secs(1_000);
    let peers = ["b", "c"].map(|name| PeerConfig::new(name, name)).to_vec();
    let members = Members::new(CellConfig::new("a", "a", peers), 1, start);
    for (at, name) in ["b", "c"].into_iter().enumerate() {
        members.on_hello(at, hello(name));
    }
    let scope = Scope::new(format!("{}x", region_prefix(RegionMode::Owner, CounterOwner::Hash)));
    let answer = |peers: &[usize], now: Timestamp| {
        peers.iter().for_each(|peer| members.on_answer(*peer, now, &[], now));
        members.refresh(now);
    };
    answer(&[0, 1], start);
    let later = |seconds| start + TimeDelta::from_secs(seconds);
    let names: Vec<String> = (0..60).map(|at| format!("k{at}")).collect();
    let since = |name: &str, now: Timestamp| {
        let parts = [KeyPart::Text(name)];
        let key = CounterKey { scope: &scope, parts: &parts };
        (members.decider(&key, now) == Decider::Own)
            .then(|| members.known_since(&key, now).map(|known| known.since))
    };
    (1..=3).for_each(|at| answer(&[0, 1], later(at)));
    let before: Vec<&String> = names.iter().filter(|name| since(name, later(3)).is_some()).collect();
    // The last cell dies: its keys move, also to this cell.
    (4..12).for_each(|at| answer(&[0], later(at)));
    let after: Vec<&String> = names.iter().filter(|name| since(name, later(11)).is_some()).collect();
    assert!(!before.is_empty() && after.len() > before.len());
    for name in after {
        // Since this cell joined.
        let is_kept = since(name, later(11)) == Some(Some(later(2)));
        assert_eq!(is_kept, before.contains(&name), "{name}");
    }
}

/// The owner of `name`'s counter by what these cells know: the first is this one.
fn started(names: [&str; 3], silences: [Option<u64>; 3], at: Timestamp) -> Members {
    let peers = names[1..].iter().map(|name| PeerConfig::new(*name, *name)).collect();
    let mut config = CellConfig::new(names[0], names[0], peers);
    config.silence = TimeDelta::from_micros(silences[0].unwrap_or(2_000_000));
    let members = Members::new(config, 1, at);
    for (peer, name) in names[1..].iter().enumerate() {
        members.on_hello(peer, Hello { silence: silences[peer + 1], ..hello(name) });
    }
    members.refresh(at);
    members
}

fn decides(members: &Members, name: &str, now: Timestamp) -> Decider {
    let scope = Scope::new(format!("{}x", region_prefix(RegionMode::Owner, CounterOwner::Hash)));
    members.decider(&CounterKey { scope: &scope, parts: &[KeyPart::Text(name)] }, now)
}

/// Lets these peers answer each 200 ms until `until`.
fn answer_until(members: &Members, peers: &[usize], seen: &[Sighting], from: Timestamp, until: Timestamp) {
    let mut now = from;
    while now < until {
        now = now + TimeDelta::from_millis(200);
        peers.iter().for_each(|peer| members.on_answer(*peer, now, seen, now));
        members.refresh(now);
    }
}

fn own_key(members: &Members, now: Timestamp) -> String {
    let mut names = (0..100).map(|at| format!("k{at}"));
    let own = names.find(|name| decides(members, name, now) == Decider::Own);
    own.expect("a third of all keys")
}

/// Without it a process that was stopped decides, when it goes on, what another cell has taken over meanwhile.
#[test]
fn a_process_that_stood_still_decides_nothing_until_the_others_know() {
    let start = Timestamp::from_secs(1_000);
    let later = |millis| start + TimeDelta::from_millis(millis);
    let members = started(["a", "b", "c"], [None; 3], start);
    answer_until(&members, &[0, 1], &[], start, later(3_000));
    let key = own_key(&members, later(3_000));
    assert!(members.has_joined(later(3_000)) && !members.has_joined(later(19_000)));
    // No tick and no answer for 16 seconds; then requests come first, then an answer, then a tick.
    assert!(matches!(decides(&members, &key, later(19_000)), Decider::Nobody(_)));
    members.on_answer(0, later(19_000), &[], later(19_000));
    assert!(matches!(decides(&members, &key, later(19_001)), Decider::Nobody(_)));
    members.refresh(later(19_002));
    assert!(matches!(decides(&members, &key, later(19_003)), Decider::Nobody(_)), "it has just joined");
    assert!(members.has_majority(later(19_003)) && !members.has_joined(later(19_003)), "and shows it");
    answer_until(&members, &[0, 1], &[], later(19_002), later(22_000));
    assert_eq!(decides(&members, &key, later(22_000)), Decider::Own);
    let scope = Scope::new(format!("{}x", region_prefix(RegionMode::Owner, CounterOwner::Hash)));
    let parts = [KeyPart::Text(key.as_str())];
    let since = members.known_since(&CounterKey { scope: &scope, parts: &parts }, later(22_000));
    assert!(since.is_some_and(|known| known.since >= later(19_000) && known.has_moved), "{since:?}");
}

/// Otherwise each pause of a process makes the strict limits that it decides count as used up, although no other has decided.
#[test]
fn a_short_pause_leaves_what_is_known() {
    let start = Timestamp::from_secs(1_000);
    let later = |millis| start + TimeDelta::from_millis(millis);
    let known = |others: &[&str], pause: u64, answers: bool| {
        let cells: Vec<&str> = std::iter::once("a").chain(others.iter().copied()).collect();
        let peers = others.iter().map(|name| PeerConfig::new(*name, *name)).collect();
        let members = Members::new(CellConfig::new("a", "a", peers), 1, start);
        (0..others.len()).for_each(|at| members.on_hello(at, hello(cells[at + 1])));
        let peers: Vec<usize> = (0..others.len()).collect();
        answer_until(&members, &peers, &[], start, later(3_000));
        let key = own_key(&members, later(3_000));
        if answers {
            // Its requests are lost, and those of the others arrive.
            answer_until(&members, &[], &[], later(3_000), later(3_000 + pause));
            assert!(members.sightings(later(3_000 + pause)).iter().any(|seen| seen.age >= 4_000));
        }
        answer_until(&members, &peers, &[], later(3_000 + pause), later(7_000 + pause));
        let now = later(7_000 + pause);
        assert_eq!(decides(&members, &key, now), Decider::Own);
        let scope = Scope::new(format!("{}x", region_prefix(RegionMode::Owner, CounterOwner::Hash)));
        let parts = [KeyPart::Text(key.as_str())];
        members.known_since(&CounterKey { scope: &scope, parts: &parts }, now).expect("a time").since
    };
    assert!(known(&["b", "c"], 1_600, false) < later(3_000));
    assert!(known(&["b", "c"], 2_200, false) > later(5_000), "others may have decided");
    assert!(known(&["b"], 60_000, false) < later(3_000), "the other one alone decides nothing");
    assert!(known(&["b"], 60_000, true) > later(60_000), "it was told that this one cannot");
}

/// Without it a cell takes over what another, with a longer silence time, still decides.
#[test]
fn the_longest_silence_time_of_all_cells_moves_owners() {
    let start = Timestamp::from_secs(1_000);
    let later = |seconds| start + TimeDelta::from_secs(seconds);
    let members = started(["b", "a", "c"], [None, Some(10_000_000), Some(2_000_000)], start);
    answer_until(&members, &[0, 1], &[], start, later(12));
    let names: Vec<String> = (0..60).map(|at| format!("k{at}")).collect();
    let of_first = |now| names.iter().filter(|name| decides(&members, name, now) == Decider::Peer(0)).count();
    assert!(of_first(later(12)) > 0);
    let before = of_first(later(12));
    answer_until(&members, &[1], &[], later(12), later(31));
    assert_eq!(of_first(later(31)), before, "it may decide for ten seconds after its last answer");
    answer_until(&members, &[1], &[], later(31), later(33));
    assert_eq!(of_first(later(33)), 0);
}

/// Otherwise no cell decides the keys of one that others reach and that reaches no other, for as long as that lasts.
#[test]
fn a_cell_that_says_it_has_no_majority_is_left_out() {
    let start = Timestamp::from_secs(1_000);
    let later = |millis| start + TimeDelta::from_millis(millis);
    let members = started(["b", "a", "c"], [None; 3], start);
    answer_until(&members, &[0, 1], &[], start, later(3_000));
    let names: Vec<String> = (0..60).map(|at| format!("k{at}")).collect();
    let of_first = |now| names.iter().filter(|name| decides(&members, name, now) == Decider::Peer(0)).count();
    assert!(of_first(later(3_000)) > 0);
    let moves = members.moves().0;
    let without = |age| vec![Sighting { cell: "a".to_owned(), age, sign: Sign::Able }];
    let both = |age: u64, now: Timestamp| {
        members.on_answer(0, now, &without(age), now);
        members.on_answer(1, now, &[], now);
        members.refresh(now);
    };
    both(3_900, later(3_200));
    assert!(of_first(later(3_200)) > 0, "it may have decided within 2 T");
    both(4_100, later(3_400));
    assert_eq!(of_first(later(3_400)), 0);
    assert!(members.moves().0 > moves);
    both(0, later(3_600));
    assert!(of_first(later(3_600)) > 0, "it has a majority again");
    // What it said longer ago does not count: it may have one since.
    both(9_000, later(3_800));
    (1..=6).for_each(|at| {
        let now = later(3_800 + at * 200);
        members.on_answer(1, now, &[], now);
        members.refresh(now);
    });
    assert!(of_first(later(5_000)) > 0);
}

/// Otherwise a cell has no majority while the Redis of another is dead and the third restarts.
#[test]
fn a_cell_that_refuses_what_it_is_sent_counts_for_the_majority() {
    let start = Timestamp::from_secs(1_000);
    let later = |seconds| start + TimeDelta::from_secs(seconds);
    let members = started(["b", "a", "c"], [None; 3], start);
    answer_until(&members, &[0, 1], &[], start, later(3));
    for now in (3..13).map(later) {
        members.on_heard(0, now, &[Sighting { cell: "a".to_owned(), age: 9_000, sign: Sign::Able }], now);
        members.refresh(now);
    }
    assert!(members.has_majority(later(12)) && members.has_joined(later(12)));
    assert!(members.is_silent(0, later(12)), "it applies nothing");
    let names = (0..60).map(|at| format!("k{at}"));
    assert!(names.into_iter().all(|name| decides(&members, &name, later(12)) == Decider::Own));
}

/// Without it two cells that are cut off from each other each count a third, which only hears them, as their majority.
#[test]
fn a_cell_that_is_heard_by_a_third_counts_as_alive() {
    let start = Timestamp::from_secs(1_000);
    let later = |seconds| start + TimeDelta::from_secs(seconds);
    let members = started(["b", "a", "c"], [None; 3], start);
    answer_until(&members, &[0, 1], &[], start, later(3));
    let names: Vec<String> = (0..60).map(|at| format!("k{at}")).collect();
    let of_second =
        |now| names.iter().filter(|name| decides(&members, name, now) == Decider::Peer(1)).count();
    let before = of_second(later(3));
    assert!(before > 0);
    let heard = [Sighting { cell: "c".to_owned(), age: 300, sign: Sign::Requested }];
    answer_until(&members, &[0], &heard, later(3), later(12));
    assert_eq!(of_second(later(12)), before);
    answer_until(&members, &[0], &[], later(12), later(17));
    assert_eq!(of_second(later(17)), 0);
    // And this cell tells of those that it only hears itself.
    members.on_request("c", later(17));
    let told = members.sightings(later(17));
    assert!(told.iter().any(|seen| seen.cell == "c" && seen.sign == Sign::Requested), "{told:?}");
}

/// Otherwise no cell decides the keys of one whose Redis is dead, for as long as that lasts.
#[test]
fn a_cell_whose_store_is_down_is_left_out_until_the_others_know_of_its_return() {
    let start = Timestamp::from_secs(1_000);
    let later = |millis| start + TimeDelta::from_millis(millis);
    let own = started(["a", "b", "c"], [None; 3], start);
    let other = started(["b", "a", "c"], [None; 3], start);
    // Each answers the other, as does the third cell.
    let run = |is_down: bool, from: u64, until: u64| {
        for now in (from..until).step_by(200).map(|millis| later(millis + 200)) {
            own.on_store(is_down);
            let (seen, none) = (own.sightings(now), Vec::new());
            let without = [(&own, 0), (&own, 1), (&other, 1)];
            without.iter().for_each(|(one, peer)| one.on_answer(*peer, now, &none, now));
            other.on_answer(0, now, &seen, now);
            own.refresh(now);
            other.refresh(now);
        }
    };
    run(false, 0, 3_000);
    let names: Vec<String> = (0..60).map(|at| format!("k{at}")).collect();
    let of_own = |members: &Members, decider: Decider, now: Timestamp| {
        names.iter().filter(|name| decides(members, name, now) == decider).count()
    };
    let before = of_own(&own, Decider::Own, later(3_000));
    assert!(before > 0 && of_own(&other, Decider::Peer(0), later(3_000)) == before);

    run(true, 3_000, 6_600);
    assert_eq!(of_own(&own, Decider::Own, later(6_600)), before, "for less than 2 T");
    assert_eq!(of_own(&other, Decider::Peer(0), later(6_600)), before);
    run(false, 6_600, 7_000);
    assert!(own.has_joined(later(7_000)), "nobody has decided in its place");
    run(true, 7_000, 11_400);
    assert_eq!(of_own(&own, Decider::Own, later(11_400)), 0);
    assert!(own.is_left_out() && !own.has_joined(later(11_400)));
    let moved = of_own(&other, Decider::Own, later(11_400));
    assert!(moved > 0 && of_own(&other, Decider::Peer(0), later(11_400)) == 0);
    assert!(of_own(&own, Decider::Peer(0), later(11_400)) >= moved, "it forwards them");

    // It comes and goes, and nothing moves.
    for from in [11_400, 13_200] {
        run(false, from, from + 1_400);
        assert_eq!(of_own(&other, Decider::Own, later(from + 1_400)), moved);
        run(true, from + 1_400, from + 1_800);
        assert_eq!(of_own(&other, Decider::Own, later(from + 1_800)), moved);
    }
    // It returns: the other stops first, and it begins later.
    run(false, 15_000, 16_800);
    assert_eq!(of_own(&other, Decider::Own, later(16_800)), moved);
    run(false, 16_800, 17_800);
    assert_eq!(of_own(&own, Decider::Own, later(17_800)), 0);
    assert_eq!(of_own(&other, Decider::Peer(0), later(17_800)), before);
    run(false, 17_800, 20_600);
    assert_eq!(of_own(&own, Decider::Own, later(20_600)), before);
    let scope = Scope::new(format!("{}x", region_prefix(RegionMode::Owner, CounterOwner::Hash)));
    let key = own_key(&own, later(20_600));
    let parts = [KeyPart::Text(&key)];
    let since = own.known_since(&CounterKey { scope: &scope, parts: &parts }, later(20_600));
    assert!(since.is_some_and(|known| known.since > later(20_000) && known.has_moved), "{since:?}");
}
