//! What is taken out of a message on its way, and what is added.
//!
//! Fields about one connection end here, in both directions, with those that `Connection` names. What would tell an
//! upstream who asked is believed of trusted peers alone; of others it is overwritten. Fields are read where they lie and
//! written where they go: into the bytes of an HTTP/1 head, or into a map for HTTP/2.

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
use tollgate_http::traceparent::TRACEPARENT;

/// The other end of a caller's connection.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) address: IpAddr,
    /// The same as it is written into a field.
    text: String,
    scheme: &'static str,
}

impl Peer {
    pub(crate) fn new(address: IpAddr, has_tls: bool) -> Self {
        let address = address.to_canonical();
        Self { address, text: address.to_string(), scheme: if has_tls { "https" } else { "http" } }
    }
}

/// Fields of our own, among those that are passed on: whoever passes others on leaves out those that are here already.
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
        // What ends a line would begin another field.
        if are_values(value) && !self.names.contains(name) {
            self.out.add(name.as_str().as_bytes(), value);
            self.names.push(name.clone());
        }
    }
}

/// The fields of a message that are about one connection.
struct HopByHop<'h>(SmallVec<[&'h [u8]; 4]>);

impl<'h> HopByHop<'h> {
    fn new(fields: &'h impl HeaderLookup) -> Self {
        let named = fields.all(&CONNECTION).flat_map(|value| value.split(|byte| *byte == b','));
        // What is said of the connection itself names no field.
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

/// How a caller's fields become those that an upstream gets.
pub(crate) struct ForwardRules<'a> {
    pub(crate) peer: &'a Peer,
    /// Whether what the peer says of others counts.
    pub(crate) is_trusted: bool,
    pub(crate) forward: ForwardedHeader,
    pub(crate) protected: &'a Arc<ProtectedHeaders>,
    /// The host that the target names, where it does.
    pub(crate) authority: Option<&'a str>,
    /// The host that the upstream is told instead of the caller's.
    pub(crate) host: Option<&'a HeaderValue>,
    /// Our span in the caller's trace, where it is followed: the upstream's is under it.
    pub(crate) traceparent: Option<HeaderValue>,
}

/// Writes a caller's fields as an upstream gets them.
pub(crate) fn write_upstream_headers<A: HeaderAppend + ?Sized>(
    fields: &impl HeaderLookup,
    passing: &ForwardRules<'_>,
    out: &mut A,
) {
    let &ForwardRules { peer, is_trusted, forward, protected: guard, authority, host, .. } = passing;
    let hop = HopByHop::new(fields);
    let told_host = fields.first(&HOST).or(authority.map(str::as_bytes));
    // The next reader of a message looks for it first.
    if let Some(host) = host.map(HeaderValue::as_bytes).or(told_host) {
        out.add(b"host", host);
    }
    if let Some(own) = &passing.traceparent {
        out.add(TRACEPARENT.as_str().as_bytes(), own.as_bytes());
    }
    let mut lists = [Vec::new(), Vec::new()];
    let (mut told_proto, mut told_other, mut told_cookies) = (false, false, false);
    for (name, value) in fields.each() {
        let is_host = name.len() == 4 && is_any(name, &["host"]);
        let is_followed = passing.traceparent.is_some() && is_any(name, &[TRACEPARENT.as_str()]);
        if is_host || is_followed || is_hop_by_hop(name) || is_gateway_owned(name) {
            continue;
        }
        // What rules were told, the upstream is told as well: `Connection` cannot take that away.
        if guard.is_alias_of_protected(name) || (hop.names(name) && !guard.is_identity(name)) {
            continue;
        }
        if !is_trusted && guard.is_trusted_only(name) {
            continue;
        }
        if name.len() == 6 && is_any(name, &[COOKIE.as_str()]) {
            if !std::mem::replace(&mut told_cookies, true) {
                add_cookies(fields, out);
            }
            continue;
        }
        match forwarded_kind(name) {
            // We are the last of those whom the list names.
            Some(ForwardedKind::For) if forward != ForwardedHeader::Forwarded => extend(&mut lists[0], value),
            Some(ForwardedKind::Forwarded) if forward != ForwardedHeader::XForwarded => {
                extend(&mut lists[1], value);
            }
            other => {
                told_proto |= other == Some(ForwardedKind::Proto);
                told_other |= other == Some(ForwardedKind::Host);
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
        if !told_proto {
            out.add(b"x-forwarded-proto", peer.scheme.as_bytes());
        }
        if let (Some(host), false) = (told_host, told_other) {
            out.add(b"x-forwarded-host", host);
        }
    }
    if forward != ForwardedHeader::XForwarded {
        let by = match peer.address {
            IpAddr::V4(address) => format!("for={address}"),
            IpAddr::V6(address) => format!("for=\"[{address}]\""),
        };
        let host = told_host.and_then(|host| std::str::from_utf8(host).ok()).unwrap_or_default();
        extend(forwarded, format!("{by};host=\"{host}\";proto={}", peer.scheme).as_bytes());
        out.add(b"forwarded", forwarded);
    }
}

/// All cookies in one field: HTTP/2 may have them apart, and a reader of HTTP/1 looks at one (RFC 9113, 8.2.3).
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

/// Adds to the end of a list.
fn extend(list: &mut Vec<u8>, value: &[u8]) {
    if !list.is_empty() {
        list.extend_from_slice(b", ");
    }
    list.extend_from_slice(value);
}

/// Writes an upstream's fields as a caller gets them, but for those that are there already. The length is told by how the
/// body is sent.
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

/// The protocol that a request asks to switch to, if it is one of those that may be.
pub(crate) fn upgrade<'f>(fields: &'f impl HeaderLookup, allowed: &[String]) -> Option<&'f [u8]> {
    let asked = fields.first(&UPGRADE)?;
    if !fields.all(&CONNECTION).flat_map(options).any(|option| option.eq_ignore_ascii_case(b"upgrade")) {
        return None;
    }
    allowed.iter().any(|allowed| asked.eq_ignore_ascii_case(allowed.as_bytes())).then_some(asked)
}

#[cfg(test)]
mod tests;
