//! The field `request` of `/v1/check` and `/v1/reserve`: the head of the request that a program has received. The caller
//! is identified here, by the settings and rules of the gateway and of forward auth, so that no client has to know them.
//!
//! Each character of a string is one byte of the head, as the libraries of most languages hand out header fields
//! (ISO 8859-1). A client that has the bytes writes them one by one as characters.

use super::body;
use super::check::{MAX_ENTRIES, Text};
use super::identities::Identities;
use super::problem::Problem;
use super::request::split_target;
use http::StatusCode;
use http::header::{HeaderMap, HeaderName, HeaderValue};
use serde::Deserialize;
use std::net::IpAddr;
use std::sync::Arc;
use tollgate_core::Timestamp;
use tollgate_http::identity::{
    CredentialVerifier, IdentityConfig, IdentityConfigError, IdentityResolver, RequestView,
};
use tollgate_rules::Domain;

/// Maximum number of header fields.
const MAX_FIELDS: usize = 4 * MAX_ENTRIES;

/// A request head in JSON.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RequestHead<'a> {
    #[serde(borrow)]
    method: Text<'a>,
    /// The request target: a path with or without a query, or a URL.
    #[serde(borrow)]
    target: Text<'a>,
    /// The address of the peer that sent the request.
    #[serde(borrow)]
    peer: Text<'a>,
    /// Names and values, in message order. A value may be as long as the body: cookies are.
    #[serde(borrow, default)]
    headers: Vec<(Text<'a>, String)>,
}

/// The caller of a request head.
#[derive(Clone, Debug)]
pub struct IdentifiedCaller {
    /// The client's full address.
    pub address: IpAddr,
    /// The attributes that rules see.
    pub attributes: Vec<(String, String)>,
}

/// Identifies the caller of a request head in JSON, as a check in `domain` with these settings would; to explain it. The
/// verifier of a running listener is used if there is one with these settings.
///
/// # Errors
/// A problem with the field, or with the settings.
pub fn identify_head(
    settings: &IdentityConfig,
    verifier: Option<&Arc<CredentialVerifier>>,
    domain: Option<&Domain>,
    head: &[u8],
    now: Timestamp,
) -> Result<IdentifiedCaller, Problem> {
    let head: RequestHead<'_> = body::decode(head)?;
    let invalid = |error: IdentityConfigError| {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "Invalid settings", error.to_string())
    };
    let resolver = Identities::sharing(settings, verifier).and_then(|identities| identities.build(domain));
    head.caller(&*resolver.map_err(invalid)?, now)
}

impl RequestHead<'_> {
    /// Identifies the caller.
    pub(crate) fn caller(
        &self,
        resolver: &IdentityResolver,
        now: Timestamp,
    ) -> Result<IdentifiedCaller, Problem> {
        let peer = self.peer.0.parse().map_err(|_| {
            Problem::bad("invalid address; write the IP address of the peer, without a port")
                .in_field("request.peer")
        })?;
        if http::Method::from_bytes(self.method.0.as_bytes()).is_err() {
            return Err(Problem::bad("invalid method; write one such as GET").in_field("request.method"));
        }
        let target = utf8(&self.target.0).filter(|target| is_target(target)).ok_or_else(|| {
            Problem::bad("invalid target; write the path and query as received, such as /orders?page=2")
                .in_field("request.target")
        })?;
        let headers = self.header_map()?;
        let (authority, path, _) = split_target(&target);
        let view = RequestView { peer, method: &self.method.0, path, authority, headers: &headers };
        let caller = resolver.resolve_in_place(&view, now);
        let caller = caller.map_err(|error| Problem::identity(&error).in_field("request"))?;
        let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
        Ok(IdentifiedCaller {
            address: caller.address,
            attributes: caller.attributes().into_iter().map(owned).collect(),
        })
    }

    fn header_map(&self) -> Result<HeaderMap, Problem> {
        if self.headers.len() > MAX_FIELDS {
            let detail = format!("write at most {MAX_FIELDS} header fields");
            return Err(Problem::bad(detail).in_field("request.headers"));
        }
        let mut headers = HeaderMap::with_capacity(self.headers.len());
        for (at, (Text(name), value)) in self.headers.iter().enumerate() {
            let parsed = HeaderName::from_bytes(name.as_bytes()).ok();
            let bytes = latin1(value).and_then(|bytes| HeaderValue::from_bytes(bytes.trim_ascii()).ok());
            let (Some(name), Some(value)) = (parsed, bytes) else {
                let detail =
                    "invalid header field; write [name, value], each character one byte of the field";
                return Err(Problem::bad(detail).in_field(format!("request.headers[{at}]")));
            };
            headers.append(name, value);
        }
        Ok(headers)
    }
}

/// Returns the bytes that the characters stand for.
fn latin1(text: &str) -> Option<Vec<u8>> {
    text.chars().map(|one| u8::try_from(one).ok()).collect()
}

/// Returns the text that the bytes are; a request target of other bytes is refused by the HTTP server as well.
fn utf8(text: &str) -> Option<String> {
    if text.is_ascii() { Some(text.to_owned()) } else { String::from_utf8(latin1(text)?).ok() }
}

/// Returns whether a text can be a request target: not empty, without spaces and control characters.
fn is_target(text: &str) -> bool {
    !text.is_empty() && !text.chars().any(|one| one.is_ascii_whitespace() || one.is_control())
}
