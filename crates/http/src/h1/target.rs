//! Validation of request targets and hosts. Rejects targets that a server could resolve to another path, and invalid
//! hosts.

use super::error::HeadError;
use http::{Method, Uri, Version};

pub(super) fn without_query(target: &str) -> &str {
    target.split_once('?').map_or(target, |(path, _)| path)
}

/// Maximum length of a URI in the `http` crate, in bytes.
const MAX_URI: usize = 65_534;

/// Accepts a path and query of URI characters, and of others that clients send unescaped in practice.
pub(super) fn check_origin_form(target: &str) -> Result<(), HeadError> {
    if target.len() > MAX_URI {
        return Err(HeadError::TargetTooLong);
    }
    let path = without_query(target);
    let rest = &target.as_bytes()[path.len()..];
    if path.bytes().all(is_path_byte) && rest.iter().all(|byte| is_query_byte(*byte)) {
        check_path(path)
    } else {
        Err(HeadError::Target)
    }
}

/// The path characters of the `http` crate: a target that is accepted here must also parse as its `Uri`.
const fn is_path_byte(byte: u8) -> bool {
    matches!(byte, 0x21..=0x22 | 0x24..=0x3b | 0x3d | 0x40..=0x5f | 0x61..=0x7e)
}

/// The query characters, including the leading `?`.
const fn is_query_byte(byte: u8) -> bool {
    matches!(byte, 0x21 | 0x24..=0x3b | 0x3d | 0x3f..=0x7e)
}

/// Parses a target in absolute form (`http://host/path`), or the `*` of `OPTIONS`.
pub(super) fn absolute_target(target: &str, method: &Method) -> Result<Uri, HeadError> {
    let asterisk = target == "*";
    if asterisk && method != Method::OPTIONS {
        return Err(HeadError::Target);
    }
    let uri = Uri::try_from(target).map_err(|_| HeadError::Target)?;
    if !asterisk && !matches!(uri.scheme_str(), Some("http" | "https")) {
        return Err(HeadError::Target);
    }
    if uri.authority().is_some_and(|authority| authority.as_str().contains('@')) {
        return Err(HeadError::Target);
    }
    // A query without a path would be sent on as it is, and is no target then.
    if !asterisk && !uri.path_and_query().is_none_or(|target| target.as_str().starts_with('/')) {
        return Err(HeadError::Target);
    }
    check_path(uri.path())?;
    Ok(uri)
}

/// Rejects `.` and `..` segments: the upstream could resolve them to a path other than the one that rules matched.
pub fn check_path(path: &str) -> Result<(), HeadError> {
    let path = path.as_bytes();
    // Fast path: nearly every path has neither an escape nor a segment that starts with a dot.
    let suspect = memchr::memchr3_iter(b'%', b'\\', b'.', path)
        .any(|at| path[at] != b'.' || at == 0 || matches!(path[at - 1], b'/' | b'.'));
    if !suspect {
        return Ok(());
    }
    if path.contains(&b'\\') {
        return Err(HeadError::Target);
    }
    let text = String::from_utf8_lossy(path).to_ascii_lowercase();
    let text = text.replace("%2e", ".").replace("%2f", "/").replace("%5c", "/");
    // Some servers treat `..;x` as `..`.
    let names = text.split('/').map(|segment| segment.split(';').next().unwrap_or(segment));
    let mut hidden = names.filter(|name| matches!(*name, "." | ".."));
    if text.contains("%00") || hidden.next().is_some() { Err(HeadError::Target) } else { Ok(()) }
}

/// Returns whether `host` is a valid host: `name`, `address` or `[address]`, with or without a port. Userinfo and
/// misplaced colons or brackets are invalid, because parsers would differ on where the host ends.
#[must_use]
pub fn is_host(host: &[u8]) -> bool {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=%".contains(byte);
    let (name, rest) = match host.strip_prefix(b"[") {
        Some(literal) => {
            let Some(end) = literal.iter().position(|byte| *byte == b']') else { return false };
            if !literal[..end].iter().all(|byte| *byte == b':' || plain(byte)) {
                return false;
            }
            (&literal[..end], &literal[end + 1..])
        }
        None => {
            let end = host.iter().position(|byte| !plain(byte)).unwrap_or(host.len());
            (&host[..end], &host[end..])
        }
    };
    let is_port =
        |rest: &[u8]| rest.strip_prefix(b":").is_some_and(|port| port.iter().all(u8::is_ascii_digit));
    !name.is_empty() && (rest.is_empty() || is_port(rest))
}

pub(super) fn check_host(
    host: Option<&[u8]>,
    absolute: Option<&Uri>,
    version: Version,
) -> Result<(), HeadError> {
    let host = match host {
        Some(host) => host,
        None if version == Version::HTTP_10 => return Ok(()),
        None => return Err(HeadError::Host),
    };
    if !is_host(host) {
        return Err(HeadError::Host);
    }
    match absolute.and_then(Uri::authority) {
        Some(authority) if !authority.as_str().as_bytes().eq_ignore_ascii_case(host) => Err(HeadError::Host),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The upstream must read the same host as Tollgate.
    #[test]
    fn hosts_are_parsed_to_their_end() {
        for host in ["a.b", "a.b:80", "a.b:", "a_b", "[::1]", "[::1]:80", "127.0.0.1", "xn--a.b."] {
            assert!(is_host(host.as_bytes()), "{host}");
        }
        for none in [
            "",
            ":80",
            "u@a.b",
            "u:p@a.b",
            "a.b:x",
            "a.b:80:90",
            "a.b:80]",
            "[::1",
            "[::1]x",
            "[]",
            "[[::1]]",
            "a b",
            "a/b",
        ] {
            assert!(!is_host(none.as_bytes()), "{none}");
        }
    }

    /// A target that is accepted here but is not a `Uri` would fail later, where one is needed.
    #[test]
    fn accepted_targets_are_those_of_the_http_crate() {
        for byte in 0x21..0x7f_u8 {
            for target in [format!("/a{}b", byte as char), format!("/?a{}b", byte as char)] {
                let checked = check_origin_form(&target).is_ok();
                let known = target.parse::<Uri>().is_ok() && !matches!(byte, b'#' | b'\\');
                assert_eq!(checked || byte == b'\\', known || byte == b'\\', "{target}");
            }
        }
    }
}
