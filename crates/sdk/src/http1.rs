//! Connections to one server over HTTP/1.1, with TLS for `https`.

use bytes::Bytes;
use http::{HeaderValue, Uri};
use http_body_util::Full;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tollgate_http::tls;

/// An open connection.
pub(crate) type Connection = SendRequest<Full<Bytes>>;

/// Why a server cannot be used.
#[derive(Debug)]
pub(crate) enum OriginError {
    /// The address is no URL, or has a user, a path or a query.
    Address,
    /// The authorities cannot be used.
    Authorities(String),
}

/// A server, by its URL.
pub(crate) struct Origin {
    authority: String,
    /// Value of the `host` field.
    pub(crate) host: HeaderValue,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    is_loopback: bool,
}

impl Origin {
    /// Reads a URL such as `https://tollgate.internal:8082`; `ca` is a file with the trusted authorities, the system's if
    /// absent.
    pub(crate) fn parse(address: &str, ca: Option<&Path>) -> Result<Self, OriginError> {
        let wrong = || OriginError::Address;
        let uri: Uri = address.parse().map_err(|_| wrong())?;
        let authority = uri.authority().filter(|given| !given.as_str().contains('@')).ok_or_else(wrong)?;
        if !matches!(uri.path(), "" | "/") || uri.query().is_some() {
            return Err(wrong());
        }
        let bare = authority.host().trim_start_matches('[').trim_end_matches(']');
        let (tls, port) = match uri.scheme_str() {
            Some("http") => (None, 80),
            Some("https") => {
                let name = ServerName::try_from(bare.to_owned()).map_err(|_| wrong())?;
                (Some((connector(ca)?, name)), 443)
            }
            _ => return Err(wrong()),
        };
        Ok(Self {
            host: HeaderValue::from_str(authority.as_str()).map_err(|_| wrong())?,
            authority: format!("{}:{}", authority.host(), authority.port_u16().unwrap_or(port)),
            tls,
            is_loopback: bare == "localhost"
                || bare.parse().is_ok_and(|address: IpAddr| address.is_loopback()),
        })
    }

    /// Returns whether others on the network can read what is sent.
    pub(crate) const fn is_exposed(&self) -> bool {
        self.tls.is_none() && !self.is_loopback
    }

    /// Returns the host and port.
    pub(crate) fn authority(&self) -> &str {
        &self.authority
    }

    /// Opens a connection, on the current tokio runtime.
    pub(crate) async fn connect(&self) -> Result<Connection, String> {
        let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", self.authority);
        let stream = TcpStream::connect(&self.authority).await.map_err(|error| failed(&error))?;
        stream.set_nodelay(true).map_err(|error| failed(&error))?;
        match &self.tls {
            None => {
                let (sender, connection) =
                    http1::handshake(TokioIo::new(stream)).await.map_err(|error| failed(&error))?;
                tokio::spawn(connection);
                Ok(sender)
            }
            Some((connector, name)) => {
                let stream = connector.connect(name.clone(), stream).await.map_err(|error| failed(&error))?;
                let (sender, connection) =
                    http1::handshake(TokioIo::new(stream)).await.map_err(|error| failed(&error))?;
                tokio::spawn(connection);
                Ok(sender)
            }
        }
    }
}

impl std::fmt::Debug for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Origin").field(&self.authority).finish()
    }
}

fn connector(ca: Option<&Path>) -> Result<TlsConnector, OriginError> {
    let roots = match ca {
        Some(path) => {
            tls::authorities(path).map_err(|error| OriginError::Authorities(format!("`ca`: {error}")))?
        }
        None => {
            let mut roots = rustls::RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            roots
        }
    };
    let builder = rustls::ClientConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| OriginError::Authorities(error.to_string()))?;
    Ok(TlsConnector::from(Arc::new(builder.with_root_certificates(roots).with_no_client_auth())))
}
