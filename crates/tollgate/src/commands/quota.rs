//! `tollgate quota`: quotas of single callers, through a running server.

use crate::admin_client::{self, AdminFlags, Client, cell, encoded};
use crate::cli::{TimeArg, now, output, print, print_line};
use crate::commands::caller::CallerFlags;
use crate::ndjson;
use clap::{Args, Subcommand};
use hyper::Method;
use hyper::header::IF_MATCH;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tollgate_engine::Network;
use tollgate_rules::parse_count;

#[derive(Debug, Args)]
pub(crate) struct QuotaFlags {
    #[command(flatten)]
    admin: AdminFlags,
    #[command(subcommand)]
    command: QuotaCommand,
}

#[derive(Debug, Subcommand)]
enum QuotaCommand {
    /// Show a caller's quota.
    Get {
        #[command(flatten)]
        caller: CallerFlags,
    },
    /// Set a quota, replacing the existing one.
    Set(SetFlags),
    /// List quotas.
    List {
        /// List only quotas of this tier.
        #[arg(long, value_name = "TIER")]
        tier: Option<String>,
        /// List only quotas of callers whose API key, or other value, has this prefix.
        #[arg(long, value_name = "TEXT")]
        prefix: Option<String>,
        /// List only quotas of callers that this attribute identifies, such as user_id.
        #[arg(long, value_name = "ATTRIBUTE")]
        key: Option<String>,
        /// Maximum number of quotas; 0 lists all.
        #[arg(long, alias = "most", value_name = "N", default_value_t = 100)]
        max_results: usize,
    },
    /// Delete a quota (the rules apply again).
    Delete {
        #[command(flatten)]
        caller: CallerFlags,
        /// Fail unless the quota is at this revision.
        #[arg(long, value_name = "N")]
        revision: Option<i64>,
        /// Delete the quota even if the rules allow less than the caller uses.
        #[arg(long)]
        confirm: bool,
    },
    /// Import quotas from NDJSON (`-` for stdin), skipping and reporting invalid lines; exits 1 if any.
    Import {
        /// NDJSON file as `quota export` writes it, or - for standard input.
        #[arg(value_name = "FILE|-")]
        file: PathBuf,
        /// Import even quotas that allow nothing, or less than their callers use.
        #[arg(long)]
        confirm: bool,
    },
    /// Export all quotas as NDJSON.
    Export {
        /// Output file [default: standard output].
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
struct SetFlags {
    #[command(flatten)]
    caller: CallerFlags,
    /// Tier of the caller, such as pro.
    #[arg(long, value_name = "TIER")]
    tier: Option<String>,
    /// Override of a rule's limit, such as `500/minute`, `500/minute burst 50`, `unlimited` or
    /// `api_key/endpoint=POST /orders=20/30s`; may be repeated. It replaces the rule's limit of the same period and leaves
    /// the others in force; with `replace all` after it, it replaces all.
    #[arg(long = "limit", value_name = "[DESCRIPTOR=]COUNT/PERIOD[ burst N][ replace all]", value_parser = parse_limit)]
    limits: Vec<Value>,
    /// Show the limits in force before and after, and change nothing.
    #[arg(long)]
    preview: bool,
    /// Start: 2d (from now), 2026-12-31 (00:00 UTC) or 2026-12-31T18:00:00Z [default: now].
    #[arg(long, value_name = "TIME")]
    from: Option<TimeArg>,
    /// Expiry: 2d (from now), 2026-12-31 (00:00 UTC) or 2026-12-31T18:00:00Z [default: never].
    #[arg(long, value_name = "TIME")]
    until: Option<TimeArg>,
    /// Reason, recorded in the audit log.
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    /// Author of the change [default: the operator].
    #[arg(long, value_name = "NAME")]
    author: Option<String>,
    /// Fail unless the quota is at this revision.
    #[arg(long, value_name = "N")]
    revision: Option<i64>,
    /// Set the quota even if it allows nothing, or less than the caller uses, or removes limits of a rule.
    #[arg(long, alias = "yes")]
    confirm: bool,
}

/// Parses `DESCRIPTOR=COUNT/PERIOD burst N replace all`. A descriptor may contain `=`, a limit does not.
fn parse_limit(text: &str) -> Result<Value, String> {
    let wrong = || {
        format!(
            "`{text}` is not a limit; use 500/minute, unlimited or `api_key/endpoint=POST /orders=20/30s burst 5`"
        )
    };
    let (descriptor, limit) = text.rsplit_once('=').unwrap_or(("default", text));
    if limit.trim() == "unlimited" {
        return Ok(json!({"descriptor": descriptor, "limit": "unlimited"}));
    }
    let (limit, replaces_all) = match limit.trim_end().strip_suffix(" replace all") {
        Some(limit) => (limit, true),
        None => (limit, false),
    };
    let (limit, burst) = match limit.split_once(" burst ") {
        Some((limit, burst)) => (limit, Some(parse_count(burst.trim()).map_err(|_| wrong())?)),
        None => (limit, None),
    };
    let (count, period) = limit.split_once('/').ok_or_else(wrong)?;
    let count = parse_count(count.trim()).map_err(|_| wrong())?;
    let mut limit = json!({"descriptor": descriptor, "requests_per_unit": count, "unit": period.trim()});
    if let Some(burst) = burst {
        limit["burst"] = burst.into();
    }
    if replaces_all {
        limit["replace"] = "all".into();
    }
    Ok(limit)
}

fn path(caller: &CallerFlags, parameters: &[String]) -> String {
    caller.path("/admin/v1/quotas", "", parameters)
}

pub(crate) fn quota(flags: &QuotaFlags) -> anyhow::Result<ExitCode> {
    let json = flags.admin.is_json();
    admin_client::run(&flags.admin, async |client| {
        match &flags.command {
            QuotaCommand::Get { caller } => {
                show(json, &client.request(Method::GET, &path(caller, &[]), None).await?)?;
            }
            QuotaCommand::Set(set) => {
                let body = set.body()?;
                if set.preview {
                    let path = set.caller.path("/admin/v1/quotas", "/preview", &[]);
                    return preview(json, &client.request(Method::POST, &path, Some(&body)).await?);
                }
                let path = path(&set.caller, &[]);
                show(json, &change(&client, Method::PUT, &path, set.revision, Some(&body)).await?)?;
            }
            QuotaCommand::List { tier, prefix, key, max_results } => {
                let [tier, prefix, key] =
                    [tier, prefix, key].map(|word| encoded(word.as_deref().unwrap_or("")));
                let query = format!("tier={tier}&prefix={prefix}&key={key}");
                list(&client, &query, *max_results, json).await?;
            }
            QuotaCommand::Import { file, confirm } => return import(&client, file, *confirm, json).await,
            QuotaCommand::Export { file } => {
                ndjson::receive(&client, "/admin/v1/quotas/export", file.as_deref()).await?;
            }
            QuotaCommand::Delete { caller, revision, confirm } => {
                let path = path(caller, &[format!("confirm={confirm}")]);
                change(&client, Method::DELETE, &path, *revision, None).await?;
                if json {
                    print(&json!({"deleted": true}))?;
                } else {
                    print_line("quota deleted; the rules apply again")?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

impl SetFlags {
    fn body(&self) -> anyhow::Result<Value> {
        anyhow::ensure!(
            self.tier.is_some() || !self.limits.is_empty(),
            "a quota needs a tier or a limit; set --tier NAME, --limit 500/minute or both"
        );
        let now = now()?;
        let time = |time: &Option<TimeArg>| time.as_ref().map(|time| time.to_rfc3339(now)).transpose();
        Ok(json!({
            "tier": self.tier, "overrides": self.limits, "effective_at": time(&self.from)?,
            "expires_at": time(&self.until)?, "reason": self.reason, "author": self.author,
            "confirm": self.confirm,
        }))
    }
}

async fn change(
    client: &Client,
    method: Method,
    path: &str,
    revision: Option<i64>,
    body: Option<&Value>,
) -> anyhow::Result<Value> {
    let tag = revision.map(|revision| format!("\"r{revision}\""));
    let headers: Vec<_> = tag.iter().map(|tag| (IF_MATCH, tag.as_str())).collect();
    client.exchange(method, path, &headers, body).await?.into_result()
}

async fn list(client: &Client, query: &str, most: usize, json: bool) -> anyhow::Result<()> {
    let most = if most == 0 { usize::MAX } else { most };
    let mut quotas: Vec<Value> = Vec::new();
    let mut cursor = String::new();
    loop {
        let path = format!("/admin/v1/quotas?{query}&cursor={}", encoded(&cursor));
        let mut page = client.request(Method::GET, &path, None).await?;
        quotas.extend(page["quotas"].as_array_mut().map(std::mem::take).unwrap_or_default());
        match page["next_cursor"].as_str() {
            Some(next) if quotas.len() < most => cursor = next.to_owned(),
            next => {
                let more = next.is_some() || quotas.len() > most;
                quotas.truncate(most);
                if json {
                    return print(&json!({"quotas": quotas}));
                }
                let rows: Vec<_> = quotas.iter().map(row).collect();
                admin_client::table_or(TITLES, &rows, "no quotas")?;
                if more {
                    eprintln!("more results; use --max-results");
                }
                return Ok(());
            }
        }
    }
}

async fn import(client: &Client, file: &Path, confirm: bool, json: bool) -> anyhow::Result<ExitCode> {
    let path = format!("/admin/v1/quotas/import?confirm={confirm}");
    let response = ndjson::send(client, &path, file).await?.into_result()?;
    let number = |name: &str| response[name].as_u64().unwrap_or(0);
    let (imported, failed) = (number("imported"), number("failed"));
    if json {
        output::ignore_closed(print(&response))?;
    } else {
        let errors = response["errors"].as_array().map_or(&[][..], Vec::as_slice);
        for error in errors {
            let place = error["field"].as_str().map(|place| format!("{place}: ")).unwrap_or_default();
            eprintln!("line {}: {place}{}", error["line"], cell(&error["detail"]));
        }
        let shown = errors.len() as u64;
        if failed > shown {
            eprintln!("{} more lines rejected", failed - shown);
        }
        let row = [imported.to_string(), failed.to_string()];
        output::ignore_closed(admin_client::table(["imported", "rejected"], &[row]))?;
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn show(json: bool, quota: &Value) -> anyhow::Result<()> {
    if json {
        return print(quota);
    }
    admin_client::table(TITLES, &[row(quota)])?;
    for warning in quota["warnings"].as_array().into_iter().flatten() {
        eprintln!("warning: {}", cell(warning));
    }
    if let until @ Value::Object(_) = &quota["until_effective"] {
        let mut out = output::styled();
        writeln!(
            out,
            "until {}: tier {}, limits {}",
            cell(&quota["effective_at"]),
            cell(&until["tier"]),
            limits(until)
        )?;
    }
    Ok(())
}

/// Shows the limits in force before and after a change.
fn preview(json: bool, preview: &Value) -> anyhow::Result<ExitCode> {
    if json {
        print(preview)?;
        return Ok(ExitCode::SUCCESS);
    }
    let in_force = |side: &Value| {
        let limit = |one: &Value| {
            let burst = one["burst"].as_u64().map(|burst| format!(" burst {burst}")).unwrap_or_default();
            let role = if one["enforced"] == true { "" } else { " (not enforced)" };
            format!("{}/{}{burst}{role}", one["count"], cell(&one["window"]))
        };
        let unlimited = (side["unlimited"] == true).then(|| "unlimited".to_owned());
        let limits = side["limits"].as_array().into_iter().flatten().map(limit);
        let all: Vec<String> = unlimited.into_iter().chain(limits).collect();
        if all.is_empty() { "no limit".to_owned() } else { all.join(", ") }
    };
    let row = |rule: &Value| {
        let (before, after) = (&rule["before"], &rule["after"]);
        let changed = if before == after { "" } else { "yes" };
        [cell(&rule["rule"]), in_force(before), in_force(after), changed.to_owned()]
    };
    let rows: Vec<_> = preview["rules"].as_array().into_iter().flatten().map(row).collect();
    admin_client::table_or(
        ["rule", "before", "after", "changed"],
        &rows,
        "no rule has counters of this caller's own",
    )?;
    let lines = |name: &str| preview[name].as_array().cloned().unwrap_or_default();
    for warning in lines("warnings") {
        eprintln!("warning: {}", cell(&warning));
    }
    for reason in lines("confirm") {
        eprintln!("needs --confirm: {}", cell(&reason));
    }
    Ok(ExitCode::SUCCESS)
}

const TITLES: [&str; 9] = ["id", "key", "caller", "tier", "limits", "from", "until", "revision", "reason"];

fn row(quota: &Value) -> [String; 9] {
    let id: String = cell(&quota["id"]).chars().take(12).collect();
    let prefix = quota["key_prefix"].as_str().unwrap_or("");
    // An address or network is stored whole.
    let is_whole = quota["key"] != "api_key" && prefix.parse::<Network>().is_ok();
    let stored = || if is_whole { prefix.to_owned() } else { format!("{prefix}…") };
    let sent = quota["api_key"].as_str().or_else(|| quota["value"].as_str());
    let caller = sent.map_or_else(stored, str::to_owned);
    let field = |name: &str| cell(&quota[name]);
    [
        id,
        field("key"),
        caller,
        field("tier"),
        limits(quota),
        field("effective_at"),
        field("expires_at"),
        field("revision"),
        field("reason"),
    ]
}

fn limits(quota: &Value) -> String {
    let limits: Vec<String> = quota["overrides"].as_array().into_iter().flatten().map(limit).collect();
    if limits.is_empty() { "-".to_owned() } else { limits.join(", ") }
}

fn limit(own: &Value) -> String {
    let descriptor = cell(&own["descriptor"]);
    if own["limit"] == "unlimited" {
        return format!("{descriptor}=unlimited");
    }
    let burst = own["burst"].as_u64().map(|burst| format!(" burst {burst}")).unwrap_or_default();
    let all = if own["replace"] == "all" { " replace all" } else { "" };
    format!("{descriptor}={}/{}{burst}{all}", own["requests_per_unit"], cell(&own["unit"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_they_are_shown() {
        for text in [
            "default=500/minute",
            "api_key/endpoint=POST /orders=20/30s burst 5",
            "x=1/day in Europe/Zurich",
            "default=9/s replace all",
            "x=9/s burst 3 replace all",
            "default=unlimited",
            "endpoint:GET /a=unlimited",
        ] {
            assert_eq!(limit(&parse_limit(text).expect(text)), text);
        }
        assert_eq!(limit(&parse_limit("7/h").expect("a limit")), "default=7/h");
        assert_eq!(
            limit(&parse_limit("1.5M/day burst 2k").expect("a limit")),
            "default=1500000/day burst 2000"
        );
        for wrong in ["", "7", "x=", "x=-1/s", "x=1/s burst y", "/s"] {
            assert!(parse_limit(wrong).is_err(), "{wrong}");
        }
    }
}
