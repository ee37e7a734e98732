//! Simulation runs: none may violate a property, and planted bugs must be found.

use tollgate_sim::{Bug, run};

/// Otherwise a change to leases may overshoot, leak or starve in a way that no other test produces.
#[test]
fn two_thousand_seeds_hold() {
    let workers: Vec<_> = (0..2)
        .map(|worker| {
            std::thread::spawn(move || {
                let (mut checks, mut local) = (0, 0);
                for seed in (worker..2_000).step_by(2) {
                    let report = run(seed, None);
                    if let Some(broken) = report.violation {
                        panic!("seed {seed}: {broken}\n{}", report.history.join("\n"));
                    }
                    (checks, local) = (checks + report.checks, local + report.local);
                }
                (checks, local)
            })
        })
        .collect();
    let (mut checks, mut local) = (0, 0);
    for worker in workers {
        let done = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (checks, local) = (checks + done.0, local + done.1);
    }
    // Otherwise leases were not used, and nothing was tested.
    assert!(local * 3 > checks, "{local} of {checks} checks were decided without the store");
}

/// Otherwise the simulation may detect nothing.
#[test]
fn planted_bugs_are_found() {
    for bug in [Bug::SkipsDeduction, Bug::ReturnsTwice, Bug::ForgetsTime] {
        // Found by the ceiling check, whatever else the bug violates.
        let over = |broken: String| broken.contains(" over ") || broken.contains(" units in a ");
        let found = (0..2_000).find(|seed| run(*seed, Some(bug)).violation.is_some_and(over));
        assert!(found.is_some(), "{bug:?} was not found in 2,000 seeds");
    }
}

/// Otherwise a failed seed cannot be reproduced.
#[test]
fn a_seed_is_the_same_run_again() {
    for seed in 0..20 {
        let (once, again) = (run(seed, None), run(seed, None));
        assert_eq!(once.history, again.history);
        assert_eq!((once.checks, once.local, once.admitted), (again.checks, again.local, again.admitted));
    }
}
