//! `tollgate usage`: usage of a caller's limits, through a running server: show, reset, grant, revoke.

use crate::admin_client::{self, AdminFlags, cell, encoded};
use crate::cli::{TimeArg, now, output, parse_attribute, print, print_line};
use crate::commands::caller::CallerFlags;
use anyhow::Context;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, Subcommand};
use hyper::Method;
use serde_json::{Value, json};
use std::io::Write;
use std::process::ExitCode;

#[derive(Debug, Args)]
#[command(
    subcommand_negates_reqs = true,
    override_usage = "tollgate usage [OPTIONS] <API_KEY>\n       tollgate usage <COMMAND>"
)]
pub(crate) struct UsageFlags {
    #[command(flatten)]
    admin: AdminFlags,
    #[command(subcommand)]
    command: Option<UsageCommand>,
    #[command(flatten)]
    of: Option<UsageTarget>,
}

#[derive(Debug, Subcommand)]
enum UsageCommand {
    /// Reset usage to zero.
    Reset {
        #[command(flatten)]
        of: UsageTarget,
        /// Reset only this rule's limits.
        #[arg(long, value_name = "RULE")]
        rule: Option<String>,
        /// Reason, recorded in the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Grant extra units, once.
    Grant {
        /// API key of the caller, or its id from a list; with --key, its value of that attribute.
        #[arg(value_name = "API_KEY")]
        api_key: Option<String>,
        /// Attribute that identifies the caller and that the value is of, such as user_id, tenant or remote_address [default:
        /// api_key]. Say api_key for a key that is spelled like an id (16 or 64 hexadecimal digits).
        #[arg(long, value_name = "ATTRIBUTE", value_parser = NonEmptyStringValueParser::new())]
        key: Option<String>,
        /// Name of the rule [default: the rule on the caller alone].
        #[arg(long, value_name = "RULE")]
        rule: Option<String>,
        /// Number of units.
        #[arg(long, value_name = "N")]
        units: u64,
        /// Reason, recorded in the audit log.
        #[arg(long, value_name = "TEXT")]
        reason: String,
        /// Days until the grant expires.
        #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=366))]
        days: u64,
        /// Expiry in place of --days: 2d (from now), 2026-12-31 (00:00 UTC) or 2026-12-31T18:00:00Z.
        #[arg(long, value_name = "TIME", conflicts_with = "days")]
        until: Option<TimeArg>,
    },
    /// Revoke the rest of a grant.
    Revoke {
        #[command(flatten)]
        caller: CallerFlags,
        /// Grant ID from `tollgate usage API_KEY`.
        #[arg(value_name = "ID")]
        id: String,
        /// Revoke the grant even if the caller passes by it alone.
        #[arg(long)]
        confirm: bool,
    },
}

/// The caller, and the other attributes of its requests.
#[derive(Debug, Args)]
struct UsageTarget {
    /// API key of the caller, or its id from a list; with --key, its value of that attribute.
    #[arg(value_name = "API_KEY")]
    api_key: Option<String>,
    /// Attribute that identifies the caller and that the value is of, such as user_id, tenant or remote_address [default:
    /// api_key]. Say api_key for a key that is spelled like an id (16 or 64 hexadecimal digits).
    #[arg(long, value_name = "ATTRIBUTE", value_parser = NonEmptyStringValueParser::new())]
    key: Option<String>,
    /// Further attribute of the caller's requests, for rules that need one; may be repeated.
    #[arg(long = "attr", value_name = "KEY=VALUE", value_parser = parse_attribute)]
    attributes: Vec<(String, String)>,
    /// Rule domain; required if there are several.
    #[arg(long, value_name = "NAME")]
    domain: Option<String>,
}

impl UsageTarget {
    fn path(&self, api_key: String, key: Option<String>, what: &str) -> String {
        let domain = self.domain.iter().map(|domain| format!("domain={}", encoded(domain)));
        let attributes =
            self.attributes.iter().map(|(name, value)| format!("attr.{}={}", encoded(name), encoded(value)));
        let query: Vec<String> = domain.chain(attributes).collect();
        let caller = CallerFlags { api_key, key };
        caller.path("/admin/v1/usage", what, &query)
    }
}

const MISSING_KEY: &str =
    "missing API key; usage: tollgate usage <API_KEY>, or tollgate usage reset <API_KEY>";

pub(crate) fn usage(flags: &UsageFlags) -> anyhow::Result<ExitCode> {
    let json = flags.admin.is_json();
    // The key, and the attribute that it is of, may stand before the command or after it.
    let before = flags.of.as_ref().and_then(|of| of.api_key.clone());
    let named = |key: &Option<String>| key.clone().or_else(|| before.clone()).context(MISSING_KEY);
    let attribute = flags.of.as_ref().and_then(|of| of.key.clone());
    let keyed = |key: &Option<String>| key.clone().or_else(|| attribute.clone());
    admin_client::run(&flags.admin, async |client| {
        let usage = match (&flags.command, &flags.of) {
            (Some(UsageCommand::Reset { of, rule, reason }), _) => {
                let body = json!({"rule": rule, "reason": reason});
                let path = of.path(named(&of.api_key)?, keyed(&of.key), "/reset");
                client.request(Method::POST, &path, Some(&body)).await?
            }
            (Some(UsageCommand::Grant { api_key, key, rule, units, reason, days, until }), _) => {
                let caller = CallerFlags { api_key: named(api_key)?, key: keyed(key) };
                let path = caller.path("/admin/v1/usage", "/grant", &[]);
                let until = until.as_ref().map(|until| until.seconds_from(now()?)).transpose()?;
                let ttl = until.unwrap_or(days * 86_400);
                let body = json!({"rule": rule, "units": units, "reason": reason, "ttl_seconds": ttl});
                let granted = client.request(Method::POST, &path, Some(&body)).await?;
                if json {
                    print(&granted)?;
                } else {
                    let [id, units, expires] = ["id", "units", "expires_at"].map(|name| cell(&granted[name]));
                    let rules = granted["rules"].as_array().into_iter().flatten().map(cell);
                    let rules = rules.collect::<Vec<_>>().join(", ");
                    let titles = ["id", "rule", "units", "expires"];
                    admin_client::table(titles, &[[id, rules, units, expires]])?;
                }
                return Ok(ExitCode::SUCCESS);
            }
            (Some(UsageCommand::Revoke { caller, id, confirm }), _) => {
                let grant = format!("/grant/{}", encoded(id));
                let path = caller.path("/admin/v1/usage", &grant, &[format!("confirm={confirm}")]);
                client.request(Method::DELETE, &path, None).await?;
                if json {
                    print(&json!({"revoked": id}))?;
                } else {
                    print_line(format_args!("revoked {id}"))?;
                }
                return Ok(ExitCode::SUCCESS);
            }
            (None, Some(of)) => {
                let path = of.path(named(&of.api_key)?, of.key.clone(), "");
                client.request(Method::GET, &path, None).await?
            }
            (None, None) => anyhow::bail!(MISSING_KEY),
        };
        if json {
            print(&usage)?;
        } else {
            tables(&usage)?;
        }
        let limits = usage["limits"].as_array().into_iter().flatten();
        let is_unreset = limits.clone().any(|limit| limit["reset"] == false);
        Ok(if is_unreset { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    })
}

/// Returns how much a limit allows per window, with what it counts.
fn rate(limit: &Value) -> String {
    let unit = limit["unit"].as_str().map(|unit| format!(" {unit}")).unwrap_or_default();
    format!("{}{unit} / {}", cell(&limit["count"]), cell(&limit["window"]))
}

fn tables(usage: &Value) -> anyhow::Result<()> {
    let list = |name: &str| usage[name].as_array().cloned().unwrap_or_default();
    let limit = |one: &Value| {
        let mut limit = rate(one);
        let mut used = cell(&one["used"]);
        // A bucket holds another number of units than it refills in a window.
        if one["burst"].is_u64() {
            limit = format!("{limit}, burst {}", cell(&one["burst"]));
            used = format!("{used} of {}", cell(&one["limit"]));
        }
        let window = &one["current_window"];
        let window = match (window["start"].as_str(), window["end"].as_str()) {
            (Some(start), Some(end)) => format!("{start} to {end}"),
            _ => "-".to_owned(),
        };
        let shared = if one["shared"] == true { " (shared)" } else { "" };
        let role = one["role"].as_str().map(|role| format!(" ({role})")).unwrap_or_default();
        let reset =
            one["reset_ms"].as_u64().map_or_else(|| "-".to_owned(), |ms| format!("{} s", ms.div_ceil(1_000)));
        // The same rule name as in `why`, `top` and the metrics.
        let rule = format!("{}{shared}{role}", cell(&one["rule"]));
        [rule, limit, used, cell(&one["remaining"]), reset, window, cell(&one["source"])]
    };
    let unlimited = list("unlimited").into_iter().map(|one| {
        [cell(&one["rule"]), "unlimited".to_owned()].into_iter().chain(std::iter::repeat_n("-".to_owned(), 5))
    });
    let unlimited = unlimited.map(|row| std::array::from_fn(|at| row.clone().nth(at).unwrap_or_default()));
    let rows: Vec<[String; 7]> = list("limits").iter().map(limit).chain(unlimited).collect();
    let titles = ["rule", "limit", "used", "remaining", "reset in", "current window", "source"];
    admin_client::table_or(titles, &rows, "no matching limits")?;
    let mut out = output::styled();
    for limit in list("limits") {
        let name = format!("{}, {}", cell(&limit["rule"]), rate(&limit));
        if let Some(measure) = limit["measure"].as_str() {
            writeln!(out, "{name}: {measure}: {}", cell(&limit["measure_effect"]))?;
        }
        if limit["assumed"] == true {
            writeln!(out, "{name}: the store may have lost what was used: all of it is assumed")?;
        }
        match limit["reset"].as_bool() {
            Some(true) => writeln!(out, "{name}: reset")?,
            Some(false) => writeln!(out, "{name}: not reset, its counter cannot be reached; retry later")?,
            None => {}
        }
        if let Some(region) = super::region::sentence(&limit["region"]) {
            writeln!(out, "{} {}: {region}", cell(&limit["rule"]), rate(&limit))?;
        }
    }
    if let (Some(tier), "last_request") = (usage["tier"].as_str(), &*cell(&usage["tier_source"])) {
        writeln!(out, "tier {tier}, from its latest request")?;
    }
    let tiers = list("tiers");
    if !tiers.is_empty() {
        writeln!(
            out,
            "tier unknown: no quota names it, and this node has no recent request; limits by tier:"
        )?;
    }
    for one in tiers {
        let limits: Vec<String> = one["limits"].as_array().into_iter().flatten().map(cell).collect();
        writeln!(out, "  {}: {} {}", cell(&one["tier"]), cell(&one["rule"]), limits.join(" and "))?;
    }
    for needs in list("needs") {
        let attributes: Vec<String> = needs["attributes"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|name| format!("--attr {}=…", cell(name)))
            .collect();
        writeln!(out, "{}: add {} to see it", cell(&needs["rule"]), attributes.join(" "))?;
    }
    for grant in list("grants") {
        let (left, units, until, id) = (
            cell(&grant["remaining"]),
            cell(&grant["units"]),
            cell(&grant["expires_at"]),
            cell(&grant["id"]),
        );
        writeln!(out, "grant {id}: {left} of {units} units left, expires {until}")?;
    }
    Ok(())
}
