//! `tollgate consumption`: what callers consumed of billed rules, from a running server.

use crate::admin_client::{self, AdminFlags, encoded};
use crate::cli::parse_instant;
use crate::ndjson;
use clap::{Args, Subcommand, ValueEnum};
use std::path::PathBuf;
use std::process::ExitCode;

#[derive(Debug, Args)]
pub(crate) struct ConsumptionFlags {
    #[command(flatten)]
    admin: AdminFlags,
    #[command(subcommand)]
    command: ConsumptionCommand,
}

#[derive(Debug, Subcommand)]
enum ConsumptionCommand {
    /// Export rows as NDJSON.
    Export(ExportFlags),
}

#[derive(Debug, Args)]
struct ExportFlags {
    /// Export only periods that begin at this time or later: 2026-12-31 (00:00 UTC) or 2026-12-31T18:00:00Z [default: a
    /// day ago, or the current month].
    #[arg(long, value_name = "TIME", value_parser = parse_instant)]
    from: Option<String>,
    /// Export only periods that begin before this time [default: now].
    #[arg(long, value_name = "TIME", value_parser = parse_instant)]
    to: Option<String>,
    /// Length of the periods.
    #[arg(long, value_name = "PERIOD", default_value = "hour")]
    granularity: GranularityName,
    /// Export only this caller: its value, such as an API key or a tenant, or its caller_id.
    #[arg(long, value_name = "CALLER")]
    caller: Option<String>,
    /// Export only the rule with this name.
    #[arg(long, value_name = "RULE")]
    rule: Option<String>,
    /// Export only rules of this domain.
    #[arg(long, value_name = "NAME")]
    domain: Option<String>,
    /// Output file [default: standard output].
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum GranularityName {
    /// Hours in UTC.
    Hour,
    /// Calendar months in UTC.
    Month,
}

pub(crate) fn run(flags: &ConsumptionFlags) -> anyhow::Result<ExitCode> {
    let ConsumptionCommand::Export(export) = &flags.command;
    let granularity = match export.granularity {
        GranularityName::Hour => "hour",
        GranularityName::Month => "month",
    };
    let mut path = format!("/admin/v1/consumption?format=ndjson&granularity={granularity}");
    let filters = [
        ("from", &export.from),
        ("to", &export.to),
        ("caller", &export.caller),
        ("rule", &export.rule),
        ("domain", &export.domain),
    ];
    for (name, value) in filters {
        if let Some(value) = value {
            path.push_str(&format!("&{name}={}", encoded(value)));
        }
    }
    admin_client::run(&flags.admin, async |client| {
        ndjson::receive(&client, &path, export.file.as_deref()).await?;
        Ok(ExitCode::SUCCESS)
    })
}
