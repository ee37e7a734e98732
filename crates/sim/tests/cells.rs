//! Simulated cells: no mode may exceed its stated bound over any span, and planted bugs must be found.

use tollgate_sim::{CellBug, run_cells};

/// Otherwise a limit over several regions is a hope: callers who spread their requests exceed it.
#[test]
fn two_thousand_seeds_keep_the_bounds_of_their_modes() {
    let workers: Vec<_> = (0..2)
        .map(|worker| {
            std::thread::spawn(move || {
                let (mut checks, mut admitted, mut failed, mut assumed) = (0, 0, 0, 0);
                for seed in (worker..2_000).step_by(2) {
                    let report = run_cells(seed, None);
                    if let Some(broken) = report.violation {
                        panic!("seed {seed}: {broken}\n{}", report.scenario);
                    }
                    (checks, admitted, failed) =
                        (checks + report.checks, admitted + report.admitted, failed + report.failed);
                    assumed += report.assumed;
                }
                (checks, admitted, failed, assumed)
            })
        })
        .collect();
    let (mut checks, mut admitted, mut failed, mut assumed) = (0, 0, 0, 0);
    for worker in workers {
        let done = worker.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        (checks, admitted, failed) = (checks + done.0, admitted + done.1, failed + done.2);
        assumed += done.3;
    }
    // Otherwise nothing was decided, and nothing was tested.
    assert!(assumed > checks / 1_000, "{assumed} of {checks} beside a late cell");
    assert!(
        admitted > checks / 20 && failed * 2 < checks,
        "{admitted} admitted, {failed} failed of {checks}"
    );
}

/// Otherwise the simulation may detect nothing.
#[test]
fn planted_bugs_between_cells_are_found() {
    for bug in [
        CellBug::ForgetsBatches,
        CellBug::DecidesWithoutOwner,
        CellBug::KeepsWholeLimit,
        CellBug::SkipsDeduction,
        CellBug::CountsLateReportsTwice,
        CellBug::ForgetsRefunds,
        CellBug::CountsRefundsTwice,
        CellBug::DatesRefundsTooEarly,
        CellBug::BelievesOldTenures,
    ] {
        let found = (0..2_000).find(|seed| run_cells(*seed, Some(bug)).violation.is_some());
        assert!(found.is_some(), "{bug:?} was not found in 2,000 seeds");
    }
}

/// Otherwise a failed seed cannot be reproduced.
#[test]
fn a_seed_is_the_same_run_of_cells_again() {
    for seed in 0..20 {
        let (once, again) = (run_cells(seed, None), run_cells(seed, None));
        assert_eq!((once.checks, once.admitted, once.failed), (again.checks, again.admitted, again.failed));
    }
}
