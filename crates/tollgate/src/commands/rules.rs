//! `tollgate rules`: publish rules, list revisions, roll back, through a running server.

use crate::admin_client::{self, AdminFlags, Client, cell};
use crate::cli::output::{self, BAD, GOOD, WARNING, paint};
use crate::cli::{print, print_line};
use crate::commands::rule_export;
use crate::config::rule_sources;
use anyhow::Context;
use clap::{Args, Subcommand};
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tollgate_observe::escape;

/// Replayed requests below which an impact preview is not meaningful.
const MIN_SAMPLES: u64 = 100;

/// Exit code of a publication that is stored and waits for approval: neither done nor failed.
const PENDING_APPROVAL: u8 = 3;

#[derive(Debug, Args)]
pub(crate) struct RulesFlags {
    #[command(flatten)]
    admin: AdminFlags,
    #[command(subcommand)]
    command: RulesCommand,
}

#[derive(Debug, Subcommand)]
enum RulesCommand {
    /// Publish rules to all nodes, replacing the active rules; exits 3 if the revision waits for approval.
    Publish {
        /// Rule files or directories of rule files: the complete new rule set.
        #[arg(required = true, value_name = "PATH")]
        paths: Vec<PathBuf>,
        /// Reason, recorded in the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
        /// Publish only if REV is still active.
        #[arg(long, value_name = "REV")]
        base: Option<i64>,
        /// Publish although the rules newly deny or allow much traffic, admit nothing or a tenth of a limit, or remove a
        /// domain or a security rule.
        #[arg(long)]
        confirm: bool,
    },
    /// Show how rule files differ from the active rules, and their impact on recent traffic, without publishing; exits 1 if
    /// the rules are invalid.
    ///
    /// Without PATH, the rule files of the server itself are compared with the published rules that are active in their
    /// place; it then exits 1 if they differ, or wait for confirmation.
    Diff {
        /// Rule files or directories of rule files.
        #[arg(value_name = "PATH")]
        paths: Vec<PathBuf>,
        /// Exit 1 also if PATH differs from the active rules.
        #[arg(long, requires = "paths")]
        exit_code: bool,
    },
    /// Publish an earlier revision again.
    Rollback {
        /// Revision number from `rules list`.
        #[arg(value_name = "REV")]
        rev: i64,
        /// Reason, recorded in the audit log.
        #[arg(long, value_name = "TEXT", default_value = "manual rollback")]
        reason: String,
    },
    /// Approve a pending revision (not your own).
    Approve {
        /// Revision number from `rules list`.
        #[arg(value_name = "REV")]
        rev: i64,
    },
    /// Confirm changed rule files that --guard-files keeps out, on the server at --admin; without HASH, show what waits.
    ConfirmFiles {
        /// Rules hash of the files, as the server's log and `/readyz?verbose` state it.
        #[arg(value_name = "HASH")]
        revision: Option<String>,
    },
    /// List revisions, newest first.
    List,
    /// Show a revision; `current` is the active one.
    Show {
        /// Revision number from `rules list`, or `current`.
        #[arg(value_name = "REV")]
        rev: String,
        /// Write the files into this new or empty directory, one for each domain; they load again unchanged.
        #[arg(long, value_name = "DIR")]
        dir: Option<PathBuf>,
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
        RulesCommand::Diff { paths, .. } if paths.is_empty() => drift(&client, flags.admin.is_json()).await,
        RulesCommand::Diff { paths, exit_code } => {
            diff(&client, flags.admin.is_json(), paths, *exit_code).await
        }
        RulesCommand::Rollback { rev, reason } => {
            let path = format!("/admin/v1/rules/{rev}/rollback");
            let made = client.request(Method::POST, &path, Some(&json!({"reason": reason}))).await?;
            done(flags.admin.is_json(), &made, &format!("active; same rules as revision {rev}"))
        }
        RulesCommand::Approve { rev } => {
            let made = client.request(Method::POST, &format!("/admin/v1/rules/{rev}/approve"), None).await?;
            done(flags.admin.is_json(), &made, "approved and active")
        }
        RulesCommand::ConfirmFiles { revision } => {
            confirm_files(&client, flags.admin.is_json(), revision.as_deref()).await
        }
        RulesCommand::List => list(&client, flags.admin.is_json()).await,
        RulesCommand::Show { rev, dir } => {
            show(&client.verbatim(), flags.admin.is_json(), rev, dir.as_deref()).await
        }
    })
}

fn files(paths: &[PathBuf]) -> anyhow::Result<Vec<Value>> {
    let sources = rule_sources::read(paths)?;
    for path in rule_sources::ignored(paths) {
        eprintln!("tollgate: note: {}", rule_sources::ignored_text(&path));
    }
    Ok(sources.into_iter().map(|source| json!({"name": source.name, "text": source.text})).collect())
}

async fn publish(client: &Client, json: bool, sent: &Value) -> anyhow::Result<ExitCode> {
    let response = client.exchange(Method::POST, "/admin/v1/rules", &[], Some(sent)).await?;
    if !response.status.is_success() {
        let has_errors = response.body["errors"].as_array().is_some_and(|errors| !errors.is_empty());
        if json {
            print(&response.body)?;
        } else if has_errors || response.body["diff"].is_array() {
            report(&response.body)?;
        }
        // The report has the errors themselves.
        anyhow::ensure!(!has_errors, "nothing was published; correct the rules");
        if let (StatusCode::PRECONDITION_FAILED, Some(base)) = (response.status, sent["base_rev"].as_i64()) {
            anyhow::bail!("{:#}; --base {base} is not the active revision", response.problem());
        }
        return Err(response.problem());
    }
    if !json {
        report(&response.body)?;
    }
    let says = match response.status {
        StatusCode::CREATED => "active",
        StatusCode::ACCEPTED => {
            let rev = &response.body["rev"];
            let says = format!(
                "pending approval: it would deny much more traffic; another person must run `tollgate rules approve {rev}`"
            );
            done(json, &response.body, &says)?;
            return Ok(ExitCode::from(PENDING_APPROVAL));
        }
        _ => "unchanged: these rules are already active",
    };
    done(json, &response.body, says)
}

fn done(json: bool, made: &Value, says: &str) -> anyhow::Result<ExitCode> {
    if json {
        print(made)?;
    } else {
        print_line(format_args!("revision {} ({}): {says}", made["rev"], cell(&made["revision"])))?;
    }
    Ok(ExitCode::SUCCESS)
}

async fn diff(client: &Client, json: bool, paths: &[PathBuf], exit_code: bool) -> anyhow::Result<ExitCode> {
    let sent = json!({"files": files(paths)?});
    let response = client.request(Method::POST, "/admin/v1/rules/preview", Some(&sent)).await?;
    output::ignore_closed(if json { print(&response) } else { report(&response) })?;
    let has_some = |name: &str| response[name].as_array().is_some_and(|all| !all.is_empty());
    let fails = has_some("errors") || (exit_code && has_some("diff"));
    Ok(if fails { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Shows how the server's rule files differ from the published rules, which are active in their place.
async fn drift(client: &Client, json: bool) -> anyhow::Result<ExitCode> {
    let state = client.request(Method::GET, "/admin/v1/rules/files", None).await?;
    let drift = &state["drift"];
    if json {
        print(&state)?;
    } else if drift.is_null() {
        print_line(format_args!("no published rules differ from the server's rule files"))?;
        if !state["pending"].is_null() {
            print_line(format_args!(
                "changed rule files wait for confirmation; see `tollgate rules confirm-files`"
            ))?;
        }
    } else {
        output::ignore_closed(report(drift))?;
        let (rev, what) = (&drift["rev"], drift["diff"].as_array().map_or(0, Vec::len));
        let differs = match (drift["error"].as_str(), what) {
            (Some(error), _) => format!("cannot be loaded: {error}"),
            (None, 0) => "have the same rules in other words".to_owned(),
            (None, 1) => "differ in 1 rule".to_owned(),
            (None, many) => format!("differ in {many} rules"),
        };
        print_line(format_args!(
            "revision {rev} is published and active; the server's rule files, which are ignored, {differs}"
        ))?;
    }
    // Files that wait for confirmation differ too.
    let is_same = drift.is_null() && state["pending"].is_null();
    Ok(if is_same { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints diagnostics, changes and the impact preview for people.
fn report(response: &Value) -> anyhow::Result<()> {
    let all = |name: &str| response[name].as_array().cloned().unwrap_or_default();
    let mut out = output::styled();
    for (kind, word, style) in [("errors", "error", BAD), ("warnings", "warning", WARNING)] {
        for one in all(kind) {
            writeln!(out, "{}: {}", paint(style.bold(), word), cell(&one["message"]))?;
            writeln!(out, "  --> {}:{}:{}", cell(&one["file"]), one["line"], one["column"])?;
            if let Some(help) = one["help"].as_str() {
                writeln!(out, "  = help: {help}")?;
            }
        }
    }
    for one in all("diff") {
        writeln!(out, "{} {}", cell(&one["change"]), cell(&one["rule"]))?;
        for (sign, style, text) in [("-", BAD, &one["before"]), ("+", GOOD, &one["after"])] {
            if let Some(text) = text.as_str() {
                writeln!(out, "  {}", paint(style, format_args!("{sign} {text}")))?;
            }
        }
    }
    for one in all("confirm") {
        writeln!(out, "{}: {}", paint(WARNING.bold(), "needs confirmation"), cell(&one["detail"]))?;
    }
    let impact = &response["impact"];
    if let Some(requests) = impact["requests"].as_u64() {
        let percent = |name: &str| impact[name].as_f64().unwrap_or(0.0) * 100.0;
        let nodes = impact["nodes"].as_array().map_or(1, Vec::len);
        let nodes = if nodes == 1 { "1 node".to_owned() } else { format!("{nodes} nodes") };
        let names = |name: &str| impact[name].as_array().into_iter().flatten().map(cell).collect::<Vec<_>>();
        let missing = names("nodes_missing");
        if !missing.is_empty() {
            writeln!(out, "excludes {} (no response)", missing.join(", "))?;
        }
        if impact["nodes_unknown"] == true {
            writeln!(out, "excludes other nodes (database unavailable)")?;
        }
        if requests == 0 {
            writeln!(out, "impact unknown: no recent traffic ({nodes})")?;
            return Ok(());
        }
        writeln!(
            out,
            "replayed {} requests from the last {:.0} s on {nodes}: {:.2}% newly denied, {:.2}% newly allowed; of callers: {:.2}% \
             newly denied, {:.2}% newly allowed",
            impact["weight"],
            impact["window_s"].as_f64().unwrap_or(0.0),
            percent("newly_denied_share"),
            percent("newly_allowed_share"),
            percent("callers_affected_share"),
            percent("callers_newly_allowed_share"),
        )?;
        let tightened = &impact["tightened"];
        if !tightened.is_null() {
            let percent = |name: &str| tightened[name].as_f64().unwrap_or(0.0) * 100.0;
            writeln!(
                out,
                "with limits tightened by signals to their least (`overload.adapt`): {:.2}% newly denied, {:.2}% of callers",
                percent("newly_denied_share"),
                percent("callers_affected_share"),
            )?;
        }
        if impact["weight"].as_u64().is_some_and(|weight| weight < MIN_SAMPLES) {
            writeln!(out, "too few requests for a meaningful preview")?;
        }
        let rows = impact["top"].as_array().into_iter().flatten().map(|one| {
            let share = format!("{:.1}%", one["share"].as_f64().unwrap_or(0.0) * 100.0);
            [
                cell(&one["key_masked"]),
                cell(&one["key_id"]),
                cell(&one["rule"]),
                share,
                cell(&one["before_denied"]),
                cell(&one["after_denied"]),
            ]
        });
        let rows: Vec<[String; 6]> = rows.collect();
        drop(out);
        if !rows.is_empty() {
            let titles = ["caller", "id", "rule", "newly denied", "denied before", "denied after"];
            admin_client::table(titles, &rows)?;
        }
    }
    Ok(())
}

/// Confirms the rule files of one server, or shows what waits there.
async fn confirm_files(client: &Client, json: bool, revision: Option<&str>) -> anyhow::Result<ExitCode> {
    let state = match revision {
        Some(revision) => {
            let sent = json!({"revision": revision});
            client.request(Method::POST, "/admin/v1/rules/files/confirm", Some(&sent)).await?
        }
        None => client.request(Method::GET, "/admin/v1/rules/files", None).await?,
    };
    if json {
        print(&state)?;
        return Ok(ExitCode::SUCCESS);
    }
    let pending = &state["pending"];
    match revision {
        Some(revision) => print_line(format_args!("rule files {revision}: active"))?,
        None if pending.is_null() => print_line(format_args!("no rule files wait for confirmation"))?,
        None => {
            let mut out = output::styled();
            for reason in pending["reasons"].as_array().into_iter().flatten() {
                writeln!(out, "{}: {}", paint(WARNING.bold(), "needs confirmation"), cell(reason))?;
            }
            let waits = cell(&pending["revision"]);
            writeln!(
                out,
                "changed rule files are not active; `tollgate rules confirm-files {waits}` applies them"
            )?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn list(client: &Client, json: bool) -> anyhow::Result<ExitCode> {
    let response = client.request(Method::GET, "/admin/v1/rules", None).await?;
    if json {
        print(&response)?;
        return Ok(ExitCode::SUCCESS);
    }
    let active = &response["active"];
    if active["source"] == "files" {
        print_line(format_args!("rule files are active (rules hash {})", cell(&active["revision"])))?;
    }
    let rows: Vec<[String; 6]> = response["revisions"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|one| {
            ["rev", "revision", "status", "created_at", "author", "reason"].map(|name| cell(&one[name]))
        })
        .collect();
    admin_client::table_or(
        ["rev", "rules hash", "status", "created", "author", "reason"],
        &rows,
        "no published revisions",
    )?;
    Ok(ExitCode::SUCCESS)
}

async fn show(client: &Client, json: bool, rev: &str, dir: Option<&Path>) -> anyhow::Result<ExitCode> {
    let known = rev == "current" || rev.parse::<i64>().is_ok();
    anyhow::ensure!(known, "`{rev}` is not a revision; use a number from `tollgate rules list`, or current");
    let response = client.request(Method::GET, &format!("/admin/v1/rules/{rev}"), None).await?;
    if json {
        print(&response)?;
        return Ok(ExitCode::SUCCESS);
    }
    let files = response["files"].as_array().context("invalid response: no files")?;
    let text = |file: &Value| file["text"].as_str().unwrap_or_default().to_owned();
    if let Some(dir) = dir {
        let sources = files.iter().map(|file| (cell(&file["name"]), text(file)));
        rule_export::write(dir, sources)?;
        let count = if files.len() == 1 { "1 file".to_owned() } else { format!("{} files", files.len()) };
        print_line(format_args!("wrote {count} to {}", dir.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = output::raw();
    // One redirected text is a rule file again, and stays as it is.
    if let ([file], false) = (&files[..], output::is_terminal()) {
        write!(out, "{}", text(file))?;
        return Ok(ExitCode::SUCCESS);
    }
    for file in files {
        writeln!(out, "# {}", escape::text(&cell(&file["name"])))?;
        for line in text(file).trim_end().split('\n') {
            let shown = if output::is_terminal() { escape::text(line) } else { line.into() };
            writeln!(out, "{shown}")?;
        }
    }
    if !output::is_terminal() {
        eprintln!("note: these are {} files; use --dir DIR for files that load again", files.len());
    }
    Ok(ExitCode::SUCCESS)
}
