//! The command line. Raw words become typed values here, once.

use crate::server::logging::LogFlag;
mod format;
mod publishing;

pub(crate) use format::{FormatFlags, print, print_line};
pub(crate) use publishing::{GuardrailSection, PublishingFlags, RulesFromName};

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::net::SocketAddr;
use std::path::PathBuf;

/// The longest deadline of a check, in milliseconds.
pub(crate) const MAX_DEADLINE: u64 = 10_000;
/// The most failures that a breaker remembers.
pub(crate) const MAX_FAILURES: u64 = 1_000_000;
/// A day, in milliseconds.
pub(crate) const DAY: u64 = 86_400_000;

/// A rate limiter that decides, for every request, whether it may pass.
#[derive(Debug, Parser)]
#[command(name = "tollgate", version, about, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Answer requests. With no flags: in memory, by sample rules, on loopback.
    Serve(Box<ServeFlags>),
    /// Stand before an API: pass on what may pass. Needs --config with a `gateway` section.
    Gateway(Box<ServeFlags>),
    /// Check rule files: errors and lint warnings with line and column. Exits with 1 on errors.
    Check(CheckFlags),
    /// Print the JSON schema of rule files, for editors: it is JSON whatever is asked for.
    Schema(FormatFlags),
    /// Say which rules a request meets, and why it does not meet the others.
    Explain(ExplainFlags),
    /// Run unit tests of rule files, on a clock that only the tests move.
    Test(TestFlags),
    /// Make, list and revoke tokens for the admin API.
    Token(TokenFlags),
    /// Look at the log of what operators changed.
    Audit(AuditFlags),
    /// Publish rules, look at revisions of them, and go back, by way of a running server.
    Rules(crate::commands::rules::RulesFlags),
    /// What is agreed with single callers: get, set, list, delete, import, export.
    Quota(Box<crate::commands::quota::QuotaFlags>),
    /// What a caller has used of its limits; `reset` gives it back, `grant` gives more, once.
    Usage(Box<crate::commands::usage::UsageFlags>),
    /// Act at once, on every node: block, tighten, exempt, disable-rule, allow-all, shadow-all; list, renew, end.
    Emergency(Box<crate::commands::emergency::EmergencyFlags>),
    /// Say why a request was denied or allowed: which rule, its limit and counter then, and when it would have passed.
    Why(Box<crate::commands::why::WhyFlags>),
    /// Watch a running server: rates, denials, who asks most, breakers. Once, where there is no terminal.
    Top(Box<crate::commands::top::TopFlags>),
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
    /// Make a token, and print it: it cannot be had again.
    Create {
        #[command(flatten)]
        db: DbFlag,
        /// For whom: the name in the audit log.
        #[arg(long, value_name = "NAME")]
        name: String,
        /// What it may do: viewer, operator or admin.
        #[arg(long, value_name = "ROLE")]
        role: tollgate_control::Role,
        /// For how many days it is valid; 0 is for ever.
        #[arg(long, value_name = "N", default_value_t = 365, value_parser = clap::value_parser!(u32).range(0..=36_500))]
        days: u32,
    },
    /// All tokens there ever were.
    List {
        #[command(flatten)]
        db: DbFlag,
    },
    /// Make a token worthless, at once.
    Revoke {
        #[command(flatten)]
        db: DbFlag,
        /// The id that `list` shows.
        #[arg(value_name = "ID")]
        id: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct AuditFlags {
    #[command(flatten)]
    pub(crate) format: FormatFlags,
    #[command(subcommand)]
    pub(crate) command: AuditCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum AuditCommand {
    /// Check that no entry was altered, removed or slipped in. Exits with 1 if one was.
    Verify {
        #[command(flatten)]
        db: DbFlag,
    },
    /// All entries in order, one JSON text a line.
    Export {
        #[command(flatten)]
        db: DbFlag,
        /// Those after this one alone.
        #[arg(long, value_name = "SEQ", default_value_t = 0)]
        after: i64,
        /// Write to this file; to the output unless set.
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct DbFlag {
    /// The database: sqlite:FILE or postgres://USER:PASSWORD@HOST/DATABASE.
    #[arg(long, env = "TOLLGATE_DB", hide_env_values = true, value_name = "DATABASE")]
    pub(crate) db: String,
}

/// Everything here can also be set in the file of `--config`; a flag wins over the environment, that over the file.
#[derive(Clone, Debug, Args)]
pub(crate) struct ServeFlags {
    /// A YAML file with these settings.
    #[arg(long, env = "TOLLGATE_CONFIG", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// A rule file, or a directory of them; may be repeated. Changes act within a second.
    #[arg(long, env = "TOLLGATE_RULES", value_name = "PATH", value_delimiter = ',')]
    pub(crate) rules: Vec<PathBuf>,
    /// Where counters live: memory, or redis://, rediss://, redis+sentinel://h1,h2/name, redis+cluster://h1,h2.
    #[arg(long, env = "TOLLGATE_STORE", hide_env_values = true, value_name = "STORE")]
    pub(crate) store: Option<String>,
    /// A file that holds the store's password and nothing else; or set TOLLGATE_STORE_PASSWORD.
    #[arg(long, env = "TOLLGATE_STORE_PASSWORD_FILE", value_name = "FILE")]
    pub(crate) store_password_file: Option<PathBuf>,
    /// The longest that a check waits for the store, in milliseconds; 10 unless set.
    #[arg(long, env = "TOLLGATE_STORE_DEADLINE_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=MAX_DEADLINE))]
    pub(crate) store_deadline_ms: Option<u64>,
    /// So many failures of a Redis server within the window open its breaker: it is left alone; 5 unless set.
    #[arg(long, env = "TOLLGATE_STORE_BREAKER_FAILURES", value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_FAILURES))]
    pub(crate) store_breaker_failures: Option<u64>,
    /// The window in which those failures are counted, in milliseconds; 10000 unless set.
    #[arg(long, env = "TOLLGATE_STORE_BREAKER_WINDOW_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=DAY))]
    pub(crate) store_breaker_window_ms: Option<u64>,
    /// How long an open breaker waits before one check tries again, in milliseconds; 30000 unless set.
    #[arg(long, env = "TOLLGATE_STORE_BREAKER_OPEN_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=DAY))]
    pub(crate) store_breaker_open_ms: Option<u64>,
    /// The longest that `security` and `strict` limits of which nothing is known count as used up after a failover that may
    /// have lost writes, in milliseconds; 0 is not at all. Unless set: until they have recovered, in about a period.
    #[arg(long, env = "TOLLGATE_STORE_CAUTION_MS", value_name = "MS")]
    pub(crate) store_caution_ms: Option<u64>,
    /// How many nodes share the store: each decides by that share of a limit when the store is away.
    #[arg(long, env = "TOLLGATE_NODES", value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) nodes: Option<u32>,
    /// The part of a limit's burst that may be out in leases at once, with a Redis store (default 0.25).
    #[arg(long, env = "TOLLGATE_LEASE_SHARE", value_name = "PART")]
    pub(crate) lease_share: Option<f64>,
    /// Checks a second at this node from which on a key is leased by itself, with a Redis store; 0 is never (default 1000).
    #[arg(long, env = "TOLLGATE_HOT_PER_SECOND", value_name = "N")]
    pub(crate) hot_per_second: Option<u64>,
    /// The most memory that counters may take, such as 512MiB.
    #[arg(long, env = "TOLLGATE_MEMORY", value_name = "SIZE", value_parser = parse_size)]
    pub(crate) memory: Option<usize>,
    /// Where Envoy's rate limit service listens, or `off`.
    #[arg(long, env = "TOLLGATE_GRPC", value_name = "ADDRESS|off")]
    pub(crate) grpc: Option<Listen>,
    /// Where HTTP listens, or `off`.
    #[arg(long, env = "TOLLGATE_HTTP", value_name = "ADDRESS|off")]
    pub(crate) http: Option<Listen>,
    /// Where the Redis protocol listens, or `off`.
    #[arg(long, env = "TOLLGATE_RESP", value_name = "ADDRESS|off")]
    pub(crate) resp: Option<Listen>,
    /// A file that holds the password of the Redis protocol and nothing else; or set TOLLGATE_RESP_PASSWORD.
    #[arg(long, env = "TOLLGATE_RESP_PASSWORD_FILE", value_name = "FILE")]
    pub(crate) resp_password_file: Option<PathBuf>,
    /// What operators decide is kept here: sqlite:FILE, or postgres://USER:PASSWORD@HOST/DATABASE for several nodes.
    /// Without it nothing can be changed at the admin address.
    #[arg(long, env = "TOLLGATE_DB", hide_env_values = true, value_name = "DATABASE")]
    pub(crate) db: Option<String>,
    /// Where operators come in (metrics, the decision log, the admin API), or `off`; 127.0.0.1:8082 unless set. Elsewhere
    /// than on loopback it needs --db and a token.
    #[arg(long, env = "TOLLGATE_ADMIN", value_name = "ADDRESS|off")]
    pub(crate) admin: Option<Listen>,
    /// A certificate for the admin address, in PEM form: it then speaks TLS. Changed files act within a second.
    #[arg(long, env = "TOLLGATE_ADMIN_TLS_CERT", value_name = "FILE")]
    pub(crate) admin_tls_cert: Option<PathBuf>,
    /// The key of that certificate.
    #[arg(long, env = "TOLLGATE_ADMIN_TLS_KEY", value_name = "FILE")]
    pub(crate) admin_tls_key: Option<PathBuf>,
    /// Operators may prove who they are by certificates of this authority; `admin_roles` in the file of --config says what
    /// their names may do.
    #[arg(long, env = "TOLLGATE_ADMIN_CLIENT_CA", value_name = "FILE")]
    pub(crate) admin_client_ca: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) publishing: PublishingFlags,
    /// This node's name in logs and metrics; the machine's unless set.
    #[arg(long, env = "TOLLGATE_NODE", value_name = "NAME")]
    pub(crate) node: Option<String>,
    /// The region that this node is in, as logs, metrics and lists of nodes tell it.
    #[arg(long, env = "TOLLGATE_REGION", value_name = "NAME")]
    pub(crate) region: Option<String>,
    /// Write decisions as lines of JSON: to this file, which is rotated, or to `stdout`.
    #[arg(long, env = "TOLLGATE_DECISION_LOG", value_name = "FILE|stdout")]
    pub(crate) decision_log: Option<PathBuf>,
    /// The part of allowed decisions that is logged, from 0 to 1; 0.001 unless set. Denials are all logged.
    #[arg(long, env = "TOLLGATE_DECISION_LOG_ALLOWED", value_name = "PART")]
    pub(crate) decision_log_allowed: Option<f64>,
    /// Send a span of each decision whose caller follows a sampled trace to this OpenTelemetry collector, over HTTP, such as
    /// http://127.0.0.1:4318; or `off`. OTEL_EXPORTER_OTLP_ENDPOINT unless set.
    #[arg(long, env = "TOLLGATE_OTLP", value_name = "URL|off")]
    pub(crate) otlp: Option<String>,
    /// Decide all domains by this arithmetic, whatever their files say.
    #[arg(long, env = "TOLLGATE_PROFILE", value_name = "PROFILE")]
    pub(crate) profile: Option<ProfileName>,
    /// Count and tell, but deny nothing.
    #[arg(long, env = "TOLLGATE_GLOBAL_SHADOW", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) global_shadow: Option<bool>,
    /// The least important messages to log, and those of single modules: info, or info,tollgate_store=debug.
    #[arg(long, env = "TOLLGATE_LOG", value_name = "LEVELS", default_value = "info")]
    pub(crate) log: LogFlag,
    /// How messages are written: text for people, json for machines.
    #[arg(long, env = "TOLLGATE_LOG_FORMAT", value_name = "FORMAT", default_value = "text")]
    pub(crate) log_format: LogFormat,
}

/// How messages are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// Where a front listens, if it does.
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
        let wrong = || format!("`{text}` is no address; write one such as 127.0.0.1:8080, or off");
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
    /// Tollgate's own: all limits of a request in one atomic decision.
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

#[derive(Debug, Args)]
pub(crate) struct CheckFlags {
    /// Rule files, or directories of them.
    #[arg(required = true, value_name = "PATH")]
    pub(crate) paths: Vec<PathBuf>,
    /// Check as this profile would read them.
    #[arg(long, value_name = "PROFILE")]
    pub(crate) profile: Option<ProfileName>,
    #[command(flatten)]
    pub(crate) format: FormatFlags,
}

#[derive(Debug, Args)]
pub(crate) struct ExplainFlags {
    /// A rule file, or a directory of them; may be repeated.
    #[arg(long, required = true, value_name = "PATH")]
    pub(crate) rules: Vec<PathBuf>,
    /// An attribute of the request; may be repeated.
    #[arg(long = "attr", value_name = "KEY=VALUE", value_parser = parse_attribute)]
    pub(crate) attributes: Vec<(String, String)>,
    /// The domain; not needed where there is only one.
    #[arg(long, value_name = "NAME")]
    pub(crate) domain: Option<String>,
    /// Explain by this profile.
    #[arg(long, value_name = "PROFILE")]
    pub(crate) profile: Option<ProfileName>,
    #[command(flatten)]
    pub(crate) format: FormatFlags,
}

#[derive(Debug, Args)]
pub(crate) struct TestFlags {
    /// Test files.
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) format: FormatFlags,
}

pub(crate) fn parse_attribute(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write key=value")?;
    if key.is_empty() {
        return Err("the key is empty; write key=value".to_owned());
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
        _ => return Err(format!("`{text}` is no size; write one such as 512MiB or 2GiB")),
    };
    let number: usize =
        digits.parse().map_err(|_| format!("`{text}` is no size; write one such as 512MiB"))?;
    number.checked_mul(scale).ok_or_else(|| format!("{text} is more than this machine can address"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Whoever needs only one front can do without the others.
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
