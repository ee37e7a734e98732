//! A request for the handlers, borrowed from the connection's buffer without copies.

use std::net::IpAddr;
use tollgate_http::h1::{HeadHeaders, ScannedHead};

/// One complete request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'r> {
    pub(crate) peer: IpAddr,
    pub(crate) method: &'r str,
    pub(crate) path: &'r str,
    pub(crate) query: &'r str,
    /// The authority of a target in absolute form.
    pub(crate) authority: Option<&'r str>,
    pub(crate) fields: HeadHeaders<'r>,
    /// The body; empty if the handler does not read it.
    pub(crate) body: &'r [u8],
}

impl<'r> Request<'r> {
    pub(crate) fn new(peer: IpAddr, scan: &'r ScannedHead, head: &'r [u8], body: &'r [u8]) -> Self {
        let (authority, path, query) = split_target(scan.target(head));
        // A method is a token, which is ASCII.
        let method = std::str::from_utf8(scan.method(head)).unwrap_or("");
        Self { peer, method, path, query, authority, fields: scan.fields(head), body }
    }
}

/// Splits a request target into authority (of the absolute form), path and query.
pub(crate) fn split_target(target: &str) -> (Option<&str>, &str, &str) {
    let (authority, target) = match target.split_once("://") {
        Some((_, rest)) if !target.starts_with('/') => {
            let end = rest.find(['/', '?']).unwrap_or(rest.len());
            (Some(&rest[..end]), &rest[end..])
        }
        _ => (None, target),
    };
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    (authority, if path.is_empty() { "/" } else { path }, query)
}

#[cfg(test)]
mod tests {
    use super::Request;
    use tollgate_http::h1::ScannedHead;
    use tollgate_http::h1::head::HeadLimits;

    /// Path and query are found in every form of a target, and a URL in a query is not mistaken for the target.
    #[test]
    fn targets_are_parsed_in_every_form() {
        let cases = [
            ("/a/b?c=/d", (None, "/a/b", "c=/d")),
            ("/", (None, "/", "")),
            ("http://h:1/a?b", (Some("h:1"), "/a", "b")),
            ("http://h", (Some("h"), "/", "")),
            ("http://h?a", (Some("h"), "/", "a")),
            ("/a?u=http://x/y", (None, "/a", "u=http://x/y")),
            ("*", (None, "*", "")),
        ];
        for (target, read) in cases {
            let head = format!("GET {target} HTTP/1.1\r\nX: 1\r\n\r\n");
            let scan = ScannedHead::new(head.as_bytes(), &HeadLimits::default()).expect("a head");
            let request = Request::new([127, 0, 0, 1].into(), &scan, head.as_bytes(), b"");
            assert_eq!((request.authority, request.path, request.query), read, "{target}");
        }
    }
}
