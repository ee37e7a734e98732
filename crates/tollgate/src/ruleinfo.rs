//! `tollgate check`, `schema` and `explain`: what rule files say, without serving them.

use crate::cli::{CheckFlags, ExplainFlags, ProfileName};
use crate::{config, sources};
use anyhow::{Context, bail};
use std::path::PathBuf;
use std::process::ExitCode;
use tollgate_rules::Ruleset;

#[allow(clippy::print_stdout, reason = "the report is the program's output")]
pub(crate) fn check(flags: &CheckFlags) -> anyhow::Result<ExitCode> {
    let sources = sources::read(&flags.paths)?;
    match Ruleset::load(&sources, &config::options(flags.profile)) {
        Ok(rules) => {
            for warning in rules.warnings() {
                println!("{warning}\n");
            }
            let (files, warnings) = (sources.len(), rules.warnings().len());
            println!(
                "{} in {}: no errors, {}",
                counted(rules.rules().len(), "rule"),
                counted(files, "file"),
                counted(warnings, "warning")
            );
            Ok(ExitCode::SUCCESS)
        }
        Err(errors) => {
            println!("{errors}");
            Ok(ExitCode::FAILURE)
        }
    }
}

fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

#[allow(clippy::print_stdout, reason = "the schema is the program's output")]
pub(crate) fn schema() -> anyhow::Result<ExitCode> {
    println!("{}", tollgate_rules::schema().trim_end());
    Ok(ExitCode::SUCCESS)
}

#[allow(clippy::print_stdout, reason = "the explanation is the program's output")]
pub(crate) fn explain(flags: &ExplainFlags) -> anyhow::Result<ExitCode> {
    let rules = load(&flags.rules, flags.profile)?;
    let domain = match &flags.domain {
        Some(name) => rules.domain(name).with_context(|| {
            let known: Vec<_> = rules.domains().map(tollgate_rules::Domain::name).collect();
            format!("there is no domain `{name}`; the files have {}", known.join(", "))
        })?,
        None => {
            let mut domains = rules.domains();
            match (domains.next(), domains.next()) {
                (Some(only), None) => only,
                _ => bail!("the files have several domains; say which with --domain"),
            }
        }
    };
    let mut attributes: Vec<(&str, &str)> =
        flags.attributes.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    if !attributes.iter().any(|(key, _)| *key == "global") {
        attributes.push(("global", "aggregate"));
    }
    println!("{}", domain.explain(&attributes));
    Ok(ExitCode::SUCCESS)
}

fn load(paths: &[PathBuf], profile: Option<ProfileName>) -> anyhow::Result<Ruleset> {
    let sources = sources::read(paths)?;
    Ruleset::load(&sources, &config::options(profile))
        .map_err(|errors| anyhow::anyhow!("the rules cannot be used\n{errors}"))
}
