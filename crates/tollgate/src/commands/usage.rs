//! `tollgate usage`: what a caller has used of its limits, by way of a running server; giving it back, granting more, taking that back.

use crate::admin_client::{self, AdminFlags, cell, encoded};
use crate::cli::{parse_attribute, print};
use clap::{Args, Subcommand};
use hyper::Method;
use serde_json::{Value, json};
use std::io::Write;
use std::process::ExitCode;

#[derive(Debug, Args)]
#[command(subcommand_negates_reqs = true)]
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
    /// Give back all that a caller has used.
    Reset {
        #[command(flatten)]
        of: UsageTarget,
        /// Only of this rule's limits.
        #[arg(long, value_name = "RULE")]
        rule: Option<String>,
        /// Why, for those who ask later.
        #[arg(long, value_name = "TEXT")]
        reason: String,
    },
    /// Give a caller extra quota, once.
    Grant {
        #[arg(value_name = "API_KEY")]
        api_key: String,
        /// Which rule's; of the rule about the caller alone unless set.
        #[arg(long, value_name = "RULE")]
        rule: Option<String>,
        /// How much.
        #[arg(long, value_name = "N")]
        units: u64,
        /// Why, for those who ask later.
        #[arg(long, value_name = "TEXT")]
        reason: String,
        /// For how many days it can be used.
        #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=366))]
        days: u64,
    },
    /// Take back what is left of a grant.
    Revoke {
        #[arg(value_name = "API_KEY")]
        api_key: String,
        /// Which; `tollgate usage API_KEY` tells it.
        #[arg(value_name = "ID")]
        id: String,
    },
}

/// Whose limits, and which requests meet them.
#[derive(Debug, Args)]
struct UsageTarget {
    #[arg(value_name = "API_KEY")]
    api_key: String,
    /// What requests say beside the key, for rules that ask for more; may be repeated.
    #[arg(long = "attr", value_name = "KEY=VALUE", value_parser = parse_attribute)]
    attributes: Vec<(String, String)>,
    /// The domain; not needed where there is only one.
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
            (Some(UsageCommand::Grant { api_key, rule, units, reason, days }), _) => {
                let path = format!("/admin/v1/usage/{}/grant", encoded(api_key));
                let body =
                    json!({"rule": rule, "units": units, "reason": reason, "ttl_seconds": days * 86_400});
                let granted = client.request(Method::POST, &path, Some(&body)).await?;
                if json {
                    print(&granted)?;
                } else {
                    let fields = ["id", "rule", "units", "expires_at"];
                    admin_client::table(
                        ["id", "rule", "units", "until"],
                        &[fields.map(|name| cell(&granted[name]))],
                    )?;
                }
                return Ok(ExitCode::SUCCESS);
            }
            (Some(UsageCommand::Revoke { api_key, id }), _) => {
                let path = format!("/admin/v1/usage/{}/grant/{}", encoded(api_key), encoded(id));
                client.request(Method::DELETE, &path, None).await?;
                if json {
                    print(&json!({"revoked": id}))?;
                } else {
                    writeln!(std::io::stdout().lock(), "revoked {id}")?;
                }
                return Ok(ExitCode::SUCCESS);
            }
            (None, Some(of)) => client.request(Method::GET, &of.path(""), None).await?,
            (None, None) => anyhow::bail!("whose? write an API key"),
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
        [
            cell(&one["descriptor"]),
            limit,
            cell(&one["used"]),
            cell(&one["remaining"]),
            reset,
            cell(&one["source"]),
        ]
    };
    let rows: Vec<_> = list("limits").iter().map(limit).collect();
    admin_client::table(["rule", "limit", "used", "remaining", "unused in", "from"], &rows)?;
    let mut out = std::io::stdout().lock();
    for needs in list("needs") {
        let attributes: Vec<String> = needs["attributes"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|name| format!("--attr {}=…", cell(name)))
            .collect();
        writeln!(out, "{}: tell also {}", cell(&needs["descriptor"]), attributes.join(" "))?;
    }
    for grant in list("grants") {
        let (left, units, until, id) = (
            cell(&grant["remaining"]),
            cell(&grant["units"]),
            cell(&grant["expires_at"]),
            cell(&grant["id"]),
        );
        writeln!(out, "granted {units}, {left} left, until {until}: {id}")?;
    }
    Ok(())
}
