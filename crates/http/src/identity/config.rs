//! What an operator can say about callers. `serve` and `gateway` have these under the same names.

use http::HeaderName;
use ipnet::IpNet;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

const MIN_SECRET: usize = 16;

/// How callers are told apart.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct IdentityConfig {
    /// The networks of proxies whose headers count. This machine alone, unless said otherwise.
    pub trusted: Vec<Network>,
    /// Where a trusted proxy says whom it speaks for.
    pub forwarded: ForwardedBy,
    /// The bits of an IPv6 address that make a caller: whoever has one address of a /64 has all of them.
    pub ipv6_prefix: u8,
    /// Where an API key is.
    pub api_key: ApiKeyConfig,
    /// Where a user's token is, and what it takes to believe it.
    pub jwt: Option<JwtConfig>,
    /// Endpoints: `GET /users/{id}`, or `/files/{*rest}` for any method.
    pub routes: Vec<String>,
    /// The endpoint of what matches no route.
    pub unmatched: Unmatched,
    /// Where a proxy that asks for a decision says which request it asks for.
    pub original: OriginalRequest,
    /// Attributes from headers, whoever sends them.
    pub headers: BTreeMap<String, String>,
    /// Attributes from headers of trusted peers: tiers, tenants, whatever a stranger must not choose.
    pub trusted_headers: BTreeMap<String, String>,
}

impl Default for IdentityConfig {
    fn default() -> Self {
        let here =
            ["127.0.0.1", "::1"].map(|text| Network(IpNet::from(text.parse::<IpAddr>().expect("one"))));
        Self {
            trusted: here.to_vec(),
            forwarded: ForwardedBy::XForwardedFor,
            ipv6_prefix: 64,
            api_key: ApiKeyConfig::default(),
            jwt: None,
            routes: Vec::new(),
            unmatched: Unmatched::Other,
            original: OriginalRequest::Auto,
            headers: BTreeMap::new(),
            trusted_headers: BTreeMap::new(),
        }
    }
}

impl IdentityConfig {
    /// Makes the files that it names relative to the folder of the settings' own file.
    pub fn resolve(&mut self, folder: &Path) {
        let jwks = self.jwt.as_mut().and_then(|jwt| jwt.jwks.as_mut());
        for path in jwks.into_iter().chain(self.api_key.secret_file.as_mut()) {
            *path = folder.join(&*path);
        }
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
            .map_err(|_| format!("`{text}` is no network; write 10.0.0.0/8, 2001:db8::/32 or one address"))
    }
}

/// The header by which a proxy says whom it speaks for. Only one: a proxy that writes one of them passes the other on
/// as the caller wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ForwardedBy {
    /// `X-Forwarded-For: client, proxy`.
    XForwardedFor,
    /// `Forwarded: for=client, for=proxy` (RFC 7239).
    Forwarded,
    /// None: the peer is the client.
    None,
}

/// What the endpoint is of a path that matches no route.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unmatched {
    /// `GET other`: as many endpoints as there are methods.
    Other,
    /// `GET /the/path`: as many as callers care to make up. For rules that name their endpoints.
    Path,
}

/// Where a proxy says which request it asks about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OriginalRequest {
    /// In whichever spelling the path is there; where both are and disagree, one was forged, and the request is refused.
    Auto,
    /// In `X-Forwarded-Method`, `-Uri` and `-Host`.
    XForwarded,
    /// In `X-Original-Method`, `-URI` and `-Host`.
    XOriginal,
    /// In the method and the rest of the path.
    Path,
}

/// Where an API key is.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ApiKeyConfig {
    /// The header that holds it.
    pub header: Option<String>,
    /// Whether `Authorization: Bearer …` holds one where that header is missing.
    pub bearer: bool,
    /// A file with a secret of at least 16 bytes, the same on every node: where keys become part of what a store writes
    /// down, they are hashed with it, so that who sees the hashes cannot try guesses.
    pub secret_file: Option<PathBuf>,
}

impl ApiKeyConfig {
    /// What `secret_file` holds, for the store.
    ///
    /// # Errors
    /// A file that cannot be read, or whose secret is too short.
    pub fn secret(&self) -> Result<Option<Vec<u8>>, IdentityConfigError> {
        let Some(path) = &self.secret_file else { return Ok(None) };
        let bytes = read_file(path)?;
        let secret = bytes.trim_ascii();
        if secret.len() < MIN_SECRET {
            let wrong = format!("a secret has at least {MIN_SECRET} bytes");
            return Err(IdentityConfigError::File { path: path.clone(), wrong });
        }
        Ok(Some(secret.to_vec()))
    }
}

impl Default for ApiKeyConfig {
    fn default() -> Self {
        Self { header: Some("x-api-key".to_owned()), bearer: true, secret_file: None }
    }
}

/// Where a user's token is, and what it takes to believe it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JwtConfig {
    /// The header that holds it, with or without `Bearer`.
    #[serde(default = "authorization")]
    pub header: String,
    /// A JWKS file to verify it by: RS256, ES256, EdDSA, HS256.
    pub jwks: Option<PathBuf>,
    /// Believe it unverified where a trusted peer sends it, since that has verified it.
    #[serde(default)]
    pub verified_by_proxy: bool,
    /// The claim that becomes `user_id`.
    #[serde(default = "sub")]
    pub user_id: String,
    /// Other attributes from claims: `{tier: plan}`.
    #[serde(default)]
    pub claims: BTreeMap<String, String>,
    /// What `iss` must be.
    pub issuer: Option<String>,
    /// What `aud` must hold.
    pub audience: Option<String>,
    /// Seconds that clocks may differ by.
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

/// Settings that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentityConfigError {
    /// No header can have this name.
    #[error("`{0}` is no name of a header")]
    Header(String),
    /// Attributes that are always there cannot be given another meaning.
    #[error("`{0}` is told by every request already; choose another name for the attribute")]
    Attribute(String),
    /// No such prefix.
    #[error("`ipv6_prefix: {0}` is none; write 1 to 128 (64 is a caller's usual network)")]
    Prefix(u8),
    /// A route that cannot be matched.
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
    /// A token nobody verifies, or that two do.
    #[error("`jwt` wants either `jwks: FILE` to verify tokens here, or `verified_by_proxy: true`")]
    Verification,
}

pub(super) fn header(name: &str) -> Result<HeaderName, IdentityConfigError> {
    HeaderName::from_bytes(name.as_bytes()).map_err(|_| IdentityConfigError::Header(name.to_owned()))
}

/// What every request tells by itself cannot come from elsewhere too.
pub(super) fn check_attribute(name: &str) -> Result<(), IdentityConfigError> {
    const OWN: [&str; 7] = ["remote_address", "endpoint", "method", "path", "host", "api_key", "global"];
    if OWN.contains(&name) { Err(IdentityConfigError::Attribute(name.to_owned())) } else { Ok(()) }
}

pub(super) fn read_file(path: &Path) -> Result<Vec<u8>, IdentityConfigError> {
    std::fs::read(path).map_err(|error| IdentityConfigError::File {
        path: path.to_owned(),
        wrong: format!("cannot be read: {error}"),
    })
}
