//! The matrix: every pair of features, through every door, in simulated time. A door says of a request what the engine decided,
//! as far as its protocol can; an explanation before it, the decision log after it, usage and metrics say the same; and a time
//! that it names is true: at that time the next request passes, and one unit earlier it does not.
//!
//! `features` has the table of features, `doors` a driver for each door, `facts` what is compared, `run` the course of a case.
//! Which pairs run is fixed: each feature alone through a door of each group, and a fifth of the pairs through one door each; or
//! all pairs through all doors (`make matrix`, which sets `TOLLGATE_MATRIX=all`).

mod apps;
mod doors;
mod facts;
mod features;
mod run;
mod world;

use crate::doors::Door;
use crate::facts::Abilities;
use crate::features::{Case, FEATURES, Meeting};
use crate::run::{Failure, Tally};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What is known to disagree: a line of `known.txt`.
struct Known {
    /// One of them must be in the case.
    features: Vec<String>,
    /// A part of the door's name.
    door: String,
    /// The fact, or its beginning.
    fact: String,
    line: String,
}

/// Reads what is known to disagree.
fn read_known() -> Vec<Known> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/matrix/known.txt");
    let text = std::fs::read_to_string(file).expect("known.txt");
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let known = lines.map(|line| {
        let [features, door, fact, _] = line.split(" | ").collect::<Vec<_>>()[..] else {
            panic!("known.txt: write features, door, fact and reason: {line}")
        };
        let any = |text: &str| if text == "any" { String::new() } else { text.to_owned() };
        let features = features.split(", ").filter(|name| *name != "any").map(str::to_owned).collect();
        Known { features, door: any(door), fact: any(fact), line: line.to_owned() }
    });
    known.collect()
}

impl Known {
    fn covers(&self, failure: &Failure) -> bool {
        (self.features.is_empty() || self.features.iter().any(|name| failure.features.contains(&&**name)))
            && failure.door.contains(&self.door)
            && failure.fact.starts_with(&self.fact)
    }
}

#[test]
fn every_pair_of_features_is_the_same_through_every_door() {
    let able = Abilities::read();
    let only = std::env::var("TOLLGATE_MATRIX_ONLY").ok();
    let mode = match only {
        Some(_) => "all".to_owned(),
        None => std::env::var("TOLLGATE_MATRIX").unwrap_or_default(),
    };
    let (jobs, skipped) = jobs(&mode, only.as_deref());
    let (next, done) = (AtomicUsize::new(0), Mutex::new((Tally::default(), Vec::new())));
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                let runtime = runtime.expect("a runtime");
                while let Some((case, doors)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (tally, failures) = runtime.block_on(run::case(case, doors, &able));
                    let mut done = done.lock().expect("results");
                    done.0.add(&tally);
                    done.1.extend(failures);
                }
            });
        }
    });
    let (tally, mut failures) = done.into_inner().expect("results");
    failures.sort();
    let list = read_known();
    let new: Vec<&Failure> =
        failures.iter().filter(|failure| !list.iter().any(|known| known.covers(failure))).collect();
    let pairs: usize = jobs.iter().filter(|(case, _)| case.features.len() == 2).count();
    println!(
        "matrix: {} features, {pairs} pairs in {} cases, {} doors: {} requests, {} facts compared, {} times tried",
        FEATURES.len(),
        jobs.len(),
        Door::ALL.len(),
        tally.requests,
        tally.facts,
        tally.times
    );
    for (reason, count) in &skipped {
        println!("matrix: {count} pairs do not share a rule: {reason}");
    }
    for (reason, count) in &tally.skipped {
        println!("matrix: {count} cases are not sent through a door: {reason}");
    }
    let mut kinds = BTreeMap::<_, Vec<&Failure>>::new();
    new.iter().for_each(|one| kinds.entry((one.fact, &*one.door)).or_default().push(one));
    for ((fact, door), all) in &kinds {
        let first = all.iter().min_by_key(|one| one.features.len()).expect("one");
        println!("{first}\n  and {} more of `{fact}` by {door}", all.len() - 1);
    }
    assert!(new.is_empty(), "{} facts disagree", new.len());
    let unneeded = list.iter().filter(|known| !failures.iter().any(|failure| known.covers(failure)));
    let unneeded: Vec<&str> = unneeded.map(|known| known.line.as_str()).collect();
    unneeded.iter().for_each(|line| println!("matrix: nothing disagrees here as known.txt says: {line}"));
    assert!(
        unneeded.is_empty() || mode != "all" || only.is_some(),
        "nothing disagrees any more as known.txt says: {unneeded:#?}"
    );
}

/// Returns the cases with their doors, and why pairs do not share a rule.
#[expect(clippy::type_complexity, reason = "one use")]
fn jobs(mode: &str, only: Option<&str>) -> (Vec<(Case, Vec<Door>)>, BTreeMap<String, usize>) {
    let (mut jobs, mut skipped) = (Vec::new(), BTreeMap::new());
    let doors: Vec<Door> = Door::ALL.iter().map(|(door, _)| *door).collect();
    for (at, one) in FEATURES.iter().enumerate() {
        let group = |group: usize| {
            let own: Vec<Door> = doors.iter().copied().filter(|door| door.group() == group).collect();
            own[at % own.len()]
        };
        let through = if mode.is_empty() { (0..7).map(group).collect() } else { doors.clone() };
        jobs.push((Case::new(&[*one], Meeting::Together).expect(one.name), through));
        for (other_at, other) in FEATURES.iter().enumerate().skip(at + 1) {
            for meeting in [Meeting::Together, Meeting::Beside] {
                match Case::new(&[*one, *other], meeting) {
                    Ok(case) => jobs.push((
                        case,
                        match mode {
                            "all" => doors.clone(),
                            "alone" => continue,
                            _ if (at * 3 + other_at + usize::from(meeting == Meeting::Beside)) % 10 == 0 => {
                                vec![doors[(at * 7 + other_at) % doors.len()]]
                            }
                            _ => continue,
                        },
                    )),
                    Err(reason) => *skipped.entry(reason).or_default() += 1,
                }
            }
        }
    }
    if let Some(only) = only {
        jobs.retain(|(case, _)| case.name == only);
        assert!(!jobs.is_empty(), "no case is called `{only}`");
    }
    (jobs, skipped)
}
