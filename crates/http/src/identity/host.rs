//! The canonical form of a host: without port and trailing dot, in lower case, IP addresses in their one usual form.

use std::borrow::Cow;
use std::net::{IpAddr, Ipv6Addr};

/// Returns the canonical form of a host: `API.Example.com.:443` is `api.example.com`, `[0:0::1]` is `[::1]`.
#[must_use]
pub fn canonical_host(host: &str) -> Cow<'_, str> {
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    if let Some((literal, _)) = host.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        return match literal.parse::<Ipv6Addr>() {
            Ok(address) => match IpAddr::V6(address).to_canonical() {
                IpAddr::V4(v4) => Cow::Owned(v4.to_string()),
                IpAddr::V6(v6) => Cow::Owned(format!("[{v6}]")),
            },
            Err(_) => Cow::Owned(format!("[{}]", literal.to_ascii_lowercase())),
        };
    }
    let host = host.split_once(':').map_or(host, |(name, _)| name).trim_end_matches('.');
    if host.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Cow::Owned(host.to_ascii_lowercase())
    } else {
        Cow::Borrowed(host)
    }
}

#[cfg(test)]
mod tests {
    use super::canonical_host;

    /// Otherwise each spelling of a host would have limits of its own.
    #[test]
    fn spellings_of_one_host_are_one_host() {
        for (spelled, host) in [
            ("Api.Example.COM:8443", "api.example.com"),
            ("api.example.com.", "api.example.com"),
            ("a.:80", "a"),
            ("a:", "a"),
            ("u@h", "h"),
            ("[2001:DB8:0:0::1]:80", "[2001:db8::1]"),
            ("[2001:db8::1]", "[2001:db8::1]"),
            ("[::ffff:192.0.2.1]", "192.0.2.1"),
            ("[::FFFF:c000:201]:8080", "192.0.2.1"),
            ("192.0.2.1:80", "192.0.2.1"),
        ] {
            assert_eq!(canonical_host(spelled), host, "{spelled}");
        }
    }
}
