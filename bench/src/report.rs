//! Report: prints tables, and whether each bar is reached.

#![allow(clippy::print_stdout, reason = "the report is the program's output")]

pub(crate) fn heading(text: &str) {
    println!("\n## {text}\n");
}

pub(crate) fn note(text: &str) {
    println!("{text}");
}

/// Prints nanoseconds per decision; the other rows are compared with the first.
pub(crate) fn rows(names: &[String], nanos: &[f64]) {
    let base = nanos[0];
    println!("| contestant | ns per decision | × the first |");
    println!("|---|---:|---:|");
    for (name, nanos) in names.iter().zip(nanos) {
        println!("| {name} | {nanos:.1} | {:.2} |", nanos / base);
    }
    println!();
}

/// Prints whether `ratio` reaches `bar`: at least, or at most.
pub(crate) fn at_least(what: &str, ratio: f64, bar: f64) {
    let verdict = if ratio >= bar { "reached" } else { "MISSED" };
    println!("- {what}: {ratio:.2} (bar: ≥ {bar}) {verdict}");
}

pub(crate) fn at_most(what: &str, ratio: f64, bar: f64) {
    let verdict = if ratio <= bar { "reached" } else { "MISSED" };
    println!("- {what}: {ratio:.2} (bar: ≤ {bar}) {verdict}");
}

/// Prints a table row with a measurement, and whether it is at most `bar`.
pub(crate) fn bar_row(what: &str, measured: f64, bar: f64, beside: &str) {
    let verdict = if measured <= bar { "reached" } else { "MISSED" };
    println!("| {what} | {measured:.2} | ≤ {bar}: {verdict} | {beside} |");
}

/// Prints a table row without a bar.
pub(crate) fn bare_row(what: &str, measured: &str) {
    println!("| {what} | {measured} | | |");
}

/// Prints the error of a benchmark that could not run.
pub(crate) fn outcome(result: Result<(), String>) -> std::process::ExitCode {
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
