//! What a field's name says of it: whether it is about one connection, ours to say, or one that tells who asks.
//!
//! Many servers hand fields to programs as variables (CGI, WSGI, PHP), where every character but letters and digits is an
//! underscore: `X_Forwarded_For` is `X-Forwarded-For` there. A name that turns into a guarded one is therefore no better than
//! that, and never passes; a program that needs it can be told by its real name.

use http::HeaderMap;
use http::header::HeaderName;
use tollgate_http::identity::IdentityConfig;

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

/// What no upstream may believe of a caller, or has no use for. The length is told by how the body is sent.
pub(super) fn is_gateway_owned(name: &[u8]) -> bool {
    match name.len() {
        6 => is_any(name, &["expect"]),
        14 => is_any(name, &["content-length"]),
        19 => is_any(name, &["proxy-authorization", "x-ratelimit-warning"]),
        20 => is_any(name, &["x-ratelimit-degraded"]),
        _ => false,
    }
}

/// What proxies tell of who asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ForwardedKind {
    Forwarded,
    For,
    Host,
    Proto,
    /// `X-Forwarded-Port` and the like.
    Other,
}

pub(super) fn forwarded_kind(name: &[u8]) -> Option<ForwardedKind> {
    match name.len() {
        9 if is_any(name, &["forwarded"]) => Some(ForwardedKind::Forwarded),
        15 if is_any(name, &["x-forwarded-for"]) => Some(ForwardedKind::For),
        16 if is_any(name, &["x-forwarded-host"]) => Some(ForwardedKind::Host),
        17 if is_any(name, &["x-forwarded-proto"]) => Some(ForwardedKind::Proto),
        13.. if begins(name, "x-forwarded-") => Some(ForwardedKind::Other),
        _ => None,
    }
}

fn begins(name: &[u8], with: &str) -> bool {
    name.get(..with.len()).is_some_and(|start| start.eq_ignore_ascii_case(with.as_bytes()))
}

/// The names that settings give a meaning to.
#[derive(Debug, Default)]
pub(crate) struct ProtectedHeaders {
    /// Fields that count of trusted peers alone.
    trusted_only: Vec<HeaderName>,
    /// Fields that tell who asks: rules have seen them, so the upstream sees the same.
    identity_headers: Vec<HeaderName>,
    /// Whether any of these has a name that others could be taken for.
    has_odd: bool,
}

impl ProtectedHeaders {
    pub(crate) fn new(who: &IdentityConfig) -> Self {
        let names = |names: &mut dyn Iterator<Item = &String>| -> Vec<HeaderName> {
            names.filter_map(|name| name.parse().ok()).collect()
        };
        let trusted_only = names(&mut who.trusted_headers.values());
        let mut telling_who = vec![http::header::AUTHORIZATION, http::header::COOKIE];
        let token = who.jwt.as_ref().map(|jwt| &jwt.header);
        telling_who.extend(names(&mut who.api_key.header.iter().chain(token).chain(who.headers.values())));
        telling_who.extend(trusted_only.iter().cloned());
        let has_odd = telling_who.iter().any(|name| is_odd(name.as_str().as_bytes()));
        Self { trusted_only, identity_headers: telling_who, has_odd }
    }

    /// Whether it counts of trusted peers alone.
    pub(super) fn is_trusted_only(&self, name: &[u8]) -> bool {
        forwarded_kind(name).is_some()
            || self.trusted_only.iter().any(|known| is_any(name, &[known.as_str()]))
    }

    /// Whether it tells rules who asks.
    pub(super) fn is_identity(&self, name: &[u8]) -> bool {
        forwarded_kind(name).is_some()
            || self.identity_headers.iter().any(|known| is_any(name, &[known.as_str()]))
    }

    /// Whether it could be taken for one that means something here, and is none.
    #[inline]
    pub(super) fn is_alias_of_protected(&self, name: &[u8]) -> bool {
        (self.has_odd || is_odd(name)) && self.is_alias(name)
    }

    #[cold]
    fn is_alias(&self, name: &[u8]) -> bool {
        let looks: Vec<u8> = plain(name).collect();
        let by_settings = |known: &HeaderName| plain(known.as_str().as_bytes()).eq(looks.iter().copied());
        let is_known = self.identity_headers.iter().any(|known| is_any(name, &[known.as_str()]));
        let by_name = is_hop_by_hop(&looks) || is_gateway_owned(&looks) || forwarded_kind(&looks).is_some();
        !is_known && ((is_odd(name) && by_name) || self.identity_headers.iter().any(by_settings))
    }

    /// Takes out of what follows a request's body whatever would have been read from its head.
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

/// Whether a name has other characters than letters, digits and hyphens.
fn is_odd(name: &[u8]) -> bool {
    !name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
}

/// A name as its look-alikes have it too.
fn plain(name: &[u8]) -> impl Iterator<Item = u8> {
    name.iter().map(|byte| if byte.is_ascii_alphanumeric() { byte.to_ascii_lowercase() } else { b'-' })
}
