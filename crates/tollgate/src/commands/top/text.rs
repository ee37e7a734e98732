//! Text output of `tollgate top`: one sample of the server's state, line by line, if there is no terminal.

use super::{TopState, plain, shown};
use crate::admin_client;
use crate::cli::print_line;
use serde_json::Value;

pub(super) fn print(seen: &TopState) -> anyhow::Result<()> {
    let (name, about) = seen.node();
    print_line(format_args!("{name}  {about}"))?;
    print_line(seen.rates().join("  "))?;
    for line in seen.cells() {
        print_line(line)?;
    }
    for [shard, state] in seen.breakers() {
        print_line(format_args!("{shard}  breaker {state}"))?;
    }
    let count = |rule: &Value, name: &str| rule[name].as_u64().unwrap_or(0).to_string();
    let rows: Vec<[String; 4]> = seen
        .rules()
        .into_iter()
        .map(|rule| {
            [plain(&rule["rule"]), count(rule, "allow"), count(rule, "deny"), count(rule, "shadow_deny")]
        })
        .collect();
    print_line("")?;
    admin_client::table_or(["RULE", "ALLOWED", "DENIED", "SHADOW"], &rows, "no rules")?;
    let top = |name: &str| seen.top[name].as_array().cloned().unwrap_or_default();
    if top("by_rate").is_empty() {
        print_line("\nno traffic yet")?;
    }
    list(["CALLER", "RATE", "SHARE"], &top("by_rate"), [("key_masked", ""), ("rate", "/s"), ("share", "%")])?;
    let denied = [("key_masked", ""), ("denied", ""), ("rule", "")];
    list(["TOP DENIED", "DENIED", "RULE"], &top("by_denials"), denied)?;
    let near = [("key_masked", ""), ("utilisation", "%"), ("tier_above", "")];
    list(["NEAR A LIMIT", "USED", "TIER ABOVE"], &top("near_limit"), near)?;
    list(["HOT KEY", "RATE", "STATE"], &seen.hot(), [("key", ""), ("per_second", "/s"), ("state", "")])
}

/// Prints a table, unless it is empty.
fn list(titles: [&str; 3], all: &[Value], fields: [(&str, &str); 3]) -> anyhow::Result<()> {
    if all.is_empty() {
        return Ok(());
    }
    let row = |one: &Value| fields.map(|(name, unit)| shown(&one[name], unit));
    print_line("")?;
    admin_client::table(titles, &all.iter().map(row).collect::<Vec<_>>())
}
