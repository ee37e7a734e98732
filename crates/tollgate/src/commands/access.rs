//! `tollgate token` and `tollgate audit`: directly on the database, so they work without a running server.

use crate::admin_client;
use crate::cli::output::{self, BAD, GOOD, paint};
use crate::cli::{AuditCommand, AuditFlags, Progress, TokenCommand, TokenFlags, now, print, print_line};
use anyhow::Context;
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use tollgate_control::{Actor, AuditEntry, AuditVerification, ControlPlane, redact_password};
use tollgate_core::{SystemClock, TimeDelta};

/// Maximum validity of a token, in days; the range of --days.
const MAX_DAYS: u64 = 36_500;

/// Behavior if the database does not exist.
#[derive(Clone, Copy)]
enum IfMissing {
    Create,
    Fail,
}

fn with_control<T>(
    db: &str,
    missing: IfMissing,
    act: impl AsyncFnOnce(Arc<ControlPlane>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let clock = Arc::new(SystemClock::new());
        let control = match missing {
            IfMissing::Create => ControlPlane::connect(db, clock).await,
            IfMissing::Fail => ControlPlane::connect_existing(db, clock).await,
        };
        let control = control.context("--db")?;
        let done = act(Arc::clone(&control)).await;
        control.close().await;
        done
    })
}

/// Actor of changes from the command line, for the audit log.
fn operator() -> Actor {
    let name = std::env::var("USER").ok().filter(|name| !name.is_empty());
    Actor { name: name.unwrap_or_else(|| "unknown".to_owned()), origin: "command line".to_owned() }
}

pub(crate) fn token(flags: &TokenFlags) -> anyhow::Result<ExitCode> {
    let (told, text) = match &flags.command {
        TokenCommand::Create { db, name, role, days, until } => {
            let lasts = match until {
                Some(until) => {
                    let seconds = until.seconds_from(now()?)?;
                    // The same bound as --days: later expiries cannot be stored.
                    anyhow::ensure!(
                        seconds <= MAX_DAYS * 86_400,
                        "--until {until}: must be within {MAX_DAYS} days"
                    );
                    Some(seconds)
                }
                None => Some(u64::from(*days) * 86_400).filter(|seconds| *seconds > 0),
            };
            let lasts = lasts.map(TimeDelta::from_secs);
            anyhow::ensure!(
                !name.is_empty() && name.len() <= 128 && !name.chars().any(char::is_control),
                "--name: must have 1 to 128 bytes and no control characters"
            );
            let made = with_control(&db.db, IfMissing::Create, async |control| {
                Ok(control.create_token(name, *role, lasts, &operator()).await?)
            })?;
            // Without the password: PGPASSWORD can supply it.
            let place = redact_password(&db.db)?;
            eprintln!("Shown only once. Revoke it with: tollgate token revoke --db '{place}' {}", made.id);
            let told = json!({"id": made.id, "token": made.secret, "name": name, "role": role.name()});
            (told, made.secret)
        }
        TokenCommand::List { db } => {
            let tokens = with_control(&db.db, IfMissing::Fail, async |control| Ok(control.tokens().await?))?;
            if flags.format.is_json() {
                print(&tokens)?;
                return Ok(ExitCode::SUCCESS);
            }
            let rows: Vec<[String; 5]> = tokens
                .iter()
                .map(|token| {
                    let expires = token.expires_at.clone().unwrap_or_else(|| "never".to_owned());
                    let revoked = token.revoked_at.clone().unwrap_or_else(|| "-".to_owned());
                    [token.id.clone(), token.role.to_string(), expires, revoked, token.name.clone()]
                })
                .collect();
            admin_client::table_or(["id", "role", "expires", "revoked", "name"], &rows, "no tokens")?;
            return Ok(ExitCode::SUCCESS);
        }
        TokenCommand::Revoke { db, id } => {
            with_control(&db.db, IfMissing::Fail, async |control| {
                Ok(control.revoke_token(id, &operator()).await?)
            })?;
            (json!({"revoked": id}), format!("revoked {id}"))
        }
    };
    if flags.format.is_json() {
        print(&told)?;
    } else {
        print_line(text)?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn audit(flags: &AuditFlags) -> anyhow::Result<ExitCode> {
    match &flags.command {
        AuditCommand::List { db, max_results, actor, action } => {
            let wanted = |entry: &AuditEntry| {
                let of_action = |action: &str| {
                    entry
                        .action
                        .strip_prefix(action)
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
                };
                actor.as_deref().is_none_or(|actor| entry.actor == actor)
                    && action.as_deref().is_none_or(of_action)
            };
            list(&db.db, *max_results, wanted, flags.format.is_json())
        }
        AuditCommand::Verify { db } => verify(&db.db, flags.format.is_json()),
        // NDJSON in either format.
        AuditCommand::Export { db, after, file } => export(&db.db, *after, file.as_deref()),
    }
}

/// Number of entries read at once.
const PAGE: i64 = 500;

/// Lists matching entries, newest first.
fn list(
    db: &str,
    max_results: usize,
    wanted: impl Fn(&AuditEntry) -> bool,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let max_results = if max_results == 0 { usize::MAX } else { max_results };
    let (entries, more) = with_control(db, IfMissing::Fail, async |control| {
        let (mut entries, mut before) = (Vec::new(), None);
        loop {
            let page = control.audit(before, PAGE).await?;
            let Some(last) = page.last() else { return Ok((entries, false)) };
            before = Some(last.seq);
            for entry in page.into_iter().filter(&wanted) {
                if entries.len() == max_results {
                    return Ok((entries, true));
                }
                entries.push(entry);
            }
        }
    })?;
    if json {
        print(&json!({"entries": entries}))?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<[String; 6]> = entries
        .iter()
        .map(|entry| {
            let texts = [&entry.at, &entry.actor, &entry.action, &entry.target].map(Clone::clone);
            let [at, actor, action, target] = texts;
            [entry.seq.to_string(), at, actor, action, target, reason(entry)]
        })
        .collect();
    admin_client::table_or(
        ["seq", "time", "actor", "action", "target", "reason"],
        &rows,
        "no audit entries",
    )?;
    if more {
        eprintln!("more results; use --max-results");
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the reason that an operator gave for a change, if any.
fn reason(entry: &AuditEntry) -> String {
    let given = |text: &str| serde_json::from_str::<Value>(text).ok()?["reason"].as_str().map(str::to_owned);
    given(&entry.after).filter(|reason| !reason.is_empty()).unwrap_or_else(|| "-".to_owned())
}

fn verify(db: &str, json: bool) -> anyhow::Result<ExitCode> {
    let verified = with_control(db, IfMissing::Fail, async |control| Ok(control.verify_audit().await?))?;
    let (whole, told, text) = match verified {
        AuditVerification::Intact { entries, head } => (
            true,
            json!({"whole": true, "entries": entries, "head": head.to_string()}),
            format!("{}: {entries} entries, last hash {head}", paint(GOOD, "audit log intact")),
        ),
        AuditVerification::Broken { seq, why } => (
            false,
            json!({"whole": false, "seq": seq, "why": why.to_string()}),
            format!("{} at entry {seq}: {why}", paint(BAD, "audit log broken")),
        ),
    };
    output::ignore_closed(if json { print(&told) } else { print_line(text) })?;
    Ok(if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn export(db: &str, after: i64, file: Option<&Path>) -> anyhow::Result<ExitCode> {
    with_control(db, IfMissing::Fail, async |control| {
        let mut out = admin_client::output(file)?;
        let last = control.audit(None, 1).await?.first().map_or(0, |entry| entry.seq);
        let total = u64::try_from(last - after).ok();
        let progress = Progress::entries("exporting", total).unless_on_screen(file);
        let mut seq = after;
        loop {
            let entries = control.audit_after(seq).await?;
            let Some(last) = entries.last() else { break };
            seq = last.seq;
            for entry in &entries {
                writeln!(out, "{}", serde_json::to_string(entry)?)?;
            }
            progress.advance(entries.len() as u64);
        }
        Ok(out.flush()?)
    })?;
    Ok(ExitCode::SUCCESS)
}
