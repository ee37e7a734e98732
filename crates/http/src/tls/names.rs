//! Names in a certificate (subject alternative names), and whether one of them is a wanted name, as Go's `crypto/x509`
//! decides it.
//!
//! webpki takes no wildcard with a single label after it, such as `*.envoy-gateway-system`, which is the certificate that
//! Envoy Gateway gives to its Envoys, and does not list such names either. So they are read here, from certificates that
//! were verified before.

use rustls::pki_types::CertificateDer;
use std::net::IpAddr;

const SEQUENCE: u8 = 0x30;
const OCTETS: u8 = 0x04;
const OBJECT_ID: u8 = 0x06;
/// The extensions in a certificate: `[3]`.
const EXTENSIONS: u8 = 0xa3;
const DNS: u8 = 0x82;
const ADDRESS: u8 = 0x87;
/// 2.5.29.17: subject alternative names.
const ALTERNATIVE_NAMES: [u8; 3] = [0x55, 0x1d, 0x11];

/// The names of a certificate.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Names {
    dns: Vec<String>,
    addresses: Vec<IpAddr>,
}

impl Names {
    /// Reads the names; none if there are none, or the certificate is malformed.
    pub(super) fn of(certificate: &CertificateDer<'_>) -> Self {
        let mut names = Self::default();
        for (kind, content) in alternative_names(certificate).into_iter().flat_map(elements) {
            match kind {
                DNS => names.dns.extend(std::str::from_utf8(content).ok().map(str::to_owned)),
                ADDRESS => names.addresses.extend(address(content)),
                _ => {}
            }
        }
        names
    }

    /// Returns whether the certificate is valid for a name: an address, or a name that equals one of its names, or that a
    /// wildcard as first label stands for.
    pub(super) fn include(&self, wanted: &str) -> bool {
        let bare = wanted.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(wanted);
        if let Ok(address) = bare.parse::<IpAddr>() {
            return self.addresses.contains(&address.to_canonical());
        }
        self.dns.iter().any(|own| match is_host(wanted, Wildcard::Refused) && is_host(own, Wildcard::First) {
            true => stands_for(own, wanted.strip_suffix('.').unwrap_or(wanted)),
            // Whatever it is, the same text is the same name.
            false => !matches!(own.as_str(), "" | ".") && own.eq_ignore_ascii_case(wanted),
        })
    }
}

impl std::fmt::Display for Names {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let dns = self.dns.iter().map(|name| name.escape_debug().to_string());
        let all: Vec<String> = dns.chain(self.addresses.iter().map(ToString::to_string)).collect();
        f.write_str(if all.is_empty() { "no name" } else { "" })?;
        f.write_str(&all.join(", "))
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wildcard {
    Refused,
    /// As the whole first label.
    First,
}

/// Returns whether a text is a host name.
fn is_host(text: &str, wildcard: Wildcard) -> bool {
    let text = if wildcard == Wildcard::Refused { text.strip_suffix('.').unwrap_or(text) } else { text };
    let is_label = |(at, label): (usize, &str)| {
        (wildcard == Wildcard::First && at == 0 && label == "*")
            || (!label.is_empty()
                && !label.starts_with('-')
                && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_')))
    };
    text != "*" && text.split('.').enumerate().all(is_label)
}

/// Returns whether a name with or without a wildcard stands for a host: label by label.
fn stands_for(own: &str, host: &str) -> bool {
    let (own, host): (Vec<&str>, Vec<&str>) = (own.split('.').collect(), host.split('.').collect());
    let is_same = |(at, (own, host)): (usize, (&&str, &&str))| {
        (at == 0 && *own == "*") || own.eq_ignore_ascii_case(host)
    };
    own.len() == host.len() && own.iter().zip(&host).enumerate().all(is_same)
}

fn address(content: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(content).map(IpAddr::from);
    let address = v4.or_else(|_| <[u8; 16]>::try_from(content).map(IpAddr::from));
    address.ok().map(|address| address.to_canonical())
}

/// Returns the content of the extension.
fn alternative_names<'a>(certificate: &'a CertificateDer<'_>) -> Option<&'a [u8]> {
    let signed = content_of(certificate, SEQUENCE)?;
    let extensions = content_of(content_of(signed, SEQUENCE)?, EXTENSIONS)?;
    let mut all = elements(content_of(extensions, SEQUENCE)?);
    let own = all.find(|(kind, extension)| {
        *kind == SEQUENCE && content_of(extension, OBJECT_ID) == Some(&ALTERNATIVE_NAMES)
    });
    content_of(content_of(own?.1, OCTETS)?, SEQUENCE)
}

/// Returns the content of the first element of a kind.
fn content_of(der: &[u8], wanted: u8) -> Option<&[u8]> {
    elements(der).find(|(kind, _)| *kind == wanted).map(|(_, content)| content)
}

/// Returns the elements of DER one after the other, each with its kind, up to the first that is malformed.
fn elements(mut der: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    std::iter::from_fn(move || {
        let [kind, first, rest @ ..] = der else { return None };
        let (length, rest) = match first {
            0..=0x7f => (usize::from(*first), rest),
            0x81..=0x83 => {
                let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
                (bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)), rest)
            }
            _ => return None,
        };
        let (content, rest) = rest.split_at_checked(length)?;
        der = rest;
        Some((*kind, content))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::pki_types::pem::PemObject;

    fn names(dns: &[&str]) -> Names {
        Names { dns: dns.iter().map(|name| (*name).to_owned()).collect(), addresses: Vec::new() }
    }

    #[test]
    fn names_are_read_from_a_certificate() {
        let pem = include_bytes!("testdata/names.crt");
        let certificate = CertificateDer::from_pem_slice(pem).expect("a certificate");
        let read = Names::of(&certificate);
        let text = "*.envoy-gateway-system, a.Example.com, 10.0.0.1, 2001:db8::1";
        assert_eq!(read.to_string(), text);
        for (wanted, is_valid) in [
            ("envoy.envoy-gateway-system", true),
            ("*.envoy-gateway-system", true),
            ("A.example.COM", true),
            ("10.0.0.1", true),
            ("[2001:db8::1]", true),
            ("10.0.0.2", false),
            ("envoy-gateway-system", false),
            ("envoy", false),
        ] {
            assert_eq!(read.include(wanted), is_valid, "{wanted}");
        }
        for end in 0..certificate.len() {
            let cut = Names::of(&CertificateDer::from(&certificate[..end]));
            assert_eq!(cut, Names::default(), "{end}");
        }
        assert_eq!(Names::default().to_string(), "no name");
    }

    /// As Go's `VerifyHostname`.
    #[test]
    fn names_are_compared_as_go_does() {
        for (own, wanted, is_valid) in [
            ("*.example.com", "a.example.com", true),
            ("*.example.com", "a.example.com.", true),
            ("*.example.com", "*.example.com", true),
            ("*.example.com", "b.a.example.com", false),
            ("*.example.com", "example.com", false),
            ("a*.example.com", "ab.example.com", false),
            ("a*.example.com", "a*.example.com", true),
            ("a.*.com", "a.b.com", false),
            ("*", "host", false),
            ("host", "HOST", true),
            ("host.", "host", false),
            ("some thing", "some thing", true),
            ("a_b", "a_b", true),
            ("", "", false),
            (".", ".", false),
        ] {
            assert_eq!(names(&[own]).include(wanted), is_valid, "{own} {wanted}");
            assert_eq!(names(&["x.test", own]).include(wanted), is_valid, "{own} {wanted}");
        }
    }
}
