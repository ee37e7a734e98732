//! Explains a failed exchange with the admin API: what is at the address instead, and which flag or variable to change.
//!
//! Commands get an admin URL wrong in few ways: no server, another of its ports, the other scheme, a certificate that is
//! not trusted, no token. Each is recognized by the error or the response, in this one place.

use anyhow::anyhow;
use hyper::StatusCode;
use rustls::{AlertDescription, CertificateError, InvalidMessage};
use serde_json::Value;
use std::error::Error;
use std::io;

/// Server that a command talks to, as far as its errors name it.
#[derive(Debug)]
pub(super) struct Peer {
    /// Host and port.
    pub(super) authority: String,
    pub(super) has_tls: bool,
    /// Where the token comes from: a variable or a flag; `None` without one.
    pub(super) token_source: Option<String>,
}

/// Commands that list what a path names, for responses that it was not found.
const LISTS: [(&str, &str); 4] = [
    ("/admin/v1/rules", "tollgate rules list"),
    ("/admin/v1/emergency", "tollgate emergency list"),
    ("/admin/v1/quotas", "tollgate quota list"),
    ("/admin/v1/usage", "tollgate usage API_KEY"),
];

/// Flags of request fields, for responses that name a field.
const FLAGS: [(&str, &str); 9] = [
    ("ttl_seconds", "--for"),
    ("overrides", "--limit"),
    ("tier", "--tier"),
    ("reason", "--reason"),
    ("units", "--units"),
    ("factor", "--factor"),
    ("effective_at", "--from"),
    ("expires_at", "--until"),
    ("base_rev", "--base"),
];

impl Peer {
    fn url(&self) -> String {
        format!("{}://{}", if self.has_tls { "https" } else { "http" }, self.authority)
    }

    /// Explains why no connection was made, or why it broke before a response.
    pub(super) fn explain(&self, error: &anyhow::Error) -> anyhow::Error {
        let url = self.url();
        let causes = || error.chain().flat_map(|cause| Unwrapped(Some(cause)));
        if let Some(tls) = causes().find_map(|cause| cause.downcast_ref::<rustls::Error>()) {
            return anyhow!("{url}: {}", explain_tls(tls));
        }
        if causes().filter_map(|cause| cause.downcast_ref::<hyper::Error>()).any(is_not_http) {
            let scheme = if self.has_tls { "" } else { ", https:// if it uses TLS" };
            return anyhow!(
                "{url}: the response is not HTTP/1; --admin must be the admin URL of the server (by default \
                 http://127.0.0.1:8082{scheme}), not its gRPC or Redis address"
            );
        }
        let io = causes().find_map(|cause| cause.downcast_ref::<io::Error>());
        match io.map(io::Error::kind) {
            Some(io::ErrorKind::ConnectionRefused) => anyhow!(
                "{url}: connection refused; is the server running? Set --admin (TOLLGATE_ADMIN_URL) to its admin URL"
            ),
            _ if io.is_some_and(|io| io.to_string().contains("lookup")) => {
                anyhow!("{url}: unknown host; set --admin (TOLLGATE_ADMIN_URL) to the server's admin URL")
            }
            _ => anyhow!("{url}: {error:#}; set --admin (TOLLGATE_ADMIN_URL) to the server's admin URL"),
        }
    }

    /// Returns a rejection as an error message for people. `path` is the path of the request.
    pub(super) fn rejection(&self, status: StatusCode, body: &Value, path: &str) -> String {
        let text = |name: &str| body[name].as_str().filter(|text| !text.is_empty());
        let title = text("title").unwrap_or("request rejected");
        if text("type") == Some(tollgate_http::problem::NO_SUCH_PATH) {
            return format!(
                "{}: this is not the admin address, or an older server; set --admin to the admin URL (by default \
                 http://127.0.0.1:8082)",
                self.url()
            );
        }
        if status == StatusCode::UNAUTHORIZED {
            return match &self.token_source {
                None => format!(
                    "{title}: missing token; set TOLLGATE_TOKEN or --token-file to one that \
                     `tollgate token create` has printed"
                ),
                Some(source) => format!(
                    "{title}: the token of {source} is not valid on {}; it may be expired, revoked or of another \
                     database: set TOLLGATE_TOKEN or --token-file to one that `tollgate token create` has printed",
                    self.url()
                ),
            };
        }
        let detail = text("detail").map(|detail| format!(": {detail}")).unwrap_or_default();
        let field = text("field").map(|field| format!(" (at {})", flag(field))).unwrap_or_default();
        let is_missing = status == StatusCode::NOT_FOUND;
        let list = LISTS.iter().find(|(prefix, _)| is_missing && path.starts_with(prefix));
        let list = list.map(|(_, command)| format!("; see `{command}`")).unwrap_or_default();
        let again =
            if title == "Confirmation required" { "; on the command line, add --confirm" } else { "" };
        format!("{title}{detail}{field}{list}{again}")
    }
}

/// Returns the flag of a field with the field itself, if a flag sets it.
fn flag(field: &str) -> String {
    let name = field.split(['.', '[']).next().unwrap_or(field);
    match FLAGS.iter().find(|(known, _)| *known == name) {
        Some((_, flag)) => format!("{flag}, {field}"),
        None => field.to_owned(),
    }
}

fn explain_tls(error: &rustls::Error) -> String {
    use rustls::Error as Tls;
    match error {
        Tls::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "the server does not use TLS at this address; use http://, or check the port".to_owned()
        }
        Tls::InvalidCertificate(CertificateError::UnknownIssuer) => {
            "the server's certificate is not trusted; pass its CA with --ca FILE".to_owned()
        }
        Tls::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => "the server's certificate is for another name; use that name in --admin".to_owned(),
        Tls::InvalidCertificate(CertificateError::Expired | CertificateError::ExpiredContext { .. }) => {
            "the server's certificate has expired; renew it on the server".to_owned()
        }
        Tls::AlertReceived(AlertDescription::CertificateRequired | AlertDescription::HandshakeFailure) => {
            "the server requires a client certificate; pass --cert and --cert-key".to_owned()
        }
        Tls::AlertReceived(
            AlertDescription::UnknownCA | AlertDescription::BadCertificate | AlertDescription::DecryptError,
        ) => "the server does not trust the client certificate; pass one of its --admin-client-ca".to_owned(),
        other => format!("TLS failed: {other}"),
    }
}

/// Returns whether the peer sent something other than HTTP/1, or closed the connection instead of a response.
fn is_not_http(error: &hyper::Error) -> bool {
    error.is_parse() || error.is_incomplete_message() || error.is_canceled()
}

/// The errors inside an I/O error, which does not count its own content among its sources.
struct Unwrapped<'e>(Option<&'e (dyn Error + 'static)>);

impl<'e> Iterator for Unwrapped<'e> {
    type Item = &'e (dyn Error + 'static);
    fn next(&mut self) -> Option<Self::Item> {
        let error = self.0?;
        self.0 = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref).map(|inner| {
            let inner: &(dyn Error + 'static) = inner;
            inner
        });
        Some(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn peer(token_source: Option<&str>) -> Peer {
        let token_source = token_source.map(str::to_owned);
        Peer { authority: "h:1".to_owned(), has_tls: false, token_source }
    }

    fn rejected(peer: &Peer, status: u16, body: &serde_json::Value, path: &str) -> String {
        let status = StatusCode::from_u16(status).expect("a status");
        peer.rejection(status, body, path)
    }

    /// Users of the command line set flags and variables, not headers and fields.
    #[test]
    fn rejections_name_flags_variables_and_commands() {
        let denied = json!({"title": "Unauthorized", "detail": "send `Authorization: Bearer TOKEN`"});
        let none = rejected(&peer(None), 401, &denied, "/");
        assert!(none.contains("TOLLGATE_TOKEN or --token-file") && !none.contains("Bearer"), "{none}");
        let wrong = rejected(&peer(Some("TOLLGATE_TOKEN")), 401, &denied, "/");
        assert!(wrong.contains("the token of TOLLGATE_TOKEN is not valid on http://h:1"), "{wrong}");
        let field = json!({"title": "Invalid", "detail": "too long", "field": "ttl_seconds"});
        assert_eq!(rejected(&peer(None), 400, &field, "/"), "Invalid: too long (at --for, ttl_seconds)");
        let field = json!({"title": "Invalid", "detail": "bad", "field": "overrides[0].unit"});
        assert_eq!(rejected(&peer(None), 400, &field, "/"), "Invalid: bad (at --limit, overrides[0].unit)");
        let missing = json!({"title": "Not found", "detail": "no revision 9"});
        let missing = rejected(&peer(None), 404, &missing, "/admin/v1/rules/9/rollback");
        assert_eq!(missing, "Not found: no revision 9; see `tollgate rules list`");
        let other = json!({"type": tollgate_http::problem::NO_SUCH_PATH, "title": "Not found"});
        assert!(rejected(&peer(None), 404, &other, "/admin/v1/rules").contains("not the admin address"));
    }

    #[test]
    fn failed_connections_are_explained() {
        let refused = anyhow::Error::from(io::Error::from(io::ErrorKind::ConnectionRefused));
        assert!(peer(None).explain(&refused).to_string().contains("is the server running?"));
        for (tls, advice) in [
            (rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType), "use http://"),
            (rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer), "--ca FILE"),
            (rustls::Error::AlertReceived(AlertDescription::CertificateRequired), "--cert and --cert-key"),
        ] {
            // As tokio-rustls returns it: inside an I/O error.
            let error = anyhow::Error::from(io::Error::other(tls)).context("connecting");
            let shown = peer(None).explain(&error).to_string();
            assert!(shown.contains(advice) && !shown.contains("InvalidC"), "{shown}");
        }
    }
}
