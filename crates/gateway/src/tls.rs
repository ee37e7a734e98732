//! TLS on both sides. A listener's certificate is read again when its files change, without a connection being dropped.

use crate::config::{ServerTlsConfig, UpstreamProtocol, UpstreamTlsConfig};
use crate::io::Io;
use arc_swap::ArcSwap;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

const GLANCE: Duration = Duration::from_secs(1);

/// The certificate that acts now.
#[derive(Debug)]
struct Current(ArcSwap<CertifiedKey>);

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

/// A listener's side.
pub(crate) struct ServerTls {
    current: Arc<Current>,
    pub(crate) acceptor: TlsAcceptor,
    config: ServerTlsConfig,
}

impl ServerTls {
    pub(crate) fn new(config: &ServerTlsConfig) -> Result<Self, String> {
        let current = Arc::new(Current(ArcSwap::from_pointee(certified(config)?)));
        let builder = rustls::ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        let mut server = builder.with_no_client_auth().with_cert_resolver(Arc::clone(&current) as _);
        server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Self { current, acceptor: TlsAcceptor::from(Arc::new(server)), config: config.clone() })
    }

    /// Looks at the files every second, and takes what they hold when they have changed and are good.
    pub(crate) async fn watch(&self) {
        let mut seen = self.glimpse();
        loop {
            tokio::time::sleep(GLANCE).await;
            let now = self.glimpse();
            if now == seen {
                continue;
            }
            match certified(&self.config) {
                Ok(certified) => {
                    seen = now;
                    self.current.0.store(Arc::new(certified));
                    tracing::info!(certificate = %self.config.certificate.display(), "a new certificate acts");
                }
                // Files are written one after the other: this may be half of a change.
                Err(error) => tracing::warn!("{error}; the last good certificate stays"),
            }
        }
    }

    fn glimpse(&self) -> [Option<(u64, SystemTime)>; 2] {
        [&self.config.certificate, &self.config.key].map(|path| {
            let seen = std::fs::metadata(path).ok()?;
            Some((seen.len(), seen.modified().ok()?))
        })
    }
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let wrong = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let all = CertificateDer::pem_file_iter(path).map_err(|error| wrong(&error))?;
    let all = all.collect::<Result<Vec<_>, _>>().map_err(|error| wrong(&error))?;
    if all.is_empty() { Err(wrong(&"there is no certificate in PEM form")) } else { Ok(all) }
}

fn certified(config: &ServerTlsConfig) -> Result<CertifiedKey, String> {
    let chain = certificates(&config.certificate)?;
    let key = PrivateKeyDer::from_pem_file(&config.key)
        .map_err(|error| format!("{}: {error}", config.key.display()))?;
    CertifiedKey::from_der(chain, key, &provider()).map_err(|error| {
        format!("{} and {} do not make a pair: {error}", config.certificate.display(), config.key.display())
    })
}

/// An upstream's side.
#[derive(Clone)]
pub(crate) struct ClientTls {
    connector: TlsConnector,
    name: Option<ServerName<'static>>,
}

impl ClientTls {
    pub(crate) fn new(config: &UpstreamTlsConfig, protocol: UpstreamProtocol) -> Result<Self, String> {
        let mut roots = rustls::RootCertStore::empty();
        match &config.ca {
            Some(path) => {
                for certificate in certificates(path)? {
                    roots.add(certificate).map_err(|error| format!("{}: {error}", path.display()))?;
                }
            }
            None => {
                for certificate in rustls_native_certs::load_native_certs().certs {
                    let _ = roots.add(certificate);
                }
            }
        }
        let builder = rustls::ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| error.to_string())?;
        let mut client = builder.with_root_certificates(roots).with_no_client_auth();
        client.alpn_protocols = match protocol {
            UpstreamProtocol::Http1 => vec![b"http/1.1".to_vec()],
            UpstreamProtocol::Http2 => vec![b"h2".to_vec()],
        };
        let name = config.server_name.as_deref().map(server_name).transpose()?;
        Ok(Self { connector: TlsConnector::from(Arc::new(client)), name })
    }

    /// The same, with the name that an address must prove.
    pub(crate) fn towards(&self, address: &str) -> Result<Self, String> {
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = self.name.clone().map_or_else(|| server_name(host), Ok)?;
        Ok(Self { connector: self.connector.clone(), name: Some(name) })
    }

    pub(crate) async fn connect(&self, stream: TcpStream) -> std::io::Result<Io> {
        let name = self.name.clone().ok_or(std::io::ErrorKind::InvalidInput)?;
        let stream = self.connector.connect(name, stream).await?;
        Ok(Io::Tls(Box::new(TlsStream::Client(stream))))
    }
}

fn server_name(host: &str) -> Result<ServerName<'static>, String> {
    ServerName::try_from(host.to_owned())
        .map_err(|_| format!("`{host}` is no name that a certificate can prove"))
}
