//! `tollgate explain`: which rules match a request and why, before it is made. By rule files alone (`--rules`), or by a
//! running server (`--admin`), which also knows the published rules, quotas, measures and counters; with both, the
//! files are a draft that the server explains on its counters.

use crate::admin_client::{self, AdminFlags, Client, cell};
use crate::cli::output::{self, BAD, GOOD, WARNING, paint};
use crate::cli::{ProfileName, parse_attribute, print, print_line};
use crate::config;
use crate::config::rule_sources;
use anyhow::{Context, bail, ensure};
use clap::Args;
use hyper::Method;
use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use tollgate_admin::{ExplainedOverload, ExplainedRule};
use tollgate_core::TimeDelta;
use tollgate_observe::humanize;
use tollgate_rules::{Explanation, Ruleset, limit_in_words};

#[derive(Debug, Args)]
#[command(override_usage = "tollgate explain --rules <PATH> [--attr <KEY=VALUE>]...\n       \
                      tollgate explain [--admin <URL>] [--rules <PATH>] [--attr <KEY=VALUE>]...")]
pub(crate) struct ExplainFlags {
    /// Rule file or directory of rule files, explained without a server; with --admin, a draft on that server. May be
    /// repeated.
    #[arg(long, value_name = "PATH")]
    rules: Vec<PathBuf>,
    /// Attribute of the request; may be repeated. On a server, api_key may be a caller's id from a list.
    #[arg(long = "attr", value_name = "KEY=VALUE", value_parser = parse_attribute)]
    attributes: Vec<(String, String)>,
    /// Rule domain; required if there are several.
    #[arg(long, value_name = "NAME")]
    domain: Option<String>,
    /// Cost of the request, on a server [default: 1].
    #[arg(long, value_name = "UNITS")]
    cost: Option<u64>,
    /// Signal that is supposed to be reported before the request, on a server whose rules adapt limits; may be repeated.
    #[arg(long = "signal", value_name = "NAME=VALUE", value_parser = parse_signal)]
    signals: Vec<(String, f64)>,
    /// Explain rule files for this profile.
    #[arg(long, value_name = "PROFILE")]
    profile: Option<ProfileName>,
    /// Print the most that all cells together admit of each limit, by the mode of its `region`, and nothing else.
    #[arg(long, requires = "rules")]
    bound: bool,
    /// Number of cells, for --bound.
    #[arg(long, value_name = "N", default_value_t = 3, requires = "bound", value_parser = clap::value_parser!(u32).range(1..=256))]
    cells: u32,
    /// Time until a cell knows what another has admitted, in milliseconds, for --bound.
    #[arg(long, value_name = "MS", default_value_t = 200, requires = "bound", value_parser = clap::value_parser!(u64).range(0..=600_000))]
    lag_ms: u64,
    #[command(flatten)]
    admin: AdminFlags,
    /// Whether --admin was on the command line.
    #[arg(skip)]
    pub(crate) names_server: bool,
}

pub(crate) fn run(flags: &ExplainFlags) -> anyhow::Result<ExitCode> {
    if flags.bound {
        return bounds(flags);
    }
    if flags.names_server || flags.rules.is_empty() {
        ensure!(flags.profile.is_none(), "--profile is for rule files; a server has its own");
        return admin_client::run(&flags.admin, async |client| by_server(flags, &client).await);
    }
    ensure!(flags.cost.is_none(), "--cost is for a server, which has counters; add --admin");
    ensure!(
        flags.signals.is_empty(),
        "--signal is for a server, which has counters; add --admin, or report signals in a `tollgate test` file"
    );
    by_files(flags)
}

/// Parses `NAME=VALUE`, a signal and its value.
fn parse_signal(text: &str) -> Result<(String, f64), String> {
    let (name, value) = parse_attribute(text).map_err(|_| "expected NAME=VALUE".to_owned())?;
    let value: f64 = value.parse().map_err(|_| format!("`{value}` is not a number"))?;
    if !value.is_finite() || value < 0.0 {
        return Err("the value must be a finite number of at least 0".to_owned());
    }
    Ok((name, value))
}

fn by_files(flags: &ExplainFlags) -> anyhow::Result<ExitCode> {
    let sources = rule_sources::read(&flags.rules)?;
    let rules = Ruleset::load(&sources, &config::options(flags.profile))
        .map_err(|errors| anyhow::anyhow!("invalid rules\n{errors}"))?;
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
    if flags.admin.is_json() {
        print(&json(&explanation))?;
    } else {
        print_line(explanation)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints the bound of each limit in numbers.
fn bounds(flags: &ExplainFlags) -> anyhow::Result<ExitCode> {
    let sources = rule_sources::read(&flags.rules)?;
    let rules = Ruleset::load(&sources, &config::options(flags.profile))
        .map_err(|errors| anyhow::anyhow!("invalid rules\n{errors}"))?;
    let lag = TimeDelta::from_millis(flags.lag_ms);
    let of_domain =
        |domain: &&tollgate_rules::Domain| flags.domain.as_deref().is_none_or(|name| domain.name() == name);
    let mut all = Vec::new();
    for domain in rules.domains().filter(of_domain) {
        for rule in domain.domain_rules() {
            for limit in rule.all_limits() {
                let bound = rule.bound(&limit.limit, flags.cells, lag);
                all.push((domain.name(), rule, limit, bound));
            }
        }
    }
    if flags.admin.is_json() {
        let rows: Vec<Value> = all
            .iter()
            .map(|(domain, rule, limit, bound)| {
                json!({
                    "domain": domain, "rule": rule.name, "limit": limit_in_words(&limit.limit), "region": rule.shared_by(),
                    "cells": flags.cells, "lag_ms": flags.lag_ms, "burst": bound.burst,
                    "beyond": bound.beyond, "rates": bound.rates, "typically_beyond": bound.typical,
                    "without_owner": rule.without_owner(),
                    "bound": rule.describe_bound(&limit.limit, flags.cells, lag),
                })
            })
            .collect();
        print(&Value::from(rows))?;
        return Ok(ExitCode::SUCCESS);
    }
    for (domain, rule, limit, _) in all {
        let (cells, text) = (flags.cells, rule.describe_bound(&limit.limit, flags.cells, lag));
        print_line(format!(
            "{domain}/{}: {}, {} over {cells} {}: {text}",
            rule.name,
            limit_in_words(&limit.limit),
            rule.shared_by(),
            if cells == 1 { "cell" } else { "cells" }
        ))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn json(explanation: &Explanation) -> Value {
    let rules: Vec<ExplainedRule> = explanation.rules.iter().map(ExplainedRule::from).collect();
    let overload = explanation.overload.as_ref().map(ExplainedOverload::from);
    json!({"domain": explanation.domain, "tier": explanation.tier, "rules": rules, "overload": overload})
}

async fn by_server(flags: &ExplainFlags, client: &Client) -> anyhow::Result<ExitCode> {
    let attributes: Map<String, Value> =
        flags.attributes.iter().map(|(key, value)| (key.clone(), Value::from(value.as_str()))).collect();
    let mut body = json!({"attributes": attributes});
    if let Some(domain) = &flags.domain {
        body["domain"] = domain.as_str().into();
    }
    if let Some(cost) = flags.cost {
        body["cost"] = cost.into();
    }
    if !flags.signals.is_empty() {
        let signals = flags.signals.iter().map(|(name, value)| (name.clone(), Value::from(*value)));
        body["signals"] = signals.collect::<Map<_, _>>().into();
    }
    if !flags.rules.is_empty() {
        let sources = rule_sources::read(&flags.rules)?;
        let files = sources.into_iter().map(|source| json!({"name": source.name, "text": source.text}));
        body["files"] = files.collect();
    }
    let explanation = client.request(Method::POST, "/admin/v1/explain", Some(&body)).await?;
    if flags.admin.is_json() {
        print(&explanation)?;
    } else {
        show(&explanation)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints a server's explanation.
fn show(explanation: &Value) -> anyhow::Result<()> {
    let mut out = output::styled();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let outcome = &explanation["outcome"];
    writeln!(out, "{}", painted(outcome))?;
    if let Some(reason) = outcome["reason"].as_str() {
        writeln!(out, "Reason: {reason}.")?;
    }
    if let Some(active) = explanation.get("active_outcome") {
        writeln!(out, "By the active rules: {}", painted(active))?;
        let changes = list(&explanation["changes"]);
        if changes.is_empty() {
            writeln!(out, "The draft changes no rule for this request.")?;
        }
        for change in changes {
            let [rule, before, after] = ["rule", "before", "after"].map(|name| cell(&change[name]));
            writeln!(out, "  {rule}: {before} -> {after}")?;
        }
    }
    let rules = list(&explanation["rules"]);
    let matched = rules.iter().filter(|rule| rule["finding"] != "no_match").count();
    let tier = match explanation["tier"].as_str() {
        Some(tier) => format!(", tier {tier} (of the {})", cell(&explanation["tier_source"])),
        None => String::new(),
    };
    let by = if explanation["explained_by"] == "draft" { "draft" } else { "active rules" };
    let (domain, revision) = (cell(&explanation["domain"]), cell(&explanation["revision"]));
    let omitted = explanation["omitted"].as_u64().unwrap_or(0);
    let total = rules.len() as u64 + omitted;
    writeln!(out, "\n{by} {revision}, domain {domain}: {matched} of {total} rules match{tier}")?;
    for rule in rules {
        let [name, file, line] = ["rule", "file", "line"].map(|name| cell(&rule[name]));
        let finding = match rule["finding"].as_str().unwrap_or_default() {
            "no_match" => "no match".to_owned(),
            "unlimited" => "matches, unlimited".to_owned(),
            "exempt" => "matches, no limit for this caller".to_owned(),
            "replaced" => format!("matches, replaced by {}", cell(&rule["replaced_by"])),
            _ => "matches".to_owned(),
        };
        writeln!(out, "\n{name} ({file}:{line}): {finding}")?;
        for clause in list(&rule["clauses"]) {
            let mark = if clause["holds"] == true { "yes" } else { "no " };
            writeln!(out, "  {mark}  {}: {}", cell(&clause["asked"]), cell(&clause["answer"]))?;
        }
        for charge in list(&rule["charged"]) {
            writeln!(out, "  {}", charged(&charge))?;
        }
    }
    if omitted > 0 {
        writeln!(out, "\n{omitted} more rules do not match")?;
    }
    if let Some(overload) = explanation["overload"]["sentence"].as_str() {
        writeln!(out, "\n{overload}")?;
    }
    for grant in list(&explanation["grants"]) {
        let [id, left, units, until] =
            ["id", "remaining", "units", "expires_at"].map(|name| cell(&grant[name]));
        writeln!(out, "\ngrant {id}: {left} of {units} units left, expires {until}")?;
    }
    Ok(())
}

/// Returns the sentence of an outcome, in its color.
fn painted(outcome: &Value) -> String {
    let style = match outcome["verdict"].as_str() {
        Some("deny") => BAD,
        Some("allow") => GOOD,
        _ => WARNING,
    };
    paint(style, cell(&outcome["sentence"]))
}

/// Returns a line about a charged limit.
fn charged(charge: &Value) -> String {
    let [limit, source, used, remaining, counter] =
        ["limit", "source", "used", "remaining", "counter"].map(|name| cell(&charge[name]));
    let answer = match charge["answer"].as_str() {
        Some("denies") => match charge["retry_after_ms"].as_u64() {
            Some(wait) => {
                let wait = humanize(TimeDelta::from_millis(wait));
                format!("denies {} for {wait} more", cell(&charge["cost"]))
            }
            None => format!("denies {}, always", cell(&charge["cost"])),
        },
        Some("fits") => format!("{} fits", cell(&charge["cost"])),
        _ => "not asked".to_owned(),
    };
    let mut notes = Vec::new();
    if let Some(measure) = charge["measure"].as_str() {
        notes.push(format!("{measure}: {}", cell(&charge["measure_effect"])));
    }
    match charge["role"].as_str() {
        Some("shadow") => notes.push("in shadow mode".to_owned()),
        Some("unenforced") => notes.push("not enforced for this caller yet".to_owned()),
        Some("candidate") => notes.push("a candidate".to_owned()),
        Some("quota") => notes.push("one quota must fit".to_owned()),
        _ => {}
    }
    if charge["assumed"] == true {
        notes.push("the store may have lost what was used: all of it is assumed".to_owned());
    }
    if charge["granted"] == true {
        notes.push("a grant pays".to_owned());
    }
    notes.extend(super::region::sentence(&charge["region"]));
    let notes = notes.iter().map(|note| format!("; {note}")).collect::<String>();
    format!("{limit} by the {source}: {used} used, {remaining} left; {answer}{notes}\n    counter {counter}")
}
