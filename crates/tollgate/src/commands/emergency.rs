//! `tollgate emergency`: what operators decide at once, by way of a running server.

use crate::admin_client::{self, AdminFlags, cell, encoded};
use crate::cli::print;
use clap::{Args, Subcommand};
use hyper::Method;
use serde_json::{Value, json};
use std::process::ExitCode;

const PATH: &str = "/admin/v1/emergency";

#[derive(Debug, Args)]
pub(crate) struct EmergencyFlags {
    #[command(flatten)]
    admin: AdminFlags,
    #[command(subcommand)]
    command: EmergencyCommand,
}

#[derive(Debug, Subcommand)]
enum EmergencyCommand {
    /// Turn somebody away.
    Block {
        #[command(flatten)]
        target: TargetFlags,
        #[command(flatten)]
        about: MeasureFlags,
    },
    /// Decide by a part of each limit.
    Tighten {
        #[command(flatten)]
        target: TargetFlags,
        /// Everybody.
        #[arg(long, group = "whom")]
        all: bool,
        /// What limits are multiplied by, from 0.001 to 0.999.
        #[arg(long, value_name = "PART")]
        factor: f64,
        #[command(flatten)]
        about: MeasureFlags,
    },
    /// Let somebody pass, uncounted.
    Exempt {
        #[command(flatten)]
        target: TargetFlags,
        #[command(flatten)]
        about: MeasureFlags,
    },
    /// Leave a rule out.
    DisableRule {
        /// Its name.
        #[arg(value_name = "RULE")]
        rule: String,
        #[command(flatten)]
        about: MeasureFlags,
    },
    /// The kill switch: let everything pass, uncounted.
    AllowAll {
        #[command(flatten)]
        about: MeasureFlags,
    },
    /// Count and tell, but deny nothing.
    ShadowAll {
        #[command(flatten)]
        about: MeasureFlags,
    },
    /// What is on.
    List,
    /// Let one last longer.
    Renew {
        #[arg(value_name = "ID")]
        id: String,
        /// For how long from now: 90s, 30m, 2h; an hour unless set.
        #[arg(long = "for", value_name = "TIME", value_parser = parse_time)]
        lasts: Option<u64>,
    },
    /// End one before its time.
    End {
        #[arg(value_name = "ID")]
        id: String,
    },
}

/// Whom it is about: one of these.
#[derive(Debug, Args)]
#[group(id = "whom", required = true, multiple = false)]
struct TargetFlags {
    /// The caller who has this API key.
    #[arg(long, value_name = "KEY")]
    api_key: Option<String>,
    /// Requests whose attribute `tenant` is this.
    #[arg(long, value_name = "NAME")]
    tenant: Option<String>,
    /// Requests from this address or network, as in 203.0.113.0/24.
    #[arg(long, value_name = "NETWORK")]
    address: Option<String>,
    /// Requests to this endpoint; with a `*` at its end to all that begin so.
    #[arg(long, value_name = "ENDPOINT")]
    endpoint: Option<String>,
}

#[derive(Debug, Args)]
struct MeasureFlags {
    /// Why, for those who ask later.
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// For how long: 90s, 30m, 2h; an hour unless set, a day at most. It then ends by itself.
    #[arg(long = "for", value_name = "TIME", value_parser = parse_time)]
    lasts: Option<u64>,
}

/// Seconds of `90s`, `30m`, `2h`.
fn parse_time(text: &str) -> Result<u64, String> {
    let wrong = || format!("`{text}` is no time; write one such as 90s, 30m or 2h");
    let (number, scale) = match text.char_indices().last() {
        Some((at, 's')) => (&text[..at], 1),
        Some((at, 'm')) => (&text[..at], 60),
        Some((at, 'h')) => (&text[..at], 3_600),
        _ => return Err(wrong()),
    };
    number.parse::<u64>().ok().and_then(|number| number.checked_mul(scale)).ok_or_else(wrong)
}

impl TargetFlags {
    fn target(&self) -> Value {
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
    /// What is sent to decide it; nothing for those that are about what is on already.
    fn spec(&self) -> Option<Value> {
        let (action, target, factor, about) = match self {
            Self::Block { target, about } => ("block", target.target(), None, about),
            Self::Tighten { target, factor, about, .. } => ("tighten", target.target(), Some(factor), about),
            Self::Exempt { target, about } => ("exempt", target.target(), None, about),
            Self::DisableRule { rule, about } => {
                ("disable_rule", json!({"kind": "rule", "value": rule}), None, about)
            }
            Self::AllowAll { about } => ("allow_all", json!({"kind": "all"}), None, about),
            Self::ShadowAll { about } => ("shadow_all", json!({"kind": "all"}), None, about),
            Self::List | Self::Renew { .. } | Self::End { .. } => return None,
        };
        Some(json!({
            "action": action, "target": target, "factor": factor, "reason": about.reason, "ttl_seconds": about.lasts,
        }))
    }
}

pub(crate) fn emergency(flags: &EmergencyFlags) -> anyhow::Result<ExitCode> {
    let json = flags.admin.is_json();
    admin_client::run(&flags.admin, async |client| {
        if let Some(draft) = flags.command.spec() {
            show(json, &client.request(Method::POST, PATH, Some(&draft)).await?)?;
            return Ok(ExitCode::SUCCESS);
        }
        match &flags.command {
            EmergencyCommand::Renew { id, lasts } => {
                let path = format!("{PATH}/{}/renew", encoded(id));
                let body = json!({"ttl_seconds": lasts});
                show(json, &client.request(Method::POST, &path, Some(&body)).await?)?;
            }
            EmergencyCommand::End { id } => {
                client.request(Method::DELETE, &format!("{PATH}/{}", encoded(id)), None).await?;
                if json {
                    print(&json!({"ended": id}))?;
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

fn show(json: bool, told: &Value) -> anyhow::Result<()> {
    if json { print(told) } else { table(std::slice::from_ref(told)) }
}

fn table(measures: &[Value]) -> anyhow::Result<()> {
    let row = |one: &Value| {
        let whom = match (one["target"]["kind"].as_str(), one["target"]["value"].as_str()) {
            (Some(kind), Some(value)) if !value.is_empty() => format!("{kind} {value}"),
            (kind, _) => kind.unwrap_or("-").to_owned(),
        };
        let what = match &one["factor"] {
            Value::Null => cell(&one["action"]),
            factor => format!("{} to {factor}", cell(&one["action"])),
        };
        [cell(&one["id"]), what, whom, cell(&one["expires_at"]), cell(&one["author"]), cell(&one["reason"])]
    };
    let rows: Vec<_> = measures.iter().map(row).collect();
    admin_client::table(["id", "action", "whom", "until", "author", "reason"], &rows)
}

#[cfg(test)]
mod tests {
    use super::parse_time;

    #[test]
    fn times_are_read_as_people_write_them() {
        assert_eq!([parse_time("90s"), parse_time("30m"), parse_time("2h")], [Ok(90), Ok(1_800), Ok(7_200)]);
        for wrong in ["", "h", "5", "-1m", "1.5h", "5 m", "99999999999999999999h", "5µ"] {
            assert!(parse_time(wrong).is_err(), "{wrong}");
        }
    }
}
