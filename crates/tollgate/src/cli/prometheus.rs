//! Settings of the Prometheus that is asked for signals.

use clap::Args;
use std::path::PathBuf;

#[derive(Clone, Debug, Args)]
pub(crate) struct PrometheusFlags {
    /// Prometheus, or a server with its query API, that is asked for the signals with a `query` in the rules
    /// (`overload.adapt`), such as http://127.0.0.1:9090.
    #[arg(long, env = "TOLLGATE_PROMETHEUS", value_name = "URL")]
    pub(crate) prometheus: Option<String>,
    /// File containing the bearer token for it.
    #[arg(long, env = "TOLLGATE_PROMETHEUS_TOKEN_FILE", value_name = "FILE")]
    pub(crate) prometheus_token_file: Option<PathBuf>,
    /// CA bundle for an https:// address [default: the system's].
    #[arg(long, env = "TOLLGATE_PROMETHEUS_CA", value_name = "FILE")]
    pub(crate) prometheus_ca: Option<PathBuf>,
}

/// The same in the file of `--config`: `prometheus`.
#[derive(Clone, Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PrometheusSection {
    pub(crate) url: Option<String>,
    pub(crate) token_file: Option<PathBuf>,
    pub(crate) ca: Option<PathBuf>,
}
