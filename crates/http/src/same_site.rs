//! Requests that a browser sends on behalf of another site.
//!
//! A page of any site can make a browser send requests to an address that the browser can reach, among them loopback
//! addresses of the user's machine and services inside a company's network; it cannot hide that it did. A listener that
//! programs use rejects them. A page can also reach a loopback address under its own name, by pointing that name at
//! 127.0.0.1 (DNS rebinding); such a request is of the same site to the browser, and its `Host` reveals it.

use crate::headers::HeaderLookup;
use crate::problem::Problem;
use http::header::{HOST, ORIGIN};
use http::{HeaderName, StatusCode};
use std::net::IpAddr;

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

/// Rejects a request that a page of another site has sent.
///
/// # Errors
/// A problem to respond with.
pub fn reject_cross_site(fields: &impl HeaderLookup) -> Result<(), Problem> {
    let elsewhere = fields.all(&SEC_FETCH_SITE).any(|site| !matches!(site, b"same-origin" | b"none"));
    let is_foreign = |origin: &[u8]| {
        let start = origin.iter().position(|byte| *byte == b':');
        let from = start.and_then(|at| origin[at..].strip_prefix(b"://"));
        from.is_none_or(|from| !from.eq_ignore_ascii_case(fields.first(&HOST).unwrap_or(b"")))
    };
    if elsewhere || fields.all(&ORIGIN).any(is_foreign) {
        return Err(cross_site());
    }
    Ok(())
}

/// Rejects a request to a loopback address that names another host.
///
/// # Errors
/// A problem to respond with.
pub fn reject_foreign_host(host: Option<&[u8]>) -> Result<(), Problem> {
    // A browser always sends it; old programs do not.
    let Some(host) = host else { return Ok(()) };
    if std::str::from_utf8(host).is_ok_and(is_loopback_host) {
        return Ok(());
    }
    let detail = "this address is on loopback and the request names another host; send `Host: localhost`";
    Err(Problem::new(StatusCode::MISDIRECTED_REQUEST, "Wrong host", detail))
}

fn cross_site() -> Problem {
    Problem::new(StatusCode::FORBIDDEN, "Cross-site request", "a page of another site sent this request")
}

/// Returns whether a `Host` field names a loopback address. A site that points its own name at 127.0.0.1 does not.
#[must_use]
pub fn is_loopback_host(host: &str) -> bool {
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|digit| digit.is_ascii_digit()) => name,
        _ => host,
    };
    let name = name.trim_start_matches('[').trim_end_matches(']');
    name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_other_sites_are_rejected_and_programs_are_not() {
        let sent = |fields: &[(&str, &str)]| {
            let parsed = |(name, value): &(&str, &str)| {
                (
                    name.parse::<HeaderName>().expect("a name"),
                    value.parse::<http::HeaderValue>().expect("a value"),
                )
            };
            reject_cross_site(&fields.iter().map(parsed).collect::<http::HeaderMap>()).is_ok()
        };
        let host = ("host", "127.0.0.1:9");
        assert!(sent(&[host]), "a program");
        assert!(sent(&[]), "HTTP/1.0");
        assert!(sent(&[host, ("sec-fetch-site", "none")]), "typed by a person");
        assert!(sent(&[host, ("sec-fetch-site", "same-origin"), ("origin", "http://127.0.0.1:9")]));
        assert!(!sent(&[host, ("sec-fetch-site", "none"), ("sec-fetch-site", "cross-site")]), "said twice");
        for site in ["cross-site", "same-site", "", "Same-Origin "] {
            assert!(!sent(&[host, ("sec-fetch-site", site)]), "{site}");
        }
        for origin in
            ["null", "", "http://evil.example", "http://127.0.0.1:90", "127.0.0.1:9", "://127.0.0.1"]
        {
            assert!(!sent(&[host, ("origin", origin)]), "{origin}");
        }
    }

    #[test]
    fn loopback_names_are_known_in_every_form() {
        for host in ["localhost", "LOCALHOST:80", "127.0.0.1", "127.9.9.9:1", "[::1]", "[::1]:9"] {
            assert!(is_loopback_host(host), "{host}");
        }
        for host in ["", "evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "10.0.0.1"] {
            assert!(!is_loopback_host(host), "{host}");
        }
    }
}
