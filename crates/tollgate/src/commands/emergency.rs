//! `tollgate emergency`: emergency measures, through a running server.

use crate::admin_client::{self, AdminFlags, cell, encoded};
use crate::cli::{TimeArg, now, parse_attribute, parse_duration, print, print_line};
use clap::{Args, Subcommand};
use hyper::Method;
use serde_json::{Value, json};
use std::process::ExitCode;

const PATH: &str = "/admin/v1/emergency";
/// Maximum time to live of a measure, in seconds.
const MAX_TTL: u64 = 86_400;

#[derive(Debug, Args)]
pub(crate) struct EmergencyFlags {
    #[command(flatten)]
    admin: AdminFlags,
    #[command(subcommand)]
    command: EmergencyCommand,
}

#[derive(Debug, Subcommand)]
enum EmergencyCommand {
    /// Block a caller, tenant, network, endpoint or any value of an attribute.
    Block {
        #[command(flatten)]
        target: TargetFlags,
        #[command(flatten)]
        key: KeyFlag,
        #[command(flatten)]
        about: MeasureFlags,
    },
    /// Multiply limits by a factor below 1.
    Tighten {
        #[command(flatten)]
        target: TargetFlags,
        #[command(flatten)]
        key: KeyFlag,
        /// All traffic.
        #[arg(long, group = "whom")]
        all: bool,
        /// Factor from 0.001 to 0.999.
        #[arg(long, value_name = "FACTOR")]
        factor: f64,
        #[command(flatten)]
        about: MeasureFlags,
    },
    /// Exempt from all limits, for a time or until it is ended.
    Exempt {
        #[command(flatten)]
        target: TargetFlags,
        #[command(flatten)]
        key: KeyFlag,
        /// Exempt until `tollgate emergency end ID`.
        #[arg(long, conflicts_with_all = ["ttl", "until"])]
        permanent: bool,
        #[command(flatten)]
        about: MeasureFlags,
    },
    /// Disable a rule.
    DisableRule {
        /// Name of the rule.
        #[arg(value_name = "RULE")]
        rule: String,
        #[command(flatten)]
        about: MeasureFlags,
    },
    /// Kill switch: allow every request without counting.
    AllowAll {
        #[command(flatten)]
        about: MeasureFlags,
    },
    /// Shadow mode for all rules: count, deny nothing.
    ShadowAll {
        #[command(flatten)]
        about: MeasureFlags,
    },
    /// List active measures.
    List,
    /// Extend a measure.
    #[command(visible_alias = "extend")]
    Renew {
        /// Measure ID from `emergency list`.
        #[arg(value_name = "ID")]
        id: String,
        #[command(flatten)]
        lasts: Lasts,
    },
    /// End a measure now.
    End {
        /// Measure ID from `emergency list`.
        #[arg(value_name = "ID")]
        id: String,
    },
}

/// Target of a measure: one of these.
#[derive(Debug, Args)]
#[group(id = "whom", required = true, multiple = false)]
struct TargetFlags {
    /// Caller with this API key, or this id from a list.
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Requests whose attribute `tenant` has this value.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Requests from this address or network, such as 203.0.113.0/24.
    #[arg(long, value_name = "NETWORK")]
    address: Option<String>,
    /// Requests to this endpoint; a final `*` matches any rest.
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Option<String>,
    /// Requests whose attribute KEY has this value, such as user_id=u-1 or session=abc.
    #[arg(long = "attr", value_name = "KEY=VALUE", value_parser = parse_attribute)]
    attribute: Option<(String, String)>,
}

#[derive(Debug, Args)]
struct MeasureFlags {
    /// Reason, recorded in the audit log.
    #[arg(long, value_name = "TEXT")]
    reason: String,
    #[command(flatten)]
    lasts: Lasts,
}

/// How the value of --api-key is meant.
#[derive(Debug, Args)]
struct KeyFlag {
    /// Attribute that the value of --api-key is of: `api_key` for a key that is spelled like an id (16 or 64 hexadecimal
    /// digits).
    #[arg(long, value_name = "ATTRIBUTE", requires = "api_key", value_parser = ["api_key"], hide_possible_values = true)]
    key: Option<String>,
}

/// How long a measure stays in force.
#[derive(Debug, Args)]
struct Lasts {
    /// Time to live, such as 90s, 30m, 2h [default: 1h, max: 24h].
    #[arg(long = "for", value_name = "DURATION", value_parser = parse_duration)]
    ttl: Option<u64>,
    /// Expiry in place of --for, within 24 hours: 2h (from now) or an instant such as 2026-12-31T18:00:00Z.
    #[arg(long, value_name = "TIME", conflicts_with = "ttl")]
    until: Option<TimeArg>,
}

impl Lasts {
    fn seconds(&self) -> anyhow::Result<Option<u64>> {
        let until = self.until.as_ref().map(|until| until.seconds_from(now()?)).transpose()?;
        let flag = if until.is_some() { "--until" } else { "--for" };
        let seconds = until.or(self.ttl);
        anyhow::ensure!(
            seconds.is_none_or(|seconds| (1..=MAX_TTL).contains(&seconds)),
            "{flag}: a measure stays in force for 1s to 24h; renew it before it expires"
        );
        Ok(seconds)
    }
}

impl TargetFlags {
    fn target(&self) -> Value {
        if let Some((key, value)) = &self.attribute {
            return json!({"kind": "attribute", "key": key, "value": value});
        }
        let kinds = [
            ("api_key", &self.api_key),
            ("tenant", &self.tenant),
            ("address", &self.address),
            ("endpoint", &self.endpoint),
        ];
        let given = kinds.into_iter().find_map(|(kind, value)| Some((kind, value.as_deref()?)));
        given.map_or_else(|| json!({"kind": "all"}), |(kind, value)| json!({"kind": kind, "value": value}))
    }
}

impl EmergencyCommand {
    /// Returns the path and the body of the request that declares a measure; `None` for commands on existing measures.
    fn spec(&self) -> anyhow::Result<Option<(String, Value)>> {
        let (action, target, factor, about) = match self {
            Self::Block { target, about, .. } => ("block", target.target(), None, about),
            Self::Tighten { target, factor, about, .. } => ("tighten", target.target(), Some(factor), about),
            Self::Exempt { target, about, .. } => ("exempt", target.target(), None, about),
            Self::DisableRule { rule, about } => {
                ("disable_rule", json!({"kind": "rule", "value": rule}), None, about)
            }
            Self::AllowAll { about } => ("allow_all", json!({"kind": "all"}), None, about),
            Self::ShadowAll { about } => ("shadow_all", json!({"kind": "all"}), None, about),
            Self::List | Self::Renew { .. } | Self::End { .. } => return Ok(None),
        };
        let key = match self {
            Self::Block { key, .. } | Self::Tighten { key, .. } | Self::Exempt { key, .. } => {
                key.key.as_deref()
            }
            _ => None,
        };
        let query = key.map(|key| format!("?key={key}")).unwrap_or_default();
        let body = json!({
            "action": action, "target": target, "factor": factor, "reason": about.reason,
            "ttl_seconds": about.lasts.seconds()?,
            "permanent": matches!(self, Self::Exempt { permanent: true, .. }),
        });
        Ok(Some((format!("{PATH}{query}"), body)))
    }
}

pub(crate) fn emergency(flags: &EmergencyFlags) -> anyhow::Result<ExitCode> {
    let json = flags.admin.is_json();
    admin_client::run(&flags.admin, async |client| {
        if let Some((path, draft)) = flags.command.spec()? {
            show(json, &client.request(Method::POST, &path, Some(&draft)).await?)?;
            return Ok(ExitCode::SUCCESS);
        }
        match &flags.command {
            EmergencyCommand::Renew { id, lasts } => {
                let path = format!("{PATH}/{}/renew", encoded(id));
                let body = json!({"ttl_seconds": lasts.seconds()?});
                show(json, &client.request(Method::POST, &path, Some(&body)).await?)?;
            }
            EmergencyCommand::End { id } => {
                client.request(Method::DELETE, &format!("{PATH}/{}", encoded(id)), None).await?;
                if json {
                    print(&json!({"ended": id}))?;
                } else {
                    print_line(format_args!("ended {id}"))?;
                }
            }
            _ => {
                let on = client.request(Method::GET, PATH, None).await?;
                if json {
                    print(&on)?;
                } else {
                    table(on["active"].as_array().map_or(&[], Vec::as_slice))?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

fn show(json: bool, measure: &Value) -> anyhow::Result<()> {
    if json { print(measure) } else { table(std::slice::from_ref(measure)) }
}

fn table(measures: &[Value]) -> anyhow::Result<()> {
    let row = |one: &Value| {
        let target = &one["target"];
        let whom = match (target["key"].as_str().or(target["kind"].as_str()), target["value"].as_str()) {
            (Some(kind), Some(value)) if !value.is_empty() => format!("{kind} {value}"),
            (kind, _) => kind.unwrap_or("-").to_owned(),
        };
        // As the commands are spelled.
        let action = cell(&one["action"]).replace('_', "-");
        let what = match &one["factor"] {
            Value::Null => action,
            factor => format!("{action} to {factor}"),
        };
        let expires = if one["expires_at"].is_null() { "never".to_owned() } else { cell(&one["expires_at"]) };
        [cell(&one["id"]), what, whom, expires, cell(&one["author"]), cell(&one["reason"])]
    };
    let rows: Vec<_> = measures.iter().map(row).collect();
    admin_client::table_or(
        ["id", "action", "target", "expires", "author", "reason"],
        &rows,
        "no active measures",
    )
}
