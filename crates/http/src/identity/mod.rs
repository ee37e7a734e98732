//! Who is asking for what: the attributes that rules match, from a request's head.
//!
//! | file | tells |
//! |---|---|
//! | `config` | what an operator can say |
//! | `address` | the client's address, through trusted proxies only |
//! | `api_key` | an API key, of which there is one |
//! | `jwt` | a user, from a JSON Web Token; `jwks` holds what verifies it, `verified_cache` what has been |
//! | `endpoints` | the endpoint, as a template: `/users/1` and `/users/2` are one |
//! | `path` | a path as an upstream would read it |
//! | `secret_leak` | whether a path tells a secret, for logs |
//!
//! The rule that everything here follows: **a header counts only where the peer that sent it is one we trust**, unless it
//! proves itself (a signed token) or is the caller's own to choose (its API key). What a stranger writes into
//! `X-Forwarded-For` changes nothing. And no value is unbounded: a million made-up paths, methods or long headers are not a
//! million long keys.
//!
//! ```
//! use http::{HeaderMap, Method, Uri};
//! use tollgate_core::Timestamp;
//! use tollgate_http::identity::{RequestView, IdentityResolver, IdentityConfig};
//!
//! let mut settings = IdentityConfig::default();
//! settings.routes.push("GET /users/{id}".to_owned());
//! let who = IdentityResolver::new(&settings)?;
//! let (uri, mut headers) = (Uri::from_static("/users/17?page=2"), HeaderMap::new());
//! headers.insert("x-forwarded-for", "198.51.100.7".parse()?);
//! let asked = RequestView::new("203.0.113.9".parse()?, &Method::GET, &uri, &headers);
//! let caller = who.resolve_direct(&asked, Timestamp::ZERO)?;
//! assert_eq!(caller.get("remote_address"), Some("203.0.113.9")); // the peer is nobody that we trust
//! assert_eq!(caller.get("endpoint"), Some("GET /users/{id}"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod address;
mod api_key;
mod config;
mod endpoints;
mod jwks;
mod jwt;
mod path;
mod secret_leak;
mod verified_cache;

pub use config::{
    ApiKeyConfig, ForwardedBy, IdentityConfig, IdentityConfigError, JwtConfig, Network, OriginalRequest,
    Unmatched,
};
pub use jwt::JwtVerifier;

use crate::headers::HeaderLookup;
use address::Address;
use api_key::ApiKeyReader;
use endpoints::EndpointMatcher;
use http::header::{HOST, HeaderMap, HeaderName};
use http::{Method, Uri};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Arc;
use tollgate_core::{Timestamp, beginning};
use tollgate_rules::{TENANT_KEY, may_be_secret};

/// The head of a request, and who handed it to us.
#[derive(Clone, Copy, Debug)]
pub struct RequestView<'r, F = HeaderMap> {
    /// The other end of the connection; what a PROXY line said of it, where that is trusted.
    pub peer: IpAddr,
    /// The method.
    pub method: &'r str,
    /// The target's path.
    pub path: &'r str,
    /// The target's host, where it has one.
    pub authority: Option<&'r str>,
    /// The header fields.
    pub headers: &'r F,
}

impl<'r> RequestView<'r> {
    /// The head as the types of the `http` crate have it.
    #[must_use]
    pub fn new(peer: IpAddr, method: &'r Method, uri: &'r Uri, headers: &'r HeaderMap) -> Self {
        let authority = uri.authority().map(http::uri::Authority::as_str);
        Self { peer, method: method.as_str(), path: uri.path(), authority, headers }
    }
}

/// Reads callers by one set of settings. Made once, then shared.
#[derive(Debug)]
pub struct IdentityResolver {
    address: Address,
    key: ApiKeyReader,
    jwt: Option<Arc<JwtVerifier>>,
    endpoints: EndpointMatcher,
    original: OriginalRequest,
    headers: Vec<MappedHeader>,
}

/// A header that becomes an attribute.
#[derive(Debug)]
struct MappedHeader {
    attribute: String,
    header: HeaderName,
    only_trusted: bool,
}

/// A request that says two things of which only one can be so. Whoever wrote the other may be anyone, so it is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AmbiguousIdentity {
    /// Two headers name different requests, and only one of them can be the proxy's.
    #[error("`{0}` and `{1}` disagree: let the proxy remove the one that it does not set, or set `original`")]
    Original(&'static str, &'static str),
    /// A field that tells who asks is there with two values.
    #[error("`{0}` tells who asks and is there more than once, with different values: send one of them")]
    Twice(HeaderName),
    /// The field of API keys holds one, and a bearer token is another.
    #[error(
        "`{0}` and `authorization: Bearer` are different API keys: send one of them; where only one of the two holds \
         keys, say so with `who.api_key.bearer: false`, or with another `who.api_key.header`"
    )]
    Keys(HeaderName),
}

/// What is known of a caller, borrowed from its request where it can be.
#[derive(Clone)]
pub struct ResolvedCaller<'r> {
    /// Its whole address, for logs.
    pub address: IpAddr,
    /// Whether its request came by a peer that we trust.
    pub is_trusted: bool,
    pairs: SmallVec<[(&'r str, Cow<'r, str>); 10]>,
}

impl std::fmt::Debug for ResolvedCaller<'_> {
    /// Without what may be a secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let shown = |value: &str| format!("{}…", beginning(value));
        let pairs = self.pairs.iter();
        let pairs = pairs.map(|(name, value)| {
            (name, if may_be_secret(name) { Cow::Owned(shown(value)) } else { Cow::Borrowed(&**value) })
        });
        f.debug_map().entry(&"address", &self.address).entries(pairs).finish()
    }
}

/// How many requests were identified by this process.
#[cfg(feature = "count-identifications")]
pub static IDENTIFICATIONS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

#[inline]
fn count() {
    #[cfg(feature = "count-identifications")]
    IDENTIFICATIONS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
}

impl<'r> ResolvedCaller<'r> {
    /// The attributes, as a check wants them.
    #[must_use]
    pub fn attributes(&self) -> SmallVec<[(&str, &str); 12]> {
        self.pairs.iter().map(|(key, value)| (*key, &**value)).collect()
    }

    /// One attribute.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| &**value)
    }

    fn add(&mut self, name: &'r str, value: impl Into<Cow<'r, str>>) {
        if self.get(name).is_none() {
            self.pairs.push((name, api_key::bounded(value.into())));
        }
    }
}

/// Method, path and host of the request that is meant.
struct RequestTarget<'r> {
    method: &'r str,
    path: &'r str,
    host: Option<&'r str>,
}

impl IdentityResolver {
    /// Reads the settings, and the files that they name.
    pub fn new(settings: &IdentityConfig) -> Result<Self, IdentityConfigError> {
        Self::with_endpoints(settings, [])
    }

    /// The same, where endpoints that rules name are routes as well: a rule on `POST /login` bites without being told
    /// of twice. Names that are no routes, or those of routes that there are, are passed over.
    pub fn with_endpoints<'e>(
        settings: &'e IdentityConfig,
        named: impl IntoIterator<Item = &'e str>,
    ) -> Result<Self, IdentityConfigError> {
        Self::sharing(settings, named, JwtVerifier::new(settings)?)
    }

    /// The same with a reader of tokens that others of the same settings share.
    pub fn sharing<'e>(
        settings: &'e IdentityConfig,
        named: impl IntoIterator<Item = &'e str>,
        tokens: Option<Arc<JwtVerifier>>,
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
            jwt: tokens,
            endpoints: EndpointMatcher::new(&settings.routes, named, settings.unmatched)?,
            original: settings.original,
            headers,
        })
    }

    /// Whether headers of this peer count.
    #[must_use]
    pub fn trusts(&self, peer: IpAddr) -> bool {
        self.address.trusts(peer)
    }

    /// The client's whole address, through trusted proxies: for logs of what is not read any further.
    #[must_use]
    pub fn address(&self, peer: IpAddr, headers: &impl HeaderLookup) -> IpAddr {
        self.address.client(peer, self.trusts(peer), headers)
    }

    /// Who asks for this very request: for a gateway, which is what the caller wanted to reach.
    ///
    /// # Errors
    /// What says two things of who asks; a 400 is the answer to it.
    pub fn resolve_direct<'r>(
        &'r self,
        asked: &RequestView<'r, impl HeaderLookup>,
        now: Timestamp,
    ) -> Result<ResolvedCaller<'r>, AmbiguousIdentity> {
        count();
        let target = RequestTarget { method: asked.method, path: asked.path, host: asked.host() };
        self.resolve(asked, &target, self.trusts(asked.peer), now)
    }

    /// Who asks for the request that a proxy tells about; `prefix` is where the proxy was sent to ask.
    ///
    /// # Errors
    /// What says two things of who asks, or for what.
    pub fn resolve_forwarded<'r>(
        &'r self,
        asked: &RequestView<'r, impl HeaderLookup>,
        prefix: &str,
        now: Timestamp,
    ) -> Result<ResolvedCaller<'r>, AmbiguousIdentity> {
        count();
        let own = asked.path.strip_prefix(prefix).unwrap_or(asked.path);
        let mut target = RequestTarget {
            method: asked.method,
            path: if own.is_empty() { "/" } else { own },
            host: asked.host(),
        };
        let is_trusted = self.trusts(asked.peer);
        if is_trusted {
            let spelling = self.header_convention(asked.headers)?;
            if let Some(method) = spelling.forwarded_target(asked.headers, &METHOD)? {
                target.method = method;
            }
            if let Some(uri) = spelling.forwarded_target(asked.headers, &URI)? {
                target.path = path::path_of_target(uri);
            }
            if let Some(host) = spelling.forwarded_target(asked.headers, &ORIGINAL_HOST)? {
                target.host = Some(host);
            }
        }
        self.resolve(asked, &target, is_trusted, now)
    }

    /// Which spelling is the proxy's: the one that it tells the path in. The other's headers are then its callers' own.
    fn header_convention(&self, headers: &impl HeaderLookup) -> Result<OriginalRequest, AmbiguousIdentity> {
        if self.original != OriginalRequest::Auto {
            return Ok(self.original);
        }
        let uri = OriginalRequest::Auto.forwarded_target(headers, &URI)?;
        let is_there = |name| headers.first(name).is_some();
        Ok(match (uri, is_there(&URI.forwarded), is_there(&URI.original)) {
            (Some(_), true, false) => OriginalRequest::XForwarded,
            (Some(_), false, true) => OriginalRequest::XOriginal,
            _ => OriginalRequest::Auto,
        })
    }

    fn resolve<'r>(
        &'r self,
        asked: &RequestView<'r, impl HeaderLookup>,
        target: &RequestTarget<'r>,
        is_trusted: bool,
        now: Timestamp,
    ) -> Result<ResolvedCaller<'r>, AmbiguousIdentity> {
        let address = self.address.client(asked.peer, is_trusted, asked.headers);
        let mut caller = ResolvedCaller { address, is_trusted, pairs: SmallVec::new() };
        caller.add("remote_address", self.address.attribute(address));
        let method = self.endpoints.method(target.method);
        let path = path::normalize(target.path);
        match self.endpoints.endpoint(method, &path) {
            Some(endpoint) => caller.add("endpoint", endpoint),
            None => caller.add("endpoint", format!("{method} {path}")),
        }
        caller.add("method", method);
        caller.add("path", path);
        if let Some(host) = target.host {
            caller.add("host", path::host(host));
        }
        if let Some(tokens) = &self.jwt {
            tokens.read(asked.headers, is_trusted, now, &mut caller)?;
        }
        if let Some(key) = self.key.read(asked.headers, self.jwt.is_some())? {
            // Bounded already; nothing else can be called so.
            caller.pairs.push((TENANT_KEY, key));
        }
        for mapped in self.headers.iter().filter(|mapped| is_trusted || !mapped.only_trusted) {
            if let Some(value) = asked.headers.last(&mapped.header) {
                caller.add(&mapped.attribute, String::from_utf8_lossy(value));
            }
        }
        Ok(caller)
    }
}

impl OriginalRequest {
    /// What a proxy says of the original request, in this spelling.
    fn forwarded_target<'r>(
        self,
        headers: &'r impl HeaderLookup,
        names: &'static ForwardedHeaders,
    ) -> Result<Option<&'r str>, AmbiguousIdentity> {
        let last = |name| headers.last(name).and_then(visible);
        match self {
            Self::Path => Ok(None),
            Self::XForwarded => Ok(last(&names.forwarded)),
            Self::XOriginal => Ok(last(&names.original)),
            Self::Auto => match (last(&names.forwarded), last(&names.original)) {
                (Some(one), Some(other)) if one != other => {
                    Err(AmbiguousIdentity::Original(names.forwarded.as_str(), names.original.as_str()))
                }
                (one, other) => Ok(one.or(other)),
            },
        }
    }
}

/// The two spellings of what proxies tell of a request.
struct ForwardedHeaders {
    forwarded: HeaderName,
    original: HeaderName,
}

impl ForwardedHeaders {
    const fn new(forwarded: &'static str, original: &'static str) -> Self {
        Self { forwarded: HeaderName::from_static(forwarded), original: HeaderName::from_static(original) }
    }
}

static METHOD: ForwardedHeaders = ForwardedHeaders::new("x-forwarded-method", "x-original-method");
static URI: ForwardedHeaders = ForwardedHeaders::new("x-forwarded-uri", "x-original-uri");
static ORIGINAL_HOST: ForwardedHeaders = ForwardedHeaders::new("x-forwarded-host", "x-original-host");

/// A path as rules and routes see it: `//login`, `/%6Cogin` and `/login/` are `/login`.
#[must_use]
pub fn normalized_path(path: &str) -> Cow<'_, str> {
    path::normalize(path)
}

/// A value of visible ASCII; any other says nothing that can be relied on.
fn visible(value: &[u8]) -> Option<&str> {
    let is_visible = |byte: &u8| (b' '..=b'~').contains(byte) || *byte == b'\t';
    std::str::from_utf8(value).ok().filter(|_| value.iter().all(is_visible))
}

impl<'r, F: HeaderLookup> RequestView<'r, F> {
    /// The host that it asks.
    #[must_use]
    pub fn host(&self) -> Option<&'r str> {
        self.authority.or_else(|| self.headers.first(&HOST).and_then(visible))
    }
}
