//! Connection to the management server: TCP or a Unix socket, TLS, HTTP/2. Each stream has its own connection, so that
//! names are resolved and certificates read again every time.
//!
//! A dead peer is found by TCP's keep-alive. HTTP/2 pings were rejected: gRPC servers end connections that ping more often
//! than every five minutes, unless they are configured otherwise.

use super::settings::{ServerAddress, XdsSettings, XdsTls};
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::ServerName;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tollgate_http::tls;
use tonic::body::Body;
use tower_service::Service;

/// Maximum time for a connection, TLS included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// An HTTP/2 connection for one call.
#[derive(Clone)]
pub(super) struct Connection(http2::SendRequest<Body>);

impl Service<Request<Body>> for Connection {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

/// Connects. Returns the connection and the origin of its requests.
///
/// # Errors
/// Why there is no connection.
pub(super) async fn connect(settings: &XdsSettings) -> Result<(Connection, Uri), String> {
    let address = &settings.server;
    match tokio::time::timeout(CONNECT_TIMEOUT, connect_now(settings)).await {
        Ok(connected) => connected.map_err(|error| format!("cannot connect to {address}: {error}")),
        Err(_) => Err(format!("cannot connect to {address}: no answer in {} s", CONNECT_TIMEOUT.as_secs())),
    }
}

async fn connect_now(settings: &XdsSettings) -> Result<(Connection, Uri), String> {
    let text = |error: std::io::Error| error.to_string();
    let connection = match &settings.server {
        ServerAddress::Tcp(host, port) => {
            let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(text)?;
            let _ = stream.set_nodelay(true);
            let alive = socket2::TcpKeepalive::new()
                .with_time(Duration::from_secs(30))
                .with_interval(Duration::from_secs(10))
                .with_retries(3);
            let _ = socket2::SockRef::from(&stream).set_tcp_keepalive(&alive);
            secure(settings, host, stream).await?
        }
        ServerAddress::Unix(path) => {
            secure(settings, "localhost", UnixStream::connect(path).await.map_err(text)?).await?
        }
    };
    let authority = match &settings.server {
        address @ ServerAddress::Tcp(..) => address.to_string(),
        ServerAddress::Unix(_) => "localhost".to_owned(),
    };
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    let origin = Uri::builder().scheme(scheme).authority(authority).path_and_query("/").build();
    Ok((connection, origin.map_err(|error| error.to_string())?))
}

/// Wraps a stream in TLS, if that is configured, and in HTTP/2.
async fn secure<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    settings: &XdsSettings,
    host: &str,
    stream: S,
) -> Result<Connection, String> {
    let Some(tls) = &settings.tls else { return handshake(stream).await };
    let name = tls.server_name.as_deref().unwrap_or(host).to_owned();
    let name = ServerName::try_from(name).map_err(|error| error.to_string())?;
    let files = tls.clone();
    let config = tokio::task::spawn_blocking(move || client_config(&files)).await;
    let config = config.map_err(|error| error.to_string())??;
    let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await;
    let stream = stream.map_err(|error| format!("TLS: {error}"))?;
    if stream.get_ref().1.alpn_protocol() != Some(b"h2") {
        return Err("TLS: the server does not offer HTTP/2".to_owned());
    }
    handshake(stream).await
}

async fn handshake<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
) -> Result<Connection, String> {
    let shaken = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (sender, driver) = shaken.map_err(|error| error.to_string())?;
    // Ends with the sender; the call itself reports what goes wrong.
    tokio::spawn(async move { drop(driver.await) });
    Ok(Connection(sender))
}

fn client_config(settings: &XdsTls) -> Result<rustls::ClientConfig, String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if let Some(ca) = &settings.ca {
        roots.roots.extend(tls::authorities(ca)?.roots);
    }
    let builder = rustls::ClientConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?
        .with_root_certificates(roots);
    let mut config = match &settings.own {
        Some((certificate, key)) => {
            let pair = |error| mismatch(certificate, key, &error);
            let chain = tls::certificates(certificate)?;
            builder.with_client_auth_cert(chain, tls::private_key(key)?).map_err(pair)?
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

fn mismatch(certificate: &Path, key: &Path, error: &rustls::Error) -> String {
    format!("certificate {} and key {} do not match: {error}", certificate.display(), key.display())
}
