//! Identity settings, under the same names in `serve` and `gateway`.

use http::HeaderName;
use ipnet::IpNet;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tollgate_rules::{CALLER_KEY, Domain, GLOBAL, Rule};

const MIN_SECRET: usize = 16;

/// Settings for deriving a caller's identity.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IdentityConfig {
    /// Networks of trusted proxies; loopback by default.
    pub trusted: Vec<Network>,
    /// The header in which a trusted proxy forwards the client's address.
    pub forwarded: ForwardedBy,
    /// Prefix length that identifies an IPv6 caller, in bits: one caller usually owns a whole /64.
    pub ipv6_prefix: u8,
    /// API key settings.
    pub api_key: ApiKeyConfig,
    /// JWT settings.
    pub jwt: Option<JwtConfig>,
    /// Endpoint templates: `GET /users/{id}`, or `/files/{*rest}` for any method.
    pub routes: Vec<String>,
    /// The endpoint of requests that match no route.
    pub unmatched: Unmatched,
    /// How the upstream reads escapes that servers disagree on.
    pub escapes: PathEscapes,
    /// Whether the upstream distinguishes upper and lower case in paths.
    pub path_case: PathCase,
    /// What happens to a request whose credential cannot be read.
    pub unreadable: Unreadable,
    /// What happens to a request with a header that names another method or path than the request itself.
    pub overrides: Overrides,
    /// The headers in which a proxy describes the original request.
    pub original: OriginalRequest,
    /// Attributes from headers of any client.
    pub headers: BTreeMap<String, String>,
    /// Attributes from headers of trusted peers only, such as tiers and tenants, which a client must not choose.
    pub trusted_headers: BTreeMap<String, String>,
}

impl Default for IdentityConfig {
    fn default() -> Self {
        let loopback = ["127.0.0.1", "::1"]
            .map(|text| Network(IpNet::from(text.parse::<IpAddr>().expect("an address"))));
        Self {
            trusted: loopback.to_vec(),
            forwarded: ForwardedBy::XForwardedFor,
            ipv6_prefix: 64,
            api_key: ApiKeyConfig::default(),
            jwt: None,
            routes: Vec::new(),
            unmatched: Unmatched::Other,
            escapes: PathEscapes::Refuse,
            path_case: PathCase::Exact,
            unreadable: Unreadable::Refuse,
            overrides: Overrides::Refuse,
            original: OriginalRequest::Auto,
            headers: BTreeMap::new(),
            trusted_headers: BTreeMap::new(),
        }
    }
}

impl IdentityConfig {
    /// Resolves relative paths against `folder`, the folder of the configuration file.
    pub fn resolve(&mut self, folder: &Path) {
        let jwks = self.jwt.as_mut().and_then(|jwt| jwt.jwks.as_mut());
        let known = self.api_key.known.iter_mut().flat_map(|known| {
            known
                .formats
                .iter_mut()
                .filter_map(|format| format.secret_file.as_mut())
                .chain(known.file.as_mut())
        });
        for path in jwks.into_iter().chain(self.api_key.secret_file.as_mut()).chain(known) {
            *path = folder.join(&*path);
        }
    }

    /// Warns about rules that take their cost from an attribute that no request has whose caller is derived by these
    /// settings: each of them costs 1, whatever it consumes.
    #[must_use]
    pub fn cost_warnings(&self, rules: &Domain, integration: &str) -> Vec<String> {
        let claims = self.jwt.iter().flat_map(|jwt| jwt.claims.keys().map(String::as_str).chain(["user_id"]));
        let headers = self.headers.keys().chain(self.trusted_headers.keys()).map(String::as_str);
        let known: Vec<&str> = claims.chain(headers).chain(BUILT_IN).collect();
        let unknown = rules.cost_attributes().filter(|(_, name)| !known.contains(name));
        let warning = |(rule, name): (&Rule, &str)| {
            format!(
                "domain `{}`: no request to {integration} has the attribute `{name}`, from which rule `{}` takes its cost, \
                 so each costs 1; name a header for it in `identity.trusted_headers`, or send it to /v1/check or \
                 /v1/reserve",
                rules.name(),
                rule.name
            )
        };
        unknown.map(warning).collect()
    }

    /// Returns the attributes whose values any client can invent: API keys if any of them counts, and those of headers
    /// that are read from anyone.
    #[must_use]
    pub fn unverified(&self) -> Vec<String> {
        let ApiKeyConfig { header, bearer, known, unknown, .. } = &self.api_key;
        let is_key = (header.is_some() || *bearer) && known.is_none() && unknown.is_none();
        is_key.then(|| CALLER_KEY.to_owned()).into_iter().chain(self.headers.keys().cloned()).collect()
    }
}

/// A network, `10.0.0.0/8`, or a single address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Network(pub IpNet);

impl TryFrom<String> for Network {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let one = text.parse::<IpAddr>().map(IpNet::from);
        text.parse::<IpNet>()
            .or(one)
            .map(|network| Self(network.trunc()))
            .map_err(|_| format!("invalid network `{text}`; write 10.0.0.0/8, 2001:db8::/32 or an address"))
    }
}

/// The header in which a proxy forwards the client's address. Only one is read: a proxy that sets one of them forwards
/// the other as the client sent it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ForwardedBy {
    /// `X-Forwarded-For: client, proxy`.
    XForwardedFor,
    /// `Forwarded: for=client, for=proxy` (RFC 7239).
    Forwarded,
    /// No header: the peer is the client.
    None,
}

/// The endpoint of a request that matches no route.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unmatched {
    /// `GET other`: one endpoint per method.
    #[default]
    Other,
    /// `GET /the/path`: an unbounded number of endpoints. For rules that name their endpoints.
    Path,
}

/// How the upstream reads escapes that servers disagree on: an escaped slash or backslash, and an escape that is
/// escaped itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PathEscapes {
    /// Unknown: such requests are refused.
    #[default]
    Refuse,
    /// It decodes the path once and then routes it: `/a%2Fb` is `/a/b`. nginx, WSGI, Go's `URL.Path`.
    Decode,
    /// It routes the path as it is and decodes segments later: `/a%2Fb` is one segment. Node, Go's router.
    Keep,
}

/// Whether the upstream distinguishes upper and lower case in paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PathCase {
    /// `/Login` and `/login` are different.
    #[default]
    Exact,
    /// They are the same, and so are `/login.` and `/login `, as on Windows.
    Ignore,
}

/// What happens to a request whose API key or token cannot be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unreadable {
    /// It is refused with 401: an upstream might read the credential, and its limits would not apply.
    #[default]
    Refuse,
    /// It is treated like a request without a credential.
    Anonymous,
}

/// What happens to a request that reaches an upstream with a header that names another method or path, such as
/// `X-HTTP-Method-Override` or `X-Original-URL`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Overrides {
    /// It is refused: an upstream that follows the header would run another endpoint than the one that was counted.
    #[default]
    Refuse,
    /// The header is ignored, because the upstream ignores it.
    Ignore,
}

/// The headers in which a proxy describes the original request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OriginalRequest {
    /// Whichever set contains the path. If both do and differ, one is forged, and the request is rejected.
    Auto,
    /// `X-Forwarded-Method`, `-Uri` and `-Host`.
    XForwarded,
    /// `X-Original-Method`, `-URI` and `-Host`.
    XOriginal,
    /// None: the method and the rest of the path of the check itself.
    Path,
}

/// API key settings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiKeyConfig {
    /// The header that contains the key.
    pub header: Option<String>,
    /// Also read the key from `Authorization: Bearer …`.
    pub bearer: bool,
    /// A file with a secret of at least 16 bytes, the same on every node. The store hashes keys with it, so that the
    /// hashes cannot be attacked by guessing keys.
    pub secret_file: Option<PathBuf>,
    /// Which keys are known; any if it is missing.
    pub known: Option<KnownKeysConfig>,
    /// What a request with an unknown key counts as.
    pub unknown: Option<UnknownKeys>,
    /// The keys that have a quota, for `known: {quotas: true}`; set by the program that has a control plane.
    #[serde(skip)]
    pub quota_keys: Option<QuotaKeys>,
}

/// Which API keys are known: those of which one of these is true.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KnownKeysConfig {
    /// They have one of these formats.
    pub formats: Vec<KeyFormatConfig>,
    /// They are in this file: a key, or its hash as `sha256:…`, on each line.
    pub file: Option<PathBuf>,
    /// They have a quota in the control plane.
    pub quotas: bool,
    /// A trusted peer sends them, because it has verified them.
    pub verified_by_proxy: bool,
}

/// A format of keys: a prefix, anything, and the checksum of both.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyFormatConfig {
    /// What keys begin with.
    pub prefix: String,
    /// How the digits at their end are computed from everything before.
    pub checksum: ChecksumKind,
    /// The file with the secret of an HMAC, at least 16 bytes.
    pub secret_file: Option<PathBuf>,
    /// Number of hexadecimal digits of an HMAC; 16 by default.
    pub digits: Option<usize>,
}

/// A checksum of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ChecksumKind {
    /// Anybody can compute it: it finds typing errors and keys of other services, not forged ones.
    Crc32,
    /// Only who has the secret can compute it.
    HmacSha256,
}

/// What a request with an unknown key counts as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UnknownKeys {
    /// A request without a key: its address identifies it.
    #[default]
    Address,
    /// It is refused with 401.
    Deny,
    /// A request with a known key, as without `known`.
    Key,
}

/// Returns whether a key has a quota; `None` while the quotas are not all known yet.
type QuotaLookup = dyn Fn(&str) -> Option<bool> + Send + Sync;

/// Looks up in memory whether an API key has a quota.
#[derive(Clone)]
pub struct QuotaKeys(Arc<QuotaLookup>);

impl QuotaKeys {
    /// Creates a lookup, which is called for requests and must not wait. It returns `None` while the quotas are not all
    /// known: then every key counts, because otherwise a start would lock out the callers that have one.
    #[must_use]
    pub fn new(lookup: impl Fn(&str) -> Option<bool> + Send + Sync + 'static) -> Self {
        Self(Arc::new(lookup))
    }

    pub(super) fn contains(&self, key: &str) -> bool {
        (self.0)(key).unwrap_or(true)
    }
}

impl std::fmt::Debug for QuotaKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("QuotaKeys")
    }
}

impl PartialEq for QuotaKeys {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for QuotaKeys {}

impl ApiKeyConfig {
    /// Reads the secret from `secret_file`, for the store.
    ///
    /// # Errors
    /// The file cannot be read, or its secret is too short.
    pub fn secret(&self) -> Result<Option<Vec<u8>>, IdentityConfigError> {
        self.secret_file.as_deref().map(read_secret).transpose()
    }
}

impl Default for ApiKeyConfig {
    fn default() -> Self {
        Self {
            header: Some("x-api-key".to_owned()),
            bearer: true,
            secret_file: None,
            known: None,
            unknown: None,
            quota_keys: None,
        }
    }
}

/// JWT settings.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JwtConfig {
    /// The header that contains the token, with or without `Bearer`.
    #[serde(default = "authorization")]
    pub header: String,
    /// A JWKS file with the verification keys (RS256, ES256, EdDSA, HS256).
    pub jwks: Option<PathBuf>,
    /// Accept tokens of trusted peers without verification, because the peer has verified them.
    #[serde(default)]
    pub verified_by_proxy: bool,
    /// The claim that becomes the attribute `user_id`.
    #[serde(default = "sub")]
    pub user_id: String,
    /// Other attributes from claims: `{tier: plan}`.
    #[serde(default)]
    pub claims: BTreeMap<String, String>,
    /// The required value of `iss`.
    pub issuer: Option<String>,
    /// The value that `aud` must contain.
    pub audience: Option<String>,
    /// Tolerated clock skew in seconds.
    #[serde(default = "minute")]
    pub leeway: u64,
}

fn authorization() -> String {
    "authorization".to_owned()
}

fn sub() -> String {
    "sub".to_owned()
}

const fn minute() -> u64 {
    60
}

/// Invalid identity settings.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityConfigError {
    /// An invalid header name.
    #[error("`{0}` is not a valid header name")]
    Header(String),
    /// A built-in attribute cannot be redefined.
    #[error("`{0}` is a built-in attribute; choose another name for the attribute")]
    Attribute(String),
    /// An invalid prefix length.
    #[error("invalid `ipv6_prefix: {0}`; write 1 to 128 (64 is the usual network of a caller)")]
    Prefix(u8),
    /// An invalid route.
    #[error("route `{route}`: {wrong}")]
    Route {
        /// The route.
        route: String,
        /// What is wrong with it.
        wrong: String,
    },
    /// A file that cannot be read or used.
    #[error("{}: {wrong}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        wrong: String,
    },
    /// Neither or both ways to verify tokens are set.
    #[error("`jwt` requires either `jwks: FILE` to verify tokens here, or `verified_by_proxy: true`")]
    Verification,
    /// Settings of known keys that say too little or too much.
    #[error("{0}")]
    Known(String),
}

pub(super) fn header(name: &str) -> Result<HeaderName, IdentityConfigError> {
    HeaderName::from_bytes(name.as_bytes()).map_err(|_| IdentityConfigError::Header(name.to_owned()))
}

/// The attributes that every identity may have.
const BUILT_IN: [&str; 7] = ["remote_address", "endpoint", "method", "path", "host", "api_key", GLOBAL.0];

/// Rejects the names of built-in attributes.
pub(super) fn check_attribute(name: &str) -> Result<(), IdentityConfigError> {
    if BUILT_IN.contains(&name) { Err(IdentityConfigError::Attribute(name.to_owned())) } else { Ok(()) }
}

/// Reads a file of at most `max` bytes. Only a regular one: reading a pipe may never end.
pub(super) fn read_file(path: &Path, max: u64) -> Result<Vec<u8>, IdentityConfigError> {
    let wrong = |wrong: String| IdentityConfigError::File { path: path.to_owned(), wrong };
    let read = || {
        let is_file = std::fs::metadata(path)?.is_file();
        let mut bytes = Vec::new();
        if is_file {
            std::fs::File::open(path)?.take(max + 1).read_to_end(&mut bytes)?;
        }
        Ok((is_file, bytes))
    };
    match read().map_err(|error: std::io::Error| wrong(format!("cannot be read: {error}")))? {
        (false, _) => Err(wrong("is not a file".to_owned())),
        (true, bytes) if bytes.len() as u64 > max => Err(wrong(format!("is larger than {} MiB", max >> 20))),
        (true, bytes) => Ok(bytes),
    }
}

/// Reads a secret, without the white space around it.
pub(super) fn read_secret(path: &Path) -> Result<Vec<u8>, IdentityConfigError> {
    let bytes = std::fs::read(path).map_err(|error| IdentityConfigError::File {
        path: path.to_owned(),
        wrong: format!("cannot be read: {error}"),
    })?;
    let secret = bytes.trim_ascii();
    if secret.len() < MIN_SECRET {
        let wrong = format!("the secret is too short; use at least {MIN_SECRET} bytes");
        return Err(IdentityConfigError::File { path: path.to_owned(), wrong });
    }
    Ok(secret.to_vec())
}
