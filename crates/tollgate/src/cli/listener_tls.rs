//! Flags for TLS of the gRPC and HTTP listeners.

use crate::config::tls::ListenerTls;
use clap::Args;
use std::path::PathBuf;

#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ListenerTlsFlags {
    /// TLS certificate of the gRPC address (PEM); reloaded within a second when the file changes.
    #[arg(long, env = "TOLLGATE_GRPC_TLS_CERT", value_name = "FILE")]
    pub(crate) grpc_tls_cert: Option<PathBuf>,
    /// Private key of that certificate (PEM).
    #[arg(long, env = "TOLLGATE_GRPC_TLS_KEY", value_name = "FILE")]
    pub(crate) grpc_tls_key: Option<PathBuf>,
    /// CA bundle of gRPC clients, which must then show a certificate (mutual TLS).
    #[arg(long, env = "TOLLGATE_GRPC_CLIENT_CA", value_name = "FILE")]
    pub(crate) grpc_client_ca: Option<PathBuf>,
    /// DNS name that the certificate of a gRPC client must be valid for.
    #[arg(long, env = "TOLLGATE_GRPC_CLIENT_NAME", value_name = "NAME")]
    pub(crate) grpc_client_name: Option<String>,
    /// TLS certificate of the HTTP address (PEM); reloaded within a second when the file changes.
    #[arg(long, env = "TOLLGATE_HTTP_TLS_CERT", value_name = "FILE")]
    pub(crate) http_tls_cert: Option<PathBuf>,
    /// Private key of that certificate (PEM).
    #[arg(long, env = "TOLLGATE_HTTP_TLS_KEY", value_name = "FILE")]
    pub(crate) http_tls_key: Option<PathBuf>,
    /// CA bundle of HTTP clients, which must then show a certificate (mutual TLS).
    #[arg(long, env = "TOLLGATE_HTTP_CLIENT_CA", value_name = "FILE")]
    pub(crate) http_client_ca: Option<PathBuf>,
    /// DNS name that the certificate of an HTTP client must be valid for.
    #[arg(long, env = "TOLLGATE_HTTP_CLIENT_NAME", value_name = "NAME")]
    pub(crate) http_client_name: Option<String>,
}

impl ListenerTlsFlags {
    pub(crate) fn grpc(&self) -> ListenerTls {
        ListenerTls {
            cert: self.grpc_tls_cert.clone(),
            key: self.grpc_tls_key.clone(),
            client_ca: self.grpc_client_ca.clone(),
            client_name: self.grpc_client_name.clone(),
        }
    }

    pub(crate) fn http(&self) -> ListenerTls {
        ListenerTls {
            cert: self.http_tls_cert.clone(),
            key: self.http_tls_key.clone(),
            client_ca: self.http_client_ca.clone(),
            client_name: self.http_client_name.clone(),
        }
    }
}
