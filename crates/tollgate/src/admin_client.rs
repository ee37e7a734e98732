//! Admin API client of the command line: one request per connection, over HTTP or TLS, with a token if there is one.
//!
//! A command that changes something sends it to a server, which validates it against its active rules. A rejected
//! change is an error with the field it is about, and the command exits with 1.

mod failure;

use crate::cli::FormatFlags;
use crate::cli::output::{self, TITLE, paint};
use anyhow::Context;
use bytes::Bytes;
use clap::Args;
use failure::Peer;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use serde_json::Value;
use std::convert::Infallible;
use std::fs::File;
use std::future::Future;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tollgate_http::tls;
use tollgate_observe::escape;

/// The server's address and the operator's credentials, for a command's `#[command(flatten)]`. The help lists them after
/// the command's own flags.
#[derive(Debug, Args)]
pub(crate) struct AdminFlags {
    /// Admin URL of a server, http:// or https://.
    #[arg(
        long,
        global = true,
        display_order = 101,
        env = "TOLLGATE_ADMIN_URL",
        value_name = "URL",
        default_value = "http://127.0.0.1:8082"
    )]
    admin: String,
    /// File containing the token; or set TOLLGATE_TOKEN.
    #[arg(long, global = true, display_order = 102, env = "TOLLGATE_TOKEN_FILE", value_name = "FILE")]
    token_file: Option<PathBuf>,
    /// CA bundle for https:// [default: the system's].
    #[arg(long, global = true, display_order = 103, value_name = "FILE")]
    ca: Option<PathBuf>,
    /// Client certificate (mutual TLS).
    #[arg(long, global = true, display_order = 104, value_name = "FILE", requires = "cert_key")]
    cert: Option<PathBuf>,
    /// Private key of the client certificate.
    #[arg(long, global = true, display_order = 105, value_name = "FILE", requires = "cert")]
    cert_key: Option<PathBuf>,
    #[command(flatten)]
    format: FormatFlags,
}

impl AdminFlags {
    /// Returns whether a program reads the output.
    pub(crate) fn is_json(&self) -> bool {
        self.format.is_json()
    }
}

/// Request body, which may be streamed.
pub(crate) type RequestBody = UnsyncBoxBody<Bytes, std::io::Error>;

/// Response of the admin API.
#[derive(Debug)]
pub(crate) struct AdminResponse {
    pub(crate) status: StatusCode,
    /// JSON body; `Null` if there is none.
    pub(crate) body: Value,
    /// Message for people, of a rejection.
    rejection: Option<String>,
}

/// Client for one server.
pub(crate) struct Client {
    peer: Peer,
    tls: Option<(TlsConnector, ServerName<'static>)>,
    token: Option<HeaderValue>,
    /// Whether text in responses is escaped for a terminal: callers have chosen some of it.
    escapes: bool,
}

/// Timeout of connecting, and of an ordinary request.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Runs a command against a server.
pub(crate) fn run(
    flags: &AdminFlags,
    act: impl AsyncFnOnce(Client) -> anyhow::Result<ExitCode>,
) -> anyhow::Result<ExitCode> {
    let client = Client::new(flags)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(act(client));
    // A thread that still reads standard input is not awaited.
    runtime.shutdown_background();
    done
}

impl Client {
    fn new(flags: &AdminFlags) -> anyhow::Result<Self> {
        let wrong = || format!("--admin {}: not a URL such as http://127.0.0.1:8082", flags.admin);
        let uri: Uri = flags.admin.parse().with_context(wrong)?;
        let authority = uri.authority().with_context(wrong)?;
        anyhow::ensure!(
            matches!(uri.path(), "" | "/")
                && uri.query().is_none()
                && !authority.as_str().contains('@')
                && match uri.scheme_str() {
                    // `localhost:8082` has no scheme; a lone word is more likely a mistake than a host.
                    None => authority.port().is_some(),
                    scheme => matches!(scheme, Some("http" | "https")),
                },
            wrong()
        );
        let pair = flags.cert.as_deref().zip(flags.cert_key.as_deref());
        let ca = flags.ca.as_deref().map(|path| ("--ca", path));
        let client = Self::connect_to(&uri, || trusting(ca, pair))?;
        let (token, token_source) = token(flags)?.unzip();
        let host = bare(authority.host());
        let near = host == "localhost" || host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
        if token.is_some() && client.tls.is_none() && !near {
            eprintln!("tollgate: warning: sending the token to {authority} unencrypted; use https://");
        }
        let escapes = !flags.is_json();
        Ok(Self { token, peer: Peer { token_source, ..client.peer }, escapes, ..client })
    }

    /// Returns a client for the server at `uri`, over TLS if its scheme is https.
    pub(crate) fn connect_to(
        uri: &Uri,
        trusting: impl FnOnce() -> anyhow::Result<rustls::ClientConfig>,
    ) -> anyhow::Result<Self> {
        let authority = uri.authority().context("missing host")?;
        let (tls, port) = match uri.scheme_str() {
            None | Some("http") => (None, 80),
            Some("https") => {
                let host = bare(authority.host()).to_owned();
                let name =
                    ServerName::try_from(host).with_context(|| format!("{authority}: invalid host name"))?;
                (Some((TlsConnector::from(Arc::new(trusting()?)), name)), 443)
            }
            Some(other) => anyhow::bail!("unsupported scheme {other}://"),
        };
        let port = authority.port_u16().unwrap_or(port);
        let authority = format!("{}:{port}", authority.host());
        let peer = Peer { authority, has_tls: tls.is_some(), token_source: None };
        Ok(Self { peer, tls, token: None, escapes: false })
    }

    /// Returns a client whose responses are not escaped, for text that is printed as it is.
    pub(crate) fn verbatim(self) -> Self {
        Self { escapes: false, ..self }
    }

    /// Returns the value of the `Host` header.
    pub(crate) fn host(&self) -> anyhow::Result<HeaderValue> {
        Ok(HeaderValue::from_str(&self.peer.authority)?)
    }

    /// Sends a request with an optional JSON body and returns the JSON of the response. A rejection is an error.
    pub(crate) async fn request(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> anyhow::Result<Value> {
        self.exchange(method, path, &[], body).await?.into_result()
    }

    /// Sends a request like `request`, with extra headers, and returns the status and body, also of a rejection.
    pub(crate) async fn exchange(
        &self,
        method: Method,
        path: &str,
        headers: &[(HeaderName, &str)],
        body: Option<&Value>,
    ) -> anyhow::Result<AdminResponse> {
        let bytes = Bytes::from(body.map(Value::to_string).unwrap_or_default());
        let body = Full::new(bytes).map_err(|never: Infallible| match never {}).boxed_unsync();
        let asking = async {
            let answer = self.send(method, path, headers, body).await?;
            self.read_response(answer, path).await
        };
        with_timeout(asking).await
    }

    /// Sends a request with any body and returns the response as a stream. A rejection is a response, not an error.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(HeaderName, &str)],
        body: RequestBody,
    ) -> anyhow::Result<Response<Incoming>> {
        let mut sender = with_timeout(self.connect()).await.map_err(|error| self.peer.explain(&error))?;
        let mut request = Request::new(body);
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().with_context(|| format!("invalid path `{path}`"))?;
        let own = request.headers_mut();
        own.insert(HOST, self.host()?);
        own.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        for (name, value) in headers {
            own.insert(name, HeaderValue::from_str(value).with_context(|| format!("{name}: `{value}`"))?);
        }
        if let Some(token) = &self.token {
            own.insert(AUTHORIZATION, token.clone());
        }
        sender.send_request(request).await.map_err(|error| self.peer.explain(&error.into()))
    }

    /// Reads a complete response to a request to `path`.
    pub(crate) async fn read_response(
        &self,
        answer: Response<Incoming>,
        path: &str,
    ) -> anyhow::Result<AdminResponse> {
        let (head, body) = answer.into_parts();
        let bytes =
            body.collect().await.context("connection closed before the response was complete")?.to_bytes();
        let body = if bytes.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&bytes).with_context(|| {
                format!(
                    "{} is not an admin API (status {}, no JSON); set --admin to the admin URL",
                    self.peer.authority, head.status
                )
            })?
        };
        let rejection = (!head.status.is_success()).then(|| self.peer.rejection(head.status, &body, path));
        let body = if self.escapes { escaped(body) } else { body };
        Ok(AdminResponse { status: head.status, body, rejection })
    }

    pub(crate) async fn connect(&self) -> anyhow::Result<SendRequest<RequestBody>> {
        let stream = TcpStream::connect(&self.peer.authority).await?;
        stream.set_nodelay(true)?;
        match &self.tls {
            None => {
                let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
                tokio::spawn(connection);
                Ok(sender)
            }
            Some((connector, name)) => {
                let stream = connector.connect(name.clone(), stream).await?;
                let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
                tokio::spawn(connection);
                Ok(sender)
            }
        }
    }
}

impl AdminResponse {
    /// Returns the body, or a rejection as an error.
    pub(crate) fn into_result(self) -> anyhow::Result<Value> {
        if self.status.is_success() { Ok(self.body) } else { Err(self.problem()) }
    }

    /// Returns a rejection as an error message for people.
    pub(crate) fn problem(&self) -> anyhow::Error {
        anyhow::anyhow!("{}", escape::text(self.rejection.as_deref().unwrap_or("request rejected")))
    }
}

/// Escapes every text in a JSON value for a terminal.
fn escaped(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(escape::text(&text).into_owned()),
        Value::Array(all) => all.into_iter().map(escaped).collect(),
        Value::Object(all) => {
            all.into_iter().map(|(name, value)| (escape::text(&name).into_owned(), escaped(value))).collect()
        }
        other => other,
    }
}

async fn with_timeout<T>(doing: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let late = || format!("no response within {} s", TIMEOUT.as_secs());
    tokio::time::timeout(TIMEOUT, doing).await.with_context(late)?
}

/// Returns the `Authorization` header and where its token comes from.
fn token(flags: &AdminFlags) -> anyhow::Result<Option<(HeaderValue, String)>> {
    let (token, source) = match &flags.token_file {
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("--token-file: cannot read {}", path.display()))?;
            (Some(text), format!("--token-file {}", path.display()))
        }
        None => (std::env::var("TOLLGATE_TOKEN").ok(), "TOLLGATE_TOKEN".to_owned()),
    };
    let Some(token) = token.as_deref().map(str::trim).filter(|token| !token.is_empty()) else {
        return Ok(None);
    };
    let mut header = HeaderValue::from_str(&format!("Bearer {token}")).context("invalid token")?;
    header.set_sensitive(true);
    Ok(Some((header, source)))
}

/// Returns a host without the brackets of an IPv6 address.
fn bare(host: &str) -> &str {
    host.trim_start_matches('[').trim_end_matches(']')
}

/// Returns a TLS configuration: `ca` is a CA bundle with the name of its setting, `own` the client certificate and its
/// key.
pub(crate) fn trusting(
    ca: Option<(&'static str, &Path)>,
    own: Option<(&Path, &Path)>,
) -> anyhow::Result<rustls::ClientConfig> {
    let of = |flag: &'static str| move |error: String| anyhow::anyhow!("{flag} {error}");
    let roots = match ca {
        Some((name, path)) => tls::authorities(path).map_err(of(name))?,
        None => {
            let mut roots = rustls::RootCertStore::empty();
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            roots
        }
    };
    let builder = rustls::ClientConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots);
    Ok(match own {
        Some((cert, key)) => {
            let chain = tls::certificates(cert).map_err(of("--cert"))?;
            let key = tls::private_key(key).map_err(of("--cert-key"))?;
            builder.with_client_auth_cert(chain, key).context("--cert and --cert-key do not match")?
        }
        None => builder.with_no_client_auth(),
    })
}

/// Percent-encodes text for a path segment or a query value.
pub(crate) fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => out.push(byte.into()),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// Opens the destination of an export: a file, or the standard output.
pub(crate) fn output(file: Option<&Path>) -> anyhow::Result<BufWriter<Box<dyn Write>>> {
    let out: Box<dyn Write> = match file {
        None => Box::new(output::raw()),
        Some(path) => {
            Box::new(File::create(path).with_context(|| format!("cannot create {}", path.display()))?)
        }
    };
    Ok(BufWriter::with_capacity(256 * 1024, out))
}

/// Prints a table for people, or `empty` if there are no rows.
pub(crate) fn table_or<const N: usize>(
    titles: [&str; N],
    rows: &[[String; N]],
    empty: &str,
) -> anyhow::Result<()> {
    if rows.is_empty() { Ok(writeln!(output::styled(), "{empty}")?) } else { table(titles, rows) }
}

/// Prints a table for people: columns as wide as their widest cell, titles in bold.
pub(crate) fn table<const N: usize>(titles: [&str; N], rows: &[[String; N]]) -> anyhow::Result<()> {
    let text = columns(titles, rows);
    let (title, rest) = text.split_once('\n').unwrap_or((&text, ""));
    let mut out = output::styled();
    out.write_all(format!("{}\n{rest}", paint(TITLE, title)).as_bytes())?;
    Ok(())
}

fn columns<const N: usize>(titles: [&str; N], rows: &[[String; N]]) -> String {
    // A line break in a cell would look like another row.
    let rows: Vec<[String; N]> =
        rows.iter().map(|row| row.each_ref().map(|cell| escape::text(cell).into_owned())).collect();
    let width = |text: &str| text.chars().count();
    let mut widths = titles.map(width);
    for row in &rows {
        for (widest, cell) in widths.iter_mut().zip(row) {
            *widest = width(cell).max(*widest);
        }
    }
    let line = |cells: [&str; N]| {
        let mut line = String::new();
        for (cell, width) in cells.iter().zip(widths) {
            line.push_str(&format!("{cell:width$}  "));
        }
        format!("{}\n", line.trim_end())
    };
    let rows = rows.iter().map(|row| line(std::array::from_fn(|i| row[i].as_str())));
    std::iter::once(line(titles)).chain(rows).collect()
}

/// Returns a JSON value as the text of a table cell.
pub(crate) fn cell(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) if text.is_empty() => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_line_up_and_hold_nothing_that_moves_the_cursor() {
        let rows = [["é".to_owned(), "x".to_owned()], ["long\u{1b}".to_owned(), String::new()]];
        assert_eq!(columns(["a", "second"], &rows), "a           second\né           x\nlong\\u{1b}\n");
    }

    #[test]
    fn any_key_makes_one_part_of_a_path() {
        assert_eq!(encoded("a/b ?é"), "a%2Fb%20%3F%C3%A9");
    }
}
