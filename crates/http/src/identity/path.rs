//! Path normalization, as an upstream would read the path. `/login`, `//login`, `/./login`, `/%6Cogin` and `/login/`
//! reach the same handler in most servers, `/login;a=b` in servlet containers; if they were different endpoints here,
//! each would get a fresh limit.

use std::borrow::Cow;

/// Returns the path of a request target, without query, fragment, scheme and host.
pub(super) fn path_of_target(target: &str) -> &str {
    let path = target.split(['?', '#']).next().unwrap_or("");
    if path.starts_with('/') {
        return path;
    }
    let rest = path.split_once("://").map_or("", |(_, rest)| rest);
    rest.find('/').map_or("/", |at| &rest[at..])
}

/// Returns the host without its port, in lower case.
pub(super) fn host(host: &str) -> Cow<'_, str> {
    let host = host.rsplit_once('@').map_or(host, |(_, host)| host);
    let host = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let host = host.strip_suffix('.').unwrap_or(host);
    if host.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Cow::Owned(host.to_ascii_lowercase())
    } else {
        Cow::Borrowed(host)
    }
}

/// Returns whether the path is already normalized; one pass suffices, and most paths are.
fn is_plain(path: &[u8]) -> bool {
    let mut before = 0;
    let has_oddity = path.iter().any(|byte| {
        let is_odd = matches!(byte, b'%' | b';') || (before == b'/' && matches!(byte, b'/' | b'.'));
        before = *byte;
        is_odd
    });
    path.first() == Some(&b'/') && !has_oddity && (path.len() == 1 || before != b'/')
}

/// Normalizes a path: decodes unreserved characters, writes other escapes in upper case, and removes segment parameters
/// (`;a=b`), empty, `.` and `..` segments, and a trailing slash. Parameters are removed first, as servlet containers
/// do: `/a/..;/b` is `/b`.
pub(super) fn normalize(path: &str) -> Cow<'_, str> {
    if is_plain(path.as_bytes()) {
        return Cow::Borrowed(path);
    }
    let decoded = decode(path);
    let mut segments: Vec<&str> = Vec::new();
    for segment in decoded.split('/') {
        match segment.split(';').next().unwrap_or_default() {
            "" | "." => {}
            ".." => {
                segments.pop();
            }
            segment => segments.push(segment),
        }
    }
    let mut normal = String::with_capacity(path.len() + 1);
    for segment in &segments {
        normal.push('/');
        normal.push_str(segment);
    }
    if normal.is_empty() {
        normal.push('/');
    }
    Cow::Owned(normal)
}

fn decode(path: &str) -> String {
    let mut decoded = String::with_capacity(path.len());
    let mut rest = path;
    while let Some(at) = rest.find('%') {
        decoded.push_str(&rest[..at]);
        let digits =
            rest.get(at + 1..at + 3).filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()));
        let Some(digits) = digits else {
            decoded.push('%');
            rest = &rest[at + 1..];
            continue;
        };
        match u8::from_str_radix(digits, 16) {
            Ok(byte) if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) => decoded.push(byte as char),
            _ => {
                decoded.push('%');
                decoded.push_str(&digits.to_ascii_uppercase());
            }
        }
        rest = &rest[at + 3..];
    }
    decoded.push_str(rest);
    decoded
}

#[cfg(test)]
mod tests {
    use super::{host, normalize, path_of_target};

    /// A spelling that reached the handler as another endpoint would get a fresh limit.
    #[test]
    fn spellings_of_one_path_are_one_path() {
        for path in [
            "/login",
            "//login",
            "/login/",
            "/./login",
            "/a/../login",
            "/%6Cogin",
            "/%6cog%69n//",
            "/../login",
            "/login;a=b",
            "/login;a=b;c/",
            "/login/;x",
            "/;x/login",
            "/a/..;x/login",
            "/.;x/%6Cogin;a=%2F",
        ] {
            assert_eq!(normalize(path), "/login", "{path}");
        }
        for (path, is) in [
            ("", "/"),
            ("/", "/"),
            ("/a%2fb", "/a%2Fb"),
            ("/a%zz", "/a%zz"),
            ("/a%2", "/a%2"),
            ("/%e2%82", "/%E2%82"),
            ("/a%3bb", "/a%3Bb"),
            ("/;", "/"),
            ("/a;b/c;d", "/a/c"),
        ] {
            assert_eq!(normalize(path), is, "{path}");
        }
        assert_eq!(
            normalize(&normalize("/%2561")),
            normalize("/%2561"),
            "an escaped percent sign is not decoded twice"
        );
    }

    #[test]
    fn targets_are_reduced_to_paths_and_hosts_to_names() {
        for (target, path) in [
            ("/a?b=/c", "/a"),
            ("https://h:1/a/b?c", "/a/b"),
            ("https://h", "/"),
            ("junk", "/"),
            ("", "/"),
            ("/a#b", "/a"),
        ] {
            assert_eq!(path_of_target(target), path, "{target}");
        }
        for (whole, name) in [
            ("Api.Example.COM:8443", "api.example.com"),
            ("[2001:db8::1]:80", "[2001:db8::1]"),
            ("[2001:db8::1]", "[2001:db8::1]"),
            ("a.", "a"),
            ("u@h", "h"),
        ] {
            assert_eq!(host(whole), name, "{whole}");
        }
    }
}
