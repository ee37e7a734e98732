//! Identity: derives a request's attributes (address, API key, user, endpoint) from its head.
//!
//! | file | contents |
//! |---|---|
//! | `config` | the settings |
//! | `address` | the client's address, through trusted proxies only |
//! | `api_key` | the API key; two different keys are rejected |
//! | `credential` | the one spelling of a key or token that all servers read alike |
//! | `claims` | headers in which a client claims another address, path or method |
//! | `known_keys` | which API keys are known; others are made up |
//! | `jwt` | the user from a JSON Web Token; `jwks` has the keys, `verified_cache` the verified tokens |
//! | `verifier` | both together, for resolvers that share them; `watched_file` finds changes of their files |
//! | `endpoints` | the endpoint as a template: `/users/1` and `/users/2` are the same |
//! | `domain_endpoints` | the same for programs that embed the limiter |
//! | `path`, `host` | the canonical form of a path or a host, or a refusal |
//! | `secret_leak` | detects secrets in a path, for logs |
//!
//! One rule applies throughout: **a header is used only if the peer that sent it is trusted**, unless it is signed (a
//! token) or the caller's own choice (its API key). An untrusted client's `X-Forwarded-For` has no effect. All values
//! are bounded: a million made-up paths, methods or long headers do not become a million long counter keys.
//!
//! ```
//! use http::{HeaderMap, Method, Uri};
//! use tollgate_core::Timestamp;
//! use tollgate_http::identity::{RequestView, IdentityResolver, IdentityConfig};
//!
//! let mut settings = IdentityConfig::default();
//! settings.routes.push("GET /users/{id}".to_owned());
//! let resolver = IdentityResolver::new(&settings)?;
//! let (uri, mut headers) = (Uri::from_static("/users/17?page=2"), HeaderMap::new());
//! headers.insert("x-forwarded-for", "198.51.100.7".parse()?);
//! let request = RequestView::new("203.0.113.9".parse()?, &Method::GET, &uri, &headers);
//! let caller = resolver.resolve_direct(&request, Timestamp::ZERO)?;
//! assert_eq!(caller.get("remote_address"), Some("203.0.113.9")); // the peer is not trusted
//! assert_eq!(caller.get("endpoint"), Some("GET /users/{id}"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod address;
mod api_key;
mod claims;
mod config;
mod credential;
mod domain_endpoints;
mod endpoints;
mod host;
mod jwks;
mod jwt;
mod known_keys;
mod path;
mod secret_leak;
mod verified_cache;
mod verifier;
mod watched_file;

pub use address::is_forwarded;
pub use claims::{Claim, claim};
pub use config::{
    ApiKeyConfig, ChecksumKind, ForwardedBy, IdentityConfig, IdentityConfigError, JwtConfig, KeyFormatConfig,
    KnownKeysConfig, Network, OriginalRequest, Overrides, PathCase, PathEscapes, QuotaKeys, UnknownKeys,
    Unmatched, Unreadable,
};
pub use domain_endpoints::{DomainEndpoints, EndpointTarget};
pub use endpoints::{EndpointMatcher, EndpointSettings};
pub use host::canonical_host;
pub use path::{PathError, PathRules};
pub use verifier::CredentialVerifier;

use crate::h1::head;
use crate::headers::HeaderLookup;
use crate::value;
use address::Address;
use api_key::ApiKeyReader;
use http::header::{HOST, HeaderMap, HeaderName};
use http::{Method, StatusCode, Uri};
use jwt::JwtVerifier;
use smallvec::SmallVec;
use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;
use tollgate_core::{Timestamp, secret_prefix};
use tollgate_rules::{CALLER_KEY, may_be_secret};

/// The attribute that names what a request claims and is not known to be true.
const UNVERIFIED: &str = "unverified";

/// The head of a request, and the peer that sent it.
#[derive(Clone, Copy, Debug)]
pub struct RequestView<'r, F = HeaderMap> {
    /// Address of the peer, or the one from the PROXY header of a trusted peer.
    pub peer: IpAddr,
    /// The method.
    pub method: &'r str,
    /// The path of the target.
    pub path: &'r str,
    /// The authority of the target, if it has one.
    pub authority: Option<&'r str>,
    /// The header fields.
    pub headers: &'r F,
}

impl<'r> RequestView<'r> {
    /// Creates a view from the types of the `http` crate.
    #[must_use]
    pub fn new(peer: IpAddr, method: &'r Method, uri: &'r Uri, headers: &'r HeaderMap) -> Self {
        let authority = uri.authority().map(http::uri::Authority::as_str);
        Self { peer, method: method.as_str(), path: uri.path(), authority, headers }
    }
}

/// Resolves the callers of requests by one set of settings. Created once, then shared.
#[derive(Debug)]
pub struct IdentityResolver {
    address: Address,
    key: ApiKeyReader,
    verifier: Arc<CredentialVerifier>,
    unknown: UnknownKeys,
    endpoints: EndpointMatcher,
    endpoint_settings: Arc<EndpointSettings>,
    paths: PathRules,
    unreadable: Unreadable,
    overrides: Overrides,
    original: OriginalRequest,
    headers: Vec<MappedHeader>,
}

/// A header that is mapped to an attribute.
#[derive(Debug)]
struct MappedHeader {
    attribute: String,
    header: HeaderName,
    only_trusted: bool,
}

/// A request that servers would read differently: as another caller, or as another endpoint. Whatever it was counted
/// as, one of them would give it a fresh limit, so it is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AmbiguousIdentity {
    /// Two headers describe different requests; only one of them can be the proxy's.
    #[error(
        "{0} and {1} describe different requests; remove in the proxy the one that it does not set, or set \
         `identity.original`"
    )]
    Original(&'static str, &'static str),
    /// A header that identifies the caller occurs twice with different values.
    #[error("`{0}` identifies the caller and occurs more than once with different values; send one of them")]
    Twice(HeaderName),
    /// The API key header and the bearer token contain different keys.
    #[error(
        "`{0}` and `authorization: Bearer` contain different API keys; send one of them, or, if only one of the two \
         contains keys, set `identity.api_key.bearer: false` or another \
         `identity.api_key.header`"
    )]
    Keys(HeaderName),
    /// The path has no canonical form.
    #[error(transparent)]
    Path(#[from] PathError),
    /// A header names another method or path than the request.
    #[error(
        "`{0}` names another method or path than the request; remove it, or set `identity.overrides: ignore` if the \
         upstream does not follow it"
    )]
    Override(HeaderName),
    /// A header that programs behind CGI or WSGI cannot tell from one that identifies the caller or the request.
    #[error("`{0}` is read as another header by many servers; write it with hyphens")]
    Alias(HeaderName),
    /// A credential that servers read differently.
    #[error(
        "the credential in `{0}` cannot be read; send `Authorization: Bearer TOKEN`, or a key without spaces, commas, \
         semicolons and quotes"
    )]
    Unreadable(HeaderName),
    /// An API key that is not known.
    #[error("the API key is not known; send one that was issued")]
    UnknownKey,
    /// A token that is not accepted.
    #[error("the token in `{0}` is not valid; get a new one")]
    Token(HeaderName),
    /// A trusted proxy describes the original request in a header that cannot be read.
    #[error("`{0}` cannot be read; send UTF-8 without control characters")]
    Description(&'static str),
    /// A trusted proxy describes the original request by something that no request has.
    #[error("`{0}` is not {1}; send what the original request has")]
    NoDescription(&'static str, &'static str),
}

impl AmbiguousIdentity {
    /// Returns the status of the response: 401 for a credential that cannot be read or is not known,
    /// 400 for everything else.
    #[must_use]
    pub const fn status(&self) -> StatusCode {
        match self {
            Self::Unreadable(_) | Self::UnknownKey | Self::Token(_) => StatusCode::UNAUTHORIZED,
            _ => StatusCode::BAD_REQUEST,
        }
    }
}

/// The attributes of a request, borrowed from it where possible.
#[derive(Clone)]
pub struct ResolvedCaller<'r> {
    /// The client's full address, for logs.
    pub address: IpAddr,
    /// The request came from a trusted peer.
    pub is_trusted: bool,
    pairs: SmallVec<[(&'r str, Cow<'r, str>); 10]>,
}

impl std::fmt::Debug for ResolvedCaller<'_> {
    /// Masks values that may be secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = |value: &str| format!("{}…", secret_prefix(value));
        let pairs = self.pairs.iter();
        let pairs = pairs.map(|(name, value)| {
            (name, if may_be_secret(name) { Cow::Owned(shown(value)) } else { Cow::Borrowed(&**value) })
        });
        f.debug_map().entry(&"address", &self.address).entries(pairs).finish()
    }
}

/// Number of requests identified by this process.
#[cfg(feature = "count-identifications")]
pub static IDENTIFICATIONS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

#[inline]
fn count() {
    #[cfg(feature = "count-identifications")]
    IDENTIFICATIONS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
}

impl<'r> ResolvedCaller<'r> {
    /// Returns all attributes, in the form that a check takes.
    #[must_use]
    pub fn attributes(&self) -> SmallVec<[(&str, &str); 12]> {
        self.pairs.iter().map(|(key, value)| (*key, &**value)).collect()
    }

    /// Returns one attribute.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| &**value)
    }

    fn add(&mut self, name: &'r str, value: impl Into<Cow<'r, str>>) {
        if self.get(name).is_none() {
            self.pairs.push((name, value::bounded(value.into())));
        }
    }
}

/// Method, path and host of the request that is being limited.
struct RequestTarget<'r> {
    method: &'r str,
    path: &'r str,
    host: Option<&'r str>,
}

impl IdentityResolver {
    /// Creates a resolver and reads the files that `settings` names.
    pub fn new(settings: &IdentityConfig) -> Result<Self, IdentityConfigError> {
        Self::with_endpoints(settings, [])
    }

    /// Creates a resolver with the endpoints that rules name as additional routes, so that a rule on `POST /login`
    /// matches without a route in the settings. Names that are not valid routes or exist already are skipped.
    pub fn with_endpoints<'e>(
        settings: &'e IdentityConfig,
        named: impl IntoIterator<Item = &'e str>,
    ) -> Result<Self, IdentityConfigError> {
        Self::sharing(settings, named, CredentialVerifier::new(settings)?)
    }

    /// Like [`Self::with_endpoints`], with a verifier that other resolvers of the same settings share.
    pub fn sharing<'e>(
        settings: &IdentityConfig,
        named: impl IntoIterator<Item = &'e str>,
        verifier: Arc<CredentialVerifier>,
    ) -> Result<Self, IdentityConfigError> {
        let endpoints = EndpointMatcher::new(&EndpointSettings::new(settings), named, &[], [])?;
        Self::with_matcher(settings, endpoints, verifier)
    }

    /// Creates a resolver with a matcher of endpoints.
    pub fn with_matcher(
        settings: &IdentityConfig,
        endpoints: EndpointMatcher,
        verifier: Arc<CredentialVerifier>,
    ) -> Result<Self, IdentityConfigError> {
        let mapped = |map: &std::collections::BTreeMap<String, String>, only_trusted| {
            let each = map.iter().map(move |(attribute, header)| {
                config::check_attribute(attribute)?;
                Ok(MappedHeader {
                    attribute: attribute.clone(),
                    header: config::header(header)?,
                    only_trusted,
                })
            });
            each.collect::<Result<Vec<_>, IdentityConfigError>>()
        };
        let mut headers = mapped(&settings.trusted_headers, true)?;
        headers.extend(mapped(&settings.headers, false)?);
        Ok(Self {
            address: Address::new(settings)?,
            key: ApiKeyReader::new(&settings.api_key)?,
            verifier,
            unknown: settings.api_key.unknown.unwrap_or_default(),
            endpoints,
            endpoint_settings: Arc::new(EndpointSettings::new(settings)),
            paths: PathRules::new(settings),
            unreadable: settings.unreadable,
            overrides: settings.overrides,
            original: settings.original,
            headers,
        })
    }

    /// Reads the files of keys again that have changed; returns whether any has. For programs without a server: call it
    /// about twice a second.
    ///
    /// # Errors
    /// The error of a changed file, once per change; its previous content stays active.
    pub fn reload_if_changed(&self) -> Result<bool, String> {
        self.verifier.reload_if_changed()
    }

    /// Returns what the endpoint of a request depends on, for [`DomainEndpoints`].
    #[must_use]
    pub fn endpoint_target(&self, method: &Method) -> EndpointTarget {
        EndpointTarget { settings: Arc::clone(&self.endpoint_settings), method: method.clone() }
    }

    /// Returns the matcher of endpoints.
    #[must_use]
    pub const fn endpoints(&self) -> &EndpointMatcher {
        &self.endpoints
    }

    /// Returns whether the peer is a trusted proxy.
    #[must_use]
    pub fn trusts(&self, peer: IpAddr) -> bool {
        self.address.trusts(peer)
    }

    /// Formats a client's address as the attribute `remote_address`: an IPv6 address becomes its network.
    #[must_use]
    pub fn address_attribute(&self, address: IpAddr) -> String {
        self.address.attribute(address)
    }

    /// Returns the client's full address, through trusted proxies; for logs of requests that are not resolved.
    #[must_use]
    pub fn address(&self, peer: IpAddr, headers: &impl HeaderLookup) -> IpAddr {
        self.address.client(peer, self.trusts(peer), headers)
    }

    /// Resolves the caller of this request itself; for a gateway, which receives the request that is being limited and
    /// removes the claims of untrusted peers ([`claim`]) before it forwards it.
    ///
    /// # Errors
    /// Servers would read the request differently; respond with the error's status.
    pub fn resolve_direct<'r>(
        &'r self,
        request: &RequestView<'r, impl HeaderLookup>,
        now: Timestamp,
    ) -> Result<ResolvedCaller<'r>, AmbiguousIdentity> {
        self.resolve_routed(request, self.lookup(), now)
    }

    /// Like [`Self::resolve_direct`], where `endpoint` returns the endpoint of a method and canonical path.
    ///
    /// # Errors
    /// Servers would read the request differently; respond with the error's status.
    pub fn resolve_routed<'r>(
        &'r self,
        request: &RequestView<'r, impl HeaderLookup>,
        endpoint: impl FnOnce(&'r str, &str) -> Option<&'r str>,
        now: Timestamp,
    ) -> Result<ResolvedCaller<'r>, AmbiguousIdentity> {
        let is_trusted = self.trusts(request.peer);
        self.resolve(request, &request.target(), (is_trusted, is_trusted), endpoint, now)
    }

    /// Like [`Self::resolve_direct`], for a layer in front of a service that sees all headers of the request.
    ///
    /// # Errors
    /// Servers would read the request differently; respond with the error's status.
    pub fn resolve_in_place<'r>(
        &'r self,
        request: &RequestView<'r, impl HeaderLookup>,
        now: Timestamp,
    ) -> Result<ResolvedCaller<'r>, AmbiguousIdentity> {
        self.refuse_aliases(request.headers)?;
        self.resolve(request, &request.target(), (self.trusts(request.peer), true), self.lookup(), now)
    }

    /// Resolves the caller of the original request that a proxy describes; `prefix` is the path of the check endpoint.
    ///
    /// # Errors
    /// Servers would read the request differently, or its description is ambiguous.
    pub fn resolve_forwarded<'r>(
        &'r self,
        request: &RequestView<'r, impl HeaderLookup>,
        prefix: &str,
        now: Timestamp,
    ) -> Result<ResolvedCaller<'r>, AmbiguousIdentity> {
        self.refuse_aliases(request.headers)?;
        let path = request.path.strip_prefix(prefix).unwrap_or(request.path);
        let mut target = RequestTarget { path: if path.is_empty() { "/" } else { path }, ..request.target() };
        // `/check/` is the path `/`, appended; a proxy that describes the request in headers asks `/check`.
        let is_appended = self.original == OriginalRequest::Auto && !path.is_empty();
        let is_trusted = self.trusts(request.peer);
        if is_trusted {
            let source = self.header_convention(request.headers)?;
            let method = source.forwarded_target(request.headers, &METHOD)?;
            let path = match source.forwarded_target(request.headers, &URI)? {
                None => source.original_url(request.headers)?,
                known => known,
            };
            // A proxy that appends the path to the check's does not describe the request in headers: they are the
            // client's. Method and path must agree; the host is the check's own, as at the gateway.
            let host = match is_appended {
                true => None,
                false => source.forwarded_target(request.headers, &ORIGINAL_HOST)?,
            };
            let described = RequestTarget {
                method: method.unwrap_or(target.method),
                path: path.unwrap_or(target.path),
                host: host.or(target.host),
            };
            if is_appended && !self.is_same(&target, &described)? {
                return Err(AmbiguousIdentity::Original(
                    "the path of the check",
                    "the headers of the request",
                ));
            }
            target = described;
        }
        self.resolve(request, &target, (is_trusted, is_trusted), self.lookup(), now)
    }

    /// Refuses headers such as `X_Api_Key`: where headers become variables (CGI, WSGI, PHP) every character except letters
    /// and digits becomes an underscore, so the upstream would read a key that was not counted. The gateway removes them.
    fn refuse_aliases(&self, headers: &impl HeaderLookup) -> Result<(), AmbiguousIdentity> {
        let is_odd = |name: &[u8]| !name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-');
        for (name, _) in headers.each().filter(|(name, _)| is_odd(name)) {
            let plain: SmallVec<[u8; 32]> = name
                .iter()
                .map(|byte| if byte.is_ascii_alphanumeric() { byte.to_ascii_lowercase() } else { b'-' })
                .collect();
            let is_named = |known: &HeaderName| known.as_str().as_bytes() == &plain[..];
            let names =
                self.key.header().into_iter().chain(self.verifier.jwt.as_ref().map(JwtVerifier::header));
            let mut names = names.chain(self.headers.iter().map(|mapped| &mapped.header));
            let is_alias = claim(&plain).is_some() || plain[..] == *b"authorization" || names.any(is_named);
            if is_alias && let Ok(name) = HeaderName::from_bytes(name) {
                return Err(AmbiguousIdentity::Alias(name));
            }
        }
        Ok(())
    }

    /// Returns whether two targets are the same method and path.
    fn is_same(&self, one: &RequestTarget<'_>, other: &RequestTarget<'_>) -> Result<bool, PathError> {
        Ok(self.endpoints.method(one.method) == self.endpoints.method(other.method)
            && self.paths.canonical(one.path)? == self.paths.canonical(other.path)?)
    }

    /// Returns the header set that the proxy uses: the one that contains the path. Headers of the other set are the
    /// client's.
    fn header_convention(&self, headers: &impl HeaderLookup) -> Result<OriginalRequest, AmbiguousIdentity> {
        if self.original != OriginalRequest::Auto {
            return Ok(self.original);
        }
        let uri = OriginalRequest::Auto.forwarded_target(headers, &URI)?;
        let is_present = |name| headers.first(name).is_some();
        Ok(match (uri, is_present(&URI.forwarded), is_present(&URI.original)) {
            (Some(_), true, false) => OriginalRequest::XForwarded,
            (Some(_), false, true) => OriginalRequest::XOriginal,
            _ => OriginalRequest::Auto,
        })
    }

    fn lookup<'r>(&'r self) -> impl FnOnce(&'r str, &str) -> Option<&'r str> {
        |method, path| self.endpoints.endpoint(method, path)
    }

    /// Resolves the caller of `target`; with `has_claims`, its upstream sees the request's claims.
    fn resolve<'r>(
        &'r self,
        request: &RequestView<'r, impl HeaderLookup>,
        target: &RequestTarget<'r>,
        (is_trusted, has_claims): (bool, bool),
        endpoint: impl FnOnce(&'r str, &str) -> Option<&'r str>,
        now: Timestamp,
    ) -> Result<ResolvedCaller<'r>, AmbiguousIdentity> {
        count();
        let address = self.address.client(request.peer, is_trusted, request.headers);
        let mut caller = ResolvedCaller { address, is_trusted, pairs: SmallVec::new() };
        caller.add("remote_address", self.address.attribute(address));
        let method = self.endpoints.method(target.method);
        let path = self.paths.canonical(target.path)?;
        if has_claims && self.overrides == Overrides::Refuse {
            claims::check(request.headers, &self.endpoints, self.paths, (method, &path))?;
        }
        match endpoint(method, &path) {
            Some(endpoint) => caller.add("endpoint", endpoint),
            None => caller.add("endpoint", format!("{method} {path}")),
        }
        caller.add("method", method);
        caller.add("path", path);
        if let Some(host) = target.host {
            caller.add("host", canonical_host(host));
        }
        let CredentialVerifier { jwt, keys } = &*self.verifier;
        if let Some(tokens) = jwt {
            tokens.read(request.headers, now, (self.unreadable, self.key.reads_bearer()), &mut caller)?;
        }
        if let Some(value) = self.key.read(request.headers, jwt.is_some(), self.unreadable)? {
            let key = api_key::text(value);
            let is_known = keys.as_ref().is_none_or(|keys| keys.knows(value, &key, is_trusted));
            match self.unknown {
                UnknownKeys::Deny if !is_known => return Err(AmbiguousIdentity::UnknownKey),
                UnknownKeys::Address if !is_known => caller.add(UNVERIFIED, CALLER_KEY),
                // Already bounded, and no other attribute can have this name.
                _ => caller.pairs.push((CALLER_KEY, key)),
            }
        }
        for mapped in self.headers.iter().filter(|mapped| is_trusted || !mapped.only_trusted) {
            if let Some(value) = one_value(request.headers, &mapped.header)? {
                caller.add(&mapped.attribute, String::from_utf8_lossy(value));
            }
        }
        Ok(caller)
    }
}

impl OriginalRequest {
    /// Returns one part of the original request from this header set.
    fn forwarded_target<'r>(
        self,
        headers: &'r impl HeaderLookup,
        names: &'static ForwardedHeaders,
    ) -> Result<Option<&'r str>, AmbiguousIdentity> {
        let read = |name: &'static HeaderName| described(headers, name, names.part);
        match self {
            Self::Path => Ok(None),
            Self::XForwarded => read(&names.forwarded),
            Self::XOriginal => read(&names.original),
            Self::Auto => match (read(&names.forwarded)?, read(&names.original)?) {
                (Some(one), Some(other)) if one != other => {
                    Err(AmbiguousIdentity::Original(names.forwarded.as_str(), names.original.as_str()))
                }
                (one, other) => Ok(one.or(other)),
            },
        }
    }

    /// Returns the path of the whole URL of the original request, which ingress-nginx sends instead of its path.
    fn original_url(self, headers: &impl HeaderLookup) -> Result<Option<&str>, AmbiguousIdentity> {
        match self {
            Self::Auto | Self::XOriginal => described(headers, &ORIGINAL_URL, Part::Path),
            Self::XForwarded | Self::Path => Ok(None),
        }
    }
}

/// Returns the value of a header that identifies a caller or a request. Two different ones are refused: a client that adds a
/// second would choose which of them is counted.
fn one_value<'r>(
    headers: &'r impl HeaderLookup,
    name: &HeaderName,
) -> Result<Option<&'r [u8]>, AmbiguousIdentity> {
    // HTTP/1 values come without the spaces around them, those of HTTP/2 may not: upstreams read both alike.
    let mut all = headers.all(name).map(trimmed);
    let first = all.next();
    match all.all(|other| Some(other) == first) {
        true => Ok(first),
        false => Err(AmbiguousIdentity::Twice(name.clone())),
    }
}

fn trimmed(value: &[u8]) -> &[u8] {
    let is_outer = |byte: &u8| matches!(byte, b' ' | b'\t');
    let start = value.iter().position(|byte| !is_outer(byte)).unwrap_or(value.len());
    let end = value.iter().rposition(|byte| !is_outer(byte)).map_or(start, |last| last + 1);
    &value[start..end]
}

/// A part of a request that a proxy describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Method,
    Path,
    Host,
}

/// Returns what a header says of one part of the original request, as strictly as the gateway reads the request itself:
/// whatever else it was taken for, it would be counted apart.
fn described<'r>(
    headers: &'r impl HeaderLookup,
    name: &'static HeaderName,
    part: Part,
) -> Result<Option<&'r str>, AmbiguousIdentity> {
    let Some(value) = one_value(headers, name)? else { return Ok(None) };
    let text = text(name, value)?.trim_matches([' ', '\t']);
    let (read, what) = match part {
        Part::Method => {
            (Some(text).filter(|method| Method::from_bytes(method.as_bytes()).is_ok()), "a method")
        }
        Part::Path => (path::path_of_target(text), "a path that begins with `/`, or a URL"),
        Part::Host => {
            // Every proxy of a chain appends the host that it was asked for; the last is the nearest one's.
            let last = text.rsplit(',').next().unwrap_or_default().trim_matches([' ', '\t']);
            (Some(last).filter(|host| head::is_host(host.as_bytes())), "a host")
        }
    };
    read.map(Some).ok_or(AmbiguousIdentity::NoDescription(name.as_str(), what))
}

/// Returns the text of a header in which a trusted proxy describes a request. One that cannot be read is refused: the
/// request would be counted as another one.
fn text<'r>(name: &'static HeaderName, value: &'r [u8]) -> Result<&'r str, AmbiguousIdentity> {
    let text = std::str::from_utf8(value).ok().filter(|text| !text.chars().any(char::is_control));
    text.ok_or(AmbiguousIdentity::Description(name.as_str()))
}

/// The two header names that proxies use for one part of the original request.
struct ForwardedHeaders {
    part: Part,
    forwarded: HeaderName,
    original: HeaderName,
}

impl ForwardedHeaders {
    const fn new(part: Part, forwarded: &'static str, original: &'static str) -> Self {
        Self {
            part,
            forwarded: HeaderName::from_static(forwarded),
            original: HeaderName::from_static(original),
        }
    }
}

static METHOD: ForwardedHeaders =
    ForwardedHeaders::new(Part::Method, "x-forwarded-method", "x-original-method");
static URI: ForwardedHeaders = ForwardedHeaders::new(Part::Path, "x-forwarded-uri", "x-original-uri");
static ORIGINAL_URL: HeaderName = HeaderName::from_static("x-original-url");
static ORIGINAL_HOST: ForwardedHeaders =
    ForwardedHeaders::new(Part::Host, "x-forwarded-host", "x-original-host");

/// Returns the value if it is visible ASCII; others are ignored.
fn visible(value: &[u8]) -> Option<&str> {
    let is_visible = |byte: &u8| (b' '..=b'~').contains(byte) || *byte == b'\t';
    std::str::from_utf8(value).ok().filter(|_| value.iter().all(is_visible))
}

impl<'r, F: HeaderLookup> RequestView<'r, F> {
    /// Returns what the request itself asks for.
    fn target(&self) -> RequestTarget<'r> {
        RequestTarget { method: self.method, path: self.path, host: self.host() }
    }

    /// Returns the host of the request, from its target or its `Host` field.
    #[must_use]
    pub fn host(&self) -> Option<&'r str> {
        self.authority.or_else(|| self.headers.first(&HOST).and_then(visible))
    }
}
