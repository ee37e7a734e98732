//! Classes of header names: hop-by-hop, owned by the gateway, or identifying the client. What a client may claim about its
//! address, path and method is listed in [`tollgate_http::identity::claim`].
//!
//! Many servers pass headers to programs as variables (CGI, WSGI, PHP), where every character except letters and digits becomes
//! an underscore: `X_Forwarded_For` equals `X-Forwarded-For` there. A name that maps to a protected one is therefore never
//! forwarded; a configuration that needs it can name it exactly.

use http::HeaderMap;
use http::header::HeaderName;
use tollgate_http::identity::{IdentityConfig, claim};

pub(super) fn is_any(name: &[u8], known: &[&str]) -> bool {
    known.iter().any(|known| name.eq_ignore_ascii_case(known.as_bytes()))
}

pub(super) fn is_hop_by_hop(name: &[u8]) -> bool {
    match name.len() {
        2 => is_any(name, &["te"]),
        7 => is_any(name, &["upgrade"]),
        10 => is_any(name, &["connection", "keep-alive"]),
        16 => is_any(name, &["proxy-connection"]),
        17 => is_any(name, &["transfer-encoding"]),
        _ => false,
    }
}

/// Returns whether the gateway sets this header itself or never forwards it. The body's framing determines the length.
pub(super) fn is_gateway_owned(name: &[u8]) -> bool {
    match name.len() {
        6 => is_any(name, &["expect"]),
        14 => is_any(name, &["content-length"]),
        19 => is_any(name, &["proxy-authorization", "x-ratelimit-warning"]),
        20 => is_any(name, &["x-ratelimit-degraded"]),
        _ => false,
    }
}

/// Kind of a forwarding header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForwardedKind {
    Forwarded,
    For,
    Host,
    Proto,
}

pub(super) fn forwarded_kind(name: &[u8]) -> Option<ForwardedKind> {
    match name.len() {
        9 if is_any(name, &["forwarded"]) => Some(ForwardedKind::Forwarded),
        15 if is_any(name, &["x-forwarded-for"]) => Some(ForwardedKind::For),
        16 if is_any(name, &["x-forwarded-host"]) => Some(ForwardedKind::Host),
        17 if is_any(name, &["x-forwarded-proto"]) => Some(ForwardedKind::Proto),
        _ => None,
    }
}

fn begins(name: &[u8], with: &str) -> bool {
    name.get(..with.len()).is_some_and(|start| start.eq_ignore_ascii_case(with.as_bytes()))
}

/// Header names with a meaning in the configuration.
#[derive(Debug, Default)]
pub(crate) struct ProtectedHeaders {
    /// Headers accepted from trusted peers only.
    trusted_only: Vec<HeaderName>,
    /// Headers that identify the caller: the upstream gets the same values that the rules used.
    identity_headers: Vec<HeaderName>,
    /// Whether any of these names contains characters that aliases are mapped from.
    has_odd: bool,
}

impl ProtectedHeaders {
    pub(crate) fn new(identity: &IdentityConfig) -> Self {
        let names = |names: &mut dyn Iterator<Item = &String>| -> Vec<HeaderName> {
            names.filter_map(|name| name.parse().ok()).collect()
        };
        let trusted_only = names(&mut identity.trusted_headers.values());
        let mut identity_headers = vec![http::header::AUTHORIZATION, http::header::COOKIE];
        let token = identity.jwt.as_ref().map(|jwt| &jwt.header);
        identity_headers
            .extend(names(&mut identity.api_key.header.iter().chain(token).chain(identity.headers.values())));
        identity_headers.extend(trusted_only.iter().cloned());
        let has_odd = identity_headers.iter().any(|name| is_odd(name.as_str().as_bytes()));
        Self { trusted_only, identity_headers, has_odd }
    }

    /// Returns whether this header is accepted from trusted peers only: a claim, unless `headers` maps it.
    pub(super) fn is_trusted_only(&self, name: &[u8]) -> bool {
        let is_listed = |list: &[HeaderName]| list.iter().any(|known| is_any(name, &[known.as_str()]));
        match claim(name) {
            Some(_) => is_listed(&self.trusted_only) || !is_listed(&self.identity_headers),
            None => is_listed(&self.trusted_only),
        }
    }

    /// Returns whether this header identifies the caller.
    pub(super) fn is_identity(&self, name: &[u8]) -> bool {
        claim(name).is_some() || self.identity_headers.iter().any(|known| is_any(name, &[known.as_str()]))
    }

    /// Returns whether this name could be read as a protected one without being one.
    #[inline]
    pub(super) fn is_alias_of_protected(&self, name: &[u8]) -> bool {
        (self.has_odd || is_odd(name)) && self.is_alias(name)
    }

    #[cold]
    fn is_alias(&self, name: &[u8]) -> bool {
        let canonical: Vec<u8> = plain(name).collect();
        let by_settings = |known: &HeaderName| plain(known.as_str().as_bytes()).eq(canonical.iter().copied());
        let is_known = self.identity_headers.iter().any(|known| is_any(name, &[known.as_str()]));
        let by_name =
            is_hop_by_hop(&canonical) || is_gateway_owned(&canonical) || claim(&canonical).is_some();
        !is_known && ((is_odd(name) && by_name) || self.identity_headers.iter().any(by_settings))
    }

    /// Removes from trailers everything that would have a meaning in a head.
    pub(crate) fn clean(&self, trailers: &mut HeaderMap) {
        tollgate_http::h1::chunked::drop_forbidden(trailers);
        let is_barred = |name: &&HeaderName| {
            let name = name.as_str().as_bytes();
            is_hop_by_hop(name)
                || is_gateway_owned(name)
                || begins(name, "x-ratelimit-")
                || self.is_identity(name)
                || self.is_alias_of_protected(name)
        };
        let barred: Vec<HeaderName> = trailers.keys().filter(is_barred).cloned().collect();
        for name in barred {
            trailers.remove(name);
        }
    }
}

/// Returns whether a name has characters other than letters, digits and hyphens.
fn is_odd(name: &[u8]) -> bool {
    !name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
}

/// Returns a name in the form that it shares with its aliases.
fn plain(name: &[u8]) -> impl Iterator<Item = u8> {
    name.iter().map(|byte| if byte.is_ascii_alphanumeric() { byte.to_ascii_lowercase() } else { b'-' })
}
