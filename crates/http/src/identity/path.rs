//! The canonical form of a path, or a refusal. If two spellings that reach one handler were two endpoints here, each
//! would get a fresh limit.
//!
//! Servers agree on most spellings: `/a/b`, `/a//b`, `/%61/b`, `/a/b/` and, in servlet containers, `/login;a=b`
//! are one handler, so they are one path. They disagree on others: `/a%2Fb` is `/a/b` for nginx and WSGI, and one
//! segment for Node and Go's router; `/a/../b` is `/b` or itself. No single form is right for those, because the form
//! that hides a request from one server's limit exposes it to another's, so they are refused unless `escapes` says how
//! the upstream reads them. Rejected: decoding until nothing changes, which merges paths that a server keeps apart.

use super::config::{IdentityConfig, PathCase, PathEscapes};
use std::borrow::Cow;

/// Why a path has no canonical form.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PathError {
    /// A `.` or `..` segment, written plainly or not.
    #[error("the path has a `.` or `..` segment; send the path that it leads to")]
    DotSegment,
    /// A `\`, which some servers read as `/`.
    #[error("the path has a backslash; send `/`, or `%5C` if it is part of a name")]
    Backslash,
    /// A control character, written plainly or escaped.
    #[error("the path has a control character; remove it")]
    Control,
    /// A `%` that starts no escape.
    #[error("the path has a `%` without two hexadecimal digits; send `%25` for a percent sign")]
    Malformed,
    /// An escaped slash or backslash, which is a separator for some servers only.
    #[error(
        "the path has an escaped slash or backslash, which servers read differently; send it plainly, or set \
         `identity.escapes` to what the upstream does"
    )]
    Separator,
    /// An escaped escape, which some servers decode twice.
    #[error(
        "the path has an escape that is itself escaped, which servers read differently; escape it once, or set \
         `identity.escapes` to what the upstream does"
    )]
    DoubleEscape,
    /// Two slashes at the start, after which some servers read a host.
    #[error("the path begins with two slashes, after which some servers read a host; send one")]
    Authority,
    /// A character in a longer UTF-8 form than its own, which some decoders read as that character.
    #[error("the path has a character in an overlong form; send it in its shortest form")]
    Overlong,
}

/// How paths are brought into their canonical form, by the settings of an identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct PathRules {
    escapes: PathEscapes,
    case: PathCase,
}

/// Returns the path of a request target, without query, fragment, scheme and host; `None` if it is neither a path that
/// begins with `/` nor an address with a host. Servers disagree on what `login`, `http:/login` and an empty target are.
pub(super) fn path_of_target(target: &str) -> Option<&str> {
    let path = target.split(['?', '#']).next().unwrap_or("");
    if path.starts_with('/') {
        return Some(path);
    }
    let (scheme, rest) = path.split_once("://")?;
    let end = rest.find('/').unwrap_or(rest.len());
    let is_web = ["http", "https"].iter().any(|known| scheme.eq_ignore_ascii_case(known));
    let (host, path) = rest.split_at(end);
    let is_address = is_web && crate::h1::head::is_host(host.as_bytes());
    is_address.then_some(if path.is_empty() { "/" } else { path })
}

/// Bytes that stand for themselves in a canonical path.
const PLAIN: [bool; 256] = {
    let mut table = [false; 256];
    let plain = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~!$&'()*+,=:@";
    let mut at = 0;
    while at < plain.len() {
        table[plain[at] as usize] = true;
        at += 1;
    }
    table
};

impl PathRules {
    /// Returns the rules of these settings.
    #[must_use]
    pub const fn new(settings: &IdentityConfig) -> Self {
        Self { escapes: settings.escapes, case: settings.path_case }
    }

    /// Returns the canonical form of a path, borrowed if it is canonical already.
    ///
    /// # Errors
    /// The path has no canonical form, because servers disagree on what it is.
    ///
    /// ```
    /// use tollgate_http::identity::PathRules;
    /// let rules = PathRules::default();
    /// assert_eq!(rules.canonical("/%6Cogin;a=b//")?, "/login");
    /// assert!(rules.canonical("/api%2Flogin").is_err());
    /// # Ok::<(), tollgate_http::identity::PathError>(())
    /// ```
    pub fn canonical(self, path: &str) -> Result<Cow<'_, str>, PathError> {
        if self.is_canonical(path.as_bytes()) {
            return Ok(Cow::Borrowed(path));
        }
        if self.escapes == PathEscapes::Refuse && path.starts_with("//") {
            return Err(PathError::Authority);
        }
        let (mut canonical, mut segment) = (String::with_capacity(path.len() + 1), Vec::new());
        let mut rest = path.as_bytes();
        while let Some((&byte, further)) = rest.split_first() {
            rest = further;
            let (byte, is_escaped) = match byte {
                b'%' => {
                    let (digits, further) = rest.split_at_checked(2).ok_or(PathError::Malformed)?;
                    rest = further;
                    (hex(digits).ok_or(PathError::Malformed)?, true)
                }
                _ => (byte, false),
            };
            match byte {
                0..=0x1f | 0x7f => return Err(PathError::Control),
                b'\\' if !is_escaped => return Err(PathError::Backslash),
                b'/' | b'\\' if is_escaped && self.escapes == PathEscapes::Refuse => {
                    return Err(PathError::Separator);
                }
                // The end of a parameter, or part of one.
                b'/' if is_escaped && self.escapes == PathEscapes::Decode && segment.contains(&b';') => {
                    return Err(PathError::Separator);
                }
                b'/' if !is_escaped || self.escapes == PathEscapes::Decode => {
                    self.end_segment(&mut segment, &mut canonical)?;
                }
                _ => segment.push(byte),
            }
        }
        self.end_segment(&mut segment, &mut canonical)?;
        if canonical.is_empty() {
            canonical.push('/');
        }
        Ok(Cow::Owned(canonical))
    }

    /// Returns whether one pass finds nothing to change; most paths are so.
    fn is_canonical(self, path: &[u8]) -> bool {
        let mut before = 0;
        let has_oddity = path.iter().any(|byte| {
            let is_odd = match byte {
                b'/' => before == b'/' || (before == b'.' && self.case == PathCase::Ignore),
                b'.' => before == b'/',
                byte => {
                    !PLAIN[usize::from(*byte)] || (byte.is_ascii_uppercase() && self.case == PathCase::Ignore)
                }
            };
            before = *byte;
            is_odd
        });
        let ends_well = before != b'/' && (before != b'.' || self.case == PathCase::Exact);
        path.first() == Some(&b'/') && !has_oddity && (path.len() == 1 || ends_well)
    }

    /// Appends a decoded segment in its canonical form, and empties it.
    fn end_segment(self, segment: &mut Vec<u8>, canonical: &mut String) -> Result<(), PathError> {
        let has_escape = |three: &[u8]| three[0] == b'%' && hex(&three[1..]).is_some();
        if self.escapes == PathEscapes::Refuse && segment.windows(3).any(has_escape) {
            return Err(PathError::DoubleEscape);
        }
        if segment.windows(2).any(is_overlong) || matches!(segment.last(), Some(0xc0 | 0xc1)) {
            return Err(PathError::Overlong);
        }
        // Parameters are removed first, as servlet containers do: `..;a` is `..`.
        let name = segment.split(|byte| *byte == b';').next().unwrap_or_default();
        let mut parts = name.split(|byte| matches!(byte, b'/' | b'\\'));
        if parts.any(|part| matches!(part, b"." | b"..")) {
            return Err(PathError::DotSegment);
        }
        let folded = self.folded(name);
        if !folded.is_empty() {
            canonical.push('/');
            folded.iter().for_each(|byte| push(canonical, *byte));
        }
        segment.clear();
        Ok(())
    }

    /// Returns a segment as an upstream that ignores case compares it; Windows also ignores dots and spaces at its end.
    fn folded(self, name: &[u8]) -> Cow<'_, [u8]> {
        if self.case == PathCase::Exact {
            return Cow::Borrowed(name);
        }
        let end = name.iter().rposition(|byte| !matches!(byte, b'.' | b' ')).map_or(0, |at| at + 1);
        Cow::Owned(match std::str::from_utf8(&name[..end]) {
            Ok(text) => text.to_lowercase().into_bytes(),
            Err(_) => name[..end].to_ascii_lowercase(),
        })
    }

    /// Returns the literal segment of a template as it occurs in canonical paths.
    pub(super) fn literal(self, segment: &str) -> String {
        let mut canonical = String::with_capacity(segment.len());
        self.folded(segment.as_bytes()).iter().for_each(|byte| push(&mut canonical, *byte));
        canonical
    }
}

fn push(out: &mut String, byte: u8) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    if PLAIN[usize::from(byte)] {
        out.push(byte as char);
    } else {
        out.push('%');
        out.push(DIGITS[usize::from(byte >> 4)] as char);
        out.push(DIGITS[usize::from(byte & 15)] as char);
    }
}

/// Returns the byte of two hexadecimal digits.
fn hex(digits: &[u8]) -> Option<u8> {
    let digit = |at: usize| char::from(digits[at]).to_digit(16);
    // Two digits fit a byte.
    Some((digit(0)? * 16 + digit(1)?) as u8)
}

/// Returns whether two bytes start a UTF-8 sequence that is longer than its character needs.
fn is_overlong(two: &[u8]) -> bool {
    matches!(two, [0xc0 | 0xc1, _] | [0xe0, 0x80..=0x9f] | [0xf0, 0x80..=0x8f])
}

#[cfg(test)]
mod tests {
    use super::{PathError, PathRules, path_of_target};
    use crate::identity::config::{PathCase, PathEscapes};

    const REFUSE: PathRules = PathRules { escapes: PathEscapes::Refuse, case: PathCase::Exact };
    const DECODE: PathRules = PathRules { escapes: PathEscapes::Decode, ..REFUSE };
    const KEEP: PathRules = PathRules { escapes: PathEscapes::Keep, ..REFUSE };
    const IGNORE: PathRules = PathRules { case: PathCase::Ignore, ..REFUSE };

    /// A spelling that reached the handler as another endpoint would get a fresh limit.
    #[test]
    fn spellings_of_one_path_are_one_path() {
        for path in [
            "/login",
            "/login//",
            "/login/",
            "/%6Cogin",
            "/%6cog%69n//",
            "/login;a=b",
            "/login%3Ba=b",
            "/login;a=b;c/",
            "/login/;x",
            "/;x/login",
            "/;x/%6Cogin;a=%3F",
        ] {
            for rules in [REFUSE, DECODE, KEEP, IGNORE] {
                assert_eq!(rules.canonical(path).as_deref(), Ok("/login"), "{path}");
            }
        }
        for (path, is) in [
            ("", "/"),
            ("/", "/"),
            ("/%e2%82", "/%E2%82"),
            ("/caf\u{e9}", "/caf%C3%A9"),
            ("/caf%c3%a9", "/caf%C3%A9"),
            ("/100%25", "/100%25"),
            ("/a%20b%3f%23", "/a%20b%3F%23"),
            ("/a|b\"", "/a%7Cb%22"),
            ("/%21%24%40%3A", "/!$@:"),
            ("/;", "/"),
            ("/a;b/c;d", "/a/c"),
            ("/a.b/...", "/a.b/..."),
            ("/.well-known/x", "/.well-known/x"),
        ] {
            assert_eq!(REFUSE.canonical(path).as_deref(), Ok(is), "{path}");
        }
    }

    /// Servers disagree on these, so whatever they were counted as, one server would give them a fresh limit.
    #[test]
    fn a_path_that_servers_read_differently_is_refused() {
        for (path, error) in [
            ("//login", PathError::Authority),
            ("//x/login", PathError::Authority),
            ("///x/login", PathError::Authority),
            ("/a/../login", PathError::DotSegment),
            ("/./login", PathError::DotSegment),
            ("/a/%2e%2E", PathError::DotSegment),
            ("/a/..;x/login", PathError::DotSegment),
            ("/a\\login", PathError::Backslash),
            ("/login%00", PathError::Control),
            ("/lo%0agin", PathError::Control),
            ("/login%7f", PathError::Control),
            ("/a%zz", PathError::Malformed),
            ("/a%2", PathError::Malformed),
            ("/%u006Cogin", PathError::Malformed),
            ("/login%2F", PathError::Separator),
            ("/api%2flogin", PathError::Separator),
            ("/api%5Clogin", PathError::Separator),
            ("/%256Cogin", PathError::DoubleEscape),
            ("/login%252F", PathError::DoubleEscape),
            ("/%25%36%43ogin", PathError::DoubleEscape),
            ("/a%c0%afb", PathError::Overlong),
            ("/a%e0%80%afb", PathError::Overlong),
        ] {
            assert_eq!(REFUSE.canonical(path), Err(error), "{path}");
        }
    }

    /// An operator who knows the upstream gets its reading, and still no dot segment.
    #[test]
    fn escapes_are_read_as_the_upstream_reads_them() {
        for (path, decoded, kept) in [
            ("/login%2F", "/login", "/login%2F"),
            ("/api%2Flogin", "/api/login", "/api%2Flogin"),
            ("/a%5cb", "/a%5Cb", "/a%5Cb"),
            ("/%256Cogin", "/%256Cogin", "/%256Cogin"),
        ] {
            assert_eq!(DECODE.canonical(path).as_deref(), Ok(decoded), "{path}");
            assert_eq!(KEEP.canonical(path).as_deref(), Ok(kept), "{path}");
        }
        for path in ["/a/..%2Flogin", "/a%2F%2E%2E%2Flogin", "/..%5Clogin"] {
            assert_eq!(DECODE.canonical(path), Err(PathError::DotSegment), "{path}");
            assert_eq!(KEEP.canonical(path), Err(PathError::DotSegment), "{path}");
        }
    }

    /// An upstream that ignores case reaches one handler by all of these.
    #[test]
    fn case_is_ignored_on_request() {
        for path in ["/Login", "/LOGIN/", "/login.", "/login.%20.", "/l%4Fgin", "/login../"] {
            assert_eq!(IGNORE.canonical(path).as_deref(), Ok("/login"), "{path}");
        }
        assert_eq!(IGNORE.canonical("/%C3%84").as_deref(), Ok("/%C3%A4"));
        assert_eq!(REFUSE.canonical("/Login").as_deref(), Ok("/Login"));
    }

    #[test]
    fn targets_are_reduced_to_paths() {
        for (target, path) in [
            ("/a?b=/c", Some("/a")),
            ("https://h:1/a/b?c", Some("/a/b")),
            ("https://h", Some("/")),
            ("HTTP://h?a", Some("/")),
            ("/a#b", Some("/a")),
            ("junk", None),
            ("", None),
            ("http:/a", None),
            ("http:///a", None),
            ("http://u@h/a", None),
            ("ws://h/a", None),
        ] {
            assert_eq!(path_of_target(target), path, "{target}");
        }
    }
}
