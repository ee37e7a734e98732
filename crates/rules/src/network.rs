//! Network keys, which count by network instead of by address: `remote_address/24`, `remote_address/64`,
//! `remote_address/24/64`.

use std::net::IpAddr;
use tollgate_core::KeyPart;

/// The prefix lengths per address family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Prefix {
    v4: Option<u8>,
    v6: Option<u8>,
}

/// Splits a key into its name and its prefix. Returns `Ok(None)` without a prefix, and an error message for an invalid
/// one.
pub(crate) fn split(key: &str) -> Result<Option<(&str, Prefix)>, String> {
    let Some((rest, last)) = numbered(key) else { return Ok(None) };
    let (name, prefix) = match numbered(rest) {
        Some((name, first)) => (name, (Some(first), Some(last))),
        None if last <= 32 => (rest, (Some(last), None)),
        None => (rest, (None, Some(last))),
    };
    if prefix.0.is_some_and(|bits| bits > 32) || prefix.1.is_some_and(|bits| bits > 128) {
        return Err(format!("`{key}` has no such prefix: IPv4 has up to 32 bits, IPv6 up to 128"));
    }
    let bits = |n: Option<u32>| n.and_then(|n| u8::try_from(n).ok());
    Ok(Some((name, Prefix { v4: bits(prefix.0), v6: bits(prefix.1) })))
}

/// Splits `name/24` into its two parts.
fn numbered(key: &str) -> Option<(&str, u32)> {
    let (name, digits) = key.rsplit_once('/')?;
    // `/024` is not accepted as another spelling of `/24`: two rules would share counters.
    let spelled = digits == "0" || !digits.starts_with('0');
    let plain =
        !name.is_empty() && spelled && digits.len() <= 4 && digits.bytes().all(|byte| byte.is_ascii_digit());
    if plain { digits.parse().ok().map(|number| (name, number)) } else { None }
}

impl Prefix {
    /// Returns whether a network contains only one client: an address, or the 64 bits that identify an IPv6 client.
    pub(crate) fn is_one_client(self) -> bool {
        self.v4.is_none_or(|bits| bits == 32) && self.v6.is_none_or(|bits| bits >= 64)
    }

    /// Returns the network that contains a value; `None` if the value is not an address, or its family has no prefix
    /// here.
    pub(crate) fn network(self, value: &str) -> Option<KeyPart<'static>> {
        let address: IpAddr = value.parse().ok()?;
        // An IPv4 client that connects through an IPv6 socket is the same client.
        let (address, prefix) = match address.to_canonical() {
            IpAddr::V4(v4) => (u128::from(v4.to_ipv6_mapped()), self.v4? + 96),
            IpAddr::V6(v6) => (u128::from(v6), self.v6?),
        };
        let mask = if prefix == 0 { 0 } else { u128::MAX << (128 - u32::from(prefix)) };
        Some(KeyPart::Network { address: address & mask, prefix })
    }
}

impl std::fmt::Display for Prefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for bits in [self.v4, self.v6].into_iter().flatten() {
            write!(f, "/{bits}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn keys_split_into_name_and_prefix() {
        for (key, parts) in [
            ("remote_address", None),
            ("remote_address/24", Some(("remote_address", "/24"))),
            ("remote_address/64", Some(("remote_address", "/64"))),
            ("remote_address/24/64", Some(("remote_address", "/24/64"))),
            ("remote_address/24/32", Some(("remote_address", "/24/32"))),
            ("path/users", None),
            ("/24", None),
            ("a/024", None),
            ("a/b/8", Some(("a/b", "/8"))),
        ] {
            let found = split(key).expect(key).map(|(name, prefix)| (name, prefix.to_string()));
            assert_eq!(found, parts.map(|(name, prefix)| (name, prefix.to_owned())), "{key}");
        }
        for key in ["a/129", "a/33/64", "a/24/129", "a/9999"] {
            assert!(split(key).is_err(), "{key}");
        }
    }

    #[test]
    fn clients_of_one_network_share_a_counter_and_others_do_not() {
        for (key, address, network) in [
            ("ip/24", "192.0.2.77", Some("192.0.2.0/24")),
            ("ip/24", "::ffff:192.0.2.77", Some("192.0.2.0/24")),
            ("ip/24", "2001:db8::1", None),
            ("ip/64", "2001:db8:0:1:2::3", Some("2001:db8:0:1::/64")),
            ("ip/64", "192.0.2.77", None),
            ("ip/24/48", "2001:db8:1:2::3", Some("2001:db8:1::/48")),
            ("ip/24/48", "10.1.2.3", Some("10.1.2.0/24")),
            ("ip/0", "10.1.2.3", Some("0.0.0.0/0")),
            ("ip/32", "10.1.2.3", Some("10.1.2.3/32")),
            ("ip/24", "10.1.2", None),
            ("ip/24", "10.1.2.3:80", None),
        ] {
            let (_, prefix) = split(key).expect(key).expect(key);
            assert_eq!(
                prefix.network(address).map(|part| part.to_string()).as_deref(),
                network,
                "{key} {address}"
            );
        }
    }
}
