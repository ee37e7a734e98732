//! Flags of the xDS client.

use super::parse_size;
use clap::Args;
use std::path::PathBuf;

/// Longest pause between streams, in milliseconds.
pub(crate) const MAX_PAUSE: u64 = 3_600_000;

#[derive(Clone, Debug, Args)]
pub(crate) struct XdsFlags {
    /// Management server that rules come from, with --rules-from xds, such as envoy-gateway:18001 or unix:/run/xds.sock.
    #[arg(long, env = "TOLLGATE_XDS_SERVER", value_name = "HOST:PORT")]
    pub(crate) xds_server: Option<String>,
    /// Node ID sent to the management server, which has one set of rules for each [default: default].
    #[arg(long, env = "TOLLGATE_XDS_NODE_ID", value_name = "ID")]
    pub(crate) xds_node_id: Option<String>,
    /// Node metadata sent to the management server; may be repeated.
    #[arg(long, env = "TOLLGATE_XDS_NODE_METADATA", value_name = "KEY=VALUE", value_delimiter = ',', value_parser = super::parse_attribute)]
    pub(crate) xds_node_metadata: Vec<(String, String)>,
    /// Header of the call to the management server; may be repeated. Values may be secret: prefer the variable.
    #[arg(
        long,
        env = "TOLLGATE_XDS_HEADER",
        hide_env_values = true,
        value_name = "NAME=VALUE",
        value_delimiter = ','
    )]
    pub(crate) xds_header: Vec<String>,
    /// TLS to the management server, with the system's certificate authorities; implied by the next four.
    #[arg(long, env = "TOLLGATE_XDS_TLS", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) xds_tls: Option<bool>,
    /// CA bundle of the management server (PEM), besides the system's; read at each connect.
    #[arg(long, env = "TOLLGATE_XDS_TLS_CA", value_name = "FILE")]
    pub(crate) xds_tls_ca: Option<PathBuf>,
    /// Client certificate for the management server (PEM); read at each connect.
    #[arg(long, env = "TOLLGATE_XDS_TLS_CERT", value_name = "FILE")]
    pub(crate) xds_tls_cert: Option<PathBuf>,
    /// Private key of that certificate (PEM).
    #[arg(long, env = "TOLLGATE_XDS_TLS_KEY", value_name = "FILE")]
    pub(crate) xds_tls_key: Option<PathBuf>,
    /// Name in the certificate of the management server [default: the host of --xds-server].
    #[arg(long, env = "TOLLGATE_XDS_TLS_NAME", value_name = "NAME")]
    pub(crate) xds_tls_name: Option<String>,
    /// First pause before a broken stream is opened again, in milliseconds; it doubles, with jitter [default: 500].
    #[arg(long, env = "TOLLGATE_XDS_RETRY_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=MAX_PAUSE))]
    pub(crate) xds_retry_ms: Option<u64>,
    /// Longest such pause, in milliseconds [default: 10000].
    #[arg(long, env = "TOLLGATE_XDS_MAX_RETRY_MS", value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=MAX_PAUSE))]
    pub(crate) xds_max_retry_ms: Option<u64>,
    /// Maximum size of a response of the management server, such as 16MiB [default: 4MiB].
    #[arg(long, env = "TOLLGATE_XDS_MAX_MESSAGE", value_name = "SIZE", value_parser = parse_size)]
    pub(crate) xds_max_message: Option<usize>,
    /// Open the listeners only after the first response of the management server; `false` starts with the rules of files
    /// alone [default: true].
    #[arg(long, env = "TOLLGATE_XDS_WAIT", value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub(crate) xds_wait: Option<bool>,
}
