//! What is printed: a table for each question, and whether each bar is reached.

#![allow(clippy::print_stdout, reason = "the report is what this program is for")]

pub(crate) fn heading(text: &str) {
    println!("\n## {text}\n");
}

pub(crate) fn note(text: &str) {
    println!("{text}");
}

/// Rows of nanoseconds a decision; the first row is the one that the others are compared with.
pub(crate) fn rows(names: &[String], nanos: &[f64]) {
    let base = nanos[0];
    println!("| who | ns a decision | × the first |");
    println!("|---|---:|---:|");
    for (name, nanos) in names.iter().zip(nanos) {
        println!("| {name} | {nanos:.1} | {:.2} |", nanos / base);
    }
    println!();
}

/// A bar: `ratio` must be at least, or at most, `bar`.
pub(crate) fn at_least(what: &str, ratio: f64, bar: f64) {
    let verdict = if ratio >= bar { "reached" } else { "MISSED" };
    println!("- {what}: {ratio:.2} (bar: ≥ {bar}) {verdict}");
}

pub(crate) fn at_most(what: &str, ratio: f64, bar: f64) {
    let verdict = if ratio <= bar { "reached" } else { "MISSED" };
    println!("- {what}: {ratio:.2} (bar: ≤ {bar}) {verdict}");
}

/// A row of a table: what was measured, and whether it is at most `bar`.
pub(crate) fn bar_row(what: &str, measured: f64, bar: f64, beside: &str) {
    let verdict = if measured <= bar { "reached" } else { "MISSED" };
    println!("| {what} | {measured:.2} | ≤ {bar}: {verdict} | {beside} |");
}

/// A row without a bar.
pub(crate) fn bare_row(what: &str, measured: &str) {
    println!("| {what} | {measured} | | |");
}

/// Prints why a benchmark could not run, if it could not.
pub(crate) fn outcome(result: Result<(), String>) -> std::process::ExitCode {
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}
