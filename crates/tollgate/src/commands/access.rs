//! `tollgate token` and `tollgate audit`: directly on the database, so they work without a running server.

use crate::admin_client::{self, AdminFlags, cell};
use crate::cli::output::{self, BAD, GOOD, paint};
use crate::cli::{AuditCommand, AuditFlags, Progress, TokenCommand, TokenFlags, now, print, print_line};
use anyhow::Context;
use hyper::Method;
use serde_json::{Value, json};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use tollgate_control::{Actor, AuditVerification, ControlError, ControlPlane, redact_password};
use tollgate_core::{SystemClock, TimeDelta};
use tollgate_observe::escape;

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
    let variable = |name: &str| std::env::var(name).ok().filter(|name| !name.is_empty());
    // Under sudo, the person's name says more than `root`.
    let name = variable("SUDO_USER").or_else(|| variable("USER")).or_else(|| variable("LOGNAME"));
    Actor { name: name.unwrap_or_else(account), origin: "command line".to_owned() }
}

/// Returns the account of this process where no variable names it, as in a container or a service.
fn account() -> String {
    let Ok(process) = std::fs::metadata("/proc/self") else { return "unknown".to_owned() };
    let uid = process.uid();
    let accounts = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    account_name(&accounts, uid).unwrap_or_else(|| format!("uid {uid}"))
}

/// Returns the name of a user id in the text of `/etc/passwd`.
fn account_name(accounts: &str, uid: u32) -> Option<String> {
    accounts.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(uid)).then(|| name.to_owned())
    })
}

pub(crate) fn token(flags: &TokenFlags) -> anyhow::Result<ExitCode> {
    let (report, text) = match &flags.command {
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
            let report = json!({"id": made.id, "token": made.secret, "name": name, "role": role.name()});
            (report, made.secret)
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
                match control.revoke_token(id, &operator()).await {
                    Err(ControlError::NotFound(_)) => {
                        anyhow::bail!("no unrevoked token with the ID `{id}`; see `tollgate token list`")
                    }
                    revoked => Ok(revoked?),
                }
            })?;
            (json!({"revoked": id}), format!("revoked {id}"))
        }
    };
    if flags.format.is_json() {
        print(&report)?;
    } else {
        print_line(text)?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn audit(flags: &AuditFlags) -> anyhow::Result<ExitCode> {
    match &flags.command {
        AuditCommand::List { db, max_results, actor, action } => {
            let wanted = |entry: &Value| {
                let text = |name: &str| entry[name].as_str().unwrap_or_default();
                let of_action = |action: &str| {
                    text("action")
                        .strip_prefix(action)
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
                };
                actor.as_deref().is_none_or(|actor| text("actor") == actor)
                    && action.as_deref().is_none_or(of_action)
            };
            let max_results = if *max_results == 0 { usize::MAX } else { *max_results };
            let (entries, more) = match &db.db {
                Some(db) => from_database(db, max_results, wanted)?,
                None => from_server(&flags.admin, max_results, wanted)?,
            };
            show(&entries, more, flags.admin.is_json())
        }
        AuditCommand::Verify { db } => verify(&db.db, flags.admin.is_json()),
        // NDJSON in either format.
        AuditCommand::Export { db, after, file } => export(&db.db, *after, file.as_deref()),
    }
}

/// Number of entries read at once.
const PAGE: i64 = 500;

/// Reads matching entries of a database, newest first. Returns whether there are more.
fn from_database(
    db: &str,
    max_results: usize,
    wanted: impl Fn(&Value) -> bool,
) -> anyhow::Result<(Vec<Value>, bool)> {
    with_control(db, IfMissing::Fail, async |control| {
        let (mut entries, mut before) = (Vec::new(), None);
        loop {
            let page = control.audit(before, PAGE).await?;
            let Some(last) = page.last() else { return Ok((entries, false)) };
            before = Some(last.seq);
            let page = page.iter().map(serde_json::to_value).collect::<Result<_, _>>()?;
            if !take(&mut entries, page, max_results, &wanted) {
                return Ok((entries, true));
            }
        }
    })
}

/// Reads matching entries of a server, newest first. Returns whether there are more.
fn from_server(
    flags: &AdminFlags,
    max_results: usize,
    wanted: impl Fn(&Value) -> bool,
) -> anyhow::Result<(Vec<Value>, bool)> {
    let (mut entries, mut more) = (Vec::new(), false);
    admin_client::run(flags, async |client| {
        let mut before = String::new();
        loop {
            let path = format!("/admin/v1/audit?limit={PAGE}&before={before}");
            let mut page = client.request(Method::GET, &path, None).await?;
            let read =
                page["entries"].as_array_mut().map(std::mem::take).context("invalid response: no entries")?;
            if !take(&mut entries, read, max_results, &wanted) {
                more = true;
                break;
            }
            match page["next_before"].as_i64() {
                Some(next) => before = next.to_string(),
                None => break,
            }
        }
        Ok(ExitCode::SUCCESS)
    })?;
    Ok((entries, more))
}

/// Moves matching entries of a page into `entries`. Returns whether all of them fit.
fn take(
    entries: &mut Vec<Value>,
    page: Vec<Value>,
    max_results: usize,
    wanted: impl Fn(&Value) -> bool,
) -> bool {
    for entry in page.into_iter().filter(wanted) {
        if entries.len() == max_results {
            return false;
        }
        entries.push(entry);
    }
    true
}

fn show(entries: &[Value], more: bool, json: bool) -> anyhow::Result<ExitCode> {
    if json {
        print(&json!({"entries": entries}))?;
        return Ok(ExitCode::SUCCESS);
    }
    let rows: Vec<[String; 7]> = entries
        .iter()
        .map(|entry| {
            let after = entry["after"].as_str().and_then(|text| serde_json::from_str(text).ok());
            let after = after.unwrap_or(Value::Null);
            let [seq, at, actor, action, target] =
                ["seq", "at", "actor", "action", "target"].map(|name| cell(&entry[name]));
            [seq, at, actor, action, abbreviated(&target), change(&after), reason(&after)]
        })
        .collect();
    admin_client::table_or(
        ["seq", "time", "actor", "action", "target", "change", "reason"],
        &rows,
        "no audit entries",
    )?;
    if more {
        eprintln!("more results; use --max-results");
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a target as lists show it: a hashed API key by its first digits, as `quota list` does.
fn abbreviated(target: &str) -> String {
    let is_hash = target.len() == 64 && target.bytes().all(|byte| byte.is_ascii_hexdigit());
    if is_hash { format!("{}…", &target[..12]) } else { target.to_owned() }
}

/// Fields of a change that `audit list` shows, in this order.
const SHOWN: [&str; 10] =
    ["action", "target", "factor", "rule", "units", "tier", "role", "name", "percent", "text_of"];

/// Returns what was changed, in a few words: `block api_key abc…`, `units 500`.
fn change(after: &Value) -> String {
    let words = SHOWN.iter().filter_map(|name| match (*name, &after[*name]) {
        (_, Value::Null) => None,
        ("action", Value::String(action)) => Some(action.clone()),
        ("target", Value::Object(target)) => {
            let word = |name: &str| target.get(name).and_then(Value::as_str).unwrap_or_default().to_owned();
            Some(format!("{} {}", word("kind"), abbreviated(&word("value"))).trim_end().to_owned())
        }
        ("percent", percent) => {
            let steps = after["steps"].as_array().map_or(0, Vec::len);
            let several = if steps > 1 { format!(" after {steps} steps") } else { String::new() };
            Some(format!("limits at {}%{several}", plain(percent)))
        }
        ("text_of", rev) => Some(format!("rules of revision {rev}")),
        (name, value @ (Value::String(_) | Value::Number(_))) => Some(format!("{name} {}", cell(value))),
        _ => None,
    });
    let words: Vec<String> = words.collect();
    if words.is_empty() { "-".to_owned() } else { words.join(", ") }
}

/// Returns a number without a fraction of zero.
fn plain(number: &Value) -> String {
    number.as_f64().map_or_else(|| cell(number), |number| number.to_string())
}

/// Returns the reason that an operator gave for a change, if any, or the signal that limits have followed.
fn reason(after: &Value) -> String {
    if let signal @ Value::Object(_) = &after["signal"] {
        return format!(
            "{} {} above {}",
            cell(&signal["name"]),
            plain(&signal["value"]),
            plain(&signal["bound"])
        );
    }
    // Earlier releases recorded the reason of a rollback as `because`.
    let given = ["reason", "because"].iter().find_map(|name| after[*name].as_str());
    given.filter(|reason| !reason.is_empty()).unwrap_or("-").to_owned()
}

fn verify(db: &str, json: bool) -> anyhow::Result<ExitCode> {
    let verified = with_control(db, IfMissing::Fail, async |control| Ok(control.verify_audit().await?))?;
    let (whole, report, text) = match verified {
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
    output::ignore_closed(if json { print(&report) } else { print_line(text) })?;
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
                writeln!(out, "{}", escape::json(&serde_json::to_string(entry)?))?;
            }
            progress.advance(entries.len() as u64);
        }
        Ok(out.flush()?)
    })?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An auditor must see what was done and why, in entries of any release.
    #[test]
    fn changes_and_reasons_are_shown() {
        let measure =
            json!({"action": "block", "target": {"kind": "api_key", "value": "abc…"}, "reason": "abuse"});
        assert_eq!((change(&measure), reason(&measure)), ("block, api_key abc…".into(), "abuse".into()));
        let rollback = json!({"rev": 3, "text_of": 1, "because": "back"});
        assert_eq!((change(&rollback), reason(&rollback)), ("rules of revision 1".into(), "back".into()));
        assert_eq!((change(&Value::Null), reason(&Value::Null)), ("-".into(), "-".into()));
        let signal = json!({"name": "queue_depth", "value": 140.5, "bound": 100.0});
        let step = json!({"percent": 80.0, "signal": signal});
        let shown = ("limits at 80%".into(), "queue_depth 140.5 above 100".into());
        assert_eq!((change(&step), reason(&step)), shown);
        let several = json!({"percent": 51.2, "steps": [{"percent": 64.0}, {"percent": 51.2}]});
        assert_eq!(change(&several), "limits at 51.2% after 2 steps");
        assert_eq!(abbreviated(&"0f".repeat(32)), "0f0f0f0f0f0f…");
        assert_eq!(abbreviated("gold"), "gold");
    }

    #[test]
    fn an_account_is_found_by_its_id() {
        let accounts = "root:x:0:0:root:/root:/bin/sh\ntollgate:x:998:998::/:/bin/false\n";
        assert_eq!(account_name(accounts, 998).as_deref(), Some("tollgate"));
        assert_eq!(account_name(accounts, 5), None);
    }
}
