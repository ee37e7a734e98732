//! `tollgate validate` and `schema`: rule files without a server.

use crate::cli::output::{self, GOOD, paint, paint_diagnostics};
use crate::cli::{ServeFlags, ValidateFlags, print, print_line, serve_flags};
use crate::config::rule_sources;
use crate::config::{self, Config};
use serde_json::json;
use std::process::ExitCode;
use tollgate_control::RuleDiagnostic;
use tollgate_rules::{Diagnostic, Ruleset};

pub(crate) fn validate(flags: &ValidateFlags) -> anyhow::Result<ExitCode> {
    let sources = rule_sources::read(&flags.paths)?;
    let ignored = rule_sources::ignored(&flags.paths);
    let options = match &flags.config {
        None => config::options(flags.profile),
        Some(path) => {
            let defaults = serve_flags();
            let profile = flags.profile.or(defaults.profile);
            Config::new(&ServeFlags { config: Some(path.clone()), profile, ..defaults })?.rule_options()
        }
    };
    let loaded = Ruleset::load(&sources, &options);
    let (mut report, text, verdict) = match &loaded {
        Ok(rules) => {
            let report = json!({
                "ok": true, "files": sources.len(), "rules": rules.rule_count(), "revision": rules.revision(),
                "errors": [], "warnings": diagnostics(rules.warnings()), "notes": diagnostics(rules.notes()),
            });
            let warnings: Vec<String> = rules
                .warnings()
                .iter()
                .chain(rules.notes())
                .map(|warning| paint_diagnostics(&format!("{warning}\n\n")))
                .collect();
            let text = format!(
                "{}{} in {}: {}, {}",
                warnings.concat(),
                counted(rules.rule_count(), "rule"),
                counted(sources.len(), "file"),
                paint(GOOD, "no errors"),
                counted(rules.warnings().len(), "warning")
            );
            (report, text, ExitCode::SUCCESS)
        }
        Err(errors) => {
            let report = json!({"ok": false, "files": sources.len(), "errors": diagnostics(errors.all()), "warnings": []});
            (report, paint_diagnostics(&errors.to_string()), ExitCode::FAILURE)
        }
    };
    report["ignored"] = json!(ignored);
    let notes = ignored.iter().map(|path| format!("note: {}\n", rule_sources::ignored_text(path)));
    let text = format!("{}{text}", notes.collect::<String>());
    output::ignore_closed(if flags.format.is_json() { print(&report) } else { print_line(text) })?;
    Ok(verdict)
}

/// Converts diagnostics to the form that the admin API returns.
fn diagnostics(all: &[Diagnostic]) -> Vec<RuleDiagnostic> {
    all.iter().map(RuleDiagnostic::from).collect()
}

fn counted(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

pub(crate) fn schema() -> anyhow::Result<ExitCode> {
    print_line(tollgate_rules::schema().trim_end())?;
    Ok(ExitCode::SUCCESS)
}
