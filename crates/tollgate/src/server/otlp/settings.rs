//! OTLP settings: the collector for spans, from Tollgate's own setting, else from OpenTelemetry's variables, so that a
//! machine on which these are set for all programs needs no further configuration.

use crate::admin_client::{self, Client};
use crate::cli::ServeFlags;
use anyhow::Context;
use hyper::Uri;
use hyper::header::{HeaderName, HeaderValue};
use std::fmt;
use std::path::PathBuf;

/// Collector that spans are sent to.
#[derive(Clone)]
pub(crate) struct Otlp {
    pub(super) uri: Uri,
    /// Request headers; they may contain secrets.
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    /// CA bundle and the name of its variable; `None` uses the system's.
    ca: Option<(&'static str, PathBuf)>,
    /// Service name of the spans.
    pub(crate) service: String,
}

impl fmt::Debug for Otlp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.uri)
    }
}

/// Returns an OpenTelemetry variable; an empty one counts as unset.
fn variable(name: &str) -> Option<String> {
    let text = std::env::var(name).ok()?;
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

/// Returns the name and value of the variable for traces, else of the one for all signals.
fn either(traces: &'static str, all: &'static str) -> Option<(&'static str, String)> {
    let named = |name: &'static str| variable(name).map(|text| (name, text));
    named(traces).or_else(|| named(all))
}

/// Reads the collector from the flag or its variable, else the file, else OpenTelemetry's variables.
pub(crate) fn read(flags: &ServeFlags, file: Option<String>) -> anyhow::Result<Option<Otlp>> {
    match flags.otlp.clone().or(file) {
        Some(address) if address == "off" => Ok(None),
        Some(address) => from_endpoint("--otlp", &address).map(Some),
        None => Ok(from_environment()),
    }
}

/// Returns a collector at `address`, with headers, CA and service name from OpenTelemetry's variables. Invalid values
/// are errors; the messages contain no secrets.
fn from_endpoint(from: &'static str, address: &str) -> anyhow::Result<Otlp> {
    let uri = endpoint(address, from != "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT").with_context(|| {
        format!("{from}: write the HTTP address of a collector, such as http://127.0.0.1:4318, or off")
    })?;
    let headers = either("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS");
    let headers = headers.map(|(name, text)| {
        fields(&text).with_context(|| format!("{name}: write NAME=VALUE,…, values percent-encoded"))
    });
    let ca = either("OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE", "OTEL_EXPORTER_OTLP_CERTIFICATE");
    let otlp = Otlp {
        uri,
        headers: headers.transpose()?.unwrap_or_default(),
        ca: ca.map(|(name, path)| (name, path.into())),
        service: variable("OTEL_SERVICE_NAME").unwrap_or_else(|| "tollgate".to_owned()),
    };
    otlp.client()?;
    Ok(otlp)
}

/// Returns the collector of OpenTelemetry's variables. They are often set for all programs of a machine, so unsupported
/// values disable traces with a warning and are not an error.
fn from_environment() -> Option<Otlp> {
    let is = |name, word| variable(name).is_some_and(|text| text.eq_ignore_ascii_case(word));
    if is("OTEL_SDK_DISABLED", "true") || is("OTEL_TRACES_EXPORTER", "none") {
        return None;
    }
    let (from, address) = either("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")?;
    let found = match either("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL") {
        Some((name, protocol)) if protocol != "http/protobuf" => Err(anyhow::anyhow!(
            "{name} asks for {protocol}, and only http/protobuf is spoken here; \
             set --otlp to the collector's HTTP address"
        )),
        _ => from_endpoint(from, &address),
    };
    found.inspect_err(|error| tracing::warn!("traces disabled: {error:#}")).ok()
}

/// Returns the URL that spans are posted to. Errors do not repeat the address, which may contain a password. An address
/// for all signals gets the path of traces.
fn endpoint(address: &str, of_all_signals: bool) -> anyhow::Result<Uri> {
    let uri: Uri = address.parse()?;
    let (Some("http" | "https"), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        anyhow::bail!("not an http:// or https:// address");
    };
    anyhow::ensure!(
        !authority.as_str().contains('@'),
        "an address holds no user or password; OTEL_EXPORTER_OTLP_HEADERS may"
    );
    anyhow::ensure!(uri.query().is_none(), "an address has no query");
    let path = uri.path().trim_end_matches('/');
    let path = match path {
        path if of_all_signals && !path.ends_with("/v1/traces") => format!("{path}/v1/traces"),
        "" => "/".to_owned(),
        path => path.to_owned(),
    };
    let scheme = uri.scheme_str().unwrap_or("http");
    Ok(Uri::builder().scheme(scheme).authority(authority.clone()).path_and_query(path).build()?)
}

/// Parses `NAME=VALUE,…` with percent-encoded values. Errors do not repeat the values.
fn fields(text: &str) -> anyhow::Result<Vec<(HeaderName, HeaderValue)>> {
    let pairs = text.split(',').filter(|pair| !pair.trim().is_empty());
    let all = pairs.map(|pair| {
        let (name, value) = pair.split_once('=').context("a pair has no `=`")?;
        let name = HeaderName::from_bytes(name.trim().as_bytes()).context("invalid header name")?;
        let mut value = HeaderValue::from_bytes(&decoded(value.trim()))
            .with_context(|| format!("{name}: invalid value"))?;
        value.set_sensitive(true);
        Ok((name, value))
    });
    all.collect()
}

fn decoded(text: &str) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, others)) = rest.split_first() {
        let digits = others.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()).filter(|_| first == b'%') {
            Some(byte) => {
                bytes.push(byte);
                rest = &others[2..];
            }
            None => {
                bytes.push(first);
                rest = others;
            }
        }
    }
    bytes
}

impl Otlp {
    /// Returns a client for the collector.
    pub(super) fn client(&self) -> anyhow::Result<Client> {
        let ca = self.ca.as_ref().map(|(name, path)| (*name, path.as_path()));
        Client::connect_to(&self.uri, || admin_client::trusting(ca, None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_that_other_programs_take() {
        let all = |address| endpoint(address, true).map(|uri| uri.to_string()).ok();
        assert_eq!(all("http://c:4318").as_deref(), Some("http://c:4318/v1/traces"));
        assert_eq!(all("http://c:4318/").as_deref(), Some("http://c:4318/v1/traces"));
        assert_eq!(all("https://c/otlp/").as_deref(), Some("https://c/otlp/v1/traces"));
        assert_eq!(all("https://c/otlp/v1/traces").as_deref(), Some("https://c/otlp/v1/traces"));
        for wrong in ["c:4318", "grpc://c:4317", "http://u:p@c", "/v1/traces", "http://c/?token=x", ""] {
            assert_eq!(all(wrong), None, "{wrong}");
        }
        for secret in ["grpc://u:hunter2@c", "http://u:hunter2@c", "u:hunter2@c", "http://c/?token=hunter2"] {
            let error = format!("{:#}", endpoint(secret, true).expect_err("wrong"));
            assert!(!error.contains("hunter2"), "{error}");
        }
        let exact = |address| endpoint(address, false).map(|uri| uri.to_string()).ok();
        assert_eq!(exact("http://c:4318").as_deref(), Some("http://c:4318/"));
        assert_eq!(exact("http://c:4318/here").as_deref(), Some("http://c:4318/here"));
    }

    #[test]
    fn headers_are_read_as_others_write_them() {
        let all = fields("api-key=a%20b%3D, x=1=2,").expect("headers");
        let all: Vec<_> = all.iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
        assert_eq!(all, [("api-key", &b"a b="[..]), ("x", b"1=2")]);
        for wrong in ["secret", "b d=secret", "a=secret%0a"] {
            let error = format!("{:#}", fields(wrong).expect_err("wrong"));
            assert!(!error.contains("secret"), "{error}");
        }
        assert_eq!(decoded("100%"), b"100%");
    }
}
