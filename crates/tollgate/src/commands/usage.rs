//! `tollgate usage`: usage of a caller's limits, through a running server: show, reset, grant, revoke.

use crate::admin_client::{self, AdminFlags, cell, encoded};
use crate::cli::{TimeArg, now, output, parse_attribute, print, print_line};
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
        /// API key of the caller.
        #[arg(value_name = "API_KEY")]
        api_key: String,
        /// Name of the rule [default: the rule on api_key alone].
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
        /// API key of the caller.
        #[arg(value_name = "API_KEY")]
        api_key: String,
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
    /// API key of the caller.
    #[arg(value_name = "API_KEY")]
    api_key: String,
    /// Further attribute of the caller's requests, for rules that need one; may be repeated.
    #[arg(long = "attr", value_name = "KEY=VALUE", value_parser = parse_attribute)]
    attributes: Vec<(String, String)>,
    /// Rule domain; required if there are several.
    #[arg(long, value_name = "NAME")]
    domain: Option<String>,
}

impl UsageTarget {
    fn path(&self, what: &str) -> String {
        let domain = self.domain.iter().map(|domain| format!("domain={}", encoded(domain)));
        let attributes =
            self.attributes.iter().map(|(name, value)| format!("attr.{}={}", encoded(name), encoded(value)));
        let query: Vec<String> = domain.chain(attributes).collect();
        let mark = if query.is_empty() { "" } else { "?" };
        format!("/admin/v1/usage/{}{what}{mark}{}", encoded(&self.api_key), query.join("&"))
    }
}

pub(crate) fn usage(flags: &UsageFlags) -> anyhow::Result<ExitCode> {
    let json = flags.admin.is_json();
    admin_client::run(&flags.admin, async |client| {
        let told = match (&flags.command, &flags.of) {
            (Some(UsageCommand::Reset { of, rule, reason }), _) => {
                let body = json!({"rule": rule, "reason": reason});
                client.request(Method::POST, &of.path("/reset"), Some(&body)).await?
            }
            (Some(UsageCommand::Grant { api_key, rule, units, reason, days, until }), _) => {
                let path = format!("/admin/v1/usage/{}/grant", encoded(api_key));
                let until = until.as_ref().map(|until| until.seconds_from(now()?)).transpose()?;
                let ttl = until.unwrap_or(days * 86_400);
                let body = json!({"rule": rule, "units": units, "reason": reason, "ttl_seconds": ttl});
                let granted = client.request(Method::POST, &path, Some(&body)).await?;
                if json {
                    print(&granted)?;
                } else {
                    let fields = ["id", "rule", "units", "expires_at"];
                    admin_client::table(
                        ["id", "rule", "units", "expires"],
                        &[fields.map(|name| cell(&granted[name]))],
                    )?;
                }
                return Ok(ExitCode::SUCCESS);
            }
            (Some(UsageCommand::Revoke { api_key, id, confirm }), _) => {
                let path =
                    format!("/admin/v1/usage/{}/grant/{}?confirm={confirm}", encoded(api_key), encoded(id));
                client.request(Method::DELETE, &path, None).await?;
                if json {
                    print(&json!({"revoked": id}))?;
                } else {
                    print_line(format_args!("revoked {id}"))?;
                }
                return Ok(ExitCode::SUCCESS);
            }
            (None, Some(of)) => client.request(Method::GET, &of.path(""), None).await?,
            (None, None) => anyhow::bail!("missing API key; usage: tollgate usage <API_KEY>"),
        };
        if json {
            print(&told)?;
        } else {
            tables(&told)?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn tables(told: &Value) -> anyhow::Result<()> {
    let list = |name: &str| told[name].as_array().cloned().unwrap_or_default();
    let limit = |one: &Value| {
        let limit = format!("{} / {}", cell(&one["limit"]), cell(&one["window"]));
        let reset =
            one["reset_ms"].as_u64().map_or_else(|| "-".to_owned(), |ms| format!("{} s", ms.div_ceil(1_000)));
        // The same rule name as in `why`, `top` and the metrics.
        [cell(&one["rule"]), limit, cell(&one["used"]), cell(&one["remaining"]), reset, cell(&one["source"])]
    };
    let rows: Vec<_> = list("limits").iter().map(limit).collect();
    let titles = ["rule", "limit", "used", "remaining", "reset in", "source"];
    admin_client::table_or(titles, &rows, "no matching limits")?;
    let mut out = output::styled();
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
