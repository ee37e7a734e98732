//! Header rewriting: which headers are removed from a message and which are added.
//!
//! Hop-by-hop headers are removed in both directions, including those that `Connection` names. Headers that identify the
//! client to an upstream are accepted from trusted peers only, and overwritten for others. Fields are read in place and
//! written to their destination: HTTP/1 bytes or an HTTP/2 header map.

mod names;

pub(crate) use names::ProtectedHeaders;

use crate::config::ForwardedHeader;
use http::header::{CONNECTION, COOKIE, HOST, HeaderName, HeaderValue, PROXY_AUTHENTICATE, TE, UPGRADE};
use names::{ForwardedKind, forwarded_kind, is_any, is_gateway_owned, is_hop_by_hop};
use smallvec::SmallVec;
use std::net::IpAddr;
use std::sync::Arc;
use tollgate_http::h1::head::are_values;
use tollgate_http::headers::{HeaderAppend, HeaderLookup, HeaderSink};
use tollgate_http::identity::is_forwarded;
use tollgate_http::traceparent::TRACEPARENT;

/// The peer of a client connection.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) address: IpAddr,
    /// The address as header text.
    text: String,
    scheme: &'static str,
}

impl Peer {
    pub(crate) fn new(address: IpAddr, has_tls: bool) -> Self {
        let address = address.to_canonical();
        Self { address, text: address.to_string(), scheme: if has_tls { "https" } else { "http" } }
    }
}

/// Writer for headers that the gateway sets itself, and the list of their names: forwarded headers of these names are dropped.
pub(crate) struct OwnHeaders<'o, A: ?Sized> {
    pub(crate) out: &'o mut A,
    pub(crate) names: SmallVec<[HeaderName; 8]>,
}

impl<'o, A: HeaderAppend + ?Sized> OwnHeaders<'o, A> {
    pub(crate) fn new(out: &'o mut A) -> Self {
        Self { out, names: SmallVec::new() }
    }
}

impl<A: HeaderAppend + ?Sized> HeaderSink for OwnHeaders<'_, A> {
    fn put(&mut self, name: &HeaderName, value: &[u8]) {
        // A line break in a value would start another field.
        if are_values(value) && !self.names.contains(name) {
            self.out.add(name.as_str().as_bytes(), value);
            self.names.push(name.clone());
        }
    }
}

/// Names of the hop-by-hop headers of a message.
struct HopByHop<'h>(SmallVec<[&'h [u8]; 4]>);

impl<'h> HopByHop<'h> {
    fn new(fields: &'h impl HeaderLookup) -> Self {
        let named = fields.all(&CONNECTION).flat_map(|value| value.split(|byte| *byte == b','));
        // Connection options that are not header names.
        let is_field = |name: &&[u8]| !is_any(name, &["", "close", "keep-alive"]);
        Self(named.map(<[u8]>::trim_ascii).filter(is_field).collect())
    }

    fn ends(&self, name: &[u8]) -> bool {
        is_hop_by_hop(name) || self.names(name)
    }

    fn names(&self, name: &[u8]) -> bool {
        self.0.iter().any(|named| named.eq_ignore_ascii_case(name))
    }
}

/// Rules by which a client's headers are forwarded to an upstream.
pub(crate) struct ForwardRules<'a> {
    pub(crate) peer: &'a Peer,
    /// Whether forwarding headers from this peer are accepted.
    pub(crate) is_trusted: bool,
    pub(crate) forward: ForwardedHeader,
    pub(crate) protected: &'a Arc<ProtectedHeaders>,
    /// Host in the request target, if it has one.
    pub(crate) authority: Option<&'a str>,
    /// `Host` for the upstream, if configured.
    pub(crate) host: Option<&'a HeaderValue>,
    /// Span of this request in a sampled trace, the parent of the upstream's span.
    pub(crate) traceparent: Option<HeaderValue>,
}

/// Writes a client's headers as forwarded to an upstream.
pub(crate) fn write_upstream_headers<A: HeaderAppend + ?Sized>(
    fields: &impl HeaderLookup,
    passing: &ForwardRules<'_>,
    out: &mut A,
) {
    let &ForwardRules { peer, is_trusted, forward, protected: guard, authority, host, .. } = passing;
    let hop = HopByHop::new(fields);
    let client_host = fields.first(&HOST).or(authority.map(str::as_bytes));
    // `Host` first: recipients look for it first.
    if let Some(host) = host.map(HeaderValue::as_bytes).or(client_host) {
        out.add(b"host", host);
    }
    if let Some(own) = &passing.traceparent {
        out.add(TRACEPARENT.as_str().as_bytes(), own.as_bytes());
    }
    let mut lists = [Vec::new(), Vec::new()];
    let (mut has_proto, mut has_host, mut has_cookies) = (false, false, false);
    for (name, value) in fields.each() {
        let is_host = name.len() == 4 && is_any(name, &["host"]);
        let is_followed = passing.traceparent.is_some() && is_any(name, &[TRACEPARENT.as_str()]);
        if is_host || is_followed || is_hop_by_hop(name) || is_gateway_owned(name) {
            continue;
        }
        // The upstream gets the identity headers that the rules used: `Connection` cannot remove them.
        if guard.is_alias_of_protected(name) || (hop.names(name) && !guard.is_identity(name)) {
            continue;
        }
        if !is_trusted && guard.is_trusted_only(name) {
            continue;
        }
        if name.len() == 6 && is_any(name, &[COOKIE.as_str()]) {
            if !std::mem::replace(&mut has_cookies, true) {
                add_cookies(fields, out);
            }
            continue;
        }
        match forwarded_kind(name) {
            // The peer's address is appended as the last of the list.
            Some(ForwardedKind::For) if forward != ForwardedHeader::Forwarded => extend(&mut lists[0], value),
            Some(ForwardedKind::Forwarded) if forward != ForwardedHeader::XForwarded => {
                // What is appended to a malformed one could be taken for a part of its last element.
                if is_forwarded(value) {
                    extend(&mut lists[1], value);
                }
            }
            other => {
                has_proto |= other == Some(ForwardedKind::Proto);
                has_host |= other == Some(ForwardedKind::Host);
                out.add(name, value);
            }
        }
    }
    if fields.all(&TE).any(|te| options(te).any(|option| option.eq_ignore_ascii_case(b"trailers"))) {
        out.add(b"te", b"trailers");
        out.add(b"connection", b"te");
    }
    let [x_for, forwarded] = &mut lists;
    if forward != ForwardedHeader::Forwarded {
        if x_for.is_empty() {
            out.add(b"x-forwarded-for", peer.text.as_bytes());
        } else {
            extend(x_for, peer.text.as_bytes());
            out.add(b"x-forwarded-for", x_for);
        }
        if !has_proto {
            out.add(b"x-forwarded-proto", peer.scheme.as_bytes());
        }
        if let (Some(host), false) = (client_host, has_host) {
            out.add(b"x-forwarded-host", host);
        }
    }
    if forward != ForwardedHeader::XForwarded {
        let by = match peer.address {
            IpAddr::V4(address) => format!("for={address}"),
            IpAddr::V6(address) => format!("for=\"[{address}]\""),
        };
        let host = client_host.and_then(|host| std::str::from_utf8(host).ok()).unwrap_or_default();
        extend(forwarded, format!("{by};host=\"{host}\";proto={}", peer.scheme).as_bytes());
        out.add(b"forwarded", forwarded);
    }
}

/// Writes all cookies in one field: HTTP/2 may split them, and HTTP/1 recipients expect one (RFC 9113, 8.2.3).
fn add_cookies<A: HeaderAppend + ?Sized>(fields: &impl HeaderLookup, out: &mut A) {
    let mut all = fields.all(&COOKIE);
    let first = all.next().unwrap_or_default();
    let Some(second) = all.next() else { return out.add(b"cookie", first) };
    let mut joined = first.to_vec();
    for cookie in std::iter::once(second).chain(all) {
        joined.extend_from_slice(b"; ");
        joined.extend_from_slice(cookie);
    }
    out.add(b"cookie", &joined);
}

fn options(value: &[u8]) -> impl Iterator<Item = &[u8]> {
    value.split(|byte| *byte == b',').map(<[u8]>::trim_ascii)
}

/// Appends to a comma-separated list.
fn extend(list: &mut Vec<u8>, value: &[u8]) {
    if !list.is_empty() {
        list.extend_from_slice(b", ");
    }
    list.extend_from_slice(value);
}

/// Writes an upstream's headers as sent to the client, except those already set. The body's framing determines the length.
pub(crate) fn write_client_headers(fields: &impl HeaderLookup, own: &mut OwnHeaders<'_, impl HeaderAppend>) {
    let hop = HopByHop::new(fields);
    for (name, value) in fields.each() {
        let is_own = |own: &HeaderName| is_any(name, &[own.as_str()]);
        let is_length = name.len() == 14 && is_any(name, &["content-length"]);
        if !hop.ends(name) && !is_length && !is_for_proxies(name) && !own.names.iter().any(is_own) {
            own.out.add(name, value);
        }
    }
}

fn is_for_proxies(name: &[u8]) -> bool {
    name.len() == 18 && is_any(name, &[PROXY_AUTHENTICATE.as_str()])
}

/// Returns the protocol that a request asks to upgrade to, if it is allowed.
pub(crate) fn upgrade<'f>(fields: &'f impl HeaderLookup, allowed: &[String]) -> Option<&'f [u8]> {
    let requested = fields.first(&UPGRADE)?;
    if !fields.all(&CONNECTION).flat_map(options).any(|option| option.eq_ignore_ascii_case(b"upgrade")) {
        return None;
    }
    allowed.iter().any(|allowed| requested.eq_ignore_ascii_case(allowed.as_bytes())).then_some(requested)
}

#[cfg(test)]
mod tests;
