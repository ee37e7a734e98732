//! `tollgate test`: unit tests of rule files, on a clock that only the tests move.
//!
//! `file` is the form of a test file, `runner` takes the steps, `expect` compares. Steps go through the same code as a
//! request over gRPC or HTTP does, so what passes here passes there.

mod expect;
mod file;
mod runner;

use crate::cli::TestFlags;
use anyhow::Context;
use std::path::Path;
use std::process::ExitCode;

#[allow(clippy::print_stdout, reason = "the report is the program's output")]
pub(crate) fn run(flags: &TestFlags) -> anyhow::Result<ExitCode> {
    let (mut passed, mut failed) = (0_u32, 0_u32);
    for path in &flags.files {
        for (number, case) in read(path)?.into_iter().enumerate() {
            let name = case.name.clone().unwrap_or_else(|| format!("case {}", number + 1));
            match runner::run(&case, path.parent().unwrap_or(Path::new(""))) {
                Ok(()) => {
                    passed += 1;
                    println!("ok      {}: {name}", path.display());
                }
                Err(difference) => {
                    failed += 1;
                    println!("FAILED  {}: {name}", path.display());
                    for line in difference.lines() {
                        println!("          {line}");
                    }
                }
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn read(path: &Path) -> anyhow::Result<Vec<file::Case>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let file: file::File =
        serde_saphyr::from_str(&text).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))?;
    Ok(file.0)
}
