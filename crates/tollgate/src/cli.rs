//! Command line definition. Raw arguments become typed values here, once.

use crate::server::logging::LogFlag;
mod billing;
mod cells;
mod env_value;
mod format;
mod listener_tls;
pub(crate) mod output;
mod progress;
mod prometheus;
mod publishing;
mod time_arg;
mod xds;

pub(crate) use billing::{BillingFlags, BillingSection};
pub(crate) use cells::{CellFlags, CellSection};
pub(crate) use env_value::{parse, serve_flags};
pub(crate) use format::{FormatFlags, print, print_line};
pub(crate) use progress::Progress;
pub(crate) use prometheus::{PrometheusFlags, PrometheusSection};
pub(crate) use publishing::{GuardrailSection, PublishingFlags, RulesFromName, deprecated_variable};
pub(crate) use time_arg::{TimeArg, now, parse_duration, parse_instant};
pub(crate) use xds::{MAX_PAUSE, XdsFlags};

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Maximum deadline of a check, in milliseconds.
pub(crate) const MAX_DEADLINE: u64 = 10_000;
/// Maximum number of failures that a breaker counts.
pub(crate) const MAX_FAILURES: u64 = 1_000_000;
/// A day, in milliseconds.
pub(crate) const DAY: u64 = 86_400_000;

/// Distributed rate limiter: decides for every request whether it may pass.
#[derive(Debug, Parser)]
#[command(
    name = "tollgate",
    version,
    arg_required_else_help = true,
    after_help = "Exit codes: 0 success; 1 failure, or a change that was rejected or needs --confirm; 2 invalid \
                  arguments; 3 a revision was published and waits for approval."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the rate limit server. Without flags: in-memory counters, sample rules, loopback only.
    Serve(Box<ServeFlags>),
    /// Run the reverse proxy with built-in rate limiting. Requires --config with a `gateway` section.
    Gateway(Box<ServeFlags>),
    /// Take the place of envoyproxy/ratelimit: read its environment variables and serve its ports. Arguments are ignored. The
    /// program does the same when it is called `ratelimit`.
    Ratelimit(RatelimitArgs),
    /// Validate rule files. Reports errors and lint warnings with line and column; exits 1 on errors.
    #[command(visible_alias = "check")]
    Validate(ValidateFlags),
    /// Print the JSON Schema for rule files.
    Schema(FormatFlags),
    /// Explain a request before it is made: which rules match and why, what counters hold, what would happen.
    Explain(Box<crate::commands::explain::ExplainFlags>),
    /// Examine the configuration of Envoy, Istio or Envoy Gateway, or a running server: what will happen, what is missing.
    Doctor(Box<crate::commands::doctor::DoctorFlags>),
    /// Run unit tests for rule files on a simulated clock.
    Test(TestFlags),
    /// Create, list and revoke tokens for the admin API.
    Token(TokenFlags),
    /// List, verify or export the audit log.
    Audit(AuditFlags),
    /// Publish rules, list revisions, roll back.
    Rules(crate::commands::rules::RulesFlags),
    /// Manage quotas of single callers: get, set, list, delete, import, export.
    Quota(Box<crate::commands::quota::QuotaFlags>),
    /// Show a caller's usage; reset it, grant extra units.
    Usage(Box<crate::commands::usage::UsageFlags>),
    /// Export what callers consumed of billed rules.
    Consumption(Box<crate::commands::consumption::ConsumptionFlags>),
    /// Manage emergency measures on all nodes.
    Emergency(Box<crate::commands::emergency::EmergencyFlags>),
    /// Explain a past decision: rule, limit, counter, retry time.
    Why(Box<crate::commands::why::WhyFlags>),
    /// Show live rates, denials, top callers, breakers (one snapshot without a terminal).
    Top(Box<crate::commands::top::TopFlags>),
    /// Ask the server on this machine whether it is alive or ready; exits 0 or 1. For health checks of containers.
    Health(crate::commands::health::HealthFlags),
    /// Print a shell completion script. For bash: tollgate completions bash > /etc/bash_completion.d/tollgate.
    Completions(CompletionsFlags),
    /// Print the manual page in roff, or write one page per command into a directory.
    Man(ManFlags),
}

#[derive(Debug, Default, Args)]
pub(crate) struct RatelimitArgs {
    /// Ignored.
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    pub(crate) ignored: Vec<std::ffi::OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsFlags {
    /// Shell to complete for.
    #[arg(value_name = "SHELL")]
    pub(crate) shell: CompletionShell,
}

/// Shells that completions are made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum CompletionShell {
    Bash,
    Zsh,
    Fish,
}

#[derive(Debug, Args)]
pub(crate) struct ManFlags {
    /// Write tollgate.1, tollgate-serve.1 and so on into this directory instead of standard output.
    #[arg(long, value_name = "DIRECTORY", conflicts_with = "command")]
    pub(crate) dir: Option<PathBuf>,
    /// Command whose page is printed, such as `quota set` [default: tollgate itself].
    #[arg(value_name = "COMMAND")]
    pub(crate) command: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct TokenFlags {
    #[command(flatten)]
    pub(crate) format: FormatFlags,
    #[command(subcommand)]
    pub(crate) command: TokenCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Create a token and print it (shown only once).
    Create {
        #[command(flatten)]
        db: DbFlag,
        /// Name of its owner, recorded in the audit log.
        #[arg(long, value_name = "NAME")]
        name: String,
        /// Role: viewer, operator, admin or replica.
        #[arg(long, value_name = "ROLE")]
        role: tollgate_control::Role,
        /// Days that the token is valid; 0 means it does not expire.
        #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(0..=36_500))]
        days: u32,
        /// Expiry in place of --days: 2d, 2026-12-31 (00:00 UTC) or 2026-12-31T18:00:00Z.
        #[arg(long, value_name = "TIME", conflicts_with = "days")]
        until: Option<TimeArg>,
    },
    /// List all tokens, including revoked.
    List {
        #[command(flatten)]
        db: DbFlag,
    },
    /// Revoke a token immediately.
    Revoke {
        #[command(flatten)]
        db: DbFlag,
        /// Token ID from `token list`.
        #[arg(value_name = "ID")]
        id: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct AuditFlags {
    #[command(flatten)]
    pub(crate) admin: crate::admin_client::AdminFlags,
    #[command(subcommand)]
    pub(crate) command: AuditCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum AuditCommand {
    /// List entries, newest first: of a server (--admin, with the token of an admin), or of --db.
    List {
        #[command(flatten)]
        db: OptionalDbFlag,
        /// Maximum number of entries; 0 lists all.
        #[arg(long, visible_alias = "limit", value_name = "N", default_value_t = 50)]
        max_results: usize,
        /// List only entries of this actor.
        #[arg(long, value_name = "NAME")]
        actor: Option<String>,
        /// List only entries whose action is this or starts with it and a dot, such as `quota` or `rules.publish`.
        #[arg(long, value_name = "ACTION")]
        action: Option<String>,
    },
    /// Verify the audit hash chain; exits 1 if an entry was altered, removed or inserted.
    Verify {
        #[command(flatten)]
        db: DbFlag,
    },
    /// Export all entries as NDJSON.
    Export {
        #[command(flatten)]
        db: DbFlag,
        /// Export only entries after this sequence number.
        #[arg(long, value_name = "SEQ", default_value_t = 0)]
        after: i64,
        /// Output file [default: standard output].
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct DbFlag {
    /// Control-plane database: sqlite:FILE or postgres://USER:PASSWORD@HOST/DATABASE.
    #[arg(long, env = "TOLLGATE_DB", hide_env_values = true, value_name = "DATABASE")]
    pub(crate) db: String,
}

#[derive(Debug, Args)]
pub(crate) struct OptionalDbFlag {
    /// Read the control-plane database itself, not a server: sqlite:FILE or postgres://USER:PASSWORD@HOST/DATABASE.
    #[arg(long, env = "TOLLGATE_DB", hide_env_values = true, value_name = "DATABASE")]
    pub(crate) db: Option<String>,
}

/// Everything here can also be set in the file of `--config`; a flag wins over the environment, that over the file.
#[derive(Clone, Debug, Args)]
pub(crate) struct ServeFlags {
    /// YAML file with these settings.
    #[arg(long, env = "TOLLGATE_CONFIG", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Rule file or directory of rule files; may be repeated. Changes take effect within a second.
    #[arg(long, env = "TOLLGATE_RULES", value_name = "PATH", value_delimiter = ',')]
    pub(crate) rules: Vec<PathBuf>,
    /// Counter store: memory, redis://, rediss://, redis+sentinel://h1,h2/name or redis+cluster://h1,h2 [default: memory].
    #[arg(long, env = "TOLLGATE_STORE", hide_env_values = true, value_name = "STORE")]
    pub(crate) store: Option<String>,
    /// File containing the store's password; or set TOLLGATE_STORE_PASSWORD.
    #[arg(long, env = "TOLLGATE_STORE_PASSWORD_FILE", value_name = "FILE")]
    pub(crate) store_password_file: Option<PathBuf>,
    /// Another store by name, such as eu=redis://10.0.0.1:6379, for rules that say `store: eu`; may be repeated. Requires a
    /// Redis --store.
    #[arg(
        long,
        env = "TOLLGATE_STORE_NAMED",
        hide_env_values = true,
        value_name = "NAME=ADDRESS",
        value_delimiter = ' '
    )]
    pub(crate) store_named: Vec<String>,
    /// Maximum time that a check waits for the store, in milliseconds [default: 10].
    #[arg(long, env = "TOLLGATE_STORE_DEADLINE_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=MAX_DEADLINE))]
    pub(crate) store_deadline_ms: Option<u64>,
    /// Distinct failures of a shard within the window, without an answer between them, that open its circuit breaker
    /// [default: 5].
    #[arg(long, env = "TOLLGATE_STORE_BREAKER_FAILURES", value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_FAILURES))]
    pub(crate) store_breaker_failures: Option<u64>,
    /// Window in which failures are counted, in milliseconds [default: 10000].
    #[arg(long, env = "TOLLGATE_STORE_BREAKER_WINDOW_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=DAY))]
    pub(crate) store_breaker_window_ms: Option<u64>,
    /// Time for which a shard must have said nothing before unanswered calls open its breaker, in milliseconds
    /// [default: 500].
    #[arg(long, env = "TOLLGATE_STORE_BREAKER_SILENCE_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=DAY))]
    pub(crate) store_breaker_silence_ms: Option<u64>,
    /// Longest pause between two background probes of a shard with an open breaker, in milliseconds; they begin at 100
    /// [default: 30000].
    #[arg(long, env = "TOLLGATE_STORE_BREAKER_OPEN_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=DAY))]
    pub(crate) store_breaker_open_ms: Option<u64>,
    /// Maximum time that `security` and `strict` limits without stored state count as exhausted after a failover that may
    /// have lost writes, in milliseconds; 0 disables this [default: until they have recovered, about one period].
    #[arg(long, env = "TOLLGATE_STORE_CAUTION_MS", value_name = "MS")]
    pub(crate) store_caution_ms: Option<u64>,
    /// Nodes sharing the store; in fallback each enforces 1/N of a limit [default: as many as are alive].
    #[arg(long, env = "TOLLGATE_NODES", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) nodes: Option<u32>,
    /// Fraction of a limit's burst that may be leased at once, with a Redis store [default: 0.25].
    #[arg(long, env = "TOLLGATE_LEASE_SHARE", value_name = "FRACTION")]
    pub(crate) lease_share: Option<f64>,
    /// Checks per second on this node above which a key is leased automatically, with a Redis store; 0 disables this
    /// [default: 1000].
    #[arg(long, env = "TOLLGATE_HOT_PER_SECOND", value_name = "N")]
    pub(crate) hot_per_second: Option<u64>,
    /// Maximum memory for counters, such as 512MiB [default: 512MiB].
    #[arg(long, env = "TOLLGATE_MEMORY", value_name = "SIZE", value_parser = parse_size)]
    pub(crate) memory: Option<usize>,
    /// Address of Envoy's rate limit service (gRPC), or `off` [default: 127.0.0.1:8081; off with `gateway`].
    #[arg(long, env = "TOLLGATE_GRPC", value_name = "ADDRESS|off")]
    pub(crate) grpc: Option<Listen>,
    /// Address of the HTTP API, or `off` [default: 127.0.0.1:8080; off with `gateway`].
    #[arg(long, env = "TOLLGATE_HTTP", value_name = "ADDRESS|off")]
    pub(crate) http: Option<Listen>,
    /// Address of the Redis protocol, or `off` [default: 127.0.0.1:6380 if free; off with `gateway`].
    #[arg(long, env = "TOLLGATE_RESP", value_name = "ADDRESS|off")]
    pub(crate) resp: Option<Listen>,
    #[command(flatten)]
    pub(crate) listener_tls: listener_tls::ListenerTlsFlags,
    /// File containing the password of the Redis protocol; or set TOLLGATE_RESP_PASSWORD.
    #[arg(long, env = "TOLLGATE_RESP_PASSWORD_FILE", value_name = "FILE")]
    pub(crate) resp_password_file: Option<PathBuf>,
    /// Control-plane database (sqlite:FILE or postgres://USER:PASSWORD@HOST/DATABASE); without it the admin API has
    /// live stats, decisions, usage and the active rules, but no quotas, measures, revisions or audit log.
    #[arg(long, env = "TOLLGATE_DB", hide_env_values = true, value_name = "DATABASE")]
    pub(crate) db: Option<String>,
    /// Days that the database keeps the history of rules and callers; 0 records none [default: 30].
    #[arg(long, env = "TOLLGATE_HISTORY_DAYS", value_name = "DAYS", value_parser = clap::value_parser!(u32).range(0..=3_650))]
    pub(crate) history_days: Option<u32>,
    /// Admin API and dashboard address, or `off` [default: 127.0.0.1:8082]. Addresses other than loopback require --db and a
    /// token.
    #[arg(long, env = "TOLLGATE_ADMIN", value_name = "ADDRESS|off")]
    pub(crate) admin: Option<Listen>,
    /// TLS certificate of the admin address (PEM); reloaded within a second when the file changes.
    #[arg(long, env = "TOLLGATE_ADMIN_TLS_CERT", value_name = "FILE")]
    pub(crate) admin_tls_cert: Option<PathBuf>,
    /// Private key of that certificate (PEM).
    #[arg(long, env = "TOLLGATE_ADMIN_TLS_KEY", value_name = "FILE")]
    pub(crate) admin_tls_key: Option<PathBuf>,
    /// CA bundle for operators' client certificates (mutual TLS); `admin_roles` in the file of --config maps their names to
    /// roles.
    #[arg(long, env = "TOLLGATE_ADMIN_CLIENT_CA", value_name = "FILE")]
    pub(crate) admin_client_ca: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) publishing: PublishingFlags,
    #[command(flatten)]
    pub(crate) xds: Box<XdsFlags>,
    #[command(flatten)]
    pub(crate) billing: BillingFlags,
    /// Name of this node in logs, metrics and node lists [default: host name].
    #[arg(long, env = "TOLLGATE_NODE", value_name = "NAME")]
    pub(crate) node: Option<String>,
    /// Region of this node in logs, metrics and node lists, and for limits that are shared between regions.
    #[arg(long, env = "TOLLGATE_REGION", value_name = "NAME")]
    pub(crate) region: Option<String>,
    #[command(flatten)]
    pub(crate) cells: CellFlags,
    /// Write the decision log as NDJSON to this file, which is rotated, or to `stdout`.
    #[arg(long, env = "TOLLGATE_DECISION_LOG", value_name = "FILE|stdout")]
    pub(crate) decision_log: Option<PathBuf>,
    /// Fraction of allowed decisions to log, from 0 to 1; denials are always logged [default: 0.001].
    #[arg(
        long,
        alias = "decision-log-allowed",
        env = "TOLLGATE_DECISION_LOG_ALLOWED_SAMPLE",
        value_name = "FRACTION"
    )]
    pub(crate) decision_log_allowed_sample: Option<f64>,
    /// OpenTelemetry collector (OTLP over HTTP) for spans of decisions in sampled traces, such as http://127.0.0.1:4318, or
    /// `off` [default: OTEL_EXPORTER_OTLP_ENDPOINT].
    #[arg(long, env = "TOLLGATE_OTLP", value_name = "URL|off")]
    pub(crate) otlp: Option<String>,
    #[command(flatten)]
    pub(crate) prometheus: PrometheusFlags,
    /// Mean time that checks wait for the store above which this process is overloaded and sheds checks by class, comfort first:
    /// their rules' `on_error` decides; 0 sheds none [default: half of --store-deadline-ms].
    #[arg(long, env = "TOLLGATE_SHED_WAIT_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(0..=60_000))]
    pub(crate) shed_wait_ms: Option<u64>,
    /// Arithmetic for all domains, overriding `profile` in rule files.
    #[arg(long, env = "TOLLGATE_PROFILE", value_name = "PROFILE")]
    pub(crate) profile: Option<ProfileName>,
    /// Shadow mode for all rules: count, deny nothing.
    #[arg(long, env = "TOLLGATE_GLOBAL_SHADOW", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) global_shadow: Option<bool>,
    /// What to do with requests whose domain has no rules [default: allow].
    #[arg(long, env = "TOLLGATE_UNKNOWN_DOMAIN", value_name = "POLICY")]
    pub(crate) unknown_domain: Option<UnknownDomainName>,
    /// Minimum level of log messages, and of single modules: info, or info,tollgate_store=debug.
    #[arg(long, env = "TOLLGATE_LOG", value_name = "LEVELS", default_value = "info")]
    pub(crate) log: LogFlag,
    /// Format of log messages.
    #[arg(long, env = "TOLLGATE_LOG_FORMAT", value_name = "FORMAT", default_value = "text")]
    pub(crate) log_format: LogFormat,
}

/// Format of log messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// Address of a listener, or `off`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(try_from = "String")]
pub(crate) enum Listen {
    Off,
    At(SocketAddr),
}

impl std::str::FromStr for Listen {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self::Off);
        }
        let wrong = || format!("`{text}` is not an address; use one such as 127.0.0.1:8080, or off");
        text.parse().map(Self::At).map_err(|_| wrong())
    }
}

impl TryFrom<String> for Listen {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ProfileName {
    /// All limits of a request in one atomic decision.
    Native,
    /// The arithmetic of envoyproxy/ratelimit.
    Envoy,
}

impl From<ProfileName> for tollgate_rules::Profile {
    fn from(name: ProfileName) -> Self {
        match name {
            ProfileName::Native => Self::Native,
            ProfileName::Envoy => Self::Envoy,
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum UnknownDomainName {
    /// Allow them, without a limit.
    #[default]
    Allow,
    /// Deny them.
    Deny,
}

impl From<UnknownDomainName> for tollgate_engine::UnknownDomain {
    fn from(name: UnknownDomainName) -> Self {
        match name {
            UnknownDomainName::Allow => Self::Allow,
            UnknownDomainName::Deny => Self::Deny,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct ValidateFlags {
    /// Rule files or directories of rule files.
    #[arg(required = true, value_name = "PATH")]
    pub(crate) paths: Vec<PathBuf>,
    /// Validate for this profile.
    #[arg(long, value_name = "PROFILE")]
    pub(crate) profile: Option<ProfileName>,
    /// Validate for a server with this configuration file: its stores, its cells, and what it knows of callers.
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) format: FormatFlags,
}

#[derive(Debug, Args)]
pub(crate) struct TestFlags {
    /// Test files, and directories: of these all *.test.yaml, also below.
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) format: FormatFlags,
}

pub(crate) fn parse_attribute(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE")?;
    if key.is_empty() {
        return Err("the key is empty; expected KEY=VALUE".to_owned());
    }
    Ok((key.to_owned(), value.to_owned()))
}

/// `512MiB`, `1GiB`, `64MB`, `1048576`.
pub(crate) fn parse_size(text: &str) -> Result<usize, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let scale: usize = match text[digits.len()..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kib" => 1 << 10,
        "m" | "mib" => 1 << 20,
        "g" | "gib" => 1 << 30,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        _ => return Err(format!("`{text}` is not a size; use one such as 512MiB or 2GiB")),
    };
    let number: usize =
        digits.parse().map_err(|_| format!("`{text}` is not a size; use one such as 512MiB"))?;
    number.checked_mul(scale).ok_or_else(|| format!("{text} exceeds the address space of this machine"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Every listener can be turned off on its own.
    #[test]
    fn every_address_can_be_off() {
        for flag in ["--grpc", "--http", "--resp", "--admin"] {
            for command in ["serve", "gateway"] {
                let cli = Cli::try_parse_from(["tollgate", command, flag, "off"]);
                assert!(cli.is_ok(), "{command} {flag} off: {cli:?}");
                assert!(
                    Cli::try_parse_from(["tollgate", command, flag, "of"]).is_err(),
                    "{command} {flag} of"
                );
            }
        }
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(parse_size("512MiB"), Ok(512 << 20));
        assert_eq!(parse_size("2GB"), Ok(2_000_000_000));
        assert_eq!(parse_size("4096"), Ok(4096));
        for wrong in ["", "MiB", "5 parsecs", "-1", "99999999999999999999GiB", "1.5GiB"] {
            assert!(parse_size(wrong).is_err(), "{wrong}");
        }
    }
}
