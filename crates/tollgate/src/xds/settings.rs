//! Settings of the xDS client.

use super::backoff::BackoffSettings;
use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue};

/// Largest response by default, in bytes; gRPC's own default.
pub(crate) const MAX_MESSAGE: usize = 4 << 20;
/// Node ID by default.
pub(crate) const NODE_ID: &str = "default";

/// Metadata of the call: a name and a value.
pub(crate) type Header = (AsciiMetadataKey, AsciiMetadataValue);

/// Returns a header. Errors do not repeat the value, which may be secret.
pub(crate) fn header(name: &str, value: &str) -> Result<Header, String> {
    let key = AsciiMetadataKey::from_bytes(name.to_ascii_lowercase().as_bytes());
    let key = key.map_err(|_| format!("`{name}` is not the name of a header"))?;
    let value = AsciiMetadataValue::try_from(value);
    Ok((key, value.map_err(|_| format!("the value of `{name}` has characters that a header cannot have"))?))
}

/// Settings of the xDS client.
#[derive(Clone)]
pub(crate) struct XdsSettings {
    pub(crate) server: ServerAddress,
    /// Node ID: management servers keep one set of rules for each.
    pub(crate) node_id: String,
    pub(crate) node_metadata: BTreeMap<String, String>,
    /// TLS; `None` for plain text.
    pub(crate) tls: Option<XdsTls>,
    /// Metadata of the call: names and values, which may be secret.
    pub(crate) headers: Vec<Header>,
    pub(crate) backoff: BackoffSettings,
    /// Maximum size of a response, in bytes.
    pub(crate) max_message: usize,
    pub(crate) first_config: FirstConfig,
}

impl XdsSettings {
    /// Returns the default settings for this server.
    pub(crate) fn new(server: ServerAddress) -> Self {
        Self {
            server,
            node_id: NODE_ID.to_owned(),
            node_metadata: BTreeMap::new(),
            tls: None,
            headers: Vec::new(),
            backoff: BackoffSettings::default(),
            max_message: MAX_MESSAGE,
            first_config: FirstConfig::default(),
        }
    }
}

/// Omits the values of headers, which may be secret.
impl fmt::Debug for XdsSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("XdsSettings")
            .field("server", &self.server)
            .field("node_id", &self.node_id)
            .field("node_metadata", &self.node_metadata)
            .field("tls", &self.tls)
            .field("headers", &self.headers.iter().map(|(name, _)| name).collect::<Vec<_>>())
            .field("backoff", &self.backoff)
            .field("max_message", &self.max_message)
            .field("first_config", &self.first_config)
            .finish()
    }
}

/// What a start waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum FirstConfig {
    /// No listener opens before the first response, good or bad.
    #[default]
    Wait,
    /// Listeners open at once, with the rules of files alone.
    StartWithout,
}

/// TLS to the management server. The files are read at each connect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct XdsTls {
    /// Client certificate and its key.
    pub(crate) own: Option<(PathBuf, PathBuf)>,
    /// CA bundle, besides the system's.
    pub(crate) ca: Option<PathBuf>,
    /// Name in the server's certificate, if it is not the host's.
    pub(crate) server_name: Option<String>,
}

/// Address of a management server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ServerAddress {
    /// A host, without the brackets of an IPv6 address, and a port.
    Tcp(String, u16),
    /// A Unix socket.
    Unix(PathBuf),
}

impl FromStr for ServerAddress {
    type Err = String;

    /// Reads `host:port` or a gRPC target with the scheme `dns`, `passthrough` or `unix`. No host is this one.
    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is not an address; use one such as envoy-gateway:18001, [::1]:18000 or unix:/run/xds.sock"
            )
        };
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.is_empty() { Err(wrong()) } else { Ok(Self::Unix(PathBuf::from(path))) };
        }
        // `dns:host:port` and `dns://authority/host:port`; whom to ask is the system's choice here.
        let target = text.strip_prefix("dns:").or_else(|| text.strip_prefix("passthrough:"));
        let name = match target.map(|rest| rest.strip_prefix("//").ok_or(rest)) {
            None => text,
            Some(Err(rest)) => rest,
            Some(Ok(rest)) => rest.split_once('/').ok_or_else(wrong)?.1,
        };
        let (host, port) = name.rsplit_once(':').ok_or_else(wrong)?;
        let host = if host.is_empty() { "localhost" } else { host };
        let port: u16 = port.parse().ok().filter(|port| *port > 0).ok_or_else(wrong)?;
        let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let is_name = |host: &str| {
            let valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
            !host.is_empty() && host.chars().all(valid)
        };
        match bare {
            Some(ip) if ip.parse::<std::net::Ipv6Addr>().is_ok() => Ok(Self::Tcp(ip.to_owned(), port)),
            None if is_name(host) => Ok(Self::Tcp(host.to_owned(), port)),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(host, port) if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp(host, port) => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_grpc_targets() {
        let tcp = |host: &str, port| Ok(ServerAddress::Tcp(host.to_owned(), port));
        for (text, address) in [
            ("envoy-gateway:18001", tcp("envoy-gateway", 18_001)),
            ("a.b_c.svc:1", tcp("a.b_c.svc", 1)),
            ("[::1]:18000", tcp("::1", 18_000)),
            ("dns:a:1", tcp("a", 1)),
            ("dns:///a:1", tcp("a", 1)),
            ("dns://8.8.8.8/a:1", tcp("a", 1)),
            ("passthrough:///127.0.0.1:1", tcp("127.0.0.1", 1)),
            (":1", tcp("localhost", 1)),
            ("unix:/run/x", Ok(ServerAddress::Unix("/run/x".into()))),
            ("unix:///run/x", Ok(ServerAddress::Unix("/run/x".into()))),
        ] {
            assert_eq!(text.parse::<ServerAddress>(), address, "{text}");
        }
        for wrong in [
            "",
            "a",
            ":",
            "a:0",
            "a:65536",
            "::1:18000",
            "http://a:1",
            "a b:1",
            "unix:",
            "dns://a:1",
            "passthrough://a:1",
            "a:1/x",
        ] {
            assert!(wrong.parse::<ServerAddress>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn secrets_are_not_shown() {
        let mut settings = XdsSettings::new(ServerAddress::Tcp("h".to_owned(), 1));
        settings.headers.push(header("Authorization", "hidden").expect("valid"));
        let shown = format!("{settings:?}");
        assert!(shown.contains("authorization") && !shown.contains("hidden"), "{shown}");
        for (name, value) in [("a b", "v"), ("", "v"), ("x-bin", "v"), ("k", "secret\n")] {
            let error = header(name, value).expect_err(name);
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
