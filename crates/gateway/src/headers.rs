//! What is taken out of a message on its way, and what is added.
//!
//! Fields about one connection end here, in both directions, with those that `Connection` names. What would tell an
//! upstream who asked is believed of trusted peers alone; of others it is overwritten.

use crate::config::Forward;
use http::HeaderMap;
use http::header::{
    CONNECTION, EXPECT, FORWARDED, HOST, HeaderName, HeaderValue, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION,
    TE, TRANSFER_ENCODING, UPGRADE,
};
use std::net::IpAddr;

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
static X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
static X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
static X_RATELIMIT_DEGRADED: HeaderName = HeaderName::from_static("x-ratelimit-degraded");
static X_RATELIMIT_WARNING: HeaderName = HeaderName::from_static("x-ratelimit-warning");
static KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
static PROXY_CONNECTION: HeaderName = HeaderName::from_static("proxy-connection");

/// The other end of a caller's connection.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) address: IpAddr,
    /// The same as it is written into a field.
    text: HeaderValue,
    scheme: &'static str,
}

impl Peer {
    pub(crate) fn new(address: IpAddr, has_tls: bool) -> Self {
        let address = address.to_canonical();
        let text = HeaderValue::from_str(&address.to_string());
        let text = text.unwrap_or_else(|_| HeaderValue::from_static("unknown"));
        Self { address, text, scheme: if has_tls { "https" } else { "http" } }
    }
}

/// Takes out what is about one connection. `Upgrade` is the caller's to put back where it is passed on.
pub(crate) fn strip_hop_by_hop(headers: &mut HeaderMap) {
    // Most messages have none: looking over the few names that there are costs less than asking for each of those.
    if !headers.keys().any(is_about_one_hop) {
        return;
    }
    if headers.contains_key(CONNECTION) {
        let named: Vec<HeaderName> = headers
            .get_all(CONNECTION)
            .iter()
            .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
            .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
            .collect();
        for name in named {
            headers.remove(name);
        }
        headers.remove(CONNECTION);
    }
    for name in [&TE, &TRANSFER_ENCODING, &UPGRADE, &KEEP_ALIVE, &PROXY_CONNECTION] {
        headers.remove(name);
    }
}

fn is_about_one_hop(name: &HeaderName) -> bool {
    let name = name.as_str();
    match name.len() {
        2 => name == "te",
        7 => name == "upgrade",
        10 => name == "connection" || name == "keep-alive",
        16 => name == "proxy-connection",
        17 => name == "transfer-encoding",
        _ => false,
    }
}

/// How a caller's fields become those that an upstream gets.
pub(crate) struct Passing<'a> {
    pub(crate) peer: &'a Peer,
    /// Whether what the peer says of others counts.
    pub(crate) is_trusted: bool,
    pub(crate) forward: Forward,
    /// Fields that count of trusted peers alone.
    pub(crate) trusted_only: &'a [HeaderName],
}

/// Makes a caller's fields those that an upstream gets.
pub(crate) fn towards_upstream(headers: &mut HeaderMap, passing: &Passing<'_>) {
    let &Passing { peer, is_trusted, forward, trusted_only } = passing;
    // Whether the caller can read trailers is asked before the field that says so is taken out.
    let trailers = headers.get(TE).is_some_and(|te| {
        let mut options = te.as_bytes().split(|byte| *byte == b',');
        options.any(|option| option.trim_ascii().eq_ignore_ascii_case(b"trailers"))
    });
    strip_hop_by_hop(headers);
    if trailers {
        headers.insert(TE, HeaderValue::from_static("trailers"));
        headers.insert(CONNECTION, HeaderValue::from_static("te"));
    }
    if headers.keys().any(is_ours_to_say) {
        for name in [&EXPECT, &PROXY_AUTHORIZATION, &X_RATELIMIT_DEGRADED, &X_RATELIMIT_WARNING] {
            headers.remove(name);
        }
    }
    if !is_trusted {
        for name in [&FORWARDED, &X_FORWARDED_FOR, &X_FORWARDED_HOST, &X_FORWARDED_PROTO] {
            headers.remove(name);
        }
        for name in trusted_only {
            headers.remove(name);
        }
    }
    let host = headers.get(HOST).cloned();
    if forward != Forward::Forwarded {
        append(headers, &X_FORWARDED_FOR, &peer.text);
        if !headers.contains_key(&X_FORWARDED_PROTO) {
            headers.insert(&X_FORWARDED_PROTO, HeaderValue::from_static(peer.scheme));
        }
        if let (Some(host), false) = (&host, headers.contains_key(&X_FORWARDED_HOST)) {
            headers.insert(&X_FORWARDED_HOST, host.clone());
        }
    }
    if forward != Forward::XForwarded {
        let by = match peer.address {
            IpAddr::V4(address) => format!("for={address}"),
            IpAddr::V6(address) => format!("for=\"[{address}]\""),
        };
        let host = host.as_ref().and_then(|host| host.to_str().ok()).unwrap_or_default();
        let element = format!("{by};host=\"{host}\";proto={}", peer.scheme);
        if let Ok(element) = HeaderValue::from_str(&element) {
            append(headers, &FORWARDED, &element);
        }
    }
}

/// What no upstream may believe of a caller, or has no use for.
fn is_ours_to_say(name: &HeaderName) -> bool {
    matches!(name.as_str(), "expect" | "proxy-authorization" | "x-ratelimit-degraded" | "x-ratelimit-warning")
}

/// Adds to the end of a list.
fn append(headers: &mut HeaderMap, name: &HeaderName, value: &HeaderValue) {
    if !headers.contains_key(name) {
        headers.insert(name, value.clone());
        return;
    }
    let mut whole = Vec::new();
    for part in headers.get_all(name).iter().chain([value]) {
        if !whole.is_empty() {
            whole.extend_from_slice(b", ");
        }
        whole.extend_from_slice(part.as_bytes());
    }
    if let Ok(whole) = HeaderValue::from_bytes(&whole) {
        headers.insert(name, whole);
    }
}

/// Makes an upstream's fields those that a caller gets.
pub(crate) fn towards_caller(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    headers.remove(PROXY_AUTHENTICATE);
}

/// The protocol that a request asks to switch to, if it is one of those that may be.
pub(crate) fn upgrade(headers: &HeaderMap, allowed: &[String]) -> Option<HeaderValue> {
    let asked = headers.get(UPGRADE)?;
    let connection = headers.get_all(CONNECTION).iter();
    let mut options = connection.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    if !options.any(|option| option.trim_ascii().eq_ignore_ascii_case(b"upgrade")) {
        return None;
    }
    let name = asked.to_str().ok()?;
    allowed.iter().any(|allowed| allowed.eq_ignore_ascii_case(name)).then(|| asked.clone())
}
