//! TLS of a listener: its certificate and the authorities of its clients, both reloaded when their files change. Every
//! listener of the process uses it: HTTP, gRPC, the gateway and the admin API.
//!
//! Clients may be required to prove who they are. Their certificate is verified in the handshake; whether it bears a
//! wanted name is checked after it, before anything is read from the connection.

use super::names::Names;
use super::{FileWatch, ServerCertificate, authorities, provider};
use arc_swap::ArcSwap;
use rustls::pki_types::CertificateDer;
use rustls::server::WebPkiClientVerifier;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio_rustls::TlsAcceptor;

const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Number of checks after which a refused client is reported again.
const QUIET_CHECKS: u32 = 60;

/// What a listener asks of its clients.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ClientAuth {
    /// Nothing.
    #[default]
    None,
    /// A certificate of an authority in this file, if they have one.
    Optional(PathBuf),
    /// A certificate of an authority in this file.
    Required {
        /// Certificates of the authorities (PEM).
        authority: PathBuf,
        /// Name that the certificate must be valid for: as a host name, or written the same, such as `*.example.com`.
        name: Option<String>,
    },
}

impl ClientAuth {
    fn authority(&self) -> Option<&Path> {
        match self {
            Self::None => None,
            Self::Optional(authority) | Self::Required { authority, .. } => Some(authority),
        }
    }
}

/// Files and protocols of a TLS listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerTlsConfig {
    /// Certificate chain (PEM).
    pub certificate: PathBuf,
    /// Private key (PEM).
    pub key: PathBuf,
    /// What is asked of clients.
    pub clients: ClientAuth,
}

/// Server-side TLS.
pub struct ServerTls {
    certificate: Arc<ServerCertificate>,
    clients: ClientAuth,
    /// Changes of the file with the clients' authorities.
    watch: Mutex<FileWatch<1>>,
    protocols: &'static [&'static [u8]],
    acceptor: ArcSwap<TlsAcceptor>,
    /// Whether a refused client was reported a short time ago.
    has_warned: AtomicBool,
}

impl ServerTls {
    /// Loads the files. `protocols` are offered by ALPN, the preferred one first.
    ///
    /// # Errors
    /// The file that is invalid, and why.
    pub fn new(config: &ServerTlsConfig, protocols: &'static [&'static [u8]]) -> Result<Arc<Self>, String> {
        let certificate = ServerCertificate::load(&config.certificate, &config.key)?;
        let clients = config.clients.clone();
        let watch = Mutex::new(FileWatch::new([clients.authority().unwrap_or(Path::new(""))]));
        let acceptor = ArcSwap::from_pointee(acceptor(&certificate, &clients, protocols)?);
        Ok(Arc::new(Self {
            certificate,
            clients,
            watch,
            protocols,
            acceptor,
            has_warned: AtomicBool::new(false),
        }))
    }

    /// Returns the acceptor for the next connection.
    #[must_use]
    pub fn acceptor(&self) -> Arc<TlsAcceptor> {
        self.acceptor.load_full()
    }

    /// Checks the client's certificates after a handshake in which they were verified. A client that is refused is
    /// reported, but not more than once a minute: callers who fail open would else not notice.
    ///
    /// # Errors
    /// The certificate is not valid for the wanted name.
    pub fn check_client(&self, certificates: Option<&[CertificateDer<'_>]>) -> io::Result<()> {
        let ClientAuth::Required { name: Some(name), .. } = &self.clients else { return Ok(()) };
        let own = certificates.and_then(<[_]>::first).map(Names::of).unwrap_or_default();
        if own.include(name) {
            return Ok(());
        }
        let wrong = format!("the client's certificate is valid for {own}, not for {name}");
        if !self.has_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!("connection refused: {wrong}");
        }
        Err(io::Error::new(io::ErrorKind::PermissionDenied, wrong))
    }

    /// Checks every second for a new certificate and changed authorities of clients.
    pub async fn watch(&self) {
        loop {
            for _ in 0..QUIET_CHECKS {
                tokio::time::sleep(CHECK_INTERVAL).await;
                self.certificate.refresh();
                self.refresh_clients();
            }
            self.has_warned.store(false, Ordering::Relaxed);
        }
    }

    fn refresh_clients(&self) {
        let Some(path) = self.clients.authority() else { return };
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        match watch.retry_if_changed([path], || acceptor(&self.certificate, &self.clients, self.protocols)) {
            None => {}
            Some(Ok(acceptor)) => {
                // Earlier TLS sessions are not resumed: they were established under the old file.
                self.acceptor.store(Arc::new(acceptor));
                tracing::info!(file = %path.display(), "client CA reloaded");
            }
            Some(Err(error)) => tracing::warn!(error, "client CA reload failed; keeping the previous one"),
        }
    }
}

/// Waits for changes of a listener's files; forever without TLS.
pub async fn watch(tls: Option<&ServerTls>) {
    match tls {
        Some(tls) => tls.watch().await,
        None => std::future::pending().await,
    }
}

fn acceptor(
    certificate: &Arc<ServerCertificate>,
    clients: &ClientAuth,
    protocols: &[&[u8]],
) -> Result<TlsAcceptor, String> {
    let builder = rustls::ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let builder = match clients.authority() {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let roots = Arc::new(authorities(path)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider());
            let verifier = match clients {
                ClientAuth::Required { .. } => verifier,
                ClientAuth::None | ClientAuth::Optional(_) => verifier.allow_unauthenticated(),
            };
            let verifier = verifier.build().map_err(|error| format!("{}: {error}", path.display()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut server = builder.with_cert_resolver(Arc::clone(certificate) as _);
    server.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(TlsAcceptor::from(Arc::new(server)))
}

impl std::fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ServerTls")
    }
}
