//! Certificates of links: each side shows its own and verifies the other's by one authority, for cells alone. The files
//! are read again when they change; connections stay.

use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ServerConfig};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use tollgate_http::tls::{FileWatch, authorities, certificates, private_key, provider};

/// Files with the certificate of this cell, its key, and the authority of all cells' certificates.
pub struct CellTls {
    files: [PathBuf; 3],
    current: Mutex<(FileWatch<3>, Arc<ServerConfig>, Arc<ClientConfig>)>,
}

impl CellTls {
    /// Reads the files, all in PEM format.
    ///
    /// # Errors
    /// The file that is invalid, and why.
    pub fn load(certificate: &Path, key: &Path, authority: &Path) -> Result<Self, String> {
        let watch = FileWatch::new([certificate, key, authority]);
        let (server, client) = configs([certificate, key, authority])?;
        let files = [certificate, key, authority].map(Path::to_owned);
        Ok(Self { files, current: Mutex::new((watch, server, client)) })
    }

    /// Returns the settings of both sides, from the last valid version of the files.
    pub(super) fn configs(&self) -> (Arc<ServerConfig>, Arc<ClientConfig>) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let paths = [0, 1, 2].map(|at| self.files[at].as_path());
        let (watch, server, client) = &mut *current;
        match watch.retry_if_changed(paths, || configs(paths)) {
            None => {}
            Some(Ok(read)) => {
                (*server, *client) = read;
                tracing::info!("certificates of cells reloaded");
            }
            Some(Err(error)) => {
                tracing::warn!(%error, "certificates of cells cannot be reloaded; keeping the previous ones");
            }
        }
        (Arc::clone(server), Arc::clone(client))
    }
}

type Configs = (Arc<ServerConfig>, Arc<ClientConfig>);

fn configs([certificate, key, authority]: [&Path; 3]) -> Result<Configs, String> {
    let roots = Arc::new(authorities(authority)?);
    let text = |error: &dyn std::fmt::Display| format!("{}: {error}", certificate.display());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), provider())
        .build()
        .map_err(|error| format!("{}: {error}", authority.display()))?;
    let server = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| text(&error))?
        .with_client_cert_verifier(verifier)
        .with_single_cert(certificates(certificate)?, private_key(key)?)
        .map_err(|error| text(&error))?;
    let client = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| text(&error))?
        .with_root_certificates(roots)
        .with_client_auth_cert(certificates(certificate)?, private_key(key)?)
        .map_err(|error| text(&error))?;
    Ok((Arc::new(server), Arc::new(client)))
}
