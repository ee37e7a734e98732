//! `tollgate validate`, `schema` and `explain`: rule files without a server.

use crate::cli::output::{self, GOOD, paint, paint_diagnostics};
use crate::cli::{ExplainFlags, ProfileName, ValidateFlags, print, print_line};
use crate::config;
use crate::config::rule_sources;
use anyhow::{Context, bail};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::process::ExitCode;
use tollgate_control::RuleDiagnostic;
use tollgate_rules::{Diagnostic, Explanation, RuleExplanation, RuleResult, Ruleset};

pub(crate) fn validate(flags: &ValidateFlags) -> anyhow::Result<ExitCode> {
    let sources = rule_sources::read(&flags.paths)?;
    let ignored = rule_sources::ignored(&flags.paths);
    let loaded = Ruleset::load(&sources, &config::options(flags.profile));
    let (mut told, text, verdict) = match &loaded {
        Ok(rules) => {
            let told = json!({
                "ok": true, "files": sources.len(), "rules": rules.rules().len(), "revision": rules.revision(),
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
                counted(rules.rules().len(), "rule"),
                counted(sources.len(), "file"),
                paint(GOOD, "no errors"),
                counted(rules.warnings().len(), "warning")
            );
            (told, text, ExitCode::SUCCESS)
        }
        Err(errors) => {
            let told = json!({"ok": false, "files": sources.len(), "errors": diagnostics(errors.all()), "warnings": []});
            (told, paint_diagnostics(&errors.to_string()), ExitCode::FAILURE)
        }
    };
    told["ignored"] = json!(ignored);
    let notes = ignored.iter().map(|path| format!("note: {}\n", rule_sources::ignored_text(path)));
    let text = format!("{}{text}", notes.collect::<String>());
    output::ignore_closed(if flags.format.is_json() { print(&told) } else { print_line(text) })?;
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

pub(crate) fn explain(flags: &ExplainFlags) -> anyhow::Result<ExitCode> {
    let rules = load(&flags.rules, flags.profile)?;
    let domain = match &flags.domain {
        Some(name) => rules.domain(name).with_context(|| {
            let known: Vec<_> = rules.domains().map(tollgate_rules::Domain::name).collect();
            format!("no domain `{name}`; the files have {}", known.join(", "))
        })?,
        None => {
            let mut domains = rules.domains();
            match (domains.next(), domains.next()) {
                (Some(only), None) => only,
                _ => bail!("the files have several domains; choose one with --domain"),
            }
        }
    };
    let attributes: Vec<(&str, &str)> =
        flags.attributes.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
    let explanation = domain.explain(&attributes);
    if flags.format.is_json() {
        print(&explained(&explanation))?;
    } else {
        print_line(explanation)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn explained(explanation: &Explanation) -> Value {
    let rule = |rule: &RuleExplanation| {
        let (finding, charged, by) = match &rule.result {
            RuleResult::NoMatch => ("no_match", None, None),
            RuleResult::Limited(charged) => ("limited", Some(charged), None),
            RuleResult::Unlimited => ("unlimited", None, None),
            RuleResult::Exempt => ("exempt", None, None),
            RuleResult::Replaced(by) => ("replaced", None, Some(by)),
        };
        let charged = charged.into_iter().flatten();
        let charged: Vec<Value> =
            charged.map(|(limit, counter)| json!({"limit": limit, "counter": counter})).collect();
        let clauses = rule.clauses.iter();
        let clauses: Vec<Value> = clauses
            .map(|clause| json!({"asked": clause.condition, "answer": clause.actual, "holds": clause.holds}))
            .collect();
        let (file, line) = &rule.location;
        let settings: Map<String, Value> = rule
            .settings
            .iter()
            .map(|(name, value)| ((*name).to_owned(), Value::from(value.as_str())))
            .collect();
        json!({
            "rule": rule.name, "file": file, "line": line, "finding": finding, "clauses": clauses,
            "charged": charged, "replaced_by": by, "settings": settings,
        })
    };
    let rules: Vec<Value> = explanation.rules.iter().map(rule).collect();
    json!({"domain": explanation.domain, "tier": explanation.tier, "rules": rules})
}

fn load(paths: &[PathBuf], profile: Option<ProfileName>) -> anyhow::Result<Ruleset> {
    let sources = rule_sources::read(paths)?;
    Ruleset::load(&sources, &config::options(profile))
        .map_err(|errors| anyhow::anyhow!("invalid rules\n{errors}"))
}
