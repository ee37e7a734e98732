//! Connection to the management server: TCP or a Unix socket, TLS, HTTP/2. Each stream has its own connection, so that
//! names are resolved and certificates read again every time.
//!
//! A connection is one when the server has sent its HTTP/2 settings, which it does without being asked. A server that
//! accepts connections and sends nothing is given up after the time for connecting.
//!
//! A dead peer is found by TCP's keep-alive, and a process that hangs by HTTP/2 pings, at long intervals: gRPC servers end
//! connections that ping more often than every five minutes, unless they are configured otherwise. A stream without
//! responses is healthy: a server that has nothing for a node sends nothing.

use super::settings::{ServerAddress, XdsSettings, XdsTls};
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use std::future::Future;
use std::io::{self, IoSlice};
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::oneshot;
use tokio_rustls::TlsConnector;
use tollgate_http::tls;
use tonic::body::Body;
use tower_service::Service;

/// Maximum time for a connection, TLS and the server's settings included.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// A server that has sent nothing for this long is asked whether it is there, and has this long to answer.
const PING_INTERVAL: Duration = Duration::from_secs(6 * 60);
const PING_TIMEOUT: Duration = Duration::from_secs(20);

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

/// Begins HTTP/2, and waits for the server's settings.
async fn handshake<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    stream: S,
) -> Result<Connection, String> {
    let (begun, has_begun) = oneshot::channel();
    let stream = Beginning { stream, header: [0; FRAME_HEADER], read: 0, begun: Some(begun) };
    let shaken = http2::Builder::new(TokioExecutor::new())
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .handshake(TokioIo::new(stream))
        .await;
    let (sender, driver) = shaken.map_err(|error| error.to_string())?;
    // Ends with the sender; the call itself reports what goes wrong.
    tokio::spawn(async move { drop(driver.await) });
    let begun = has_begun.await.unwrap_or_else(|_| Err(CLOSED.to_owned()));
    begun.map(|()| Connection(sender))
}

/// Length of a frame's header: the length of its payload in three bytes, its type, flags and stream.
const FRAME_HEADER: usize = 9;
/// Type of the first frame of every server.
const SETTINGS_FRAME: u8 = 4;
const CLOSED: &str = "the server closed the connection";

/// A stream that tells when the server has begun to speak HTTP/2, which hyper does not.
struct Beginning<S> {
    stream: S,
    /// Header of the first frame, of which this much has been read.
    header: [u8; FRAME_HEADER],
    read: usize,
    /// Receives that the first frame has the server's settings, or why there is none: with TLS 1.3 a server refuses a
    /// certificate after the handshake.
    begun: Option<oneshot::Sender<Result<(), String>>>,
}

impl<S> Beginning<S> {
    /// Reads more of the first frame.
    fn feed(&mut self, bytes: &[u8]) {
        let copied = bytes.len().min(FRAME_HEADER - self.read);
        self.header[self.read..self.read + copied].copy_from_slice(&bytes[..copied]);
        self.read += copied;
        match self.header {
            _ if bytes.is_empty() => self.end(Err(CLOSED.to_owned())),
            _ if self.read < FRAME_HEADER => {}
            [_, _, _, SETTINGS_FRAME, ..] => self.end(Ok(())),
            _ => self.end(Err("the server does not speak HTTP/2".to_owned())),
        }
    }

    fn end(&mut self, result: Result<(), String>) {
        if let Some(begun) = self.begun.take() {
            let _ = begun.send(result);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Beginning<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer));
        if self.begun.is_some() {
            match &read {
                Ok(()) => self.feed(&buffer.filled()[before..]),
                Err(error) => self.end(Err(error.to_string())),
            }
        }
        Poll::Ready(read)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Beginning<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    const PREFACE: usize = 24;

    /// Begins a connection to a server that accepts it and has read what the client sends, but sends nothing itself.
    async fn begin() -> (Pin<Box<dyn Future<Output = Result<Connection, String>>>>, DuplexStream) {
        let (own, mut server) = duplex(1 << 16);
        let mut connecting: Pin<Box<dyn Future<Output = _>>> = Box::pin(handshake(own));
        let mut preface = [0; PREFACE];
        tokio::select! {
            biased;
            _ = &mut connecting => panic!("connected to a server that has sent nothing"),
            read = server.read_exact(&mut preface) => read.map(drop).expect("a preface"),
        }
        (connecting, server)
    }

    /// Otherwise the log names a connection that there is not, and nothing is tried again.
    #[tokio::test]
    async fn there_is_a_connection_when_the_server_has_sent_its_settings() {
        let (connecting, mut server) = begin().await;
        let settings = [0, 0, 0, SETTINGS_FRAME, 0, 0, 0, 0, 0];
        let (first, rest) = settings.split_at(4);
        server.write_all(first).await.expect("sent");
        server.write_all(rest).await.expect("sent");
        connecting.await.map(drop).expect("a connection");
    }

    #[tokio::test]
    async fn other_servers_are_not_connected() {
        let (connecting, mut server) = begin().await;
        server.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await.expect("sent");
        let error = connecting.await.map(drop).expect_err("HTTP/1.1");
        assert_eq!(error, "the server does not speak HTTP/2");
        let (connecting, server) = begin().await;
        drop(server);
        let error = connecting.await.map(drop).expect_err("closed");
        assert_eq!(error, CLOSED);
    }
}
