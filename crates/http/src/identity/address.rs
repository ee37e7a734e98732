//! The client's address: the peer's, or what peers that we trust say of whom they speak for.
//!
//! Each proxy appends the address it was called from, so a chain is read from its right end, which the nearest proxy
//! wrote: the first address that is no trusted proxy's is the client. What stands further left was written by that client.
//! Taking the leftmost address, as many do, lets anyone be anyone.

use super::config::{ForwardedBy, IdentityConfig, IdentityConfigError};
use crate::headers::HeaderLookup;
use http::header::{FORWARDED, HeaderName};
use ipnet::{IpNet, Ipv6Net};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Proxies in a row that are believed. No real chain is as long.
const MAX_HOPS: usize = 64;

static X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

#[derive(Debug)]
pub(super) struct Address {
    trusted: Vec<IpNet>,
    forwarded: ForwardedBy,
    ipv6_prefix: u8,
}

impl Address {
    pub(super) fn new(settings: &IdentityConfig) -> Result<Self, IdentityConfigError> {
        if !(1..=128).contains(&settings.ipv6_prefix) {
            return Err(IdentityConfigError::Prefix(settings.ipv6_prefix));
        }
        Ok(Self {
            trusted: settings.trusted.iter().map(|network| network.0).collect(),
            forwarded: settings.forwarded,
            ipv6_prefix: settings.ipv6_prefix,
        })
    }

    pub(super) fn trusts(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.trusted.iter().any(|network| network.contains(&peer))
    }

    /// The address of the client.
    pub(super) fn client(&self, peer: IpAddr, is_trusted: bool, headers: &impl HeaderLookup) -> IpAddr {
        let peer = peer.to_canonical();
        if !is_trusted {
            return peer;
        }
        match self.forwarded {
            ForwardedBy::None => peer,
            ForwardedBy::XForwardedFor => {
                let lines = headers.all(&X_FORWARDED_FOR).rev();
                let hops = lines.flat_map(|line| line.rsplit(|byte| *byte == b','));
                self.first_untrusted(peer, hops.map(|hop| std::str::from_utf8(hop).ok().and_then(parse)))
            }
            ForwardedBy::Forwarded => {
                let lines = headers.all(&FORWARDED).rev();
                let hops = lines.flat_map(|line| {
                    let mut hops = super::visible(line).map_or_else(|| vec![None], forwarded_for);
                    hops.reverse();
                    hops
                });
                self.first_untrusted(peer, hops)
            }
        }
    }

    /// Walks from the nearest hop outwards. A hop that cannot be read ends the walk: nothing beyond it can be believed.
    fn first_untrusted(&self, peer: IpAddr, hops: impl Iterator<Item = Option<IpAddr>>) -> IpAddr {
        let mut client = peer;
        for hop in hops.take(MAX_HOPS) {
            let Some(hop) = hop else { return client };
            client = hop;
            if !self.trusts(client) {
                return client;
            }
        }
        client
    }

    /// The address as an attribute: an IPv6 one as the network that its caller owns.
    pub(super) fn attribute(&self, address: IpAddr) -> String {
        match address {
            IpAddr::V4(v4) => dotted(v4),
            IpAddr::V6(v6) => {
                Ipv6Net::new(v6, self.ipv6_prefix).map_or(v6, |network| network.network()).to_string()
            }
        }
    }
}

/// As the standard formatting writes it, in a fraction of the time: every request is asked from some address.
fn dotted(address: Ipv4Addr) -> String {
    let mut text = String::with_capacity(15);
    for (at, octet) in address.octets().into_iter().enumerate() {
        if at > 0 {
            text.push('.');
        }
        text.push_str(itoa::Buffer::new().format(octet));
    }
    text
}

/// An address, with or without brackets and a port.
fn parse(text: &str) -> Option<IpAddr> {
    let text = text.trim_matches([' ', '\t']);
    let bare = text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(text);
    let address = bare.parse().ok().or_else(|| text.parse::<SocketAddr>().ok().map(|both| both.ip()));
    address.map(|address| address.to_canonical())
}

/// The `for` of each element of a `Forwarded` field, in order; `None` for one that names no address, or is broken.
fn forwarded_for(line: &str) -> Vec<Option<IpAddr>> {
    let mut hops = Vec::new();
    for element in split_outside_quotes(line, b',') {
        let mut found = None;
        for pair in split_outside_quotes(element, b';') {
            let Some((name, value)) = pair.split_once('=') else { continue };
            if name.trim().eq_ignore_ascii_case("for") && found.is_none() {
                let value = value.trim();
                let value = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(value);
                found = parse(value);
            }
        }
        hops.push(found);
    }
    hops
}

/// The parts between separators that stand outside of quotes.
fn split_outside_quotes(line: &str, separator: u8) -> impl Iterator<Item = &str> {
    let (mut quoted, mut escaped) = (false, false);
    line.split(move |char: char| {
        match char {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            _ => return !quoted && char == separator as char,
        }
        false
    })
}
