//! Command line of the simulation: `sim --seeds 1000`, `sim --cells --seeds 1000`, `sim --from 5000 --seeds 1000`, `sim --seed 42 --trace`.

use indicatif::{ProgressBar, ProgressStyle};
use std::process::ExitCode;
use tollgate_sim::{CellReport, Report, run, run_cells};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1)?.parse::<u64>().ok()
    };
    let trace = arguments.iter().any(|argument| argument == "--trace");
    let (from, seeds) = match number("--seed") {
        Some(seed) => (seed, 1),
        None => (number("--from").unwrap_or(0), number("--seeds").unwrap_or(2_000)),
    };
    if arguments.iter().any(|argument| argument == "--cells") {
        return cells(from, seeds, trace);
    }
    let (mut broken, mut checks, mut local, mut admitted) = (0, 0, 0, 0);
    let progress = progress(seeds);
    for seed in from..from + seeds {
        let report = run(seed, None);
        (checks, local, admitted) =
            (checks + report.checks, local + report.local, admitted + report.admitted);
        if report.violation.is_some() || trace {
            progress.suspend(|| print_report(&report));
        }
        broken += u64::from(report.violation.is_some());
        progress.inc(1);
    }
    progress.finish_and_clear();
    print_line(&format!(
        "{seeds} seeds from {from}: {broken} failed; {checks} checks, {local} of them decided without the store, {admitted} units admitted"
    ));
    if broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Simulates cells.
fn cells(from: u64, seeds: u64, trace: bool) -> ExitCode {
    let (mut broken, mut checks, mut admitted, mut failed, mut assumed) = (0, 0, 0, 0, 0);
    let progress = progress(seeds);
    for seed in from..from + seeds {
        let CellReport {
            scenario,
            violation,
            checks: asked,
            admitted: units,
            failed: undecided,
            assumed: by_rate,
        } = run_cells(seed, None);
        (checks, admitted, failed) = (checks + asked, admitted + units, failed + undecided);
        assumed += by_rate;
        if violation.is_some() || trace {
            let what = violation.as_deref().unwrap_or("holds");
            let line = format!("{scenario}\nseed {seed}: {what}; repeat with: sim --cells --seed {seed}");
            progress.suspend(|| print_line(&line));
        }
        broken += u64::from(violation.is_some());
        progress.inc(1);
    }
    progress.finish_and_clear();
    print_line(&format!(
        "{seeds} seeds of cells from {from}: {broken} failed; {checks} checks, {failed} of them undecided, {assumed} with the rate of a late cell assumed, {admitted} units admitted"
    ));
    if broken == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// A bar on standard error, where that is a terminal.
fn progress(seeds: u64) -> ProgressBar {
    let bar = ProgressBar::new(seeds);
    let template = "simulating [{bar:30}] {human_pos}/{human_len} seeds, {eta} left";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    bar.set_style(style.progress_chars("=> "));
    bar
}

fn print_report(report: &Report) {
    for line in &report.history {
        print_line(line);
    }
    let what = report.violation.as_deref().unwrap_or("holds");
    print_line(&format!("seed {}: {what}; repeat with: sim --seed {} --trace", report.seed, report.seed));
}

#[allow(clippy::print_stdout, reason = "the output of a command line program")]
fn print_line(line: &str) {
    println!("{line}");
}
