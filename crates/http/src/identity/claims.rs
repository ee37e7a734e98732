//! Headers in which a client claims another address, host, path or method than its request has. Servers and frameworks
//! read many such headers, so a proxy of untrusted requests removes them (the gateway), or refuses a request
//! whose headers contradict it: a framework that follows `X-HTTP-Method-Override` would run another endpoint than the
//! one that was counted.

use super::path::{self, PathRules};
use super::{AmbiguousIdentity, endpoints::EndpointMatcher, visible};
use crate::headers::HeaderLookup;
use http::HeaderName;

/// What a header claims about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Another address, host, port, scheme or path, as a proxy would report it.
    Origin,
    /// Another method, which frameworks run instead.
    Method,
    /// Another target, which frameworks run instead.
    Target,
}

/// Names that are claims as a whole; those of one prefix are listed in [`PREFIXES`].
const NAMES: [(&str, Claim); 25] = [
    ("client-ip", Claim::Origin),
    ("cf-pseudo-ipv4", Claim::Origin),
    ("fastly-client-ip", Claim::Origin),
    ("fly-client-ip", Claim::Origin),
    ("forwarded", Claim::Origin),
    ("forwarded-for", Claim::Origin),
    ("http-client-ip", Claim::Origin),
    ("proxy-client-ip", Claim::Origin),
    ("remote-addr", Claim::Origin),
    ("true-client-ip", Claim::Origin),
    ("wl-proxy-client-ip", Claim::Origin),
    ("x-azure-clientip", Claim::Origin),
    ("x-azure-socketip", Claim::Origin),
    ("x-client-ip", Claim::Origin),
    ("x-cluster-client-ip", Claim::Origin),
    ("x-envoy-external-address", Claim::Origin),
    ("x-host", Claim::Origin),
    ("x-originating-ip", Claim::Origin),
    ("x-proxyuser-ip", Claim::Origin),
    ("x-remote-addr", Claim::Origin),
    ("x-remote-ip", Claim::Origin),
    ("x-http-method", Claim::Method),
    ("x-http-method-override", Claim::Method),
    ("x-method-override", Claim::Method),
    ("x-original-url", Claim::Target),
];

const PREFIXES: [(&str, Claim); 7] = [
    ("cf-connecting-", Claim::Origin),
    ("x-appengine-", Claim::Origin),
    ("x-envoy-original-", Claim::Origin),
    ("x-forwarded", Claim::Origin),
    ("x-original-", Claim::Origin),
    ("x-real-", Claim::Origin),
    ("x-rewrite-", Claim::Target),
];

/// Returns what a header claims about the request that it is part of, if anything.
#[must_use]
pub fn claim(name: &[u8]) -> Option<Claim> {
    let first = name.first()?.to_ascii_lowercase();
    // The first letters of all names; most fields of a request have others.
    if !matches!(first, b'c' | b'f' | b'h' | b'p' | b'r' | b't' | b'w' | b'x') {
        return None;
    }
    let named = NAMES.iter().find(|(known, _)| name.eq_ignore_ascii_case(known.as_bytes()));
    let begun = || {
        let begins = |known: &str| {
            name.get(..known.len()).is_some_and(|start| start.eq_ignore_ascii_case(known.as_bytes()))
        };
        PREFIXES.iter().find(|(known, _)| begins(known))
    };
    named.or_else(begun).map(|(_, claim)| *claim)
}

/// Refuses headers that name another method or path than the one that is counted.
pub(super) fn check(
    headers: &impl HeaderLookup,
    endpoints: &EndpointMatcher,
    paths: PathRules,
    (method, path): (&str, &str),
) -> Result<(), AmbiguousIdentity> {
    for (name, value) in headers.each() {
        // Shortest and longest of the names that are compared here.
        if !(13..=22).contains(&name.len()) || !name[0].eq_ignore_ascii_case(&b'x') {
            continue;
        }
        let text = visible(value).map(str::trim);
        let agrees = match claim(name) {
            Some(Claim::Method) => text.is_some_and(|text| endpoints.method(text) == method),
            Some(Claim::Target) => text.is_some_and(|text| {
                let other = path::path_of_target(text).map(|other| paths.canonical(other));
                other.is_some_and(|other| other.is_ok_and(|other| other == path))
            }),
            Some(Claim::Origin) | None => true,
        };
        if !agrees && let Ok(name) = HeaderName::from_bytes(name) {
            return Err(AmbiguousIdentity::Override(name));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A name that is missing here reaches an upstream that believes it.
    #[test]
    fn names_are_claims_in_any_case() {
        for (name, is) in [
            ("X-Forwarded-For", Some(Claim::Origin)),
            ("x-forwarded-prefix", Some(Claim::Origin)),
            ("X-Real-IP", Some(Claim::Origin)),
            ("CF-Connecting-IPv6", Some(Claim::Origin)),
            ("True-Client-Ip", Some(Claim::Origin)),
            ("x-original-uri", Some(Claim::Origin)),
            ("X-Original-URL", Some(Claim::Target)),
            ("X-Rewrite-Url", Some(Claim::Target)),
            ("X-HTTP-Method-Override", Some(Claim::Method)),
            ("x-http-method", Some(Claim::Method)),
            ("x-method-override", Some(Claim::Method)),
            ("x-request-id", None),
            ("content-type", None),
            ("x-api-key", None),
            ("host", None),
            ("", None),
        ] {
            assert_eq!(claim(name.as_bytes()), is, "{name}");
        }
        for (name, claimed) in NAMES.iter().chain(&PREFIXES).filter(|(_, claim)| *claim != Claim::Origin) {
            let length = name.len() + 3 * usize::from(name.ends_with('-'));
            assert!((13..=22).contains(&length), "{name} {claimed:?} is compared");
        }
    }
}
