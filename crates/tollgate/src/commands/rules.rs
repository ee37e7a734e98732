//! `tollgate rules`: publish rules, look at what was published, and go back, by way of a running server.

use crate::admin_client::{self, AdminFlags, Client, cell};
use crate::cli::print;
use crate::config::rule_sources;
use anyhow::Context;
use clap::{Args, Subcommand};
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// So many requests say something about whom rules would deny.
const MIN_SAMPLES: u64 = 100;

#[derive(Debug, Args)]
pub(crate) struct RulesFlags {
    #[command(flatten)]
    admin: AdminFlags,
    #[command(subcommand)]
    command: RulesCommand,
}

#[derive(Debug, Subcommand)]
enum RulesCommand {
    /// Publish rules: they act on all nodes in place of all that acted before.
    Publish {
        /// Rule files, or directories of them: all rules that are to act.
        #[arg(required = true, value_name = "PATH")]
        paths: Vec<PathBuf>,
        /// Why, for those who ask later.
        #[arg(long, value_name = "TEXT")]
        reason: String,
        /// Only if this revision still acts.
        #[arg(long, value_name = "REV")]
        base: Option<i64>,
        /// They may newly deny more than goes without saying.
        #[arg(long)]
        confirm: bool,
    },
    /// What rules would change, and what they would have done to the last traffic. Exits with 1 if they cannot be used.
    Diff {
        /// Rule files, or directories of them.
        #[arg(required = true, value_name = "PATH")]
        paths: Vec<PathBuf>,
    },
    /// Let the text of an older revision act again, as a new one.
    Rollback {
        #[arg(value_name = "REV")]
        rev: i64,
        /// Why, for those who ask later.
        #[arg(long, value_name = "TEXT", default_value = "by hand")]
        reason: String,
    },
    /// Let a revision act that waits for another person than its author.
    Approve {
        #[arg(value_name = "REV")]
        rev: i64,
    },
    /// All revisions, the latest first.
    List,
    /// What a revision says; `current` is what acts.
    Show {
        #[arg(value_name = "REV")]
        rev: String,
    },
}

pub(crate) fn run(flags: &RulesFlags) -> anyhow::Result<ExitCode> {
    admin_client::run(&flags.admin, async |client| match &flags.command {
        RulesCommand::Publish { paths, reason, base, confirm } => {
            let sent = json!({
                "files": files(paths)?, "reason": reason, "base_rev": base, "confirm": confirm,
            });
            publish(&client, flags.admin.is_json(), &sent).await
        }
        RulesCommand::Diff { paths } => diff(&client, flags.admin.is_json(), paths).await,
        RulesCommand::Rollback { rev, reason } => {
            let path = format!("/admin/v1/rules/{rev}/rollback");
            let made = client.request(Method::POST, &path, Some(&json!({"reason": reason}))).await?;
            done(flags.admin.is_json(), &made, &format!("it says what revision {rev} said"))
        }
        RulesCommand::Approve { rev } => {
            let made = client.request(Method::POST, &format!("/admin/v1/rules/{rev}/approve"), None).await?;
            done(flags.admin.is_json(), &made, "approved")
        }
        RulesCommand::List => list(&client, flags.admin.is_json()).await,
        RulesCommand::Show { rev } => show(&client, flags.admin.is_json(), rev).await,
    })
}

fn files(paths: &[PathBuf]) -> anyhow::Result<Vec<Value>> {
    let sources = rule_sources::read(paths)?;
    Ok(sources.into_iter().map(|source| json!({"name": source.name, "text": source.text})).collect())
}

async fn publish(client: &Client, json: bool, sent: &Value) -> anyhow::Result<ExitCode> {
    let told = client.exchange(Method::POST, "/admin/v1/rules", &[], Some(sent)).await?;
    if !told.status.is_success() {
        if json {
            print(&told.body)?;
        } else if told.body["errors"].is_array() || told.body["diff"].is_array() {
            report(&told.body)?;
        }
        let again = if told.body["impact"].is_object() { "; or add --confirm" } else { "" };
        return Err(anyhow::anyhow!("{:#}{again}", told.problem()));
    }
    if !json {
        report(&told.body)?;
    }
    let says = match told.status {
        StatusCode::CREATED => "it acts",
        StatusCode::ACCEPTED => {
            "it would newly deny so much that another person must approve of it: tollgate rules approve"
        }
        _ => "nothing new: the same rules act already",
    };
    done(json, &told.body, says)
}

fn done(json: bool, made: &Value, says: &str) -> anyhow::Result<ExitCode> {
    if json {
        print(made)?;
    } else {
        let mut out = std::io::stdout().lock();
        writeln!(out, "revision {} ({}): {says}", made["rev"], cell(&made["revision"]))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn diff(client: &Client, json: bool, paths: &[PathBuf]) -> anyhow::Result<ExitCode> {
    let sent = json!({"files": files(paths)?});
    let told = client.request(Method::POST, "/admin/v1/rules/preview", Some(&sent)).await?;
    if json {
        print(&told)?;
    } else {
        report(&told)?;
    }
    let wrong = told["errors"].as_array().is_some_and(|errors| !errors.is_empty());
    Ok(if wrong { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What is known of rules before they act, for people.
fn report(told: &Value) -> anyhow::Result<()> {
    let all = |name: &str| told[name].as_array().cloned().unwrap_or_default();
    let mut out = std::io::stdout().lock();
    for (kind, word) in [("errors", "error"), ("warnings", "warning")] {
        for one in all(kind) {
            writeln!(out, "{word}: {}", cell(&one["message"]))?;
            writeln!(out, "  --> {}:{}:{}", cell(&one["file"]), one["line"], one["column"])?;
            if let Some(help) = one["help"].as_str() {
                writeln!(out, "  = help: {help}")?;
            }
        }
    }
    for one in all("diff") {
        writeln!(out, "{} {}", cell(&one["change"]), cell(&one["rule"]))?;
        for (sign, said) in [("-", &one["before"]), ("+", &one["after"])] {
            if let Some(said) = said.as_str() {
                writeln!(out, "  {sign} {said}")?;
            }
        }
    }
    let rehearsal = &told["impact"];
    if let Some(requests) = rehearsal["requests"].as_u64() {
        let percent = |name: &str| rehearsal[name].as_f64().unwrap_or(0.0) * 100.0;
        let nodes = rehearsal["nodes"].as_array().map_or(1, Vec::len);
        let nodes = if nodes == 1 { "1 node".to_owned() } else { format!("{nodes} nodes") };
        let names =
            |name: &str| rehearsal[name].as_array().into_iter().flatten().map(cell).collect::<Vec<_>>();
        let silent = names("nodes_missing");
        if !silent.is_empty() {
            writeln!(out, "without the traffic of {}: no answer in time", silent.join(", "))?;
        }
        if rehearsal["nodes_unknown"] == true {
            writeln!(out, "without the traffic of other nodes: the database does not answer")?;
        }
        if requests == 0 {
            writeln!(out, "not rehearsed: no traffic is remembered ({nodes} asked)")?;
            return Ok(());
        }
        writeln!(
            out,
            "rehearsed on {} requests of the last {:.0} s, of {nodes}: {:.2}% newly denied, {:.2}% newly allowed, {:.2}% of callers \
             affected",
            rehearsal["weight"],
            rehearsal["window_s"].as_f64().unwrap_or(0.0),
            percent("newly_denied_share"),
            percent("newly_allowed_share"),
            percent("callers_affected_share"),
        )?;
        if rehearsal["weight"].as_u64().is_some_and(|weight| weight < MIN_SAMPLES) {
            writeln!(out, "that is too little to say whom they would deny")?;
        }
        let rows = rehearsal["top"].as_array().into_iter().flatten().map(|one| {
            let share = format!("{:.1}%", one["share"].as_f64().unwrap_or(0.0) * 100.0);
            [
                cell(&one["key_masked"]),
                cell(&one["rule"]),
                share,
                cell(&one["before_denied"]),
                cell(&one["after_denied"]),
            ]
        });
        let rows: Vec<[String; 5]> = rows.collect();
        drop(out);
        if !rows.is_empty() {
            admin_client::table(["caller", "rule", "newly denied", "denied now", "denied then"], &rows)?;
        }
    }
    Ok(())
}

async fn list(client: &Client, json: bool) -> anyhow::Result<ExitCode> {
    let told = client.request(Method::GET, "/admin/v1/rules", None).await?;
    if json {
        print(&told)?;
        return Ok(ExitCode::SUCCESS);
    }
    let active = &told["active"];
    if active["source"] == "files" {
        writeln!(std::io::stdout().lock(), "rule files act (revision {})", cell(&active["revision"]))?;
    }
    let rows: Vec<[String; 6]> = told["revisions"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|one| {
            ["rev", "revision", "status", "created_at", "author", "reason"].map(|name| cell(&one[name]))
        })
        .collect();
    admin_client::table(["rev", "revision", "status", "created", "author", "reason"], &rows)?;
    Ok(ExitCode::SUCCESS)
}

async fn show(client: &Client, json: bool, rev: &str) -> anyhow::Result<ExitCode> {
    let known = rev == "current" || rev.parse::<i64>().is_ok();
    anyhow::ensure!(known, "`{rev}` is no revision; write a number that `list` shows, or current");
    let told = client.request(Method::GET, &format!("/admin/v1/rules/{rev}"), None).await?;
    if json {
        print(&told)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = std::io::stdout().lock();
    for file in told["files"].as_array().context("no files in the answer")? {
        writeln!(out, "# {}", cell(&file["name"]))?;
        writeln!(out, "{}", cell(&file["text"]).trim_end())?;
    }
    Ok(ExitCode::SUCCESS)
}
