//! `tollgate test`: unit tests for rule files on a simulated clock.
//!
//! `file` is the format of a test file, `runner` runs the steps, `expect` compares the results. Steps use the same code
//! as requests over gRPC or HTTP, so results are the same as on a server.

mod expect;
mod file;
mod runner;

use crate::cli::output::{BAD, GOOD, ignore_closed, paint};
use crate::cli::{TestFlags, print, print_line};
use crate::config::rule_sources;
use crate::yaml_file;
use runner::Failure;
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::process::ExitCode;
use tollgate_observe::escape;

pub(crate) fn run(flags: &TestFlags) -> anyhow::Result<ExitCode> {
    let (mut passed, mut failed) = (0_u32, 0_u32);
    let json = flags.format.is_json();
    let mut results = Vec::new();
    let mut report = |path: &Path, name: &str, outcome: Result<(), String>| -> anyhow::Result<()> {
        let shown = escape::text(name);
        match &outcome {
            _ if json => results.push(json!({
                "file": path, "case": name, "passed": outcome.is_ok(), "difference": outcome.as_ref().err(),
            })),
            Ok(()) => show(format_args!("{}      {}: {shown}", paint(GOOD, "ok"), path.display()))?,
            Err(difference) => {
                show(format_args!("{}  {}: {shown}", paint(BAD, "FAILED"), path.display()))?;
                for line in difference.lines() {
                    show(format_args!("          {}", escape::text(line)))?;
                }
            }
        }
        *if outcome.is_ok() { &mut passed } else { &mut failed } += 1;
        Ok(())
    };
    // Cases of one file usually share their rules: their errors are printed once.
    let mut reported_rules: BTreeMap<String, String> = BTreeMap::new();
    for path in &rule_sources::test_files(&flags.files)? {
        // An unreadable file fails like a case, so that the other files are still run and counted.
        let cases = match read(path) {
            Ok(cases) => cases,
            Err(error) => {
                report(path, "cannot be run", Err(format!("{error:#}")))?;
                continue;
            }
        };
        for (number, case) in cases.into_iter().enumerate() {
            let name = case.name.clone().unwrap_or_else(|| format!("case {}", number + 1));
            let outcome = runner::run(&case, path).map_err(|failure| match failure {
                Failure::Case(difference) => difference,
                Failure::Rules(error) => match reported_rules.get(&error) {
                    Some(first) => format!("the rules cannot be used; see `{first}`, which has the same"),
                    None => {
                        let difference = format!("the rules cannot be used\n{error}");
                        reported_rules.insert(error, name.clone());
                        difference
                    }
                },
            });
            report(path, &name, outcome)?;
        }
    }
    if json {
        ignore_closed(print(&json!({"passed": passed, "failed": failed, "cases": results})))?;
    } else {
        let style = if failed == 0 { GOOD } else { BAD };
        show(format_args!("{}", paint(style, format_args!("{passed} passed, {failed} failed"))))?;
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints a line of the report. The cases are run to the end whether or not it is read.
fn show(line: fmt::Arguments<'_>) -> anyhow::Result<()> {
    ignore_closed(print_line(line))
}

fn read(path: &Path) -> anyhow::Result<Vec<file::Case>> {
    let (file, _): (file::File, _) = yaml_file::read(path, &[])?;
    anyhow::ensure!(!file.0.is_empty(), "{}: no test case; add one with `rules` and `steps`", path.display());
    Ok(file.0)
}
