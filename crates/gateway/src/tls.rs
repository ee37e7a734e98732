//! TLS for listeners and upstreams. A listener's certificate is reloaded when its files change, without dropping connections.

use crate::config::{ServerTlsConfig, UpstreamProtocol, UpstreamTlsConfig};
use rustls::pki_types::ServerName;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, TlsStream};
use tollgate_http::server::Io;
use tollgate_http::tls::{self, ClientAuth, ServerTls, authorities, provider};

/// Protocols that a listener offers.
const ALPN: &[&[u8]] = &[b"h2", b"http/1.1"];

/// Returns the TLS of a listener.
pub(crate) fn listener(config: &ServerTlsConfig) -> Result<Arc<ServerTls>, String> {
    let ServerTlsConfig { certificate, key } = config.clone();
    ServerTls::new(&tls::ServerTlsConfig { certificate, key, clients: ClientAuth::None }, ALPN)
}

/// TLS of an upstream.
#[derive(Clone)]
pub(crate) struct ClientTls {
    connector: TlsConnector,
    name: Option<ServerName<'static>>,
}

impl ClientTls {
    pub(crate) fn new(config: &UpstreamTlsConfig, protocol: UpstreamProtocol) -> Result<Self, String> {
        let roots = match &config.ca {
            Some(path) => authorities(path)?,
            None => {
                let mut roots = rustls::RootCertStore::empty();
                roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
                roots
            }
        };
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

    /// Returns a copy that verifies the host of `address`, unless a server name is configured.
    pub(crate) fn for_address(&self, address: &str) -> Result<Self, String> {
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
        .map_err(|_| format!("invalid server name `{host}`; use a DNS name or an IP address"))
}
