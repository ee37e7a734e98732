//! `tollgate doctor`: reads how a proxy is configured, and says what will happen, what is missing and what to write.
//!
//! | module | contents |
//! |---|---|
//! | `document` | files with one or more documents, within bounds |
//! | `proto` | messages of Envoy in YAML and JSON |
//! | `envoy` | collects the parts of Envoy's configuration, wherever they are in a tree |
//! | `filter`, `quota`, `cluster` | each filter and cluster on its own |
//! | `routes`, `actions` | routes, their settings for filters, and the descriptors of their actions |
//! | `sending` | what each filter sends for each route |
//! | `matching`, `rule_tree` | descriptors against rules |
//! | `patch` | patches of Istio and Envoy Gateway |
//! | `policy` | Envoy Gateway's policies and configuration |
//! | `workload` | workloads of Kubernetes that run the rate limit service |
//! | `server` | a running Tollgate |
//! | `snippet` | Envoy's configuration for rules |
//! | `finding` | the report |

mod actions;
mod cluster;
mod document;
mod envoy;
mod filter;
mod finding;
mod matching;
mod patch;
mod policy;
mod proto;
mod quota;
mod routes;
mod rule_tree;
mod sending;
mod server;
mod snippet;
mod workload;

use crate::admin_client::{self, AdminFlags};
use crate::cli::output::{self, BAD, GOOD, WARNING, paint};
use crate::cli::{ProfileName, print, print_line};
use crate::config;
use crate::config::rule_sources;
use anyhow::ensure;
use clap::Args;
use document::{Document, Kind};
use envoy::EnvoyParts;
use finding::{Level, Report};
use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::ExitCode;
use tollgate_observe::escape;
use tollgate_rules::{Options, Ruleset, Source};

/// Exit code for input that cannot be examined.
const BAD_INPUT: u8 = 2;

#[derive(Debug, Args)]
#[command(
    override_usage = "tollgate doctor [--rules <PATH>]... [--server] <FILE>...\n       \
                      tollgate doctor --server [--admin <URL>]\n       \
                      tollgate doctor --rules <PATH>... --print-envoy",
    after_help = "Exit codes: 0 no problems (warnings and notes only), 1 problems found, 2 input that cannot be read."
)]
pub(crate) struct DoctorFlags {
    /// Configuration of Envoy, EnvoyFilter of Istio, BackendTrafficPolicy of Envoy Gateway, Deployment of the rate limit service
    /// (YAML or JSON, several documents in a file; `-` reads the standard input). May be several.
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Rule file or directory of rule files that the descriptors are checked against; may be repeated.
    #[arg(long, value_name = "PATH")]
    rules: Vec<PathBuf>,
    /// Examine the running server of --admin, and check descriptors against its rules.
    #[arg(long, conflicts_with = "rules")]
    server: bool,
    /// Print Envoy's configuration for the rules: filter, actions, cluster.
    #[arg(long, conflicts_with = "files")]
    print_envoy: bool,
    /// Read rule files for this profile.
    #[arg(long, value_name = "PROFILE")]
    profile: Option<ProfileName>,
    #[command(flatten)]
    admin: AdminFlags,
}

pub(crate) fn run(flags: &DoctorFlags) -> anyhow::Result<ExitCode> {
    match examine(flags) {
        Ok(code) => Ok(code),
        Err(error) if output::is_closed_output(&error) => Err(error),
        Err(error) => {
            crate::server::logging::flush(Some(&error));
            Ok(ExitCode::from(BAD_INPUT))
        }
    }
}

fn examine(flags: &DoctorFlags) -> anyhow::Result<ExitCode> {
    ensure!(
        !flags.files.is_empty() || flags.server || flags.print_envoy,
        "nothing to examine; name a file, or use --server, or --rules with --print-envoy"
    );
    ensure!(
        !flags.print_envoy || flags.server || !flags.rules.is_empty(),
        "--print-envoy requires --rules, or --server for the rules of a running one"
    );
    let mut report = Report::default();
    let mut documents = Vec::new();
    for file in &flags.files {
        documents.extend(document::read(file)?);
    }
    let rules = rules(flags, &documents, &mut report)?;
    if flags.print_envoy {
        let text = rules.as_ref().map(snippet::envoy).unwrap_or_default();
        let printed =
            if flags.admin.is_json() { print(&json!({"envoy": text})) } else { print_line(text.trim_end()) };
        output::ignore_closed(printed)?;
        return Ok(ExitCode::SUCCESS);
    }
    check(&documents, rules.as_ref(), &mut report);
    output::ignore_closed(show(&report, flags.admin.is_json()))?;
    Ok(if report.count(Level::Problem) > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Returns the rules that descriptors are checked against: of files, of the server, or among the documents.
fn rules(
    flags: &DoctorFlags,
    documents: &[Document],
    report: &mut Report,
) -> anyhow::Result<Option<Ruleset>> {
    let service = service(documents, report);
    if flags.server {
        let mut rules = None;
        admin_client::run(&flags.admin, async |client| {
            // Rule files are read as they are; the report is escaped when it is printed.
            rules = server::check(&client.verbatim(), flags.profile, report).await?;
            Ok(ExitCode::SUCCESS)
        })?;
        return Ok(rules);
    }
    let mut sources = match flags.rules.is_empty() {
        true => Vec::new(),
        false => rule_sources::read(&flags.rules)?,
    };
    sources.extend(documents.iter().flat_map(rule_texts));
    if sources.is_empty() {
        return Ok(None);
    }
    load(&sources, flags.profile, service, report).map(Some)
}

/// Examines workloads. Returns how the first rate limit service among them reads rule files.
fn service(documents: &[Document], report: &mut Report) -> Option<Options> {
    let workloads = documents.iter().filter(|document| document.kind == Kind::Workload);
    let (services, others): (Vec<&Document>, Vec<&Document>) =
        workloads.partition(|document| workload::has_service(&document.value));
    if let Some(first) = others.first() {
        let count = others.len();
        report.note(&first.place, format!("no rate limit service in {count} Deployments and the like"));
    }
    let mut found = None;
    for document in services {
        let options = workload::check(&document.value, &document.place, report);
        found = found.or(options);
    }
    found
}

/// Loads rules as the service among the documents reads them, else as `serve` does. Files that only a replacement of
/// envoyproxy/ratelimit accepts are read so, because they are most likely those of such a service.
fn load(
    sources: &[Source],
    profile: Option<ProfileName>,
    service: Option<Options>,
    report: &mut Report,
) -> anyhow::Result<Ruleset> {
    let is_service = service.is_some();
    let options = service.unwrap_or_else(|| config::options(profile));
    let options = Options { profile: profile.map(Into::into).or(options.profile), ..options };
    let errors = match Ruleset::load(sources, &options) {
        Ok(rules) => return Ok(rules),
        Err(errors) => errors,
    };
    let lenient = Options { ratelimit_files: true, ..config::options(profile.or(Some(ProfileName::Envoy))) };
    match Ruleset::load(sources, &lenient) {
        Ok(rules) if !is_service => {
            let first = errors.all().first();
            let place = first
                .map_or_else(String::new, |first| format!("{}:{}:{}", first.file, first.line, first.column));
            let why = first.map(|first| first.message.as_str()).unwrap_or_default();
            report.warning(
                &place,
                format!("`tollgate serve` refuses these rules ({why}); they are read as `tollgate ratelimit` does"),
                "use them with `tollgate ratelimit`, or change them for `serve`: `tollgate check FILE` has all errors",
            );
            Ok(rules)
        }
        _ => Err(anyhow::anyhow!("the rules cannot be used\n{errors}")),
    }
}

/// Returns the rule files of a document: itself, or those in a ConfigMap.
fn rule_texts(document: &Document) -> Vec<Source> {
    match document.kind {
        Kind::Rules => vec![Source::new(&document.place, &*document.text)],
        Kind::ConfigMap => {
            let files = document.value["data"].as_object().into_iter().flatten();
            let texts = files.filter_map(|(name, text)| Some((name, text.as_str()?)));
            let is_rules = |text: &str| {
                serde_saphyr::from_str::<Value>(text).is_ok_and(|value| value["domain"].is_string())
            };
            let texts = texts.filter(|(_, text)| is_rules(text));
            texts.map(|(name, text)| Source::new(format!("{}, {name}", document.place), text)).collect()
        }
        _ => Vec::new(),
    }
}

/// Returns the configurations of Envoy Gateway in a ConfigMap, as it has them in a cluster, with their places.
fn gateways(map: &Value, place: &str) -> Vec<(String, Value)> {
    let files = map["data"].as_object().into_iter().flatten();
    let parsed = files.filter_map(|(name, text)| {
        let value = serde_saphyr::from_str::<Value>(text.as_str()?).ok()?;
        Some((format!("{place}, {name}"), value))
    });
    parsed.filter(|(_, value)| document::kind(value) == Kind::EnvoyGateway).collect()
}

fn check(documents: &[Document], rules: Option<&Ruleset>, report: &mut Report) {
    let mut parts = EnvoyParts::default();
    let (mut has_envoy, mut has_policy, mut has_gateway) = (None, None, false);
    for document in documents {
        let Document { place, kind, value, .. } = document;
        match kind {
            Kind::Envoy => {
                has_envoy.get_or_insert(place);
                parts.collect(value, place, report);
            }
            Kind::EnvoyPatch => {
                has_envoy.get_or_insert(place);
                patch::collect(value, place, &mut parts, report);
            }
            Kind::BackendTrafficPolicy => {
                has_policy.get_or_insert(place);
                policy::check(value, place, report);
            }
            Kind::EnvoyGateway => {
                has_gateway = true;
                policy::check_gateway(value, place, report);
            }
            Kind::ConfigMap => {
                let found = gateways(value, place);
                has_gateway |= !found.is_empty();
                for (place, gateway) in &found {
                    policy::check_gateway(gateway, place, report);
                }
                if found.is_empty() && rule_texts(document).is_empty() {
                    let none = "neither rule files nor a configuration of Envoy Gateway in this ConfigMap";
                    report.note(place, none);
                }
            }
            // Read with the rules.
            Kind::Rules | Kind::Workload => {}
            Kind::Other(kind) => report.note(place, format!("{kind}: nothing to check")),
        }
    }
    if let Some(place) = has_envoy {
        parts.check(place, report);
        match rules {
            Some(rules) => matching::check(&parts, rules, report),
            None if parts.has_descriptors() => {
                report
                    .note(place, "descriptors are not checked: no rules are given; use --rules or --server");
            }
            None => {}
        }
    }
    if let (Some(place), false) = (has_policy, has_gateway) {
        report.note(
            place,
            "global limits need `rateLimit.backend` in the configuration of Envoy Gateway; add that document to check it",
        );
    }
}

fn show(report: &Report, is_json: bool) -> anyhow::Result<()> {
    let (problems, warnings) = (report.count(Level::Problem), report.count(Level::Warning));
    if is_json {
        return print(&json!({
            "ok": problems == 0, "problems": problems, "warnings": warnings, "findings": report.findings, "omitted": report.more,
        }));
    }
    let mut findings: Vec<_> = report.findings.iter().collect();
    findings.sort_by_key(|finding| finding.level);
    for finding in findings {
        let style = match finding.level {
            Level::Problem => BAD,
            Level::Warning => WARNING,
            Level::Note => GOOD,
        };
        let plain = |text: &str| escape::lines(text).into_owned();
        print_line(format!("{}: {}", paint(style, finding.level), plain(&finding.message)))?;
        print_line(format!("  at {}", plain(&finding.place)))?;
        if let Some(fix) = &finding.fix {
            print_line(format!("  fix: {}", plain(fix)))?;
        }
    }
    if report.more > 0 {
        print_line(format!("... and {} more", report.more))?;
    }
    print_line(format!("{problems} problems, {warnings} warnings"))
}

#[cfg(test)]
mod tests;
