//! `tollgate health`: asks the server on this machine whether it is alive, for the health checks of containers.
//!
//! An image without a shell and without curl can run nothing else. The address comes from the flags, variables and file
//! that `serve` takes it from, so that the check cannot name another port than the server.

mod tls;

use crate::cli::{FormatFlags, Listen, print, print_line};
use crate::config;
use crate::server::protocols;
use anyhow::{Context, anyhow};
use bytes::Bytes;
use clap::Args;
use http_body_util::{BodyExt, Empty, Limited};
use hyper::Request;
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tollgate_observe::escape;

#[derive(Debug, Args)]
pub(crate) struct HealthFlags {
    /// YAML file of the server, which may contain the address.
    #[arg(long, env = "TOLLGATE_CONFIG", value_name = "FILE")]
    config: Option<PathBuf>,
    /// Address of the server's HTTP API [default: 127.0.0.1:8080]. For 0.0.0.0, loopback is asked.
    #[arg(long, env = "TOLLGATE_HTTP", value_name = "ADDRESS")]
    http: Option<Listen>,
    /// Certificate of that address, if it has TLS (PEM): the server must present it.
    #[arg(long, env = "TOLLGATE_HTTP_TLS_CERT", value_name = "FILE")]
    http_tls_cert: Option<PathBuf>,
    /// Client certificate, for a server that requires one (PEM).
    #[arg(long, value_name = "FILE", requires = "cert_key")]
    cert: Option<PathBuf>,
    /// Private key of the client certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "cert")]
    cert_key: Option<PathBuf>,
    /// Ask whether the server should receive requests (/readyz), not whether it is alive (/healthz).
    #[arg(long)]
    ready: bool,
    /// Maximum time to wait for the response, in milliseconds.
    #[arg(long, value_name = "MS", default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..=60_000))]
    timeout_ms: u64,
    #[command(flatten)]
    format: FormatFlags,
}

/// Response of the server, for programs.
#[derive(Serialize)]
struct Health {
    address: SocketAddr,
    path: &'static str,
    status: u16,
    body: String,
}

/// Prints the server's response; no response, or any status but 200, is a failure.
pub(crate) fn run(flags: &HealthFlags) -> anyhow::Result<ExitCode> {
    let (configured, certificate) =
        config::http_listener(flags.http, flags.http_tls_cert.clone(), flags.config.as_deref())?;
    let own = flags.cert.as_deref().zip(flags.cert_key.as_deref());
    let tls = certificate.map(|certificate| tls::config(&certificate, own)).transpose()?;
    let address = match configured.unwrap_or(Listen::At(protocols::HTTP)) {
        Listen::At(address) => reachable(address),
        Listen::Off => anyhow::bail!("the HTTP API, which answers health checks, is off; set --http"),
    };
    let path = if flags.ready { "/readyz" } else { "/healthz" };
    let scheme = if tls.is_some() { "https" } else { "http" };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let asking = runtime.block_on(async {
        tokio::time::timeout(Duration::from_millis(flags.timeout_ms), ask(address, path, tls)).await
    });
    let health = asking
        .with_context(|| format!("no response within {} ms", flags.timeout_ms))
        .flatten()
        .with_context(|| format!("{scheme}://{address}{path}"))?;
    if flags.format.is_json() {
        print(&health)?;
    } else {
        print_line(escape::text(&health.body))?;
    }
    Ok(if health.status == 200 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

async fn ask(
    address: SocketAddr,
    path: &'static str,
    tls: Option<rustls::ClientConfig>,
) -> anyhow::Result<Health> {
    let stream = TcpStream::connect(address).await?;
    match tls {
        None => ask_over(stream, address, path).await,
        Some(config) => {
            let connector = TlsConnector::from(Arc::new(config));
            let stream = connector.connect(address.ip().into(), stream).await.context(
                "TLS failed; the server must present the certificate of --http-tls-cert, and may require --cert",
            )?;
            ask_over(stream, address, path).await
        }
    }
}

async fn ask_over(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    address: SocketAddr,
    path: &'static str,
) -> anyhow::Result<Health> {
    /// Maximum size of a response.
    const MAX_BODY: usize = 64 << 10;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    let request = Request::get(path).header(HOST, address.to_string()).body(Empty::<Bytes>::new())?;
    let response = sender.send_request(request).await?;
    let status = response.status().as_u16();
    let body =
        Limited::new(response.into_body(), MAX_BODY).collect().await.map_err(|error| anyhow!(error))?;
    let body = String::from_utf8_lossy(&body.to_bytes()).trim().to_owned();
    Ok(Health { address, path, status, body })
}

/// Returns where a listener is reached from its own machine: the address itself, or loopback for all addresses.
fn reachable(listener: SocketAddr) -> SocketAddr {
    let ip = match listener.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(ip) if ip.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        ip => ip,
    };
    SocketAddr::new(ip, listener.port())
}
