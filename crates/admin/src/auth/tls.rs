//! TLS for the admin listener, with optional client certificates. A client without a certificate may still send a
//! token.

use arc_swap::ArcSwap;
use rustls::pki_types::CertificateDer;
use rustls::server::WebPkiClientVerifier;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio_rustls::TlsAcceptor;
use tollgate_http::tls::{FileWatch, ServerCertificate, authorities, provider};

const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Server-side TLS configuration.
pub struct AdminTls {
    certificate: Arc<ServerCertificate>,
    /// The client CA file.
    client_ca: Option<(PathBuf, Mutex<FileWatch<1>>)>,
    acceptor: ArcSwap<TlsAcceptor>,
}

/// The client at the other end of a connection; an extension of its requests.
#[derive(Clone, Debug)]
pub(crate) struct ClientPeer {
    pub(crate) address: IpAddr,
    /// Whether the connection uses TLS.
    pub(crate) encrypted: bool,
    /// Names that the client certificate proves, if one was presented.
    pub(crate) names: Arc<[String]>,
}

impl AdminTls {
    /// Loads a certificate and its key, and optionally the CA of client certificates.
    ///
    /// # Errors
    /// The invalid file, and the reason.
    pub fn new(certificate: &Path, key: &Path, client_ca_path: Option<&Path>) -> Result<Self, String> {
        let certificate = ServerCertificate::load(certificate, key)?;
        let client_ca = client_ca_path.map(|path| (path.to_owned(), Mutex::new(FileWatch::new([path]))));
        let acceptor = ArcSwap::from_pointee(acceptor(&certificate, client_ca_path)?);
        Ok(Self { certificate, client_ca, acceptor })
    }

    /// Returns the acceptor for the next connection.
    pub(crate) fn acceptor(&self) -> Arc<TlsAcceptor> {
        self.acceptor.load_full()
    }

    /// Checks every second for a new certificate and a changed client CA file.
    pub(crate) async fn watch(&self) {
        loop {
            tokio::time::sleep(CHECK_INTERVAL).await;
            self.certificate.refresh();
            self.refresh_client_ca();
        }
    }

    fn refresh_client_ca(&self) {
        let Some((path, seen)) = &self.client_ca else { return };
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        match seen.retry_if_changed([path], || acceptor(&self.certificate, Some(path))) {
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

fn acceptor(certificate: &Arc<ServerCertificate>, client_ca: Option<&Path>) -> Result<TlsAcceptor, String> {
    let builder = rustls::ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let builder = match client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let roots = Arc::new(authorities(path)?);
            let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
                .allow_unauthenticated()
                .build()
                .map_err(|error| format!("{}: {error}", path.display()))?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut server = builder.with_cert_resolver(Arc::clone(certificate) as _);
    server.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(server)))
}

impl std::fmt::Debug for AdminTls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AdminTls")
    }
}

impl ClientPeer {
    pub(crate) fn plain(address: IpAddr) -> Self {
        Self { address, encrypted: false, names: Arc::default() }
    }

    /// Creates a peer after a handshake in which its certificates were verified.
    pub(crate) fn over_tls(address: IpAddr, certificates: Option<&[CertificateDer<'_>]>) -> Self {
        let names = certificates.and_then(<[_]>::first).map(names).unwrap_or_default();
        Self { address, encrypted: true, names: names.into() }
    }
}

/// Returns the certificate's `subjectAltName` entries: host names, and URIs such as `spiffe://…`.
fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok(certificate) = webpki::EndEntityCert::try_from(certificate) else { return Vec::new() };
    let hosts = certificate.valid_dns_names().map(str::to_owned);
    hosts.chain(certificate.valid_uri_names().map(str::to_owned)).collect()
}
