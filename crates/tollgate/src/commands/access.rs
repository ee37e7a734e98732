//! `tollgate token` and `tollgate audit`: on the database itself, so that they work where no server runs.

use crate::admin_client;
use crate::cli::{AuditCommand, AuditFlags, TokenCommand, TokenFlags, print};
use anyhow::Context;
use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use tollgate_control::{Actor, AuditVerification, ControlPlane, redact_password};
use tollgate_core::{SystemClock, TimeDelta};

/// What becomes of a database that is not there.
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

/// Who sits at the command line, for the audit log.
fn operator() -> Actor {
    let name = std::env::var("USER").ok().filter(|name| !name.is_empty());
    Actor { name: name.unwrap_or_else(|| "unknown".to_owned()), origin: "command line".to_owned() }
}

pub(crate) fn token(flags: &TokenFlags) -> anyhow::Result<ExitCode> {
    let (told, text) = match &flags.command {
        TokenCommand::Create { db, name, role, days } => {
            let lasts = Some(*days)
                .filter(|days| *days > 0)
                .map(|days| TimeDelta::from_secs(u64::from(days) * 86_400));
            anyhow::ensure!(
                !name.is_empty() && name.len() <= 128 && !name.chars().any(char::is_control),
                "--name: write 1 to 128 bytes without control characters"
            );
            let made = with_control(&db.db, IfMissing::Create, async |control| {
                Ok(control.create_token(name, *role, lasts, &operator()).await?)
            })?;
            // The password is not told; whoever has no other way to it sets PGPASSWORD.
            let place = redact_password(&db.db)?;
            eprintln!("This is shown once. Revoke it with: tollgate token revoke --db '{place}' {}", made.id);
            let told = json!({"id": made.id, "token": made.secret, "name": name, "role": role.name()});
            (told, made.secret)
        }
        TokenCommand::List { db } => {
            let tokens = with_control(&db.db, IfMissing::Fail, async |control| Ok(control.tokens().await?))?;
            let mut text = format!("{:16}  {:8}  {:24}  {:24}  name", "id", "role", "expires", "revoked");
            for token in &tokens {
                let (expires, revoked) = (
                    token.expires_at.as_deref().unwrap_or("never"),
                    token.revoked_at.as_deref().unwrap_or("-"),
                );
                let (id, role, name) = (&token.id, &token.role, &token.name);
                text.push_str(&format!("\n{id:16}  {role:8}  {expires:24}  {revoked:24}  {name}"));
            }
            (json!(tokens), text)
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
        writeln!(std::io::stdout().lock(), "{text}")?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn audit(flags: &AuditFlags) -> anyhow::Result<ExitCode> {
    match &flags.command {
        AuditCommand::Verify { db } => verify(&db.db, flags.format.is_json()),
        // One JSON text a line, whatever is asked for.
        AuditCommand::Export { db, after, file } => export(&db.db, *after, file.as_deref()),
    }
}

fn verify(db: &str, json: bool) -> anyhow::Result<ExitCode> {
    let verified = with_control(db, IfMissing::Fail, async |control| Ok(control.verify_audit().await?))?;
    let (whole, told, text) = match verified {
        AuditVerification::Intact { entries, head } => (
            true,
            json!({"whole": true, "entries": entries, "head": head.to_string()}),
            format!("the audit log is whole: {entries} entries, the last with hash {head}"),
        ),
        AuditVerification::Broken { seq, why } => (
            false,
            json!({"whole": false, "seq": seq, "why": why.to_string()}),
            format!("the audit log is broken at entry {seq}: {why}"),
        ),
    };
    if json {
        print(&told)?;
    } else {
        writeln!(std::io::stdout().lock(), "{text}")?;
    }
    Ok(if whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn export(db: &str, after: i64, file: Option<&Path>) -> anyhow::Result<ExitCode> {
    with_control(db, IfMissing::Fail, async |control| {
        let mut out = admin_client::output(file)?;
        let mut seq = after;
        loop {
            let entries = control.audit_after(seq).await?;
            let Some(last) = entries.last() else { break };
            seq = last.seq;
            for entry in &entries {
                writeln!(out, "{}", serde_json::to_string(entry)?)?;
            }
        }
        Ok(out.flush()?)
    })?;
    Ok(ExitCode::SUCCESS)
}
