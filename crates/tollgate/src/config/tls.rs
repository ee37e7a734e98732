//! TLS of the gRPC and HTTP listeners: flags over the file of `--config`.

use std::path::PathBuf;
use tollgate_http::tls::{ClientAuth, ServerTlsConfig};

/// The settings of one listener, from flags or from the file of `--config`.
#[derive(Clone, Debug, Default)]
pub(crate) struct ListenerTls {
    pub(crate) cert: Option<PathBuf>,
    pub(crate) key: Option<PathBuf>,
    pub(crate) client_ca: Option<PathBuf>,
    pub(crate) client_name: Option<String>,
}

/// Returns the TLS of a listener, if it has some.
pub(super) fn read(
    listener: &str,
    flags: &ListenerTls,
    file: &ListenerTls,
) -> anyhow::Result<Option<ServerTlsConfig>> {
    let certificate = flags.cert.clone().or_else(|| file.cert.clone());
    let key = flags.key.clone().or_else(|| file.key.clone());
    let authority = flags.client_ca.clone().or_else(|| file.client_ca.clone());
    let name = flags.client_name.clone().or_else(|| file.client_name.clone());
    let (certificate, key) = match (certificate, key) {
        (Some(certificate), Some(key)) => (certificate, key),
        (None, None) => {
            anyhow::ensure!(
                authority.is_none() && name.is_none(),
                "--{listener}-client-ca and --{listener}-client-name require --{listener}-tls-cert and --{listener}-tls-key"
            );
            return Ok(None);
        }
        _ => anyhow::bail!("--{listener}-tls-cert and --{listener}-tls-key must be set together"),
    };
    let clients = match (authority, name) {
        (Some(authority), name) => ClientAuth::Required { authority, name },
        (None, None) => ClientAuth::None,
        (None, Some(_)) => anyhow::bail!("--{listener}-client-name requires --{listener}-client-ca"),
    };
    Ok(Some(ServerTlsConfig { certificate, key, clients }))
}
