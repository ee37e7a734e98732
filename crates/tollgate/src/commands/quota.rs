//! `tollgate quota`: what is agreed with single callers, by way of a running server.

use crate::admin_client::{self, AdminFlags, Client, cell, encoded};
use crate::cli::print;
use crate::ndjson;
use clap::{Args, Subcommand};
use hyper::Method;
use hyper::header::IF_MATCH;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(crate) struct QuotaFlags {
    #[command(flatten)]
    admin: AdminFlags,
    #[command(subcommand)]
    command: QuotaCommand,
}

#[derive(Debug, Subcommand)]
enum QuotaCommand {
    /// What is agreed with the caller who has this API key.
    Get {
        #[arg(value_name = "API_KEY")]
        api_key: String,
    },
    /// Agree on something with a caller: it replaces all that was agreed before, and acts at once.
    Set(SetFlags),
    /// What is agreed with all of them.
    List {
        /// Those of this tier.
        #[arg(long, value_name = "TIER")]
        tier: Option<String>,
        /// Those of keys that begin so.
        #[arg(long, value_name = "TEXT")]
        prefix: Option<String>,
        /// So many at most; 0 is all there are.
        #[arg(long, value_name = "N", default_value_t = 100)]
        most: usize,
    },
    /// End what is agreed with a caller: the rules act alone again.
    Delete {
        #[arg(value_name = "API_KEY")]
        api_key: String,
        /// Only if it is still as this revision left it.
        #[arg(long, value_name = "N")]
        revision: Option<i64>,
    },
    /// Agree on something with many callers: a file with one JSON text a line, or - for the standard input. Exits with 1 if
    /// a line is wrong; the others act.
    Import {
        #[arg(value_name = "FILE|-")]
        file: PathBuf,
    },
    /// All that is agreed, one JSON text a line, as `import` takes it.
    Export {
        /// Write to this file; to the output unless set.
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
struct SetFlags {
    #[arg(value_name = "API_KEY")]
    api_key: String,
    /// The caller's tier.
    #[arg(long, value_name = "TIER")]
    tier: Option<String>,
    /// A limit in place of a rule's, as in `500/minute`, `500/minute burst 50` or `endpoint:POST /orders=20/30s`; may be
    /// repeated.
    #[arg(long = "limit", value_name = "[DESCRIPTOR=]COUNT/PERIOD[ burst N]", value_parser = parse_limit)]
    limits: Vec<Value>,
    /// From when it acts, as in 2027-01-01T00:00:00Z; at once unless set.
    #[arg(long, value_name = "TIME")]
    from: Option<String>,
    /// Until when; for ever unless set.
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Why, for those who ask later.
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    /// Who wants it; who sends it unless set.
    #[arg(long, value_name = "NAME")]
    author: Option<String>,
    /// Only if it is still as this revision left it.
    #[arg(long, value_name = "N")]
    revision: Option<i64>,
}

/// `DESCRIPTOR=COUNT/PERIOD burst N`: a descriptor may have `=` in it, a limit has none.
fn parse_limit(text: &str) -> Result<Value, String> {
    let wrong =
        || format!("`{text}`: write one such as 500/minute, or `endpoint:POST /orders=20/30s burst 5`");
    let (descriptor, limit) = text.rsplit_once('=').unwrap_or(("default", text));
    let (limit, burst) = match limit.split_once(" burst ") {
        Some((limit, burst)) => (limit, Some(burst.trim().parse::<u64>().map_err(|_| wrong())?)),
        None => (limit, None),
    };
    let (count, period) = limit.split_once('/').ok_or_else(wrong)?;
    let count: u64 = count.trim().parse().map_err(|_| wrong())?;
    let mut limit = json!({"descriptor": descriptor, "requests_per_unit": count, "unit": period.trim()});
    if let Some(burst) = burst {
        limit["burst"] = burst.into();
    }
    Ok(limit)
}

fn path(api_key: &str) -> String {
    // These two stand for something else when they are written as they are.
    let escaped = match api_key {
        "import" => "%69mport".to_owned(),
        "export" => "%65xport".to_owned(),
        other => encoded(other),
    };
    format!("/admin/v1/quotas/{escaped}")
}

pub(crate) fn quota(flags: &QuotaFlags) -> anyhow::Result<ExitCode> {
    let json = flags.admin.is_json();
    admin_client::run(&flags.admin, async |client| {
        match &flags.command {
            QuotaCommand::Get { api_key } => {
                show(json, &client.request(Method::GET, &path(api_key), None).await?)?;
            }
            QuotaCommand::Set(set) => {
                let body = set.body();
                show(json, &change(&client, Method::PUT, &set.api_key, set.revision, Some(&body)).await?)?;
            }
            QuotaCommand::List { tier, prefix, most } => {
                let [tier, prefix] = [tier, prefix].map(|word| encoded(word.as_deref().unwrap_or("")));
                list(&client, &format!("tier={tier}&prefix={prefix}"), *most, json).await?;
            }
            QuotaCommand::Import { file } => return import(&client, file, json).await,
            QuotaCommand::Export { file } => {
                let out = admin_client::output(file.as_deref())?;
                ndjson::receive(&client, "/admin/v1/quotas/export", out).await?;
            }
            QuotaCommand::Delete { api_key, revision } => {
                change(&client, Method::DELETE, api_key, *revision, None).await?;
                if json {
                    print(&json!({"deleted": true}))?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

impl SetFlags {
    fn body(&self) -> Value {
        json!({
            "tier": self.tier, "overrides": self.limits, "effective_at": self.from, "expires_at": self.until,
            "reason": self.reason, "author": self.author,
        })
    }
}

async fn change(
    client: &Client,
    method: Method,
    api_key: &str,
    revision: Option<i64>,
    body: Option<&Value>,
) -> anyhow::Result<Value> {
    let tag = revision.map(|revision| format!("\"r{revision}\""));
    let headers: Vec<_> = tag.iter().map(|tag| (IF_MATCH, tag.as_str())).collect();
    client.exchange(method, &path(api_key), &headers, body).await?.into_result()
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
                admin_client::table(TITLES, &rows)?;
                if more {
                    eprintln!("there are more; see them with --most");
                }
                return Ok(());
            }
        }
    }
}

async fn import(client: &Client, file: &Path, json: bool) -> anyhow::Result<ExitCode> {
    let told = ndjson::send(client, "/admin/v1/quotas/import", file).await?.into_result()?;
    let number = |name: &str| told[name].as_u64().unwrap_or(0);
    let (imported, failed) = (number("imported"), number("failed"));
    if json {
        print(&told)?;
    } else {
        let errors = told["errors"].as_array().map_or(&[][..], Vec::as_slice);
        for error in errors {
            let place = error["field"].as_str().map(|place| format!("{place}: ")).unwrap_or_default();
            eprintln!("line {}: {place}{}", error["line"], cell(&error["detail"]));
        }
        let shown = errors.len() as u64;
        if failed > shown {
            eprintln!("and {} more", failed - shown);
        }
        admin_client::table(["imported", "failed"], &[[imported.to_string(), failed.to_string()]])?;
    }
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn show(json: bool, quota: &Value) -> anyhow::Result<()> {
    if json {
        return print(quota);
    }
    admin_client::table(TITLES, &[row(quota)])?;
    if let until @ Value::Object(_) = &quota["until_effective"] {
        let mut out = std::io::stdout().lock();
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

const TITLES: [&str; 8] = ["id", "key", "tier", "limits", "from", "until", "revision", "reason"];

fn row(quota: &Value) -> [String; 8] {
    let id: String = cell(&quota["id"]).chars().take(12).collect();
    let key = quota["api_key"]
        .as_str()
        .map_or_else(|| format!("{}…", quota["key_prefix"].as_str().unwrap_or("")), str::to_owned);
    let field = |name: &str| cell(&quota[name]);
    [
        id,
        key,
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
    let burst = own["burst"].as_u64().map(|burst| format!(" burst {burst}")).unwrap_or_default();
    format!("{}={}/{}{burst}", cell(&own["descriptor"]), own["requests_per_unit"], cell(&own["unit"]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_as_they_are_shown() {
        for text in
            ["default=500/minute", "api_key/endpoint=POST /orders=20/30s burst 5", "x=1/day in Europe/Zurich"]
        {
            assert_eq!(limit(&parse_limit(text).expect(text)), text);
        }
        assert_eq!(limit(&parse_limit("7/h").expect("a limit")), "default=7/h");
        for wrong in ["", "7", "x=", "x=-1/s", "x=1/s burst y", "/s"] {
            assert!(parse_limit(wrong).is_err(), "{wrong}");
        }
    }
}
